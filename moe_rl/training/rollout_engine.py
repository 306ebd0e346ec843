"""The engine that a run samples with, the watch over its weights (`moe_rl.training.weight_sync`), and how far from the
training engine it is."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.measure.metrics import change_metrics
from moe_rl.measure.peer_metrics import engine_metrics
from moe_rl.rollout.engine import Engine, ModelEngine
from moe_rl.rollout.engines import gathered, make_engine
from moe_rl.routing import change_counts
from moe_rl.training.batch import Batch
from moe_rl.training.config import RolloutConfig
from moe_rl.training.ranks import Ranks
from moe_rl.training.sharding import is_sharded
from moe_rl.training.weight_sync import SyncGuard, sync_probe


def build_engine(config: RolloutConfig, model: nn.Module, tokenizer: Any, ranks: Ranks) -> Engine:
    """The engine that the run names, made while `model` is not sharded; one of its own is whole on every rank."""
    engine = make_engine(config.engine, model, tokenizer, config.max_batch)
    if isinstance(engine, ModelEngine) and engine.model is not model:
        ranks.whole(engine.model)
    return engine


def guard_of(
    engine: Engine,
    config: RolloutConfig,
    model: nn.Module,
    tokenizer: Any,
    task: Any,
    max_new_tokens: int,
    ranks: Ranks,
) -> SyncGuard | None:
    """The watch over an engine that has weights of its own; None where the model itself samples.

    Raises:
        EngineError: see `SyncGuard`.
    """
    if config.engine.kind == "self":
        return None
    second = partial(make_engine, config.engine, model, tokenizer, config.max_batch, ranks.device)
    build: Callable[[], Engine] = getattr(engine, "renewed", second)
    if is_sharded(model):
        build = partial(rebuilt, engine, model)
    probe = sync_probe(engine, task, max_new_tokens, config.temperature)
    return SyncGuard(engine, model, probe, config.temperature, build, ranks.largest)


@torch.no_grad()
def rebuilt(engine: Any, model: nn.Module) -> Engine:
    """The engine of a sharded model, which cannot be copied, as if built anew: a copy whose every tensor is replaced by
    the model's, past the engine's own sync (whose rounding follows)."""
    fresh = copy.copy(engine)
    fresh.model = copy.deepcopy(engine.model)
    weights = model.state_dict()
    for name, tensor in fresh.model.state_dict().items():
        tensor.copy_(gathered(weights[name]))
    fresh._round_weights()
    return fresh


def engine_rows(
    batch: Batch, replayed_logps: Float[Tensor, "B T"] | None, guard: SyncGuard | None
) -> list[dict[str, Any]]:
    """How the engines of a batch compare whose rollout engine's routes were recorded: rows of kind "engine", one for
    each `pair`:

    - "engines"           mu -> pi_old, equal weights, live routing in both: what the engine alone does
    - "engines_replayed"  the same with the rollout's routes forced on pi_old: what is left of it under R3

    The last token of a response has no route of the engine's and counts in no change rate. Of a partial rollout only
    the tokens that the current weights wrote count: the others differ by more than the engine. Their replayed scores
    still follow older versions' routes at the tokens before them.
    """
    assert batch.rollout_routes is not None
    mask = batch.completion_mask
    if batch.versions is not None:
        mask = mask & (batch.versions == batch.step)
    sync = {"sync_gap": guard.gap, "sync_tolerance": guard.tolerance} if guard else {}
    changes = change_metrics(change_counts(batch.rollout_routes, batch.routes, mask, pair="engines"))
    gap = engine_metrics(batch.live_old_logps, batch.rollout_logps, mask)
    rows = [{"pair": "engines", "update": 0, **gap, **changes, **sync}]
    if replayed_logps is not None:
        gap = engine_metrics(replayed_logps, batch.rollout_logps, mask)
        rows.append({"pair": "engines_replayed", "update": 0, **gap})
    return rows
