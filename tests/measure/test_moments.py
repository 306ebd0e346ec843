"""Moments of parts: sums are exact, batches add up, and averaging has the factor that it must have."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.measure.moments import PARTS, Moments, Shares, SiteShares


def random_parts(seed, rows=6, length=9):
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(rows, length, 3, generator=generator, dtype=torch.float64)
    parts[..., 2] += 0.7 * parts[..., 1] + 3
    mask = torch.rand(rows, length, generator=generator) < 0.6
    return parts, mask


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_variances_and_twice_the_covariances_sum_to_the_total(seed):
    parts, mask = random_parts(seed)
    total = parts.sum(-1)
    shares = Shares.of(parts, mask)
    means = torch.stack([total[b][mask[b]].mean() for b in range(len(mask)) if mask[b].any()])
    for level, expected in ((shares.token, total[mask].var()), (shares.sequence, means.var())):
        row = level.rows()
        summed = sum(row[f"var_{p}"] for p in PARTS) + 2 * sum(v for k, v in row.items() if k.startswith("cov_"))
        assert summed == pytest.approx(level.total, rel=1e-12)
        assert level.total == pytest.approx(float(expected), rel=1e-9)
        assert sum(level.share(part) for part in PARTS) == pytest.approx(1, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6))
def test_batches_add_up_to_the_whole(seed, cut):
    parts, mask = random_parts(seed)
    whole, pieces = Shares.of(parts, mask), Shares.of(parts[:cut], mask[:cut]) + Shares.of(parts[cut:], mask[cut:])
    for a, b in ((whole.tokens, pieces.tokens), (whole.sequences, pieces.sequences)):
        assert a.count == b.count
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(a.scatter, b.scatter, rtol=1e-10, atol=1e-10)
    assert whole.harmonic_length == pytest.approx(pieces.harmonic_length)


def test_golden_of_two_sequences():
    # weight  [1, 3 | 5],  routing [0, 2 | 1], interaction 0; lengths 2 and 1.
    # tokens: weight mean 3, var (4 + 0 + 4) / 2 = 4; routing mean 1, var (1 + 1 + 0) / 2 = 1;
    #         cov ((-2)(-1) + 0 * 1 + 2 * 0) / 2 = 1; total 4 + 1 + 2 * 1 = 7: of 1, 5, 6, mean 4: (9 + 1 + 4) / 2 = 7.
    # sequences: weight means 2, 5, var 4.5; routing means 1, 1, var 0; total 4.5.
    # share of routing: (1 + 1) / 7 by token, 0 by sequence. Harmonic length 2 / (1/2 + 1) = 4/3.
    # design effect of weight: 4.5 * (4/3) / 4 = 1.5.
    parts = torch.tensor([[[1.0, 0, 0], [3, 2, 0]], [[5, 1, 0], [99, 99, 99]]])
    shares = Shares.of(parts, torch.tensor([[True, True], [True, False]]))
    assert (shares.token.total, shares.token.var("weight"), shares.token.cov("weight", "routing")) == (7, 4, 1)
    assert shares.token.share("routing") == pytest.approx(2 / 7)
    assert (shares.sequence.total, shares.sequence.var("routing"), shares.sequence.share("routing")) == (4.5, 0, 0)
    assert shares.harmonic_length == pytest.approx(4 / 3)
    assert shares.design_effect("weight") == pytest.approx(1.5)
    assert shares.averaging("weight") == pytest.approx(4 / 4.5)


def test_design_effect_is_one_for_independent_and_the_length_for_constant_tokens():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 40, (4000, 1), generator=generator)
    mask = torch.arange(40) < lengths
    independent = torch.randn(4000, 40, generator=generator)
    constant = torch.randn(4000, 1, generator=generator).expand(4000, 40)
    shares = Shares.of(torch.stack([independent, constant, torch.zeros(4000, 40)], -1), mask)
    assert shares.design_effect("weight") == pytest.approx(1, abs=0.07)
    assert shares.design_effect("routing") == pytest.approx(shares.harmonic_length, rel=0.06)
    assert math.isnan(shares.design_effect("interaction")), "nothing varies: there is no factor"


def test_what_stands_in_padding_does_not_matter():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    parts = torch.arange(18, dtype=torch.float64).view(2, 3, 3).square()
    other = parts.where(mask[..., None], torch.nan)
    assert Shares.of(other, mask).rows() == Shares.of(parts, mask).rows()


def test_one_token_has_no_variance_and_nothing_breaks():
    shares = Shares.of(torch.zeros(2, 3, 3), torch.tensor([[True, False, False], [False, False, False]]))
    assert shares.tokens.count == shares.sequences.count == 1
    assert math.isnan(shares.token.total) and math.isnan(shares.token.share("weight"))
    nothing = Moments.of(torch.zeros(0, 3))
    assert nothing.count == (nothing + nothing).count == 0


def test_shares_of_sites_add_up_over_batches():
    alone, last = random_parts(0)[0].movedim(2, 0)[:2], random_parts(1)[0].movedim(2, 0)[:2]
    whole, mask = random_parts(2)[0][..., 2], random_parts(2)[1]
    every = SiteShares.of(("a", "b"), alone, last, whole, mask)
    halves = [SiteShares.of(("a", "b"), alone[:, r], last[:, r], whole[r], mask[r]) for r in (slice(2), slice(2, 6))]
    for name, values in (halves[0] + halves[1]).rows().items():
        assert values == pytest.approx(every.rows()[name]), name
    assert (halves[0] + halves[1]).whole == pytest.approx(float(whole[mask].var()))
    still = SiteShares.of(("a", "b"), alone, last, torch.zeros_like(whole), mask).rows()
    assert all(math.isnan(share) for kind in ("alone", "last") for share in still[f"token_share_{kind}"])
