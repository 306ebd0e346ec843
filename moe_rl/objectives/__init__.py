"""Advantages, importance ratios and losses, as pure torch functions of rewards and log-probabilities, without a model.

Reading order: `ratios`, `gates`, `other_gates`, `divergence`, `objective`, `presets`, `loss`,
`diagnostics`; then `advantages`, `other_advantages`, `corrections`, `kl`, `gae` (PPO), `preferences` (DPO, reward
models), and `gradient`, which shows what a method does to each token.
"""

from moe_rl.objectives.advantages import group_advantages
from moe_rl.objectives.corrections import (
    Correction,
    binary_kl_mask,
    geometric_mask,
    off_policy_sequence_mask,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
)
from moe_rl.objectives.diagnostics import LOSS_METRICS
from moe_rl.objectives.gae import generalized_advantages, token_rewards, value_loss, whiten
from moe_rl.objectives.gates import GATES, Gate, Gated, GateInputs, TokenValues, gate
from moe_rl.objectives.gradient import TokenWeights, token_weights
from moe_rl.objectives.kl import kl_estimate
from moe_rl.objectives.loss import LossOutput, loss_metrics, policy_loss
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.other_advantages import (
    accepted_advantages,
    decoupled_advantages,
    leave_one_out_advantages,
    process_advantages,
)
from moe_rl.objectives.preferences import (
    dpo_coefficients,
    dpo_loss,
    historical_sample,
    reward_model_loss,
    sequence_margin,
)
from moe_rl.objectives.presets import OBJECTIVES, PRESETS, Preset, get_objective
from moe_rl.objectives.ratios import aggregation_weights, sequence_log_ratio, token_log_ratio

__all__ = [
    "GATES",
    "LOSS_METRICS",
    "OBJECTIVES",
    "PRESETS",
    "Correction",
    "Gate",
    "GateInputs",
    "Gated",
    "LossOutput",
    "Objective",
    "Preset",
    "TokenValues",
    "TokenWeights",
    "accepted_advantages",
    "aggregation_weights",
    "binary_kl_mask",
    "decoupled_advantages",
    "dpo_coefficients",
    "dpo_loss",
    "gate",
    "generalized_advantages",
    "geometric_mask",
    "get_objective",
    "group_advantages",
    "historical_sample",
    "kl_estimate",
    "leave_one_out_advantages",
    "loss_metrics",
    "off_policy_sequence_mask",
    "policy_loss",
    "process_advantages",
    "reward_model_loss",
    "sequence_log_ratio",
    "sequence_margin",
    "sequence_mask",
    "sequence_truncate",
    "token_log_ratio",
    "token_mask",
    "token_rewards",
    "token_truncate",
    "token_weights",
    "value_loss",
    "whiten",
]
