"""RSPO's router-shift weight in the loop: how far the routers moved on the experts that the old policy used.

Only the scores of the chosen experts are kept of the old policy, `[B,T,L,K]` and not `[B,T,L,E]`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.measure.routing_metrics import as_logits
from moe_rl.routing import RoutedExperts, RoutingError


def chosen_scores(router_logits: tuple[Tensor, ...] | list[Tensor], routes: RoutedExperts) -> Float[Tensor, "B T L K"]:
    """log r(e) of the experts e that `routes` chose, r = softmax of the router's logits; nats, detached.

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
    """gamma = exp( -mean over sites and slots of |log r_new(e) - log r_old(e)| )    (arXiv:2510.23027)

    over the experts e that the old policy activated; in (0, 1], detached. The floor gamma_min is the objective's.

    >>> old = torch.tensor([0.5, 0.25]).log().view(1, 1, 1, 2)
    >>> new = torch.tensor([0.25, 0.25]).log().view(1, 1, 1, 2)
    >>> shift_weight(new, old)  # exp(-(log 2 + 0) / 2)
    tensor([[0.7071]])
    """
    return torch.exp(-(scores - old_scores).detach().abs().mean((2, 3)))
