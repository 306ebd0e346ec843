"""What the ratios of an update, or the gap between two scorings, say: pure functions of log-ratios, detached.

Every name that they return is defined, with its unit and source, in `moe_rl.measure.catalogue`.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives import sequence_log_ratio, token_log_ratio

TAUS = (2, 3, 5, 10)
"""Thresholds of F(τ); R3 (arXiv 2510.11370) calls max(r, 1/r) > τ an extreme token."""


def ratio_metrics(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
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
    >>> facts = ratio_metrics(d, torch.ones(2, 2, dtype=torch.bool))
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


def update_ratio_metrics(
    log_ratio: Float[Tensor, "B T"],
    sequence_log_ratio: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, Any]:
    """What the ratios of one update were: variances of log-ratios, `ratio_metrics`. What its clip did with them is in
    `moe_rl.objectives.loss_metrics`."""
    return {
        "var_token_log_ratio": log_ratio[mask].var(),
        "var_sequence_log_ratio": sequence_log_ratio[mask.any(1)].var(),
        **ratio_metrics(log_ratio, mask),
    }


def gap_metrics(
    logps: Float[Tensor, "B T"],
    other: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    names: tuple[str, ...] = ("gap_mean", "gap_p99", "gap_max", "k3"),
) -> dict[str, Tensor]:
    """How far two scorings of the same tokens are apart: d = logps - other (nats), r = exp(d).

    `names`: of `ratio_metrics`; where `other` is mu, the engine that sampled, k3
    estimates KL(mu || pi). `extreme_fraction`: F(2) of R3 (arXiv 2510.11370), the share of tokens with max(r, 1/r) > 2.
    `var_token`, `var_sequence`: variance of d over tokens, and of its mean over each sequence (log s of arXiv
    2507.18071, eq. 7) over sequences; their quotient would be the mean length if tokens were independent.
    """
    d = token_log_ratio(logps, other, mask)
    spread = ratio_metrics(d, mask)
    return {
        **{name: spread[name] for name in names},
        "extreme_fraction": spread["extreme_2"] / mask.sum(),
        "var_token": d[mask].double().var(),
        "var_sequence": sequence_log_ratio(logps, other, mask)[mask.any(1)].double().var(),
    }


def effective_share(weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Effective sample size over n, (Σ w)² / (n Σ w²): 1 if all weights are equal, 1/n if one has all (Kish).

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    tensor(0.5000)
    """
    return weights.sum().square() / (len(weights) * weights.square().sum())


def ratio_range_metrics(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
    """`probs_ratio_min`, `probs_ratio_max` (NeMo-RL): of the ratios r = e^`log_ratio`; `outside_fraction`: the share of
    tokens with r outside [0.9, 1.1] (verl issue 6280)."""
    with torch.no_grad():
        ratio = log_ratio[mask].double().exp()
        return {
            "probs_ratio_min": extreme(ratio, "min"),
            "probs_ratio_max": extreme(ratio, "max"),
            "outside_fraction": ((ratio < 0.9) | (ratio > 1.1)).double().mean(),
        }


def masked_mismatch_metrics(
    log_weight: Float[Tensor, "B T"],
    masked_low: Bool[Tensor, "B T"],
    masked_high: Bool[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, Tensor]:
    """prime-rl's account of a trust region on w = e^`log_weight`: what share of the tokens it takes out on each side,
    and the mismatch KL (w - 1 - log w, nats) of those it takes out and of those it keeps.

    Args:
        masked_low, masked_high: the tokens that are taken out, below and above; in a loss of ours the `clipped` tokens
            with A < 0 and with A > 0.
    """
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
    """The smallest or largest value; NaN where there is none."""
    return getattr(values, which)() if len(values) else values.new_tensor(float("nan"))
