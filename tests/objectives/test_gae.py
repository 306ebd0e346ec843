import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives import generalized_advantages, token_rewards, value_loss, whiten

NAN = float("nan")


def double(rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


def test_token_rewards_golden():
    # the outcome on the last unmasked token; the penalty 0.1 (log pi - log ref) on each
    mask = torch.tensor([[False, True, True, False], [True, False, False, False], [False] * 4])
    rewards = double([2.0, -1.0, 9.0])
    torch.testing.assert_close(token_rewards(rewards, mask), double([[0, 0, 2.0, 0], [-1.0, 0, 0, 0], [0.0] * 4]))
    logps = double([[NAN, -1.0, -2.0, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4])
    ref = double([[NAN, -1.5, -1.0, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4])
    # row 0: -0.1 * 0.5 = -0.05; 2 - 0.1 * (-1) = 2.1
    torch.testing.assert_close(
        token_rewards(rewards, mask, kl_coef=0.1, logps=logps, ref_logps=ref),
        double([[0, -0.05, 2.1, 0], [-1.0, 0, 0, 0], [0.0] * 4]),
    )
    with pytest.raises(ValueError, match="both needed"):
        token_rewards(rewards, mask, kl_coef=0.1, logps=logps)


@pytest.mark.parametrize("shape", [(1,), (3, 1), ()])
def test_a_reward_is_not_given_to_every_response(shape, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    with pytest.raises(ValueError, match=r"rewards: expected one for each of 3 responses, \[B\]"):
        token_rewards(torch.ones(shape), torch.ones(3, 4, dtype=torch.bool))


def test_gae_golden():
    # gamma 0.9, lam 0.5, values 1, 2, 3, reward 10 at the end, one masked position in between
    # delta_3 = 10 - 3 = 7; delta_2 = 0.9 * 3 - 2 = 0.7; delta_1 = 0.9 * 2 - 1 = 0.8
    # A_3 = 7; A_2 = 0.7 + 0.45 * 7 = 3.85; A_1 = 0.8 + 0.45 * 3.85 = 2.5325
    mask = torch.tensor([[True, False, True, True]])
    rewards, values = double([[0.0, NAN, 0.0, 10.0]]), double([[1.0, NAN, 2.0, 3.0]])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, double([[2.5325, 0.0, 3.85, 7.0]]))
    torch.testing.assert_close(returns, double([[3.5325, 0.0, 5.85, 10.0]]))


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_gae_with_lam_1_is_return_to_go_minus_value(seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 6, generator=g, dtype=torch.float64)
    values = torch.randn(3, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=g) < 0.6
    live = torch.where(mask, rewards, 0.0)
    to_go = live.flip(-1).cumsum(-1).flip(-1)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0.0))
    torch.testing.assert_close(returns, torch.where(mask, to_go, 0.0))


def test_gae_with_lam_0_is_the_one_step_error():
    rewards, values = double([[0.5, 1.0]]), double([[2.0, 3.0]])
    advantages, _ = generalized_advantages(rewards, values, torch.ones(1, 2, dtype=torch.bool), 1.0, 0.0)
    torch.testing.assert_close(advantages, double([[0.5 + 3.0 - 2.0, 1.0 - 3.0]]))


def test_whiten():
    mask = torch.tensor([[True, False], [True, True]])
    got = whiten(double([[1.0, NAN], [2.0, 3.0]]), mask)  # mean 2, unbiased std 1
    torch.testing.assert_close(got, double([[-1.0, 0.0], [0.0, 1.0]]))
    assert whiten(double([[5.0, NAN]]), torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    equal = whiten(torch.full((64, 7), 0.1), torch.ones(64, 7))
    assert equal.eq(0).all(), "no signal: what its mean rounds to, over a deviation as small, was 0.7"


def test_value_loss_golden():
    # token 0: V 1.5, old 1, R 3: errors 1.5^2 = 2.25 and (1.2 - 3)^2 = 3.24 -> 3.24, flat (clipped)
    # token 1: V 0.5, old 0.4, R 0: 0.25, not clipped; slope V - R = 0.5
    # token 2: V 2, old 1, R 1: 1 and (1.2 - 1)^2 = 0.04 -> 1; slope 1
    values = double([[1.5, 0.5, 2.0, NAN]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    old, returns = double([[1.0, 0.4, 1.0, NAN]]), double([[3.0, 0.0, 1.0, NAN]])
    loss = value_loss(values, old, returns, mask, clip=0.2)
    torch.testing.assert_close(loss, double(0.5 * (3.24 + 0.25 + 1.0) / 3))
    loss.backward()
    torch.testing.assert_close(values.grad, double([[0.0, 0.5 / 3, 1.0 / 3, 0.0]]))
    free = value_loss(values, old, returns, mask, clip=None)
    torch.testing.assert_close(free, double(0.5 * (2.25 + 0.25 + 1.0) / 3))
    torch.testing.assert_close(value_loss(values, old, returns, mask, total_tokens=6), loss / 2)


def test_the_value_head_alone_learns_from_its_loss():
    values, old, returns = (double([[value]], requires_grad=True) for value in (2.0, 1.0, 3.0))
    value_loss(values, old, returns, torch.tensor([[True]])).backward()  # (1.2 - 3)^2 is the larger error
    assert values.grad.item() == 0 and old.grad is None and returns.grad is None
    z = double([[1.0]], requires_grad=True)
    some = torch.tensor([[True]])
    made = token_rewards(z[0], some, kl_coef=0.1, logps=z, ref_logps=z), *generalized_advantages(z, z, some)
    assert not any(tensor.requires_grad for tensor in (*made, whiten(z, some)))


def test_value_loss_refuses_a_negative_clip():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"clip: expected a distance of at least 0, .*, got -0\.2"):
        value_loss(one, one, one, one, clip=-0.2)


def test_the_decay_is_095_unless_another_is_given_and_a_clip_may_be_0():
    r, v, mask = double([[0.0, 1.0]]), double([[0.5, 0.25]]), torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(generalized_advantages(r, v, mask)[0], generalized_advantages(r, v, mask, 1.0, 0.95)[0])
    held = value_loss(v, v - 1, r, mask, clip=0)  # the larger errors: (0.5 - 0)^2, and (-0.75 - 1)^2 of the old value
    assert held.item() == pytest.approx((0.5**2 / 2 + 1.75**2 / 2) / 2)
