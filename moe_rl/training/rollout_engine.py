"""The rollout engine of a run, the checks of its weight sync, and its difference from the training engine.

A wrong weight sync is silent: the engine samples fluently from other weights, and the method gets the blame. Therefore
every sync is checked, and the run stops if the rollout engine does not hold the policy's weights:

1. At start-up, with the weights that the engine has just been loaded with, its log-probabilities on a fixed small batch
   (the sync probe) are compared with the training model's. Their mean absolute gap is the engine's own disagreement,
   from which the tolerance is set.
2. Still at start-up, one tensor at a time (all tensors, or at least one of each kind) is changed, until the training
   model's log-probabilities move by more than the two engines disagree, and synced. If the rollout engine's then move
   by no more than two of its calls differ, that tensor does not arrive; the error names it. Then the true weights are
   synced, which must restore the first log-probabilities; this fails if tensors arrive in the place of others.
3. After every sync the gap on the same batch must stay within the tolerance. A few routers that flip at near-ties can
   exceed it by themselves; so before the run is stopped, an engine is built anew from the policy's weights. If its
   log-probabilities are those of the synced engine, the sync was right and the gap is due to the engine's arithmetic.
"""

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_rl.measure.engine_routes import refuse_shifted
from moe_rl.measure.metrics import change_metrics
from moe_rl.measure.peer_metrics import engine_metrics
from moe_rl.rollout import Rollout
from moe_rl.rollout.engine import Engine, ModelEngine, forward_logps
from moe_rl.rollout.engines import EngineError, HuggingFaceEngine, gathered, make_engine
from moe_rl.rollout.task import problems_of
from moe_rl.routing import RoutedExperts, change_counts
from moe_rl.training.batch import Batch
from moe_rl.training.config import RolloutConfig
from moe_rl.training.ranks import Ranks
from moe_rl.training.sharding import as_placed, is_sharded

PROBE_PROBLEMS = 8
PROBED_TENSORS = 128  # of more tensors, or if a sync is slow, only one of each kind is tested
DISTURBANCES = (1, 4, 16, 64, 256, 1024)
"""Sizes of the disturbances of a tensor, in units of its root mean square."""
FACTOR = 6.0
"""Factor by which the gap may exceed that of start-up before it counts as a wrong sync. The gap changes with the
policy, whose distributions become sharper or flatter and whose routers come nearer to ties or further from them."""


def build_engine(config: RolloutConfig, model: nn.Module, tokenizer: Any, ranks: Ranks) -> Engine:
    """Return the engine that the configuration names; if it has a model of its own, every rank holds that model whole.

    model: the training model, not yet sharded."""
    engine = make_engine(config.engine, model, tokenizer, config.max_batch)
    if isinstance(engine, ModelEngine) and engine.model is not model:
        ranks.whole(engine.model)
    return engine


