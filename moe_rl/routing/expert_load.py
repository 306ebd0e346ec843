"""How routing spreads tokens over experts: load, its balance, and the set of experts a sequence uses."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.routes import RoutedExperts

Routes = RoutedExperts | Tensor


def expert_load(
    routes: Routes, mask: Bool[Tensor, "..."] | None = None, *, num_experts: int | None = None
) -> Int[Tensor, "L E"]:
    """How many tokens each expert of each site was given: counts that sum to K times the routed tokens.

    routes: RoutedExperts, or ids `[...,L,K]` together with num_experts. mask: over the leading axes, True on
    the tokens to count. Rows without a route count nowhere; a zero-filled row would credit expert 0, so that
    padding and the last sampled token must be -1 or masked. E is the largest num_experts where sites differ.
    """
    ids, experts = _ids(routes, num_experts, mask)
    sites = ids.shape[-2]
    # One bin per (site, expert), and one per site for what does not count.
    bins = torch.where(ids < 0, experts, ids) + torch.arange(sites, device=ids.device)[:, None] * (experts + 1)
    return torch.bincount(bins.flatten(), minlength=sites * (experts + 1)).view(sites, -1)[:, :experts]


def load_cv(load: Int[Tensor, "L E"]) -> Float[Tensor, "L"]:
    """Coefficient of variation of the load: std / mean over experts (divisor E), float64, NaN without tokens.

    0 is even; all tokens on K of E experts gives sqrt(E/K - 1).
    """
    counts = load.double()
    return counts.std(-1, correction=0) / counts.mean(-1)


def load_entropy(load: Int[Tensor, "L E"]) -> Float[Tensor, "L"]:
    """Entropy -Σ_e f_e ln f_e of f = load / Σ load: nats, float64, ln E is even, NaN without tokens."""
    counts = load.double()
    return torch.special.entr(counts / counts.sum(-1, keepdim=True)).sum(-1)


def active_experts(
    routes: Routes, mask: Bool[Tensor, "B T"] | None = None, *, num_experts: int | None = None
) -> Bool[Tensor, "B L E"]:
    """Which experts of each site a sequence used at least once, over its tokens in mask."""
    ids, experts = _ids(routes, num_experts, mask)
    batch, tokens, sites, k = ids.shape
    used = torch.zeros(batch, sites, experts + 1, dtype=torch.bool, device=ids.device)
    slots = torch.where(ids < 0, experts, ids).transpose(1, 2).reshape(batch, sites, tokens * k)
    return used.scatter_(2, slots, True)[..., :experts]


def active_set_churn(
    old: Routes,
    new: Routes,
    mask: Bool[Tensor, "B T"] | None = None,
    *,
    num_experts: int | None = None,
) -> Float[Tensor, "B L"]:
    """|A_new - A_old| / |A_new|, A the experts a sequence used at least once at a site; 0 if none.

    The second reading of GSPO's "roughly 10% of the experts activated" for the same rollout sample (arXiv
    2507.18071, section 5.3); ours, no paper reports it. Unlike the per-token metrics it is not symmetric.
    Long sequences use nearly all experts, so that it falls with length where `slot_change` does not.
    """
    if isinstance(old, RoutedExperts) and isinstance(new, RoutedExperts):
        new = new.select(old.sites)
    before = active_experts(old, mask, num_experts=num_experts)
    after = active_experts(new, mask, num_experts=num_experts)
    return (after & ~before).sum(-1) / after.sum(-1).clamp(min=1)


def _ids(routes: Routes, num_experts: int | None, mask: Tensor | None) -> tuple[Int[Tensor, "*rows L K"], int]:
    """int64 ids with -1 where nothing counts, and the number of experts."""
    if isinstance(routes, RoutedExperts):
        ids, count = routes.ids, routes.num_experts
        experts = count if isinstance(count, int) else max(count)
    elif num_experts is None:
        raise RoutingError("plain ids do not say how many experts there are: pass num_experts=")
    else:
        ids, experts = routes.long(), num_experts
        if ids.numel() and (int(ids.max()) >= experts or int(ids.min()) < -1):
            raise RoutingError(f"ids from {int(ids.min())} to {int(ids.max())}, expected -1..{experts - 1}")
    counted = (ids >= 0).all(-1)
    if mask is not None:
        if mask.shape != ids.shape[:-2]:
            raise RoutingError(f"mask must have the shape {list(ids.shape[:-2])} of tokens, got {list(mask.shape)}")
        counted = counted & mask.to(ids.device)[..., None]
    return torch.where(counted[..., None], ids, -1), experts
