"""Rollouts as tensors: completions with the sampler's own log-probabilities, rewards and, if recorded, routes; and the
encoding of prompts as tokens and the decoding of tokens as text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import hf_model
from moe_rl.rollout.task import Problem, Task, checked_reward, message_tokens, shortened, token_ids, user_code
from moe_rl.routing import RoutedExperts

Rows = TypeVar("Rows", bound="Responses")

UNWRITTEN = -1
"""Stands in place of a token id past the end of a completion."""


@dataclass(frozen=True)
class Responses:
    """A batch of responses, one per row: tensors `[B]` or `[B,T,...]`, and routes.

    Attributes:
        input_ids: prompt (left-padded) and completion (right-padded); the end token is part of the completion.
        attention_mask: False on padding.
        completion_mask: True on completion tokens.
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Return the three inputs of `token_logps`: `input_ids`, `attention_mask` and `completion_mask`."""
        return self.input_ids, self.attention_mask, self.completion_mask

    @property
    def parts(self) -> dict[str, Any]:
        """Return all tensors and routes by attribute name, without those that are None."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor | RoutedExperts)}

    def called(self, row: int) -> str:
        """Return the words by which error messages name the response in this row."""
        return f"row {row}"

    def rows(self: Rows, index: Int[Tensor, " n"]) -> Rows:
        """Return the responses with the row numbers `index`, in that order."""
        return replace(
            self, **{n: part[index] if isinstance(part, Tensor) else part.rows(index) for n, part in self.parts.items()}
        )

    def columns(self: Rows, positions: slice) -> Rows:
        """Return a range of token positions of every response; tensors `[B]`, without positions, stay the same."""
        wide = {name: part for name, part in self.parts.items() if len(part.shape) > 1}
        return replace(
            self, **{n: x[:, positions] if isinstance(x, Tensor) else x.columns(positions) for n, x in wide.items()}
        )

    def to(self: Rows, device: torch.device | str) -> Rows:
        """Return the same responses on another device."""
        return replace(self, **{name: part.to(device) for name, part in self.parts.items()})


