"""Gates: functions that turn the ratio and the advantage of a token into its surrogate, which training maximises.

A gate is one registered function:

    @gate("clip")
    def clip_gate(x: GateInputs, *, clip_low: float | int, clip_high: float | int) -> Gated: ...

The keyword-only arguments of a gate are the fields of `Objective` that it reads. It returns `Gated`: the surrogate
`[B,T]` with its gradient, and `clipped [B,T]`, the tokens that the gate takes out of the gradient (they depend on the
sign of the advantage; a zero advantage is never clipped). Bounds are strict: a ratio exactly on a bound is not clipped.

The log-ratio of a clipped token is replaced before the `exp` that carries the gradient, so that a ratio that overflows
gives neither a value nor a NaN gradient (0 * inf) if the clip removes the token anyway.

Importance: the gate's slope in the token's log-ratio or log-probability, divided by the advantage, before clipped
tokens are set to 0. By default the importance is the ratio; a gate with another slope registers a function of its own,
which `moe_rl.objectives.gradient.token_weights` then uses.

This module has the clip of PPO, GRPO and GSPO. The other gates are in `other_gates` and `divergence`.
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
    """The result of a gate, each `[B,T]`.

    Fields:
        surrogate: of each token, with gradient.
        clipped: the tokens that the gate takes out of the gradient.
        compared: the log-ratio reported as the gate's; its sign tells upper clips from lower ones. None: the level's.
    """

    surrogate: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]
    compared: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class GateInputs:
    """The inputs of a gate: all `[B,T]`, nats, 0 in padding.

    Fields:
        level_log_ratio: the log-ratio at the objective's level, including RSPO's weight if that enters before the clip;
            with gradient.
        token_log_ratio: log pi - log pi_anchor of each token itself; with gradient.
        logps: log-probabilities under the current policy; with gradient.
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
        """`level_log_ratio`, but 0 on tokens with advantage 0.

        Such tokens have neither a value nor a gradient, however large their ratio is (0 * inf would be NaN)."""
        return torch.where(self.advantages == 0, 0.0, self.level_log_ratio)

    def nowhere(self) -> Bool[Tensor, "B T"]:
        """Return the `clipped` of a gate that takes no token out of the gradient: False everywhere, `[B,T]`."""
        return torch.zeros_like(self.advantages, dtype=torch.bool)


@dataclass(frozen=True)
class TokenValues:
    """The quantities that a loss computed for every token, `[B,T]`, detached.

    In padding they are 0 (False), but for the weights of corrections and routes, which are not defined there. A field
    is None if the loss has no such quantity.

    Fields:
        log_ratio: log pi - log pi_anchor, nats.
        clipped: tokens that the clip takes out of the gradient.
        mask: True on completion tokens.
        advantages: those that the loss used.
        gate_log_ratio: the log-ratio by which the gate clips, nats.
        ref_kl: the objective's estimate of KL(pi || pi_ref), nats; with a reference only.
        engine_log_weight: log pi_old - log mu, nats; with rollout log-probabilities only.
        correction_weight: product of the engine corrections' weights; only if corrections apply.
        correction_truncated: whether a truncating correction reaches its cap.
        route_weight: RSPO's router-shift weight before its floor.
        route_floored: whether the router-shift weight is below its floor.
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
        """Return name and tensor of each field that is not None."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in named if value is not None]


Flow = Literal["ratio", "logps", "row"]


@dataclass(frozen=True)
class Gate:
    """A registered gate: its function and how its gradient flows.

    Fields:
        surrogate: (inputs, **knobs) -> Gated.
        importance: (inputs, **knobs) -> `[B,T]`; see the module's docstring.
        knobs: the fields of `Objective` that the gate reads.
        flow: what the gradient flows through: "ratio", the ratio at the objective's level; "logps", each token's own
            log-probability, with a detached weight; "row", a mean over the sequence that the gate itself takes.
        levels: the ratio levels at which the gate is defined; empty: all.
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
    """Return a decorator that registers a function as the gate `name`; the other arguments are fields of `Gate`.

    Raises:
        ValueError: the name is another function's; an unknown `flow`.
    """
    if flow not in get_args(Flow):
        raise ValueError(f"gate {name!r}, flow: expected one of {', '.join(get_args(Flow))}; got {flow!r}")

    def register(function: Callable[..., Gated]) -> Callable[..., Gated]:
        known = GATES.get(name)
        if known and _place(known.surrogate) != _place(function):  # a rerun cell or reloaded module registers again
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
    """Return `torch.where` of two numbers in `dtype`, where torch itself would round them to float32 first.

    `torch.full` makes the number on the device; `torch.tensor` would copy it there, and wait."""
    return torch.where(condition, torch.full((), yes, dtype=dtype, device=condition.device), no)


def outside_trust_region(
    x: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], low: float | int, high: float | int
) -> Bool[Tensor, "B T"]:
    """Return where min(x A, clip(x, low, high) A) is flat in x: (A > 0 and x > high) or (A < 0 and x < low)."""
    return ((advantages > 0) & (x > high)) | ((advantages < 0) & (x < low))


@gate("clip")
def clip_gate(
    x: GateInputs, *, clip_low: float | int, clip_high: float | int, dual_clip: float | int | None = None
) -> Gated:
    """Return the surrogate of PPO's pessimistic clip, min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

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
