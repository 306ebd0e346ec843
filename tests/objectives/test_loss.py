"""The loss: goldens by hand, identities between methods, and its route-weight and KL terms."""

import math
from dataclasses import replace

import pytest
import torch
from loss_helpers import at_ratios, double, run

from moe_rl.objectives import OBJECTIVES, Objective, kl_estimate, policy_loss
from moe_rl.objectives.ratios import aggregation_weights

ONE_PIECE = [name for name, objective in OBJECTIVES.items() if not objective.needs]


def test_grpo_golden():
    # row 0, A = 2: ratios 1.5 (clipped at 1.27) and 0.5 (A > 0: not clipped): (1.27 + 0.5)/2 * 2 = 1.77
    # row 1, A = -1: ratios 0.5 (clipped at 0.8) and 1.5 (not clipped): -(0.8 + 1.5)/2 = -1.15
    # J = (1.77 - 1.15)/2 = 0.31. d J/d logp = r A/(2 * 2) where not clipped: 0.5 * 2/4 = 0.25, -1.5/4
    out, slope = run("grpo", [[1.5, 0.5], [0.5, 1.5]], [2.0, -1.0])
    torch.testing.assert_close(out.loss, double(-0.31))
    assert out.clipped.tolist() == [[True, False], [True, False]]
    torch.testing.assert_close(slope, double([[0.0, -0.25], [0.0, 0.375]]))


def test_gspo_golden():
    # s = sqrt(1.21 * 1) = 1.1, above 1.0004: clipped for A > 0, not for A < 0
    # J = (1.0004 * 2 + 1.1 * (-1))/2 = 0.4504; row 1: s A/(2 * 2) = -1.1/4 on both tokens
    out, slope = run("gspo", [[1.21, 1.0], [1.21, 1.0]], [2.0, -1.0])
    torch.testing.assert_close(out.loss, double(-0.4504))
    assert out.clipped.tolist() == [[True, True], [False, False]]
    torch.testing.assert_close(slope, double([[0.0, 0.0], [0.275, 0.275]]))


def test_gspo_token_golden_with_token_advantages():
    # s = 1.1: token 0 (A = 2) is clipped at 1.0004, token 1 (A = -1) is not
    # J = (1.0004 * 2 - 1.1)/2 = 0.4504; token 1: 1.1 * (-1)/2 = -0.55
    out, slope = run("gspo_token", [[1.21, 1.0]], [[2.0, -1.0]])
    torch.testing.assert_close(out.loss, double(-0.4504))
    assert out.clipped.tolist() == [[True, False]]
    torch.testing.assert_close(slope, double([[0.0, 0.55]]))
    # GSPO with the same advantages shares the gradient of token 1 among both
    plain, shared = run("gspo", [[1.21, 1.0]], [[2.0, -1.0]])
    torch.testing.assert_close(plain.loss, out.loss)  # the clip goes by each token's advantage, not by their mean
    assert plain.clipped.tolist() == [[True, False]]
    torch.testing.assert_close(shared, double([[0.275, 0.275]]))


def test_sequence_clip_golden():
    # s = 1.1 as for GSPO: row 0 (A = 2) is out of the gradient whole, its token of ratio 1 too; row 1 is not
    # J = ((1.21 + 1) * 2/2 - (1.21 + 1)/2)/2 = 0.5525; row 1: each token's own r A/(2 * 2)
    objective = replace(OBJECTIVES["gspo"], ratio="token", gate="sequence_clip")
    out, slope = run(objective, [[1.21, 1.0], [1.21, 1.0]], [2.0, -1.0])
    torch.testing.assert_close(out.loss, double(-0.5525))
    assert out.clipped.tolist() == [[True, True], [False, False]]
    torch.testing.assert_close(slope, double([[0.0, 0.0], [0.3025, 0.25]]))
    # a ratio that overflows leaves neither a value nor a gradient that is not finite where its sequence is clipped
    out, slope = run(objective, [[1e300, 1e300]], [1.0])
    assert out.loss.isfinite() and slope.tolist() == [[0.0, 0.0]]


