"""Metrics of ratios, routes, routers and expert loads after an update: pure functions with detached results.

A `mask` is bool, or 0 and 1 as many trainers write it; other values raise ValueError.

`moe_rl.measure.catalogue` defines every name that the functions return, with its unit and source.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from moe_rl.objectives.ratios import as_bool_mask, at_least_float32, check_shapes, sequence_log_ratio, token_log_ratio
from moe_rl.routing import ChangeCounts, RoutedExperts
from moe_rl.routing.router_stats import (
    active_set_churn,
    boundary_margin,
    expert_load,
    load_cv,
    load_entropy,
    router_js,
    router_kl,
)

TAUS = (2, 3, 5, 10)
"""Thresholds of F(τ); R3 (arXiv 2510.11370) calls max(r, 1/r) > τ an extreme token."""


def ratio_metrics(log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> dict[str, Tensor]:
    """Return how far ratios r = exp(d) are from 1, where d is `log_ratio` on the tokens of `mask`; float64, detached.

    - `k1` = mean(-d), `k2` = mean(d²/2), `k3` = mean(r - 1 - d): KL(old || new) in nats per token, from the old
      policy's samples (Schulman, "Approximating KL divergence")
    - `m2` = mean(d²), nats² (M2PO, arXiv 2510.01161)
    - `gap_mean`, `gap_p99`, `gap_max`: of |d|, nats; p99 is the nearest rank
    - `extreme_2`, `_3`, `_5`, `_10`: tokens with max(r, 1/r) > τ; over `tokens` they are F(τ) of R3 (arXiv 2510.11370)
    - `var_ratio`: variance of r over tokens
    - `chi2_token` = mean(r²) - 1 and `ess_token` = (Σ r)² / (n Σ r²), in (0, 1]; `chi2_sequence`, `ess_sequence`: the
      same of s = exp(mean of d over a sequence) (arXiv 2507.18071, eq. 7)
    - `var_within`: Var_i of SAPO (arXiv 2511.20347), the variance of d within a sequence (divisor n), mean over
      sequences, nats²
    - `max_token_kl_mean`, `max_token_kl_max`: over sequences, of the largest r - 1 - d of a sequence's tokens, nats.
      Differs: TRM (arXiv 2512.23075) bounds the KL of whole distributions; this is of the sampled token alone.

    Without tokens counts are 0 and all others NaN. Raises ValueError for shapes that differ, or a mask that is no mask.

    >>> d = torch.tensor([[1.0, 8.0], [1.0, 8.0]], dtype=torch.float64).log()
    >>> metrics = ratio_metrics(d, torch.ones(2, 2, dtype=torch.bool))
    >>> [round(float(metrics[name]), 4) for name in ("extreme_5", "chi2_token", "ess_token")]  # 65/2 - 1; 18²/(4·130)
    [2.0, 31.5, 0.6231]
    """
    check_shapes(log_ratio, {"mask": mask}, "log_ratio")
    mask = as_bool_mask(mask)
    with torch.no_grad():
        d = torch.where(mask, log_ratio, 0.0).double()
        tokens, rows = d[mask], mask.any(1)
        size, ratio, count = tokens.abs(), tokens.exp(), len(tokens)
        length = mask.sum(1).clamp(min=1)
        mean = d.sum(1) / length
        within = (torch.where(mask, d - mean[:, None], 0.0).square().sum(1) / length)[rows]
        excess = torch.where(mask, torch.expm1(d) - d, 0.0)
        peak = excess.amax(1)[rows] if count else tokens  # amax fails on rows of width 0
        sequence = mean[rows].exp()
        return {
            "k1": -tokens.mean(),
            "k2": size.square().mean() / 2,
            "k3": excess[mask].mean(),
            "m2": size.square().mean(),
            "gap_mean": size.mean(),
            "gap_p99": size.kthvalue(max(1, math.ceil(0.99 * count))).values if count else extreme(size, "max"),
            "gap_max": extreme(size, "max"),
            **{f"extreme_{tau}": (size > math.log(tau)).sum() for tau in TAUS},
            "var_ratio": variance(ratio),
            "chi2_token": ratio.square().mean() - 1,
            "chi2_sequence": sequence.square().mean() - 1,
            "ess_token": effective_share(ratio),
            "ess_sequence": effective_share(sequence),
            "var_within": within.mean(),
            "max_token_kl_mean": peak.mean(),
            "max_token_kl_max": extreme(peak, "max"),
        }


@torch.no_grad()
def update_ratio_metrics(
    log_ratio: Float[Tensor, "B T"],
    sequence_log_ratio: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
) -> dict[str, Any]:
    """Return the metrics of one update's ratios: variances of log-ratios, and `ratio_metrics`.

    The metrics of the clip are in `moe_rl.objectives.loss_metrics`."""
    mask = as_bool_mask(mask)
    return {
        "var_token_log_ratio": variance(log_ratio[mask]),
        "var_sequence_log_ratio": variance(sequence_log_ratio[mask.any(1)]),
        **ratio_metrics(log_ratio, mask),
    }


@torch.no_grad()
def routing_ratio_metrics(
    logps: Mapping[str, Float[Tensor, "B T"]], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> dict[str, Any]:
    """Return the ratio metrics of one policy under several routings ("natural", "replayed"), against `old_logps`.

    `logps` has the log-probabilities of the same tokens under each routing, nats. The metrics are variances of the
    log-ratio over tokens and over sequences (nats²) and `ratio_metrics`; each name ends with its routing."""
    metrics: dict[str, Any] = {}
    mask = as_bool_mask(mask)
    for routing, new in logps.items():
        log_ratio, sequences = (of(new, old_logps, mask) for of in (token_log_ratio, sequence_log_ratio))
        metrics[f"var_token_{routing}"] = variance(log_ratio[mask])
        metrics[f"var_sequence_{routing}"] = variance(sequences[mask.any(1)])
        metrics |= {f"{name}_{routing}": value for name, value in ratio_metrics(log_ratio, mask).items()}
    return metrics


def variance(values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Return the variance with divisor n - 1; NaN for fewer than two values."""
    return values.var() if len(values) > 1 else values.new_full((), torch.nan)


