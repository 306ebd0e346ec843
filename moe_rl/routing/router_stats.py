"""Statistics of routers: the load of their experts and its balance, the margins and divergences of their scores."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from moe_rl.routing.counts import Routes, check_plain, in_order_of, refuse_other_tokens
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import check_integers, chunks, token_mask, unpack_ids
from moe_rl.routing.routes import RoutedExperts


def expert_load(
    routes: Routes, mask: Shaped[Tensor, "..."] | None = None, *, num_experts: int | None = None
) -> Int[Tensor, "L E"]:
    """Count the tokens that each expert of each site was given: a site's counts sum to K times its routed tokens.

    routes: RoutedExperts, or ids `[...,L,K]` together with num_experts. mask: bool or 0/1 over the leading axes, True
    on the tokens to count. Rows without a route count nowhere; a zero-filled row would credit expert 0, so that
    padding and the last sampled token must be -1 or masked. Where sites differ in num_experts, E is the largest, and
    the columns that a site has no expert for are negative (-1; loads of batches may be added).

    Raises RoutingError for plain ids without num_experts or out of its range, and for a mask that does not fit.
    """
    experts, sites, device = _width(routes, num_experts), routes.shape[-2], routes.device
    load = torch.zeros(sites * (experts + 1), dtype=torch.int64, device=device)
    for _, ids in _parts(routes, experts, mask):
        load += torch.bincount(_bins(ids, experts).flatten(), minlength=len(load))
    load = load.view(sites, -1)[:, :experts]
    if isinstance(routes, RoutedExperts) and not isinstance(routes.num_experts, int):
        own = torch.tensor(routes.num_experts, device=device)
        load = load.masked_fill(torch.arange(experts, device=device) >= own[:, None], -1)
    return load


def load_cv(load: Int[Tensor, "L E"]) -> Float[Tensor, " L"]:
    """Return the coefficient of variation of the load: std / mean over experts (divisor E). float64, NaN without
    tokens.

    An even load gives 0; all tokens on K of E experts give sqrt(E/K - 1). Negative counts stand for no expert
    (`expert_load`).
    """
    there = load >= 0
    counts, experts = load.double() * there, there.sum(-1)
    mean = counts.sum(-1) / experts
    return (((counts - mean[:, None]) * there).square().sum(-1) / experts).sqrt() / mean


def load_entropy(load: Int[Tensor, "L E"]) -> Float[Tensor, " L"]:
    """Return the entropy -Σ_e f_e ln f_e of f = load / Σ load: nats, float64, ln E if even, NaN without tokens.
    Negative counts stand for no expert (`expert_load`)."""
    counts = load.clamp(min=0).double()
    return torch.special.entr(counts / counts.sum(-1, keepdim=True)).sum(-1)


def effective_sets(
    routes: Routes, mask: Shaped[Tensor, "..."] | None = None, *, num_experts: int | None = None
) -> Float[Tensor, " L"]:
    """Return the effective number of sets of K experts that each site uses, exp(-Σ_s f_s ln f_s), in float64.

    f_s is the share of the tokens that got set s. The number is that of equally frequent sets of the same entropy,
    between 1 and the number of sets that occur; NaN without tokens.

    Fewer tokens see fewer sets: compare equal numbers of tokens. Arguments and errors as in `expert_load`.

    >>> effective_sets(torch.tensor([[[0, 1]], [[1, 0]], [[2, 3]], [[3, 2]]]), num_experts=4)
    tensor([2.], dtype=torch.float64)
    """
    experts = _width(routes, num_experts)
    narrow = next(t for t in (torch.int8, torch.int16, torch.int32, torch.int64) if experts <= torch.iinfo(t).max + 1)
    ids = torch.cat([ids.to(narrow) for _, ids in _parts(routes, experts, mask)])
    found = []
    for rows in ids.unbind(1):
        rows = rows[(rows >= 0).all(-1)].sort(-1).values
        shares = torch.unique(rows, dim=0, return_counts=True)[1].double() / len(rows)
        found.append(torch.special.entr(shares).sum().exp() if len(rows) else shares.new_full((), torch.nan))
    return torch.stack(found)


def active_set_churn(
    old: Routes,
    new: Routes,
    mask: Shaped[Tensor, "B T"] | None = None,
    *,
    num_experts: int | None = None,
) -> Float[Tensor, "B L"]:
    """Return |A_new - A_old| / |A_new|, A the experts a sequence used at least once at a site; 0 if none.

    The second reading of GSPO's "roughly 10% of the experts activated" for the same rollout sample (arXiv
    2507.18071, section 5.3); ours, no paper reports it. Unlike the per-token metrics it is not symmetric.
    Long sequences use nearly all experts, so that it falls with length where `slot_change` does not. A (token, site)
    without a route on either side counts on neither.

    Raises RoutingError if shapes, sites, their numbers of experts or, where both know them, the counted tokens differ.
    """
    if isinstance(old, RoutedExperts) and isinstance(new, RoutedExperts):
        new = in_order_of(old, new)
    experts = max(_width(routes, num_experts) for routes in (old, new))
    if old.shape != new.shape or len(old.shape) != 4:
        raise RoutingError(
            f"old {list(old.shape)} and new {list(new.shape)} must have one shape [B,T,L,K]; realign brings routes to "
            "one padding"
        )
    mask = None if mask is None else token_mask(mask, _held(old))
    refuse_other_tokens(old, new, mask)
    batch, tokens, sites, _ = old.shape
    used = torch.zeros(2, batch, sites, experts + 1, dtype=torch.bool, device=old.device)
    both_parts = (_parts(routes.to(old.device), experts, mask) for routes in (old, new))
    for (start, a), (_, b) in zip(*both_parts, strict=True):
        sequence = torch.arange(start, start + len(a), device=a.device) // max(1, tokens)
        first, both = (sequence * used.shape[2:].numel())[:, None, None], (a >= 0) & (b >= 0)
        for marked, ids in zip(used, (a, b), strict=True):
            marked.view(-1).scatter_(0, (_bins(ids.where(both, -1), experts) + first).flatten(), True)
    before, after = used[..., :experts]
    return (after & ~before).sum(-1) / after.sum(-1).clamp(min=1)


def _held(routes: Routes) -> Tensor:
    """Return the ids as they are stored: packed in RoutedExperts, plain in a tensor."""
    return routes.packed if isinstance(routes, RoutedExperts) else routes


def _width(routes: Routes, num_experts: int | None) -> int:
    """Return the largest number of experts of a site."""
    if isinstance(routes, RoutedExperts):
        return max(routes._experts)
    check_plain(routes)
    if num_experts is None:
        raise RoutingError("plain ids do not say how many experts there are: pass num_experts=")
    check_integers(routes)
    return num_experts


def _parts(routes: Routes, experts: int, mask: Tensor | None) -> Iterator[tuple[int, Int[Tensor, "n L K"]]]:
    """Yield parts of the B·T tokens: the number of the first token, and int64 ids, -1 where nothing counts."""
    held = _held(routes)
    rows, counted = held.reshape(-1, *held.shape[-2:]), None if mask is None else token_mask(mask, held).reshape(-1, 1)
    for part in chunks(rows) or [slice(0, 0)]:
        ids = unpack_ids(rows[part]) if isinstance(routes, RoutedExperts) else rows[part].long()
        if ids.numel() and held is routes and (int(ids.max()) >= experts or int(ids.min()) < -1):
            raise RoutingError(f"ids from {int(ids.min())} to {int(ids.max())}, expected -1..{experts - 1}")
        there = (ids >= 0).all(-1)
        yield part.start, torch.where((there if counted is None else there & counted[part])[..., None], ids, -1)


def _bins(ids: Int[Tensor, "n L K"], experts: int) -> Int[Tensor, "n L K"]:
    """Return a distinct number for each expert of each site, and one per site for -1."""
    return torch.where(ids < 0, experts, ids) + torch.arange(ids.shape[1], device=ids.device)[:, None] * (experts + 1)


# -- scores ------------------------------------------------------------------------------------------------------------


def router_kl(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """Return KL(old || new) = Σ_e p_old(e) (log p_old(e) - log p_new(e)), p = softmax over all E experts; nats.

    The full distribution counts, not only the chosen experts, so that the divergence moves before any expert flips.
    float32 at least; differentiable in both arguments. For routers that do not score by softmax it is only a common
    scale.

    An expert whose p_old is 0 (excluded by -inf, or too small for its dtype) adds nothing; one that only the new logits
    exclude makes it infinite.
    """
    return _divergence(_log_softmax(old_logits), _log_softmax(new_logits))


def router_js(old_logits: Float[Tensor, "*rows E"], new_logits: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows"]:
    """Return the Jensen-Shannon divergence ½KL(p_old||m) + ½KL(p_new||m), m = (p_old + p_new)/2; nats, in [0, ln 2]."""
    old, new = _log_softmax(old_logits), _log_softmax(new_logits)
    never = (old == -torch.inf) & (new == -torch.inf)
    middle = torch.logaddexp(old.masked_fill(never, 0), new.masked_fill(never, 0)) - math.log(2)
    return 0.5 * (_divergence(old, middle) + _divergence(new, middle))


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    """Return Σ p_old (log p_old - log p_new), where an expert with p_old = 0 adds nothing, nor to the gradient."""
    never = old.exp() == 0
    old, new = old.masked_fill(never, 0), new.masked_fill(never, 0)
    return (old.exp() * (old - new) * ~never).sum(-1)


def boundary_margin(scores: Float[Tensor, "*rows E"], k: int) -> Float[Tensor, "*rows"]:
    """Return s_(k) - s_(k+1) >= 0: the gap between the last expert chosen and the first not chosen.

    A change of scores below half the gap cannot change the selection. `scores` are what the router compares:
    with the selection bias where there is one, and in the units of whatever is given (logits, probabilities).
    Raises RoutingError unless 0 < k < E.

    >>> boundary_margin(torch.tensor([0.5, 3.0, 2.0, 1.25]), k=2)
    tensor(0.7500)
    """
    if not 0 < k < scores.shape[-1]:
        raise RoutingError(f"k = {k} of {scores.shape[-1]} experts has no boundary; expected 1..{scores.shape[-1] - 1}")
    best = scores.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k]


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