def test_the_router_shift_enters_the_clip_of_sequences():
    """Under "before_clip" the ratio that is averaged has gamma in it, as with ratio="sequence"."""
    gspo = replace(OBJECTIVES["gspo"], route_weight="before_clip", clip_low=0.2, clip_high=0.27)
    found = {}
    for level, name in (("sequence", "clip"), ("token", "sequence_clip")):
        objective = replace(gspo, ratio=level, gate=name)
        out, _ = run(objective, [[1.0, 1.0], [1.6, 1.6]], [-1.0, 1.0], route_weight=double([[0.5, 0.9], [0.7, 0.7]]))
        found[name] = out.clipped.tolist(), float(out.metrics["gate_ratio_mean"])
    assert found["sequence_clip"] == found["clip"]
    assert found["clip"][0] == [[True, True], [False, False]]  # sqrt(0.45) = 0.67 and 1.12, without gamma 1 and 1.6


def test_dual_clip_golden():
    # A = -2, r = 5: PPO -10, floored at 3 * (-2) = -6 and out of the gradient; r = 2: -4, in the gradient
    out, slope = run("dual_clip", [[5.0, 2.0]], [-2.0])
    torch.testing.assert_close(out.loss, double(5.0))
    assert out.clipped.tolist() == [[True, False]]
    torch.testing.assert_close(slope, double([[0.0, 2.0]]))
    on_the_ceiling = replace(OBJECTIVES["dual_clip"], dual_clip=2.0)
    assert run(on_the_ceiling, [[2.0]], [-1.0])[0].clipped.tolist() == [[False]], "clipped is what is beyond it"


def test_soft_dual_clip_golden():
    # as above, and the token beyond the ceiling stays with its weight 3: slope -(3 * -2)/2; a ratio that overflows, too
    objective = replace(OBJECTIVES["dual_clip"], gate="soft_dual_clip")
    for ratio in (5.0, 1e300):
        out, slope = run(objective, [[ratio, 2.0]], [-2.0])
        torch.testing.assert_close(out.loss, double(5.0))
        assert not out.clipped.any()
        torch.testing.assert_close(slope, double([[3.0, 2.0]]))
    # the clip is GRPO's, and the ceiling is none where A > 0
    for ratios, advantage in (([[1.5, 0.9]], 1.0), ([[0.5, 2.9]], -1.0)):
        (soft, one), (grpo, other) = (run(o, ratios, [advantage]) for o in (objective, OBJECTIVES["grpo"]))
        assert soft.loss == grpo.loss and torch.equal(one, other) and torch.equal(soft.clipped, grpo.clipped)


def test_sapo_golden():
    # A = 1, tau = 1, r = 2: 4 sigma(1); slope 4 sigma(1) sigma(-1) r = sech^2(1/2) * 2
    out, slope = run("sapo", [[2.0]], [1.0])
    torch.testing.assert_close(out.loss, double(-4 / (1 + math.exp(-1))))
    torch.testing.assert_close(slope, double([[-2 / math.cosh(0.5) ** 2]]))
    # A = -1, tau = 1.05, r = 1: 4/1.05 * 1/2; slope 1
    out, slope = run("sapo", [[1.0]], [-1.0])
    torch.testing.assert_close(out.loss, double(2 / 1.05))
    torch.testing.assert_close(slope, double([[1.0]]))


def test_a_ratio_on_the_bound_is_not_clipped():
    objective = Objective(clip_low=0.5, clip_high=1.0)  # bounds 0.5 and 2, exact in binary
    logps, old = double([[math.log(2.0), math.log(0.5)]], requires_grad=True), double([[0.0, 0.0]])
    ratio = logps.detach().exp()
    assert ratio.tolist() == [[2.0, 0.5]]
    out = policy_loss(objective, logps, old, double([[1.0, -1.0]]), torch.tensor([[1, 1]]))
    out.loss.backward()
    assert not out.clipped.any() and (logps.grad != 0).all()


