"""The three-way mismatch, measured: rollout engine (mu), training engine's old policy (pi_old), current policy (pi).

Rows of kind "engine" in the metrics, one for each `pair`:

- "engines"           mu -> pi_old, equal parameters, live routing in both: what the engine alone does
- "engines_replayed"  the same with the rollout's routes forced on pi_old: what is left of it under R3
- "rollout_to_new"    mu -> pi after update `update`, live routing, on the probe's subset: engine and staleness together

The fourth side, pi_old -> pi, is the probe's own.
"""

from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.objectives import sequence_log_ratio, token_log_ratio
from moe_rl.routing import RoutedExperts, change_counts
from moe_rl.training.batch import Batch

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


def logp_gap(
    logps: Float[Tensor, "B T"], rollout_logps: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> dict[str, Tensor]:
    """How far a policy is from the engine that sampled, on the sampled tokens; d = log pi - log mu, nats, r = exp(d).

    `gap_mean`, `gap_p99`, `gap_max`: of |d|. `k3` = mean(r - 1 - d), an estimate of KL(mu || pi) in nats per token
    (Schulman, "Approximating KL divergence"). `extreme_fraction`: F(2) of R3 (arXiv:2510.11370), the share of tokens
    with max(r, 1/r) > 2. `var_token`, `var_sequence`: variance of d over tokens, and of its mean over each sequence
    (log s of arXiv:2507.18071, eq. 7) over sequences; their quotient would be the mean length if tokens were
    independent.
    """
    d = token_log_ratio(logps, rollout_logps, mask)
    tokens = d[mask].double()
    size = tokens.abs()
    return {
        "gap_mean": size.mean(),
        "gap_p99": size.quantile(0.99),
        "gap_max": size.max(),
        "k3": (tokens.exp() - 1 - tokens).mean(),
        "extreme_fraction": (size > 0.6931471805599453).double().mean(),
        "var_token": tokens.var(),
        "var_sequence": sequence_log_ratio(logps, rollout_logps, mask)[mask.any(1)].double().var(),
    }


def route_gap(rollout: RoutedExperts, other: RoutedExperts, mask: Bool[Tensor, "B T"], pair: str) -> dict[str, Any]:
    """Response slots, sites and tokens that were routed otherwise than by the rollout engine, with denominators. The
    last token of a response has no route of the engine's and counts nowhere."""
    counts = change_counts(rollout, other, mask, pair=pair)
    return {
        "slots_changed": counts.slots_changed,
        "slots": counts.slots_total,
        "sites_changed": counts.sites_changed,
        "sites": counts.sites_total,
        "tokens_changed": counts.tokens_changed,
        "tokens": counts.tokens_total,
        "site_names": counts.sites,
        "site_slots_changed": counts.per_site_slots_changed,
        "site_slots": counts.per_site_slots_total,
        "flips_histogram": counts.flips,
    }


def log_engines(trainer: "Trainer", batch: Batch, replayed_logps: Tensor | None) -> None:
    """Rows of the pairs "engines" and "engines_replayed" of a batch that was just scored."""
    if batch.rollout_routes is None:
        return
    mask, guard = batch.completion_mask, trainer.rollouts.guard
    sync = {"sync_gap": guard.gap, "sync_tolerance": guard.tolerance} if guard else {}
    gap = logp_gap(batch.live_old_logps, batch.rollout_logps, mask)
    routes = route_gap(batch.rollout_routes, batch.routes, mask, "engines")
    trainer.log.append("engine", trainer.step, pair="engines", update=0, **gap, **routes, **sync)
    if replayed_logps is not None:
        gap = logp_gap(replayed_logps, batch.rollout_logps, mask)
        trainer.log.append("engine", trainer.step, pair="engines_replayed", update=0, **gap)


def log_rollout_to_new(trainer: "Trainer", part: Batch, update: int, natural: Tensor, routes: RoutedExperts) -> None:
    """Row of the pair "rollout_to_new" of a probe."""
    if part.rollout_routes is None:
        return
    mask = part.completion_mask
    facts = {
        **logp_gap(natural, part.rollout_logps, mask),
        **route_gap(part.rollout_routes, routes, mask, "policies"),
    }
    trainer.log.append("engine", trainer.step, pair="rollout_to_new", update=update, **facts)