# -- checks of the weight sync -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class SyncGuard:
    """A rollout engine with the checks that its weights are the training model's.

    It must be made while `model` and `engine` hold the same weights, because it then calibrates and tests the sync.

    Attributes:
        engine: the engine that samples.
        build: returns an engine built anew, either another one or `engine` itself.
        worst: returns the largest of the numbers that ranks pass, so that ranks with engines of their own act alike.
        batch_size: responses of the probe that one call scores; None: all.
        gap: mean absolute difference of log-probabilities between engine and model on the probe at the last sync, nats
            per token, on the worst rank.
        tolerance: the largest `gap` that is allowed; nats per token.

    Raises:
        EngineError: engine and model disagree by more than the engine's `tolerance` allows; a tensor does not arrive,
            or arrives in another's place.
    """

    engine: Engine
    model: nn.Module
    probe: Rollout
    temperature: float
    build: Callable[[], Engine]
    worst: Callable[[float], float] = float
    batch_size: int | None = None

    def __post_init__(self) -> None:
        self.parts = torch.arange(len(self.probe)).split(self.batch_size or len(self.probe))
        loaded = self._engine_logps()
        self.gap = self.worst(self._distance(loaded, self._model_logps()))
        if not self.gap <= self.engine.tolerance.most:
            raise EngineError(
                f"the rollout engine disagrees with the training model by {self.gap:.3g} nats per token on the weights "
                f"that it was just loaded with; its arithmetic explains at most {self.engine.tolerance.most:g}. Other "
                "weights, another temperature, processed instead of raw log-probabilities, or another chat template "
                "or tokenizer?"
            )
        self.tolerance = max(FACTOR * self.gap, self.engine.tolerance.least)
        self._test(loaded)

    def sync(self, version: int) -> None:
        """Copy the training model's weights to the engine, and check that they arrived.

        Raises:
            EngineError: the gap is beyond the tolerance, or NaN, and an engine built anew does not have it.
        """
        self.engine.sync(self.model.state_dict(), version)
        synced = self._engine_logps()
        self.gap = self.worst(self._distance(synced, self._model_logps()))
        if not self.gap <= self.tolerance and not self._as_built_anew(synced):
            raise EngineError(
                f"weight sync {version}: afterwards the rollout engine and the training model differ by {self.gap:.3g} "
                f"nats per token on the sync probe (mean absolute), tolerance {self.tolerance:.3g} as calibrated at "
                "start-up, and from an engine built anew: the engine does not hold the policy's weights. Tensors that "
                "are skipped or land in another's place, or a cache that outlived them?"
            )

    def _as_built_anew(self, synced: Tensor) -> bool:
        """Return whether an engine built anew, hence never synced, gives the same log-probabilities, up to noise."""
        fresh = self.build()
        try:
            same = self._largest(self._in_parts(fresh.logps), synced) <= 2 * self.noise  # False for NaN
            return not self.worst(float(not same))
        finally:
            if fresh is not self.engine:
                fresh.close()

    @torch.no_grad()
    def _test(self, loaded: Tensor) -> None:
        """Raise EngineError if a change of a tested tensor that moves the model does not reach the engine, or if the
        weights that were loaded cannot be restored."""
        generator = torch.Generator().manual_seed(0)
        before = self._model_logps()
        self.noise = self._largest(self._engine_logps(), loaded)  # 0 with deterministic kernels
        told = self.worst(max(self._largest(self._model_logps(), before), self._largest(loaded, before)))
        silent = []
        weights = self.model.state_dict()
        most = 0 if getattr(self.engine, "slow_sync", False) else PROBED_TENSORS
        for name in probed_tensors(weights, most):
            tensor = weights[name]
            kept = tensor.clone()
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            noise = as_placed(noise, tensor) * tensor.float().square().mean().sqrt().clamp(min=1e-3)
            still = False  # unmoved by all disturbances that move the model; one may only flip an expert
            try:
                # A tensor that does not move the training model (an adapter whose other half is 0) proves nothing.
                for scale in DISTURBANCES:
                    tensor.copy_(kept).add_(noise, alpha=scale)
                    if self.worst(self._largest(self._model_logps(), before)) > told:
                        self.engine.sync(self.model.state_dict(), self.engine.version)
                        still = self._largest(self._engine_logps(), loaded) <= self.noise
                        if not self.worst(float(still)):
                            break
            finally:
                tensor.copy_(kept)
            if still:
                silent.append(name)
        if count := int(self.worst(float(len(silent)))):
            which = f", first {', '.join(silent[:3])}" if silent else " of another rank"
            raise EngineError(
                f"weight sync: {count} of the tensors tried do not reach the rollout engine{which}: after each was "
                "changed and synced, the engine gave unchanged log-probabilities. Does sync() copy all of them?"
            )
        self.engine.sync(self.model.state_dict(), self.engine.version)
        back = self.worst(self._distance(self._engine_logps(), loaded))
        if not back <= self.tolerance / FACTOR:
            raise EngineError(
                "weight sync: after syncing the weights that the rollout engine was loaded with, its log-probabilities "
                f"are {back:.3g} nats per token away from those of before. Tensors that land in another's place?"
            )

    def _engine_logps(self) -> Tensor:
        return self._in_parts(self.engine.logps)

    def _model_logps(self) -> Tensor:
        self.model.eval()
        return self._in_parts(partial(forward_logps, self.model))

    def _in_parts(self, logps: Callable[[Rollout, float], Tensor]) -> Tensor:
        """Return log-probabilities of the probe, computed in parts of `batch_size` responses."""
        return torch.cat([logps(self.probe.rows(rows), self.temperature) for rows in self.parts])

    def _largest(self, a: Tensor, b: Tensor) -> float:
        """Return the largest absolute difference over completion tokens of the probe, nats."""
        return float((a - b)[self.probe.completion_mask].abs().max())

    def _distance(self, a: Tensor, b: Tensor) -> float:
        """Return the mean absolute difference over completion tokens of the probe, nats."""
        return float((a - b)[self.probe.completion_mask].abs().mean())


def sync_probe(engine: Engine, task: Any, max_new_tokens: int, temperature: float) -> Rollout:
    """Return the fixed batch for sync checks: a few prompts of the task, one completion each, with fixed seeds."""
    rng = random.Random("sync-probe")
    return engine.sample(
        problems_of(task, rng, PROBE_PROBLEMS),
        group_size=1,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
        record_routes=False,
    )


