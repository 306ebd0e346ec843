"""Routes survive Parquet exactly, and a pandas user reads them without us."""

import json
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.tables import MARK, read_table, write_table
from moe_rl.training.route_tables import read_route_table, write_route_table


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


def test_pandas_reads_cells_as_lists(tmp_path):
    routes = routes_of(300)
    write_route_table(tmp_path / "r.parquet", routes)
    frame = pd.read_parquet(tmp_path / "r.parquet").set_index(["sequence", "position"])
    assert list(frame.loc[(1, 2), "b.gate"]) == routes.ids[1, 2, 1].tolist()
    assert frame.loc[(0, 3), "a.gate"] is None, "no route"
    assert frame["c.gate"].dropna().explode().value_counts().sum() == 9 * 4


def test_tables_of_bytes_are_still_read(tmp_path):
    """As earlier versions wrote them."""
    routes = routes_of(300)
    packed = routes.packed.numpy()
    columns = {"token": routes.tokens.reshape(-1).numpy()}
    for index, site in enumerate(routes.sites):
        cells = [row.tobytes() for row in np.ascontiguousarray(packed[:, :, index]).reshape(10, 4)]
        columns[site] = pa.array(cells, pa.binary(8))
    facts = {"format": "moe_rl.route_table", "shape": [2, 5, 3, 4], "dtype": "uint16", "num_experts": 300}
    write_table(tmp_path / "r.parquet", columns, {**facts, "sites": routes.sites, "meta": {}})
    assert torch.equal(read_route_table(tmp_path / "r.parquet").ids, routes.ids)


def test_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "r.parquet"
    write_route_table(path, routes_of(8))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RoutingError, match=r"r\.parquet is damaged"):
        read_route_table(path)
    write_table(path, {"seq": [1]})
    with pytest.raises(RoutingError, match=r"r\.parquet: a Parquet file, but not of routes"):
        read_route_table(path)


def test_no_flipped_bit_passes_for_other_routes(tmp_path):
    """Anywhere in the file: pages, headers, footer, checksum."""
    path = tmp_path / "r.parquet"
    write_route_table(path, routes_of(8))
    whole, rng = path.read_bytes(), random.Random(0)
    for place in [*rng.sample(range(8 * len(whole)), 200), 8 * whole.rindex(MARK) + 3, 8 * len(whole) - 60]:
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(RoutingError, match=r"r\.parquet"):
            read_route_table(path)


def test_files_without_a_checksum_are_read_as_they_are(tmp_path):
    """Of pandas, and of earlier versions; where their parts do not fit, the file is named."""
    path, frame = tmp_path / "r.parquet", pd.DataFrame({"seq": [1, 2]})
    frame.to_parquet(path)
    assert read_table(path).to_pandas().equals(frame)
    facts = {"format": "moe_rl.route_table", "shape": [1, 2, 1, 9], "dtype": "uint8", "num_experts": 8}
    table = pa.table({"token": [1, 2], "a.gate": [b"\1\2", b"\3\4"]})
    facts |= {"sites": ["a.gate"], "meta": {}}
    pq.write_table(table.replace_schema_metadata({k: json.dumps(v) for k, v in facts.items()}), path)
    with pytest.raises(RoutingError, match=r"r\.parquet is damaged: its columns"):
        read_route_table(path)
