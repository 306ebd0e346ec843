"""The simplest rollout engine: a Hugging Face causal language model that samples by itself.

The engine decodes with a KV cache and one prefill per prompt; finished sequences leave the batch. Every token's
log-probability is kept and, if asked for, the experts that decoding chose. `generate()` would repeat the prefill G
times, decode every sequence to the longest one's end, and draw randomness that depends on the batch. Here the random
numbers of a sequence depend on its row alone, so that neither compaction nor chunking changes what is sampled (up to
the differences that another batch shape makes in the model's own arithmetic).

`engine_config` has the protocol of an engine, `engines` the engines with weights and arithmetic of their own. The
function `sample` uses the engine of this module without a run.
"""

import hashlib
import inspect
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import evaluating, hf_model, token_logps
from moe_rl.rollout.completions import (
    UNWRITTEN,
    CallPlace,
    Rollout,
    Trace,
    assemble,
    check_length,
    encode_prompts,
    end_tokens,
    rollout_from_tokens,
)
from moe_rl.rollout.engine_config import EXACT, NEVER, Engine, Tolerance, gathered
from moe_rl.rollout.task import Problem, shortened
from moe_rl.routing import record_routes
from moe_rl.routing.calls import cache_left, cache_name

__all__ = ["EXACT", "NEVER", "Engine", "ModelEngine", "Tolerance", "forward_logps", "gathered"]

COMPACT_SHARE = 0.25  # finished sequences leave the batch when they are this share of it


class ModelEngine:
    """An engine in which a Hugging Face model samples by itself. If that is the training model, its weights are never
    stale, and its log-probabilities differ from those of training only as cached decoding differs from one forward."""

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
        """Sample completions of each problem; see `moe_rl.rollout.sample`, and `Engine.sample` for the routes."""
        check_request(problems, group_size, max_new_tokens, temperature, self.max_batch)
        device = next(self.model.parameters()).device
        prompts, prompt_mask = encode_prompts(self.tokenizer, problems)
        check_length(self.model, problems, prompt_mask.sum(1), max_new_tokens)
        prompts, prompt_mask = prompts.to(device), prompt_mask.to(device)
        B, N = len(problems) * group_size, max_new_tokens
        source = "cpu" if generator is None else generator.device
        uniform = torch.rand(B, N, generator=generator, dtype=torch.float64, device=source).to(device)
        ends = end_tokens(self.model, self.tokenizer).to(device)
        prompt = torch.arange(B, device=device) // group_size

        tokens, logps, traces = self.decode(prompts, prompt_mask, prompt, uniform, ends, temperature, record_routes)
        rollout = rollout_from_tokens(
            self.tokenizer, problems, group_size, prompts[prompt], prompt_mask[prompt], tokens, logps, ends
        )
        if record_routes:
            rollout = replace(rollout, routes=assemble(traces, rollout.input_ids, rollout.attention_mask))
        return rollout

    def decode(
        self,
        prompts: Int[Tensor, "N P"],
        prompt_mask: Bool[Tensor, "N P"],
        prompt: Int[Tensor, " B"],
        uniform: Float[Tensor, "B M"],
        ends: Int[Tensor, " e"],
        temperature: float,
        record: bool,
        room: Int[Tensor, " B"] | None = None,
    ) -> tuple[Int[Tensor, "B M"], Float[Tensor, "B M"], list[Trace]]:
        """Return tokens (`UNWRITTEN` past a row's end), their log-probabilities, and the routes of each call of the
        model. Row b goes on from the left-padded prompt `prompt[b]`, draws token t by `uniform[b, t]`, and has at most
        `room[b]` tokens (1 to M; None: M)."""
        B, M = uniform.shape
        room = torch.full((B,), M, device=prompts.device) if room is None else room
        tokens = torch.full((B, M), UNWRITTEN, device=prompts.device)
        logps = torch.zeros(B, M, device=prompts.device)
        traces: list[Trace] = []
        with torch.no_grad(), evaluating(self.model):
            for rows in torch.arange(B, device=prompts.device).split(self.max_batch or B):
                with record_routes(self.model) if record else nullcontext() as recording:
                    chunk = _Chunk(self.model, prompts, prompt_mask, prompt[rows], rows)
                    chunk.decode(tokens, logps, uniform, ends, temperature, room)
                if recording is not None:
                    traces += zip(chunk.fed, recording.steps, strict=True)
        return tokens, logps, traces

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Set `version`. There is nothing to copy, because `weights` are this model's own."""
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        return forward_logps(self.model, rollout, temperature)

    def close(self) -> None:
        pass


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
        temperature: tokens are drawn from softmax(logits / temperature), and `logps` are its log-probabilities; 0 takes
            the most probable token.
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


