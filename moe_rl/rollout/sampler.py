"""Decode with a KV cache and one prefill per prompt; finished sequences leave the batch.

Every token's log-probability is kept, and, where asked for, the experts that decoding chose. `generate()` would repeat
the prefill G times, decode every sequence to the longest one's end, and draw randomness that depends on the batch. Here
the random numbers of a sequence depend on its row alone, so that neither compaction nor chunking changes what is
sampled (up to what the model's own arithmetic makes of another batch shape).
"""

import hashlib
import inspect
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import evaluating, hf_model
from moe_rl.rollout.completions import unrouted_tokens
from moe_rl.routing import RoutedExperts, record_routes

UNWRITTEN = -1  # in the token buffer: past the end of this completion
COMPACT_SHARE = 0.25  # finished sequences leave the batch when they are this share of it


def decode(
    model: nn.Module,
    prompts: Int[Tensor, "N P"],
    prompt_mask: Bool[Tensor, "N P"],
    prompt: Int[Tensor, " B"],
    uniform: Float[Tensor, "B M"],
    ends: Int[Tensor, " e"],
    temperature: float,
    record: bool,
    max_batch: int | None,
) -> tuple[Int[Tensor, "B M"], Float[Tensor, "B M"], list["Trace"]]:
    """Tokens (`UNWRITTEN` past a row's end), their log-probabilities, and what each call of the model routed. Row b
    goes on from prompt `prompt[b]`, left-padded, and draws token t by `uniform[b, t]`."""
    B, M = uniform.shape
    tokens = torch.full((B, M), UNWRITTEN, device=prompts.device)
    logps = torch.zeros(B, M, device=prompts.device)
    traces: list[Trace] = []
    with torch.no_grad(), evaluating(model):
        for rows in torch.arange(B, device=prompts.device).split(max_batch or B):
            with record_routes(model) if record else nullcontext() as recording:
                chunk = _Chunk(model, prompts, prompt_mask, prompt[rows], rows)
                chunk.decode(tokens, logps, uniform, ends, temperature)
            if recording is not None:
                traces += zip(chunk.fed, recording.steps, strict=True)
    return tokens, logps, traces


@dataclass(frozen=True)
class _Fed:
    """Which part of the result one call of the model spoke of."""

    rows: Int[Tensor, " n"]
    source: Int[Tensor, " n"]  # rows[i] of the result was row source[i] of the call
    column: int  # where the call's first token stands in the result


Trace = tuple[_Fed, RoutedExperts]


