"""Continued responses: with other weights (partial rollouts), or after text that is not the policy's (several turns).

Each continuation prefills the text so far anew, so that no KV cache of other weights is used.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moe_rl.rollout.completions import (
    UNWRITTEN,
    Rollout,
    assemble,
    check_length,
    decode_text,
    end_tokens,
    padded,
    padding_token,
)
from moe_rl.rollout.task import Problem, TaskError, token_ids, user_code

TURNS = 4
"""Turns of the policy in one response, if the task has no `max_turns`."""


def unfinished(rollout: Rollout, longest: int) -> Bool[Tensor, " B"]:
    """Return a bool mask of the responses without an end token that have fewer than `longest` tokens of the policy."""
    return ~rollout.finished & (rollout.lengths < longest)


def extend(
    engine: Any,
    rollout: Rollout,
    *,
    tokens: int,
    longest: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    version: int | None = None,
    record_routes: bool = False,
) -> Rollout:
    """Return the rollout with every unfinished response continued by up to `tokens` tokens of the engine's model.

    If routes are recorded, a token keeps the route that it had when the next token was written, so that each token's
    route comes from the weights that drew the next token (`versions` of the next token). A token without a route so far
    (the last one of the text before, tool text) gets the route of this call.

    Args:
        engine: a `ModelEngine`.
        longest: the most tokens of the policy that a response may have.
        generator: source of one uniform number per response and position, finished responses included.
        version: version of the model's weights, noted for the new tokens; None if versions are not kept.

    Raises:
        ValueError: versions or routes that are kept for some tokens and not for others; a text that leaves no room for
            the new tokens in the model's positions.
    """
    if (version is None) != (rollout.versions is None):
        raise ValueError("versions are kept for all tokens of a rollout or for none")
    if record_routes != (rollout.routes is not None):
        raise ValueError(
            "routes are kept for all tokens of a rollout or for none: record them from the first sampling on, or not "
            f"at all (so far {'recorded' if rollout.routes is not None else 'not recorded'}, record_routes="
            f"{record_routes})"
        )
    model, tokenizer, device, B = engine.model, engine.tokenizer, rollout.input_ids.device, len(rollout)
    source = "cpu" if generator is None else generator.device
    uniform = torch.rand(B, tokens, generator=generator, dtype=torch.float64, device=source).to(device)
    rows = unfinished(rollout, longest).nonzero()[:, 0]
    if not len(rows):
        return rollout
    prefix, prefix_mask = right_aligned(rollout.input_ids[rows], rollout.attention_mask[rows])
    room = (longest - rollout.lengths[rows]).clamp(max=tokens)
    problems = [rollout.problems[row] for row in rows.tolist()]
    check_length(model, problems, prefix_mask.sum(1), room)
    ends = end_tokens(model, tokenizer).to(device)
    each = torch.arange(len(rows), device=device)
    drawn, logps, traces = engine.decode(
        prefix, prefix_mask, each, uniform[rows], ends, temperature, record_routes, room
    )
    new = drawn != UNWRITTEN
    wide, at = _placed(rollout, rows, new, padding_token(tokenizer))
    wide.input_ids[at], wide.attention_mask[at], wide.completion_mask[at] = drawn[new], True, True
    wide.logps[at] = logps[new]
    wide.finished[rows] = torch.isin(drawn, ends).any(1)
    if wide.versions is not None and version is not None:
        wide.versions[at] = version
    routes = wide.routes
    if record_routes:
        own = assemble(traces, torch.cat([prefix, drawn.clamp(min=0)], 1), torch.cat([prefix_mask, new], 1))
        part = own.realign(torch.cat([prefix_mask, new], 1), wide.attention_mask[rows])
        assert routes is not None
        ids = routes.ids
        ids[rows] = torch.where(ids[rows] >= 0, ids[rows], part.ids)
        routes = own.with_ids(ids, wide.input_ids)
    return replace(wide, routes=routes, completions=_texts(wide, tokenizer))


# -- partial rollouts --------------------------------------------------------------------------------------------------


def partial_responses(
    drafts: deque[Rollout],
    engine: Any,
    problems: Callable[[], list[Problem]],
    generator: Callable[[int], torch.Generator],
    *,
    segment: int,
    longest: int,
    version: int,
    group_size: int,
    temperature: float,
    record_routes: bool,
) -> Rollout:
    """Return the oldest batch, finished, after a new batch was begun and all batches in `drafts` went on by a segment.

    Every call begins one batch and returns one. If the oldest batch is not finished by then, the call begins further
    batches under the same version, and continues all others by a segment each time, until the oldest is finished. So
    the number of batches in `drafts` never falls: after one long response every later batch waits for those before it,
    finished or not, and its first tokens are as many versions old as there are batches in `drafts`.

    Args:
        drafts: the batches that were begun and not yet returned, oldest first; changed in place.
        engine: a `ModelEngine`.
        problems: returns the problems of a new batch.
        generator: (number) -> random numbers for one segment of one batch.
        segment: the most tokens by which a response goes on at a time.
        longest: the most tokens that a response may have.
        version: version of the weights that write now.
    """
    options: dict[str, Any] = {"temperature": temperature, "record_routes": record_routes}
    numbers = itertools.count(1)
    while True:
        for index, draft in enumerate(drafts):
            more = {"tokens": segment, "longest": longest, "version": version, **options}
            drafts[index] = extend(engine, draft, generator=generator(next(numbers)), **more)
        begun = engine.sample(
            problems(),
            group_size=group_size,
            max_new_tokens=min(segment, longest),
            generator=generator(next(numbers)),
            **options,
        )
        drafts.append(replace(begun, versions=torch.where(begun.completion_mask, version, -1)))
        if not bool(unfinished(drafts[0], longest).any()):
            return drafts.popleft()


def version_metrics(rollout: Rollout, version: int) -> dict[str, float]:
    """Return metrics of the age of a rollout's tokens, in versions (= steps) before `version`: mean, maximum, the share
    of tokens of older versions, and the share of responses with tokens of several versions."""
    assert rollout.versions is not None
    ages = version - rollout.versions[rollout.completion_mask]
    rows = [row[mask].unique().numel() for row, mask in zip(rollout.versions, rollout.completion_mask, strict=True)]
    counts = torch.tensor(rows, dtype=torch.float64)
    return {
        "version_age": float(ages.double().mean()),
        "version_age_max": float(ages.max()),
        "old_tokens": float((ages > 0).double().mean()),
        "mixed_responses": float((counts > 1).double().mean()),
    }


# -- several turns -----------------------------------------------------------------------------------------------------


def append_text(rollout: Rollout, tokenizer: Any, texts: Mapping[int, str]) -> Rollout:
    """Return the rollout with a text appended to the responses of some rows (`texts`, by row), which become unfinished.
    The tokens of the text are attended to and are no completion tokens, so that no loss, ratio or length counts them;
    their log-probability is 0, their version -1, and they have no route yet."""
    device = rollout.input_ids.device
    encoded = {row: token_ids(tokenizer, text, add_special_tokens=False) for row, text in texts.items()}
    rows = torch.tensor(sorted(row for row, ids in encoded.items() if ids), dtype=torch.int64, device=device)
    if not len(rows):
        return rollout
    lengths = [len(encoded[row]) for row in rows.tolist()]
    new = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    wide, at = _placed(rollout, rows, new, padding_token(tokenizer))
    wide.input_ids[at] = torch.tensor([token for row in rows.tolist() for token in encoded[row]], device=device)
    wide.attention_mask[at] = True
    wide.finished[rows] = False
    routes = wide.routes
    if routes is not None:
        routes = routes.with_ids(routes.ids, wide.input_ids)
    return replace(wide, routes=routes, completions=_texts(wide, tokenizer))


def in_turns(engine: Any, task: Any, tokenizer: Any, seconds: float | None = None) -> Any:
    """Return the engine, changed in place to sample in several turns if the task has a method `reply`.

    The task may reply to every response that ended its turn (`reply(problem, transcript)`; None or an empty text ends
    the conversation), and after the reply the policy goes on. `max_new_tokens` then limits all turns of the policy
    together, and a response that has reached it gets no reply. Sampling raises TaskError, with prompt and transcript,
    if the task's code fails.

    Args:
        engine: a `ModelEngine`.
        seconds: how long a reply may take; None: no limit.
    """
    if not hasattr(task, "reply"):
        return engine
    one_turn = engine.sample

    def sample(problems: Sequence[Problem], *, group_size: int, max_new_tokens: int, **options: Any) -> Rollout:
        rollout = one_turn(problems, group_size=group_size, max_new_tokens=max_new_tokens, **options)
        talking = torch.ones_like(rollout.finished)
        for _ in range(1, int(getattr(task, "max_turns", TURNS))):
            asked = talking & rollout.finished & (rollout.lengths < max_new_tokens)
            told = replies(task, rollout, asked, seconds)
            if not any(told.values()):
                break
            rollout = append_text(rollout, tokenizer, told)
            talking = ~rollout.finished  # `append_text` made the rows that got a text unfinished
            rollout = extend(engine, rollout, tokens=max_new_tokens, longest=max_new_tokens, **options)
        return rollout

    engine.sample = sample
    return engine


def replies(task: Any, rollout: Rollout, asked: Bool[Tensor, " B"], seconds: float | None) -> dict[int, str]:
    """Return the task's replies, by row, to the responses where `asked` is True, without rows whose reply is None."""
    found = {}
    for row in asked.nonzero()[:, 0].tolist():
        problem, transcript = rollout.problems[row], rollout.completions[row]
        with user_code(task, "reply", problem, transcript, seconds):
            reply = task.reply(problem, transcript)
            if not isinstance(reply, str | None):
                raise TaskError(f"expected a text or None, got {reply!r}")
        if reply is not None:
            found[row] = reply
    return found


