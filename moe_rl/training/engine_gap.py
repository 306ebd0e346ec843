"""The three-way mismatch, measured: rollout engine (mu), training engine's old policy (pi_old), current policy (pi).

Rows of kind "engine" in the metrics, one for each `pair`:

- "engines"           mu -> pi_old, equal parameters, live routing in both: what the engine alone does
- "engines_replayed"  the same with the rollout's routes forced on pi_old: what is left of it under R3
- "rollout_to_new"    mu -> pi after update `update`, live routing, on the probe's subset: engine and staleness together

The fourth side, pi_old -> pi, is the probe's own. The last token of a response has no route of the engine's and counts
in no change rate.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from moe_rl.routing import RoutedExperts, change_counts
from moe_rl.training.batch import Batch
from moe_rl.training.facts import change_facts, logp_gap

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


def log_engines(trainer: "Trainer", batch: Batch, replayed_logps: Tensor | None) -> None:
    """Rows of the pairs "engines" and "engines_replayed" of a batch that was just scored."""
    if batch.rollout_routes is None:
        return
    mask, guard = batch.completion_mask, trainer.rollouts.guard
    sync = {"sync_gap": guard.gap, "sync_tolerance": guard.tolerance} if guard else {}
    gap = logp_gap(batch.live_old_logps, batch.rollout_logps, mask)
    routes = change_facts(change_counts(batch.rollout_routes, batch.routes, mask, pair="engines"))
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
        **change_facts(change_counts(part.rollout_routes, routes, mask)),
    }
    trainer.log.append("engine", trainer.step, pair="rollout_to_new", update=update, **facts)
