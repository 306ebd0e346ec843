"""What a method makes of a ratio and an advantage: the surrogate of a token, to be maximised.

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

Here: the clip of PPO, GRPO and GSPO. The other gates: `other_gates`, `divergence`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Gated(NamedTuple):
    """Surrogate per token (with gradient), tokens out of the gradient, log-ratio that says so (None: the level's)."""

    surrogate: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    compared: Float[Tensor, "B T"] | None = None


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


@dataclass(frozen=True)
class TokenValues:
    """What every token was to a loss, its gate included: all `[B,T]`, detached, 0 (False) in padding, but for the
    weights of corrections and routes, which mean nothing there; None where the loss has no such thing.

    Fields:
        log_ratio: log pi - log pi_anchor, nats.
        clipped: tokens that the clip takes out of the gradient.
        mask: True on completion tokens.
        advantages: as the loss used them.
        gate_log_ratio: the log-ratio by which the gate clips, nats.
        ref_kl: the objective's estimate of KL(pi || pi_ref), nats; with a reference only.
        engine_log_weight: log pi_old - log mu, nats; with rollout log-probabilities only.
        correction_weight: product of the engine corrections' weights; with corrections in force only.
        correction_truncated: whether a truncating correction stands at its cap.
        route_weight: RSPO's router-shift weight before its floor.
        route_floored: whether the floor acts.
    """

    log_ratio: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    gate_log_ratio: Float[Tensor, "B T"]
    ref_kl: Float[Tensor, "B T"] | None = None
    engine_log_weight: Float[Tensor, "B T"] | None = None
    correction_weight: Float[Tensor, "B T"] | None = None
    correction_truncated: Bool[Tensor, "B T"] | None = None
    route_weight: Float[Tensor, "B T"] | None = None
    route_floored: Bool[Tensor, "B T"] | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of what is there."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in named if value is not None]


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
        ValueError: the name is another function's; no such `flow`.
    """
    if flow not in get_args(Flow):
        raise ValueError(f"gate {name!r}, flow: expected one of {', '.join(get_args(Flow))}; got {flow!r}")

    def register(function: Callable[..., Gated]) -> Callable[..., Gated]:
        known = GATES.get(name)
        if known and _place(known.surrogate) != _place(function):  # the same again: a cell or a module that is rerun
            raise ValueError(f"gate: {name!r} is registered already.")
        parameters = inspect.signature(function).parameters.values()
        knobs = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        GATES[name] = Gate(function, importance or _ratio, knobs, flow, levels)
        return function

    return register


def _place(function: Callable[..., Gated]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _ratio(x: GateInputs, **_: object) -> Float[Tensor, "B T"]:
    return x.level_log_ratio.exp()


def choose(
    condition: Bool[Tensor, "B T"], yes: float | int, no: float | int, dtype: torch.dtype
) -> Float[Tensor, "B T"]:
    """`torch.where` of two numbers in `dtype`; torch's own would round them to float32 first. Made on the device:
    `torch.tensor` would copy the number there, and wait."""
    return torch.where(condition, torch.full((), yes, dtype=dtype, device=condition.device), no)


def outside_trust_region(
    x: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], low: float | int, high: float | int
) -> Bool[Tensor, "B T"]:
    """(A > 0 and x > high) or (A < 0 and x < low): where min(x A, clip(x, low, high) A) is flat in x, a ratio say."""
    return ((advantages > 0) & (x > high)) | ((advantages < 0) & (x < low))


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
    unclipped = torch.where(clipped, 0.0, x.log_ratio).exp()
    return Gated(torch.where(clipped, bound, unclipped) * x.advantages, clipped)