@torch.no_grad()
def forward_logps(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
    """Return log-probabilities (nats) of a rollout's completion tokens by one forward of the model, 0 elsewhere; on the
    rollout's device."""
    device = next(model.parameters()).device
    out = token_logps(model, *(x.to(device) for x in rollout.tokens), temperature=temperature)
    return out.logps.to(rollout.input_ids.device)


def check_request(
    problems: Sequence[Problem],
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    max_batch: int | None,
) -> None:
    """Raise ValueError if arguments of `sample` are invalid for every model: no problems, a wrong type or number."""
    if not problems:
        raise ValueError("problems: nothing to sample, the list is empty")
    if wrong := [problem for problem in problems if not isinstance(problem, Problem)]:
        raise ValueError(f"problems: expected Problem(prompt, answer) for each, got {shortened(str(wrong[0]))}")
    counts = {"group_size": group_size, "max_new_tokens": max_new_tokens, "max_batch": max_batch}
    for name, value in counts.items():
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if isinstance(temperature, str) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 (greedy) or a positive number, got {temperature!r}")


# -- decoding --------------------------------------------------------------------------------------------------------


class _Chunk:
    """A batch of rows that are decoded together, with their tokens so far and their KV cache; finished rows leave the
    batch."""

    def __init__(
        self,
        model: nn.Module,
        ids: Int[Tensor, "N P"],
        mask: Bool[Tensor, "N P"],
        prompt: Int[Tensor, " n"],
        rows: Int[Tensor, " n"],
    ):
        """Prefill the prompts. Row i of the chunk is row `rows[i]` of the result and continues prompt `prompt[i]`."""
        self.model, self.rows, self.cache = model, rows, None
        self.fed: list[CallPlace] = []
        self.accepts = set(inspect.signature(hf_model(model).forward).parameters)
        used, place = torch.unique_consecutive(prompt, return_inverse=True)
        ids, mask = ids[used], mask[used].long()
        self.first = int(mask.any(0).int().argmax())  # columns that are padding in all of these prompts
        self.ids, self.mask = ids[:, self.first :], mask[:, self.first :]
        self.forward(place)
        self.selectable = _selectable(self.cache)
        if self.selectable:
            self.select(place)
        elif len(used) < len(place):
            self.ids, self.mask, self.cache = self.ids[place], self.mask[place], None
            self.forward()

    def forward(self, source: Int[Tensor, " n"] | None = None) -> None:
        """Feed `self.ids` to the model and set `self.logits` (fp32, `[n,V]`) to the logits after the last token.
        `source`: for each row of the chunk, the row of this call that holds its tokens; None: the same row."""
        new = self.ids.shape[1]
        inputs: dict[str, Any] = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": True}
        if self.cache is not None:
            inputs[cache_name(self.accepts)] = self.cache
        if "position_ids" in self.accepts:
            # Positions count real tokens: the first one is 0, wherever left-padding put it.
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp_(min=0)[:, -new:]
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        out = self.model(**inputs)
        source = torch.arange(len(self.rows), device=self.rows.device) if source is None else source
        self.fed.append(CallPlace(self.rows, source, self.first + self.mask.shape[1] - new))
        self.cache = cache_left(out)
        self.logits = out.logits[:, -1].float()

    def select(self, index: Int[Tensor, " m"]) -> None:
        """Keep (or repeat) the rows `index` of ids, mask, logits and cache."""
        if self.cache is not None:
            self.cache.batch_select_indices(index)
        self.ids, self.mask, self.logits = self.ids[index], self.mask[index], self.logits[index]

    def decode(
        self,
        tokens: Int[Tensor, "B N"],
        logps: Float[Tensor, "B N"],
        uniform: Float[Tensor, "B N"],
        ends: Int[Tensor, " e"],
        temperature: float,
        room: Int[Tensor, " B"],
    ) -> None:
        """Fill the chunk's rows of `tokens` and `logps`, each up to its end token or its limit `room`."""
        done = torch.zeros_like(self.rows, dtype=torch.bool)
        limit = tokens.shape[1]
        for t in range(limit):
            token, logp = draw_tokens(self.logits, uniform[self.rows, t], temperature)
            going = self.rows[~done]
            tokens[going, t], logps[going, t] = token[~done], logp[~done]
            full = room[self.rows] == t + 1
            done = done | torch.isin(token, ends) | full
            finished = int(done.sum())
            if finished == len(done) or t == limit - 1:
                return
            # A row with no room left leaves at once: nobody checked that the model has positions beyond its limit.
            if self.selectable and (finished >= COMPACT_SHARE * len(done) or bool(full.any())):
                keep = (~done).nonzero()[:, 0]
                self.select(keep)
                self.rows, token, done = self.rows[keep], token[keep], done[keep]
            # With a cache only the new token is fed; without a cache, the whole text.
            self.ids = token[:, None] if self.cache is not None else torch.cat([self.ids, token[:, None]], 1)
            self.mask = F.pad(self.mask, (0, 1), value=1)
            self.forward()


def draw_tokens(
    logits: Float[Tensor, "n V"], uniform: Float[Tensor, " n"], temperature: float
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`; return it with its log-probability
    (nats).

    The distribution is softmax(logits / temperature); at temperature 0 the most probable token is taken, and the
    log-probability is the one at temperature 1.

    >>> draw_tokens(torch.tensor([[0.0, 0.0]]).log_softmax(1), torch.tensor([0.7]), 1.0)
    (tensor([1]), tensor([-0.6931]))
    """
    logp = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        # float64: over a large vocabulary a float32 sum would lose the tail. The scale by the last entry makes the
        # distribution reach 1, and `right=True` never lands on a token of probability 0.
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        target = (uniform.double() * cumulative[:, -1])[:, None]
        token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(1, token[:, None])[:, 0]


def _selectable(cache: Any) -> bool:
    """Return whether rows of the cache can be repeated and dropped: its layers are known to keep all of their state in
    what `batch_select_indices` selects. Recurrent and hybrid layers inherit that method without selecting their own
    states by it, so they are prefilled once per row and never compacted. True if there is no cache but only tokens."""
    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")
    return cache is None or all(type(layer).__name__ in known for layer in getattr(cache, "layers", [None]))


# -- random numbers --------------------------------------------------------------------------------------------------


def seeded_generator(seed: int, purpose: str, step: int, index: int = 0) -> torch.Generator:
    """Return a torch generator (CPU) for one purpose at one step.

    Its numbers follow from seed, purpose, step and index, not from earlier draws: runs with one seed share prompts,
    sampling noise and minibatch order whatever their method does with them, and a resumed run draws the same numbers as
    an uninterrupted one.

    >>> a, b = (torch.rand(1, generator=seeded_generator(0, "sample", step=3)) for _ in range(2))
    >>> a == b
    tensor([True])
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def seeded_random(seed: int, purpose: str, *index: int) -> random.Random:
    """Return a `random.Random` for one purpose, such as the choice of prompts, as `seeded_generator` does for torch."""
    return random.Random("/".join(map(str, (seed, purpose, *index))))
