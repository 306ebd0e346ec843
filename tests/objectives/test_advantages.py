import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives import (
    accepted_advantages,
    decoupled_advantages,
    group_advantages,
    leave_one_out_advantages,
    process_advantages,
)


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_group_std_golden():
    # group (0, 2): mean 1, unbiased std sqrt((1 + 1)/1) = sqrt 2; (1, 5): mean 3, std sqrt 8
    got = group_advantages(double([0.0, 2.0, 1.0, 5.0]), 2, eps=0.5)
    a, b = 1 / (math.sqrt(2) + 0.5), 2 / (math.sqrt(8) + 0.5)
    torch.testing.assert_close(got, double([-a, a, -b, b]))


def test_default_eps():
    got = group_advantages(double([0.0, 1.0, 1.0, 0.0]), 4)
    # mean 1/2, unbiased variance 4 * 1/4 / 3 = 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(got, double([-expected, expected, expected, -expected]))


def test_mean_only_and_batch_golden():
    rewards = double([0.0, 2.0, 1.0, 5.0])
    torch.testing.assert_close(group_advantages(rewards, 2, "none"), double([-1.0, 1.0, -2.0, 2.0]))
    # batch mean 2, squares 4 + 0 + 1 + 9 = 14, unbiased std sqrt(14/3)
    std = math.sqrt(14 / 3) + 1e-4
    torch.testing.assert_close(group_advantages(rewards, 2, "batch"), double([-1.0, 1.0, -2.0, 2.0]) / std)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_give_exactly_zero(scale, dtype, reward, size):
    rewards = torch.tensor([reward] * size + [float(i) for i in range(size)], dtype=dtype)
    assert torch.equal(group_advantages(rewards, size, scale)[:size], torch.zeros(size, dtype=dtype))


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
def test_equal_rewards_give_exactly_zero_without_eps(scale):
    # zero spread over zero: the first group alone for "std", the whole batch for "batch"
    assert torch.equal(group_advantages(double([1.0, 1.0, 1.0, 1.0]), 2, scale, eps=0.0), double([0.0] * 4))


def test_rewards_may_be_integers_or_verdicts():
    # group (0, 1): mean 1/2
    expected = torch.tensor([-0.5, 0.5])
    assert torch.equal(group_advantages(torch.tensor([0, 1]), 2, "none"), expected)
    assert torch.equal(group_advantages(torch.tensor([False, True]), 2, "none"), expected)


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=8, max_size=8),
    shift=st.floats(-5, 5),
    factor=st.floats(0.5, 2),
)
@settings(max_examples=50, deadline=None)
def test_groups_sum_to_zero_and_shifts_do_not_matter(rewards, shift, factor):
    values = double(rewards)
    for scale in ("std", "none", "batch"):
        advantages = group_advantages(values, 4, scale)
        assert advantages.reshape(2, 4).sum(-1).abs().max() < 1e-9
    torch.testing.assert_close(
        group_advantages(values + shift, 4, "none"), group_advantages(values, 4, "none"), atol=1e-12, rtol=0
    )
    if values.reshape(2, 4).std(-1).min() > 1e-3:
        torch.testing.assert_close(
            group_advantages(values * factor, 4, "std", eps=0.0), group_advantages(values, 4, "std", eps=0.0)
        )


