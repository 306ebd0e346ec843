"""Routes survive Parquet exactly, and a pandas user reads them without us."""

import numpy as np
import pandas as pd
import pytest
import torch

from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.training.route_tables import read_route_table, write_route_table
from moe_rl.training.runlog import write_table


def routes_of(num_experts, tokens=True):
    torch.manual_seed(0)
    ids = torch.rand(2, 5, 3, num_experts).topk(4).indices
    ids[0, 3] = -1
    given = torch.arange(10).reshape(2, 5).int() if tokens else None
    return RoutedExperts(ids, ("a.gate", "b.gate", "c.gate"), num_experts, tokens=given, meta={"model": "m"})


@pytest.mark.parametrize("num_experts", [8, 255, 256, 300])
@pytest.mark.parametrize("tokens", [True, False])
def test_what_is_written_is_read(tmp_path, num_experts, tokens):
    routes = routes_of(num_experts, tokens)
    write_route_table(tmp_path / "r.parquet", routes)
    read = read_route_table(tmp_path / "r.parquet")
    assert torch.equal(read.ids, routes.ids) and read.sites == routes.sites and read.num_experts == num_experts
    assert (read.tokens is None) == (not tokens) and (not tokens or torch.equal(read.tokens, routes.tokens))
    assert read.meta["model"] == "m"


def test_pandas_reads_a_cell(tmp_path):
    routes = routes_of(300)
    write_route_table(tmp_path / "r.parquet", routes)
    frame = pd.read_parquet(tmp_path / "r.parquet").set_index(["sequence", "position"])
    cell = np.frombuffer(frame.loc[(1, 2), "b.gate"], dtype="uint16")
    assert cell.tolist() == routes.ids[1, 2, 1].tolist()
    assert np.frombuffer(frame.loc[(0, 3), "a.gate"], dtype="uint16").tolist() == [65535] * 4


def test_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "r.parquet"
    write_route_table(path, routes_of(8))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RoutingError, match=r"r\.parquet: not a readable Parquet file"):
        read_route_table(path)
    write_table(path, {"seq": [1]})
    with pytest.raises(RoutingError, match=r"r\.parquet: a Parquet file, but not of routes"):
        read_route_table(path)
