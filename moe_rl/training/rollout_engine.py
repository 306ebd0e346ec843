"""The engine that a run samples with, and the watch over its weights (`moe_rl.training.weight_sync`)."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from moe_rl.rollout.engine import Engine, ModelEngine
from moe_rl.rollout.engines import gathered, make_engine
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
