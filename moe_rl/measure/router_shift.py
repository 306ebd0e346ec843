"""Router scores of chosen experts, and RSPO's router-shift weight computed from them.

The weight says how far routers moved on the experts that the old policy chose. Only the scores of these experts are
kept for the old policy, `[B,T,L,K]` and not `[B,T,L,E]`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.measure.metrics import as_logits
from moe_rl.routing import RoutedExperts, RoutingError, boundary_margin


def chosen_scores(router_logits: tuple[Tensor, ...] | list[Tensor], routes: RoutedExperts) -> Float[Tensor, "B T L K"]:
    """Return log r(e) of the experts e that `routes` chose, r = softmax of the router's logits; nats, detached.

    Args:
        router_logits: one `[B*T,E]` or `[B,T,E]` for each site of `routes`, in their order, as models return them.

    Slots without a route (-1) are 0.

    Raises:
        RoutingError: not one tensor per site.
    """
    B, T, L, _ = routes.shape
    if len(router_logits) != L:
        raise RoutingError(
            f"the model returned router logits of {len(router_logits)} sites and its routes have {L}: this family's "
            "logits cannot be matched with its routers, so RSPO's router shift cannot be computed"
        )
    ids = routes.ids.long()
    scores = []
    for site, logits in enumerate(router_logits):
        logits = logits.detach().reshape(B, T, -1)
        logits = as_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        chosen = ids[:, :, site].to(logits.device)
        picked = logits.log_softmax(-1).gather(-1, chosen.clamp(min=0))
        scores.append(torch.where(chosen >= 0, picked, 0.0))
    return torch.stack(scores, dim=2)


def shift_weight(scores: Float[Tensor, "B T L K"], old_scores: Float[Tensor, "B T L K"]) -> Float[Tensor, "B T"]:
    """Return RSPO's router-shift weight gamma of each token, in (0, 1], detached.

        gamma = exp( -mean over sites and slots of |log r_new(e) - log r_old(e)| )    (arXiv:2510.23027)

    over the experts e that the old policy activated. The objective applies the floor gamma_min.

    >>> old = torch.tensor([0.5, 0.25]).log().view(1, 1, 1, 2)
    >>> new = torch.tensor([0.25, 0.25]).log().view(1, 1, 1, 2)
    >>> shift_weight(new, old)  # exp(-(log 2 + 0) / 2)
    tensor([[0.7071]])
    """
    return torch.exp(-(scores - old_scores).detach().abs().mean((2, 3)))


def gates_and_margins(
    logits: Sequence[Float[Tensor, "n E"]], ids: Int[Tensor, "n L K"]
) -> tuple[Float[Tensor, "n L K"], Float[Tensor, "n L"]]:
    """Return gates and boundary margins of n tokens at L sites.

    A gate is the chosen expert's share of the softmax over all experts (NaN without a route). The boundary margin is
    s_(k) - s_(k+1) in logits (infinite if all experts are chosen).

    >>> shares, margins = gates_and_margins([torch.tensor([[3.0, 1.0, 1.0]]).log()], torch.tensor([[[0, 2]]]))
    >>> shares, margins
    (tensor([[[0.6000, 0.2000]]]), tensor([[0.]]))
    """
    k = ids.shape[-1]
    shares, margins = [], []
    for site, scores in enumerate(logits):
        own = ids[:, site].to(scores.device)
        share = scores.float().softmax(-1).gather(-1, own.clamp(min=0).long())
        shares.append(share.masked_fill(own < 0, torch.nan))
        whole = k >= scores.shape[-1]
        margins.append(torch.full_like(share[:, 0], torch.inf) if whole else boundary_margin(scores.float(), k))
    return torch.stack(shares, 1), torch.stack(margins, 1)
