"""Definitions of all metrics that a policy loss reports of a minibatch: counts, clip shares, correction weights.

Metrics of the distribution of log-ratios (k1, k3, effective sample size, ...) are not defined here: `moe_rl.measure`
computes them from `LossOutput.log_ratio`.
"""

# ruff: noqa: E501  (a table: one metric, one line)
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.gates import TokenValues


class Metric(NamedTuple):
    """Name, unit and definition of one metric.

    Attributes:
        name: as written; `<...>` stands for any name.
        unit: nats, fraction, count, ...
        definition: what the metric is. r = new / old ratio of a token, d = log r, s = exp(mean of d over a sequence).
        over: numerator / denominator, if the value is a quotient or is to be divided by a count.
        source: where the definition comes from; empty: ours or standard.
        when: the condition under which the metric is written; empty: always.
    """

    name: str
    unit: str
    definition: str
    over: str = ""
    source: str = ""
    when: str = ""

    @property
    def is_list(self) -> bool:
        """Whether the metric's values are lists: by site, by layer, by position, or histograms."""
        return self.name.startswith(("site_", "layer_", "position_")) or self.name.endswith("_histogram")


M = Metric

CEILING = 3.0
"""The usual ceiling of dual clip: its paper's (arXiv 1912.09729) and verl's default `clip_ratio_c`."""

_GSPO = "arXiv 2507.18071"
_REF, _ENGINE, _CORRECTED, _RSPO = (
    "a reference policy, not DPO",
    "rollout log-probabilities in the loss",
    "engine corrections",
    "objective rspo",
)

LOSS_METRICS: tuple[Metric, ...] = (
    M("tokens", "count", "response tokens of the minibatch"),
    M("sequences", "count", "sequences with a response token"),
    M("live_tokens", "count", "tokens with a non-zero advantage, the only ones that can be clipped", "over tokens"),
    M("clipped_tokens", "count", "tokens that the clip takes out of the gradient (sign-aware; a sequence ratio: all of the sequence)", "over tokens: clip fraction", f"{_GSPO} fig. 2"),
    M("clipped_low_tokens", "count", "of them, with A < 0 and the gate's ratio below 1", "over tokens", "TRL clip_ratio/low_mean"),
    M("clipped_high_tokens", "count", "of them, with A > 0 and the gate's ratio above 1; what is neither low nor high is beyond the ceiling of dual_clip", "over tokens", "TRL clip_ratio/high_mean"),
    M("clipped_sequences", "count", "sequences with a clipped token", "over sequences"),
    M("gate_ratio_mean", "1", "mean over tokens of the ratio by which the gate clips: the token's, or the sequence's on each of its tokens", "Σ / tokens"),
    M("ceiling_tokens", "count", "tokens with A < 0 and a ratio of their own above 3, which GRPO's clip leaves in the gradient, however large the ratio, and dual_clip takes out", "over tokens", "verl actor/pg_clipfrac_lower at its default clip_ratio_c"),
    M("extreme_tokens", "count", "tokens with a log-ratio beyond 20 nats: an unclipped one soon overflows", "over tokens"),
    M("ref_kl", "nats/token", "KL(current || reference) by the objective's estimator, mean over tokens", "Σ / tokens", "TRL kl", _REF),
    M("engine_kl_k1", "nats/token", "KL(rollout engine || old policy) by -log w, w = pi_old / mu", "Σ / tokens", "", _ENGINE),
    M("engine_kl_k3", "nats/token", "the same by w - 1 - log w", "Σ / tokens", "", _ENGINE),
    M("engine_log_weight_abs_max", "nats", "largest abs(log w)", "", "", _ENGINE),
    M("correction_weight_mean", "1", "weight that the engine corrections put on a token, mean over tokens", "Σ / tokens", "TRL sampling/importance_sampling_ratio", _CORRECTED),
    M("correction_weight_min", "1", "its smallest value; 0 where a token is dropped", "", "", _CORRECTED),
    M("correction_weight_max", "1", "its largest value", "", "", _CORRECTED),
    M("correction_dropped_tokens", "count", "tokens whose weight is 0", "over tokens", "", _CORRECTED),
    M("correction_truncated_tokens", "count", "tokens whose weight stands at the cap of a truncating correction", "over tokens", "", _CORRECTED),
    M("route_weight", "fraction", "router-shift weight gamma of the tokens before its floor, mean", "Σ / tokens", "RSPO, arXiv 2510.23027", _RSPO),
    M("route_weight_floored", "fraction", "tokens at which the floor acts", "such tokens / tokens", "RSPO", _RSPO),
)  # fmt: skip
"""Every name that `loss_metrics` may return, with its definition."""


def optional_metrics(values: TokenValues) -> dict[str, Tensor]:
    """Return the metrics of the optional fields of `values`, each only if its field is given.

    The fields are those of the reference policy, the sampling engine, the engine corrections and the route weight."""
    mask = values.mask
    metrics: dict[str, Tensor] = {}
    if values.ref_kl is not None:
        metrics["ref_kl"] = _over(torch.mean, values.ref_kl, mask)
    if values.engine_log_weight is not None:
        log_weight = values.engine_log_weight
        metrics["engine_kl_k1"] = -_over(torch.mean, log_weight, mask)
        metrics["engine_kl_k3"] = _over(torch.mean, torch.expm1(log_weight) - log_weight, mask)
        metrics["engine_log_weight_abs_max"] = _over(torch.max, log_weight.abs(), mask)
    if values.correction_weight is not None and values.correction_truncated is not None:
        weight = values.correction_weight
        metrics["correction_weight_mean"] = _over(torch.mean, weight, mask)
        metrics["correction_weight_min"] = _over(torch.min, weight, mask)
        metrics["correction_weight_max"] = _over(torch.max, weight, mask)
        metrics["correction_dropped_tokens"] = (mask & (weight == 0)).sum()
        metrics["correction_truncated_tokens"] = (mask & values.correction_truncated).sum()
    if values.route_weight is not None and values.route_floored is not None:
        metrics["route_weight"] = _over(torch.mean, values.route_weight, mask)
        metrics["route_weight_floored"] = _over(torch.mean, values.route_floored.float(), mask)
    return metrics


def _over(
    reduce: Callable[[Tensor], Tensor], values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    counted = values[mask]
    return reduce(counted) if len(counted) else values.new_zeros(())
