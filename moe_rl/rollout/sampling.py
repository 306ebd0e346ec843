"""Sampling from any model as one function, for whoever has no run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.engine import ModelEngine
from moe_rl.rollout.task import Problem


def sample(
    model: nn.Module,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    record: bool = False,
    max_batch: int | None = None,
) -> Rollout:
    """Sample `group_size` completions of each problem's prompt.

    Args:
        model: any Hugging Face causal language model; evaluated in `eval()` mode, its own mode is restored.
        tokenizer: its tokenizer.
        problems: one prompt each.
        group_size: completions per prompt (G); row `b` of the result answers problem `b // G`.
        max_new_tokens: length limit of a completion, the end token included.
        temperature: softmax(logits / temperature) is sampled from, and is what `logps` speak of; 0 takes the most
            probable token.
        generator: source of randomness (any device); None: torch's default one. One uniform number per row and
            position is drawn before decoding begins.
        record: record the experts that prefill and decoding chose.
        max_batch: completions decoded together; None decodes all at once.

    Returns:
        A `Rollout` on the model's device, without rewards (see `score`). Nothing in it requires grad.

    Raises:
        ValueError: an empty list of problems, an empty prompt, a prompt that leaves no room for `max_new_tokens` in the
            model's positions, a number that makes no sense.
    """
    engine = ModelEngine(model, tokenizer, max_batch)
    return engine.sample(
        problems,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
        record_routes=record,
    )
