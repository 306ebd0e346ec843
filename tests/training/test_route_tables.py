"""Routes survive Parquet exactly, and a pandas user reads them without us."""

import contextlib
import json
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.tables import MARK, read_table, seal_of, write_table
from moe_rl.training import route_tables
from moe_rl.training.route_tables import read_route_table, write_route_changes, write_route_table


def routes_of(num_experts, tokens=True):
    torch.manual_seed(0)
    ids = torch.rand(2, 5, 3, num_experts).topk(4).indices
    ids[0, 3] = -1
    given = torch.arange(10).reshape(2, 5).int() if tokens else None
    return RoutedExperts(ids, ("a.gate", "b.gate", "c.gate"), num_experts, tokens=given, meta={"model": "m"})


def sets(routes):
    return RoutedExperts(routes.ids.sort(-1).values, routes.sites, routes.num_experts, tokens=routes.tokens)


def moved(routes, share=0.4, seed=1):
    """Other routes of the same tokens: some rows exchange slots, some lose their route or gain one."""
    g = torch.Generator().manual_seed(seed)
    ids = routes.ids
    other = torch.rand(*ids.shape[:3], max(8, ids.shape[3]), generator=g).topk(ids.shape[3]).indices
    ids = torch.where((torch.rand(ids.shape[:3], generator=g) < share)[..., None], other, ids)
    ids[1, 2, 0], ids[0, 3, 1] = -1, other[0, 3, 1]
    return RoutedExperts(ids, routes.sites, routes.num_experts, tokens=routes.tokens, meta=routes.meta)


@pytest.mark.parametrize("num_experts", [8, 255, 256, 300])
@pytest.mark.parametrize("tokens", [True, False])
def test_what_is_written_is_read(tmp_path, num_experts, tokens):
    routes = routes_of(num_experts, tokens)
    write_route_table(tmp_path / "r.parquet", routes)
    read = read_route_table(tmp_path / "r.parquet")
    assert read.equal(sets(routes)) and read.num_experts == num_experts
    assert (read.tokens is None) == (not tokens)
    assert read.meta["model"] == "m"
    new = moved(routes)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "r.parquet")
    assert read_route_table(tmp_path / "new.parquet").equal(sets(new))
    write_route_changes(tmp_path / "same.parquet", routes, tmp_path / "r.parquet", routes)
    assert read_route_table(tmp_path / "same.parquet").equal(sets(routes))
    assert pq.read_metadata(tmp_path / "same.parquet").num_rows == 0


@pytest.mark.parametrize("group_tokens", [1, 10, 12, 8192])
def test_some_sequences_and_sites_are_read_from_their_row_groups(tmp_path, monkeypatch, group_tokens):
    monkeypatch.setattr(route_tables, "GROUP_TOKENS", group_tokens)
    ids = torch.rand(7, 5, 3, 300, generator=torch.Generator().manual_seed(2)).topk(4).indices
    old = RoutedExperts(ids, ("a.gate", "b.gate", "c.gate"), 300, tokens=torch.arange(35).view(7, 5))
    new = moved(old)
    write_route_table(tmp_path / "old.parquet", old)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "old.parquet")
    for path, routes in ((tmp_path / "old.parquet", old), (tmp_path / "new.parquet", new)):
        for rows in ([0], [6, 2], [3, 3, 4], slice(2, 5), [], None):
            for sites in (None, ["c.gate", "a.*"], 1):
                read = read_route_table(path, rows, sites)
                expected = sets(routes) if sites is None else sets(routes).select(sites)
                assert read.equal(expected if rows is None else expected.rows(rows))
        for number in (7, -1):
            with pytest.raises(RoutingError, match=f"no sequence {number} among the 7"):
                read_route_table(path, [0, number])
        for mask in ([True, False], np.array([True, False]), torch.tensor([True, False])):
            with pytest.raises(RoutingError, match="expected the numbers of sequences, got a mask"):
                read_route_table(path, mask)
        with pytest.raises(RoutingError, match=r"old.parquet|new.parquet"):
            read_route_table(path, None, ["d.gate"])


