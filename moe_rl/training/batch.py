"""The batch that one RL step trains on (a scored rollout), and its division into minibatches and micro-batches."""

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
    """Responses with all that training reads about them. One row per response; the rows of a group are consecutive.

    Attributes:
        input_ids, attention_mask, completion_mask: see `Responses`.
        rewards: the verifier's, one per response.
        advantages: one per response or one per token, in the method's units (for group advantages: of the group's
            reward spread; for DPO's pairs: +1 for the better, -1 for the worse, 0 for both of a tie).
        old_logps: nats; log-probabilities of the old policy, under live routing or, for R3 and PR2, under the routes of
            the rollout; 0 outside the response.
        routes: the experts that the old policy chose for every token, prompt included.
        rollout_logps: nats; the sampler's own log-probabilities.
        ref_logps: nats; log-probabilities of the reference policy under live routing; None without a reference.
        step: the step whose policy sampled the batch (differs from the current one under rollout lag).
        values, returns: predictions of the value model and its targets at scoring, units of reward; None without one.
        route_scores: nats; log router probability of the experts in `routes`, in the pass of `old_logps` (RSPO); else
            None.
        natural_logps: nats; log-probabilities of the old policy under live routing where `old_logps` are under the
            rollout's routes (R3, PR2), else None.
        rollout_routes: the experts that the sampler chose, -1 on padding and each row's last token; None if unknown.
        versions: the version of the weights that wrote each token, as a step; -1 outside the response. None: `step`.
        router_inputs, router_logits: inputs and logits of the old policy's routers under `rollout_routes` (PR2).
        router_predicted: router logits as predicted, at scoring, for the policy after the next updates (PR2).
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
        """The old policy's log-probabilities under live routing, whichever ones the loss takes."""
        return self.old_logps if self.natural_logps is None else self.natural_logps


def minibatches(responses: int, count: int, group_size: int, generator: torch.Generator) -> list[Int[Tensor, " n"]]:
    """Return the row indices of `count` minibatches of whole groups, in random order."""
    groups = torch.randperm(responses // group_size, generator=generator)
    rows = groups[:, None] * group_size + torch.arange(group_size)
    return [chunk.flatten() for chunk in rows.chunk(count)]


class Totals(NamedTuple):
    """Counts of a minibatch by which the losses of all its micro-batches are divided.

    tokens: response tokens. sequences: responses that have any. pairs: pairs with a preference (DPO)."""

    tokens: int
    sequences: int
    pairs: int


def totals_of(batch: Batch) -> Totals:
    """Return the `Totals` of a whole minibatch, or of responses that are treated as one."""
    mask = batch.completion_mask
    return Totals(int(mask.sum()), int(mask.any(1).sum()), int((batch.advantages > 0).sum()))


Place = tuple[Int[Tensor, " n"], slice]
"""The rows and the columns of a batch that make up one micro-batch."""


def micro_batches(
    attention_mask: Bool[Tensor, "B T"], size: int | None, together: int = 1, in_order: bool = False
) -> Iterator[Place]:
    """Yield the rows of each micro-batch of `size` responses, and the columns in which these rows have tokens.

    Rows are sorted by length, the longest first, so that little of a forward is padding.

    size: None: one micro-batch of all rows and columns.
    together: how many consecutive rows stay in one micro-batch (2 for DPO's pairs).
    in_order: do not sort the rows, so that responses to one prompt stay together.
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
    """Return one detached tensor of a batch from the tensors of its micro-batches.

    parts: `[n]` or `[n,t,...]` each. shape: `[B,T]`. The result is 0 in the columns that a micro-batch left out."""
    first, (B, T) = parts[0], shape
    wide = first.ndim > 1
    whole = first.new_zeros(B, *((T, *first.shape[2:]) if wide else ()))
    for part, (rows, columns) in zip(parts, places, strict=True):
        whole[(rows, columns) if wide else rows] = part.detach()
    return whole
