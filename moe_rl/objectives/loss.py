"""`policy_loss`: the loss of every policy-gradient method among the presets.

The module also has `Terms` (checked inputs, ratios, correction weights), which the gradient analysis uses too, and
`loss_metrics`, the metrics of a minibatch's tokens.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.corrections import engine_weights
from moe_rl.objectives.diagnostics import CEILING, optional_metrics
from moe_rl.objectives.gates import GATES, Gated, GateInputs, TokenValues
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.presets import get_objective
from moe_rl.objectives.ratios import (
    aggregation_weights,
    as_bool_mask,
    at_least_float32,
    check_shapes,
    log_ratio_at_level,
    masked_row_mean,
    masked_row_sum,
    token_log_ratio,
    weighted_sum,
)

EXTREME_NATS = 20.0


@dataclass(frozen=True)
class LossOutput:
    """The result of `policy_loss`: the loss, and the quantities of every token.

    Fields:
        loss: scalar to minimise, with gradient.
        tokens: the quantities of every token in the loss, detached.
    Properties computed from `tokens`, detached: `log_ratio` `[B,T]`, `sequence_log_ratio` `[B]`, `clipped` `[B,T]`;
        `metrics`, scalars by name (`loss_metrics`).
    """

    loss: Float[Tensor, ""]
    tokens: TokenValues = field(repr=False)  # pages of numbers in a notebook

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """log pi - log pi_anchor, nats; detached; 0 in padding."""
        return self.tokens.log_ratio

    @cached_property
    def sequence_log_ratio(self) -> Float[Tensor, " B"]:
        """The mean of `log_ratio` over each sequence, nats per token; detached."""
        return masked_row_mean(self.tokens.log_ratio, self.tokens.mask)

    @property
    def clipped(self) -> Bool[Tensor, "B T"]:
        """The tokens that the clip takes out of the gradient; False in padding. Depends on the sign of the advantage.

        A sequence ratio is the same for every token of a sequence: if the advantage is, too, all of its tokens are
        clipped or none. Tokens dropped by an engine correction are not counted here, see `metrics`."""
        return self.tokens.clipped

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of `moe_rl.objectives.loss_metrics`: detached scalars by name, computed on the first access."""
        return loss_metrics(self.tokens)


