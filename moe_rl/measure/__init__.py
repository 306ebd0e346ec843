"""Measurements for any model and any trainer: log-probabilities, ratios, changes of routes, decomposition."""

from moe_rl.measure.logprobs import TokenLogps, token_logps
from moe_rl.measure.packed_rows import unpacked
from moe_rl.measure.shared_prompts import SharedPrompts, share_prompts
from moe_rl.measure.shared_prompts_check import check_shared_prompts

__all__ = ["SharedPrompts", "TokenLogps", "check_shared_prompts", "share_prompts", "token_logps", "unpacked"]