def test_refusals():
    with pytest.raises(ValueError, match="cut inside a group"):
        group_advantages(torch.zeros(5), 2)
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"group_size: {size} does not divide the 4 rows"):
            group_advantages(torch.zeros(4), size)
    with pytest.raises(ValueError, match=r"nan\] at rows \[1\]"):
        group_advantages(torch.tensor([0.0, float("nan")]), 2)
    with pytest.raises(ValueError, match="group_size: leaving one out"):
        leave_one_out_advantages(torch.zeros(2), 1)
    with pytest.raises(ValueError, match="eps: expected a number of at least 0, got -1"):
        group_advantages(torch.zeros(2), 2, eps=-1)


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_a_table_of_rewards_is_refused(advantages, monkeypatch):
    """Flattened, the rows of a table of groups by samples, or of another layout, would be cut into groups unseen."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    with pytest.raises(ValueError, match=r"rewards: expected one axis \[B\].*, got \[4, 2\]"):
        advantages(torch.arange(8.0).reshape(4, 2), 2)


def test_leave_one_out_golden_and_identity():
    # others' means of (1, 2, 6): 4, 3.5, 1.5
    rewards = double([1.0, 2.0, 6.0])
    torch.testing.assert_close(leave_one_out_advantages(rewards, 3), double([-3.0, -1.5, 4.5]))
    torch.testing.assert_close(leave_one_out_advantages(rewards, 3), 1.5 * group_advantages(rewards, 3, "none"))
    assert torch.equal(leave_one_out_advantages(double([0.1] * 3), 3), torch.zeros(3, dtype=torch.float64))


def test_accepted():
    assert accepted_advantages(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 0.0, 1.0]


def test_process_supervision_golden():
    # step rewards of the group: 1 and 3 in row 0 (tokens 1, 3), 5 in row 1 (token 2); mean 3,
    # unbiased std sqrt((4 + 0 + 4)/2) = 2. Normalised: -1, 0; 1. Returns-to-go: row 0: -1 -1 0 0; row 1: 1 1 1 0
    nan = float("nan")
    rewards = double([[nan, 1.0, nan, 3.0], [7.0, nan, 5.0, nan]])
    ends = torch.tensor([[False, True, False, True], [False, False, True, False]])
    got = process_advantages(rewards, ends, 2, eps=0.0)
    torch.testing.assert_close(got, double([[-1.0, -1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))


def test_process_supervision_with_one_final_step_is_outcome_supervision():
    outcome = double([0.3, 1.7, 0.2, 0.9])
    rewards = torch.zeros(4, 5, dtype=torch.float64)
    rewards[:, -1] = outcome
    ends = torch.zeros(4, 5, dtype=torch.bool)
    ends[:, -1] = True
    for scale in ("std", "none"):
        got = process_advantages(rewards, ends, 2, scale)
        torch.testing.assert_close(got, group_advantages(outcome, 2, scale)[:, None].expand(4, 5))


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_process_supervision_of_equal_or_absent_steps_is_exactly_zero(eps):
    ends = torch.tensor([[True, True, True], [True, False, True], [False] * 3, [False] * 3])
    got = process_advantages(torch.full((4, 3), 0.1, dtype=torch.float64), ends, 2, eps=eps)
    assert torch.equal(got, torch.zeros(4, 3, dtype=torch.float64))


def test_another_scale_is_refused_and_step_ends_of_another_shape(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    rewards = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="scale: expected 'std', 'none' or 'batch', got 'max'"):
        group_advantages(rewards[:, 0], 2, "max")
    with pytest.raises(ValueError, match="scale: expected 'std' or 'none', got 'batch'"):
        process_advantages(rewards, rewards.bool(), 2, "batch")
    with pytest.raises(ValueError, match="step_ends: expected the shape of rewards"):
        process_advantages(rewards, rewards[:1].bool(), 2)
    with pytest.raises(ValueError, match="eps: expected a number of at least 0, got -1"):
        process_advantages(rewards, rewards.bool(), 2, eps=-1.0)


def test_step_rewards_may_be_integers_as_rewards_may():
    ends = torch.tensor([[True, True], [False, True]])
    rewards = torch.tensor([[0, 3], [9, 3]])
    assert torch.equal(process_advantages(rewards, ends, 2), process_advantages(rewards.float(), ends, 2))
    with pytest.raises(ValueError, match=r"expected finite numbers, got \[nan\] at rows \[1\]"):
        accepted_advantages(double([1.0, math.nan]))


def test_the_place_of_a_step_reward_that_is_not_finite_is_named():
    rewards = torch.zeros(6, 3)
    rewards[4, 2] = rewards[0, 1] = math.nan  # no step ends at the second
    ends = torch.ones(6, 3, dtype=torch.bool)
    ends[0, 1] = False
    with pytest.raises(ValueError, match=r"expected finite numbers, got nan at row 4, token 2\."):
        process_advantages(rewards, ends, 2)


def test_decoupled_normalisation_keeps_apart_what_a_sum_collapses():
    # GRPO on the sum: (0, 1) and (0, 2) both give (-1/sqrt 2, 1/sqrt 2). Decoupled, two rewards that both
    # improve count twice: S = (-c, c) for one reward, (-2c, 2c) for two, with c = 0.5/(sqrt 0.5 + 1e-4)
    rewards = double([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    summed = group_advantages(rewards.sum(-1), 2, eps=0.0)
    torch.testing.assert_close(summed[:2], summed[2:])
    c = 0.5 / (math.sqrt(0.5) + 1e-4)
    s = double([-c, c, -2 * c, 2 * c])
    # mean 0, squares 10 c^2, unbiased std c sqrt(10/3)
    torch.testing.assert_close(decoupled_advantages(rewards, 2), s / (c * math.sqrt(10 / 3) + 1e-4))


@pytest.mark.parametrize("eps", [0, 1e-4])
def test_decoupled_advantages_of_equal_rewards_are_exactly_zero(eps):
    assert decoupled_advantages(torch.ones(4, 2), 2, eps=eps).tolist() == [0.0] * 4


@pytest.mark.parametrize("weights", [[2.0], [[1.0], [2.0], [3.0], [4.0]], [1.0, float("nan")], [1.0, float("inf")]])
def test_decoupled_weights_that_are_not_one_for_each_reward_are_refused(weights, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    rewards = torch.arange(8.0).reshape(4, 2)
    with pytest.raises(ValueError, match="weights: expected a finite number for each of 2 rewards"):
        decoupled_advantages(rewards, 2, torch.tensor(weights))
    with pytest.raises(ValueError, match=r"rewards: expected two axes \[B,R\]"):
        decoupled_advantages(rewards[:, 0], 2)


def test_decoupled_weights_and_zero_groups():
    rewards = double([[0.1, 3.0], [0.1, 3.0], [0.0, 1.0], [1.0, 0.0]])
    got = decoupled_advantages(rewards, 2, weights=double([1.0, 0.0]))
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[2] < 0 < got[3]
