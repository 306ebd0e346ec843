"""Detached scalars that go with a loss. Every fraction comes with its numerator and denominator."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.ratios import masked_row_sum

EXTREME_NATS = 20.0


def loss_metrics(
    *,
    log_ratio: Float[Tensor, "B T"],
    level_log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clipped: Bool[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    kl: Float[Tensor, "B T"] | None = None,
    engine_log_weight: Float[Tensor, "B T"] | None = None,
    correction_weights: Sequence[Float[Tensor, "B T"]] = (),
) -> dict[str, Tensor]:
    """Facts about one (micro-)batch; all inputs detached.

    Keys (unit); `*_sum` and counts add up over micro-batches and processes:

    - `tokens`, `sequences`: unmasked tokens; rows with at least one
    - `clip_fraction` = `clipped_tokens` / `tokens`: tokens out of the gradient (fraction); also split into
      `clipped_high_tokens` (A > 0) and `clipped_low_tokens` (A < 0)
    - `clip_fraction_sequences` = `clipped_sequences` / `sequences`: sequences with a clipped token
    - `live_tokens`: tokens with a non-zero advantage, the only ones that could be clipped
    - `log_ratio_mean`, `log_ratio_variance` over tokens (nats, nats^2), from `log_ratio_sum`,
      `log_ratio_square_sum`; `log_ratio_abs_max` (nats)
    - `gate_ratio_mean`: of the ratio that the gate saw (token, or sequence on each of its tokens)
    - `extreme_tokens`: tokens with a log-ratio beyond 20 nats, or not finite
    - `old_kl_k1`, `old_kl_k3`: KL(old || current) from the anchor's samples (nats), by -log r and by
      r - 1 - log r
    - with a reference policy: `ref_kl` = `ref_kl_sum` / `tokens`, KL(current || reference) (nats)
    - with rollout log-probabilities: `engine_kl_k1`, `engine_kl_k3`, KL(rollout engine || old) (nats),
      `engine_log_weight_abs_max`
    - with engine corrections: `correction_dropped_fraction` = `correction_dropped_tokens` / `tokens`,
      `correction_weight_mean` = `correction_weight_sum` / `tokens`
    """
    tokens = mask.sum()
    lengths = mask.sum(-1)
    sequences = (lengths > 0).sum()
    clipped_tokens = clipped.sum()
    clipped_sequences = clipped.any(-1).sum()
    log_ratio_sum = log_ratio.sum()
    log_ratio_square_sum = log_ratio.square().sum()
    mean = _over(log_ratio_sum, tokens)
    metrics = {
        "tokens": tokens,
        "sequences": sequences,
        "live_tokens": (mask & (advantages != 0)).sum(),
        "clipped_tokens": clipped_tokens,
        "clipped_high_tokens": (clipped & (advantages > 0)).sum(),
        "clipped_low_tokens": (clipped & (advantages < 0)).sum(),
        "clip_fraction": _over(clipped_tokens, tokens),
        "clipped_sequences": clipped_sequences,
        "clip_fraction_sequences": _over(clipped_sequences, sequences),
        "log_ratio_sum": log_ratio_sum,
        "log_ratio_square_sum": log_ratio_square_sum,
        "log_ratio_mean": mean,
        "log_ratio_variance": _over((log_ratio - mean).square().masked_fill(~mask, 0.0).sum(), tokens),
        "log_ratio_abs_max": _abs_max(log_ratio),
        "gate_ratio_mean": _over(masked_row_sum(level_log_ratio.exp(), mask).sum(), tokens),
        "extreme_tokens": (mask & ~(log_ratio.abs() <= EXTREME_NATS)).sum(),
        "old_kl_k1": -mean,
        "old_kl_k3": _over((torch.expm1(log_ratio) - log_ratio).sum(), tokens),
    }
    if kl is not None:
        metrics["ref_kl_sum"] = kl.sum()
        metrics["ref_kl"] = _over(kl.sum(), tokens)
    if engine_log_weight is not None:
        metrics["engine_kl_k1"] = -_over(engine_log_weight.sum(), tokens)
        metrics["engine_kl_k3"] = _over((torch.expm1(engine_log_weight) - engine_log_weight).sum(), tokens)
        metrics["engine_log_weight_abs_max"] = _abs_max(engine_log_weight)
    if correction_weights:
        weight = torch.stack(list(correction_weights)).prod(0).masked_fill(~mask, 0.0)
        dropped = (mask & (weight == 0)).sum()
        metrics["correction_dropped_tokens"] = dropped
        metrics["correction_dropped_fraction"] = _over(dropped, tokens)
        metrics["correction_weight_sum"] = weight.sum()
        metrics["correction_weight_mean"] = _over(weight.sum(), tokens)
    return metrics


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp(min=1)


def _abs_max(values: Tensor) -> Tensor:
    return values.abs().max() if values.numel() else values.new_zeros(())
