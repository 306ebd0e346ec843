"""One loop for all methods; log-probabilities; probes; checkpoints."""

from moe_rl.training.checkpoint import CheckpointError
from moe_rl.training.config import (
    EvalConfig,
    MethodConfig,
    OptimConfig,
    ProbeConfig,
    RolloutConfig,
    RunConfig,
    validate,
)
from moe_rl.training.logprobs import token_logps
from moe_rl.training.trainer import Trainer, train

__all__ = [
    "CheckpointError",
    "EvalConfig",
    "MethodConfig",
    "OptimConfig",
    "ProbeConfig",
    "RolloutConfig",
    "RunConfig",
    "Trainer",
    "token_logps",
    "train",
    "validate",
]
