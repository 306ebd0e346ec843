"""The plainest engine: a Hugging Face causal language model that samples by itself.

What an engine is stands in `engine_config`, those with weights and arithmetic of their own in `engines`; `sampling` has
this one as a function.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import token_logps
from moe_rl.rollout.chat import message_tokens
from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.continuing import extend
from moe_rl.rollout.engine_config import EXACT, NEVER, Engine, Tolerance, gathered
from moe_rl.rollout.sampler import UNWRITTEN, assemble, decode, decode_text, end_tokens, padding_token, positions
from moe_rl.rollout.task import Problem, token_ids

__all__ = ["EXACT", "NEVER", "Engine", "ModelEngine", "Tolerance", "forward_logps", "gathered"]


class ModelEngine:
    """A model that samples by itself: never stale, and no mismatch but that of cached decoding against one forward."""

    tolerance = EXACT

    def __init__(self, model: nn.Module, tokenizer: Any, max_batch: int | None = None):
        self.model, self.tokenizer, self.max_batch = model, tokenizer, max_batch
        self.version = NEVER

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        record_routes: bool = False,
    ) -> Rollout:
        """See `moe_rl.rollout.sample`, and `Engine.sample` for the routes."""
        check_request(problems, group_size, max_new_tokens, temperature, self.max_batch)
        device = next(self.model.parameters()).device
        prompts, prompt_mask = encode_prompts(self.tokenizer, problems)
        check_length(self.model, problems, prompt_mask, max_new_tokens)
        prompts, prompt_mask = prompts.to(device), prompt_mask.to(device)
        B, N = len(problems) * group_size, max_new_tokens
        source = "cpu" if generator is None else generator.device
        uniform = torch.rand(B, N, generator=generator, dtype=torch.float64, device=source).to(device)
        ends = end_tokens(self.model, self.tokenizer).to(device)
        prompt = torch.arange(B, device=device) // group_size

        tokens, logps, traces = decode(
            self.model, prompts, prompt_mask, prompt, uniform, ends, temperature, record_routes, self.max_batch
        )
        rollout = made_of(
            self.tokenizer, problems, group_size, prompts[prompt], prompt_mask[prompt], tokens, logps, ends
        )
        if record_routes:
            rollout = replace(rollout, routes=assemble(traces, rollout.input_ids, rollout.attention_mask))
        return rollout

    def extend(self, rollout: Rollout, **options: Any) -> Rollout:
        """Unfinished responses go on; `options` as in `moe_rl.rollout.continuing.extend`."""
        return extend(self.model, self.tokenizer, rollout, max_batch=self.max_batch, **options)

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Nothing to copy: `weights` are this model's own."""
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        return forward_logps(self.model, rollout, temperature)

    def close(self) -> None:
        pass


@torch.no_grad()
def forward_logps(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
    """Log-probabilities (nats) of a rollout's completion tokens under the model's own arithmetic, 0 elsewhere; on the
    rollout's device."""
    device = next(model.parameters()).device
    out = token_logps(model, *(x.to(device) for x in rollout.tokens), temperature=temperature)
    return out.logps.to(rollout.input_ids.device)


# -- prompts, completions ----------------------------------------------------------------------------------------------


def encode_prompts(tokenizer: Any, problems: Sequence[Problem]) -> tuple[Int[Tensor, "N P"], Bool[Tensor, "N P"]]:
    """Token ids and mask, left-padded whatever side the tokenizer pads on."""
    encoded = [
        list(token_ids(tokenizer, p.prompt)) if p.messages is None else message_tokens(tokenizer, p) for p in problems
    ]
    empty = [i for i, ids in enumerate(encoded) if not ids]
    if empty:
        raise ValueError(f"problem {empty[0]}: the prompt {problems[empty[0]].prompt!r} has no tokens")
    width = max(map(len, encoded))
    padding = padding_token(tokenizer)
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in encoded])
    lengths = torch.tensor([len(row) for row in encoded])
    return ids, torch.arange(width) >= width - lengths[:, None]


def check_request(
    problems: Sequence[Problem],
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    max_batch: int | None,
) -> None:
    """Raises ValueError for what cannot be sampled whatever the model."""
    if not problems:
        raise ValueError("problems: nothing to sample, the list is empty")
    for name, value in (
        ("group_size", group_size),
        ("max_new_tokens", max_new_tokens),
        ("max_batch", max_batch),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}: at least 1, got {value}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: 0 (greedy) or a positive number, got {temperature}")


def check_length(model: nn.Module, problems: Sequence[Problem], mask: Bool[Tensor, "P T"], max_new_tokens: int) -> None:
    """Raises ValueError for a prompt that leaves no room for `max_new_tokens` in the model's positions."""
    most, lengths, new = positions(model), mask.sum(1), max_new_tokens
    if most and int(lengths.max()) + new > most:
        longest = int(lengths.argmax())
        raise ValueError(
            f"a prompt of {int(lengths[longest])} tokens and {new} new ones (rollout.max_new_tokens) are more "
            f"than the {most} positions that the model has: {problems[longest].prompt[:80]!r}. Shorter prompts, fewer "
            "new tokens, or a model of longer context."
        )


def made_of(
    tokenizer: Any,
    problems: Sequence[Problem],
    group_size: int,
    prompts: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    tokens: Int[Tensor, "B M"],
    logps: Float[Tensor, "B M"],
    ends: Int[Tensor, " e"],
) -> Rollout:
    """The rollout of left-padded prompts and what was drawn after them (`UNWRITTEN` past a row's end), no routes."""
    written = tokens != UNWRITTEN
    B, P, N = len(tokens), prompts.shape[1], int(written.sum(1).max())
    tokens, written, logps = tokens[:, :N], written[:, :N], logps[:, :N]
    ended = torch.isin(tokens, ends)
    return Rollout(
        input_ids=torch.cat([prompts, tokens.masked_fill(~written, padding_token(tokenizer))], 1),
        attention_mask=torch.cat([prompt_mask, written], 1),
        completion_mask=F.pad(written, (P, 0)),
        logps=F.pad(logps, (P, 0)),
        rewards=torch.full((B,), float("nan"), device=tokens.device),
        finished=ended.any(1),
        group_size=group_size,
        problems=[problem for problem in problems for _ in range(group_size)],
        completions=decode_text(tokenizer, tokens, (written & ~ended).sum(1)),
    )
