"""`Objective`: everything in which one policy-gradient method differs from another, as plain knobs."""

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

from moe_rl.objectives.advantages import Scale
from moe_rl.objectives.aggregation import Aggregate
from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.kl import KLEstimator
from moe_rl.objectives.ratios import RatioLevel

Gate = Literal["clip", "mask", "cap", "sigmoid", "geometric", "none", "likelihood"]
Anchor = Literal["old", "rollout"]
RouteWeight = Literal["none", "before_clip", "after_clip"]
Advantage = Literal["group", "leave_one_out", "gae", "one", "accepted"]


@dataclass(frozen=True)
class Objective:
    """One method: loss = -Agg[ c * G(r; A) ] + kl_coef * Agg[ KL ].

    r is the ratio, G the gate, A the advantage, c the engine correction, Agg the aggregation.

    Fields:
        ratio: level of r: each token's, the sequence's geometric mean, or that value with token gradients.
        gate: what G makes of ratio and advantage (see `moe_rl.objectives.gates`):
            "clip"       min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
            "mask"       sg[M r] A log pi, M = 0 on the tokens that "clip" would take out of the gradient
            "cap"        sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: no token is taken out
            "sigmoid"    (4/tau) sigma(tau (r - 1)) A, tau by the sign of A
            "geometric"  geometric mean over a sequence of token ratios clipped to [e^-clip_low, e^clip_high]
            "none"       r A
            "likelihood" A log pi, no ratio at all (SFT, RFT)
        clip_low, clip_high: distances of the clip bounds from ratio 1 (fractions; nats for "geometric").
        dual_clip: ceiling of the ratio where A < 0 (arXiv:1912.09729), "clip" gate only; None is no ceiling.
        temperature_pos, temperature_neg: tau of the "sigmoid" gate for A > 0 and for A <= 0.
        anchor: denominator of the ratio: the training engine's old policy or the rollout engine's.
        corrections: engine corrections; their weights multiply.
        route_weight: where the router-shift weight of RSPO enters, "before_clip" or "after_clip".
        route_floor: that weight is never below this (gamma_min of RSPO; fraction).
        aggregate: how token values become one number (see `aggregation_weights`).
        length_constant: divisor of aggregate="constant", in tokens; e.g. the generation budget.
        local_normalizer: a token mean over the local micro-batch, even if global totals are given (BNPO).
        advantage: how advantages are to be made, for the caller (`policy_loss` takes them as given):
            "group" `group_advantages`, "leave_one_out" `leave_one_out_advantages`, "gae" a value model and
            `generalized_advantages`, "one" 1 everywhere (SFT), "accepted" 1 for a correct response (RFT).
        advantage_scale: the `scale` of `group_advantages`: "std", "none" or "batch".
        kl_coef: beta; 0 needs no reference policy.
        kl_estimator: "k1", "k2" or "k3" (see `moe_rl.objectives.kl`).
        kl_importance_weighted: multiply the KL of a token by its ratio, which makes the estimate unbiased
            off-policy (arXiv:2512.02556, section 3.1; TRL's `use_bias_correction_kl`).

    Raises:
        ValueError: a value that no method knows, or a combination that means nothing.

    >>> Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4).gate
    'clip'
    """

    ratio: RatioLevel = "token"
    gate: Gate = "clip"
    clip_low: float | int = 0.2
    clip_high: float | int = 0.2
    dual_clip: float | int | None = None
    temperature_pos: float | int = 1.0
    temperature_neg: float | int = 1.05
    anchor: Anchor = "old"
    corrections: tuple[Correction, ...] = ()
    route_weight: RouteWeight = "none"
    route_floor: float | int = 0.0
    aggregate: Aggregate = "sequence_mean"
    length_constant: float | int = 1.0
    local_normalizer: bool = False
    advantage: Advantage = "group"
    advantage_scale: Scale = "std"
    kl_coef: float | int = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_importance_weighted: bool = False

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            refuse_unknown(field, getattr(self, field), allowed)
        for field in ("clip_low", "clip_high", "kl_coef", "route_floor"):
            if not getattr(self, field) >= 0.0:
                raise ValueError(f"Objective.{field}: expected a number >= 0, got {getattr(self, field)!r}.")
        for field in ("temperature_pos", "temperature_neg", "length_constant"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"Objective.{field}: expected a number > 0, got {getattr(self, field)!r}.")
        if self.gate == "geometric" and self.ratio != "token":
            raise ValueError(
                f"Objective: gate='geometric' takes the geometric mean of token ratios itself; "
                f"expected ratio='token', got {self.ratio!r}."
            )
        if self.dual_clip is not None and (self.gate != "clip" or self.dual_clip <= 1.0 + self.clip_high):
            raise ValueError(
                f"Objective.dual_clip: a ceiling above 1 + clip_high = {1 + self.clip_high} for gate='clip'; "
                f"got {self.dual_clip} with gate={self.gate!r}."
            )
        if self.local_normalizer and self.aggregate != "token_mean":
            raise ValueError(f"Objective.local_normalizer belongs to aggregate='token_mean', got {self.aggregate!r}.")

    @property
    def needs(self) -> frozenset[str]:
        """Names of the optional arguments of `policy_loss` that this objective cannot do without.

        >>> sorted(Objective(kl_coef=0.04, anchor="rollout").needs)
        ['ref_logps', 'rollout_logps']
        """
        needed = set()
        if self.kl_coef != 0.0:
            needed.add("ref_logps")
        if self.anchor == "rollout" or any(not correction.optional for correction in self.corrections):
            needed.add("rollout_logps")
        if self.route_weight != "none":
            needed.add("route_weight")
        return frozenset(needed)


_CHOICES: dict[str, tuple[str, ...]] = {
    "ratio": get_args(RatioLevel),
    "gate": get_args(Gate),
    "anchor": get_args(Anchor),
    "route_weight": get_args(RouteWeight),
    "aggregate": get_args(Aggregate),
    "advantage": get_args(Advantage),
    "advantage_scale": get_args(Scale),
    "kl_estimator": get_args(KLEstimator),
}


def refuse_unknown(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError that names the field and the nearest choice."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Objective.{field}: expected one of {', '.join(allowed)}; got {value!r}.{hint}")