@pytest.mark.parametrize("name", ONE_PIECE)
def test_on_policy_gradients_are_plain_policy_gradients(name):
    # at pi = pi_old every gate has slope 1, so that d loss/d logp = -A * (weight of the token)
    g = torch.Generator().manual_seed(3)
    logps = -torch.rand(4, 6, generator=g, dtype=torch.float64) - 0.1
    mask = torch.rand(4, 6, generator=g) < 0.7
    advantages = torch.randn(4, generator=g, dtype=torch.float64)
    leaf = logps.clone().requires_grad_()
    out = policy_loss(name, leaf, logps, advantages, mask)
    out.loss.backward()
    o = OBJECTIVES[name]
    weights = aggregation_weights(mask, o.aggregate, length_constant=o.length_constant)
    torch.testing.assert_close(leaf.grad, -weights * advantages[:, None])
    assert not out.clipped.any()
    assert torch.equal(out.log_ratio, torch.zeros(4, 6, dtype=torch.float64))


def test_one_token_completions_make_gspo_equal_grpo():
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(16, 4, generator=g, dtype=torch.float64)
    shift = 1e-3 * torch.randn(16, 4, generator=g, dtype=torch.float64)
    advantages = torch.randn(16, generator=g, dtype=torch.float64)
    mask = torch.zeros(16, 4, dtype=torch.bool)
    mask[torch.arange(16), torch.randint(4, (16,), generator=g)] = True
    results = []
    for ratio in ("token", "sequence", "sequence_token"):
        logps = (old + shift).requires_grad_()
        out = policy_loss(replace(OBJECTIVES["gspo"], ratio=ratio), logps, old, advantages, mask)
        out.loss.backward()
        results.append((out.loss.detach(), logps.grad, out.clipped))
    for loss, slope, clipped in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(slope, results[0][1])
        assert torch.equal(clipped, results[0][2]) and 0 < clipped.sum() < 16


def test_equal_token_advantages_make_gspo_token_equal_gspo():
    g = torch.Generator().manual_seed(1)
    old = -torch.rand(12, 5, generator=g, dtype=torch.float64)
    shift = 1e-3 * torch.randn(12, 5, generator=g, dtype=torch.float64)
    advantages = torch.randn(12, generator=g, dtype=torch.float64)
    mask = torch.rand(12, 5, generator=g) < 0.8
    results = []
    for name, given in (("gspo", advantages), ("gspo_token", advantages[:, None].expand(12, 5))):
        logps = (old + shift).requires_grad_()
        out = policy_loss(name, logps, old, given, mask)
        out.loss.backward()
        results.append((out.loss.detach(), logps.grad, out.clipped))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2]) and results[0][2].any() and not results[0][2].all()


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if o.gate != "likelihood"])
def test_a_sequence_without_advantage_stays_out_however_far_it_is(name):
    objective = OBJECTIVES[name]
    old = torch.tensor([[-101.0, -101.0], [-1.0, -1.0]])  # a ratio of e^100 overflows float32
    logps = torch.full((2, 2), -1.0, requires_grad=True)
    given = {"ref_logps": logps.detach(), "rollout_logps": logps.detach(), "route_weight": torch.ones(2, 2)}
    mask = torch.ones(2, 2, dtype=torch.bool)
    needed = {key: given[key] for key in objective.needs}
    out = policy_loss(objective, logps, old, torch.tensor([0.0, 1.0]), mask, **needed)
    out.loss.backward()
    assert bool(out.loss.isfinite()) and logps.grad is not None
    assert not logps.grad[0].any() and bool(logps.grad[1].isfinite().all())


