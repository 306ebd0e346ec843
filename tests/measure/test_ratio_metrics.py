"""Metrics of ratios against arithmetic done by hand."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.measure import metrics as of_updates
from moe_rl.measure import peer_metrics
from moe_rl.measure.metrics import effective_share, ratio_metrics, routing_ratio_metrics, update_ratio_metrics
from moe_rl.measure.peer_metrics import gap_metrics

LN2 = math.log(2)
# Ratios 1, 4 | 1/4, padding. d = 0, 2 ln 2 | -2 ln 2.
D = torch.tensor([[0.0, 2 * LN2], [-2 * LN2, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])


def test_spread_of_three_tokens():
    metrics = {name: float(value) for name, value in ratio_metrics(D, MASK).items()}
    assert metrics["k1"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["m2"] == pytest.approx(8 * LN2**2 / 3)  # (0 + 4 + 4) ln²2 / 3
    assert metrics["k2"] == pytest.approx(metrics["m2"] / 2)
    assert metrics["k3"] == pytest.approx((0 + (3 - 2 * LN2) + (-0.75 + 2 * LN2)) / 3)
    assert metrics["gap_mean"] == pytest.approx(4 * LN2 / 3)
    assert metrics["gap_p99"] == metrics["gap_max"] == pytest.approx(2 * LN2)
    assert [metrics[f"extreme_{tau}"] for tau in (2, 3, 5, 10)] == [2, 2, 0, 0]
    assert metrics["var_ratio"] == pytest.approx(((1 - 1.75) ** 2 + (4 - 1.75) ** 2 + (0.25 - 1.75) ** 2) / 2)
    assert metrics["chi2_token"] == pytest.approx((1 + 16 + 1 / 16) / 3 - 1)
    assert metrics["ess_token"] == pytest.approx(5.25**2 / (3 * (17 + 1 / 16)))
    assert metrics["chi2_sequence"] == pytest.approx((4 + 1 / 16) / 2 - 1)  # s = 2 and 1/4
    assert metrics["ess_sequence"] == pytest.approx(2.25**2 / (2 * (4 + 1 / 16)))
    assert metrics["var_within"] == pytest.approx(LN2**2 / 2)  # ln²2 in the first, 0 in the second
    assert metrics["max_token_kl_max"] == pytest.approx(3 - 2 * LN2)
    assert metrics["max_token_kl_mean"] == pytest.approx((3 - 2 * LN2 - 0.75 + 2 * LN2) / 2)


def test_each_routing_has_its_variances_and_metrics():
    # Tokens d = 0, 2 ln 2, -2 ln 2: mean 0, variance (4 + 4) ln²2 / 2. Sequences ln 2 and -2 ln 2: 9/2 ln²2.
    metrics = routing_ratio_metrics({"natural": D, "replayed": torch.zeros_like(D)}, torch.zeros_like(D), MASK)
    assert float(metrics["var_token_natural"]) == pytest.approx(4 * LN2**2)
    assert float(metrics["var_sequence_natural"]) == pytest.approx(4.5 * LN2**2)
    assert float(metrics["var_token_replayed"]) == float(metrics["var_sequence_replayed"]) == 0
    assert (metrics["extreme_3_natural"], metrics["extreme_3_replayed"]) == (2, 0)


def test_equal_policies_give_zeros_and_full_samples():
    metrics = ratio_metrics(torch.zeros(2, 2), MASK)
    assert {n for n, v in metrics.items() if float(v) != 0} == {"ess_token", "ess_sequence"}
    assert float(metrics["ess_token"]) == float(metrics["ess_sequence"]) == 1


@pytest.mark.filterwarnings("error")
def test_no_tokens_give_nan_and_nothing_raises():
    metrics = ratio_metrics(D, torch.zeros_like(MASK))
    assert all(math.isnan(float(v)) for n, v in metrics.items() if not n.startswith("extreme"))
    assert float(metrics["extreme_2"]) == 0
    one = update_ratio_metrics(D[:1, :1], D[0, :1], MASK[:1, :1])  # a variance needs two
    assert {n for n, v in one.items() if math.isnan(float(v))} == {
        "var_token_log_ratio",
        "var_sequence_log_ratio",
        "var_ratio",
    }


@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (0, 0)])
def test_a_batch_without_any_place_is_one_without_tokens(shape):
    found, masked = (ratio_metrics(d, torch.zeros(d.shape, dtype=torch.bool)) for d in (torch.zeros(shape), D))
    torch.testing.assert_close(found, masked, equal_nan=True)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
@settings(deadline=None, max_examples=30)
def test_effective_share_is_one_over_one_plus_the_squared_variation(weights):
    w = torch.tensor(weights, dtype=torch.float64)
    variation = w.var(correction=0) / w.mean() ** 2
    assert float(effective_share(w)) == pytest.approx(float(1 / (1 + variation)))


def test_p99_is_the_nearest_rank_and_padding_counts_nowhere():
    d = torch.zeros(1, 201)
    d[0, :2] = torch.tensor([3.0, 2.0])
    d[0, 200] = 50.0
    mask = torch.ones(1, 201, dtype=torch.bool)
    mask[0, 200] = False
    metrics = ratio_metrics(d, mask)  # 200 tokens: rank 198 of 200, the largest two lie above
    assert float(metrics["gap_p99"]) == 0 and float(metrics["gap_max"]) == 3
    few = ratio_metrics(d[:, :5], mask[:, :5])  # rank 4.95, which is the fifth
    assert float(few["gap_p99"]) == float(few["gap_max"]) == 3


def test_variances_of_an_updates_log_ratios_are_of_the_tokens_inside_the_mask():
    empty = torch.zeros(1, 2, dtype=torch.float64)  # a sequence without a token is none
    of_sequences = torch.tensor([LN2, -2 * LN2, 0.0], dtype=torch.float64)
    metrics = update_ratio_metrics(torch.cat([D, empty]), of_sequences, torch.cat([MASK, empty.bool()]))
    assert float(metrics["var_token_log_ratio"]) == pytest.approx(4 * LN2**2)  # (0 + 4 + 4) ln²2 / 2
    assert float(metrics["var_sequence_log_ratio"]) == pytest.approx(4.5 * LN2**2)  # (1.5² + 1.5²) ln²2


def test_gap_by_hand():
    # d = (ln 3, 0 | -ln 1.5): r = 3, 1, 2/3. k3 = (3 - 1 - ln 3 + 0 + 2/3 - 1 + ln 1.5) / 3; only r = 3 is beyond 2.
    # The last sequence has no token, and is none.
    new = torch.tensor([[math.log(3), 0.0], [-math.log(1.5), 99.0], [99.0, 99.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    gap = gap_metrics(new, torch.zeros(3, 2), mask)
    assert gap["k3"] == pytest.approx((2 - math.log(3) - 1 / 3 + math.log(1.5)) / 3)
    assert gap["extreme_fraction"] == pytest.approx(1 / 3)
    assert gap["gap_max"] == pytest.approx(math.log(3))
    assert gap["gap_mean"] == pytest.approx((math.log(3) + math.log(1.5)) / 3)
    # sequence means: ln(3)/2 and -ln 1.5; the variance of two numbers is half their squared difference
    assert gap["var_sequence"] == pytest.approx((math.log(3) / 2 + math.log(1.5)) ** 2 / 2)


MASKED = {
    "ratio_metrics": lambda d, mask: of_updates.ratio_metrics(d, mask),
    "ratio_range_metrics": lambda d, mask: of_updates.ratio_range_metrics(d, mask),
    "update_ratio_metrics": lambda d, mask: of_updates.update_ratio_metrics(d, d.mean(1), mask),
    "routing_ratio_metrics": lambda d, mask: routing_ratio_metrics({"natural": d}, torch.zeros_like(d), mask),
    "masked_mismatch_metrics": lambda d, mask: of_updates.masked_mismatch_metrics(d, d < 0, d > 0, mask),
    "engine_metrics": lambda d, mask: peer_metrics.engine_metrics(d - 2, torch.zeros_like(d) - 2, mask),
    "gap_metrics": lambda d, mask: peer_metrics.gap_metrics(d - 2, torch.zeros_like(d) - 2, mask),
}


@pytest.mark.parametrize("name", MASKED)
def test_no_number_holds_the_graph_of_the_log_probabilities(name):
    d = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert not any(value.requires_grad for value in MASKED[name](d, torch.ones(3, 5)).values())


def test_ratios_of_other_tokens_than_those_of_the_mask_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    with pytest.raises(ValueError, match=r"mask: expected the shape of log_ratio, \(1, 2\), got \(2, 2\)"):
        ratio_metrics(D[:1], MASK)  # would count them twice


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_zeros_and_ones_is_the_mask(name):
    """As integers it would choose rows 0 and 1 of the tokens instead."""
    d = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 3 + [False] * 2] * 3)
    expected = MASKED[name](d, mask)
    for kind in (torch.long, torch.float32):
        torch.testing.assert_close(MASKED[name](d, mask.to(kind)), expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="expected only 0 and 1"):
        MASKED[name](d, torch.full((3, 5), 2))


def test_what_a_trust_region_takes_out_may_be_zeros_and_ones_too():
    """As integers, ~masked is -1 and -2, which choose the last rows of the tokens."""
    d = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    low, high, mask = d < -0.5, d > 0.5, torch.ones(3, 5, dtype=torch.bool)
    expected = of_updates.masked_mismatch_metrics(d, low, high, mask)
    for kind in (torch.long, torch.float32):
        found = of_updates.masked_mismatch_metrics(d, low.to(kind), high.to(kind), mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="masked_high: expected only 0 and 1"):
        of_updates.masked_mismatch_metrics(d, low, 2 * high.long(), mask)