@dataclass(frozen=True)
class Rollout(Responses):
    """Sampled completions of a batch of problems, one per row; row `b` answers problem `b // group_size`.

    Attributes:
        input_ids, attention_mask, completion_mask: see `Responses`.
        logps: nats; the sampler's own log-probability of each completion token under the distribution that it was
            drawn from (at the sampling temperature; for greedy decoding: at temperature 1); 0 elsewhere. Detached.
        rewards: one per completion; NaN until `score` fills them.
        finished: True where the completion ended with an end token, False where the length limit cut it.
        group_size: completions per problem.
        problems: one per row.
        completions: text, one per row, without the end token.
        routes: the experts that decoding chose, `[B,T,L,K]`; -1 on padding and on each row's last token, which no
            router ever saw. None unless recorded.
        versions: version of the weights that wrote each completion token, -1 elsewhere; None if one version wrote all.
    """

    logps: Float[Tensor, "B T"]
    rewards: Float[Tensor, " B"]
    finished: Bool[Tensor, " B"]
    group_size: int
    problems: list[Problem]
    completions: list[str]
    routes: RoutedExperts | None = None
    versions: Int[Tensor, "B T"] | None = None

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return the number of completion tokens per row, the end token included."""
        return self.completion_mask.sum(1)

    @property
    def first(self) -> int:
        """Return the column in which the completions begin."""
        return int(self.completion_mask.any(0).int().argmax())

    @property
    def equal_groups(self) -> Bool[Tensor, " N"]:
        """Return, for each of the N groups, whether all its rewards are equal, so that its group advantages are 0."""
        rewards = self.rewards.view(-1, self.group_size)
        return (rewards == rewards[:, :1]).all(1)

    def called(self, row: int) -> str:
        return f"one to {shortened(self.problems[row].prompt)}"

    def rows(self, index: Int[Tensor, " n"] | Bool[Tensor, " B"]) -> "Rollout":
        """Return the completions with the row numbers `index`, in that order, or those where a bool `index` is True.
        `group_size` is kept: whether groups stay whole is up to `index`."""
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of rows must be [B] = [{len(self)}], got {list(index.shape)}")
            index = index.nonzero()[:, 0]
        return replace(
            super().rows(index.to(self.input_ids.device)),
            problems=[self.problems[i] for i in index.tolist()],
            completions=[self.completions[i] for i in index.tolist()],
        )


def score(task: Task, rollout: Rollout, seconds: float | None = None) -> Rollout:
    """Return the rollout with `rewards` filled in by the task's verifier, which must accept any text.

    Args:
        seconds: how long the verifier may take for one completion; None: no limit.

    Raises:
        TaskError: the verifier failed, took too long or gave no finite number; names the prompt and the completion.
    """
    rewards = []
    for problem, text in zip(rollout.problems, rollout.completions, strict=True):
        with user_code(task, "reward", problem, text, seconds):
            rewards.append(checked_reward(task.reward(problem, text)))
    return replace(rollout, rewards=torch.tensor(rewards).to(rollout.input_ids.device))


# -- joining rollouts --------------------------------------------------------------------------------------------------


def padded(rollout: Rollout, left: int, right: int, token: int = 0) -> Rollout:
    """Return the rollout with `left` more columns of padding before and `right` behind, its `[B,T]` tensors copied.
    `token` fills `input_ids` there, and nothing reads it."""
    values = {"input_ids": token, "versions": -1}
    wide: dict[str, Any] = {
        name: F.pad(part, (left, right), value=values.get(name, 0))
        for name, part in rollout.parts.items()
        if isinstance(part, Tensor) and part.ndim == 2
    }
    if rollout.routes is not None:
        wide["routes"] = rollout.routes.realign(rollout.attention_mask, wide["attention_mask"])
    return replace(rollout, **wide)


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Join rollouts of equal group size to one, in order: prompts are padded on the left and completions on the right
    to the widest. Routes and versions are kept if all rollouts have them."""
    widths = [(part.first, part.input_ids.shape[1] - part.first) for part in parts]
    left, right = (max(of) for of in zip(*widths, strict=True))
    wide = [padded(part, left - before, right - behind) for part, (before, behind) in zip(parts, widths, strict=True)]
    joined: dict[str, Any] = {"routes": None, "versions": None}
    for name in set.intersection(*(set(part.parts) for part in wide)):
        of_all: list[Any] = [part.parts[name] for part in wide]
        joined[name] = RoutedExperts.cat(of_all) if name == "routes" else torch.cat(of_all)
    return replace(
        parts[0],
        **joined,
        problems=[problem for part in parts for problem in part.problems],
        completions=[text for part in parts for text in part.completions],
    )


# -- prompts, tokens, text --------------------------------------------------------------------------------------------


def encode_prompts(tokenizer: Any, problems: Sequence[Problem]) -> tuple[Int[Tensor, "N P"], Bool[Tensor, "N P"]]:
    """Return token ids and mask of the problems' prompts, left-padded whatever side the tokenizer pads on."""
    encoded = [
        list(token_ids(tokenizer, p.prompt)) if p.messages is None else message_tokens(tokenizer, p) for p in problems
    ]
    if empty := [i for i, ids in enumerate(encoded) if not ids]:
        raise ValueError(f"problem {empty[0]}: the prompt {problems[empty[0]].prompt!r} has no tokens")
    width, padding = max(map(len, encoded)), padding_token(tokenizer)
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in encoded])
    return ids, torch.arange(width) >= width - torch.tensor([[len(row)] for row in encoded])


def rollout_from_tokens(
    tokenizer: Any,
    problems: Sequence[Problem],
    group_size: int,
    prompts: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    tokens: Int[Tensor, "B M"],
    logps: Float[Tensor, "B M"],
    ends: Int[Tensor, " e"],
) -> Rollout:
    """Return the rollout, without routes, of left-padded prompts and the tokens that were drawn after them
    (`UNWRITTEN` past a row's end)."""
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


def padding_token(tokenizer: Any) -> int:
    """Return the token id to pad with: any valid token serves, because padding is masked everywhere."""
    ids = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)
    return next(int(token) for token in ids if token is not None)


