"""Weights of corrections on and beyond their bounds; what carries no gradient; decoupled advantages by hand."""

import math

import pytest
import torch

from moe_rl.objectives import (
    Correction,
    binary_kl_mask,
    decoupled_advantages,
    dpo_coefficients,
    group_advantages,
    off_policy_sequence_mask,
    process_advantages,
)


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


LOG_WEIGHT = double([[4.0, 0.5, 1.0], [2.0, 1.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    "kind",
    [
        "token_truncate",
        "token_mask",
        "binary_kl_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
        "off_policy_mask",
    ],
)
def test_no_gradient_flows_through_a_weight(kind):
    z = LOG_WEIGHT.clone().requires_grad_()
    assert not Correction(kind, high=2.0).weight(z, z - 2.0, -torch.ones_like(z), MASK).requires_grad


def test_a_weight_on_its_bound_is_kept():
    log_weight, mask = double([[0.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    for kind in ("token_mask", "sequence_mask", "geometric_mask"):
        for low, high in ((1.0, 1.0), (1.0, 2.0), (0.5, 1.0)):
            assert Correction(kind, low, high).weight(log_weight, log_weight, log_weight, mask).tolist() == [[1.0, 1.0]]


def test_the_larger_of_both_divergences_decides():
    # mu -> pi of 0.9 -> 0.6: KL(mu || pi) 0.226, KL(pi || mu) 0.311
    mu, pi = double([[0.9]]).log(), double([[0.6]]).log()
    assert binary_kl_mask(pi - mu, pi, 0.25).item() == 0.0 and binary_kl_mask(pi - mu, pi, 0.32).item() > 0


def test_a_token_without_an_advantage_is_not_dropped():
    far, mask = double([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert off_policy_sequence_mask(far, double([[0.0, -1.0]]), mask, 0.5).tolist() == [[1.0, 0.0]]


def test_process_groups_are_whole():
    with pytest.raises(ValueError, match="group_size: 2 does not divide the 3 rows"):
        process_advantages(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), 2)


def test_decoupled_golden():
    # rewards (0, 1) and (0, 2) of one group, eps 1/2: A[1] = ∓0.5/(√½ + ½), A[2] = ∓1/(√2 + ½); S = 2 A[1] + A[2]
    s = 2 * 0.5 / (math.sqrt(0.5) + 0.5) + 1 / (math.sqrt(2) + 0.5)
    got = decoupled_advantages(double([[0.0, 0.0], [1.0, 2.0]]), 2, double([2.0, 1.0]), eps=0.5)
    torch.testing.assert_close(got, double([-s, s]) / (s * math.sqrt(2) + 0.5))


def test_advantages_carry_no_gradient():
    z = double([0.0, 1.0]).requires_grad_()
    assert not any(group_advantages(z, 2, scale).requires_grad for scale in ("std", "none", "batch"))
    assert not process_advantages(z[:, None], torch.ones(2, 1, dtype=torch.bool), 2).requires_grad
    assert not dpo_coefficients(z, -z).requires_grad
