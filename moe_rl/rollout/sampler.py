"""Sample completions from a Hugging Face causal language model: prompts prefilled once per group, finished sequences
leave the batch, every token's log-probability kept, and, where asked for, the experts that decoding chose.

The sampler owns its loop because `generate()` repeats the prefill G times, decodes finished sequences to the end, and
draws randomness that depends on the batch. Here a sequence's random numbers depend on its row alone, so that neither
compaction nor chunking changes what is sampled (up to what the model's own arithmetic makes of another batch shape).
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.rollout.tasks import Problem, Task
from moe_rl.routing.routes import RoutedExperts

UNWRITTEN = -1  # in the token buffer: past the end of this completion
COMPACT_SHARE = 0.25  # finished sequences leave the batch when they are this share of it


@dataclass(frozen=True)
class Rollout:
    """Completions, one row each, groups contiguous: row `b` answers problem `b // group_size`.

    Attributes:
        input_ids: prompt (left-padded) and completion (right-padded); the end token is part of the completion.
        attention_mask: False on padding.
        completion_mask: True on completion tokens.
        logps: nats; the sampler's own log-probability of each completion token under the distribution that it was
            drawn from (at the sampling temperature; for greedy decoding: at temperature 1); 0 elsewhere. Detached.
        rewards: one per completion; NaN until `score` fills them.
        finished: True where the completion ended with an end token, False where the length limit cut it.
        group_size: completions per problem.
        problems: one per row.
        completions: text, one per row, without the end token.
        routes: the experts that decoding chose, `[B,T,L,K]`; -1 on padding and on each row's last token, which no
            router ever saw. None unless recorded.
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]
    logps: Float[Tensor, "B T"]
    rewards: Float[Tensor, "B"]
    finished: Bool[Tensor, "B"]
    group_size: int
    problems: list[Problem]
    completions: list[str]
    routes: RoutedExperts | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Completion tokens per row, the end token included."""
        return self.completion_mask.sum(1)

    def rows(self, index: Int[Tensor, "n"]) -> "Rollout":
        """The completions `index`, in that order. `group_size` is kept: whether groups stay whole is up to `index`."""
        where = index.tolist()
        index = index.to(self.input_ids.device)
        return replace(
            self,
            **{name: getattr(self, name)[index] for name in _TENSORS},
            problems=[self.problems[i] for i in where],
            completions=[self.completions[i] for i in where],
            routes=None if self.routes is None else self.routes.rows(index),
        )

    def to(self, device: torch.device | str) -> "Rollout":
        """The same rollout on another device."""
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, **moved, routes=None if self.routes is None else self.routes.to(device))


_TENSORS = ("input_ids", "attention_mask", "completion_mask", "logps", "rewards", "finished")


def score(task: Task, rollout: Rollout) -> Rollout:
    """The rollout with its rewards: the task's verdict on every completion. The verifier must accept any text."""
    pairs = zip(rollout.problems, rollout.completions, strict=True)
    rewards = torch.tensor([float(task.reward(problem, text)) for problem, text in pairs])
    return replace(rollout, rewards=rewards.to(rollout.input_ids.device))


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
        tokenizer: its tokenizer, with a padding token.
        problems: one prompt each.
        group_size: completions per prompt (G); row `b` of the result answers problem `b // G`.
        max_new_tokens: length limit of a completion, the end token included.
        temperature: softmax(logits / temperature) is sampled from, and is what `logps` speak of; 0 takes the most
            probable token.
        generator: source of randomness (any device); None draws from torch's default one. One uniform number per
            row and position is drawn at once, before decoding.
        record: record the experts that prefill and decoding chose.
        max_batch: completions decoded together; None decodes all at once.

    Returns:
        A `Rollout` on the model's device, without rewards (see `score`). Nothing in it requires grad.

    Raises:
        ValueError: an empty list of problems, an empty prompt, a number that makes no sense.
    """
    _check(problems, group_size, max_new_tokens, temperature, max_batch)
    device = next(model.parameters()).device
    prompts, prompt_mask = encode_prompts(tokenizer, [p.prompt for p in problems])
    prompts, prompt_mask = prompts.to(device), prompt_mask.to(device)
    B, P, N = len(problems) * group_size, prompts.shape[1], max_new_tokens
    source = device if generator is None else generator.device
    uniform = torch.rand(B, N, generator=generator, dtype=torch.float64, device=source).to(device)
    ends = end_tokens(model, tokenizer).to(device)
    prompt = torch.arange(B, device=device) // group_size

    tokens = torch.full((B, N), UNWRITTEN, device=device)
    logps = torch.zeros(B, N, device=device)
    with torch.no_grad(), _evaluating(model):
        for rows in torch.arange(B, device=device).split(max_batch or B):
            chunk = _Chunk(model, prompts, prompt_mask, prompt[rows])
            chunk.decode(rows, tokens, logps, uniform, ends, temperature)
    written = tokens != UNWRITTEN
    N = int(written.sum(1).max())
    tokens, written, logps = tokens[:, :N], written[:, :N], logps[:, :N]
    ended = torch.isin(tokens, ends)
    return Rollout(
        input_ids=torch.cat([prompts[prompt], tokens.masked_fill(~written, int(tokenizer.pad_token_id))], 1),
        attention_mask=torch.cat([prompt_mask[prompt], written], 1),
        completion_mask=torch.nn.functional.pad(written, (P, 0)),
        logps=torch.nn.functional.pad(logps, (P, 0)),
        rewards=torch.full((B,), float("nan"), device=device),
        finished=ended.any(1),
        group_size=group_size,
        problems=[problem for problem in problems for _ in range(group_size)],
        completions=_decode_text(tokenizer, tokens, (written & ~ended).sum(1)),
    )


class _Chunk:
    """Rows decoded together: their tokens so far, their cache, and which of them are still being decoded."""

    def __init__(self, model: nn.Module, ids: Tensor, mask: Tensor, prompt: Tensor):
        """Prefill. `ids` and `mask` `[N,P]` are all prompts, `prompt` `[n]` says which one each row continues."""
        self.model = model
        self.accepts = set(inspect.signature(model.forward).parameters)
        used, place = torch.unique_consecutive(prompt, return_inverse=True)
        ids, mask = ids[used], mask[used].long()
        first = int(mask.any(0).int().argmax())  # columns that are padding in all of these prompts
        self.ids, self.mask, self.cache = ids[:, first:], mask[:, first:], None
        self.logits = self.forward()
        self.selectable = _selectable(self.cache)
        if self.selectable:
            self.select(place)
        elif len(used) < len(place):
            self.ids, self.mask, self.cache = self.ids[place], self.mask[place], None
            self.logits = self.forward()

    def forward(self) -> Float[Tensor, "n V"]:
        """Logits (fp32) after the last token; feeds what the cache has not seen."""
        ids = self.ids if self.cache is None else self.ids[:, -1:]
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": self.mask, "use_cache": True}
        if self.cache is not None:
            inputs["past_key_values"] = self.cache
        if "position_ids" in self.accepts:
            # Positions count real tokens: the first one is 0, wherever left-padding put it.
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        out = self.model(**inputs)
        self.cache = getattr(out, "past_key_values", None)
        return out.logits[:, -1].float()

    def select(self, index: Int[Tensor, "m"]) -> None:
        """Keep (or repeat) the rows `index`."""
        if self.cache is not None:
            self.cache.batch_select_indices(index)
        self.ids, self.mask, self.logits = self.ids[index], self.mask[index], self.logits[index]

    def decode(
        self,
        rows: Int[Tensor, "n"],
        tokens: Int[Tensor, "B N"],
        logps: Float[Tensor, "B N"],
        uniform: Float[Tensor, "B N"],
        ends: Int[Tensor, "e"],
        temperature: float,
    ) -> None:
        """Fill the rows `rows` of `tokens` and `logps` up to each one's end."""
        done = torch.zeros_like(rows, dtype=torch.bool)
        limit = tokens.shape[1]
        for t in range(limit):
            token, logp = draw_tokens(self.logits, uniform[rows, t], temperature)
            live = rows[~done]
            tokens[live, t], logps[live, t] = token[~done], logp[~done]
            done = done | torch.isin(token, ends)
            finished = int(done.sum())
            if finished == len(rows) or t == limit - 1:
                return
            self.ids = torch.cat([self.ids, token[:, None]], 1)
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            if self.selectable and finished >= COMPACT_SHARE * len(rows):
                keep = (~done).nonzero()[:, 0]
                self.select(keep)
                rows, done = rows[keep], done[keep]
            self.logits = self.forward()