def test_gmpo_is_never_above_grpo():
    # |geometric mean| <= |arithmetic mean| of the same clipped terms, sequence by sequence
    bounds = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    grpo = replace(OBJECTIVES["grpo"], **bounds)
    g = torch.Generator().manual_seed(2)
    for _ in range(50):
        old = -torch.rand(1, 8, generator=g, dtype=torch.float64)
        logps = old + 0.7 * torch.randn(1, 8, generator=g, dtype=torch.float64)
        advantages = torch.randn(1, generator=g, dtype=torch.float64)
        mask = torch.ones(1, 8, dtype=torch.bool)
        gmpo = policy_loss("gmpo", logps, old, advantages, mask)
        arithmetic = policy_loss(grpo, logps, old, advantages, mask)
        assert gmpo.loss.abs() <= arithmetic.loss.abs() + 1e-12
        assert torch.equal(gmpo.clipped, arithmetic.clipped)


def test_minirl_has_the_gradient_of_a_summed_grpo():
    ratios, advantages = [[1.5, 0.9, 1.1], [0.5, 1.3, 1.0]], [1.0, -2.0]
    _, slope = run("minirl", ratios, advantages)
    _, expected = run(replace(OBJECTIVES["grpo"], aggregate="sum"), ratios, advantages)
    torch.testing.assert_close(slope, expected)


