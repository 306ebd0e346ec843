"""Partial replay: which tokens and slots of a replay are forced, and how the others are chosen."""

from numbers import Integral
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import check_tensor
from moe_rl.routing.traced import no_type_check

Holes = Literal["none", "rows", "slots"]
"""Which of the forced ids may be -1: none, whole rows, or single slots."""


def restricted(packed: Tensor, holes: Holes, tokens: Tensor | None, slots: int | None) -> tuple[Tensor, Holes]:
    """Return packed routes `[B,T,L,K]` limited to some tokens (bool `[B,T]`) and to the first slots, and their holes.
    The sentinel is in all other places."""
    batch, length, _, k = packed.shape
    live = packed.new_full((), torch.iinfo(packed.dtype).max)
    if tokens is not None:
        check_tensor(tokens, "tokens")
        if tokens.dtype != torch.bool or tokens.shape != (batch, length):
            raise RoutingError(
                f"tokens must be a bool mask [B,T] = {(batch, length)}, True where routes are forced; got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
        packed, holes = torch.where(tokens.to(packed.device)[:, :, None, None], packed, live), "rows"
    if slots is not None:
        if not (isinstance(slots, Integral) and 1 <= slots <= k):
            raise RoutingError(f"slots must be 1..{k} (experts per token), got {slots!r}")
        if slots < k:
            packed, holes = torch.where(torch.arange(k, device=packed.device) < slots, packed, live), "slots"
    return packed, holes


@no_type_check
def is_held(forced: Tensor, num_experts: int) -> Tensor:
    """Return `[..,E]` bool: the experts that a row forces; -1 forces nothing."""
    mask = torch.zeros((*forced.shape[:-1], num_experts + 1), dtype=torch.bool, device=forced.device)
    return mask.scatter(-1, forced.where(forced >= 0, num_experts), True)[..., :-1]


@no_type_check
def fill(forced: Tensor, live: Tensor, scores: Tensor, holes: Holes) -> Tensor:
    """Return `forced` with each -1 decided live: a whole row by the router, single slots by the best of the rest."""
    if holes == "none":
        return forced
    rows = forced >= 0
    if holes == "slots":
        held = is_held(forced, scores.shape[-1])  # aten from here: the mode would intercept torch's functions
        rest = torch.ops.aten.topk(torch.ops.aten.masked_fill(scores, held, float("-inf")), forced.shape[-1])[1]
        nth = (~rows).cumsum(-1).sub(1).clamp(min=0)
        forced, rows = forced.where(rows, rest.gather(-1, nth)), rows.any(-1, keepdim=True)
    return forced.where(rows, live)


@no_type_check
def completed(own: Int[Tensor, "N K"], other: Int[Tensor, "N K"]) -> Int[Tensor, "N K"]:
    """Return what an inner context (`own`) and an outer one (`other`) force together. Each -1 of `own` is filled, in
    order, from the experts in the same row of `other` that `own` does not have; what remains -1 has no expert in
    either.

    >>> completed(torch.tensor([[5, -1, -1], [-1, -1, -1]]), torch.tensor([[2, 5, 3], [2, 5, -1]])).tolist()
    [[5, 2, 3], [2, 5, -1]]
    """
    free = (other >= 0) & ~(other[:, :, None] == own[:, None, :]).any(-1)
    rest = other.where(free, -1).gather(-1, (~free).to(torch.uint8).argsort(dim=-1, stable=True))
    holes = own < 0
    return own.where(~holes, rest.gather(-1, holes.cumsum(-1).sub(1).clamp(min=0)))
