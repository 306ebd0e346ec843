"""Closed-form gradient of every method's loss: the weight of each token's log-probability, clipped or not.

GSPO's argument against GRPO is about these weights (arXiv:2507.18071, section 4.2): GRPO weighs the tokens of
one response by their own ratios, in (0, 1 + eps] for A > 0 and [1 - eps, inf) for A < 0; GSPO weighs them
equally.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.gates import GATES
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.loss import Terms, prepare_terms
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.ratios import aggregation_weights, log_ratio_at_level


@dataclass(frozen=True)
class TokenWeights:
    """Gradient weights of a batch's tokens: all `[B,T]`, detached, 0 (False) in padding.

    Fields:
        weight: the factor of grad log pi of the token in the ascent direction, -d loss / d log pi[i,t]; includes
            advantage, aggregation, corrections and KL.
        importance: the factor that ratio and gate contribute; 0 on clipped tokens. w[i,t] for GRPO
            (arXiv:2507.18071, eq. 12), s[i] for GSPO and GSPO-token (eqs 10, 17).
        clipped: the tokens that the clip takes out of the gradient.
    """

    weight: Float[Tensor, "B T"]
    importance: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


@torch.no_grad()
def token_weights(
    objective: Objective | str,
    logps: Float[Tensor, "B T"],
    old_logps: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    *,
    ref_logps: Float[Tensor, "B T"] | None = None,
    rollout_logps: Float[Tensor, "B T"] | None = None,
    route_weight: Float[Tensor, "B T"] | None = None,
) -> TokenWeights:
    """Return the gradient weight of each token under `policy_loss`, computed without autograd.

    With a[t] the token's weight in the aggregation, c[t] its correction and g[t] its importance, `weight` is

        own        a[t] c[t] g[t] A[t]                                          arXiv:2507.18071, eqs 12, 17
        shared     (1/|y|) sum_u a[u] c[u] g[u] A[u]                            eq. 10
        geometric  1[t not clipped] (1/|y|) sum_u a[u] c[u] m A[u]              m the geometric mean

    minus kl_coef times the slope of the KL estimate. "shared" holds for a sequence ratio that carries the gradient
    itself (gates clip, soft_dual_clip, sigmoid, none; without 1/|y| for the product over the sequence); "own" for all
    other ratios and gates.

    Args and Raises: as `policy_loss`, for a batch in one piece.

    >>> logps, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[True, True]])
    >>> token_weights("gspo", logps, logps, torch.tensor([3.0]), mask).weight.tolist()
    [[1.5, 1.5]]
    """
    terms = prepare_terms(objective, logps, old_logps, advantages, mask, ref_logps, rollout_logps, route_weight)
    o, x = terms.objective, terms.inputs
    keep = x.mask
    share = aggregation_weights(
        keep,
        o.aggregate,
        length_constant=o.length_constant,
        local_normalizer=o.local_normalizer,
        dtype=x.token_log_ratio.dtype,
    )
    gate = GATES[o.gate]
    clipped = terms.gated().clipped & keep
    slope = torch.where(keep, gate.importance(x, **terms.knobs()), 0.0)
    importance = torch.where(clipped, 0.0, slope)
    after_gate = terms.after_gate()
    scaled = share * x.advantages if after_gate is None else share * x.advantages * after_gate
    if gate.flow == "row":
        contributions = torch.where(scaled == 0, 0.0, scaled * slope)
        weight = torch.where(clipped, 0.0, log_ratio_at_level(contributions, keep, "sequence"))
    else:
        weight = torch.where(scaled == 0, 0.0, scaled * importance)
        weight = _through_ratio(weight, terms) if gate.flow == "ratio" else weight
    if ref_logps is not None and o.kl_coef:
        weight = weight - o.kl_coef * _kl_slope(terms, ref_logps, share)
    return TokenWeights(torch.where(keep, weight, 0.0), importance, clipped)


def _through_ratio(values: Float[Tensor, "B T"], terms: Terms) -> Float[Tensor, "B T"]:
    """Carry slopes in the level log-ratio of each token, `values`, back to slopes in each token's log-probability.

    Means and sums over a sequence are their own transposes; with "sequence_token" each token keeps its own slope."""
    level = terms.objective.ratio
    return log_ratio_at_level(values, terms.inputs.mask, "token" if level == "sequence_token" else level)


def _kl_slope(terms: Terms, ref_logps: Float[Tensor, "B T"], share: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return d Agg[KL] / d log pi[i,t], the slope of the aggregated KL estimate in each log-probability, `[B,T]`."""
    o, x = terms.objective, terms.inputs
    keep = x.mask
    d = torch.where(keep, ref_logps, 0.0) - x.logps
    slope = {"k1": torch.ones_like(d), "k2": -d, "k3": -torch.expm1(d)}[o.kl_estimator]
    if not o.kl_importance_weighted:
        return share * slope
    kl = kl_estimate(x.logps, ref_logps, keep, o.kl_estimator)
    ratio = x.level_log_ratio.exp()
    return share * slope * ratio + _through_ratio(share * kl * ratio, terms)
