"""What changed between two sets of routes, how far routers moved and how experts are loaded: pure functions, detached.

Every name that they return is defined, with its unit and source, in `moe_rl.measure.catalogue`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.routing import ChangeCounts, RoutedExperts, flips_per_token
from moe_rl.routing.router_stats import (
    active_set_churn,
    boundary_margin,
    expert_load,
    load_cv,
    load_entropy,
    router_js,
    router_kl,
)


def change_metrics(counts: ChangeCounts) -> dict[str, Any]:
    """Change counts under the three definitions (slot, site, token), by routing site, and as histograms; each changed
    count with its denominator. The same names for two policies, for two engines and for the noise floor."""
    return {
        "slots_changed": counts.slots_changed,
        "slots": counts.slots_total,
        "sites_changed": counts.sites_changed,
        "sites": counts.sites_total,
        "tokens_changed": counts.tokens_changed,
        "tokens": counts.tokens_total,
        "site_names": counts.sites,
        "site_slots_changed": counts.per_site_slots_changed,
        "site_slots": counts.per_site_slots_total,
        "flips_histogram": counts.flips,
        "deviation_histogram": counts.deviation,
        "overdispersion": counts.overdispersion,
    }


def position_metrics(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """Sites changed by the position of the token in its response: `position_sites_changed` over `position_sites`, lists
    from position 0 (the first token of `mask` in its row) to the last that any row has.

    >>> old, new = (RoutedExperts(torch.tensor(ids).view(1, 3, 1, 1), ("gate",), 4) for ids in ([0, 1, 2], [3, 1, 0]))
    >>> {name: x.tolist() for name, x in position_metrics(old, new, torch.tensor([[False, True, True]])).items()}
    {'position_sites_changed': [0, 1], 'position_sites': [1, 1]}
    """
    position = (mask.cumsum(1) - 1)[mask].cpu()
    flips = flips_per_token(old, new).cpu()[mask.cpu()]
    return {
        "position_sites_changed": torch.bincount(position, flips.double()).long(),
        "position_sites": torch.bincount(position) * len(old.sites),
    }


def router_metrics(old: Sequence[Float[Tensor, "n E"]], new: Sequence[Float[Tensor, "n E"]], k: int) -> dict[str, Any]:
    """How far routers moved, before any expert flips. `old`, `new`: logits of the same n tokens, one per site.

    - `router_kl`, `router_js`: KL(old || new) and Jensen-Shannon of the softmax over all experts, nats, mean over
      tokens and sites; `site_router_kl`, `site_router_js`: mean over tokens, by site
    - `margin_p10`, `margin_median`: of s_(k) - s_(k+1) under the new weights over all (token, site) pairs, in
      router-logit units (nearest rank). A selection bias is not in it.
    - `shift_over_margin`: median of (largest change of a logit, their mean removed) over half the old margin; a
      choice for which it is below 1 could not have changed.
    """
    found: dict[str, Any] = {}
    kl = [float(router_kl(a, b).mean()) for a, b in zip(old, new, strict=True)]
    js = [float(router_js(a, b).mean()) for a, b in zip(old, new, strict=True)]
    found |= {"router_kl": sum(kl) / len(kl), "router_js": sum(js) / len(js)}
    found |= {"site_router_kl": kl, "site_router_js": js}
    if any(not 0 < k < logits.shape[-1] or not len(logits) for logits in new):
        return found
    margin = torch.cat([boundary_margin(logits.float(), k) for logits in new])
    shift = torch.cat([_shift_over_margin(a.float(), b.float(), k) for a, b in zip(old, new, strict=True)])
    return {
        **found,
        "margin_p10": margin.kthvalue(max(1, math.ceil(0.1 * margin.numel()))).values,
        "margin_median": margin.median(),
        "shift_over_margin": shift.median(),
    }


def as_logits(scores: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """What a model returns as router logits, as logits: some families (Gemma 4) return their softmax, which shows.

    >>> as_logits(torch.tensor([[0.25, 0.75]])).softmax(-1)
    tensor([[0.2500, 0.7500]])
    """
    probabilities = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < 1e-2).all()
    return scores.log() if bool(probabilities) else scores


def router_facts(
    logits: Sequence[Float[Tensor, "n E"]], ids: Int[Tensor, "n L K"]
) -> tuple[Float[Tensor, "n L K"], Float[Tensor, "n L"]]:
    """Of n tokens at L sites: the share that each chosen expert has in the softmax over all experts (NaN where there is
    no route), and the boundary margin s_(k) - s_(k+1) in logits (infinite where all experts are chosen).

    >>> shares, margins = router_facts([torch.tensor([[3.0, 1.0, 1.0]]).log()], torch.tensor([[[0, 2]]]))
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


