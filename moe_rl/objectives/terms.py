"""What the loss and the gradient analysis both start from: checked inputs, ratios, correction weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives.objective import Objective
from moe_rl.objectives.presets import get_objective
from moe_rl.objectives.ratios import as_bool_mask, at_least_float32, log_ratio_at_level, token_log_ratio


@dataclass(frozen=True)
class Terms:
    """Everything per token, `[B,T]`, 0 in padding.

    Fields:
        objective: the resolved objective.
        mask: bool.
        logps: current policy, nats; with gradient.
        advantages: detached.
        log_ratio: log pi - log pi_anchor, nats; with gradient.
        level_log_ratio: what the gate sees: `log_ratio` at the objective's level, with RSPO's router-shift
            weight already in it if it enters before the clip.
        log_gamma_after: that weight, log, if it enters after the clip.
        correction_weights: detached, one tensor for each engine correction in force.
    """

    objective: Objective
    mask: Bool[Tensor, "B T"]
    logps: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    log_ratio: Float[Tensor, "B T"]
    level_log_ratio: Float[Tensor, "B T"]
    log_gamma_after: Float[Tensor, "B T"] | None
    correction_weights: tuple[Float[Tensor, "B T"], ...]

    def after_gate(self) -> Float[Tensor, "B T"] | None:
        """The product of the weights that multiply a token's surrogate; None if there are none.

        The geometric gate takes `log_gamma_after` into its mean, so there it is not among them.
        """
        weights = list(self.correction_weights)
        if self.log_gamma_after is not None and self.objective.gate != "geometric":
            weights.append(self.log_gamma_after.exp())
        return torch.stack(weights).prod(0) if weights else None


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
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    advantage = torch.where(keep, at_least_float32(per_token.detach()), 0.0)

    anchor = rollout_logps if o.anchor == "rollout" and rollout_logps is not None else old_logps
    log_ratio = token_log_ratio(logps, anchor, keep)
    log_gamma = None
    if route_weight is not None:
        log_gamma = torch.where(keep, route_weight.detach(), 1.0).clamp(min=o.route_floor).log()
    before = log_gamma is not None and o.route_weight == "before_clip"
    entering = log_ratio + log_gamma if before and log_gamma is not None else log_ratio

    correction_weights = []
    if rollout_logps is not None:  # without them only optional corrections are left: one engine, weight 1
        for correction in o.corrections:
            numerator = logps if correction.policy == "current" else old_logps
            log_weight = token_log_ratio(numerator.detach(), rollout_logps, keep)
            correction_weights.append(correction.weight(log_weight, advantage, keep))
    return Terms(
        objective=o,
        mask=keep,
        logps=torch.where(keep, at_least_float32(logps), 0.0),
        advantages=advantage,
        log_ratio=log_ratio,
        level_log_ratio=log_ratio_at_level(entering, keep, o.ratio),
        log_gamma_after=None if before else log_gamma,
        correction_weights=tuple(correction_weights),
    )


def _check_shapes(logps: Tensor, advantages: Tensor, others: dict[str, Tensor | None]) -> None:
    shape = tuple(logps.shape)
    if len(shape) != 2:
        raise ValueError(f"logps: expected two axes [B,T], got shape {shape}.")
    for name, value in others.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: expected the shape of logps, {shape}, got {tuple(value.shape)}. "
                "All [B,T] tensors must be aligned with the same tokens."
            )
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(f"advantages: expected [B] = {shape[:1]} or [B,T] = {shape}, got {tuple(advantages.shape)}.")


_WHY_NEEDED = {
    "ref_logps": "kl_coef is not 0, so the loss has a KL term against a reference policy.",
    "rollout_logps": "the objective is anchored at, or corrects for, the engine that sampled; pass the "
    "sampler's own log-probabilities, or choose anchor='old' and no corrections.",
    "route_weight": "the objective weighs ratios by the router shift (RSPO); pass gamma [B,T].",
}
