"""What each method makes of a ratio and an advantage: the surrogate of a token, to be maximised.

Every function takes log-ratios (nats) and advantages `[B,T]`, both 0 in padding, and returns `Gated`: the
surrogate `[B,T]` with its gradient, and `clipped [B,T]`, the tokens that the gate takes out of the gradient
(they depend on the sign of the advantage; a zero advantage is never clipped). Bounds are strict: a ratio
exactly on a bound is not clipped.

A clipped token never meets `exp`: its log-ratio is replaced first, so that a ratio that overflows gives
neither a value nor a NaN gradient (0 * inf) if the clip removes it anyway.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.ratios import masked_row_mean

_SATURATED = 50.0  # nats: sigma(tau (e^50 - 1)) is 1 and its slope 0 in float64 for every tau above 1e-20


class Gated(NamedTuple):
    """Surrogate per token (with gradient) and the tokens taken out of the gradient."""

    surrogate: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


def choose(
    condition: Bool[Tensor, "B T"], yes: float | int, no: float | int, dtype: torch.dtype
) -> Float[Tensor, "B T"]:
    """`torch.where` of two numbers in `dtype`; torch's own would round them to float32 first."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype, device=condition.device), no)


def outside_trust_region(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], low: float | int, high: float | int
) -> Bool[Tensor, "B T"]:
    """(A > 0 and r > high) or (A < 0 and r < low): where min(r A, clip(r, low, high) A) is flat in r."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def clip_gate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clip_low: float | int,
    clip_high: float | int,
    dual_clip: float | int | None = None,
) -> Gated:
    """PPO's pessimistic clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv:2507.18071, eqs 1 (PPO), 2 (GRPO), 5 (GSPO), 13 (GSPO-token). With `dual_clip` = c, additionally at
    least c A where A < 0 (arXiv:1912.09729): tokens with A < 0 and r > c leave the gradient too.
    """
    ratio = log_ratio.detach().exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = outside_trust_region(ratio, advantages, low, high)
    bound = choose(advantages > 0, high, low, ratio.dtype)
    if dual_clip is not None:
        above_ceiling = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(above_ceiling, dual_clip, bound)
        clipped = clipped | above_ceiling
    live = torch.where(clipped, 0.0, log_ratio).exp()
    return Gated(torch.where(clipped, bound, live) * advantages, clipped)


def mask_gate(
    log_ratio: Float[Tensor, "B T"],
    logps: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clip_low: float | int,
    clip_high: float | int,
) -> Gated:
    """MiniRL (arXiv:2512.01374): sg[M r] A log pi, with M = 0 exactly where `clip_gate` clips.

    The gradient is that of `clip_gate`; only the reported value differs.
    """
    ratio = log_ratio.detach().exp()
    clipped = outside_trust_region(ratio, advantages, 1.0 - clip_low, 1.0 + clip_high)
    return Gated(torch.where(clipped, 0.0, ratio) * advantages * logps, clipped)


def cap_gate(
    log_ratio: Float[Tensor, "B T"],
    logps: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    clip_low: float | int,
    clip_high: float | int,
) -> Gated:
    """CISPO (arXiv:2506.13585): sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi.

    The weight is bounded, but no token leaves the gradient: `clipped` is False everywhere.
    """
    weight = log_ratio.detach().exp().clamp(min=1.0 - clip_low, max=1.0 + clip_high)
    return Gated(weight * advantages * logps, torch.zeros_like(advantages, dtype=torch.bool))


def sigmoid_gate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    temperature_pos: float | int,
    temperature_neg: float | int,
) -> Gated:
    """SAPO (arXiv:2511.20347): (4/tau) sigma(tau (r - 1)) A.

    tau is temperature_pos where A > 0, else temperature_neg. The slope in r is sech^2(tau (r - 1)/2):
    1 on-policy, fading smoothly on both sides. Nothing is clipped.
    """
    tau = choose(advantages > 0, temperature_pos, temperature_neg, log_ratio.dtype)
    ratio = log_ratio.clamp(max=_SATURATED).exp()
    surrogate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    return Gated(surrogate, torch.zeros_like(advantages, dtype=torch.bool))


def geometric_gate(
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    clip_low: float | int,
    clip_high: float | int,
    log_route_weight: Float[Tensor, "B T"] | None = None,
) -> Gated:
    """GMPO (arXiv:2507.20673): geometric mean over a sequence of its clipped token ratios, times A.

        (prod_t |min(r A, clip(r, e^-clip_low, e^clip_high) A)|)^(1/|y|) sgn A
            = A exp((1/|y|) sum_t clipped log r),   clipped at +clip_high if A > 0, at -clip_low if A < 0

    `log_route_weight` (nats) is added after the clip, inside the mean (RSPO, arXiv:2510.23027 v1).

    Differs: with token-level advantages, which the paper does not define, the sequence's geometric mean
    multiplies each token's own advantage.
    """
    above = (advantages > 0) & (log_ratio > clip_high)
    below = (advantages < 0) & (log_ratio < -clip_low)
    bounded = torch.where(above, clip_high, torch.where(below, -clip_low, log_ratio))
    if log_route_weight is not None:
        bounded = bounded + log_route_weight
    # A row without advantage has no gradient, however far its ratios are: not 0 times infinity.
    bounded = bounded.masked_fill(~((advantages != 0) & mask).any(-1, keepdim=True), 0.0)
    geometric_mean = masked_row_mean(bounded, mask).exp()
    return Gated(torch.where(mask, geometric_mean[:, None], 0.0) * advantages, above | below)


def plain_gate(log_ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Gated:
    """Plain importance sampling: r A (arXiv:2507.18071, eqs 8 and 11, where clipping is omitted)."""
    return Gated(log_ratio.exp() * advantages, torch.zeros_like(advantages, dtype=torch.bool))


def likelihood_gate(logps: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"]) -> Gated:
    """A log pi, the policy gradient without a ratio; SFT and RFT with A of 0 or 1 (arXiv:2402.03300, A.1)."""
    return Gated(logps * advantages, torch.zeros_like(advantages, dtype=torch.bool))
