"""Closed-form token weights: what GSPO's section 4.2 says about them, and autograd where the reference is silent."""

import math
from dataclasses import replace

import pytest
import torch

from moe_rl.objectives import GATES, OBJECTIVES, policy_loss, token_weights


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_importance_of_grpo_and_gspo_golden():
    # ratios 1.2, 0.9 (A = 1): GRPO weighs them so (eq. 12); GSPO by s = sqrt(1.08) each (eq. 10), if not clipped
    old = double([[-1.0, -1.0]])
    logps = old + double([[1.2, 0.9]]).log()
    arguments = (logps, old, double([3.0]), torch.tensor([[1, 1]]))
    grpo = token_weights("grpo", *arguments)
    torch.testing.assert_close(grpo.importance, double([[1.2, 0.9]]))
    torch.testing.assert_close(grpo.weight, 3.0 / 2 * double([[1.2, 0.9]]))
    s = math.sqrt(1.08)
    for ratio in ("sequence", "sequence_token"):
        wide = replace(OBJECTIVES["gspo"], ratio=ratio, clip_low=0.5, clip_high=0.5)
        torch.testing.assert_close(token_weights(wide, *arguments).importance, double([[s, s]]))
        torch.testing.assert_close(token_weights(wide, *arguments).weight, 1.5 * double([[s, s]]))
    clipped = token_weights("gspo", *arguments)  # s = 1.039 > 1.0004
    assert clipped.clipped.all() and (clipped.weight == 0).all() and (clipped.importance == 0).all()


def test_ranges_of_the_importance_weights():
    # section 4.2: (0, 1 + eps] for A > 0, [1 - eps, inf) for A < 0, apart from the clipped ones, which are 0
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 16, generator=g, dtype=torch.float64)
    logps = old + torch.randn(64, 16, generator=g, dtype=torch.float64)
    advantages = torch.randn(64, generator=g, dtype=torch.float64)
    grpo = token_weights("grpo", logps, old, advantages, torch.ones(64, 16))
    up = grpo.importance[(advantages > 0)[:, None] & ~grpo.clipped]
    down = grpo.importance[(advantages < 0)[:, None] & ~grpo.clipped]
    assert up.min() > 0 and up.max() <= 1.27
    assert down.min() >= 0.8 and down.max() > 3
    gspo = token_weights(
        replace(OBJECTIVES["gspo"], clip_low=0.9, clip_high=9), logps, old, advantages, torch.ones(64, 16)
    )
    assert (gspo.importance == gspo.importance[:, :1]).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if o.anchor == "old" and not o.corrections])
def test_closed_form_equals_autograd_with_kl_and_gates_at_other_levels(name, estimator, weighted):
    g = torch.Generator().manual_seed(4)
    old = -torch.rand(6, 5, generator=g, dtype=torch.float64)
    shift = 0.3 * torch.randn(6, 5, generator=g, dtype=torch.float64)
    ref, mask = old - 0.2, torch.rand(6, 5, generator=g) < 0.7
    advantages = torch.randn(6, 5, generator=g, dtype=torch.float64)
    options = {"route_weight": torch.rand(6, 5, generator=g, dtype=torch.float64)} if name.startswith("rspo") else {}
    objective = replace(OBJECTIVES[name], kl_coef=0.2, kl_estimator=estimator, kl_importance_weighted=weighted)
    levels = (
        [objective]
        if GATES[objective.gate].levels
        else [replace(objective, ratio=r) for r in ("token", "sequence", "sequence_token", "sequence_product")]
    )
    for o in levels:
        logps = (old + shift).requires_grad_()
        out = policy_loss(o, logps, old, advantages, mask, ref_logps=ref, **options)
        out.loss.backward()
        closed = token_weights(o, logps, old, advantages, mask, ref_logps=ref, **options)
        torch.testing.assert_close(closed.weight, -logps.grad, rtol=1e-11, atol=1e-13)
        assert torch.equal(closed.clipped, out.clipped)
        assert not closed.weight.requires_grad


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token", "sequence_product"])
def test_closed_form_equals_autograd_beyond_a_ceiling_that_keeps_its_tokens(ratio):
    g = torch.Generator().manual_seed(6)
    old = -torch.rand(6, 5, generator=g, dtype=torch.float64)
    logps = (old + 2 * torch.randn(6, 5, generator=g, dtype=torch.float64)).requires_grad_()
    rest = old, torch.randn(6, generator=g, dtype=torch.float64), torch.rand(6, 5, generator=g) < 0.7
    objective = replace(OBJECTIVES["dual_clip"], gate="soft_dual_clip", ratio=ratio, dual_clip=1.5)
    policy_loss(objective, logps, *rest).loss.backward()
    closed = token_weights(objective, logps, *rest)
    torch.testing.assert_close(closed.weight, -logps.grad, rtol=1e-11, atol=1e-13)
    assert ((closed.importance - 1.5).abs() < 1e-12).any(), "no ratio is beyond the ceiling"


@pytest.mark.parametrize("where", ["before_clip", "after_clip"])
@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if o.anchor == "old" and not o.corrections])
def test_closed_form_equals_autograd_with_a_route_weight_in_any_method(name, where):
    g = torch.Generator().manual_seed(5)
    old = -torch.rand(6, 5, generator=g, dtype=torch.float64)
    logps = (old + 0.3 * torch.randn(6, 5, generator=g, dtype=torch.float64)).requires_grad_()
    route_weight = 0.5 + torch.rand(6, 5, generator=g, dtype=torch.float64) / 2
    rest = old, torch.randn(6, generator=g, dtype=torch.float64), torch.rand(6, 5, generator=g) < 0.7
    objective = replace(OBJECTIVES[name], route_weight=where)
    policy_loss(objective, logps, *rest, route_weight=route_weight).loss.backward()
    closed = token_weights(objective, logps, *rest, route_weight=route_weight)
    torch.testing.assert_close(closed.weight, -logps.grad, rtol=1e-11, atol=1e-13)


def test_extreme_ratios_have_finite_weights():
    old = torch.zeros(1, 3, dtype=torch.float64)
    logps = double([[5000.0, -5000.0, 0.0]])
    for name in ("grpo", "sapo", "cispo", "gmpo"):
        assert torch.isfinite(token_weights(name, logps, old, double([1.0]), torch.ones(1, 3)).weight).all()


def test_online_rft_is_grpo_without_punishment():
    # arXiv:2402.03300, A.1: coefficient 1 for a correct response, 0 for a wrong one
    old = double([[-1.0, -2.0], [-1.0, -1.0]])
    got = token_weights("online_rft", old, old, double([1.0, 0.0]), torch.ones(2, 2))
    torch.testing.assert_close(got.weight, double([[0.25, 0.25], [0.0, 0.0]]))


def test_the_length_constant_divides_the_weights_too():
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    arguments = old + 0.1, old, torch.tensor([2.0, -1.0], dtype=torch.float64), torch.ones(2, 2)
    plain, eighth = (token_weights(replace(OBJECTIVES["dr_grpo"], length_constant=n), *arguments) for n in (1.0, 8.0))
    torch.testing.assert_close(8 * eighth.weight, plain.weight)
