"""The state of a run: its models, optimizers, waiting batches and the present step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_rl.rollout import Rollout, seeded_generator
from moe_rl.rollout.continuing import in_turns
from moe_rl.rollout.engine import Engine, ModelEngine
from moe_rl.runlog import RunLog
from moe_rl.training.batch import Batch
from moe_rl.training.config import OF_SAMPLER, RunConfig
from moe_rl.training.critic import Critic
from moe_rl.training.levers import ExpertBias
from moe_rl.training.method import Method
from moe_rl.training.predictor import RoutePredictor
from moe_rl.training.ranks import Ranks
from moe_rl.training.reward_model import RewardModel
from moe_rl.training.rollout_engine import SyncGuard
from moe_rl.training.scorers import Scorer

Listener = Callable[[dict[str, Any]], None]


@dataclass
class State:
    """The state of one run: its settings, its models with their optimizers, the waiting batches, and the present step.

    Attributes:
        policy: the model that is trained, in the wrapper of the run's strategy (DDP, FSDP2) if any.
        reference: the frozen reference policy of a KL term or of DPO; None if the method has none.
        initial: the policy that the run began with, if the method learns from its responses; else None.
        engine: the engine that samples the policy's responses in training (`rollout.engine`).
        sync_guard: the checks of weight transfers to `engine`; None if the policy itself samples.
        max_new_tokens: length limit of a response, in tokens.
        scorers: what is computed about a rollout besides the old policy's pass; empty for plain GRPO.
        expert_bias: the selection bias of `optim.expert_bias_rate`; None if that is 0.
        predictor: the predictor of the routes under which responses are sampled (`method.replay: PR2`), else None.
        waiting: scored batches that were not yet trained on; more than one under `rollout.lag`.
        drafts: batches whose responses are not finished, oldest first (`rollout.segment`).
        step: number of RL steps done.
    """

    config: RunConfig
    folder: Path
    ranks: Ranks
    log: RunLog
    task: Any
    tokenizer: Any
    method: Method
    max_new_tokens: int
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine
    sync_guard: SyncGuard | None = None
    reference: nn.Module | None = None
    initial: nn.Module | None = None
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    scorers: tuple[Scorer, ...] = ()
    expert_bias: ExpertBias | None = None
    predictor: RoutePredictor | None = None
    waiting: deque[Batch] = field(default_factory=deque)
    drafts: deque[Rollout] = field(default_factory=deque)
    step: int = 0

    @property
    def frozen(self) -> dict[str, nn.Module]:
        """The models that are not trained (reference, initial policy), by name."""
        kept = {"reference": self.reference, "initial": self.initial}
        return {name: module for name, module in kept.items() if module is not None}

    @property
    def trained(self) -> dict[str, tuple[nn.Module, Any]]:
        """The models that are trained, unwrapped, by name, each with its optimizer."""
        found: dict[str, tuple[nn.Module, Any]] = {"model": (self.policy, self.optimizer)}
        if self.critic:
            found["value"] = (self.critic.model, self.critic.optimizer)
        if self.reward_model:
            found["reward"] = (self.reward_model.model, self.reward_model.optimizer)
        return {name: (self.ranks.unwrap_model(m), optimizer) for name, (m, optimizer) in found.items()}

    @property
    def records_routes(self) -> bool:
        """Whether the routes by which the policy's responses are sampled must be recorded."""
        compared = self.config.rollout.scoring == "decoding" or self.sync_guard is not None
        return (compared or self.config.method.replay in OF_SAMPLER) and self.method.source == "policy"

    def self_engine(self, model: nn.Module | None = None) -> Engine:
        """Return an engine in which the current policy, or `model`, samples by itself, whatever `rollout.engine` is."""
        model = self.ranks.unwrap_model(self.policy) if model is None else model
        engine = ModelEngine(model, self.tokenizer, self.config.rollout.max_batch)
        return in_turns(engine, self.task, self.tokenizer, self.config.task.verifier_seconds)

    def generator(self, purpose: str, index: int = 0) -> torch.Generator:
        """Return a random generator for one purpose at the current step, the same in every arm (`seeded_generator`)."""
        return seeded_generator(self.config.seed, purpose, self.step, index)

    def close(self) -> None:
        """End the run: finish the tracker, if there is one, and close the rollout engine."""
        try:
            for tracker in self.ranks.trackers:
                tracker.finish()
        finally:  # also if a tracker fails, because an engine may hold a GPU or processes
            self.engine.close()
