"""Gates of methods other than PPO, GRPO and GSPO.

MiniRL's mask, a ceiling that keeps its tokens, a clip of whole sequences, no clip, no ratio, CISPO's cap, SAPO's
sigmoid, GMPO's mean of clipped ratios, and VESPO's gamma kernel."""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.objectives.gates import Gated, GateInputs, choose, clip_gate, gate, outside_trust_region
from moe_rl.objectives.ratios import log_ratio_at_level, masked_row_mean

_SATURATED = 50.0  # nats: sigma(tau (e^50 - 1)) is 1 and its slope 0 in float64 for every tau above 1e-20


@gate("mask", flow="logps")
def mask_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """Return the surrogate of MiniRL (arXiv:2512.01374), sg[M r] A log pi; M = 0 exactly where `clip_gate` clips.

    The gradient is that of `clip_gate`; only the reported value differs.
    """
    ratio = x.log_ratio.detach().exp()
    clipped = outside_trust_region(ratio, x.advantages, 1.0 - clip_low, 1.0 + clip_high)
    return Gated(torch.where(clipped, 0.0, ratio) * x.advantages * x.logps, clipped)


def _below_ceiling(x: GateInputs, ceiling: float | int) -> Float[Tensor, "B T"]:
    """Return the log-ratio; where A < 0 and the ratio is above `ceiling`, log `ceiling` with the log-ratio's slope."""
    excess = (x.log_ratio.detach() - math.log(ceiling)).clamp(min=0.0)
    return x.log_ratio - torch.where(x.advantages < 0, excess, 0.0)


def _ceiling_importance(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, dual_clip: float | int
) -> Float[Tensor, "B T"]:
    return _below_ceiling(x, dual_clip).exp()


@gate("soft_dual_clip", importance=_ceiling_importance)
def soft_dual_clip_gate(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, dual_clip: float | int
) -> Gated:
    """Return the surrogate of `clip_gate` with a ceiling that keeps its tokens: min(r, c) A where A < 0.

    Tokens with A < 0 and r > c = `dual_clip` have the value that dual clip (arXiv:1912.09729) gives them, c A, and stay
    in the gradient with the weight c: c A grad log pi. Dual clip takes them out. No paper has this gate: it separates
    what a bounded weight does from what leaving tokens out does. A ceiling that keeps the gradient is called soft by
    ASPO (arXiv:2510.06062).
    """
    return clip_gate(replace(x, level_log_ratio=_below_ceiling(x, dual_clip)), clip_low=clip_low, clip_high=clip_high)


@gate("sequence_clip", levels=("token",))
def sequence_clip_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """Return r A with token ratios under GSPO's trust region: a token is clipped where its sequence would be.

    The clip is that of `clip_gate` at the geometric mean of the sequence's r (arXiv:2507.18071, eq. 7). No paper has
    this gate: it separates the effect of the ratio's level from that of the clip's level.
    """
    sequence = log_ratio_at_level(x.level_log_ratio.detach(), x.mask, "sequence")
    clipped = outside_trust_region(sequence.exp(), x.advantages, 1.0 - clip_low, 1.0 + clip_high) & x.mask
    ratio = torch.where(clipped, x.log_ratio.detach().clamp(max=_SATURATED), x.log_ratio).exp()
    return Gated(ratio * x.advantages, clipped, sequence)


@gate("none")
def plain_gate(x: GateInputs) -> Gated:
    """Return r A, plain importance sampling (arXiv:2507.18071, eqs 8 and 11, where clipping is omitted)."""
    return Gated(x.log_ratio.exp() * x.advantages, x.nowhere())


def _one(x: GateInputs) -> Float[Tensor, "B T"]:
    return torch.ones_like(x.logps)


@gate("likelihood", flow="logps", importance=_one)
def likelihood_gate(x: GateInputs) -> Gated:
    """Return A log pi, the policy gradient without a ratio; SFT and RFT with A of 0 or 1 (arXiv:2402.03300, A.1)."""
    return Gated(x.logps * x.advantages, x.nowhere())


