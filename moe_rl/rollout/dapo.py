"""DAPO's additions to sampling (arXiv 2503.14476): groups of equal rewards are replaced, overlong responses get a
penalty."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int

from moe_rl.rollout.completions import Rollout, join_rollouts


def overlong_penalty(lengths: Int[torch.Tensor, " B"], longest: int, buffer: int) -> Float[torch.Tensor, " B"]:
    """Return the soft overlong punishment of responses of these lengths, in units of reward (arXiv 2503.14476, eq. 13;
    L_max: `longest`, L_cache: `buffer`):

        0                                    |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache  up to L_max
        -1                                   beyond

    >>> overlong_penalty(torch.tensor([16, 17, 18, 20, 21]), longest=20, buffer=4).tolist()
    [-0.0, -0.25, -0.5, -1.0, -1.0]
    """
    return -((lengths - (longest - buffer)) / buffer).clamp(0, 1)


def refill(rollout: Rollout, sample: Callable[[int, int], Rollout], attempts: int) -> tuple[Rollout, dict[str, Any]]:
    """Replace groups whose rewards are all equal by groups of new prompts whose rewards differ: dynamic sampling (arXiv
    2503.14476, section 3.2, eq. 11), until no such group is left or `attempts` further samplings were made.

    Differs: the paper samples until the batch is full; here the attempts are bounded, and groups that could not be
    replaced stay.

    Args:
        sample: (attempt from 1 on, how many prompts at least) -> their verified responses.

    Returns:
        a rollout of as many groups, and numbers to log: `reward` (mean) and `reward_n` (count) of all responses that
        were sampled, replaced groups included; `kept_reward`, the mean over those that are trained on; `refills`,
        samplings beyond the first; `groups_sampled`; `groups_replaced`.
    """
    rewards, replaced, attempt = [rollout.rewards], 0, 0
    while attempt < attempts and len(places := rollout.equal_groups.nonzero()[:, 0]):
        attempt += 1
        fresh = sample(attempt, len(places))
        rewards.append(fresh.rewards)
        found = (~fresh.equal_groups).nonzero()[:, 0]
        count = min(len(places), len(found))
        groups = torch.arange(len(rollout) // rollout.group_size)
        groups[places[:count].cpu()] = len(groups) + found[:count].cpu()
        rows = groups[:, None] * rollout.group_size + torch.arange(rollout.group_size)
        rollout = join_rollouts([rollout, fresh]).rows(rows.flatten())
        replaced += count
    everything = torch.cat(rewards)
    return rollout, {
        "reward": everything.mean(),
        "reward_n": len(everything),
        "kept_reward": rollout.rewards.mean(),
        "refills": attempt,
        "groups_sampled": len(everything) // rollout.group_size,
        "groups_replaced": replaced,
    }
