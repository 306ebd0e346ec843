"""`policy_loss`: one exact objective for every policy-gradient method that the presets name."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives import gates
from moe_rl.objectives.diagnostics import loss_metrics
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.objective import Aggregate, Objective
from moe_rl.objectives.presets import get_objective
from moe_rl.objectives.ratios import (
    as_bool_mask,
    at_least_float32,
    log_ratio_at_level,
    masked_row_mean,
    masked_row_sum,
    token_log_ratio,
)


@dataclass(frozen=True)
class LossOutput:
    """What `policy_loss` returns.

    Fields:
        loss: scalar to minimise, with gradient.
        log_ratio: `[B,T]`, log pi - log pi_anchor, nats; detached; 0 in padding.
        sequence_log_ratio: `[B]`, its mean over each sequence, nats per token; detached.
        clipped: `[B,T]`, the tokens that the clip takes out of the gradient; False in padding. Depends on the
            sign of the advantage. With a sequence ratio, every token of that sequence. Tokens dropped by an
            engine correction are not counted here, see `metrics`.
        metrics: detached scalars; see `moe_rl.objectives.diagnostics.loss_metrics`.
    """

    loss: Float[Tensor, ""]
    log_ratio: Float[Tensor, "B T"]
    sequence_log_ratio: Float[Tensor, " B"]
    clipped: Bool[Tensor, "B T"]
    metrics: dict[str, Tensor]


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
    total_sequences: float | Tensor | None = None,
    total_tokens: float | Tensor | None = None,
) -> LossOutput:
    """The loss of one method on one (micro-)batch.

        loss = -Agg[ c * G(r; A) ] + kl_coef * Agg[ KL(pi || pi_ref) ]

    with the ratio r (`ratios`), gate G (`gates`), engine correction c (`corrections`) and aggregation Agg
    (`aggregate`) that the objective names. GRPO is arXiv:2507.18071 eq. 2, GSPO eq. 5, GSPO-token eq. 13.

    Values under a False mask may be anything, NaN included; a fully masked row contributes nothing and is not
    counted. Gradient flows through `logps` only. There is no hidden clamp: an unclipped ratio beyond the range
    of the dtype (88 nats in float32, 709 in float64) gives a non-finite loss, and
    `metrics["extreme_tokens"]` counts the tokens beyond 20 nats that announce it.

    Args:
        objective: an `Objective` or the name of one in `OBJECTIVES`.
        logps: current policy, nats, `[B,T]`.
        old_logps: the training engine's old policy, nats.
        advantages: `[B]`, one a sequence, or `[B,T]`, one a token. A sequence ratio with token advantages
            averages them over the sequence (the ratio's gradient is shared); "sequence_token" keeps them apart.
        mask: bool or 0/1, True on completion tokens.
        ref_logps: reference policy; needed iff `kl_coef` is not 0.
        rollout_logps: the rollout engine's log-probabilities of the same tokens; needed for anchor="rollout"
            and for engine corrections. If given, the gap between the engines is in the metrics.
        route_weight: RSPO's router-shift weight gamma in (0, 1]; needed iff `objective.route_weight` is set.
        total_sequences, total_tokens: denominators over all micro-batches and processes that share one
            optimiser step (rows with at least one token; unmasked tokens). The sum of the micro-batch losses
            is then exactly the loss of the whole batch. Where gradients are averaged over processes, multiply
            by their number. Default: those of this call.

    Raises:
        ValueError: an unknown name, shapes that differ, a mask that is no mask, an input that the objective
            needs and did not get, or a `route_weight` that it would ignore.

    >>> logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> out = policy_loss("grpo", logps, logps.detach(), torch.tensor([2.0]), torch.tensor([[True, True]]))
    >>> out.loss.backward(); out.loss.item(), logps.grad.tolist()
    (-2.0, [[-1.0, -1.0]])
    """
    o = get_objective(objective) if isinstance(objective, str) else objective
    others = {
        "old_logps": old_logps,
        "ref_logps": ref_logps,
        "rollout_logps": rollout_logps,
        "route_weight": route_weight,
    }
    keep, advantage = _check_inputs(o, logps, advantages, mask, others)

    anchor = rollout_logps if o.anchor == "rollout" and rollout_logps is not None else old_logps
    log_ratio = token_log_ratio(logps, anchor, keep)
    log_gamma = None
    if route_weight is not None:
        log_gamma = torch.where(keep, route_weight.detach(), 1.0).clamp(min=o.route_floor).log()
    entering = (
        log_ratio + log_gamma if log_gamma is not None and o.route_weight == "before_clip" else log_ratio
    )
    level_log_ratio = log_ratio_at_level(entering, keep, o.ratio)
    surrogate, clipped = _apply_gate(
        o, level_log_ratio, logps, advantage, keep, log_gamma if o.route_weight == "after_clip" else None
    )

    corrected = surrogate
    weights = []
    for correction in o.corrections:
        if rollout_logps is None:  # only an optional correction gets here: one engine, weight 1
            continue
        numerator = logps if correction.policy == "current" else old_logps
        weight = correction.weight(token_log_ratio(numerator.detach(), rollout_logps, keep), advantage, keep)
        weights.append(weight)
        corrected = corrected * weight

    token_loss = -corrected
    kl = None
    if ref_logps is not None:
        kl = kl_estimate(logps if o.kl_coef else logps.detach(), ref_logps, keep, o.kl_estimator)
        if o.kl_coef:
            penalty = kl * level_log_ratio.exp() if o.kl_importance_weighted else kl
            token_loss = token_loss + o.kl_coef * penalty

    loss = aggregate(
        token_loss,
        keep,
        o.aggregate,
        length_constant=o.length_constant,
        local_normalizer=o.local_normalizer,
        total_sequences=total_sequences,
        total_tokens=total_tokens,
    )
    facts = log_ratio.detach()
    return LossOutput(
        loss=loss,
        log_ratio=facts,
        sequence_log_ratio=masked_row_mean(facts, keep),
        clipped=clipped & keep,
        metrics=loss_metrics(
            log_ratio=facts,
            level_log_ratio=level_log_ratio.detach(),
            advantages=advantage,
            clipped=clipped & keep,
            mask=keep,
            kl=None if kl is None else kl.detach(),
            engine_log_weight=None
            if rollout_logps is None
            else token_log_ratio(old_logps, rollout_logps, keep),
            correction_weights=weights,
        ),
    )


def aggregate(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    how: Aggregate,
    *,
    length_constant: float = 1.0,
    local_normalizer: bool = False,
    total_sequences: float | Tensor | None = None,
    total_tokens: float | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Token values `[B,T]` -> one number. N counts the rows with at least one token, M the unmasked tokens.

        "sequence_mean"  (1/N) sum_i (1/|y_i|) sum_t v[i,t]      GRPO, GSPO (arXiv:2507.18071, eqs 2, 13)
        "token_mean"     (1/M) sum_i sum_t v[i,t]                DAPO (arXiv:2503.14476, eq. 8)
        "sum"            (1/N) sum_i sum_t v[i,t]                MiniRL (arXiv:2512.01374)
        "constant"       (1/(N L)) sum_i sum_t v[i,t]            Dr.GRPO (arXiv:2503.20783), L = length_constant

    Differs: N does not count fully masked rows, so that adding one never changes the loss of the others. The
    papers' 1/G counts sequences that all have tokens, where both agree.

    Args:
        values, mask: padding may hold anything.
        local_normalizer: a token mean over these rows only, weighted by their share of `total_sequences`:
            BNPO's normalisation, which depends on how a batch is cut into micro-batches.
        total_sequences, total_tokens: N and M of the whole batch; default those of `mask`.

    Returns:
        A scalar with the gradient of `values`; 0 where no token is unmasked.

    >>> v, m = torch.tensor([[1.0, 3.0], [8.0, float("nan")]]), torch.tensor([[True, True], [True, False]])
    >>> [aggregate(v, m, how).item() for how in ("sequence_mean", "token_mean", "sum")]
    [5.0, 4.0, 6.0]
    """
    row_sums = masked_row_sum(values, mask)
    lengths = mask.sum(-1)
    local_sequences = (lengths > 0).sum()
    sequences = _positive(total_sequences, local_sequences)
    match how:
        case "sequence_mean":
            return (row_sums / lengths.clamp(min=1)).sum() / sequences
        case "token_mean" if local_normalizer:
            return row_sums.sum() / lengths.sum().clamp(min=1) * (local_sequences / sequences)
        case "token_mean":
            return row_sums.sum() / _positive(total_tokens, lengths.sum())
        case "sum":
            return row_sums.sum() / sequences
        case "constant":
            return row_sums.sum() / (sequences * length_constant)
    raise ValueError(f"aggregate: expected sequence_mean, token_mean, sum or constant, got {how!r}.")


def _apply_gate(
    o: Objective,
    log_ratio: Float[Tensor, "B T"],
    logps: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    log_gamma_after: Float[Tensor, "B T"] | None,
) -> gates.Gated:
    """The objective's gate, with the router-shift weight behind it if one is given."""
    if o.gate == "geometric":
        return gates.geometric_gate(log_ratio, advantages, mask, o.clip_low, o.clip_high, log_gamma_after)
    safe_logps = torch.where(mask, at_least_float32(logps), 0.0)
    match o.gate:
        case "clip":
            gated = gates.clip_gate(log_ratio, advantages, o.clip_low, o.clip_high, o.dual_clip)
        case "mask":
            gated = gates.mask_gate(log_ratio, safe_logps, advantages, o.clip_low, o.clip_high)
        case "cap":
            gated = gates.cap_gate(log_ratio, safe_logps, advantages, o.clip_low, o.clip_high)
        case "sigmoid":
            gated = gates.sigmoid_gate(log_ratio, advantages, o.temperature_pos, o.temperature_neg)
        case "none":
            gated = gates.plain_gate(log_ratio, advantages)
        case "likelihood":
            gated = gates.likelihood_gate(safe_logps, advantages)
    if log_gamma_after is not None:
        return gates.Gated(gated.surrogate * log_gamma_after.exp(), gated.clipped)
    return gated


def _check_inputs(
    o: Objective,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    others: dict[str, Tensor | None],
) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Refuse what does not fit; return the bool mask and detached advantages `[B,T]`, 0 in padding."""
    shape = tuple(logps.shape)
    if len(shape) != 2:
        raise ValueError(f"logps: expected two axes [B,T], got shape {shape}.")
    for name, value in {**others, "mask": mask}.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{name}: expected the shape of logps, {shape}, got {tuple(value.shape)}. "
                "All [B,T] tensors must be aligned with the same tokens."
            )
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(
            f"advantages: expected [B] = {shape[:1]} or [B,T] = {shape}, got {tuple(advantages.shape)}."
        )
    for name in sorted(o.needs):
        if others[name] is None:
            raise ValueError(f"{name} is missing: {_WHY_NEEDED[name]}")
    if others["route_weight"] is not None and o.route_weight == "none":
        raise ValueError(
            "route_weight was given, but this objective would ignore it; "
            "use dataclasses.replace(objective, route_weight='before_clip') (or 'after_clip')."
        )
    keep = as_bool_mask(mask)
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    return keep, torch.where(keep, at_least_float32(per_token.detach()), 0.0)


_WHY_NEEDED = {
    "ref_logps": "kl_coef is not 0, so the loss has a KL term against a reference policy.",
    "rollout_logps": "the objective is anchored at, or corrects for, the engine that sampled; pass the sampler's "
    "own log-probabilities, or choose anchor='old' and no corrections.",
    "route_weight": "the objective weighs ratios by the router shift (RSPO); pass gamma [B,T].",
}


def _positive(total: float | Tensor | None, local: Tensor) -> float | Tensor:
    """The global denominator if given, else the local one; never 0."""
    if total is None:
        return local.clamp(min=1)
    if isinstance(total, Tensor):
        return total.clamp(min=1)
    return max(float(total), 1.0)