def _capped_ratio(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Float[Tensor, "B T"]:
    return x.level_log_ratio.detach().exp().clamp(min=1.0 - clip_low, max=1.0 + clip_high)


@gate("cap", flow="logps", importance=_capped_ratio)
def cap_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """Return the surrogate of CISPO (arXiv:2506.13585), sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi.

    The weight is bounded, but no token leaves the gradient: `clipped` is False everywhere.
    """
    weight = _capped_ratio(x, clip_low=clip_low, clip_high=clip_high)
    return Gated(weight * x.advantages * x.logps, x.nowhere())


def _sigmoid_importance(
    x: GateInputs, *, temperature_pos: float | int, temperature_neg: float | int
) -> Float[Tensor, "B T"]:
    ratio = x.level_log_ratio.exp()
    tau = choose(x.advantages > 0, temperature_pos, temperature_neg, ratio.dtype)
    slope = torch.cosh(0.5 * tau * (ratio - 1.0)).pow(-2)
    return torch.where(slope > 0, ratio * slope, 0.0)


@gate("sigmoid", importance=_sigmoid_importance)
def sigmoid_gate(x: GateInputs, *, temperature_pos: float | int, temperature_neg: float | int) -> Gated:
    """Return the surrogate of SAPO (arXiv:2511.20347), (4/tau) sigma(tau (r - 1)) A.

    tau is temperature_pos where A > 0, else temperature_neg. The slope in r is sech^2(tau (r - 1)/2):
    1 on-policy, and it fades smoothly on both sides. Nothing is clipped.
    """
    tau = choose(x.advantages > 0, temperature_pos, temperature_neg, x.log_ratio.dtype)
    ratio = x.log_ratio.clamp(max=_SATURATED).exp()
    return Gated(torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * x.advantages, x.nowhere())


def _geometric_mean(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Float[Tensor, "B T"]:
    """Return the geometric mean of a sequence's clipped ratios, on each of its tokens."""
    advantages, log_ratio = x.advantages, x.level_log_ratio  # the mean needs the ratio of every token
    clipped = outside_trust_region(log_ratio, advantages, -clip_low, clip_high)
    bounded = torch.where(clipped, choose(advantages > 0, clip_high, -clip_low, log_ratio.dtype), log_ratio)
    if x.log_route_weight is not None:
        bounded = bounded + x.log_route_weight
    # A row with advantage 0 gets no gradient, however large its ratios: 0 * inf would be NaN.
    bounded = bounded.masked_fill(~((advantages != 0) & x.mask).any(-1, keepdim=True), 0.0)
    return torch.where(x.mask, masked_row_mean(bounded, x.mask).exp()[:, None], 0.0)


@gate("geometric", flow="row", levels=("token",), importance=_geometric_mean)
def geometric_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """Return the surrogate of GMPO (arXiv:2507.20673): A times the geometric mean of the clipped token ratios.

        (prod_t |min(r A, clip(r, e^-clip_low, e^clip_high) A)|)^(1/|y|) sgn A
            = A exp((1/|y|) sum_t clipped log r),   clipped at +clip_high if A > 0, at -clip_low if A < 0

    The route weight is added after the clip, inside the mean (RSPO, arXiv:2510.23027 v1).

    Differs: with token-level advantages, which the paper does not define, the sequence's geometric mean
    multiplies each token's own advantage.
    """
    clipped = outside_trust_region(x.level_log_ratio, x.advantages, -clip_low, clip_high)
    return Gated(_geometric_mean(x, clip_low=clip_low, clip_high=clip_high) * x.advantages, clipped)


def _gamma_kernel(
    x: GateInputs, *, power_pos: float | int, decay_pos: float | int, power_neg: float | int, decay_neg: float | int
) -> Float[Tensor, "B T"]:
    log_ratio, up = x.log_ratio.detach(), x.advantages >= 0
    power = choose(up, power_pos, power_neg, log_ratio.dtype)
    decay = choose(up, decay_pos, decay_neg, log_ratio.dtype)
    return (power * log_ratio - decay * torch.expm1(log_ratio)).exp()


@gate("gamma", flow="logps", importance=_gamma_kernel)
def gamma_gate(
    x: GateInputs, *, power_pos: float | int, decay_pos: float | int, power_neg: float | int, decay_neg: float | int
) -> Gated:
    """Return the surrogate of VESPO (arXiv:2602.10693), sg[phi(r)] A log pi, phi(r) = r^power e^(decay (1 - r)).

    phi is the kernel of a gamma density with phi(1) = 1; power and decay are `_pos` where A >= 0, else `_neg`. Small
    and large ratios fade; nothing is clipped. The paper's r is that of whole sequences, ratio="sequence_product".
    """
    weight = _gamma_kernel(x, power_pos=power_pos, decay_pos=decay_pos, power_neg=power_neg, decay_neg=decay_neg)
    return Gated(weight * x.advantages * x.logps, x.nowhere())