def assemble(traces: list[Trace], input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> RoutedExperts:
    """Routes of the result from those of the calls; -1 on padding and on each row's last token."""
    like = traces[0][1]
    ids = input_ids.new_full((*input_ids.shape, *like.shape[2:]), -1, dtype=torch.int16)
    for fed, routes in traces:
        ids[fed.rows, fed.column : fed.column + routes.shape[1]] = routes.ids.to(torch.int16)[fed.source]
    ids.masked_fill_(unrouted_tokens(attention_mask)[:, :, None, None], -1)
    return RoutedExperts(ids, like.sites, like.num_experts, tokens=input_ids, meta=like.meta)


class _Chunk:
    """Rows decoded together: their tokens so far and their cache. Rows leave it when they are done."""

    def __init__(
        self,
        model: nn.Module,
        ids: Int[Tensor, "N P"],
        mask: Bool[Tensor, "N P"],
        prompt: Int[Tensor, " n"],
        rows: Int[Tensor, " n"],
    ):
        """Prefill: row i of the chunk is row `rows[i]` of the result and continues prompt `prompt[i]`."""
        self.model, self.rows, self.cache = model, rows, None
        self.fed: list[_Fed] = []
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
        """Feed `ids`; `logits` (fp32, `[n,V]`) are those after the last of them. `source`: the call's row of each
        of the chunk's rows, where they are not the same."""
        new = self.ids.shape[1]
        inputs: dict[str, Any] = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": True}
        if self.cache is not None:
            inputs["past_key_values"] = self.cache
        if "position_ids" in self.accepts:
            # Positions count real tokens: the first one is 0, wherever left-padding put it.
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp_(min=0)[:, -new:]
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        out = self.model(**inputs)
        source = torch.arange(len(self.rows), device=self.rows.device) if source is None else source
        self.fed.append(_Fed(self.rows, source, self.first + self.mask.shape[1] - new))
        self.cache = getattr(out, "past_key_values", None)
        self.logits = out.logits[:, -1].float()

    def select(self, index: Int[Tensor, " m"]) -> None:
        """Keep (or repeat) the rows `index` of what was fed."""
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
    ) -> None:
        """Fill the chunk's rows of `tokens` and `logps`, each up to its end."""
        done = torch.zeros_like(self.rows, dtype=torch.bool)
        limit = tokens.shape[1]
        for t in range(limit):
            token, logp = draw_tokens(self.logits, uniform[self.rows, t], temperature)
            going = self.rows[~done]
            tokens[going, t], logps[going, t] = token[~done], logp[~done]
            done = done | torch.isin(token, ends)
            finished = int(done.sum())
            if finished == len(done) or t == limit - 1:
                return
            if self.selectable and finished >= COMPACT_SHARE * len(done):
                keep = (~done).nonzero()[:, 0]
                self.select(keep)
                self.rows, token, done = self.rows[keep], token[keep], done[keep]
            # With a cache only the new token is fed; without one, everything.
            self.ids = token[:, None] if self.cache is not None else torch.cat([self.ids, token[:, None]], 1)
            self.mask = F.pad(self.mask, (0, 1), value=1)
            self.forward()


def draw_tokens(
    logits: Float[Tensor, "n V"], uniform: Float[Tensor, " n"], temperature: float
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
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


def _selectable(cache: Any) -> bool:
    """Whether rows of the cache can be repeated and dropped: its layers are known to keep all of their state in what
    `batch_select_indices` selects. Recurrent and hybrid layers inherit that method but not for their own states, so
    they are prefilled once per row and never compacted; without a cache, the tokens are all there is."""
    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")
    return cache is None or all(type(layer).__name__ in known for layer in getattr(cache, "layers", [None]))


# -- tokens ------------------------------------------------------------------------------------------------------------


def padding_token(tokenizer: Any) -> int:
    """Any valid token serves: padding is masked everywhere."""
    ids = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)
    return next(int(token) for token in ids if token is not None)


def end_tokens(model: nn.Module, tokenizer: Any) -> Int[Tensor, " e"]:
    """Every token that ends a completion: the tokenizer's and those of the model's generation config."""
    ends: set[int] = set()
    for source in (tokenizer, getattr(hf_model(model), "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ends |= set(found if isinstance(found, list | tuple) else [found]) - {None}
    return torch.tensor(sorted(ends), dtype=torch.int64)


def positions(model: nn.Module) -> int | None:
    """How many tokens a text of the model may have, as its configuration says, if it does."""
    config = getattr(hf_model(model), "config", None)
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)


def decode_text(tokenizer: Any, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Special tokens inside a completion stay visible: a verifier must not be blind to them."""
    rows = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# -- random numbers --------------------------------------------------------------------------------------------------


def seeded_generator(seed: int, purpose: str, step: int, index: int = 0) -> torch.Generator:
    """A torch generator (CPU) for one purpose at one step.

    Its numbers follow from a seed and a purpose, not from the past: runs with one seed share prompts, sampling noise
    and minibatch order whatever their method does with them, and a resumed run draws what the uninterrupted one would
    have.

    >>> a, b = (torch.rand(1, generator=seeded_generator(0, "sample", step=3)) for _ in range(2))
    >>> a == b
    tensor([True])
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def seeded_random(seed: int, purpose: str, *index: int) -> random.Random:
    """The same for the choice of prompts, as `random.Random`."""
    return random.Random("/".join(map(str, (seed, purpose, *index))))
