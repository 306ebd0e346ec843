"""Tensors to numbers, for any model and anybody's trainer: log-probabilities, ratios, changes, decomposition."""

from moe_rl.measure.logprobs import TokenLogps, token_logps

__all__ = ["TokenLogps", "token_logps"]