def test_a_large_group_is_one_row_group_and_those_cut_by_earlier_versions_are_read(tmp_path, monkeypatch):
    """Of groups that pyarrow had cut, a part of the sequences was read with a part of their exchanges."""
    write_table(tmp_path / "large.parquet", {"row": np.zeros(2**20 + 1, np.int8)})
    assert pq.ParquetFile(tmp_path / "large.parquet").num_row_groups == 1

    def cut(path, groups, metadata, **options):
        tables = [pa.table(group) for group in groups]
        halves = (part for t in tables for part in (t[: len(t) // 2], t[len(t) // 2 :]))
        write_table(path, (dict(zip(t.column_names, t.columns, strict=True)) for t in halves), metadata, **options)

    monkeypatch.setattr(route_tables, "GROUP_TOKENS", 5)
    monkeypatch.setattr(route_tables, "write_table", cut)
    old = routes_of(8)
    new = moved(old)
    write_route_table(tmp_path / "old.parquet", old)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "old.parquet")
    for row in (0, 1):
        assert read_route_table(tmp_path / "new.parquet", [row], "b.gate").equal(sets(new).select("b.gate").rows(row))


def test_routes_whose_tokens_are_all_unknown_are_those_of_unknown_tokens(tmp_path):
    old = routes_of(8, tokens=False)
    write_route_table(tmp_path / "old.parquet", old)
    new = moved(old).with_ids(old.ids, torch.full((2, 5), -1))
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "old.parquet")
    assert read_route_table(tmp_path / "new.parquet").equal(sets(old))


def test_the_sites_with_few_experts_are_read_as_routes_like_any_others(tmp_path):
    """As `select` packs them: a part that kept the file's dtype was saved and could not be loaded."""
    routes = RoutedExperts([[[[1, 2], [4, 300]], [[-1, -1], [5, 6]]]], ("few", "many"), [5, 512])
    new = routes.with_ids(torch.tensor([[[[1, 3], [6, 300]], [[0, 4], [5, 301]]]]))
    write_route_table(tmp_path / "r.parquet", routes)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "r.parquet")
    for name, whole in (("r", routes), ("new", new)):
        for site in whole.sites:
            part = read_route_table(tmp_path / f"{name}.parquet", sites=site)
            part.save(tmp_path / "part.safetensors")
            assert RoutedExperts.load(tmp_path / "part.safetensors").equal(whole.select(site))


def test_a_table_that_names_an_expert_twice_comes_back(tmp_path):
    """At sites whose experts are a table over token ids."""
    rows = [[1, 1, 2, 5], [0, 3, 3, 3], [7, 7, 7, 7], [0, 1, 2, 3]]
    meta = {"hash_routed": ["a.gate"]}
    old, new = (
        RoutedExperts(torch.tensor(x)[None, :, None], ("a.gate",), 8, meta=meta)
        for x in (rows, [[1, 2, 2, 6], [0, 3, 3, 3], [7, 7, 7, 6], [0, 1, 2, 2]])
    )
    write_route_table(tmp_path / "old.parquet", old)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "old.parquet")
    assert torch.equal(read_route_table(tmp_path / "old.parquet").ids, old.ids)
    assert torch.equal(read_route_table(tmp_path / "new.parquet").ids, new.ids.sort(-1).values)


def test_changes_need_the_file_that_they_are_since(tmp_path):
    old, path, since = routes_of(8), tmp_path / "new.parquet", tmp_path / "old.parquet"
    with pytest.raises(RoutingError, match=r"old\.parquet: cannot be read"):
        write_route_changes(path, old, since)
    write_route_table(since, old)
    write_route_changes(path, moved(old), since)
    with pytest.raises(RoutingError, match="expected a file in the folder"):
        write_route_changes(tmp_path / "sub" / "new.parquet", old, since)
    with pytest.raises(RoutingError, match="no file of routes"):
        write_route_changes(tmp_path / "third.parquet", old, path)
    with pytest.raises(RoutingError, match="cannot be those of"):
        write_route_changes(path, routes_of(300), since)
    others = RoutedExperts(old.ids, old.sites, 8, tokens=old.tokens + 1)
    with pytest.raises(RoutingError, match="other tokens"):
        write_route_changes(path, others, since)
    write_route_table(since, moved(old, seed=5))
    with pytest.raises(RoutingError, match=r"which is another file now"):
        read_route_table(path)
    since.unlink()
    with pytest.raises(RoutingError, match=r"old\.parquet: cannot be read"):
        read_route_table(path)


def test_changes_since_a_file_of_another_folder_are_not_followed_there(tmp_path):
    """Whatever a file says: it may have come from somebody else."""
    write_route_table(tmp_path / "old.parquet", routes_of(8))
    header = {"format": "moe_rl.route_changes", "shape": [2, 5, 3, 4], "dtype": "uint8", "num_experts": 8, "meta": {}}
    header |= {"sites": ["a.gate", "b.gate", "c.gate"], "group_sequences": 1638, "since": "../old.parquet"}
    path = tmp_path / "sub" / "new.parquet"
    path.parent.mkdir()
    write_table(path, {"group": [0]}, {**header, "since_sha256": seal_of(tmp_path / "old.parquet")})
    with pytest.raises(
        RoutingError, match=r"changes since \.\./old\.parquet: expected a file in the folder of .*sub/new"
    ):
        read_route_table(path)