def policy_loss(
    objective: Objective | str,
    logps: Float[Tensor, "B T"],
    old_logps: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    *,
    ref_logps: Float[Tensor, "B T"] | None = None,
    rollout_logps: Float[Tensor, "B T"] | None = None,
    route_weight: Float[Tensor, "B T"] | None = None,
    total_sequences: float | int | Tensor | None = None,
    total_tokens: float | int | Tensor | None = None,
) -> LossOutput:
    """Return the loss of one method on one (micro-)batch.

        loss = -Agg[ c * G(r; A) ] + kl_coef * Agg[ KL(pi || pi_ref) ]

    with the ratio r and gate G (`ratios`), engine correction c (`corrections`) and aggregation Agg
    (`aggregation_weights`) that the objective names. GRPO is arXiv:2507.18071 eq. 2, GSPO eq. 5, GSPO-token eq. 13.

    Values under a False mask may be anything, NaN included; a fully masked row contributes nothing and is not
    counted. Gradient flows through `logps` only. There is no hidden clamp: an unclipped ratio beyond the
    range of the dtype (88 nats in float32, 709 in float64) gives a non-finite loss. `metrics["extreme_tokens"]`
    counts the tokens with a log-ratio beyond 20 nats, an early sign of this (a product over the sequence may overflow
    without such a token). A token that an engine correction drops contributes 0 to the first term, whatever its
    ratio; its KL stays. Input that is not finite on a token that counts is refused: a log-probability of -inf means
    that the token could not have been sampled, and a clip would hide its ratio of 0 or infinity.

    Args:
        objective: an `Objective` or the name of one in `OBJECTIVES`.
        logps: log-probabilities under the current policy, nats, `[B,T]`.
        old_logps: those under the training engine's old policy, nats.
        advantages: `[B]`, one a sequence, or `[B,T]`, one a token. A sequence ratio is clipped for each
            token by the sign of that token's own advantage. With ratio "sequence" the gradient goes through the
            sequence's ratio to all of its tokens alike; with "sequence_token" each token's gradient goes to its own
            log-probability.
        mask: bool or 0/1, True on completion tokens. A row is one sequence; packed rows: `moe_rl.measure.unpacked`.
        ref_logps: log-probabilities under the reference policy; needed iff `kl_coef` is not 0.
        rollout_logps: the rollout engine's log-probabilities of the same tokens; needed for anchor="rollout"
            and for engine corrections that are not `optional`. If they are given, the metrics include the gap between
            the engines.
        route_weight: RSPO's router-shift weight gamma in [0, 1]; needed iff `objective.route_weight` is set.
        total_sequences, total_tokens: denominators over all micro-batches and processes that share one
            optimiser step (rows with at least one token; unmasked tokens). The sum of the micro-batch losses
            is then exactly the loss of the whole batch. If gradients are averaged over processes, multiply the loss by
            the number of processes. Default: the totals of this call.

    Raises:
        ValueError: an unknown name, shapes that differ, a mask that is no mask, an input that the objective
            needs and did not get, a `route_weight` that it would ignore or that is not in [0, 1], a total that is no
            count.
        FloatingPointError: NaN or infinity on a token that counts; the message names the argument and the token.

    >>> import torch
    >>> logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> out = policy_loss("grpo", logps, logps.detach(), torch.tensor([2.0]), torch.tensor([[True, True]]))
    >>> out.loss.backward(); out.loss.item(), logps.grad.tolist()
    (-2.0, [[-1.0, -1.0]])
    """
    terms = prepare_terms(objective, logps, old_logps, advantages, mask, ref_logps, rollout_logps, route_weight)
    o, x, keep = terms.objective, terms.inputs, terms.inputs.mask
    surrogate, clipped, compared = terms.gated()
    after_gate = terms.after_gate()
    token_loss = -surrogate if after_gate is None else -surrogate * after_gate

    kl = None
    if ref_logps is not None:
        kl = kl_estimate(logps if o.kl_coef else logps.detach(), ref_logps, keep, o.kl_estimator)
        if o.kl_coef:
            penalty = kl * x.level_log_ratio.exp() if o.kl_importance_weighted else kl
            token_loss = token_loss + o.kl_coef * penalty

    weights = aggregation_weights(
        keep,
        o.aggregate,
        length_constant=o.length_constant,
        local_normalizer=o.local_normalizer,
        total_sequences=total_sequences,
        total_tokens=total_tokens,
        dtype=token_loss.dtype,
    )
    tokens = TokenValues(
        log_ratio=x.token_log_ratio.detach(),
        clipped=clipped & keep,
        mask=keep,
        advantages=x.advantages,
        gate_log_ratio=x.level_log_ratio.detach() if compared is None else compared,
        ref_kl=None if kl is None else kl.detach(),
        **terms.weights,
    )
    return LossOutput(loss=weighted_sum(token_loss, weights, keep), tokens=tokens)


# -- checked inputs, ratios and weights --------------------------------------------------------------------------------


_IN_RANGE = 60.0  # nats: e^60 and products with it are finite in float32; no clip bound is larger


@dataclass(frozen=True)
class Terms:
    """The resolved objective, its gate's inputs, and each token's other weights by their names in `TokenValues`."""

    objective: Objective
    inputs: GateInputs
    weights: dict[str, Tensor | None]

    def knobs(self) -> dict[str, float | int | None]:
        """Return the values of the objective's fields that its gate reads, by name."""
        return {name: getattr(self.objective, name) for name in GATES[self.objective.gate].knobs}

    def gated(self) -> Gated:
        """Return the surrogate of each token under the objective's gate, before any correction weight.

        Raises ValueError for a gate that returns anything else, e.g. one value per sequence, which broadcasting would
        give to each token."""
        found = GATES[self.objective.gate].surrogate(self._gate_inputs(), **self.knobs())
        shape = self.inputs.mask.shape
        if not (isinstance(found, Gated) and found.surrogate.shape == found.clipped.shape == shape):
            got = [list(each.shape) for each in found[:2]] if isinstance(found, Gated) else type(found).__name__
            raise ValueError(
                f"gate {self.objective.gate!r}: not Gated(surrogate, clipped), each [B,T] = {list(shape)}, got {got}"
            )
        if found.clipped.dtype != torch.bool:
            raise ValueError(f"gate {self.objective.gate!r}: clipped must be bool, got {found.clipped.dtype}")
        return found

    def _gate_inputs(self) -> GateInputs:
        """Return the gate's inputs, with the log-ratio of dropped tokens (weight 0) within 60 nats: 0 * inf is NaN."""
        weight, level = self.after_gate(), self.inputs.level_log_ratio
        if weight is None:
            return self.inputs
        dropped = weight == 0
        if GATES[self.objective.gate].flow == "row":  # the mean of a token that stays needs the log-ratios of all
            dropped = (dropped | ~self.inputs.mask).all(-1, keepdim=True)
        bounded = level.detach().clamp(min=-_IN_RANGE, max=_IN_RANGE)
        return replace(self.inputs, level_log_ratio=torch.where(dropped, bounded, level))

    def after_gate(self) -> Float[Tensor, "B T"] | None:
        """Return the product of the weights that multiply a token's surrogate; None if there are none.

        A gate that takes a mean over the sequence applies `log_route_weight` itself, so the product leaves it out.
        """
        weight, log_gamma = self.weights.get("correction_weight"), self.inputs.log_route_weight
        if log_gamma is None or GATES[self.objective.gate].flow == "row":
            return weight
        return log_gamma.exp() if weight is None else weight * log_gamma.exp()


