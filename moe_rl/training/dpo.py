"""DPO in the loop: pairs out of groups, and their loss in the form that the loop logs."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.objectives import LossOutput, TokenValues, dpo_loss, sequence_margin, token_log_ratio
from moe_rl.training.batch import Batch


def best_and_worst(rewards: Float[Tensor, " B"], group_size: int) -> Int[Tensor, " N"]:
    """Rows of the best and the worst response of each group, in turn: best 0, worst 0, best 1, worst 1, ...

    The first of several that are equal. A group of equal rewards gives its first response twice.
    """
    groups = rewards.view(-1, group_size)
    start = torch.arange(len(groups), device=rewards.device) * group_size
    return torch.stack([start + groups.argmax(1), start + groups.argmin(1)], 1).flatten()


def preferences(rewards: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """+1 on the better and -1 on the worse of each pair of rows; 0 on both where neither is better."""
    better = (rewards[0::2] > rewards[1::2]).to(rewards.dtype)
    return torch.stack([better, -better], 1).flatten()


def pair_loss(beta: float, logps: Float[Tensor, "B T"], part: Batch, total_pairs: int) -> LossOutput:
    """DPO's loss on whole pairs (rows as `best_and_worst` puts them); pairs without a preference do not count.

    Args:
        beta: strength of the tie to the reference, per nat.
        logps: current policy, nats.
        part: its advantages are `preferences`.
        total_pairs: pairs with a preference over all micro-batches of the optimiser step.
    """
    assert part.ref_logps is not None
    mask = part.completion_mask
    margin = sequence_margin(logps, part.ref_logps, mask)
    chosen = (part.advantages > 0).nonzero().squeeze(1)
    loss = margin.sum() * 0.0
    if len(chosen):
        loss = dpo_loss(margin[chosen], margin[chosen + 1], beta) * (len(chosen) / total_pairs)
    log_ratio = token_log_ratio(logps.detach(), part.old_logps, mask)
    values = TokenValues(log_ratio, torch.zeros_like(mask), mask, part.advantages[:, None] * mask, log_ratio)
    return LossOutput(loss=loss, tokens=values)


def pairs_of(batch: Batch, group_size: int, learned_rewards: Tensor | None) -> Batch:
    """The best and the worst response of each group."""
    rewards = batch.rewards if learned_rewards is None else learned_rewards
    pairs = best_and_worst(rewards, group_size)
    return replace(batch.rows(pairs), advantages=preferences(rewards[pairs]))
