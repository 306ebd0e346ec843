"""Dynamic sampling and overlong shaping, against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

from moe_rl.rollout import Problem
from moe_rl.rollout.completions import Rollout, join_rollouts
from moe_rl.rollout.dapo import overlong_penalty, refill
from moe_rl.routing import RoutedExperts


def rollout(rewards, prompt=2, response=3, mark=0, routes=False):
    """Groups of two; row b's tokens are all `mark` + b + 1; the prompts of odd rows are one token shorter."""
    B, T = len(rewards), prompt + response
    ids = (torch.arange(B)[:, None] + mark + 1).expand(B, T).clone()
    attention = torch.ones(B, T, dtype=torch.bool)
    attention[1::2, 0] = False
    completion = torch.zeros(B, T, dtype=torch.bool)
    completion[:, prompt:] = True
    experts = RoutedExperts(ids[:, :, None, None].clone(), ("gate",), 100) if routes else None
    if experts is not None:
        experts = RoutedExperts(torch.where(attention[..., None, None], experts.ids, -1), ("gate",), 100)
    return Rollout(
        ids, attention, completion, -ids.float(), torch.tensor(rewards), torch.ones(B, dtype=torch.bool), 2,
        [Problem(f"p{mark + b}", "") for b in range(B)], [f"c{mark + b}" for b in range(B)], experts,
    )  # fmt: skip


def test_the_punishment_is_equation_13():
    longest, buffer = 16384, 4096  # of the paper, lengths as powers of two
    lengths = torch.tensor([0, longest - buffer, longest - buffer + 1, longest - buffer // 2, longest, longest + 1])
    expected = [0.0, 0.0, -1 / buffer, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, longest, buffer).tolist() == pytest.approx(expected)


def test_joined_rollouts_keep_every_row_and_pad_prompts_left_and_responses_right():
    parts = [rollout([0.0, 1.0], 2, 3, routes=True), rollout([1.0, 1.0], 4, 1, mark=10, routes=True)]
    both = join_rollouts(parts)
    assert both.input_ids.shape == (4, 7) and [p.prompt for p in both.problems] == ["p0", "p1", "p10", "p11"]
    for part, start in zip(parts, (0, 2), strict=True):
        own = both.rows(torch.arange(start, start + 2))
        for mask in ("attention_mask", "completion_mask"):
            chosen, before = getattr(own, mask), getattr(part, mask)
            assert torch.equal(own.input_ids[chosen], part.input_ids[before])
            assert torch.equal(own.logps[chosen], part.logps[before])
            assert torch.equal(own.routes.ids[chosen], part.routes.ids[before])
        assert bool(own.routes.live[~own.attention_mask].all())
    assert both.completion_mask[:, :4].sum() == 0, "all responses begin in one column"
    assert both.versions is None
    told = [replace(p, versions=torch.where(p.completion_mask, i, -1)) for i, p in enumerate(parts)]
    versions = join_rollouts(told).versions
    assert torch.equal(versions, torch.where(both.completion_mask, torch.tensor([0, 0, 1, 1])[:, None], -1))
    assert join_rollouts([told[0], parts[1]]).versions is None


def test_groups_without_a_signal_are_replaced_in_bounded_attempts():
    first = rollout([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])  # groups 0 and 2 teach nothing
    batches = {1: rollout([1.0, 0.0, 0.0, 0.0], 3, 2, mark=20), 2: rollout([0.0, 0.0], mark=30)}
    asked = []

    def sample(attempt, count):
        asked.append((attempt, count))
        return batches[attempt]

    found, metrics = refill(first, sample, attempts=2)
    assert asked == [(1, 2), (2, 1)], "as many prompts as groups lack a signal, and no third attempt"
    prompts = [problem.prompt for problem in found.problems]
    assert prompts == ["p20", "p21", "p2", "p3", "p4", "p5"], "replaced in place; what is left stays"
    assert found.rewards.tolist() == [1, 0, 0, 1, 1, 1] and found.equal_groups.tolist() == [False, False, True]
    assert found.completions == ["c20", "c21", "c2", "c3", "c4", "c5"]
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {
            "reward": 4 / 12,  # 3 of the first six, 1 of the next four, 0 of the last two
            "reward_n": 12,
            "kept_reward": 4 / 6,
            "refills": 2,
            "groups_sampled": 6,
            "groups_replaced": 1,
        }
    )


def test_groups_with_a_signal_beyond_those_that_lack_one_are_left_over():
    """Several processes sample one group each at least."""
    more = rollout([1.0, 0.0, 0.0, 1.0], mark=20)
    found, metrics = refill(rollout([0.0, 0.0, 0.0, 1.0]), lambda attempt, count: more, attempts=3)
    assert [problem.prompt for problem in found.problems] == ["p20", "p21", "p2", "p3"]
    assert (metrics["refills"], metrics["groups_replaced"], metrics["groups_sampled"]) == (1, 1, 4)


def test_a_batch_with_signal_everywhere_is_left_alone():
    first = rollout([0.0, 1.0])
    found, metrics = refill(first, lambda attempt, count: pytest.fail("nothing to replace"), attempts=3)
    assert found is first and metrics["refills"] == 0 and metrics["reward"] == metrics["kept_reward"]


def test_shapes_are_checked():
    with pytest.raises(TypeCheckError):
        overlong_penalty(torch.tensor([[1]]), 4, 2)