def effective_share(weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Return the effective sample size over n, (Σ w)² / (n Σ w²): 1 for equal weights, 1/n if only one is not 0 (Kish).

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    tensor(0.5000)
    """
    return weights.sum().square() / (len(weights) * weights.square().sum())


def ratio_range_metrics(log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> dict[str, Tensor]:
    """Return the range of the ratios r = e^`log_ratio` and the share of tokens outside of [0.9, 1.1].

    `probs_ratio_min`, `probs_ratio_max`: smallest and largest r (NeMo-RL); `outside_fraction`: tokens with r outside
    [0.9, 1.1] over all (verl issue 6280)."""
    with torch.no_grad():
        ratio = log_ratio[as_bool_mask(mask)].double().exp()
        return {
            "probs_ratio_min": extreme(ratio, "min"),
            "probs_ratio_max": extreme(ratio, "max"),
            "outside_fraction": ((ratio < 0.9) | (ratio > 1.1)).double().mean(),
        }


def masked_mismatch_metrics(
    log_weight: Float[Tensor, "B T"],
    masked_low: Shaped[Tensor, "B T"],
    masked_high: Shaped[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
) -> dict[str, Tensor]:
    """Return prime-rl's metrics of a trust region on w = e^`log_weight`.

    They are the share of tokens that the region takes out on each side, and the mean mismatch KL (w - 1 - log w, nats)
    of the tokens taken out and of those kept.

    Args:
        masked_low, masked_high: the tokens that are taken out, below and above; in moe_rl's losses the `clipped` tokens
            with a gate ratio below and above 1.
    """
    mask = as_bool_mask(mask)
    masked_low, masked_high = as_bool_mask(masked_low, "masked_low"), as_bool_mask(masked_high, "masked_high")
    with torch.no_grad():
        d = torch.where(mask, log_weight, 0.0).double()
        kl, masked = torch.expm1(d) - d, (masked_low | masked_high) & mask
        return {
            "is_masked": masked[mask].double().mean(),
            "is_masked_low": masked_low[mask].double().mean(),
            "is_masked_high": masked_high[mask].double().mean(),
            "masked_mismatch_kl": kl[masked].mean(),
            "unmasked_mismatch_kl": kl[mask & ~masked].mean(),
        }


def extreme(values: Float[Tensor, " n"], which: Literal["min", "max"]) -> Float[Tensor, ""]:
    """Return the smallest or largest value; NaN if there are no values."""
    return getattr(values, which)() if len(values) else values.new_full((), torch.nan)


# -- routes, routers, loads --------------------------------------------------------------------------------------------


def change_metrics(counts: ChangeCounts) -> dict[str, Any]:
    """Return change counts by slot, site and token, by routing site and as histograms, with their denominators.

    The names are the same for two policies, for two engines and for the noise floor."""
    found: dict[str, Any] = {}
    for level, (changed, of) in counts.levels().items():
        found |= {f"{level}s_changed": changed, f"{level}s": of}
    return found | {
        "site_names": counts.sites,
        "site_slots_changed": counts.per_site_slots_changed,
        "site_slots": counts.per_site_slots_total,
        "flips_histogram": counts.flips,
        "deviation_histogram": counts.deviation,
        "overdispersion": counts.overdispersion,
    }


@torch.no_grad()
def router_metrics(old: Sequence[Float[Tensor, "n E"]], new: Sequence[Float[Tensor, "n E"]], k: int) -> dict[str, Any]:
    """Return how far the routers' logits moved, whether or not an expert changed.

    `old`, `new`: logits of the same n tokens, one tensor per site.

    - `router_kl`, `router_js`: KL(old || new) and Jensen-Shannon of the softmax over all experts, nats, mean over
      tokens and sites; `site_router_kl`, `site_router_js`: mean over tokens, by site
    - `margin_p10`, `margin_median`: of s_(k) - s_(k+1) under the new weights over all (token, site) pairs, in
      router-logit units (nearest rank), without a selection bias.
    - `shift_over_margin`: median of (largest change of a logit after subtracting the mean change) over half the old
      margin; a choice with a value below 1 could not have changed, unless groups of experts are chosen first.
    Without tokens, or if at any site all experts are chosen, margins and shift are left out.

    Raises ValueError where there is no site, or `old` and `new` have different numbers of sites.
    """
    pairs = list(zip(old, new, strict=True))
    if not pairs:
        raise ValueError("router_metrics: old and new hold the logits of no site; expected one tensor [n,E] for each")
    kl, js = ([float(divergence(a, b).mean()) for a, b in pairs] for divergence in (router_kl, router_js))
    found = {"router_kl": sum(kl) / len(kl), "router_js": sum(js) / len(js), "site_router_kl": kl, "site_router_js": js}
    if any(not 0 < k < logits.shape[-1] or not len(logits) for logits in new):
        return found
    margin = torch.cat([boundary_margin(at_least_float32(logits), k) for logits in new])
    shift = torch.cat([_shift_over_margin(at_least_float32(a), at_least_float32(b), k) for a, b in pairs])
    return {
        **found,
        "margin_p10": margin.kthvalue(max(1, math.ceil(0.1 * margin.numel()))).values,
        "margin_median": margin.median(),
        "shift_over_margin": shift.median(),
    }


def as_logits(scores: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """Return a model's `router_logits` as logits: some families (Gemma 4) return a softmax, and get its logarithm.

    A softmax is told by its values: none is negative, and every row sums to 1.

    >>> as_logits(torch.tensor([[0.25, 0.75]])).softmax(-1)
    tensor([[0.2500, 0.7500]])
    """
    probabilities = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < 1e-2).all()
    return scores.log() if bool(probabilities) else scores


def _shift_over_margin(old: Float[Tensor, "n E"], new: Float[Tensor, "n E"], k: int) -> Float[Tensor, " n"]:
    moved = new - old
    moved = (moved - moved.mean(-1, keepdim=True)).abs().amax(-1)
    return 2 * moved / boundary_margin(old, k).clamp(min=1e-12)


def load_metrics(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """Return how evenly the new routes spread the tokens of `mask` over experts, and how many experts are newly used.

    - `balance_metrics` of the new routes' load
    - `active_set_churn`: share of a sequence's experts that it did not use under the old routes, mean over sequences
      and sites: the second reading of GSPO's 10 %
    """
    churn = active_set_churn(old, new, mask)[mask.any(1).to(new.device)].mean()
    return {**balance_metrics(expert_load(new, mask)), "active_set_churn": churn}


def balance_metrics(load: Int[Tensor, "L E"]) -> dict[str, Tensor]:
    """Return how even a load is: mean and worst over sites, and each site's violation.

    `load` has tokens by site and expert, as `moe_rl.routing.expert_load` counts them. Add the loads of several
    processes or batches first.

    - `load_cv_mean`, `load_cv_max`: std / mean of the experts' loads (`load_cv`)
    - `load_entropy_mean`, `load_entropy_min`: nats; ln E is even
    - `site_max_vio`, `site_min_vio`, `site_avg_vio`: MaxVio and related measures of each site (`load_violation`)
    """
    cv, entropy = load_cv(load), load_entropy(load)
    return {
        "load_cv_mean": cv.mean(),
        "load_cv_max": cv.max(),
        "load_entropy_mean": entropy.mean(),
        "load_entropy_min": entropy.min(),
        **{f"site_{name}": by_site for name, by_site in load_violation(load).items()},
    }


def load_violation(load: Int[Tensor, "L E"] | Float[Tensor, "L E"]) -> dict[str, Float[Tensor, " L"]]:
    """Return MaxVio and related measures of each routing site: how far loads are from even, over the even load.

    `max_vio` = (max load - mean load) / mean load (arXiv 2408.15664; prime-rl, verl), `min_vio` = (min - mean) / mean,
    `avg_vio` = mean |load - mean| / mean (verl). 0 is even; NaN at a site without tokens.

    Args:
        load: tokens by site and expert, as `moe_rl.routing.expert_load` counts them. A rollout engine
            gives no route for the last token of a response: leave that token out of the mask, as verl does. Negative
            counts stand for experts that a site does not have, if sites differ in their number.

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
    """Return prime-rl's routing confidence of one site: the mean share of a token's scores that its experts have.

    The scores are those before gates are renormalised or scaled; the result is a fraction.

        mean_t Σ_k s_t[e_k] / Σ_e s_t[e]

    Args:
        scores: not negative; softmax or sigmoid of the router's logits over all experts.
        ids: the chosen experts; a row with -1 (no route) does not count.

    >>> routing_confidence(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0, 2]]))
    tensor(0.7000, dtype=torch.float64)
    """
    routed = (ids >= 0).all(-1)
    scores, ids = scores.detach()[routed].double(), ids[routed].long()
    return (scores.gather(-1, ids).sum(-1) / scores.sum(-1)).mean()
