"""Routes as Parquet, the form in which run folders keep them: one row per token, one column of lists per routing site.

A site's cell is the list of the token's K expert ids, null where there is no route, so that pandas, polars and DuckDB
read it as it is; `read_route_table` reads a file back whole. Earlier files, whose cells are bytes, are read.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.tables import DamagedTableError, facts_of, read_table, write_table

FORMAT = "moe_rl.route_table"
SEQUENCE, POSITION, TOKEN = "sequence", "position", "token"


def write_route_table(path: Path, routes: RoutedExperts) -> None:
    """Write `routes` `[B,T,L,K]` as B*T rows: sequence, position, token (-1 where unknown) and a column per site."""
    import pyarrow as pa

    packed, live = routes.packed.cpu().numpy(), routes.live.cpu().numpy()
    B, T, L, K = packed.shape
    tokens = torch.full((B, T), -1, dtype=torch.int32) if routes.tokens is None else routes.tokens.cpu()
    columns = {
        SEQUENCE: np.repeat(np.arange(B, dtype=np.int32), T),
        POSITION: np.tile(np.arange(T, dtype=np.int32), B),
        TOKEN: tokens.reshape(-1).numpy(),
    }
    for index, site in enumerate(routes.sites):
        known = ~live[:, :, index].reshape(-1)
        ends = np.concatenate([[0], np.cumsum(known * K)]).astype(np.int32)
        offsets = pa.array(ends, mask=np.append(~known, False))
        columns[site] = pa.ListArray.from_arrays(
            offsets, pa.array(packed[:, :, index].reshape(-1, K)[known].reshape(-1))
        )
    facts = {"format": FORMAT, "shape": [B, T, L, K], "dtype": str(packed.dtype), "num_experts": routes.num_experts}
    write_table(path, columns, {**facts, "sites": routes.sites, "meta": dict(routes.meta or {})})


def read_route_table(path: str | Path) -> RoutedExperts:
    """RoutedExperts of a file of `write_route_table`. Raises RoutingError for a damaged or another file."""
    try:
        table = read_table(path)
    except DamagedTableError as error:
        raise RoutingError(str(error)) from error
    facts = facts_of(table)
    if facts.get("format") != FORMAT:
        raise RoutingError(f"{path}: a Parquet file, but not of routes; tokens/*.parquet has the tokens")
    try:
        return _routes(table, facts)
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError, RoutingError) as error:  # without a checksum
        raise RoutingError(f"{path} is damaged: its columns and their description do not fit ({error})") from error


def _routes(table: Any, facts: dict[str, Any]) -> RoutedExperts:
    B, T, _, K = facts["shape"]
    dtype, sites, experts = np.dtype(facts["dtype"]), facts["sites"], facts["num_experts"]
    ids = np.empty((B, T, len(sites), K), dtype=np.int64)
    for index, site in enumerate(sites):
        ids[:, :, index] = _cells(table[site].combine_chunks(), B * T, K, dtype).reshape(B, T, K)
    tokens = torch.from_numpy(table[TOKEN].to_numpy().reshape(B, T).copy())
    return RoutedExperts(
        torch.from_numpy(ids),
        tuple(sites),
        experts if isinstance(experts, int) else tuple(experts),
        tokens=None if bool((tokens == -1).all()) else tokens,
        meta=facts["meta"] or None,
    )


def _cells(cells: Any, rows: int, K: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Ids [rows, K] of a column, -1 where there is no route."""
    import pyarrow as pa

    if len(cells) != rows:
        raise ValueError(f"{len(cells)} rows instead of {rows}")
    if pa.types.is_fixed_size_binary(cells.type):  # of earlier versions
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