def _shift_over_margin(old: Float[Tensor, "n E"], new: Float[Tensor, "n E"], k: int) -> Float[Tensor, " n"]:
    moved = new - old
    moved = (moved - moved.mean(-1, keepdim=True)).abs().amax(-1)
    return 2 * moved / boundary_margin(old, k).clamp(min=1e-12)


def load_metrics(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """How the new routes spread the tokens of `mask` over experts: means and worst over sites.

    - `load_cv_mean`, `load_cv_max`: std / mean of the experts' loads (`load_cv`)
    - `load_entropy_mean`, `load_entropy_min`: nats; ln E is even
    - `site_max_vio`, `site_min_vio`, `site_avg_vio`: MaxVio of each site and its kin (`load_violation`)
    - `active_set_churn`: share of the experts that a sequence uses and did not use before, mean over sequences and
      sites: the second reading of GSPO's 10 %
    """
    load = expert_load(new, mask)
    cv, entropy = load_cv(load), load_entropy(load)
    return {
        "load_cv_mean": cv.mean(),
        "load_cv_max": cv.max(),
        "load_entropy_mean": entropy.mean(),
        "load_entropy_min": entropy.min(),
        **{f"site_{name}": by_site for name, by_site in load_violation(load).items()},
        "active_set_churn": active_set_churn(old, new, mask)[mask.any(1).to(new.device)].mean(),
    }


def load_violation(load: Int[Tensor, "L E"] | Float[Tensor, "L E"]) -> dict[str, Float[Tensor, " L"]]:
    """MaxVio of each routing site and its kin: how far loads are from even, over the even load.

    `max_vio` = (max load - mean load) / mean load (arXiv 2408.15664; prime-rl, verl), `min_vio` = (min - mean) / mean,
    `avg_vio` = mean |load - mean| / mean (verl). 0 is even; NaN at a site without tokens.

    Args:
        load: tokens by site and expert, as `moe_rl.routing.expert_load` counts them. The last token of a
            response has no route of a rollout engine's: leave it out of the mask, as verl does. Negative counts are
            padding, where sites differ in their experts.

    >>> load_violation(torch.tensor([[0, 0, 8, 0], [2, 2, 2, 2]]))["max_vio"]
    tensor([3., 0.], dtype=torch.float64)
    """
    there = load >= 0
    counts = load.double() * there
    mean = counts.sum(1, keepdim=True) / there.sum(1, keepdim=True)
    off = (counts - mean) / mean
    return {
        "max_vio": off.masked_fill(~there, -torch.inf).amax(1),
        "min_vio": off.masked_fill(~there, torch.inf).amin(1),
        "avg_vio": (off.abs() * there).sum(1) / there.sum(1),
    }


def routing_confidence(scores: Float[Tensor, "n E"], ids: Int[Tensor, "n K"]) -> Float[Tensor, ""]:
    """prime-rl's routing confidence of one site: the share of a token's score mass that its chosen experts have, before
    gates are renormalised or scaled; mean over tokens, a fraction.

        mean_t Σ_k s_t[e_k] / Σ_e s_t[e]

    Args:
        scores: not negative: softmax or sigmoid of the router's logits over all experts.
        ids: the chosen experts; a row with -1 (no route) does not count.

    >>> routing_confidence(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0, 2]]))
    tensor(0.7000, dtype=torch.float64)
    """
    routed = (ids >= 0).all(-1)
    scores, ids = scores.detach()[routed].double(), ids[routed].long()
    return (scores.gather(-1, ids).sum(-1) / scores.sum(-1)).mean()
