"""A scored rollout: what one RL step trains on."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.routing import RoutedExperts


@dataclass(frozen=True)
class Batch:
    """Responses with everything that the old policy said of them. One row per response, groups contiguous.

    Attributes:
        input_ids: prompt (left-padded) and response (right-padded).
        attention_mask: False on padding.
        completion_mask: True on response tokens.
        rewards: one per response.
        advantages: one per response, in units of the group's reward spread.
        old_logps: nats; the training engine's old policy, natural routing; 0 outside the response.
        routes: the experts that the old policy chose for every token, prompt included.
        rollout_logps: nats; what the sampler itself said.
        ref_logps: nats; the reference policy's, natural routing; None without a KL term.
        step: the step whose policy sampled it (differs from the current one under rollout lag).
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]
    rewards: Float[Tensor, "B"]
    advantages: Float[Tensor, "B"]
    old_logps: Float[Tensor, "B T"]
    routes: RoutedExperts
    rollout_logps: Float[Tensor, "B T"]
    ref_logps: Float[Tensor, "B T"] | None
    step: int

    def rows(self, index: Int[Tensor, "n"]) -> "Batch":
        """The responses `index`, in that order."""
        return replace(
            self,
            input_ids=self.input_ids[index],
            attention_mask=self.attention_mask[index],
            completion_mask=self.completion_mask[index],
            rewards=self.rewards[index],
            advantages=self.advantages[index],
            old_logps=self.old_logps[index],
            routes=self.routes.rows(index),
            rollout_logps=self.rollout_logps[index],
            ref_logps=None if self.ref_logps is None else self.ref_logps[index],
        )

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def minibatches(batch: Batch, count: int, group_size: int, generator: torch.Generator) -> list[Int[Tensor, "n"]]:
    """Row indices of `count` minibatches of whole groups, in random order."""
    groups = torch.randperm(len(batch) // group_size, generator=generator)
    rows = groups[:, None] * group_size + torch.arange(group_size)
    return [chunk.flatten() for chunk in rows.chunk(count)]
