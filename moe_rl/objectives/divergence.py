"""Gates that bound how far the probability of a token moved, not its ratio (DPPO, DRPO).

A ratio of 2 moves a token of probability 1e-5 hardly at all and one of 0.4 a lot. With p the current and q the
anchor's probability of the sampled token, these gates bound p - q, or the KL divergence of (q, 1 - q) from
(p, 1 - p). Their `clip_low` and `clip_high` are thresholds: fractions for p - q, nats for the divergence.
At p = q both are exactly 0, so no token is taken out.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.objectives.gates import Gated, GateInputs, choose, gate, outside_trust_region

_LEAST_REST = 1e-8  # least value of 1 - p in `binary_kl`: a probability that rounds to 1 gives no infinite divergence


def probability_shift(x: GateInputs) -> Float[Tensor, "B T"]:
    """Return p - q of each sampled token, in [-1, 1], detached.

    `expm1` keeps the relative accuracy where p is near q."""
    log_ratio, logps = x.token_log_ratio.detach(), x.logps.detach()
    up = -logps.exp() * torch.expm1(-log_ratio)
    down = (logps - log_ratio).exp() * torch.expm1(log_ratio)
    return torch.where(log_ratio > 0, up, down)


def binary_kl(logps: Float[Tensor, "B T"], log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return q log(q/p) + (1 - q) log((1 - q)/(1 - p)) of each sampled token, nats, detached.

    This is KL(q || p) of the two outcomes "this token" and "any other", a lower bound of the divergence of the whole
    distributions.

    logps: log p; log_ratio: log p - log q. 1 - p and 1 - q are taken as at least 1e-8 (verl adds 1e-8 to them).
    """
    log_ratio, logps = log_ratio.detach(), logps.detach()
    anchor = logps - log_ratio
    rest, anchor_rest = ((-torch.expm1(values)).clamp(min=_LEAST_REST) for values in (logps, anchor))
    return -anchor.exp() * log_ratio + anchor_rest * (anchor_rest / rest).log()


def _capped(x: GateInputs, *, ratio_cap: float | int | None = None, **_: object) -> Float[Tensor, "B T"]:
    log_ratio = x.log_ratio.detach()
    return (log_ratio if ratio_cap is None else log_ratio.clamp(max=math.log(ratio_cap))).exp()


@gate("divergence_tv", flow="logps", levels=("token",), importance=_capped)
def divergence_tv_gate(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, ratio_cap: float | int | None = None
) -> Gated:
    """Return the surrogate of DPPO-Binary-TV (arXiv:2602.04879), sg[M min(r, ratio_cap)] A log pi.

    M = 0 where A > 0 and p - q > clip_high, or A < 0 and p - q < -clip_low. |p - q| is the total variation of "this
    token" against "any other". The sign of p - q is the direction in which the sampled token moved: a gradient that
    moves p back towards q is never masked.
    """
    clipped = outside_trust_region(probability_shift(x), x.advantages, -clip_low, clip_high)
    weight = torch.where(clipped, 0.0, _capped(x, ratio_cap=ratio_cap))
    return Gated(weight * x.advantages * x.logps, clipped, x.token_log_ratio.detach())


@gate("divergence_kl", flow="logps", levels=("token",), importance=_capped)
def divergence_kl_gate(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, ratio_cap: float | int | None = None
) -> Gated:
    """Return the surrogate of DPPO-Binary-KL (arXiv:2602.04879), sg[M min(r, ratio_cap)] A log pi.

    M = 0 where A > 0, p > q and D > clip_high, or A < 0, p < q and D > clip_low; D is `binary_kl` (nats).
    """
    log_ratio = x.token_log_ratio.detach()
    divergence = binary_kl(x.logps, log_ratio)
    above = (x.advantages > 0) & (log_ratio > 0) & (divergence > clip_high)
    clipped = above | ((x.advantages < 0) & (log_ratio < 0) & (divergence > clip_low))
    weight = torch.where(clipped, 0.0, _capped(x, ratio_cap=ratio_cap))
    return Gated(weight * x.advantages * x.logps, clipped, log_ratio)


def _quadratic_importance(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Float[Tensor, "B T"]:
    delta = choose(x.advantages > 0, clip_high, clip_low, x.log_ratio.dtype)
    anchor = (x.logps - x.token_log_ratio).exp()
    moved = anchor * torch.expm1(x.log_ratio)  # p - q, unless a route weight is in the ratio
    return x.log_ratio.exp() * (1.0 - x.advantages.sign() * moved / delta)


@gate("quadratic", levels=("token",), importance=_quadratic_importance)
def quadratic_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """Return the surrogate of DRPO (arXiv:2606.09821, eq. 8), r A - |A| q (r - 1)^2 / (2 delta).

    Its slope is r A (1 - sgn(A) (p - q)/delta) (table 1): the slope fades to 0 at the bound of DPPO's Binary-TV mask
    and changes its sign beyond. Nothing is clipped.

    Differs: delta is clip_high where A > 0 and clip_low where A < 0; the paper has one delta.
    """
    ratio = x.log_ratio.exp()
    anchor = (x.logps - x.token_log_ratio).detach().exp()
    delta = choose(x.advantages > 0, clip_high, clip_low, ratio.dtype)
    excess = ratio - 1.0
    penalty = x.advantages.abs() / (2.0 * delta) * (excess * anchor) * excess
    return Gated(ratio * x.advantages - penalty, x.nowhere())
