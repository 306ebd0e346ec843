"""Compact encoding of sets of experts: ascending rows, gaps between ids, and exchanges between two policies' rows.

The choice of K of E experts carries at most log2 C(E, K) bits (`set_bits`): 5.05 bytes for 8 of 128. The order of the
slots would be log2 K! bits more and is not kept: rows are brought into ascending order, and each id is written as its
distance from the one before. These gaps are small numbers of one distribution, so that any entropy coder (zstd in route
tables) comes within a few hundredths of the limit; no model of the routers is needed.

If the routes of the old policy are known, those of the new policy are a list of exchanges: which slot of which row
holds which expert now. The smallest size of such a list is `exchange_bits`.

Rows are numpy arrays `[N,K]` of packed ids (`pack_ids`): uint8 or uint16, and all sentinel where there is no route. All
functions are exact for rows that name an expert twice (hash-routed sites), too: differences wrap around.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from math import comb, log2

import numpy as np
from jaxtyping import Int, UInt
from torch import Tensor

from moe_rl.routing.packing import planes_of, shared_slots, unequal_rows

_ROWS = 1 << 15  # rows done at a time, so that a plane (one slot of these rows) and its neighbours stay in the cache

Rows = UInt[np.ndarray, "N K"]


def set_bits(num_experts: int, k: int) -> float:
    """Return log2 C(E, K), the most information that one row can carry, in bits.

    >>> round(set_bits(128, 8) / 8, 2)
    5.05
    """
    return log2(comb(num_experts, k))


def exchange_bits(deviation: Int[Tensor, " K_plus_1"], num_experts: int) -> float:
    """Return the bits per row of new routes given the old ones: H(d) + Σ_d p_d log2(C(K, d) C(E - K, d)). p_d is the
    share of rows that change d slots; any d slots, and any experts in them, are taken to be equally likely.

    deviation: numbers of rows that changed 0, 1, .., K slots, as `ChangeCounts.deviation` counts them.
    """
    rows = deviation.tolist()
    k, total = len(rows) - 1, sum(rows)
    return sum(n / total * log2(comb(k, d) * comb(num_experts - k, d) * total / n) for d, n in enumerate(rows) if n)


def ascending(rows: Rows) -> Rows:
    """Return the ids of every row in ascending order, so that equal sets are equal bytes."""
    return _by_planes(rows, _sorted_planes)


def gaps(rows: Rows) -> Rows:
    """Return, for rows in any order, the smallest id and then the number of experts between each id and the next."""
    return _by_planes(rows, lambda planes: _differences(_sorted_planes(planes)))


def without_gaps(values: Rows) -> Rows:
    """Return the ascending rows that have the gaps `values`: the inverse of `gaps`."""
    return _by_planes(values, _sums)


def check_ascending(rows: Rows, num_experts: int, repeats: bool = False) -> None:
    """Raise ValueError unless each row is all sentinel, or ascending ids below `num_experts` (`repeats`: or equal)."""
    live = np.iinfo(rows.dtype).max
    for start in range(0, len(rows), _ROWS):
        planes = planes_of(rows[start : start + _ROWS])
        good = planes[-1] < num_experts
        for low, high in pairwise(planes):
            good &= low <= high if repeats else low < high
        if not good.all():
            good |= (planes == live).all(0)
        if not good.all():
            raise ValueError(f"row {start + int(good.argmin())} is no set of {len(planes)} of {num_experts} experts")


def exchanges(old: Rows, new: Rows) -> tuple[Int[np.ndarray, " X"], UInt[np.ndarray, " X"], UInt[np.ndarray, " X"]]:
    """Return what turns `old` into `new`, both ascending: row, slot of the old row, expert that takes its place.

    The exchanges ascend by row, and by slot within a row. In a row that differs, all slots are exchanged if the row has
    no route, or names an expert twice, on either side.
    """
    dtype = np.uint8 if old.shape[1] <= 256 else np.uint16
    index = np.flatnonzero(unequal_rows(old, new))
    found = [(index[:0], np.empty(0, dtype), np.empty(0, old.dtype))]
    for start in range(0, len(index), _ROWS):
        part = index[start : start + _ROWS]
        after = new.take(part, 0)
        a, b = planes_of(old.take(part, 0)), planes_of(after)
        whole = (a[1:] == a[:-1]).any(0) | (b[1:] == b[:-1]).any(0)
        gone, come = (np.ascontiguousarray((whole | ~shared_slots(x, y)).T) for x, y in ((a, b), (b, a)))
        row, slot = np.nonzero(gone)
        found.append((part.take(row), slot.astype(dtype), after[come]))
    row, slot, expert = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return row, slot, expert


def with_exchanges(
    old: Rows, row: Int[np.ndarray, " X"], slot: UInt[np.ndarray, " X"], expert: UInt[np.ndarray, " X"]
) -> Rows:
    """Return the rows, ascending, that the exchanges make of `old`, also ascending. Raises IndexError for a row or slot
    that is not there."""
    new = old.copy()
    new[row, slot] = expert
    touched = row[np.append(True, row[1:] != row[:-1])[: len(row)]]
    new[touched] = ascending(new[touched])
    return new


def _by_planes(rows: Rows, change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Rows:
    """Apply `change` to the planes of the rows (a plane is one slot of many rows, long enough for numpy's loops)."""
    out = np.empty_like(rows)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        out[part] = np.stack(change(list(planes_of(rows[part]))), 1)
    return out


def _sorted_planes(planes: list[np.ndarray]) -> list[np.ndarray]:
    """Sort the ids of each row by a sorting network: six times as fast as np.sort along rows of eight ids."""
    for i, j in _network(len(planes)):
        planes[i], planes[j] = np.minimum(planes[i], planes[j]), np.maximum(planes[i], planes[j])
    return planes


def _differences(planes: list[np.ndarray]) -> list[np.ndarray]:
    return planes[:1] + [high - low - 1 for low, high in pairwise(planes)]


def _sums(planes: list[np.ndarray]) -> list[np.ndarray]:
    return list(accumulate(planes, lambda low, gap: low + gap + 1))


@cache
def _network(n: int) -> list[tuple[int, int]]:
    """Return the comparisons that sort n values (19 for n = 8). Batcher's merge exchange: Knuth, volume 3, algorithm
    5.2.2M."""
    found, p = [], 1 << (n - 1).bit_length() >> 1
    while p:
        q, r, d = 1 << (n - 1).bit_length() >> 1, 0, p
        while True:
            found += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return found
