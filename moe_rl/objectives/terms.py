"""What the loss and the gradient analysis both start from: checked inputs, ratios, correction weights; and what every
token was to the loss."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.corrections import correct
from moe_rl.objectives.gates import GATES, Gated, GateInputs
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.presets import get_objective
from moe_rl.objectives.ratios import (
    as_bool_mask,
    at_least_float32,
    check_shapes,
    log_ratio_at_level,
    token_log_ratio,
)


@dataclass(frozen=True)
class TokenValues:
    """All `[B,T]`, detached, 0 (False) in padding; None where the loss has no such thing.

    Fields:
        log_ratio: log pi - log pi_anchor, nats.
        clipped: tokens that the clip takes out of the gradient.
        mask: True on completion tokens.
        advantages: as the loss used them.
        gate_log_ratio: the log-ratio that the gate saw, nats.
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


@dataclass(frozen=True)
class Terms:
    """The resolved objective, what its gate sees, and what each token is to the loss, as far as that does not depend on
    the gate: nothing is clipped yet."""

    objective: Objective
    inputs: GateInputs
    tokens: TokenValues

    def knobs(self) -> dict[str, float | int | None]:
        """The values of the fields that the objective's gate reads."""
        return {name: getattr(self.objective, name) for name in GATES[self.objective.gate].knobs}

    def gated(self) -> Gated:
        """The surrogate of each token under the objective's gate, before any correction weight. ValueError for a gate
        that returns anything else: a mean over the sequence, say, which would count as each token's."""
        found = GATES[self.objective.gate].surrogate(self.inputs, **self.knobs())
        shape = self.inputs.mask.shape
        if not (isinstance(found, Gated) and found.surrogate.shape == found.clipped.shape == shape):
            got = [list(each.shape) for each in found] if isinstance(found, Gated) else type(found).__name__
            raise ValueError(
                f"gate {self.objective.gate!r}: not Gated(surrogate, clipped), each [B,T] = {list(shape)}, got {got}"
            )
        if found.clipped.dtype != torch.bool:
            raise ValueError(f"gate {self.objective.gate!r}: clipped must be bool, got {found.clipped.dtype}")
        return found

    def after_gate(self) -> Float[Tensor, "B T"] | None:
        """The product of the weights that multiply a token's surrogate; None if there are none.

        A gate that takes a mean over the sequence has `log_route_weight` in it, so there it is not among them.
        """
        weight, log_gamma = self.tokens.correction_weight, self.inputs.log_route_weight
        if log_gamma is None or GATES[self.objective.gate].flow == "row":
            return weight
        return log_gamma.exp() if weight is None else weight * log_gamma.exp()


def prepare_terms(
    objective: Objective | str,
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logps: Tensor | None,
    rollout_logps: Tensor | None,
    route_weight: Tensor | None,
) -> Terms:
    """Check the arguments of `policy_loss`, compute what does not depend on the gate; raises as it says."""
    o = get_objective(objective) if isinstance(objective, str) else objective
    if not isinstance(o, Objective):
        raise ValueError(f"objective: expected a name of OBJECTIVES or an Objective, got {type(o).__name__}.")
    optional = {"ref_logps": ref_logps, "rollout_logps": rollout_logps, "route_weight": route_weight}
    _check_shapes(logps, advantages, {"old_logps": old_logps, "mask": mask, **optional})
    for name in sorted(o.needs):
        if optional[name] is None:
            raise ValueError(f"{name} is missing: {_WHY_NEEDED[name]}")
    if route_weight is not None and o.route_weight == "none":
        raise ValueError(
            "route_weight was given, but this objective would ignore it; "
            "use dataclasses.replace(objective, route_weight='before_clip') (or 'after_clip')."
        )
    keep = as_bool_mask(mask)
    per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(advantages.shape[0], keep.shape[1])
    unused = o.anchor == "rollout" and not o.corrections
    seen = {"logps": logps, "old_logps": None if unused else old_logps, "advantages": per_token, **optional}
    _refuse_not_finite(seen, keep)
    advantage = torch.where(keep, at_least_float32(per_token.detach()), 0.0)

    anchor = rollout_logps if o.anchor == "rollout" and rollout_logps is not None else old_logps
    log_ratio = token_log_ratio(logps, anchor, keep)
    entering, after_clip, weights = log_ratio, None, dict[str, Tensor | None]()
    if route_weight is not None:
        log_gamma, shift = _router_shift(o, route_weight, keep)
        weights |= shift
        if o.route_weight == "before_clip":
            entering = log_ratio + log_gamma
        else:
            after_clip = log_gamma
    if rollout_logps is not None:  # without them only optional corrections are left: one engine, weight 1
        weights |= _engine_weights(o, logps, old_logps, rollout_logps, advantage, keep)
    inputs = GateInputs(
        level_log_ratio=log_ratio_at_level(entering, keep, o.ratio),
        token_log_ratio=log_ratio,
        logps=torch.where(keep, at_least_float32(logps), 0.0),
        advantages=advantage,
        mask=keep,
        log_route_weight=after_clip,
    )
    tokens = TokenValues(
        log_ratio=log_ratio.detach(),
        clipped=torch.zeros_like(keep),
        mask=keep,
        advantages=advantage,
        gate_log_ratio=inputs.level_log_ratio.detach(),
        **weights,
    )
    return Terms(o, inputs, tokens)


