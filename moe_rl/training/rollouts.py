"""Who samples in a run: the engine of `rollout.engine`, kept at the policy's weights; what replay R3 needs of it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from moe_rl.rollout import Rollout
from moe_rl.rollout.engines import Engine, ModelEngine, gathered, make_engine
from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.training.sharding import is_sharded
from moe_rl.training.weight_sync import SyncGuard, sync_probe

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


class Rollouts:
    """The policy's responses, sampled by the engine that the run names.

    Args:
        trainer: with its model as it trains.
        engine: see `rollout_engine`.

    Attributes:
        records: whether the engine's routes are recorded: for R3, and wherever two engines are to be compared.
        guard: the watch over weight syncs; None where the training model samples itself.
    """

    def __init__(self, trainer: "Trainer", engine: Engine):
        config = trainer.config.rollout
        self.trainer, self.engine = trainer, engine
        self.records = config.engine.kind != "self" or trainer.config.method.replay == "R3"
        ranks = trainer.accelerator
        model = ranks.unwrap_model(trainer.model)
        build: Callable[[], Engine] = partial(
            make_engine, config.engine, model, trainer.tokenizer, config.max_batch, ranks.device
        )
        if is_sharded(model):
            build = partial(rebuilt, engine, model)
        self.guard: SyncGuard | None = None
        if config.engine.kind != "self":
            probe = sync_probe(self.engine, trainer.task, trainer.budget, config.temperature)
            self.guard = SyncGuard(self.engine, model, config.engine, probe, config.temperature, build, ranks.largest)

    def sample(self, problems: list[Any], generator: torch.Generator) -> Rollout:
        """Responses of the current policy, G per problem. The engine is synced first if the policy has moved.

        Raises:
            EngineError: the engine does not hold the policy's weights.
            RoutingError: recorded routes with holes, see `check_rollout_routes`.
        """
        trainer, config = self.trainer, self.trainer.config.rollout
        if self.guard and self.engine.version != trainer.step:
            self.guard.sync(trainer.step)
        rollout = self.engine.sample(
            problems,
            group_size=config.group_size,
            max_new_tokens=trainer.budget,
            temperature=config.temperature,
            generator=generator,
            record_routes=self.records,
        )
        if self.records:
            check_rollout_routes(rollout)
        return rollout


def rollout_engine(trainer: "Trainer", model: nn.Module) -> Engine:
    """The engine that the run names, made while `model` is not sharded; one of its own is whole on every rank."""
    config = trainer.config.rollout
    engine = make_engine(config.engine, model, trainer.tokenizer, config.max_batch)
    if isinstance(engine, ModelEngine) and engine.model is not model:
        trainer.accelerator.whole(engine.model)
    return engine


@torch.no_grad()
def rebuilt(engine: Any, model: nn.Module) -> Engine:
    """The engine of a sharded model, which cannot be copied, as if built anew: a copy whose every tensor is replaced by
    the model's, past the engine's own sync (whose rounding of routers follows)."""
    fresh = copy.copy(engine)
    fresh.model = copy.deepcopy(engine.model)
    weights = model.state_dict()
    for name, tensor in fresh.model.state_dict().items():
        tensor.copy_(gathered(weights[name]))
    fresh._round_routers()
    return fresh


def unrouted_tokens(attention_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Tokens of a rollout that have no route by right: padding, and each row's last token, which was sampled and never
    fed back.

    >>> unrouted_tokens(torch.tensor([[False, True, True, False]])).int().tolist()
    [[1, 0, 1, 1]]
    """
    later = attention_mask.flip(1).cumsum(1).flip(1) > 1
    return ~(attention_mask & later)


def check_rollout_routes(rollout: Rollout) -> RoutedExperts:
    """The rollout's routes, after a check that exactly the tokens of `unrouted_tokens` lack them, at every site.

    Raises:
        RoutingError: no routes at all; holes where the engine must have routed; routes where nothing was routed.
    """
    routes = rollout.routes
    if routes is None:
        raise RoutingError("the rollout engine gave no routes, which replay R3 and the comparison of engines need")
    expected = unrouted_tokens(rollout.attention_mask.bool())[:, :, None].expand(routes.shape[:3]).to(routes.device)
    wrong = routes.live != expected
    if bool(wrong.any()):
        b, t, site = wrong.nonzero()[0].tolist()
        raise RoutingError(
            f"routes of the rollout engine: {int(wrong.sum())} of {wrong.numel()} (token, site) rows are not as they "
            f"should be; first: sequence {b}, token {t}, site {routes.sites[site]} "
            f"{'has no route' if bool(routes.live[b, t, site]) else 'has a route, and is padding or a last token'}. "
            "Prompt tokens need the routes of prefill (prefix caching may drop them), sampled ones those of decoding"
        )
    return routes
