"""Routes as Parquet files, as run folders keep them: sets of experts, in little more than the least possible space.

There are two kinds of files. docs/run_folder.md describes their columns and how to read them with pandas alone.

- Routes: one row per token, one column per routing site, whose cells are the gaps of the token's ascending expert ids
  (`moe_rl.routing.codec`), null where there is no route.
- Changes since the routes of another file in the same folder: one row per exchanged expert. The file contains the name
  of the other file and its checksum.

Row groups hold whole sequences, so that a part of the sequences or sites can be read without the rest of the file. The
slots of a token are read back in ascending order of experts; use `RoutedExperts.save` for routes that must be replayed
bit for bit. Files of earlier versions, whose cells are lists or packed ids, can be read.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.routing.codec import ascending, check_ascending, exchanges, gaps, with_exchanges, without_gaps
from moe_rl.routing.packing import repacked
from moe_rl.routing.sites import match_sites
from moe_rl.tables import DamagedTableError, header_of, open_table, read_table, seal_of, write_table

EARLIER, ROUTES, CHANGES = "moe_rl.route_table", "moe_rl.route_table.2", "moe_rl.route_changes"
SEQUENCE, POSITION, TOKEN = "sequence", "position", "token"
GROUP, SITE, SKIP, SLOT, EXPERT = "group", "site", "skip", "slot", "expert"
GROUP_TOKENS = 8192
_PLAIN: dict[str, Any] = {"write_statistics": False, "write_page_checksum": True}
_OFTEN = 1.0  # exchanges per row above which `skip` has so few values that a dictionary takes least space


def write_route_table(path: Path, routes: RoutedExperts) -> None:
    """Write the routes of B*T tokens to a file: sequence, position, token (-1 if unknown) and a column per site."""
    step, parts, header = _in_groups(routes)
    wide = list(routes.sites) if _cell_dtype(routes.num_experts) == np.uint16 else []
    write_table(
        path,
        (_route_columns(part, index * step) for index, part in enumerate(parts)),
        {"format": ROUTES, **header},
        use_dictionary=False,
        use_byte_stream_split=[TOKEN, *wide],
        column_encoding=dict.fromkeys((SEQUENCE, POSITION), "DELTA_BINARY_PACKED"),
        **_PLAIN,
    )


def write_route_changes(path: Path, routes: RoutedExperts, since: Path, old: RoutedExperts | None = None) -> None:
    """Write the changes of routes since those of another file: one row per exchanged expert.

    Args:
        since: a file of `write_route_table` in the folder of `path`, of the same tokens, sites and experts.
        old: the routes that were written to `since`, if they are at hand; None: `since` is read.

    Raises:
        RoutingError: `since` cannot be read, is in another folder, or has other tokens, sites, experts or shape.
    """
    if since.parent != path.parent:
        raise RoutingError(f"changes since {since}: expected a file in the folder of {path}")
    old = _base(path, since.name, None) if old is None else old
    if (old.sites, old.shape, old.num_experts) != (routes.sites, routes.shape, routes.num_experts):
        raise RoutingError(f"{since} holds {old}, and changes since then cannot be those of {routes}")
    if routes.tokens is not None and not torch.equal(_tokens(old), _tokens(routes)):
        raise RoutingError(f"{since}: its routes are of other tokens than {routes}")
    step, parts, header = _in_groups(routes)
    groups = [_change_columns(old.rows(slice(i * step, (i + 1) * step)), part, i) for i, part in enumerate(parts)]
    often = sum(len(group[SLOT]) for group in groups) > _OFTEN * old.shape[:3].numel()
    write_table(
        path,
        groups,
        {"format": CHANGES, **header, "since": since.name, "since_sha256": seal_of(since)},
        use_dictionary=[GROUP, SITE, SLOT, *([SKIP] if often else [])],
        use_byte_stream_split=[EXPERT, *([] if often else [SKIP])],
        **_PLAIN,
    )


def _in_groups(routes: RoutedExperts) -> tuple[int, list[RoutedExperts], dict[str, Any]]:
    """Return the number of sequences per row group, the routes of each row group, and the header of the file."""
    B, T = routes.shape[:2]
    step = max(1, GROUP_TOKENS // max(1, T))
    header = {
        "shape": list(routes.shape),
        "dtype": str(routes.packed.dtype).removeprefix("torch."),
        "num_experts": routes.num_experts,
        "sites": routes.sites,
        "meta": routes.meta,
        "group_sequences": step,
    }
    return step, [routes.rows(slice(start, start + step)) for start in range(0, B, step)] or [routes], header


def read_route_table(
    path: str | Path,
    sequences: Iterable[int] | slice | None = None,
    sites: str | int | Iterable[str | int] | None = None,
) -> RoutedExperts:
    """Read RoutedExperts from a file of routes or of changes; the slots are in ascending order of experts.

    A file of an earlier version gives them in the order in which they were written.

    Args:
        sequences: which rows of B, by number; None: all. Only the row groups that hold them are read and checked.
        sites: names, shell patterns or numbers; None: all.

    Raises:
        RoutingError: the file is damaged or not one of routes; it holds changes since a file that is missing or was
            replaced; it does not have these sequences or sites.
    """
    path = Path(path)
    try:
        whole = sequences is None and sites is None
        table = read_table(path) if whole else open_table(path)
        header = header_of(table)
    except DamagedTableError as error:
        raise RoutingError(str(error)) from error
    kind = header.get("format")
    if kind not in (EARLIER, ROUTES, CHANGES):
        raise RoutingError(f"{path}: a Parquet file, but not of routes; tokens/*.parquet has the tokens")
    try:
        if kind == EARLIER or not (whole or _one_row_group_each(table, header)):
            routes = _earlier(table if whole else table.read(), header) if kind == EARLIER else read_route_table(path)
            routes = routes if sites is None else routes.select(sites)
            return routes if sequences is None else routes.rows(_numbers(sequences, routes.shape[0]))
        wanted = _numbers(sequences, header["shape"][0])
        chosen = range(len(header["sites"])) if sites is None else match_sites(header["sites"], sites)
        return (_routes if kind == ROUTES else _changed)(path, table, header, wanted, list(chosen))
    except RoutingError as error:
        raise RoutingError(f"{path}: {error}") from error
    except Exception as error:  # pyarrow raises errors of many kinds for a damaged file
        raise RoutingError(f"{path} is damaged: its columns and their description do not fit ({error})") from error


def _numbers(sequences: Iterable[int] | slice | None, B: int) -> list[int]:
    """Return the numbers of the chosen sequences among B. Raises RoutingError for one that is not there, or a mask."""
    if sequences is None or isinstance(sequences, slice):
        return list(range(B)[sequences or slice(None)])
    given = list(sequences)
    if any(str(getattr(one, "dtype", type(one).__name__)).endswith("bool") for one in given):
        raise RoutingError("sequences: expected the numbers of sequences, got a mask; give its nonzero() places")
    wanted = [int(number) for number in given]
    if missing := [number for number in wanted if not 0 <= number < B]:
        raise RoutingError(f"no sequence {missing[0]} among the {B} of this file")
    return wanted


def _cell_dtype(num_experts: Any) -> type[np.unsignedinteger[Any]]:
    """Return the smallest of uint8 and uint16 that holds the expert ids of all sites."""
    return np.uint8 if np.max(num_experts) <= 256 else np.uint16


# -- routes ------------------------------------------------------------------------------------------------------------


def _tokens(routes: RoutedExperts) -> torch.Tensor:
    """Return int32 token ids [B,T] on the CPU, -1 where unknown."""
    return torch.full(routes.shape[:2], -1, dtype=torch.int32) if routes.tokens is None else routes.tokens.cpu()


def _route_columns(routes: RoutedExperts, first: int) -> dict[str, Any]:
    """Return the columns of one row group of routes, whose sequences are numbered from `first` on."""
    import pyarrow as pa

    packed, live = routes.packed.cpu().numpy(), routes.live.cpu().numpy()
    B, T, _, K = packed.shape
    columns: dict[str, Any] = {
        SEQUENCE: np.repeat(np.arange(first, first + B, dtype=np.int32), T),
        POSITION: np.tile(np.arange(T, dtype=np.int32), B),
        TOKEN: _tokens(routes).reshape(-1).numpy(),
    }
    dtype = np.dtype(_cell_dtype(routes.num_experts))
    for index, site in enumerate(routes.sites):
        cells = gaps(packed[:, :, index].reshape(-1, K)).astype(dtype)
        known = ~live[:, :, index].reshape(-1)
        valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
        columns[site] = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(K * dtype.itemsize), len(cells), [valid, pa.py_buffer(cells)]
        )
    return columns


def _routes(path: Path, source: Any, header: dict[str, Any], wanted: list[int], chosen: list[int]) -> RoutedExperts:
    """Return the routes of a file of routes, for the wanted sequences and the chosen sites."""
    (_, T, _, K), names = header["shape"], [header["sites"][index] for index in chosen]
    groups, held = _row_groups_of(header, wanted)
    table = _part(source, groups, [TOKEN, *names])
    packed = np.empty((len(held), T, len(names), K), np.dtype(header["dtype"]))
    for index, name in enumerate(names):
        packed[:, :, index] = _cells(table[name], K, header).reshape(len(held), T, K)
    tokens = torch.from_numpy(table[TOKEN].to_numpy().reshape(len(held), T).copy())
    kept = [held.index(number) for number in wanted]
    return _checked(packed[kept], names, chosen, header, None if bool((tokens == -1).all()) else tokens[kept])


def _one_row_group_each(file: Any, header: dict[str, Any]) -> bool:
    """Return whether an open file has one row group per group of sequences. Earlier versions cut groups of more than a
    million rows into several."""
    return file.num_row_groups == max(1, -(-header["shape"][0] // header["group_sequences"]))


def _row_groups_of(header: dict[str, Any], wanted: list[int]) -> tuple[list[int], list[int]]:
    """Return the row groups that hold the wanted sequences, and all sequences of these row groups."""
    step, B = header["group_sequences"], header["shape"][0]
    groups = sorted({number // step for number in wanted})
    return groups, [number for group in groups for number in range(B)[group * step : (group + 1) * step]]


def _part(source: Any, groups: list[int], columns: list[str] | None = None) -> Any:
    """Return row groups of an open file; a `source` that is a table already is returned unchanged."""
    return source.read_row_groups(groups, columns=columns) if hasattr(source, "read_row_groups") else source


def _cells(cells: Any, K: int, header: dict[str, Any]) -> np.ndarray:
    """Return the ascending packed ids [rows, K] of a column of gaps; no route is the dtype's largest number."""
    dtype, packed = np.dtype(_cell_dtype(header["num_experts"])), np.dtype(header["dtype"])
    found = []
    for chunk in cells.chunks:
        if chunk.type.byte_width != K * dtype.itemsize:
            raise ValueError(f"cells of {chunk.type} instead of {K} gaps")
        raw = np.frombuffer(chunk.buffers()[1], dtype, (chunk.offset + len(chunk)) * K).reshape(-1, K)[chunk.offset :]
        ids = without_gaps(raw).astype(packed)
        if chunk.null_count:
            ids[chunk.is_null().to_numpy(zero_copy_only=False)] = np.iinfo(packed).max
        found.append(ids)
    return np.concatenate(found) if found else np.empty((0, K), packed)


