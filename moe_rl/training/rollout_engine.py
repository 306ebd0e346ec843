"""The engine that a run samples with, the watch over its weights, and how far from the training engine it is.

Weight sync proves itself: the rollout engine holds the policy that it is said to hold, or the run stops. A wrong sync
is silent: the engine samples fluently from other weights, and the method gets the blame. Hence

1. at start-up, with the weights that the engine has just been loaded with, its log-probabilities on a fixed small batch
   are compared with the training model's: their mean absolute gap is the engine's own disagreement, and the tolerance;
2. still at start-up, one tensor at a time (all of them, or at least one of each kind) is changed, until the training
   model's log-probabilities move by more than the two disagree, and synced: if the engine's do not move beyond what two
   calls differ by, that tensor does not arrive, and its name is known. Then the true weights are synced, which must
   give back what was loaded: tensors that arrive in another's place do not;
3. after every sync the gap on the same batch must stay within the tolerance. A few routers that flip at near-ties can
   take it beyond by themselves; so before the run is stopped, an engine is built anew from the policy's weights. If it
   says what the synced one says, the sync was right and the gap is the engine's arithmetic.
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
PROBED_TENSORS = 128  # more are thinned out to one of each kind, as are all where a sync is slow
DISTURBANCES = (1, 4, 16, 64, 256, 1024)
"""Sizes of a disturbance of a tensor, in its root mean square."""
FACTOR = 6.0
"""How much the gap may grow over that of start-up before it counts as a wrong sync: the policy moves, and with it how
sharp its distributions are and how near to a tie its routers."""


def build_engine(config: RolloutConfig, model: nn.Module, tokenizer: Any, ranks: Ranks) -> Engine:
    """The engine that the run names, made while `model` is not sharded; one of its own is whole on every rank."""
    engine = make_engine(config.engine, model, tokenizer, config.max_batch)
    if isinstance(engine, ModelEngine) and engine.model is not model:
        ranks.whole(engine.model)
    return engine


# -- the watch over its weights ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class SyncGuard:
    """An engine, and what is needed to know that its weights are the training model's. It is made while `model` and
    `engine` hold the same weights: it calibrates and tests the sync.

    Attributes:
        engine: what samples.
        build: makes such an engine anew, or this one.
        worst: the largest of what several ranks found, each with an engine of its own, so that all find the same.
        batch_size: responses of the probe that one call scores, None: all.
        gap: mean absolute difference of the two log-probabilities on the probe at the last sync, nats per token; of the
            worst rank.
        tolerance: what `gap` may be; nats per token.

    Raises:
        EngineError: the two disagree by more than the engine's `tolerance` allows; a tensor does not arrive.
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
        """Bring the engine to the training model's weights and compare.

        Raises:
            EngineError: the gap is beyond the tolerance, or not a number, and an engine built anew does not have it.
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
        """Whether an engine that never was synced says the same, up to what two calls of one engine differ by."""
        fresh = self.build()
        try:
            same = self._largest(self._in_parts(fresh.logps), synced) <= 2 * self.noise  # not if NaN
            return not self.worst(float(not same))
        finally:
            if fresh is not self.engine:
                fresh.close()

    @torch.no_grad()
    def _test(self, loaded: Tensor) -> None:
        """Each tensor is disturbed until the training model says something that the engine can tell, and synced."""
        generator = torch.Generator().manual_seed(0)
        before = self._model_logps()
        self.noise = self._largest(self._engine_logps(), loaded)  # 0 where kernels are deterministic
        told = self.worst(max(self._largest(self._model_logps(), before), self._largest(loaded, before)))
        silent = []
        weights = self.model.state_dict()
        most = 0 if getattr(self.engine, "slow_sync", False) else PROBED_TENSORS
        for name in probed_tensors(weights, most):
            tensor = weights[name]
            kept = tensor.clone()
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            noise = as_placed(noise, tensor) * tensor.float().square().mean().sqrt().clamp(min=1e-3)
            still = False  # at every disturbance that the training model tells: one expert that flips is not enough
            try:
                # What does not move the training model either (an adapter whose other half is 0) proves nothing.
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
                f"weight sync: {count} of the tensors tried do not reach the rollout engine{which}: changed and "
                "synced, they moved no log-probability"
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
        return torch.cat([logps(self.probe.rows(rows), self.temperature) for rows in self.parts])

    def _largest(self, a: Tensor, b: Tensor) -> float:
        return float((a - b)[self.probe.completion_mask].abs().max())

    def _distance(self, a: Tensor, b: Tensor) -> float:
        return float((a - b)[self.probe.completion_mask].abs().mean())


def sync_probe(engine: Engine, task: Any, max_new_tokens: int, temperature: float) -> Rollout:
    """The fixed batch: a few prompts of the task with one sampled completion each, the same whenever a run begins."""
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
    """Which tensors the start-up test changes: all floating ones, or where those are more than `most`, for each kind (a
    name with its numbers left out) one, at a depth that differs from kind to kind.

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
    """The watch over an engine that has weights of its own; None where the model itself samples. `batch_size`: see
    `SyncGuard`.

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
    """The engine of a sharded model, which cannot be copied, as if built anew: a copy whose every tensor is replaced by
    the model's, past the engine's own sync (whose rounding follows).

    Raises EngineError for an engine of another class: how it holds its weights is not known.
    """
    if not isinstance(engine, HuggingFaceEngine):
        raise EngineError(
            f"weight sync {engine.version}: whether the gap is the engine's arithmetic is told by one made anew, and "
            f"of a sharded model {type(engine).__name__} cannot be made a second time: give it a method renewed()"
        )
    fresh = copy.copy(engine)
    fresh.model = copy.deepcopy(engine.model)
    weights = model.state_dict()
    for name, tensor in fresh.model.state_dict().items():
        tensor.copy_(gathered(weights[name]))
    fresh._round_weights()
    return fresh


# -- how far from the training engine ----------------------------------------------------------------------------------


def from_engine(
    batch: Batch, logps: Float[Tensor, "B T"], routes: RoutedExperts, mask: Bool[Tensor, "B T"]
) -> dict[str, Any]:
    """How far log-probabilities and routes of a batch's responses are from those of the engine that sampled them."""
    assert batch.rollout_routes is not None
    changes = change_metrics(change_counts(batch.rollout_routes, routes, mask))
    return {**engine_metrics(logps, batch.rollout_logps, mask), **changes}


