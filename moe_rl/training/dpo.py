"""DPO in the training loop: the choice of pairs from groups, and their loss in the form that the loop logs."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.objectives import LossOutput, TokenValues, dpo_loss, sequence_margin, token_log_ratio
from moe_rl.training.batch import Batch


def best_and_worst(rewards: Float[Tensor, " B"], group_size: int) -> Int[Tensor, " N"]:
    """Return the rows of the best and the worst response of each group: best 0, worst 0, best 1, worst 1, ...

    Of several responses with equal rewards the first is taken. A group of equal rewards gives its first response twice.
    """
    groups = rewards.view(-1, group_size)
    start = torch.arange(len(groups), device=rewards.device) * group_size
    return torch.stack([start + groups.argmax(1), start + groups.argmin(1)], 1).flatten()


def preferences(rewards: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return +1 for the better and -1 for the worse row of each pair; 0 for both if their rewards are equal."""
    better = (rewards[0::2] > rewards[1::2]).to(rewards.dtype)
    return torch.stack([better, -better], 1).flatten()


def pair_loss(beta: float, logps: Float[Tensor, "B T"], part: Batch, total_pairs: int) -> LossOutput:
    """Return DPO's loss on whole pairs (rows ordered as by `best_and_worst`); pairs without a preference do not count.

    Args:
        beta: strength of the tie to the reference, per nat.
        logps: log-probabilities of the current policy, nats.
        part: rows whose advantages are `preferences`.
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
    """Return a batch of the best and the worst response of each group, with `preferences` as their advantages."""
    rewards = batch.rewards if learned_rewards is None else learned_rewards
    pairs = best_and_worst(rewards, group_size)
    return replace(batch.rows(pairs), advantages=preferences(rewards[pairs]))
