import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives import (
    OBJECTIVES,
    Correction,
    binary_kl_mask,
    geometric_mask,
    off_policy_sequence_mask,
    policy_loss,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
    token_weights,
)


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


# weights 4, 1/2, 1 | 2 (and two masked positions, log-weight 0 as token_log_ratio gives them)
LOG_WEIGHT = double([[4.0, 0.5, 1.0], [2.0, 1.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (token_truncate(LOG_WEIGHT, 2.0), [[2.0, 0.5, 1.0], [2.0, 1.0, 1.0]]),
        (token_mask(LOG_WEIGHT, 0.0, 2.0), [[0.0, 0.5, 1.0], [2.0, 1.0, 1.0]]),
        (token_mask(LOG_WEIGHT, 0.6, 5.0), [[4.0, 0.0, 1.0], [2.0, 1.0, 1.0]]),
        # products 4 * 1/2 * 1 = 2 and 2
        (sequence_truncate(LOG_WEIGHT, MASK, 1.5), [[1.5, 1.5, 1.5], [1.5, 0.0, 0.0]]),
        (sequence_mask(LOG_WEIGHT, MASK, 0.0, 3.0), [[2.0, 2.0, 2.0], [2.0, 0.0, 0.0]]),
        (sequence_mask(LOG_WEIGHT, MASK, 0.0, 1.5), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        # geometric means 2^(1/3) = 1.26 and 2
        (geometric_mask(LOG_WEIGHT, MASK, 0.5, 1.5), [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_golden(weight, expected):
    torch.testing.assert_close(weight, double(expected))


def test_binary_kl_mask_golden():
    # mu -> pi: 0.5 -> 0.6: KL 0.020 both ways; 0.9 -> 0.6: 0.226 and 0.311; 0.001 -> 0.01: 0.007 and 0.014 at ten times
    # the probability; 0.5 -> 0.7: 0.087 and 0.082; 0.3 -> 0.1: 0.154 and 0.116; 0.97 -> 1: 0.418 and 0.030
    mu = double([[0.5, 0.9, 0.001, 0.5, 0.3, 0.97]]).log()
    pi = double([[0.6, 0.6, 0.01, 0.7, 0.1, 1.0]]).log()
    expected = [[1.2, 0.0, 10.0, 1.4, 0.0, 0.0]]
    torch.testing.assert_close(binary_kl_mask(pi - mu, pi, 0.1), double(expected))
    assert binary_kl_mask(pi - mu, pi, 0.12)[0, 4] == 0.0  # one of its two is above
    torch.testing.assert_close(binary_kl_mask(pi - mu, pi, 0.16)[0, 4], double([[1 / 3]])[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_of_16_bits_are_judged_in_fp32(dtype):
    """1 - p of a likely token loses most of its digits in 16 bits: tokens that had not moved were dropped."""
    old, rollout = (torch.tensor([row], dtype=dtype) for row in ([0.0, -0.02, -0.5], [0.0, -0.02, -1.0]))
    arguments = old, old, torch.ones(1), torch.ones(1, 3)
    out = policy_loss("grpo_kpop", *arguments, rollout_logps=rollout)
    whole = policy_loss("grpo_kpop", *(x.float() for x in arguments), rollout_logps=rollout.float())
    assert torch.equal(out.tokens.correction_weight, whole.tokens.correction_weight)
    assert out.tokens.correction_weight.tolist() == [[1.0, 1.0, 0.0]]
    apart = Correction("binary_kl_mask", high=1e-6)  # what has not moved is kept under any threshold
    tight = policy_loss(replace(OBJECTIVES["grpo"], corrections=(apart,)), *arguments, rollout_logps=rollout)
    assert tight.tokens.correction_weight.tolist() == [[1.0, 1.0, 0.0]]


def test_off_policy_mask_golden():
    # mean log(mu/pi) = -mean log w: row 0: log 2 -> dropped where A < 0; row 1: -log 2 -> kept
    log_weight = double([[0.25, 1.0], [2.0, 2.0]]).log()
    mask = torch.ones(2, 2, dtype=torch.bool)
    got = off_policy_sequence_mask(log_weight, double([[-1.0, 1.0], [-1.0, -1.0]]), mask, 0.5)
    torch.testing.assert_close(got, double([[0.0, 1.0], [1.0, 1.0]]))
    on_the_bound = off_policy_sequence_mask(double([[-0.5, -0.5]]), double([[-1.0, -1.0]]), mask[:1], 0.5)
    assert on_the_bound.tolist() == [[1.0, 1.0]], "dropped is what is beyond delta"


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
@settings(max_examples=50, deadline=None)
def test_one_sided_sequence_mask_is_one_sided_geometric_rejection(seed, delta):
    g = torch.Generator().manual_seed(seed)
    log_weight = torch.randn(5, 4, generator=g, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=g) < 0.7
    log_weight[~mask] = 0.0
    negative = -torch.ones(5, 4, dtype=torch.float64)
    torch.testing.assert_close(
        off_policy_sequence_mask(log_weight, negative, mask, delta),
        geometric_mask(log_weight, mask, math.exp(-delta), float("inf")),
    )
    kept = off_policy_sequence_mask(log_weight, -negative, mask, delta)
    assert torch.equal(kept, mask.double())


def test_corrections_are_detached_and_multiply():
    old = double([[-1.0, -1.0]])
    logps, rollout = (old + 0.1).requires_grad_(), (old - double([[2.0, 1.0]]).log()).requires_grad_()
    two = replace(
        OBJECTIVES["grpo"],
        corrections=(Correction("token_truncate", high=1.5), Correction("sequence_truncate", high=3.0)),
    )
    arguments = (logps, old, double([1.0]), torch.tensor([[1, 1]]))
    policy_loss(two, *arguments, rollout_logps=rollout).loss.backward()
    # weights min(2, 1.5) and 1, times the product 2: 3 and 2; slope -r A/2
    torch.testing.assert_close(logps.grad, -math.exp(0.1) / 2 * double([[3.0, 2.0]]))
    assert rollout.grad is None


@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if o.corrections])
def test_equal_engines_need_no_correction(name):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 3, generator=g, dtype=torch.float64)
    shift = 0.05 * torch.randn(4, 3, generator=g, dtype=torch.float64)  # below delta of the off-policy mask
    arguments = (old + shift, old, double([1.0, -1.0, 2.0, -2.0]), torch.ones(4, 3))
    plain = policy_loss(replace(OBJECTIVES[name], corrections=()), *arguments).loss
    torch.testing.assert_close(policy_loss(name, *arguments, rollout_logps=old).loss, plain)


def test_an_optional_correction_without_rollout_log_probabilities_is_weight_one():
    old = double([[-1.0, -2.0]])
    arguments = (old + 0.05, old, double([1.0]), torch.ones(1, 2))
    out = policy_loss("minirl", *arguments)
    torch.testing.assert_close(out.loss, policy_loss("minirl", *arguments, rollout_logps=old).loss)
    assert "correction_weight_mean" not in out.metrics


MEAN = replace(OBJECTIVES["gmpo"], corrections=(Correction("geometric_mask", 0.99, 1.01),))
PRODUCT = replace(OBJECTIVES["grpo"], ratio="sequence_product", corrections=(Correction("geometric_mask", 0.99, 1.01),))


@pytest.mark.parametrize(
    ("objective", "moves"),
    [(OBJECTIVES["grpo_icepop"], [0.0, 94.0]), (PRODUCT, [0.03] * 4000), (MEAN, [95.0, 93.0])],
    ids=["token", "sequence", "mean"],
)
def test_a_dropped_token_contributes_nothing_though_its_ratio_overflows(objective, moves):
    """One for its own ratio, and a sequence for a product or a mean; the sampler is the policy of now."""
    logps = torch.full((1, len(moves)), -1.0, requires_grad=True)
    old, rollout = logps.detach() - torch.tensor([moves]), logps.detach()
    arguments = old, torch.tensor([-1.0]), torch.ones_like(old, dtype=torch.bool)
    out = policy_loss(objective, logps, *arguments, rollout_logps=rollout)
    out.loss.backward()
    weights = token_weights(objective, logps.detach(), *arguments, rollout_logps=rollout).weight
    assert out.loss.isfinite() and torch.allclose(-logps.grad, weights) and weights[0, -1] == 0
    assert out.tokens.gate_log_ratio.max() > 90, "what it was is told as it is"


def test_a_correction_is_written_as_it_is_read():
    for low, high in ((0.5, 5.0), (0.9999999, 1.0000001)):
        correction = Correction("geometric_mask", low, high)
        assert Correction.parse(str(correction)) == correction


@pytest.mark.parametrize(
    "text", ["token_mask", "token_mask:x", "token_mask:0.5:x", "token_mask:0.1:0.5:5", "tis:2:new"]
)
def test_a_correction_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=rf"'{text}': expected KIND:HIGH or KIND:LOW:HIGH"):
        Correction.parse(text)


def test_infinite_weights_are_bounded_or_dropped():
    log_weight = double([[5000.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert token_truncate(log_weight, 2.0).tolist() == [[2.0, 1.0]]
    assert token_mask(log_weight, 0.0, 3.0).tolist() == [[0.0, 1.0]]
    assert sequence_truncate(log_weight, mask, 3.0).tolist() == [[3.0, 3.0]]
    assert sequence_mask(log_weight, mask, 0.0, 3.0).tolist() == [[0.0, 0.0]]
