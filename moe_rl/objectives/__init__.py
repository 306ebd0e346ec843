"""Log-probabilities and rewards -> advantages, ratios, loss. Pure torch functions; nothing here knows a model.

Reading order: `ratios`, `gates`, `objective`, `loss`, `presets`; then `advantages`, `corrections`, `kl`.
"""

from moe_rl.objectives.advantages import group_advantages
from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.loss import LossOutput, aggregate, policy_loss
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.presets import OBJECTIVES, get_objective
from moe_rl.objectives.ratios import sequence_log_ratio, token_log_ratio

__all__ = [
    "OBJECTIVES",
    "Correction",
    "LossOutput",
    "Objective",
    "aggregate",
    "get_objective",
    "group_advantages",
    "kl_estimate",
    "policy_loss",
    "sequence_log_ratio",
    "token_log_ratio",
]
