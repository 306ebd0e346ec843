"""A scored rollout: what one RL step trains on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from moe_rl.rollout.completions import Responses
from moe_rl.routing import RoutedExperts


@dataclass(frozen=True)
class Batch(Responses):
    """Responses with everything that the old policy said of them. One row per response, groups contiguous.

    Attributes:
        input_ids, attention_mask, completion_mask: see `Responses`.
        rewards: one per response, the verifier's.
        advantages: one per response or one per token, in the method's units (for group advantages: of the group's
            reward spread; for DPO's pairs: +1 the better, -1 the worse, 0 where neither is).
        old_logps: nats; the old policy's, natural routing, under R3 and PR2 the rollout's; 0 outside the response.
        routes: the experts that the old policy chose for every token, prompt included.
        rollout_logps: nats; what the sampler itself said.
        ref_logps: nats; the reference policy's, natural routing; None without a reference.
        step: the step whose policy sampled it (differs from the current one under rollout lag).
        values, returns: of the value model when the batch was scored, units of reward; None without one.
        route_scores: nats; log router probability of the experts in `routes` under the old policy (RSPO), else None.
        natural_logps: nats; the old policy's under natural routing where `old_logps` are not (R3, PR2), else None.
        rollout_routes: the experts that the sampler chose, -1 on padding and each row's last token; None if unknown.
        versions: of the weights that wrote each token, as steps; -1 outside the response. None: all of `step`'s.
        router_inputs, router_logits: what the old policy's routers saw and said under `rollout_routes` (PR2).
        router_predicted: what they were expected to say after the next updates, when the batch was scored (PR2).
        kept: the (token, site) rows of `routes` that R2 forces; None: all.
    """

    rewards: Float[Tensor, " B"]
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"]
    old_logps: Float[Tensor, "B T"]
    routes: RoutedExperts
    rollout_logps: Float[Tensor, "B T"]
    ref_logps: Float[Tensor, "B T"] | None
    step: int
    values: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    route_scores: Float[Tensor, "B T L K"] | None = None
    natural_logps: Float[Tensor, "B T"] | None = None
    rollout_routes: RoutedExperts | None = None
    kept: Bool[Tensor, "B T L"] | None = None
    versions: Int[Tensor, "B T"] | None = None
    router_inputs: Float[Tensor, "B T L H"] | None = None
    router_logits: Float[Tensor, "B T L E"] | None = None
    router_predicted: Float[Tensor, "B T L E"] | None = None

    @property
    def live_old_logps(self) -> Float[Tensor, "B T"]:
        """The old policy's log-probabilities under natural routing, whatever the loss takes."""
        return self.old_logps if self.natural_logps is None else self.natural_logps


def minibatches(responses: int, count: int, group_size: int, generator: torch.Generator) -> list[Int[Tensor, " n"]]:
    """Row indices of `count` minibatches of whole groups, in random order."""
    groups = torch.randperm(responses // group_size, generator=generator)
    rows = groups[:, None] * group_size + torch.arange(group_size)
    return [chunk.flatten() for chunk in rows.chunk(count)]


class Totals(NamedTuple):
    """What the loss of a minibatch is divided by, whichever micro-batch it is computed on: its response tokens, the
    responses that have any, and its pairs with a preference (DPO)."""

    tokens: int
    sequences: int
    pairs: int


def totals_of(batch: Batch) -> Totals:
    """Of a whole minibatch, or of responses that stand for one."""
    mask = batch.completion_mask
    return Totals(int(mask.sum()), int(mask.any(1).sum()), int((batch.advantages > 0).sum()))


Place = tuple[Int[Tensor, " n"], slice]
"""Rows and columns of a batch that a micro-batch is made of."""


def micro_batches(
    attention_mask: Bool[Tensor, "B T"], size: int | None, together: int = 1, in_order: bool = False
) -> Iterator[Place]:
    """Rows of each micro-batch of `size`, and the columns in which they have tokens: rows by length, the longest first,
    so that little of a forward is padding. None: one micro-batch, as it is.

    together: so many rows, one after the other, stay in one micro-batch (a pair).
    in_order: rows as they stand, so that responses to one prompt stay together.
    """
    B, T = attention_mask.shape
    if size is None:
        yield torch.arange(B), slice(0, T)
        return
    longest = attention_mask.sum(1).view(-1, together).amax(1)
    units = torch.arange(len(longest)) if in_order else longest.argsort(descending=True, stable=True).cpu()
    for rows in (units[:, None] * together + torch.arange(together)).flatten().split(size):
        used = attention_mask[rows].any(0).nonzero()
        yield rows, slice(int(used[0]), int(used[-1]) + 1)


def joined(
    parts: Sequence[Shaped[Tensor, "n ..."]], places: Sequence[Place], shape: tuple[int, ...]
) -> Shaped[Tensor, "B ..."]:
    """Tensors `[n]` or `[n,t,...]` of all micro-batches of a batch `[B,T]` as one of the batch, detached; 0 where none
    had a column."""
    first, (B, T) = parts[0], shape
    wide = first.ndim > 1
    whole = first.new_zeros(B, *((T, *first.shape[2:]) if wide else ()))
    for part, (rows, columns) in zip(parts, places, strict=True):
        whole[(rows, columns) if wide else rows] = part.detach()
    return whole
