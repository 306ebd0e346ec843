"""What ratios and routers say of an update: pure functions of log-ratios, router logits and routes.

Every name that they return is defined, with its unit and source, in `moe_rl.training.catalogue`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives import sequence_log_ratio, token_log_ratio
from moe_rl.routing import ChangeCounts, RoutedExperts, flips_per_token
from moe_rl.routing.change import active_set_churn, expert_load, load_cv, load_entropy
from moe_rl.routing.router_stats import boundary_margin, router_js, router_kl

TAUS = (2, 3, 5, 10)
"""Thresholds of F(τ); R3 (arXiv 2510.11370) calls max(r, 1/r) > τ an extreme token."""


def change_facts(counts: ChangeCounts) -> dict[str, Any]:
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


def position_facts(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """Sites changed by the position of the token in its response: `position_sites_changed` over `position_sites`, lists
    from position 0 (the first token of `mask` in its row) to the last that any row has.

    >>> old, new = (RoutedExperts(torch.tensor(ids).view(1, 3, 1, 1), ("gate",), 4) for ids in ([0, 1, 2], [3, 1, 0]))
    >>> {name: x.tolist() for name, x in position_facts(old, new, torch.tensor([[False, True, True]])).items()}
    {'position_sites_changed': [0, 1], 'position_sites': [1, 1]}
    """
    position = (mask.cumsum(1) - 1)[mask].cpu()
    flips = flips_per_token(old, new).cpu()[mask.cpu()]
    return {
        "position_sites_changed": torch.bincount(position, flips.double()).long(),
        "position_sites": torch.bincount(position) * len(old.sites),
    }


def logp_gap(logps: Float[Tensor, "B T"], other: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
    """How far two scorings of the same tokens are apart: d = logps - other (nats), r = exp(d).

    `gap_mean`, `gap_p99`, `gap_max`, `k3`: as `spread_facts`; where `other` is mu, the engine that sampled, k3
    estimates KL(mu || pi). `extreme_fraction`: F(2) of R3 (arXiv 2510.11370), the share of tokens with max(r, 1/r) > 2.
    `var_token`, `var_sequence`: variance of d over tokens, and of its mean over each sequence (log s of arXiv
    2507.18071, eq. 7) over sequences; their quotient would be the mean length if tokens were independent.
    """
    d = token_log_ratio(logps, other, mask)
    spread = spread_facts(d, mask)
    return {
        **{name: spread[name] for name in ("gap_mean", "gap_p99", "gap_max", "k3")},
        "extreme_fraction": spread["extreme_2"] / mask.sum(),
        "var_token": d[mask].double().var(),
        "var_sequence": sequence_log_ratio(logps, other, mask)[mask.any(1)].double().var(),
    }


def ratio_facts(
    log_ratio: Float[Tensor, "B T"],
    sequence_log_ratio: Float[Tensor, "B"],
    clipped: Bool[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, Any]:
    """What one update saw: clipped tokens and sequences with their totals, variances of log-ratios, `spread_facts`."""
    rows = mask.any(1)
    return {
        "clipped_tokens": (clipped & mask).sum(),
        "tokens": mask.sum(),
        "clipped_sequences": (clipped & mask).any(1).sum(),
        "sequences": rows.sum(),
        "var_token_log_ratio": log_ratio[mask].var(),
        "var_sequence_log_ratio": sequence_log_ratio[rows].var(),
        **spread_facts(log_ratio, mask),
    }


def spread_facts(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
    """How far ratios r = exp(d) are from 1, d = `log_ratio` on the tokens of `mask`; float64, detached.

    - `k1` = mean(-d), `k2` = mean(d²/2), `k3` = mean(r - 1 - d): KL(old || new) in nats per token, from the old
      policy's samples (Schulman, "Approximating KL divergence")
    - `m2` = mean(d²), nats² (M2PO, arXiv 2510.01161)
    - `gap_mean`, `gap_p99`, `gap_max`: of |d|, nats; p99 is the nearest rank
    - `extreme_2`, `_3`, `_5`, `_10`: tokens with max(r, 1/r) > τ; over `tokens` they are F(τ) of R3 (arXiv 2510.11370)
    - `var_ratio`: variance of r over tokens
    - `chi2_token` = mean(r²) - 1 and `ess_token` = (Σ r)² / (n Σ r²), in (0, 1]; `chi2_sequence`, `ess_sequence` the
      same of s = exp(mean of d over a sequence) (arXiv 2507.18071, eq. 7)
    - `var_within`: Var_i of SAPO (arXiv 2511.20347), the variance of d within a sequence (divisor n), mean over
      sequences, nats²
    - `max_token_kl_mean`, `max_token_kl_max`: over sequences, of the largest r - 1 - d of a sequence's tokens, nats.
      Differs: TRM (arXiv 2512.23075) bounds the KL of whole distributions; this is of the sampled token alone.

    NaN without tokens.

    >>> d = torch.tensor([[1.0, 8.0], [1.0, 8.0]], dtype=torch.float64).log()
    >>> facts = spread_facts(d, torch.ones(2, 2, dtype=torch.bool))
    >>> [round(float(facts[name]), 4) for name in ("extreme_5", "chi2_token", "ess_token")]  # 65/2 - 1; 18²/(4·130)
    [2.0, 31.5, 0.6231]
    """
    with torch.no_grad():
        d = torch.where(mask, log_ratio, 0.0).double()
        tokens, rows = d[mask], mask.any(1)
        size, ratio, count = tokens.abs(), tokens.exp(), len(tokens)
        nan = d.new_tensor(float("nan"))
        length = mask.sum(1).clamp(min=1)
        mean = d.sum(1) / length
        within = (torch.where(mask, d - mean[:, None], 0.0).square().sum(1) / length)[rows]
        excess = torch.where(mask, torch.expm1(d) - d, 0.0)
        peak = excess.amax(1)[rows]
        sequence = mean[rows].exp()
        return {
            "k1": -tokens.mean(),
            "k2": size.square().mean() / 2,
            "k3": excess[mask].mean(),
            "m2": size.square().mean(),
            "gap_mean": size.mean(),
            "gap_p99": size.kthvalue(max(1, math.ceil(0.99 * count))).values if count else nan,
            "gap_max": size.max() if count else nan,
            **{f"extreme_{tau}": (size > math.log(tau)).sum() for tau in TAUS},
            "var_ratio": ratio.var(),
            "chi2_token": ratio.square().mean() - 1,
            "chi2_sequence": sequence.square().mean() - 1,
            "ess_token": effective_share(ratio),
            "ess_sequence": effective_share(sequence),
            "var_within": within.mean(),
            "max_token_kl_mean": peak.mean(),
            "max_token_kl_max": peak.max() if len(peak) else nan,
        }


def effective_share(weights: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Effective sample size over n, (Σ w)² / (n Σ w²): 1 if all weights are equal, 1/n if one has all (Kish).

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    tensor(0.5000)
    """
    return weights.sum().square() / (len(weights) * weights.square().sum())