def engine_rows(
    batch: Batch, replayed_logps: Float[Tensor, "B T"] | None, guard: SyncGuard | None
) -> list[dict[str, Any]]:
    """How the engines of a batch compare whose rollout engine's routes were recorded: rows of kind "engine", one for
    each `pair`:

    - "engines"           mu -> pi_old, equal weights, live routing in both: what the engine alone does (PR2: what the
                          predicted routes do)
    - "engines_replayed"  the same with the rollout's routes forced on pi_old: what is left of it under R3

    The last token of a response has no route of the engine's and counts in no change rate. Of a partial rollout only
    the tokens that the current weights wrote count: the others differ by more than the engine. Their replayed scores
    still follow older versions' routes at the tokens before them.

    Raises:
        RoutingError: the engine's routes are shifted by one token.
    """
    assert batch.rollout_routes is not None
    refuse_shifted(batch.rollout_routes, batch.routes, batch.attention_mask)
    mask = batch.completion_mask
    if batch.versions is not None:
        mask = mask & (batch.versions == batch.step)
    sync = {"sync_gap": guard.gap, "sync_tolerance": guard.tolerance} if guard else {}
    rows = [{"pair": "engines", "update": 0, **from_engine(batch, batch.live_old_logps, batch.routes, mask), **sync}]
    if replayed_logps is not None:
        gap = engine_metrics(replayed_logps, batch.rollout_logps, mask)
        rows.append({"pair": "engines_replayed", "update": 0, **gap})
    return rows
