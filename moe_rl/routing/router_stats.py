"""How routers behave: the load of their experts and its balance, the margins and divergences of their scores."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from moe_rl.routing.counts import Routes, in_order_of
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import check_integers, token_mask
from moe_rl.routing.routes import RoutedExperts


def expert_load(
    routes: Routes, mask: Shaped[Tensor, "..."] | None = None, *, num_experts: int | None = None
) -> Int[Tensor, "L E"]:
    """How many tokens each expert of each site was given: counts that sum to K times the routed tokens.

    routes: RoutedExperts, or ids `[...,L,K]` together with num_experts. mask: bool or 0/1 over the leading axes, True
    on the tokens to count. Rows without a route count nowhere; a zero-filled row would credit expert 0, so that
    padding and the last sampled token must be -1 or masked. Where sites differ in num_experts, E is the largest, and
    the columns that a site has no expert for are negative (-1; loads of batches may be added).
    """
    ids, experts = _ids(routes, num_experts, mask)
    sites = ids.shape[-2]
    # One bin per (site, expert), and one per site for what does not count.
    bins = torch.where(ids < 0, experts, ids) + torch.arange(sites, device=ids.device)[:, None] * (experts + 1)
    load = torch.bincount(bins.flatten(), minlength=sites * (experts + 1)).view(sites, -1)[:, :experts]
    if isinstance(routes, RoutedExperts) and not isinstance(routes.num_experts, int):
        own = torch.tensor(routes.num_experts, device=ids.device)
        load = load.masked_fill(torch.arange(experts, device=ids.device) >= own[:, None], -1)
    return load


def load_cv(load: Int[Tensor, "L E"]) -> Float[Tensor, " L"]:
    """Coefficient of variation of the load: std / mean over experts (divisor E), float64, NaN without tokens.

    0 is even; all tokens on K of E experts gives sqrt(E/K - 1). Negative counts are no experts (`expert_load`).
    """
    there = load >= 0
    counts, experts = load.double() * there, there.sum(-1)
    mean = counts.sum(-1) / experts
    return (((counts - mean[:, None]) * there).square().sum(-1) / experts).sqrt() / mean


def load_entropy(load: Int[Tensor, "L E"]) -> Float[Tensor, " L"]:
    """Entropy -Σ_e f_e ln f_e of f = load / Σ load: nats, float64, ln E is even, NaN without tokens. Negative counts
    are no experts (`expert_load`)."""
    counts = load.clamp(min=0).double()
    return torch.special.entr(counts / counts.sum(-1, keepdim=True)).sum(-1)


def effective_sets(
    routes: Routes, mask: Shaped[Tensor, "..."] | None = None, *, num_experts: int | None = None
) -> Float[Tensor, " L"]:
    """How many sets of K experts each site uses, as if it used them alike: exp(-Σ_s f_s ln f_s), f_s the share of the
    tokens that got set s. float64, between 1 and the number of sets that occur; NaN without tokens.

    Fewer tokens see fewer sets: compare equal numbers of tokens.

    >>> effective_sets(torch.tensor([[[0, 1]], [[1, 0]], [[2, 3]], [[3, 2]]]), num_experts=4)
    tensor([2.], dtype=torch.float64)
    """
    ids, _ = _ids(routes, num_experts, mask)
    found = []
    for rows in ids.flatten(0, -3).unbind(1):
        rows = rows[(rows >= 0).all(-1)].sort(-1).values
        shares = torch.unique(rows, dim=0, return_counts=True)[1].double() / len(rows)
        found.append(torch.special.entr(shares).sum().exp() if len(rows) else shares.new_tensor(torch.nan))
    return torch.stack(found)


def active_experts(
    routes: Routes, mask: Shaped[Tensor, "B T"] | None = None, *, num_experts: int | None = None
) -> Bool[Tensor, "B L E"]:
    """Which experts of each site a sequence used at least once, over its tokens in mask."""
    return _used(*_ids(routes, num_experts, mask))


def _used(ids: Int[Tensor, "B T L K"], experts: int) -> Bool[Tensor, "B L E"]:
    batch, tokens, sites, k = ids.shape
    used = torch.zeros(batch, sites, experts + 1, dtype=torch.bool, device=ids.device)
    slots = torch.where(ids < 0, experts, ids).transpose(1, 2).reshape(batch, sites, tokens * k)
    return used.scatter_(2, slots, True)[..., :experts]


def active_set_churn(
    old: Routes,
    new: Routes,
    mask: Shaped[Tensor, "B T"] | None = None,
    *,
    num_experts: int | None = None,
) -> Float[Tensor, "B L"]:
    """|A_new - A_old| / |A_new|, A the experts a sequence used at least once at a site; 0 if none.

    The second reading of GSPO's "roughly 10% of the experts activated" for the same rollout sample (arXiv
    2507.18071, section 5.3); ours, no paper reports it. Unlike the per-token metrics it is not symmetric.
    Long sequences use nearly all experts, so that it falls with length where `slot_change` does not. A (token, site)
    without a route on either side counts on neither.

    Raises RoutingError if shapes, sites or their numbers of experts differ.
    """
    if isinstance(old, RoutedExperts) and isinstance(new, RoutedExperts):
        new = in_order_of(old, new)
    if old.shape != new.shape:
        raise RoutingError(
            f"old {list(old.shape)} and new {list(new.shape)} must have one shape [B,T,L,K]; realign brings routes to "
            "one padding"
        )
    (a, experts), (b, _) = (_ids(routes, num_experts, mask) for routes in (old, new))
    both = (a >= 0) & (b >= 0)
    before, after = (_used(ids.where(both, -1), experts) for ids in (a, b))
    return (after & ~before).sum(-1) / after.sum(-1).clamp(min=1)


def _ids(routes: Routes, num_experts: int | None, mask: Tensor | None) -> tuple[Int[Tensor, "*rows L K"], int]:
    """int64 ids with -1 where nothing counts, and the number of experts."""
    if isinstance(routes, RoutedExperts):
        ids, experts = routes.ids, max(routes._experts)
    elif num_experts is None:
        raise RoutingError("plain ids do not say how many experts there are: pass num_experts=")
    else:
        check_integers(routes)
        ids, experts = routes.long(), num_experts
        if ids.numel() and (int(ids.max()) >= experts or int(ids.min()) < -1):
            raise RoutingError(f"ids from {int(ids.min())} to {int(ids.max())}, expected -1..{experts - 1}")
    counted = (ids >= 0).all(-1)
    if mask is not None:
        counted = counted & token_mask(mask, ids)[..., None]
    return torch.where(counted[..., None], ids, -1), experts


# -- scores ------------------------------------------------------------------------------------------------------------


def router_kl(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """KL(old || new) = Σ_e p_old(e) (log p_old(e) - log p_new(e)), p = softmax over all E experts; nats.

    The full distribution, not only the experts chosen: it moves before any expert flips. float32 at least;
    differentiable in both arguments. For routers that do not score by softmax it is a common scale, no more.

    An expert that the old logits exclude (-inf) adds nothing; one that only the new ones exclude makes it infinite.
    """
    return _divergence(_log_softmax(old_logits), _log_softmax(new_logits))


def router_js(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """Jensen-Shannon divergence ½KL(p_old||m) + ½KL(p_new||m), m = (p_old + p_new)/2; nats, in [0, ln 2]."""
    old, new = _log_softmax(old_logits), _log_softmax(new_logits)
    never = (old == -torch.inf) & (new == -torch.inf)
    middle = torch.logaddexp(old.masked_fill(never, 0), new.masked_fill(never, 0)) - torch.log(old.new_tensor(2.0))
    return 0.5 * (_divergence(old, middle) + _divergence(new, middle))


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    """Σ p_old (log p_old - log p_new), where an expert with p_old = 0 adds nothing, to the gradient neither."""
    never = old == -torch.inf
    old, new = old.masked_fill(never, 0), new.masked_fill(never, 0)
    return (old.exp() * (old - new) * ~never).sum(-1)


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


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
