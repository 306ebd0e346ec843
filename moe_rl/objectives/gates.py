"""What each method makes of a ratio and an advantage: the surrogate of a token, to be maximised.

A gate is one function and one registration:

    @gate("clip")
    def clip_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated: ...

Its keyword-only arguments are the fields of `Objective` that it reads. It returns `Gated`: the surrogate `[B,T]`
with its gradient, and `clipped [B,T]`, the tokens that it takes out of the gradient (they depend on the sign of the
advantage; a zero advantage is never clipped). Bounds are strict: a ratio exactly on a bound is not clipped.

A clipped token never meets `exp`: its log-ratio is replaced first, so that a ratio that overflows gives neither a
value nor a NaN gradient (0 * inf) if the clip removes it anyway.

Importance: what the gate's slope, in the token's log-ratio or log-probability, is over the advantage, before clipped
tokens are set to 0. The default is the ratio; a gate with another slope names a function of its own, which
`moe_rl.objectives.gradient.token_weights` then uses.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.ratios import masked_row_mean

_SATURATED = 50.0  # nats: sigma(tau (e^50 - 1)) is 1 and its slope 0 in float64 for every tau above 1e-20


class Gated(NamedTuple):
    """Surrogate per token (with gradient) and the tokens taken out of the gradient."""

    surrogate: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


@dataclass(frozen=True)
class GateInputs:
    """What a gate sees; all `[B,T]`, nats, 0 in padding.

    Fields:
        level_log_ratio: the ratio at the objective's level, RSPO's weight in it if that enters before the clip;
            with gradient.
        token_log_ratio: log pi - log pi_anchor of each token itself; with gradient.
        logps: current policy; with gradient.
        advantages: detached.
        mask: True on completion tokens.
        log_route_weight: RSPO's weight if it enters after the clip, else None; detached.
    """

    level_log_ratio: Float[Tensor, "B T"]
    token_log_ratio: Float[Tensor, "B T"]
    logps: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    log_route_weight: Float[Tensor, "B T"] | None = None

    @cached_property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """`level_log_ratio`, but 0 on tokens without an advantage: they have neither value nor gradient, however
        large their ratio is (0 * inf would be NaN)."""
        return torch.where(self.advantages == 0, 0.0, self.level_log_ratio)

    def nowhere(self) -> Bool[Tensor, "B T"]:
        """`clipped` of a gate that takes no token out of the gradient."""
        return torch.zeros_like(self.advantages, dtype=torch.bool)


Flow = Literal["ratio", "logps", "row"]


@dataclass(frozen=True)
class Gate:
    """A registered gate.

    Fields:
        surrogate: (inputs, **knobs) -> Gated.
        importance: (inputs, **knobs) -> `[B,T]`; see the module's docstring.
        knobs: the fields of `Objective` that it reads.
        flow: what its gradient flows through: "ratio", the ratio at the objective's level; "logps", each token's own
            log-probability, the weight in front being detached; "row", a mean over the sequence that it takes itself.
        levels: the ratio levels at which it is defined; empty: all.
    """

    surrogate: Callable[..., Gated]
    importance: Callable[..., Tensor]
    knobs: tuple[str, ...]
    flow: Flow = "ratio"
    levels: tuple[str, ...] = ()


GATES: dict[str, Gate] = {}


def gate(
    name: str,
    *,
    flow: Flow = "ratio",
    levels: tuple[str, ...] = (),
    importance: Callable[..., Tensor] | None = None,
) -> Callable[[Callable[..., Gated]], Callable[..., Gated]]:
    """Register the decorated function as the gate of that name; arguments as the fields of `Gate`.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Callable[..., Gated]) -> Callable[..., Gated]:
        if name in GATES:
            raise ValueError(f"gate: {name!r} is registered already.")
        parameters = inspect.signature(function).parameters.values()
        knobs = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        GATES[name] = Gate(function, importance or _ratio, knobs, flow, levels)
        return function

    return register


def _ratio(x: GateInputs, **_: object) -> Float[Tensor, "B T"]:
    return x.level_log_ratio.exp()


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


@gate("clip")
def clip_gate(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, dual_clip: float | int | None = None
) -> Gated:
    """PPO's pessimistic clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv:2507.18071, eqs 1 (PPO), 2 (GRPO), 5 (GSPO), 13 (GSPO-token). With `dual_clip` = c, additionally at
    least c A where A < 0 (arXiv:1912.09729): tokens with A < 0 and r > c leave the gradient too.
    """
    ratio = x.log_ratio.detach().exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = outside_trust_region(ratio, x.advantages, low, high)
    bound = choose(x.advantages > 0, high, low, ratio.dtype)
    if dual_clip is not None:
        above_ceiling = (x.advantages < 0) & (ratio > dual_clip)
        bound = torch.where(above_ceiling, dual_clip, bound)
        clipped = clipped | above_ceiling
    live = torch.where(clipped, 0.0, x.log_ratio).exp()
    return Gated(torch.where(clipped, bound, live) * x.advantages, clipped)


