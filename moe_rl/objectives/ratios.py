"""Log-ratios between the current policy and the one that the samples are anchored to; and gates: what a method makes of
ratio and advantage, the surrogate of a token, to be maximised.

`mask` is True (or 1) on completion tokens. Values under a False mask may be anything, NaN and inf included:
they reach neither a value nor a gradient, because they are replaced before any arithmetic.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.bounds import unknown

RatioLevel = Literal["token", "sequence", "sequence_token", "sequence_product"]


def as_bool_mask(mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """A bool mask from a bool, integer or float 0/1 one.

    Raises:
        ValueError: an entry is neither 0 nor 1 (weights are not masks: put them into the advantages).
    """
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "mask: expected only 0 and 1 (or bool), got other values. A mask says which tokens count; "
            "token weights belong into token-level advantages."
        )
    return mask != 0


def masked_row_sum(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum over the unmasked tokens of each row; 0 for a fully masked row."""
    return torch.where(mask, values, 0.0).sum(-1)


def masked_row_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Mean over the unmasked tokens of each row; 0 for a fully masked row."""
    return masked_row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def token_log_ratio(
    logps: Float[Tensor, "B T"], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Log importance ratio of each token, nats (GSPO, arXiv:2507.18071, eq. 3, in logs).

        log w[i,t] = log pi(y[i,t] | x, y[i,<t]) - log pi_old(y[i,t] | x, y[i,<t])

    Args:
        logps: log-probabilities under the current policy, nats; the gradient flows through these only.
        old_logps: the same tokens under the anchor policy, nats; detached here.
        mask: True or 1 on completion tokens.

    Returns:
        `[B,T]`, with gradient; exactly 0 where the mask is False. Half precision is computed in float32.

    >>> old = torch.tensor([[-1.5, float("nan")]])
    >>> token_log_ratio(torch.tensor([[-1.0, -2.0]]), old, torch.tensor([[1, 0]]))
    tensor([[0.5000, 0.0000]])
    """
    keep = as_bool_mask(mask)
    new = torch.where(keep, at_least_float32(logps), 0.0)
    old = torch.where(keep, at_least_float32(old_logps.detach()), 0.0)
    return new - old


def sequence_log_ratio(
    logps: Float[Tensor, "B T"], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Length-normalised log ratio of each sequence, nats per token (arXiv:2507.18071, eq. 7, in logs).

        log s[i] = (1/|y[i]|) sum_t log w[i,t]

    Args and masking as in `token_log_ratio`.

    Returns:
        `[B]`, with gradient; 0 for a fully masked row.

    >>> sequence_log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.1]]), torch.tensor([[1, 1]]))
    tensor([0.3000])
    """
    return masked_row_mean(token_log_ratio(logps, old_logps, mask), as_bool_mask(mask))


def log_ratio_at_level(
    log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], level: RatioLevel
) -> Float[Tensor, "B T"]:
    """The log-ratio that multiplies each token's advantage, nats.

    - "token": log w[i,t] itself (arXiv:2507.18071, eq. 3)
    - "sequence": log s[i] on every token of the sequence (eq. 7)
    - "sequence_token": sg[log s[i]] + log pi - sg[log pi] (eq. 14): the value of s[i], but each token's
      gradient goes to its own log-probability, so that advantages can differ between tokens
    - "sequence_product": log of the product of w[i,t] over the sequence, on each of its tokens: the ratio of
      the sequences themselves, without the root (VESPO, arXiv:2602.10693)

    `log_ratio` is the output of `token_log_ratio`; the result is 0 in padding and keeps the gradient.
    """
    if level == "token":
        return log_ratio
    reduce = masked_row_sum if level == "sequence_product" else masked_row_mean
    per_sequence = torch.where(mask, reduce(log_ratio, mask)[:, None], 0.0)
    if level in ("sequence", "sequence_product"):
        return per_sequence
    if level == "sequence_token":
        return per_sequence.detach() + (log_ratio - log_ratio.detach())
    raise ValueError(unknown("ratio", level, get_args(RatioLevel)))


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision tensors in float32: a log-ratio is a small difference of large numbers."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


# -- gates -------------------------------------------------------------------------------------------------------------


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