def probed_tensors(weights: dict[str, Tensor], most: int = PROBED_TENSORS) -> list[str]:
    """Return the names of the tensors that the start-up test changes: all floating ones, if there are at most `most`.

    Otherwise one is taken of each kind (a name with its numbers left out), at a depth that differs from kind to kind.

    >>> probed_tensors({"h.0.w": torch.ones(1), "h.1.w": torch.ones(1), "steps": torch.ones(1, dtype=torch.int64)})
    ['h.0.w', 'h.1.w']
    """
    floating = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    if len(floating) <= most:
        return floating
    kinds: dict[str, list[str]] = {}
    for name in floating:
        kinds.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return [names[index % len(names)] for index, names in enumerate(sorted(kinds.values(), key=len))]


def guard_of(
    engine: Engine,
    config: RolloutConfig,
    model: nn.Module,
    tokenizer: Any,
    task: Any,
    max_new_tokens: int,
    ranks: Ranks,
    batch_size: int | None = None,
) -> SyncGuard | None:
    """Return the `SyncGuard` of an engine that has weights of its own; None if the training model itself samples.

    batch_size: see `SyncGuard`.

    Raises:
        EngineError: see `SyncGuard`.
    """
    if config.engine.kind == "self":
        return None
    second = partial(make_engine, config.engine, model, tokenizer, config.max_batch, ranks.device)
    anew = partial(rebuilt, engine, model) if is_sharded(model) else second
    build: Callable[[], Engine] = getattr(engine, "renewed", anew)
    probe = sync_probe(engine, task, max_new_tokens, config.temperature)
    return SyncGuard(engine, model, probe, config.temperature, build, ranks.largest, batch_size)


@torch.no_grad()
def rebuilt(engine: Engine, model: nn.Module) -> Engine:
    """Return a copy of a Hugging Face engine with the weights of a sharded model, as if the engine were built anew.

    A sharded model cannot be copied. So the engine is copied, and every tensor is replaced by that of the model,
    without the engine's own sync; then the weights are rounded as the engine rounds them.

    Raises EngineError for an engine of another class, since it is not known how it holds its weights.
    """
    if not isinstance(engine, HuggingFaceEngine):
        raise EngineError(
            f"weight sync {engine.version}: the rollout engine differs from the training model by more than the "
            "tolerance. Only an engine built anew could show whether its arithmetic is the reason, and with a sharded "
            f"model no second {type(engine).__name__} can be built: give the class a method renewed() that returns an "
            "engine built anew (docs/extending.md)"
        )
    fresh = copy.copy(engine)
    fresh.model = copy.deepcopy(engine.model)
    weights = model.state_dict()
    for name, tensor in fresh.model.state_dict().items():
        tensor.copy_(gathered(weights[name]))
    fresh._round_weights()
    return fresh


# -- difference from the training engine -------------------------------------------------------------------------------


def engine_gaps(
    batch: Batch, logps: Float[Tensor, "B T"], routes: RoutedExperts, mask: Bool[Tensor, "B T"]
) -> dict[str, Any]:
    """Return how far log-probabilities and routes of a batch are from those of the engine that sampled the batch."""
    assert batch.rollout_routes is not None
    changes = change_metrics(change_counts(batch.rollout_routes, routes, mask))
    return {**engine_metrics(logps, batch.rollout_logps, mask), **changes}


def engine_rows(
    batch: Batch, replayed_logps: Float[Tensor, "B T"] | None, guard: SyncGuard | None
) -> list[dict[str, Any]]:
    """Return rows of kind "engine" that compare rollout engine and training engine on a batch with recorded routes.

    There is one row for each `pair`:

    - "engines"           mu -> pi_old, equal weights, live routing in both: the effect of the engine alone (PR2: of the
                          predicted routes)
    - "engines_replayed"  the same with the rollout's routes forced on pi_old: the part of the effect left under R3

    The last token of a response has no route from the engine and counts in no change rate. In a partial rollout only
    the tokens that the current weights wrote count, since the others differ by more than the engine. The replayed
    scores of the counted tokens still follow older versions' routes at the tokens before them.

    Raises:
        RoutingError: the engine's routes are shifted by one token.
    """
    assert batch.rollout_routes is not None
    refuse_shifted(batch.rollout_routes, batch.routes, batch.attention_mask)
    mask = batch.completion_mask
    if batch.versions is not None:
        mask = mask & (batch.versions == batch.step)
    sync = {"sync_gap": guard.gap, "sync_tolerance": guard.tolerance} if guard else {}
    rows = [{"pair": "engines", "update": 0, **engine_gaps(batch, batch.live_old_logps, batch.routes, mask), **sync}]
    if replayed_logps is not None:
        gap = engine_metrics(replayed_logps, batch.rollout_logps, mask)
        rows.append({"pair": "engines_replayed", "update": 0, **gap})
    return rows