def prepare_terms(
    objective: Objective | str,
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logps: Tensor | None,
    rollout_logps: Tensor | None,
    route_weight: Tensor | None,
) -> Terms:
    """Check the arguments of `policy_loss` and return the terms that the gate starts from.

    Raises as `policy_loss` does."""
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
    if rollout_logps is not None:  # without them all corrections are optional: one engine sampled and scored, weight 1
        weights |= engine_weights(o.corrections, logps, old_logps, rollout_logps, advantage, keep)
    inputs = GateInputs(
        level_log_ratio=log_ratio_at_level(entering, keep, o.ratio),
        token_log_ratio=log_ratio,
        logps=torch.where(keep, at_least_float32(logps), 0.0),
        advantages=advantage,
        mask=keep,
        log_route_weight=after_clip,
    )
    return Terms(o, inputs, weights)


def _router_shift(
    o: Objective, route_weight: Float[Tensor, "B T"], keep: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """Return the logarithm of RSPO's gamma, raised to its floor, and gamma's fields of `TokenValues` by name."""
    if bool((keep & ((route_weight < 0) | (route_weight > 1))).any()):
        raise ValueError("route_weight: expected gamma of at least 0 and of at most 1 on tokens that count.")
    gamma = torch.where(keep, at_least_float32(route_weight.detach()), 1.0)
    return gamma.clamp(min=o.route_floor).log(), {"route_weight": gamma, "route_floored": gamma < o.route_floor}


def _refuse_not_finite(inputs: dict[str, Tensor | None], mask: Bool[Tensor, "B T"]) -> None:
    """Raise FloatingPointError for NaN or infinity on a token that counts; synchronises with the device once."""
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
    for name, given in {"logps": logps, "advantages": advantages, **others}.items():
        if not isinstance(given, Tensor) and not (given is None and name in _WHY_NEEDED):  # these may be None
            what = "; pass its .logps" if hasattr(given, "logps") else ""
            raise ValueError(f"{name}: expected a tensor, got {type(given).__name__}{what}.")
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


# -- metrics ---------------------------------------------------------------------------------------------------------


def loss_metrics(values: TokenValues) -> dict[str, Tensor]:
    """Return the scalar metrics of the tokens of one (mini-)batch by name; `LOSS_METRICS` defines the names.

    Pass the tokens of the whole minibatch: means, minima and maxima of micro-batches cannot be added. Without any token
    every mean is 0.
    """
    mask, clipped, up = values.mask, values.clipped, values.advantages > 0
    tokens = mask.sum()
    above = values.gate_log_ratio > 0
    found = {
        "tokens": tokens,
        "sequences": mask.any(-1).sum(),
        "live_tokens": (mask & (values.advantages != 0)).sum(),
        "clipped_tokens": clipped.sum(),
        "clipped_low_tokens": (clipped & ~up & ~above).sum(),
        "clipped_high_tokens": (clipped & up & above).sum(),
        "clipped_sequences": clipped.any(-1).sum(),
        "gate_ratio_mean": masked_row_sum(values.gate_log_ratio.exp(), mask).sum() / tokens.clamp(min=1),
        "ceiling_tokens": (mask & (values.advantages < 0) & (values.log_ratio.exp() > CEILING)).sum(),
        "extreme_tokens": (mask & ~(values.log_ratio.abs() <= EXTREME_NATS)).sum(),
    }
    optional = values.ref_kl, values.engine_log_weight, values.correction_weight, values.route_weight
    return found if all(x is None for x in optional) else found | optional_metrics(values)
