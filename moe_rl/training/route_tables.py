"""Routes as Parquet, the form in which run folders keep them: one row per token, one binary column per routing site.

A site's cell holds the token's K expert ids, little-endian, in the smallest unsigned dtype that holds them; its largest
value means "no route". `numpy.frombuffer(cell, dtype)` reads one; `read_route_table` reads a file back whole.
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

    packed = np.ascontiguousarray(routes.packed.cpu().numpy())
    B, T, L, K = packed.shape
    cell = pa.binary(K * packed.itemsize)
    tokens = torch.full((B, T), -1, dtype=torch.int32) if routes.tokens is None else routes.tokens.cpu()
    columns = {
        SEQUENCE: np.repeat(np.arange(B, dtype=np.int32), T),
        POSITION: np.tile(np.arange(T, dtype=np.int32), B),
        TOKEN: tokens.reshape(-1).numpy(),
    }
    for index, site in enumerate(routes.sites):
        data = pa.py_buffer(np.ascontiguousarray(packed[:, :, index]).tobytes())
        columns[site] = pa.Array.from_buffers(cell, B * T, [None, data])
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
        cells = table[site].combine_chunks()
        raw = np.frombuffer(cells.buffers()[1], dtype=dtype, count=B * T * K)
        ids[:, :, index] = np.where(raw == np.iinfo(dtype).max, -1, raw.astype(np.int64)).reshape(B, T, K)
    tokens = torch.from_numpy(table[TOKEN].to_numpy().reshape(B, T).copy())
    return RoutedExperts(
        torch.from_numpy(ids),
        tuple(sites),
        experts if isinstance(experts, int) else tuple(experts),
        tokens=None if bool((tokens == -1).all()) else tokens,
        meta=facts["meta"] or None,
    )