@gate("mask", flow="logps")
def mask_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """MiniRL (arXiv:2512.01374): sg[M r] A log pi, with M = 0 exactly where `clip_gate` clips.

    The gradient is that of `clip_gate`; only the reported value differs.
    """
    ratio = x.log_ratio.detach().exp()
    clipped = outside_trust_region(ratio, x.advantages, 1.0 - clip_low, 1.0 + clip_high)
    return Gated(torch.where(clipped, 0.0, ratio) * x.advantages * x.logps, clipped)


def _capped_ratio(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Float[Tensor, "B T"]:
    return x.level_log_ratio.detach().exp().clamp(min=1.0 - clip_low, max=1.0 + clip_high)


@gate("cap", flow="logps", importance=_capped_ratio)
def cap_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """CISPO (arXiv:2506.13585): sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi.

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
    """SAPO (arXiv:2511.20347): (4/tau) sigma(tau (r - 1)) A.

    tau is temperature_pos where A > 0, else temperature_neg. The slope in r is sech^2(tau (r - 1)/2):
    1 on-policy, fading smoothly on both sides. Nothing is clipped.
    """
    tau = choose(x.advantages > 0, temperature_pos, temperature_neg, x.log_ratio.dtype)
    ratio = x.log_ratio.clamp(max=_SATURATED).exp()
    return Gated(torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * x.advantages, x.nowhere())


def _geometric_mean(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Float[Tensor, "B T"]:
    """The sequence's geometric mean of clipped ratios, on each of its tokens."""
    advantages, log_ratio = x.advantages, x.level_log_ratio  # the mean needs the ratio of every token
    above = (advantages > 0) & (log_ratio > clip_high)
    below = (advantages < 0) & (log_ratio < -clip_low)
    bounded = torch.where(above, clip_high, torch.where(below, -clip_low, log_ratio))
    if x.log_route_weight is not None:
        bounded = bounded + x.log_route_weight
    # A row without advantage has no gradient, however far its ratios are: not 0 times infinity.
    bounded = bounded.masked_fill(~((advantages != 0) & x.mask).any(-1, keepdim=True), 0.0)
    return torch.where(x.mask, masked_row_mean(bounded, x.mask).exp()[:, None], 0.0)


@gate("geometric", flow="row", levels=("token",), importance=_geometric_mean)
def geometric_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated:
    """GMPO (arXiv:2507.20673): geometric mean over a sequence of its clipped token ratios, times A.

        (prod_t |min(r A, clip(r, e^-clip_low, e^clip_high) A)|)^(1/|y|) sgn A
            = A exp((1/|y|) sum_t clipped log r),   clipped at +clip_high if A > 0, at -clip_low if A < 0

    The route weight is added after the clip, inside the mean (RSPO, arXiv:2510.23027 v1).

    Differs: with token-level advantages, which the paper does not define, the sequence's geometric mean
    multiplies each token's own advantage.
    """
    above = (x.advantages > 0) & (x.level_log_ratio > clip_high)
    below = (x.advantages < 0) & (x.level_log_ratio < -clip_low)
    return Gated(_geometric_mean(x, clip_low=clip_low, clip_high=clip_high) * x.advantages, above | below)


@gate("none")
def plain_gate(x: GateInputs) -> Gated:
    """Plain importance sampling: r A (arXiv:2507.18071, eqs 8 and 11, where clipping is omitted)."""
    return Gated(x.log_ratio.exp() * x.advantages, x.nowhere())


def _one(x: GateInputs) -> Float[Tensor, "B T"]:
    return torch.ones_like(x.logps)


@gate("likelihood", flow="logps", importance=_one)
def likelihood_gate(x: GateInputs) -> Gated:
    """A log pi, the policy gradient without a ratio; SFT and RFT with A of 0 or 1 (arXiv:2402.03300, A.1)."""
    return Gated(x.logps * x.advantages, x.nowhere())


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
    """VESPO (arXiv:2602.10693): sg[phi(r)] A log pi, phi(r) = r^power e^(decay (1 - r)).

    The kernel of a gamma density with phi(1) = 1; power and decay are `_pos` where A >= 0, else `_neg`. Small and
    large ratios fade; nothing is clipped. The paper's r is that of whole sequences, ratio="sequence_product".
    """
    weight = _gamma_kernel(x, power_pos=power_pos, decay_pos=decay_pos, power_neg=power_neg, decay_neg=decay_neg)
    return Gated(weight * x.advantages * x.logps, x.nowhere())
