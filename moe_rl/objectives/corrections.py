"""Weights that correct for sampling by another engine: rollout policy mu against training policy pi_old.

Samples come from the rollout engine, gradients from the training engine, and the two disagree a little even
with equal parameters. Every function here takes the log-weight `log w = log pi_old - log mu` of each token
(nats, padding already zero, as `token_log_ratio(old_logps, rollout_logps, mask)` gives it) and returns a
detached weight `[B,T]` that multiplies the surrogate of a token; 0 drops the token. Dropped tokens still
count in the denominators of the loss, as in TRL: dropping never enlarges the weight of the remaining tokens.

Differs: verl removes rejected tokens from the response mask, hence from the denominators too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.bounds import NOT_NEGATIVE, check_settings
from moe_rl.objectives.divergence import binary_kl
from moe_rl.objectives.ratios import (
    as_bool_mask,
    at_least_float32,
    masked_row_mean,
    masked_row_sum,
    token_log_ratio,
)

CorrectionKind = Literal[
    "token_truncate",
    "token_mask",
    "binary_kl_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
    "off_policy_mask",
]


def token_truncate(log_weight: Float[Tensor, "B T"], cap: float | int) -> Float[Tensor, "B T"]:
    """Return the weights of truncated importance sampling (TIS), `min(w_t, C)` with w = exp(`log_weight`), C = `cap`.

    Source: Yao et al., fengyao.notion.site/off-policy-rl.
    """
    return log_weight.detach().exp().clamp(max=cap)


def token_mask(log_weight: Float[Tensor, "B T"], low: float | int, high: float | int) -> Float[Tensor, "B T"]:
    """Return the weights of masked importance sampling, `w_t 1[low <= w_t <= high]`.

    With `low=0` this is MIS; with 0.5 and 5 it is IcePop (arXiv:2510.18855).
    """
    weight = log_weight.detach().exp()
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def binary_kl_mask(
    log_weight: Float[Tensor, "B T"], logps: Float[Tensor, "B T"], high: float | int
) -> Float[Tensor, "B T"]:
    """Return the weights of KPop (arXiv:2606.15079): `w_t`, or 0 where the binary KL of a token is above `high` nats.

    The binary KL is the larger of KL(mu || pi) and KL(pi || mu) of the two outcomes "this token" and "any other". In
    terms of the ratio this bound is wide for rare tokens and narrow for likely ones.

    logps: log pi of the sampled tokens, the numerator of the weight.
    """
    log_weight, logps = log_weight.detach(), at_least_float32(logps.detach())
    apart = torch.maximum(binary_kl(logps, log_weight), binary_kl(logps - log_weight, -log_weight))
    return torch.where(apart <= high, log_weight.exp(), 0.0)


def sequence_truncate(
    log_weight: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], cap: float | int
) -> Float[Tensor, "B T"]:
    """Return sequence-level TIS weights, `min(prod_t w_t, C)`: one for all tokens of a sequence (no root is taken)."""
    weight = masked_row_sum(log_weight.detach(), as_bool_mask(mask)).exp().clamp(max=cap)
    return _on_tokens(weight, mask)


def sequence_mask(
    log_weight: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], low: float | int, high: float | int
) -> Float[Tensor, "B T"]:
    """Return sequence-level MIS weights, `W 1[low <= W <= high]` with `W = prod_t w_t`."""
    weight = masked_row_sum(log_weight.detach(), as_bool_mask(mask)).exp()
    return _on_tokens(torch.where((weight >= low) & (weight <= high), weight, 0.0), mask)


def geometric_mask(
    log_weight: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], low: float | int, high: float | int
) -> Float[Tensor, "B T"]:
    """Return the weights of geometric rejection: 1 if `low <= (prod_t w_t)^(1/|y|) <= high`, else 0.

    The geometric mean does not drift with the length of a sequence; the product does.
    """
    weight = masked_row_mean(log_weight.detach(), as_bool_mask(mask)).exp()
    return _on_tokens(((weight >= low) & (weight <= high)).to(log_weight.dtype), mask)


def off_policy_sequence_mask(
    log_weight: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    delta: float | int,
) -> Float[Tensor, "B T"]:
    """Return the weights, 1 or 0, of DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, section 3.1).

    A token is dropped iff its advantage is negative and `mean_t log(mu/pi) > delta` (nats per token) in its
    sequence: a response that the policy has already left is not pushed further away. For negative advantages this is
    `geometric_mask` with `low = exp(-delta)` and no upper bound.
    """
    too_far = -masked_row_mean(log_weight.detach(), as_bool_mask(mask)) > delta
    dropped = too_far[:, None] & (advantages < 0)
    return torch.where(as_bool_mask(mask) & ~dropped, 1.0, 0.0).to(log_weight.dtype)


@dataclass(frozen=True)
class Correction:
    """One engine correction of an `Objective`: its kind, bounds and numerator.

    Fields:
        kind: the function of this module that computes the weight.
        low, high: bounds of the weight (fractions, not nats); `high` is the cap of the truncating kinds;
            for `off_policy_mask`, `high` is delta in nats per token; for `binary_kl_mask` it is in nats.
        policy: numerator of the weight: "old" (pi_old/mu, the engine gap alone) or "current" (pi/mu, which
            adds the staleness since the rollout; detached).
        optional: False: a loss without `rollout_logps` is an error; True: without them one engine is taken to have
            sampled and scored, so that the weight is exactly 1.

    Raises:
        ValueError: an unknown kind or policy; a negative `low`, or one above `high`, or any but 0 for a kind that has
            `high` alone.
    """

    kind: CorrectionKind
    low: Annotated[float | int, NOT_NEGATIVE] = 0.0
    high: float | int = float("inf")
    policy: Literal["old", "current"] = "old"
    optional: bool = False

    def __post_init__(self) -> None:
        check_settings(self, f"Correction({self.kind}).")
        if not self.low <= self.high:
            raise ValueError(f"Correction({self.kind}): low {self.low} is above high {self.high}.")
        if self.kind.endswith("truncate") and self.low != 0.0:
            raise ValueError(f"Correction({self.kind}): truncation has a cap only, got low={self.low}.")
        if self.kind in ("off_policy_mask", "binary_kl_mask") and self.low != 0.0:
            raise ValueError(f"Correction({self.kind}): it has one threshold, which is high; got low={self.low}.")

    @staticmethod
    def parse(text: str) -> "Correction":
        """Read a correction from `KIND:HIGH` or `KIND:LOW:HIGH`, each with or without `:current` and `:optional`.

        Raises:
            ValueError: a kind that does not exist, bounds that are no numbers.

        >>> Correction.parse("token_mask:0.5:5"), Correction.parse("off_policy_mask:0.1:current").policy
        (Correction(kind='token_mask', low=0.5, high=5.0, policy='old', optional=False), 'current')
        """
        kind, *rest = text.split(":")
        words = {word for word in rest if word in ("old", "current", "optional")}
        try:
            *low, high = [float(number) for number in rest if number not in words]
            (lowest,) = low or [0.0]
        except ValueError:
            raise ValueError(
                f"{text!r}: expected KIND:HIGH or KIND:LOW:HIGH, e.g. token_mask:0.5:5, each with or without :current "
                "and :optional"
            ) from None
        policy: Literal["old", "current"] = "current" if "current" in words else "old"
        return Correction(kind, lowest, high, policy, "optional" in words)  # type: ignore[arg-type]  # it checks

    def __str__(self) -> str:
        """Return the text that `parse` reads back."""
        words = [*(["current"] if self.policy == "current" else []), *(["optional"] if self.optional else [])]
        return ":".join([self.kind, *([_exact(self.low)] if self.low else []), _exact(self.high), *words])

    def weight(
        self,
        log_weight: Float[Tensor, "B T"],
        logps: Float[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """Return the detached weight `[B,T]` of each token.

        `log_weight` is log pi - log mu and `logps` is log pi, in nats, where pi is the policy named by `policy`."""
        match self.kind:
            case "token_truncate":
                return token_truncate(log_weight, self.high)
            case "token_mask":
                return token_mask(log_weight, self.low, self.high)
            case "binary_kl_mask":
                return binary_kl_mask(log_weight, logps, self.high)
            case "sequence_truncate":
                return sequence_truncate(log_weight, mask, self.high)
            case "sequence_mask":
                return sequence_mask(log_weight, mask, self.low, self.high)
            case "geometric_mask":
                return geometric_mask(log_weight, mask, self.low, self.high)
            case "off_policy_mask":
                return off_policy_sequence_mask(log_weight, advantages, mask, self.high)


def engine_weights(
    corrections: Sequence[Correction],
    logps: Float[Tensor, "B T"],
    old_logps: Float[Tensor, "B T"],
    rollout_logps: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    keep: Bool[Tensor, "B T"],
) -> dict[str, Tensor | None]:
    """Return the fields of `TokenValues` about the sampling engine and the corrections for it, by name.

    They are `engine_log_weight` and, if there are corrections, the product of the corrections' weights and the tokens
    at which a truncating correction reaches its cap."""
    gap = token_log_ratio(old_logps.detach(), rollout_logps, keep)
    if not corrections:
        return {"engine_log_weight": gap}
    current = token_log_ratio(logps.detach(), rollout_logps, keep)
    weight, truncated = torch.ones_like(gap), torch.zeros_like(keep)
    for one in corrections:
        now = one.policy == "current"
        own = one.weight(current if now else gap, logps if now else old_logps, advantage, keep)
        weight = weight * own
        if one.kind.endswith("truncate"):
            truncated = truncated | (own >= one.high)
    return {"engine_log_weight": gap, "correction_weight": weight, "correction_truncated": truncated}


def _exact(number: float | int) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _on_tokens(per_sequence: Float[Tensor, " B"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return each sequence's value on all of its tokens, `[B,T]`; 0 in padding."""
    return torch.where(as_bool_mask(mask), per_sequence[:, None], 0.0)