def router_facts(old: Sequence[Float[Tensor, "n E"]], new: Sequence[Float[Tensor, "n E"]], k: int) -> dict[str, Any]:
    """How far routers moved, before any expert flips. `old`, `new`: logits of the same n tokens, one per site.

    - `router_kl`, `router_js`: KL(old || new) and Jensen-Shannon of the softmax over all experts, nats, mean over
      tokens and sites; `site_router_kl`, `site_router_js`: mean over tokens, by site
    - `margin_p10`, `margin_median`: of s_(k) - s_(k+1) under the new weights over all (token, site) pairs, in
      router-logit units (nearest rank). A selection bias is not in it.
    - `shift_over_margin`: median of (largest change of a logit, their mean removed) over half the old margin; where it
      is below 1 the choice could not have changed.
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


def _shift_over_margin(old: Float[Tensor, "n E"], new: Float[Tensor, "n E"], k: int) -> Float[Tensor, "n"]:
    moved = new - old
    moved = (moved - moved.mean(-1, keepdim=True)).abs().amax(-1)
    return 2 * moved / boundary_margin(old, k).clamp(min=1e-12)


def load_facts(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """How the new routes spread the tokens of `mask` over experts: means and worst over sites.

    - `load_cv_mean`, `load_cv_max`: std / mean of the experts' loads (`load_cv`)
    - `load_entropy_mean`, `load_entropy_min`: nats; ln E is even
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
        "active_set_churn": active_set_churn(old, new, mask)[mask.any(1).to(new.device)].mean(),
    }