def end_tokens(model: nn.Module, tokenizer: Any) -> Int[Tensor, " e"]:
    """Return the ids of all tokens that end a completion: the tokenizer's end token and those of the model's generation
    config (negative ids are left out)."""
    ends: set[int] = set()
    for source in (tokenizer, getattr(hf_model(model), "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ends |= {end for end in (found if isinstance(found, list | tuple) else [found]) if end is not None and end >= 0}
    return torch.tensor(sorted(ends), dtype=torch.int64)


def check_end(model: nn.Module, tokenizer: Any, path: str | None) -> None:
    """Raise ValueError if no token ends a completion, so that every response would be cut at its length limit."""
    if not len(end_tokens(model, tokenizer)):
        raise ValueError(
            f"model.path: neither the tokenizer of {path} nor its generation config names an end token, so that every "
            "response would run on to rollout.max_new_tokens. Set tokenizer.eos_token to the token that ends an answer "
            "and save the tokenizer there (save_pretrained)."
        )


def check_length(
    model: nn.Module,
    problems: Sequence[Problem],
    so_far: Int[Tensor, " n"],
    new: int | Int[Tensor, " n"],
    engine: int | None = None,
    spare: int = 0,
) -> None:
    """Call `check_positions` with the model's own configuration."""
    check_positions(getattr(hf_model(model), "config", None), problems, so_far, new, engine, spare)


def check_positions(
    config: Any,
    problems: Sequence[Problem],
    so_far: Int[Tensor, " n"],
    new: int | Int[Tensor, " n"],
    engine: int | None = None,
    spare: int = 0,
) -> None:
    """Raise ValueError if a text is too long: `so_far` tokens, `new` ones and `spare` behind them exceed the positions
    that the model has by its configuration (if that says so) or that the engine has (`engine`)."""
    most = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    most = min((limit for limit in (most, engine) if limit), default=None)
    total = so_far + new
    longest = int(total.argmax())
    there, whole = int(so_far[longest]), int(total[longest])
    if most and whole + spare > most:
        more = f", and {spare} more with which the engine scores them," if spare else ""
        raise ValueError(
            f"a text of {there} tokens so far, prompt included, and {whole - there} new ones (rollout.max_new_tokens)"
            f"{more} are more than the {most} positions that the {'engine' if most == engine else 'model'} has: "
            f"{problems[longest].prompt[:80]!r}. Shorter prompts or replies, fewer new tokens, or a model of longer "
            "context."
        )


def decode_text(tokenizer: Any, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Return the text of the first `lengths[i]` tokens of each row i. Special tokens stay visible, for verifiers."""
    rows = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# -- routes of decoding -----------------------------------------------------------------------------------------------


def unrouted_tokens(attention_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return a bool mask of the tokens of a rollout that rightly have no route: padding, and each row's last token,
    which was sampled and never fed back to the model.

    >>> unrouted_tokens(torch.tensor([[False, True, True, False]])).int().tolist()
    [[1, 0, 1, 1]]
    """
    later = attention_mask.flip(1).cumsum(1).flip(1) > 1
    return ~(attention_mask & later)


@dataclass(frozen=True)
class CallPlace:
    """The place in the rollout of the tokens that one call of the model was fed."""

    rows: Int[Tensor, " n"]
    source: Int[Tensor, " n"]  # row rows[i] of the rollout was row source[i] of the call
    column: int  # column of the rollout in which the call's first token stands


Trace = tuple[CallPlace, RoutedExperts]


def assemble(traces: list[Trace], input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> RoutedExperts:
    """Return the routes of a rollout, put together from those of the model's calls; -1 on padding and on each row's
    last token."""
    like = traces[0][1]
    ids = input_ids.new_full((*input_ids.shape, *like.shape[2:]), -1, dtype=torch.int16)
    for fed, routes in traces:
        ids[fed.rows, fed.column : fed.column + routes.shape[1]] = routes.ids.to(torch.int16)[fed.source]
    ids.masked_fill_(unrouted_tokens(attention_mask)[:, :, None, None], -1)
    return like.with_ids(ids, input_ids)
