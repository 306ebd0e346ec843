"""One loop for all methods; log-probabilities; probes; checkpoints."""

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
from moe_rl.training.logprobs import token_logps
from moe_rl.training.trainer import Trainer, train
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
    "Trainer",
    "ValueConfig",
    "token_logps",
    "train",
    "validate",
]
