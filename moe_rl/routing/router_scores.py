"""Routing change seen in router scores `[...,L,E]`: divergences, margins, and RSPO's router shift."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.routing.errors import RoutingError


def router_kl(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """KL(old || new) = Σ_e p_old(e) (log p_old(e) - log p_new(e)), p = softmax over all E experts; nats.

    The full distribution, not only the experts chosen: it moves before any expert flips. float32 at least;
    differentiable in both arguments. For routers that do not score by softmax it is a common scale, no more.
    """
    old, new = _log_softmax(old_logits), _log_softmax(new_logits)
    return (old.exp() * (old - new)).sum(-1)


def router_js(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """Jensen-Shannon divergence ½KL(p_old||m) + ½KL(p_new||m), m = (p_old + p_new)/2; nats, in [0, ln 2]."""
    old, new = _log_softmax(old_logits), _log_softmax(new_logits)
    middle = torch.logaddexp(old, new) - torch.log(torch.tensor(2.0, dtype=old.dtype))
    return 0.5 * ((old.exp() * (old - middle)).sum(-1) + (new.exp() * (new - middle)).sum(-1))


def boundary_margin(scores: Float[Tensor, "*rows E"], k: int) -> Float[Tensor, "*rows"]:
    """s_(k) - s_(k+1) >= 0: the gap between the last expert chosen and the first not chosen.

    A change of scores below half of it cannot change the selection. `scores` are what the router compares:
    with the selection bias where there is one, and in the units of whatever is given (logits, probabilities).

    >>> boundary_margin(torch.tensor([0.5, 3.0, 2.0, 1.25]), k=2)
    tensor(0.7500)
    """
    if not 0 < k < scores.shape[-1]:
        raise RoutingError(f"k = {k} of {scores.shape[-1]} experts has no boundary; expected 1..{scores.shape[-1] - 1}")
    best = scores.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k]


class RouterShift(NamedTuple):
    """delta `[...]` >= 0 in nats; gamma `[...]` in [gamma_min, 1]; floored `[...]`, where the floor acted."""

    delta: Float[Tensor, "*rows"]
    gamma: Float[Tensor, "*rows"]
    floored: Bool[Tensor, "*rows"]


def router_shift(
    old_logits: Float[Tensor, "*rows L E"],
    new_logits: Float[Tensor, "*rows L E"],
    old_ids: Int[Tensor, "*rows L K"],
    gamma_min: float = 0.8,
) -> RouterShift:
    """Router shift ratio of RSPO (arXiv 2510.23027): γ = exp(-Δ), floored at gamma_min; detached.

    Δ = (1/L) Σ_l (1/K) Σ_k |log r_new^l(e_k) - log r_old^l(e_k)| over the experts e_k that the *old* policy
    activated, r = softmax of the router's logits. gamma_min = 0.8 is the value of the public implementations.

    Rows of `old_ids` with a -1 are left out of the mean over sites; a token without any has Δ = 0, γ = 1.
    Differs: floating point and sites without a route; the paper has a route at every site.
    """
    with torch.no_grad():
        routed = (old_ids >= 0).all(-1)
        chosen = old_ids.long().clamp(min=0)
        change = _log_softmax(new_logits).gather(-1, chosen) - _log_softmax(old_logits).gather(-1, chosen)
        per_site = change.abs().mean(-1) * routed
        delta = per_site.sum(-1) / routed.sum(-1).clamp(min=1)
        gamma = torch.exp(-delta)
        return RouterShift(delta, gamma.clamp(min=gamma_min), gamma < gamma_min)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
