"""Training: one loop for all methods, which collects responses, scores them, updates the policy and probes it."""

from moe_rl.training.checkpoint import CheckpointError
from moe_rl.training.config import (
    EvalConfig,
    MethodConfig,
    OptimConfig,
    ProbeConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ValueConfig,
)
from moe_rl.training.loop import resume, run, train
from moe_rl.training.setup import begin
from moe_rl.training.state import State
from moe_rl.training.validation import validate

__all__ = [
    "CheckpointError",
    "EvalConfig",
    "MethodConfig",
    "OptimConfig",
    "ProbeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "State",
    "ValueConfig",
    "begin",
    "resume",
    "run",
    "train",
    "validate",
]
