"""Ascending rows, gaps and exchanges against numpy's own sort and Python's sets; limits against counts by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.routing import codec
from moe_rl.routing.codec import (
    ascending,
    check_ascending,
    exchange_bits,
    exchanges,
    gaps,
    set_bits,
    with_exchanges,
    without_gaps,
)


@st.composite
def pairs(draw):
    """Packed rows of two policies, some equal, some without a route, some with an expert twice."""
    k, experts = draw(st.sampled_from([(1, 1), (2, 5), (3, 7), (8, 20), (8, 255), (8, 256), (5, 300), (10, 512)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    old = np.argsort(rng.random((30, experts)), 1)[:, :k]
    new = np.where(rng.random((30, 1)) < 0.4, np.argsort(rng.random((30, experts)), 1)[:, :k], old)
    dtype = np.uint8 if experts <= 255 else np.uint16
    old, new = old.astype(dtype), new.astype(dtype)
    for rows in (old, new):
        rows[rng.random(30) < 0.1] = np.iinfo(dtype).max
        rows[rng.random(30) < 0.1, -1] = rows[0, 0]
    return old, new


@settings(deadline=None, max_examples=80)
@given(pairs(), st.integers(1, 40))
def test_rows_come_back(pair, rows):
    old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_ROWS", rows)
        a, b = ascending(old), ascending(new)
        assert np.array_equal(a, np.sort(old, 1))
        assert np.array_equal(without_gaps(gaps(old)), a)
        row, slot, expert = exchanges(a, b)
        assert np.array_equal(with_exchanges(a, row, slot, expert), b)
    # Nothing is exchanged that stays, in rows that are sets.
    for index in np.unique(row):
        if len(set(a[index])) == len(set(b[index])) == a.shape[1]:
            assert set(expert[row == index]) == set(b[index]) - set(a[index])
            assert set(a[index, slot[row == index]]) == set(a[index]) - set(b[index])


def test_gaps_by_hand():
    rows = np.array([[9, 2, 3], [0, 1, 2], [255, 255, 255]], np.uint8)
    assert gaps(rows).tolist() == [[2, 0, 5], [0, 0, 0], [255, 255, 255]]
    held = np.array([[2, 0, 5]], np.uint8)
    assert without_gaps(held).tolist() == [[2, 3, 9]] and held.tolist() == [[2, 0, 5]]


def test_limits_by_hand():
    assert set_bits(4, 2) == pytest.approx(math.log2(6))
    # Of four rows of 2 of 4 experts one changes one slot: H(1/4), and one of 2 slots and 2 experts in it.
    expected = 0.75 * math.log2(4 / 3) + 0.25 * (2 + math.log2(2 * 2))
    assert exchange_bits(torch.tensor([3, 1, 0]), 4) == pytest.approx(expected)
    assert exchange_bits(torch.tensor([5, 0, 0]), 4) == 0
    # All d in proportion to how many sets are d slots away: any set, whatever the old one was.
    ways = [math.comb(8, d) * math.comb(12, d) for d in range(9)]
    assert exchange_bits(torch.tensor(ways), 20) == pytest.approx(set_bits(20, 8))


@pytest.mark.parametrize(
    ("row", "repeats", "good"),
    [
        ([0, 3, 7], False, True),
        ([0, 3, 8], False, False),
        ([3, 0, 7], True, False),
        ([3, 3, 7], False, False),
        ([3, 3, 7], True, True),
        ([255, 255, 255], False, True),
        ([3, 255, 255], True, False),
    ],
)
def test_rows_that_are_no_sets_are_found(row, repeats, good, monkeypatch):
    monkeypatch.setattr(codec, "_ROWS", 1)  # that are looked at a time
    rows = np.array([[0, 1, 2], row], np.uint8)
    if good:
        check_ascending(rows, 8, repeats)
    else:
        with pytest.raises(ValueError, match="row 1 is no set of 3 of 8"):
            check_ascending(rows, 8, repeats)