# -- positions of tokens -----------------------------------------------------------------------------------------------


def right_aligned(ids: Int[Tensor, "n T"], mask: Bool[Tensor, "n T"]) -> tuple[Int[Tensor, "n T"], Bool[Tensor, "n T"]]:
    """Return ids and mask with the tokens of each row moved to its right end, in order; ids are 0 elsewhere.

    >>> right_aligned(torch.tensor([[0, 5, 6, 0]]), torch.tensor([[False, True, True, False]]))[0]
    tensor([[0, 0, 5, 6]])
    """
    order = mask.int().sort(dim=1, stable=True).indices
    moved = mask.gather(1, order)
    return ids.gather(1, order) * moved, moved


def _placed(
    rollout: Rollout, rows: Int[Tensor, " n"], new: Bool[Tensor, "n M"], padding: int
) -> tuple[Rollout, tuple[Tensor, Tensor]]:
    """Return a copy of the rollout that has room for the new tokens of `rows`, and the index (row, column) of each new
    token, behind its row's last token."""
    T = rollout.input_ids.shape[1]
    positions = torch.arange(T, device=rows.device)
    last = torch.where(rollout.attention_mask[rows], positions, -1).amax(1)
    extra = max(0, int((last + new.sum(1)).max()) + 1 - T)
    wide = replace(padded(rollout, 0, extra, padding), finished=rollout.finished.clone())
    row, offset = new.nonzero(as_tuple=True)
    return wide, (rows[row], last[row] + 1 + offset)


def _texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Return the text of each row after the prompt, tool text included, without the end token that closes a row."""
    tokens, mask = rollout.input_ids[:, rollout.first :], rollout.attention_mask[:, rollout.first :]
    return decode_text(tokenizer, tokens, mask.sum(1) - rollout.finished.long())