def test_pandas_reads_routes_and_changes_without_us(tmp_path):
    """As docs/run_folder.md says."""
    old = routes_of(8)
    write_route_table(tmp_path / "r.parquet", old)
    frame = pd.read_parquet(tmp_path / "r.parquet").set_index(["sequence", "position"])
    assert frame.loc[(0, 3), "a.gate"] is None, "no route"
    cells = frame["b.gate"].dropna()
    gaps = np.frombuffer(b"".join(cells), np.uint8).reshape(len(cells), -1)
    ids = gaps.cumsum(1) + np.arange(gaps.shape[1])
    known = ~old.live[:, :, 1].flatten()
    assert ids.tolist() == old.ids[:, :, 1].flatten(0, 1)[known].sort(-1).values.tolist()

    new = moved(old, share=0.6)
    write_route_changes(tmp_path / "new.parquet", new, tmp_path / "r.parquet")
    changes = pd.read_parquet(tmp_path / "new.parquet")
    token = changes.groupby(["group", "site"], observed=True).skip.cumsum()
    found = set(zip(token, changes.site, changes.expert.where(changes.expert < 255, -1), strict=True))
    expected = set()
    for index, (a, b) in enumerate(zip(old.ids.flatten(0, 2).tolist(), new.ids.flatten(0, 2).tolist(), strict=True)):
        expected |= {(index // 3, old.sites[index % 3], expert) for expert in set(b) - set(a)}
    assert found == expected


def test_tables_of_bytes_are_still_read(tmp_path):
    """As earlier versions wrote them."""
    routes = routes_of(300)
    packed = routes.packed.numpy()
    columns = {"token": routes.tokens.reshape(-1).numpy()}
    for index, site in enumerate(routes.sites):
        cells = [row.tobytes() for row in np.ascontiguousarray(packed[:, :, index]).reshape(10, 4)]
        columns[site] = pa.array(cells, pa.binary(8))
    header = {"format": "moe_rl.route_table", "shape": [2, 5, 3, 4], "dtype": "uint16", "num_experts": 300}
    write_table(tmp_path / "r.parquet", columns, {**header, "sites": routes.sites, "meta": {}})
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


@pytest.mark.parametrize("part", [False, True])
def test_no_flipped_bit_passes_for_other_routes(tmp_path, part):
    """Anywhere in the file: pages, headers, footer, checksums. Of a part of a file, what was read is right."""
    path, routes = tmp_path / "r.parquet", routes_of(8)
    write_route_table(path, routes)
    whole, rng = path.read_bytes(), random.Random(0)
    for place in [*rng.sample(range(8 * len(whole)), 200), 8 * whole.rindex(MARK) + 3, 8 * len(whole) - 60]:
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        if part:
            with contextlib.suppress(RoutingError):
                assert read_route_table(path, [1], ["b.gate"]).equal(sets(routes).rows(1).select("b.gate"))
        else:
            with pytest.raises(RoutingError, match=r"r\.parquet"):
                read_route_table(path)


def test_lists_of_earlier_versions_are_still_read(tmp_path):
    routes = routes_of(300)
    ids, live = routes.ids.flatten(0, 1).tolist(), routes.live.flatten(0, 1).tolist()
    columns = {"token": routes.tokens.reshape(-1).numpy()}
    for index, site in enumerate(routes.sites):
        cells = [None if gone[index] else row[index] for row, gone in zip(ids, live, strict=True)]
        columns[site] = pa.array(cells, pa.list_(pa.uint16()))
    header = {"format": "moe_rl.route_table", "shape": [2, 5, 3, 4], "dtype": "uint16", "num_experts": 300}
    write_table(tmp_path / "r.parquet", columns, {**header, "sites": routes.sites, "meta": {}})
    assert read_route_table(tmp_path / "r.parquet").equal(routes)
    part = read_route_table(tmp_path / "r.parquet", [1], ["b.gate"])
    assert part.equal(routes.rows(1).select("b.gate"))


def test_files_without_a_checksum_are_read_as_they_are(tmp_path):
    """Of pandas, and of earlier versions; where their parts do not fit, the file is named."""
    path, frame = tmp_path / "r.parquet", pd.DataFrame({"seq": [1, 2]})
    frame.to_parquet(path)
    assert read_table(path).to_pandas().equals(frame)
    header = {"format": "moe_rl.route_table", "shape": [1, 2, 1, 9], "dtype": "uint8", "num_experts": 8}
    table = pa.table({"token": [1, 2], "a.gate": [b"\1\2", b"\3\4"]})
    header |= {"sites": ["a.gate"], "meta": {}}
    pq.write_table(table.replace_schema_metadata({k: json.dumps(v) for k, v in header.items()}), path)
    with pytest.raises(RoutingError, match=r"r\.parquet is damaged: its columns"):
        read_route_table(path)