def _router_shift(
    o: Objective, route_weight: Float[Tensor, "B T"], keep: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """RSPO: the logarithm of gamma above its floor, and what `TokenValues` says of it."""
    if bool((keep & ((route_weight < 0) | (route_weight > 1))).any()):
        raise ValueError("route_weight: expected gamma of at least 0 and of at most 1 on tokens that count.")
    gamma = torch.where(keep, at_least_float32(route_weight.detach()), 1.0)
    return gamma.clamp(min=o.route_floor).log(), {"route_weight": gamma, "route_floored": gamma < o.route_floor}


def _engine_weights(
    o: Objective,
    logps: Float[Tensor, "B T"],
    old_logps: Float[Tensor, "B T"],
    rollout_logps: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    keep: Bool[Tensor, "B T"],
) -> dict[str, Tensor | None]:
    """What `TokenValues` says of the engine that sampled, and of the objective's corrections for it."""
    gap = token_log_ratio(old_logps.detach(), rollout_logps, keep)
    if not o.corrections:
        return {"engine_log_weight": gap}
    current = token_log_ratio(logps.detach(), rollout_logps, keep)
    weight, truncated = correct(o.corrections, gap, current, advantage, keep)
    return {"engine_log_weight": gap, "correction_weight": weight, "correction_truncated": truncated}


def _refuse_not_finite(inputs: dict[str, Tensor | None], mask: Bool[Tensor, "B T"]) -> None:
    """Raise for NaN or infinity on a token that counts; one look at the device for all inputs."""
    wrong = {name: mask & ~torch.isfinite(x.detach()) for name, x in inputs.items() if x is not None}
    counts = torch.stack([where.sum() for where in wrong.values()]).tolist()
    for (name, where), count in zip(wrong.items(), counts, strict=True):
        if count:
            row, token = where.nonzero()[0].tolist()
            value = inputs[name]
            assert value is not None
            raise FloatingPointError(
                f"{name}: {count} of the {int(mask.sum())} tokens that count are not finite, the first is "
                f"{value[row, token].item()} at row {row}, token {token}. {_WHY_NOT_FINITE.get(name, '')}".rstrip()
            )


def _check_shapes(logps: Tensor, advantages: Tensor, others: dict[str, Tensor | None]) -> None:
    shape = tuple(logps.shape)
    if len(shape) != 2:
        raise ValueError(f"logps: expected two axes [B,T], got shape {shape}.")
    check_shapes(logps, others)
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(f"advantages: expected [B] = {shape[:1]} or [B,T] = {shape}, got {tuple(advantages.shape)}.")


_WHY_NEEDED = {
    "ref_logps": "kl_coef is not 0, so the loss has a KL term against a reference policy.",
    "rollout_logps": "the objective is anchored at, or corrects for, the engine that sampled; pass the "
    "sampler's own log-probabilities, or choose anchor='old' and no corrections.",
    "route_weight": "the objective weighs ratios by the router shift (RSPO); pass gamma [B,T].",
}

_ZERO_PROBABILITY = (
    "-inf is the log-probability of a token that its policy cannot sample (logits filtered by top-k, top-p or a list "
    "of banned tokens): score without the filter, or mask the token out. NaN comes from the model."
)
_WHY_NOT_FINITE = dict.fromkeys(("logps", "old_logps", "ref_logps", "rollout_logps"), _ZERO_PROBABILITY)
