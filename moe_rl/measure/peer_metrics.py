# ruff: noqa: E501  (a table: one metric, one line)
"""Other trainers' metrics of the gap between two engines, under those trainers' names and by their formulas.

mu is the engine that sampled, pi the training engine's policy before the update; d = log pi - log mu of a token, w = e^d.
All functions return detached values, compute in float64, and return NaN without tokens. These trainers' metrics of
routing (`load_violation`, `routing_confidence`) are in `moe_rl.measure.metrics`. Some of their metrics are those of
`ratio_metrics`, `gap_metrics` or `moe_rl.objectives.loss_metrics` under another name, and are not repeated here:

    NeMo-RL gen_kl_error, verl rollout_corr/k3_kl, prime-rl mismatch_kl     k3 of the engine rows
    verl rollout_corr/kl                                                    k1
    verl rollout_corr/chi2_token                                            chi2_token
    TRL kl                                                                  ref_kl
    TRL sampling/importance_sampling_ratio/{min,mean,max}                   correction_weight_{min,mean,max}
    TRL clip_ratio/{low,high,region}_mean                                   clipped_{low,high}_tokens, clipped_tokens over tokens

Differs: verl adds 1e-8 to the denominators of its means, prime-rl divides an empty sum by 1.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from moe_rl.measure.metrics import extreme, ratio_metrics, ratio_range_metrics, variance
from moe_rl.objectives import sequence_log_ratio, token_log_ratio
from moe_rl.objectives.diagnostics import M, Metric
from moe_rl.objectives.ratios import as_bool_mask

_VERL_BOUND = 20.0  # nats: verl's SAFETY_BOUND on log-weights


OF_RATIOS = ("gap_mean", "gap_p99", "gap_max", "k3", "chi2_token", "chi2_sequence", "ess_token", "ess_sequence")


def engine_metrics(
    logps: Float[Tensor, "B T"], rollout_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> dict[str, Tensor]:
    """Return all metrics of two engines' scores of the same tokens.

    They are the number of tokens (`measured`), `gap_metrics` with chi2 and effective sample size, `mismatch_metrics`,
    and `importance_weight_metrics` and `ratio_range_metrics` of w.
    """
    mask = as_bool_mask(mask)
    d = token_log_ratio(logps, rollout_logps, mask).detach()
    return {
        "measured": mask.sum(),
        **gap_metrics(logps, rollout_logps, mask, names=OF_RATIOS),
        **mismatch_metrics(logps, rollout_logps, mask),
        **importance_weight_metrics(d, mask),
        **ratio_range_metrics(d, mask),
    }


@torch.no_grad()
def gap_metrics(
    logps: Float[Tensor, "B T"],
    other: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    *,
    names: tuple[str, ...] = ("gap_mean", "gap_p99", "gap_max", "k3"),
) -> dict[str, Tensor]:
    """Return how far two scorings of the same tokens are apart: metrics of d = logps - other (nats) and r = exp(d).

    `names`: which of `ratio_metrics`; if `other` is mu, the engine that sampled, k3 estimates KL(mu || pi).
    `extreme_fraction`: F(2) of R3 (arXiv 2510.11370), the share of tokens with max(r, 1/r) > 2.
    `var_token`, `var_sequence`: variance of d over tokens, and of its mean over each sequence (log s of arXiv
    2507.18071, eq. 7) over sequences; the quotient of the two would be the mean length if tokens were independent.
    """
    mask = as_bool_mask(mask)
    d = token_log_ratio(logps, other, mask)
    ratios = ratio_metrics(d, mask)
    return {
        **{name: ratios[name] for name in names},
        "extreme_fraction": ratios["extreme_2"].double() / mask.sum(),
        "var_token": variance(d[mask].double()),
        "var_sequence": variance(sequence_log_ratio(logps, other, mask)[mask.any(1)].double()),
    }


def mismatch_metrics(
    logps: Float[Tensor, "B T"], rollout_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> dict[str, Tensor]:
    """Return how far the training engine's scores (`logps`) are from the sampler's, by NeMo-RL's and verl's metrics.

    - NeMo-RL: `token_mult_prob_error` = mean e^|d| (suspicious above 1.05); `seq_mult_prob_error_{min,mean,max}`, of
      the means of e^|d| over each sequence; `policy_kl_error` = mean(1/w - 1 + d); `js_divergence_error`, with m =
      (pi + mu)/2 the mean of (pi/m - 1 - log(pi/m))/2 + (mu/m - 1 - log(mu/m))/2; `sampling_importance_ratio` = mean w
    - verl: `rollout_probs_diff_{mean,max,std}` of |pi - mu| (std with divisor n-1), `rollout_actor_probs_pearson_corr`
      of pi and mu; over sequences of their mean log-probabilities: `log_ppl_diff` = mean(log mu - log pi),
      `log_ppl_abs_diff`, `ppl_ratio` = mean e^(log mu - log pi), `training_ppl`, `rollout_ppl`; `chi2_seq` = mean
      e^(2 Σ_t d) - 1, Σ d bounded to ±20 nats: a sum over the sequence, where `chi2_sequence` takes the mean

    Args:
        logps: log-probabilities by the training engine, nats.
        rollout_logps: log-probabilities by the engine that sampled, nats.
        mask: True (or 1) on response tokens.
    """
    mask = as_bool_mask(mask)
    with torch.no_grad():
        d = token_log_ratio(logps, rollout_logps, mask).double()
        new, old = (torch.where(mask, x, 0.0).double() for x in (logps, rollout_logps))
        tokens, rows, length = d[mask], mask.any(1), mask.sum(1)
        p, q = new[mask].exp(), old[mask].exp()
        per_sequence = torch.where(mask, d.abs().exp(), 0.0).sum(1)[rows] / length[rows]
        log_mixture = ((p + q) / 2).log()
        to_mixture = [torch.expm1(x) - x for x in (new[mask] - log_mixture, old[mask] - log_mixture)]
        means = [(torch.where(mask, x, 0.0).sum(1) / length.clamp(min=1))[rows] for x in (new, old)]
        log_ppl_diff = means[1] - means[0]
        shift = (p - q).abs()
        total = d.sum(1)[rows].clamp(-_VERL_BOUND, _VERL_BOUND)
        nan = shift.new_full((), torch.nan)  # for a single token
        return {
            "token_mult_prob_error": tokens.abs().exp().mean(),
            "seq_mult_prob_error_min": extreme(per_sequence, "min"),
            "seq_mult_prob_error_mean": per_sequence.mean(),
            "seq_mult_prob_error_max": extreme(per_sequence, "max"),
            "policy_kl_error": (torch.expm1(-tokens) + tokens).mean(),
            "js_divergence_error": (to_mixture[0] / 2 + to_mixture[1] / 2).mean(),
            "sampling_importance_ratio": tokens.exp().mean(),
            "rollout_probs_diff_mean": shift.mean(),
            "rollout_probs_diff_max": extreme(shift, "max"),
            "rollout_probs_diff_std": shift.std() if len(shift) > 1 else nan,
            "rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([p, q]))[0, 1] if len(p) > 1 else nan,
            "log_ppl_diff": log_ppl_diff.mean(),
            "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
            "ppl_ratio": log_ppl_diff.exp().mean(),
            "training_ppl": (-means[0]).exp().mean(),
            "rollout_ppl": (-means[1]).exp().mean(),
            "chi2_seq": (2 * total).exp().mean() - 1,
        }


def importance_weight_metrics(
    log_weight: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], *, low: float = 0.5, high: float = 2.0
) -> dict[str, Tensor]:
    """Return verl's metrics of token-level weights w = e^`log_weight`, truncated at `high` (verl's rollout_is "token").

    `rollout_is_{mean,min,max}` of min(w, high); `rollout_is_oob_ratio`: tokens with w outside [low, high];
    `rollout_is_eff_sample_size` = 1 / mean((v / mean v)²) with v = min(w, high): a fraction of the tokens;
    `rollout_is_seq_max_deviation`: the largest |mean over a sequence of min(w, high) - 1|. w is bounded at e^±20 first.
    The formulas are those of verl 0.10.0.dev (verl/trainer/ppo/rollout_corr_helper.py, `compute_is_metrics`), but for
    `oob_ratio`, which verl has for IcePop's bounds alone. Older versions bounded v from below, too, so that the
    effective sample size could not get small.

    >>> log_weight = torch.tensor([[3.0, 1.0], [1.0, 0.25]]).log()
    >>> found = importance_weight_metrics(log_weight, torch.ones(2, 2, dtype=torch.bool))
    >>> [round(float(found[f"rollout_is_{name}"]), 4) for name in ("mean", "oob_ratio", "seq_max_deviation")]
    [1.0625, 0.5, 0.5]
    """
    mask = as_bool_mask(mask)
    with torch.no_grad():
        raw = torch.where(mask, log_weight, 0.0).double().clamp(-_VERL_BOUND, _VERL_BOUND).exp()
        weight, rows = raw.clamp(max=high), mask.any(1)
        tokens = weight[mask]
        by_sequence = torch.where(mask, weight, 0.0).sum(1)[rows] / mask.sum(1)[rows]
        return {
            "rollout_is_mean": tokens.mean(),
            "rollout_is_min": extreme(tokens, "min"),
            "rollout_is_max": extreme(tokens, "max"),
            "rollout_is_oob_ratio": ((raw[mask] < low) | (raw[mask] > high)).double().mean(),
            "rollout_is_eff_sample_size": tokens.mean().square() / tokens.square().mean(),
            "rollout_is_seq_max_deviation": extreme((by_sequence - 1).abs(), "max"),
        }


_NEMO, _VERL, _PRIME = "NeMo-RL", "verl", "prime-rl"

OF_ENGINES: tuple[Metric, ...] = (
    M("token_mult_prob_error", "1", "mean e^abs(d): by what factor a token's probability is off; suspicious above 1.05", "Σ / tokens", _NEMO),
    M("seq_mult_prob_error_min", "1", "smallest mean of e^abs(d) over a sequence", "", f"{_NEMO} min_seq_mult_prob_error"),
    M("seq_mult_prob_error_mean", "1", "mean over sequences of the same", "Σ / sequences", f"{_NEMO} mean_seq_mult_prob_error"),
    M("seq_mult_prob_error_max", "1", "largest of the same", "", f"{_NEMO} max_seq_mult_prob_error"),
    M("policy_kl_error", "nats/token", "mean(1/w - 1 + d)", "Σ / tokens", _NEMO),
    M("js_divergence_error", "nats/token", "with m = (pi + mu)/2: mean of (pi/m - 1 - log(pi/m))/2 + (mu/m - 1 - log(mu/m))/2", "Σ / tokens", _NEMO),
    M("sampling_importance_ratio", "1", "mean w", "Σ / tokens", _NEMO),
    M("rollout_probs_diff_mean", "fraction", "mean abs(pi - mu) of the sampled tokens", "Σ / tokens", f"{_VERL} training/"),
    M("rollout_probs_diff_max", "fraction", "its largest value", "", f"{_VERL} training/"),
    M("rollout_probs_diff_std", "fraction", "its standard deviation (divisor n-1)", "", f"{_VERL} training/"),
    M("rollout_actor_probs_pearson_corr", "1", "Pearson correlation of pi and mu of the sampled tokens", "", f"{_VERL} training/"),
    M("log_ppl_diff", "nats", "mean over sequences of (mean log mu - mean log pi)", "Σ / sequences", f"{_VERL} rollout_corr/"),
    M("log_ppl_abs_diff", "nats", "mean over sequences of its absolute value", "Σ / sequences", f"{_VERL} rollout_corr/"),
    M("ppl_ratio", "1", "mean over sequences of its exponential: the training engine's perplexity over the sampler's", "Σ / sequences", f"{_VERL} rollout_corr/"),
    M("training_ppl", "1", "perplexity of the training engine, mean over sequences", "Σ / sequences", f"{_VERL} rollout_corr/"),
    M("rollout_ppl", "1", "of the sampler", "Σ / sequences", f"{_VERL} rollout_corr/"),
    M("chi2_seq", "1", "mean over sequences of (Π w)², less 1; Σ d within 20 nats", "", f"{_VERL} rollout_corr/"),
    M("rollout_is_mean", "1", "mean weight, truncated at 2", "Σ / tokens", f"{_VERL} rollout_corr/"),
    M("rollout_is_min", "1", "smallest weight", "", f"{_VERL} rollout_corr/"),
    M("rollout_is_max", "1", "largest weight, at most 2", "", f"{_VERL} rollout_corr/"),
    M("rollout_is_oob_ratio", "fraction", "tokens with w outside [0.5, 2]", "such tokens / tokens", f"{_VERL} rollout_corr/"),
    M("rollout_is_eff_sample_size", "fraction", "effective sample size of the truncated weights, over tokens", "(Σ w)² / (n Σ w²)", f"{_VERL} rollout_corr/"),
    M("rollout_is_seq_max_deviation", "1", "largest abs(mean weight of a sequence - 1)", "", f"{_VERL} rollout_corr/"),
    M("probs_ratio_min", "1", "smallest ratio of a token", "", _NEMO),
    M("probs_ratio_max", "1", "largest ratio of a token", "", _NEMO),
    M("outside_fraction", "fraction", "tokens with a ratio outside [0.9, 1.1]", "such tokens / tokens", "verl issue 6280"),
)  # fmt: skip
"""Catalogue entries of `mismatch_metrics`, `importance_weight_metrics` and `ratio_range_metrics`."""

OF_TRUST_REGIONS: tuple[Metric, ...] = (
    M("is_masked", "fraction", "tokens that the clip takes out; w = pi / mu with pi the policy in training", "such tokens / tokens", _PRIME),
    M("is_masked_low", "fraction", "of them, below", "such tokens / tokens", _PRIME),
    M("is_masked_high", "fraction", "of them, above", "such tokens / tokens", _PRIME),
    M("masked_mismatch_kl", "nats/token", "w - 1 - log w, mean over the tokens taken out; null if none is", "Σ / such tokens", _PRIME),
    M("unmasked_mismatch_kl", "nats/token", "the same over the tokens kept", "Σ / such tokens", _PRIME),
)  # fmt: skip
"""Catalogue entries of `masked_mismatch_metrics`."""
