"""Gates of a divergence (DPPO, DRPO) and VESPO's kernel: goldens by hand, the formulas of others on random tensors."""

import math
from dataclasses import replace

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, policy_loss, token_weights


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def run(name, new, old, advantages):
    """Loss, d loss/d logps and the clipped tokens of one row of these probabilities."""
    logps, mask = double([new]).log().requires_grad_(), torch.ones(1, len(new))
    out = policy_loss(name, logps, double([old]).log(), double([advantages]), mask)
    (slope,) = torch.autograd.grad(out.loss, logps)
    return out, slope[0].tolist()


def test_dppo_tv_golden():
    # A > 0: 0.4 -> 0.6 moved 0.2 > 0.15: out, though its ratio is 1.5; 1e-5 -> 1e-3 moved 0.00099: in, with ratio
    # 100 cut at 20. A < 0: 0.6 -> 0.4 out, 0.4 -> 0.6 in (it comes back). Weights r A / 4 tokens
    out, slope = run("dppo_tv", [0.6, 1e-3, 0.4, 0.6], [0.4, 1e-5, 0.6, 0.4], [1.0, 1.0, -1.0, -1.0])
    assert out.clipped.tolist() == [[True, False, True, False]]
    assert slope == pytest.approx([0.0, -20 / 4, 0.0, 1.5 / 4])
    assert out.loss.item() == pytest.approx(-(20 * math.log(1e-3) - 1.5 * math.log(0.6)) / 4)


def test_dppo_kl_golden():
    # q = 0.4, p = 0.6: D = 0.4 log(2/3) + 0.6 log(0.6/0.4) = 0.0811 > 0.05: out where A > 0
    # q = 0.5, p = 0.6: D = 0.5 log(5/6) + 0.5 log(5/4) = 0.0204: in, though its ratio is 1.2
    out, slope = run("dppo_kl", [0.6, 0.6, 0.4, 0.6], [0.4, 0.5, 0.6, 0.4], [1.0, 1.0, -1.0, -1.0])
    assert 0.4 * math.log(2 / 3) + 0.6 * math.log(1.5) == pytest.approx(0.0811, abs=1e-4)
    assert out.clipped.tolist() == [[True, False, True, False]]
    assert slope == pytest.approx([0.0, -1.2 / 4, 0.0, 1.5 / 4])


def test_drpo_golden():
    # q = 0.4, p = 0.5, A = 2, delta 0.15: r A - |A| q (r - 1)^2 / (2 delta) = 2.5 - 2 * 0.4 * 0.0625 / 0.3
    # slope r A (1 - 0.1/0.15) = 2.5 / 3; past the bound, p = 0.6: 3 (1 - 0.2/0.15) = -1, back
    # A = -2, p = 0.5, q = 0.6: r A (1 - |p - q|/delta) = -5/3 (1 - 0.1/0.15) = -5/9
    for p, q, a, slope in ((0.5, 0.4, 2.0, 2.5 / 3), (0.6, 0.4, 2.0, -1.0), (0.5, 0.6, -2.0, -5 / 9)):
        out, (got,) = run("drpo", [p], [q], [a])
        assert got == pytest.approx(-slope)
        assert out.loss.item() == pytest.approx(-(p / q * a - 2 * q * (p / q - 1) ** 2 / 0.3))
        assert not out.clipped.any()


def test_vespo_golden():
    # w = 1.2 * 1.5 = 1.8 on both tokens; A > 0: w^2 e^(3 (1 - w)), A < 0: w^3 e^(2 (1 - w)); over 2 tokens
    up, down = 1.8**2 * math.exp(-3 * 0.8), 1.8**3 * math.exp(-2 * 0.8)
    out, slope = run("vespo", [0.6, 0.6], [0.5, 0.4], [1.0, -1.0])
    assert slope == pytest.approx([-up / 2, down / 2])
    assert out.loss.item() == pytest.approx(-(up - down) * math.log(0.6) / 2)