def draw_tokens(
    logits: Float[Tensor, "n V"], uniform: Float[Tensor, "n"], temperature: float
) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
    """One token per row by inverting the cumulative distribution at `uniform`, and its log-probability (nats).

    The distribution is softmax(logits / temperature); at temperature 0 the most probable token is taken, and the
    log-probability is the one at temperature 1.

    >>> draw_tokens(torch.tensor([[0.0, 0.0]]).log_softmax(1), torch.tensor([0.7]), 1.0)
    (tensor([1]), tensor([-0.6931]))
    """
    logp = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        # float64: over a large vocabulary a float32 sum would lose the tail. The scale by the last entry makes it
        # reach 1, and `right=True` never lands on a token of probability 0.
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        target = (uniform.double() * cumulative[:, -1])[:, None]
        token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(1, token[:, None])[:, 0]


def encode_prompts(tokenizer: Any, prompts: list[str]) -> tuple[Int[Tensor, "N P"], Bool[Tensor, "N P"]]:
    """Token ids and mask, left-padded whatever side the tokenizer pads on."""
    encoded = [list(ids) for ids in tokenizer(prompts)["input_ids"]]
    empty = [i for i, ids in enumerate(encoded) if not ids]
    if empty:
        raise ValueError(f"problem {empty[0]}: the prompt {prompts[empty[0]]!r} has no tokens")
    width = max(map(len, encoded))
    pad = int(tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
    lengths = torch.tensor([len(row) for row in encoded])
    return ids, torch.arange(width)[None] >= width - lengths[:, None]


def end_tokens(model: nn.Module, tokenizer: Any) -> Int[Tensor, "e"]:
    """Every token that ends a completion: the tokenizer's and those of the model's generation config."""
    ends: set[int] = set()
    for source in (tokenizer, getattr(model, "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ends |= set(found if isinstance(found, list | tuple) else [found]) - {None}
    return torch.tensor(sorted(ends), dtype=torch.int64)


def _decode_text(tokenizer: Any, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Special tokens inside a completion stay visible: a verifier must not be blind to them."""
    rows = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _selectable(cache: Any) -> bool:
    """Whether rows of the cache can be repeated and dropped: its layers are known to keep all of their state in what
    `batch_select_indices` selects. Recurrent and hybrid layers inherit that method but not for their own states, so
    they are prefilled once per row and never compacted; without a cache, the tokens are all there is."""
    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")
    return cache is None or all(type(layer).__name__ in known for layer in getattr(cache, "layers", [None]))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """`eval()` inside; afterwards every module's own mode, as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check(
    problems: Sequence[Problem],
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    max_batch: int | None,
) -> None:
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