def _checked(
    packed: np.ndarray, names: Sequence[str], chosen: list[int], header: dict[str, Any], tokens: torch.Tensor | None
) -> RoutedExperts:
    """Return RoutedExperts of ascending ids [B,T,L,K], checked as by `RoutedExperts` but faster."""
    experts = header["num_experts"]
    each = [experts[index] for index in chosen] if isinstance(experts, list) else [experts] * len(chosen)
    repeats = set((header["meta"] or {}).get("hash_routed", ()))
    for index, (name, count) in enumerate(zip(names, each, strict=True)):
        check_ascending(packed[:, :, index].reshape(-1, packed.shape[-1]), count, name in repeats)
    ids = repacked(torch.from_numpy(packed), max(each))  # maybe narrower: not all sites are chosen
    return RoutedExperts._trusted(ids, tuple(names), each, tokens=tokens, meta=header["meta"] or None)


# -- changes -----------------------------------------------------------------------------------------------------------


def _change_columns(old: RoutedExperts, new: RoutedExperts, group: int) -> dict[str, Any]:
    """Return the columns of one row group of changes: exchanges in the order of sites, tokens and slots."""
    import pyarrow as pa

    B, T, _, K = old.shape
    a, b = (ascending(x.packed.cpu().numpy().transpose(2, 0, 1, 3).reshape(-1, K)) for x in (old, new))
    row, slot, expert = exchanges(a, b)
    site = (row // (B * T)).astype(np.int16)
    begins = np.append(True, site[1:] != site[:-1])[: len(site)]
    row -= site * np.int64(B * T)
    skip = np.where(begins, row, np.diff(row, prepend=0)).astype(np.int32)
    names = pa.DictionaryArray.from_arrays(pa.array(site), pa.array(list(old.sites)))
    return {GROUP: np.full(len(row), group, np.int32), SITE: names, SKIP: skip, SLOT: slot, EXPERT: expert}


def _changed(path: Path, source: Any, header: dict[str, Any], wanted: list[int], chosen: list[int]) -> RoutedExperts:
    """Return the routes of a file of changes: those of the file that it refers to, with the exchanges applied."""
    import pyarrow as pa
    from pyarrow.compute import index_in

    (_, T, _, K), names = header["shape"], [header["sites"][index] for index in chosen]
    groups, held = _row_groups_of(header, wanted)
    old = _base(path, header["since"], header["since_sha256"], held, names)
    table = _part(source, groups)
    skip, slot, expert, group = (table[name].to_numpy() for name in (SKIP, SLOT, EXPERT, GROUP))
    place = index_in(table[SITE], value_set=pa.array(header["sites"])).to_numpy().astype(np.int64)

    begins = np.append(True, (place[1:] != place[:-1]) | (group[1:] != group[:-1]))[: len(skip)]
    total = np.cumsum(skip, dtype=np.int64)
    row = total - (total - skip)[np.maximum.accumulate(np.where(begins, np.arange(len(skip)), 0))]
    row += np.searchsorted(groups, group) * header["group_sequences"] * T
    if len(row) and (not np.isin(group, groups).all() or skip.min() < 0 or row.max() >= len(held) * T):
        raise ValueError("exchanges at tokens that are not there")
    where = np.full(len(header["sites"]), -1)
    where[chosen] = np.arange(len(chosen))
    mine = np.flatnonzero(where[place] >= 0)
    before = repacked(old.packed, int(np.max(header["num_experts"]))).numpy()  # wide enough for the exchanges
    rows = np.ascontiguousarray(before.transpose(2, 0, 1, 3)).reshape(-1, K)
    rows = with_exchanges(
        rows, (where[place] * (len(held) * T) + row)[mine], slot[mine], expert[mine].astype(rows.dtype)
    )
    packed = rows.reshape(len(chosen), len(held), T, K).transpose(1, 2, 0, 3)
    kept = [held.index(number) for number in wanted]
    return _checked(packed[kept], names, chosen, header, None if old.tokens is None else old.tokens[kept])


def _base(
    path: Path, name: str, sha256: str | None, sequences: list[int] | None = None, sites: list[str] | None = None
) -> RoutedExperts:
    """Return the routes since which `path` holds changes. Raises RoutingError if their file has another checksum."""
    base = path.parent / name
    if Path(name).name != name:
        raise RoutingError(f"changes since {name}: expected a file in the folder of {path}")
    try:
        if sha256 is not None and seal_of(base) != sha256:
            raise RoutingError(f"holds changes since {base}, which is another file now; were its runs mixed?")
        kind = header_of(open_table(base)).get("format")
    except DamagedTableError as error:
        raise RoutingError(str(error)) from error
    if kind != ROUTES:
        raise RoutingError(f"{base} is no file of routes, or of an earlier version: changes since then cannot be kept")
    return read_route_table(base, sequences, sites)


# -- files of earlier versions -----------------------------------------------------------------------------------------


def _earlier(table: Any, header: dict[str, Any]) -> RoutedExperts:
    """Return the routes of a file of an earlier version, whose cells are lists of ids or bytes of packed ids.

    The slots keep the order in which they were written."""
    B, T, _, K = header["shape"]
    dtype, sites, experts = np.dtype(header["dtype"]), header["sites"], header["num_experts"]
    ids = np.empty((B, T, len(sites), K), dtype=np.int64)
    for index, site in enumerate(sites):
        ids[:, :, index] = _listed(table[site].combine_chunks(), B * T, K, dtype).reshape(B, T, K)
    tokens = torch.from_numpy(table[TOKEN].to_numpy().reshape(B, T).copy())
    return RoutedExperts(
        torch.from_numpy(ids),
        tuple(sites),
        experts if isinstance(experts, int) else tuple(experts),
        tokens=None if bool((tokens == -1).all()) else tokens,
        meta=header["meta"] or None,
    )


def _listed(cells: Any, rows: int, K: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the ids [rows, K] of a column of an earlier version, -1 where there is no route."""
    import pyarrow as pa

    if len(cells) != rows:
        raise ValueError(f"{len(cells)} rows instead of {rows}")
    if pa.types.is_fixed_size_binary(cells.type):
        raw = np.frombuffer(cells.buffers()[1], dtype=dtype, count=rows * K)
        return np.where(raw == np.iinfo(dtype).max, -1, raw.astype(np.int64)).reshape(rows, K)
    if not pa.types.is_list(cells.type):
        raise ValueError(f"cells of {cells.type} instead of lists of ids")
    known = cells.is_valid().to_numpy(zero_copy_only=False)
    if set(cells.value_lengths().drop_null().unique().to_pylist()) - {K}:
        raise ValueError(f"cells that do not hold {K} ids")
    found = np.full((rows, K), -1, np.int64)
    found[known] = cells.flatten().to_numpy().reshape(-1, K)
    return found