def verl(kind, logps, old, advantages):
    """Losses and masks of verl's `dppo_tv` and `dppo_kl`, from their formulas; a token mean over all tokens."""
    p, q = logps.exp(), old.exp()
    ratio = (logps - old).clamp(-20, 20).exp().clamp(max=20.0)
    if kind == "tv":
        fine = torch.where(advantages > 0, p - q <= 0.15, p - q >= -0.15)
    else:
        kl = q * (old - logps) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        fine = torch.where(advantages > 0, (kl <= 0.05) | (p <= q), (kl <= 0.05) | (p >= q))
    return -(advantages * ratio.detach() * logps * fine).mean(), ~fine


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_that_of_verl(kind):
    g = torch.Generator().manual_seed(1)
    old = torch.rand(64, 32, generator=g, dtype=torch.float64).mul(0.98).add(0.01).log()
    logps = (old + 0.6 * torch.randn(64, 32, generator=g, dtype=torch.float64)).clamp(max=math.log(0.99))
    advantages = torch.randn(64, 1, generator=g, dtype=torch.float64).expand(64, 32).contiguous()
    leaves = [logps.clone().requires_grad_() for _ in range(2)]
    out = policy_loss(f"dppo_{kind}", leaves[0], old, advantages, torch.ones(64, 32))
    loss, masked = verl(kind, leaves[1], old, advantages)
    torch.testing.assert_close(out.loss, loss)
    assert torch.equal(out.clipped, masked) and 100 < int(masked.sum()) < 1900
    slopes = [torch.autograd.grad(value, leaf)[0] for value, leaf in zip((out.loss, loss), leaves, strict=True)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "drpo", "vespo"])
def test_nothing_is_masked_or_weighed_where_the_policy_did_not_move(name, dtype):
    # probabilities from certain to impossible, thresholds of 0: any rounding of p - q would show
    logps = torch.tensor([[0.0, -1e-7, -1e-3, -1.0, -30.0, -200.0]]).to(dtype)
    objective = OBJECTIVES[name] if name in ("drpo", "vespo") else replace(OBJECTIVES[name], clip_low=0, clip_high=0)
    for sign in (1.0, -1.0):
        weights = token_weights(objective, logps, logps, torch.full((1,), sign), torch.ones(1, 6))
        assert not weights.clipped.any()
        assert torch.equal(weights.importance, torch.ones(1, 6))


def test_a_probability_that_rounds_to_one_is_not_infinitely_far():
    # p = 1 in float32, q = 0.9999: D is capped by 1 - p >= 1e-8, about 1e-4 log 1e4; nowhere near 0.05
    out = policy_loss("dppo_kl", torch.zeros(1, 1), torch.tensor([[-1e-4]]), torch.ones(1), torch.ones(1, 1))
    assert not out.clipped.any()


@pytest.mark.parametrize(
    ("name", "low", "high", "inside"),
    [
        ("grpo", 0.2, 0.4, (1.3, 0.85)),
        ("dppo_tv", 0.1, 0.2, (1.3, 0.82)),
        ("dppo_kl", 0.005, 0.03, (1.2, 0.92)),
        ("gmpo", 0.2, 0.4, (1.3, 0.85)),
        ("sequence_clip", 0.2, 0.4, (1.3, 0.85)),
    ],
)
def test_each_bound_is_that_of_its_side(name, low, high, inside):
    """Ratios within the wider bound above and the narrower one below; with the two exchanged the first is out."""
    method = {"gate": "sequence_clip"} if name == "sequence_clip" else {}
    objective = replace(OBJECTIVES["grpo" if method else name], clip_low=low, clip_high=high, **method)
    q = 0.5
    for ratio, advantage in zip(inside, (1.0, -1.0), strict=True):
        out, _ = run(objective, [q * ratio], [q], [advantage])
        assert not out.clipped.any(), (ratio, advantage)
    exchanged = replace(objective, clip_low=high, clip_high=low)
    assert run(exchanged, [q * inside[0]], [q], [1.0])[0].clipped.all()
    beyond = 1 - 2 * (1 - inside[1])  # out of the narrow bound below, within the wide one
    assert run(objective, [q * beyond], [q], [-1.0])[0].clipped.all()
    assert not run(exchanged, [q * beyond], [q], [-1.0])[0].clipped.any()


def test_the_weight_of_cispo_is_bounded_below_too():
    objective = replace(OBJECTIVES["cispo"], clip_low=0.2, clip_high=0.4)
    _, slope = run(objective, [0.1, 0.9], [0.5, 0.5], [1.0, 1.0])
    assert slope == pytest.approx([-0.8 / 2, -1.4 / 2])


def test_the_strength_of_the_quadratic_is_that_of_its_side():
    objective = replace(OBJECTIVES["drpo"], clip_low=0.1, clip_high=0.3)
    _, slope = run(objective, [0.6, 0.4], [0.5, 0.5], [1.0, -1.0])
    assert slope == pytest.approx([-1.2 * (1 - 0.1 / 0.3), 0.8 * (1 - 0.1 / 0.1)])


def test_the_mean_of_gmpo_is_of_ratios_bounded_on_their_side():
    """`clipped` says the same of a token whatever the mean takes in its place."""
    objective = replace(OBJECTIVES["gmpo"], clip_low=0.3, clip_high=0.5)  # log 1.5 = 0.405
    assert run(objective, [0.6], [0.4], [1.0])[0].loss.item() == pytest.approx(-1.5)
    assert run(objective, [0.4], [0.6], [-1.0])[0].loss.item() == pytest.approx(math.exp(-0.3))
