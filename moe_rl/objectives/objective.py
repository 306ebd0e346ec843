"""`Objective`: a policy-gradient method as a dataclass of settings, one for each difference between methods."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from moe_rl.objectives import divergence, other_gates  # noqa: F401  (importing them registers their gates)
from moe_rl.objectives.advantages import Scale
from moe_rl.objectives.bounds import DECAY, FRACTION, NOT_NEGATIVE, POSITIVE, check_settings, unknown
from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.gates import GATES
from moe_rl.objectives.kl import KLEstimator
from moe_rl.objectives.ratios import Aggregate, RatioLevel

Number = float | int
Anchor = Literal["old", "rollout"]
RouteWeight = Literal["none", "before_clip", "after_clip"]
Advantage = Literal["group", "leave_one_out", "gae", "one", "accepted", "process", "decoupled"]


@dataclass(frozen=True)
class Objective:
    """One method: loss = -Agg[ c * G(r; A) ] + kl_coef * Agg[ KL ].

    r is the ratio, G the gate, A the advantage, c the engine correction, Agg the aggregation.

    Fields:
        ratio: level of r: each token's, the sequence's geometric mean, that value with token gradients, or the
            product over the sequence (see `log_ratio_at_level`).
        gate: what G makes of ratio and advantage, a name in `moe_rl.objectives.gates.GATES`:
            "clip"          min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
            "soft_dual_clip" "clip", but min(r, dual_clip) A where A < 0: r A grad log pi up to that ceiling, and
                            dual_clip A grad log pi above it
            "mask"          sg[M r] A log pi, M = 0 on the tokens that "clip" would take out of the gradient
            "cap"           sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: no token is taken out
            "sequence_clip" r A, but 0 gradient where "clip" would clip at the geometric mean of the sequence's r
            "sigmoid"       (4/tau) sigma(tau (r - 1)) A, tau by the sign of A
            "geometric"     geometric mean over a sequence of token ratios clipped to [e^-clip_low, e^clip_high]
            "gamma"         sg[r^power e^(decay (1 - r))] A log pi, power and decay by the sign of A
            "divergence_tv" sg[M r] A log pi, M = 0 where the token's probability went up by more than
                            clip_high (A > 0) or down by more than clip_low (A < 0)
            "divergence_kl" the same by the binary KL divergence of the token against all others
            "quadratic"     r A - |A| q (r - 1)^2 / (2 delta), q the anchor's probability, delta clip_low or clip_high
            "none"          r A
            "likelihood"    A log pi, no ratio at all (SFT, RFT)
        clip_low, clip_high: how far the ratio may be from 1 (fractions; nats for "geometric"); for the gates
            of a divergence how far the probability may be (fractions), or the divergence (nats). clip_low=1 of a
            fraction is no lower clip.
        dual_clip: ceiling of the ratio where A < 0 (arXiv:1912.09729), gates "clip" and "soft_dual_clip" only; None is
            no ceiling.
        ratio_cap: ceiling of the detached ratio of the gates "divergence_*"; None is no ceiling.
        temperature_pos, temperature_neg: tau of the "sigmoid" gate for A > 0 and for A <= 0.
        power_pos, decay_pos, power_neg, decay_neg: exponents of the "gamma" gate for A >= 0 and for A < 0.
        anchor: denominator of the ratio: the training engine's old policy or the rollout engine's.
        corrections: engine corrections; their weights multiply.
        route_weight: where the router-shift weight of RSPO enters, "before_clip" or "after_clip".
        route_floor: that weight is never below this (gamma_min of RSPO; fraction).
        aggregate: how token values become one number (see `aggregation_weights`).
        length_constant: divisor of aggregate="constant", in tokens; e.g. the generation budget.
        local_normalizer: a token mean over the local micro-batch, even if global totals are given (BNPO).
        advantage: how advantages are to be made, for the caller (`policy_loss` takes them as given):
            "group" `group_advantages`, "leave_one_out" `leave_one_out_advantages`, "gae" a value model and
            `generalized_advantages`, "one" 1 everywhere (SFT), "accepted" 1 for a correct response (RFT),
            "process" `process_advantages` of step rewards, "decoupled" `decoupled_advantages` of several rewards.
        advantage_scale: the `scale` of `group_advantages`: "std", "none" or "batch".
        kl_coef: beta; 0 needs no reference policy.
        kl_estimator: "k1", "k2" or "k3" (see `moe_rl.objectives.kl`).
        kl_importance_weighted: multiply the KL of a token by the ratio that the gate sees. With token ratios that makes
            the estimate unbiased off-policy (arXiv:2512.02556, section 3.1); with those of a sequence it is what TRL's
            `use_bias_correction_kl` does, and not unbiased.

    Raises:
        ValueError: a value that no method knows, or a combination that means nothing.

    >>> Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4).gate
    'clip'
    """

    ratio: RatioLevel = "token"
    gate: str = "clip"
    clip_low: Annotated[Number, NOT_NEGATIVE] = 0.2
    clip_high: Annotated[Number, NOT_NEGATIVE] = 0.2
    dual_clip: Annotated[Number, POSITIVE] | None = None
    ratio_cap: Annotated[Number, POSITIVE] | None = None
    temperature_pos: Annotated[Number, POSITIVE] = 1.0
    temperature_neg: Annotated[Number, POSITIVE] = 1.05
    power_pos: Annotated[Number, NOT_NEGATIVE] = 2.0
    decay_pos: Annotated[Number, DECAY] = 3.0
    power_neg: Annotated[Number, NOT_NEGATIVE] = 3.0
    decay_neg: Annotated[Number, DECAY] = 2.0
    anchor: Anchor = "old"
    corrections: tuple[Correction, ...] = ()
    route_weight: RouteWeight = "none"
    route_floor: Annotated[Number, FRACTION] = 0.0
    aggregate: Aggregate = "sequence_mean"
    length_constant: Annotated[Number, POSITIVE] = 1.0
    local_normalizer: bool = False
    advantage: Advantage = "group"
    advantage_scale: Scale = "std"
    kl_coef: Annotated[Number, NOT_NEGATIVE] = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_importance_weighted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.corrections, tuple) or not all(isinstance(x, Correction) for x in self.corrections):
            raise ValueError(f"Objective.corrections: expected a tuple of Correction, got {self.corrections!r}.")
        check_settings(self, "Objective.")
        if self.gate not in GATES:
            raise ValueError(unknown("Objective.gate", self.gate, GATES))
        if strange := [knob for knob in GATES[self.gate].knobs if not hasattr(self, knob)]:
            raise ValueError(
                f"Objective.gate: the keyword-only arguments of a gate are fields of Objective, which has no "
                f"{', '.join(strange)}; gate={self.gate!r} asks for it."
            )
        levels = GATES[self.gate].levels
        if levels and self.ratio not in levels:
            raise ValueError(
                f"Objective.ratio: gate={self.gate!r} is defined for {' or '.join(map(repr, levels))} ratios, "
                f"got {self.ratio!r}."
            )
        if self.dual_clip is not None and "dual_clip" not in GATES[self.gate].knobs:
            raise ValueError(
                "Objective.dual_clip belongs to gate='clip' and gate='soft_dual_clip'; "
                f"gate={self.gate!r} has no such ceiling."
            )
        if self.dual_clip is None and self.gate == "soft_dual_clip":
            raise ValueError("Objective.dual_clip: gate='soft_dual_clip' needs a ceiling, e.g. 3; got None.")
        if self.dual_clip is not None and self.dual_clip <= 1.0 + self.clip_high:
            raise ValueError(
                f"Objective.dual_clip: expected above 1 + clip_high = {1 + self.clip_high:g}, got {self.dual_clip}."
            )
        if self.gate in OF_RATIOS and self.clip_low > 1:
            raise ValueError(
                f"Objective.clip_low: gate={self.gate!r} bounds ratios from below by 1 - clip_low, and none is below "
                f"0: at most 1, which is no lower clip; got {self.clip_low}."
            )
        if self.gate == "quadratic" and not (self.clip_low and self.clip_high):
            raise ValueError(
                "Objective.clip_low, clip_high: gate='quadratic' divides by them, so above 0; got "
                f"{self.clip_low} and {self.clip_high}."
            )
        if self.local_normalizer and self.aggregate != "token_mean":
            raise ValueError(f"Objective.local_normalizer belongs to aggregate='token_mean', got {self.aggregate!r}.")

    @cached_property
    def needs(self) -> frozenset[str]:
        """The names of the optional arguments of `policy_loss` that this objective needs.

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


OF_RATIOS = ("clip", "soft_dual_clip", "mask", "cap", "sequence_clip")
"""Gates with a lower bound on a ratio; the bounds of other gates are nats, probabilities, divergences or a width."""