def test_the_rollout_anchor_is_the_old_anchor_with_other_log_probabilities():
    logps, old = at_ratios([[1.5, 0.9], [0.5, 1.3]], requires_grad=False)
    rollout, garbage = old + 0.3, torch.full_like(old, float("nan"))
    advantages, mask = double([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool)
    anchored = replace(OBJECTIVES["grpo"], anchor="rollout")
    out = policy_loss(anchored, logps, garbage, advantages, mask, rollout_logps=rollout)
    plain = policy_loss("grpo", logps, rollout, advantages, mask)
    assert torch.equal(out.loss, plain.loss) and torch.equal(out.log_ratio, plain.log_ratio)


def test_a_route_weight_of_one_changes_nothing_and_a_small_one_is_floored():
    logps, old = at_ratios([[1.5, 0.9], [0.5, 1.3]], requires_grad=False)
    advantages, mask = double([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool)
    plain = policy_loss("gmpo", logps, old, advantages, mask).loss
    for name in ("rspo", "rspo_after_clip"):
        ones = policy_loss(name, logps, old, advantages, mask, route_weight=torch.ones_like(old)).loss
        torch.testing.assert_close(ones, plain)
        tiny = policy_loss(name, logps, old, advantages, mask, route_weight=torch.zeros_like(old)).loss
        floor = policy_loss(name, logps, old, advantages, mask, route_weight=torch.full_like(old, 0.8)).loss
        torch.testing.assert_close(tiny, floor)
        assert not torch.isclose(floor, plain)


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "cispo"])
def test_route_weight_plugs_into_other_methods(name):
    # before the clip it scales the ratio, as lower old log-probabilities would; after the clip the surrogate
    logps, old = at_ratios([[1.1, 0.9], [0.95, 1.2]], requires_grad=False)
    advantages, mask = double([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool)
    gamma = double([[0.9, 0.9], [0.85, 0.85]])
    before = replace(OBJECTIVES[name], route_weight="before_clip")
    torch.testing.assert_close(
        policy_loss(before, logps, old, advantages, mask, route_weight=gamma).loss,
        policy_loss(name, logps, old - gamma.log(), advantages, mask).loss,
    )
    after = replace(OBJECTIVES[name], route_weight="after_clip")
    torch.testing.assert_close(  # gamma is the same on each token of a row here
        policy_loss(after, logps, old, advantages, mask, route_weight=gamma).loss,
        policy_loss(name, logps, old, (advantages * gamma[:, 0]), mask).loss,
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "minirl"])
def test_kl_in_the_loss_is_aggregated_like_the_policy_term(name, estimator):
    logps, old = at_ratios([[1.1, 0.9, 7.0], [0.95, 1.2, 1.0]])
    ref = old - 0.3
    ref[0, 2] = float("nan")
    advantages, mask = double([1.0, -1.0]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    objective = replace(OBJECTIVES[name], kl_coef=0.1, kl_estimator=estimator)
    out = policy_loss(objective, logps, old, advantages, mask, ref_logps=ref)
    plain = policy_loss(name, logps, old, advantages, mask)
    kl = kl_estimate(logps, ref, mask, estimator)
    penalty = (aggregation_weights(mask, objective.aggregate) * kl).sum()
    torch.testing.assert_close(out.loss, plain.loss + 0.1 * penalty)
    torch.testing.assert_close(
        torch.autograd.grad(out.loss, logps)[0], torch.autograd.grad(plain.loss + 0.1 * penalty, logps)[0]
    )
    torch.testing.assert_close(out.metrics["ref_kl"], kl.detach().sum() / 5)


def test_importance_weighted_kl_golden():
    # r = 2, d = log ref - log pi = -log 4: k3 = 1/4 - 1 + log 4; times r
    logps, old = at_ratios([[2.0]])
    ref = logps.detach() - math.log(4.0)
    objective = replace(OBJECTIVES["grpo"], kl_coef=1.0, kl_importance_weighted=True)
    out = policy_loss(objective, logps, old, double([0.0]), torch.tensor([[True]]), ref_logps=ref)
    k3 = 0.25 - 1 + math.log(4.0)
    torch.testing.assert_close(out.loss, double(2 * k3))
    # slope: r (k3 + d k3/d logp) = 2 (k3 + 1 - 1/4)
    torch.testing.assert_close(torch.autograd.grad(out.loss, logps)[0], double([[2 * (k3 + 0.75)]]))


def test_a_reference_without_a_coefficient_is_only_reported():
    logps, old = at_ratios([[1.1, 0.9]])
    mask = torch.tensor([[1, 1]])
    out = policy_loss("grpo", logps, old, double([1.0]), mask, ref_logps=old)
    assert torch.equal(out.loss, policy_loss("grpo", logps, old, double([1.0]), mask).loss)
    assert out.metrics["ref_kl"] > 0


def test_half_precision_route_weights_are_computed_in_float32():
    # 0.9 in bf16 is 0.8984375; its log must be that of this number, not rounded to bf16 again
    logps, old = at_ratios([[1.0]], requires_grad=False)
    gamma = torch.tensor([[0.9]], dtype=torch.bfloat16)
    out = policy_loss("rspo", logps.float(), old.float(), torch.ones(1), torch.ones(1, 1), route_weight=gamma)
    assert out.tokens.gate_log_ratio.item() == pytest.approx(math.log(0.8984375), rel=1e-6)
    assert out.loss.item() == pytest.approx(-0.8984375, rel=1e-6)


@pytest.mark.parametrize("name", ONE_PIECE)
def test_a_token_without_an_advantage_is_zero_however_large_its_ratio(name):
    # e^800 is inf in float64, and 0 * inf would be NaN; the other row stays what it is alone, over two rows
    old = double([[0.0], [-1.0]])
    logps = double([[800.0], [-1.0]], requires_grad=True)
    out = policy_loss(name, logps, old, double([0.0, 1.0]), torch.ones(2, 1))
    out.loss.backward()
    alone = policy_loss(name, old[1:], old[1:], double([1.0]), torch.ones(1, 1)).loss
    torch.testing.assert_close(out.loss.detach(), alone / 2)
    assert logps.grad[0] == 0 and logps.grad[1] < 0


def test_a_sequence_that_is_clipped_has_a_finite_loss_whatever_its_tokens_are():
    logps = torch.tensor([[100.0, 0.0]]).requires_grad_()  # e^100 is infinite in float32
    objective = replace(OBJECTIVES["grpo"], gate="sequence_clip")
    out = policy_loss(objective, logps, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    out.loss.backward()
    assert out.loss.isfinite() and logps.grad.tolist() == [[0.0, 0.0]] and bool(out.clipped.all())
