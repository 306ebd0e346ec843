"""`policy_loss`: one exact objective for every policy-gradient method that the presets name.

Below it, what is said of a minibatch's tokens, and how their values become one number.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.diagnostics import optional_metrics
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.objective import Aggregate, Objective
from moe_rl.objectives.ratios import as_bool_mask, masked_row_mean, masked_row_sum
from moe_rl.objectives.terms import TokenValues, prepare_terms

EXTREME_NATS = 20.0


@dataclass(frozen=True)
class LossOutput:
    """What `policy_loss` returns.

    Fields:
        loss: scalar to minimise, with gradient.
        tokens: what every token was to it, detached.
    """

    loss: Float[Tensor, ""]
    tokens: TokenValues

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
        With a sequence ratio, every token of that sequence. Tokens dropped by an engine correction are not counted
        here, see `metrics`."""
        return self.tokens.clipped

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Detached scalars, computed when first asked for; see `moe_rl.objectives.loss_metrics`."""
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
    """The loss of one method on one (micro-)batch.

        loss = -Agg[ c * G(r; A) ] + kl_coef * Agg[ KL(pi || pi_ref) ]

    with the ratio r and gate G (`ratios`), engine correction c (`corrections`) and aggregation Agg
    (`aggregation_weights`) that the objective names. GRPO is arXiv:2507.18071 eq. 2, GSPO eq. 5, GSPO-token eq. 13.

    Values under a False mask may be anything, NaN included; a fully masked row contributes nothing and is not
    counted. Gradient flows through `logps` only. There is no hidden clamp: an unclipped ratio beyond the
    range of the dtype (88 nats in float32, 709 in float64) gives a non-finite loss, and
    `metrics["extreme_tokens"]` counts the tokens beyond 20 nats that announce it. What is not finite on a token that
    counts is refused: a log-probability of -inf there says that the token could not have been sampled, and its ratio
    of 0 or infinity would leave no trace behind a clip.

    Args:
        objective: an `Objective` or the name of one in `OBJECTIVES`.
        logps: current policy, nats, `[B,T]`.
        old_logps: the training engine's old policy, nats.
        advantages: `[B]`, one a sequence, or `[B,T]`, one a token. A sequence ratio with token advantages
            averages them over the sequence (one shared gradient); "sequence_token" keeps them apart.
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
            needs and did not get, a `route_weight` that it would ignore or that is not in [0, 1], a total that is no
            count.
        FloatingPointError: NaN or infinity on a token that counts; the message names the argument and the token.

    >>> import torch
    >>> logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> out = policy_loss("grpo", logps, logps.detach(), torch.tensor([2.0]), torch.tensor([[True, True]]))
    >>> out.loss.backward(); out.loss.item(), logps.grad.tolist()
    (-2.0, [[-1.0, -1.0]])
    """
    terms = prepare_terms(
        objective,
        logps,
        old_logps,
        advantages,
        mask,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
        route_weight=route_weight,
    )
    o, keep = terms.objective, terms.inputs.mask
    surrogate, clipped = terms.gated()
    after_gate = terms.after_gate()
    token_loss = -surrogate if after_gate is None else -surrogate * after_gate

    kl = None
    if ref_logps is not None:
        kl = kl_estimate(logps if o.kl_coef else logps.detach(), ref_logps, keep, o.kl_estimator)
        if o.kl_coef:
            penalty = kl * terms.inputs.level_log_ratio.exp() if o.kl_importance_weighted else kl
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
    tokens = replace(terms.tokens, clipped=clipped & keep, ref_kl=None if kl is None else kl.detach())
    return LossOutput(loss=weighted_sum(token_loss, weights, keep), tokens=tokens)


# -- metrics ---------------------------------------------------------------------------------------------------------


def loss_metrics(values: TokenValues) -> dict[str, Tensor]:
    """Scalars about the tokens of one (mini-)batch; the names are defined in `LOSS_METRICS`.

    Pass the tokens of the whole minibatch: means, minima and maxima of micro-batches do not add up. Without any token
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
        "extreme_tokens": (mask & ~(values.log_ratio.abs() <= EXTREME_NATS)).sum(),
    }
    optional = values.ref_kl, values.engine_log_weight, values.correction_weight, values.route_weight
    return found if all(x is None for x in optional) else found | optional_metrics(values)


# -- aggregation -------------------------------------------------------------------------------------------------------


def aggregation_weights(
    mask: Shaped[Tensor, "B T"],
    how: Aggregate,
    *,
    length_constant: float | int = 1.0,
    local_normalizer: bool = False,
    total_sequences: float | int | Tensor | None = None,
    total_tokens: float | int | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B T"]:
    """The weight of each token in the aggregate; N counts rows with a token, M the unmasked tokens.

        "sequence_mean"  1/(N |y_i|)   GRPO, GSPO (arXiv:2507.18071, eqs 2, 13)
        "token_mean"     1/M           DAPO (arXiv:2503.14476, eq. 8)
        "sum"            1/N           MiniRL (arXiv:2512.01374): mean over sequences of a sum over tokens
        "constant"       1/(N L)       Dr.GRPO (arXiv:2503.20783), L = length_constant

    Differs: N does not count fully masked rows, so that adding one never changes the loss of the others. The
    papers' 1/G counts sequences that all have tokens; there both agree.

    Args:
        mask: True or 1 on completion tokens.
        length_constant: L, tokens.
        local_normalizer: for "token_mean", a mean over these rows alone, weighted by their share of
            `total_sequences`: BNPO's normalisation, which depends on how a batch is cut into micro-batches.
        total_sequences, total_tokens: N and M of all micro-batches and processes of one optimiser step;
            default those of `mask`.

    Returns:
        `[B,T]`, detached; 0 in padding.

    Raises:
        ValueError: an unknown `how`, a total that is no count, or a mask that is no mask.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> aggregation_weights(mask, "sequence_mean")[:, 0].tolist()
    [0.16666666666666666, 0.5]
    >>> aggregation_weights(mask, "token_mean")[:, 0].tolist()
    [0.25, 0.25]
    """
    counted = as_bool_mask(mask).to(dtype)
    lengths = counted.sum(-1, keepdim=True)
    local_sequences, local_tokens = (lengths > 0).sum().to(dtype), lengths.sum()
    sequences = _at_least_one(local_sequences if total_sequences is None else total_sequences)
    tokens = _at_least_one(local_tokens if total_tokens is None else total_tokens)
    match how:
        case "sequence_mean":
            return counted / lengths.clamp(min=1) / sequences
        case "token_mean" if local_normalizer:
            return counted / local_tokens.clamp(min=1) * (local_sequences / sequences)
        case "token_mean":
            return counted / tokens
        case "sum":
            return counted / sequences
        case "constant":
            return counted / (sequences * length_constant)
    raise ValueError(f"aggregate: expected sequence_mean, token_mean, sum or constant, got {how!r}.")


def weighted_sum(
    values: Float[Tensor, "B T"], weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """`sum_it weights values` over the unmasked tokens; padding may hold anything, NaN included."""
    return (torch.where(mask, values, 0.0) * weights).sum()


def _at_least_one(total: float | int | Tensor) -> float | Tensor:
    """A denominator that is never 0: without any token the numerator is 0 too."""
    if isinstance(total, Tensor):
        return total.clamp(min=1)
    if not 0 <= total < float("inf"):
        raise ValueError(f"total_sequences, total_tokens: expected a count of at least 0, got {total}.")
    return max(float(total), 1.0)
