"""Supervision by a task beyond one reward: demonstrations in the form of a rollout, rewards of steps placed on tokens,
and several rewards per completion.

All three are optional parts of a task (see `moe_rl.rollout.task.Task`).
"""

import bisect
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_rl.measure.catalogue import CATALOGUE
from moe_rl.rollout.completions import UNWRITTEN, Rollout, encode_prompts, rollout_from_tokens
from moe_rl.rollout.task import Problem, TaskError, checked_reward, token_ids, user_code


def demonstrate(task: Any, tokenizer: Any, problems: Sequence[Problem], rng: random.Random) -> Rollout:
    """Return a rollout of the task's own clean answers, one per problem, each with its end token; groups of one.

    Prompt and answer are tokenized apart, as in sampling; special tokens that a tokenizer puts around a text (a
    beginning token) stand around the prompt alone. `logps` are 0: no policy drew these tokens.

    Raises:
        TaskError: the task has no `demonstration`, or its code failed; the tokenizer has no end token.
    """
    texts = []
    for problem in problems:
        with user_code(task, "demonstration", problem):
            text = task.demonstration(problem, rng, 0.0)
            if not isinstance(text, str):
                raise TaskError(f"expected a text, got {text!r}")
            texts.append(text)
    if tokenizer.eos_token is None:
        raise TaskError(
            "the tokenizer has no end token, with which a demonstration ends: set tokenizer.eos_token, and save the "
            "tokenizer beside the model (save_pretrained)"
        )
    prompts = encode_prompts(tokenizer, problems)
    ended = token_ids(tokenizer, [text + tokenizer.eos_token for text in texts], add_special_tokens=False)
    answers = pad_sequence([torch.tensor(ids) for ids in ended], batch_first=True, padding_value=UNWRITTEN)
    ends = torch.tensor([tokenizer.eos_token_id])
    rollout = rollout_from_tokens(tokenizer, problems, 1, *prompts, answers, torch.zeros(answers.shape), ends)
    return replace(rollout, completions=texts)


def step_rewards(
    task: Any, tokenizer: Any, rollout: Rollout, seconds: float | None = None
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return the task's step rewards, each on the token that ends its step, and a bool mask of these tokens.

    A step ends on the first token that makes the step's last character complete: a character can be several tokens.
    Rewards of steps that end on the same token (several characters in a token) add up. In several turns the completion
    includes the task's replies, and a step may end in one of them.

    Args:
        seconds: how long the task may take for one completion; None: no limit.

    Raises:
        TaskError: a step that ends outside the completion; the task's code failed or took too long.
    """
    B, T = rollout.input_ids.shape
    rewards, ends = torch.zeros(B, T), torch.zeros(B, T, dtype=torch.bool)
    first = rollout.completion_mask.int().argmax(1).tolist()
    for row, (problem, text) in enumerate(zip(rollout.problems, rollout.completions, strict=True)):
        answer = slice(first[row], None)
        tokens = rollout.input_ids[row, answer][rollout.attention_mask[row, answer]].tolist()
        with user_code(task, "step_rewards", problem, text, seconds):
            steps = [(_within(end, text), checked_reward(reward)) for end, reward in task.step_rewards(problem, text)]
        for end, reward in steps:
            column = first[row] + _token_reaching(tokenizer, tokens, text[:end])
            rewards[row, column] += reward
            ends[row, column] = True
    device = rollout.input_ids.device
    return rewards.to(device), ends.to(device)


def _within(end: Any, text: str) -> int:
    """Return `end`, the number of characters up to a step's end. Raises TaskError unless 1 <= `end` <= len(text)."""
    if not 1 <= operator.index(end) <= len(text):
        raise TaskError(
            f"a step ends at character {end} of the {len(text)}; expected the number of characters up to and with its "
            "last one"
        )
    return end


def _token_reaching(tokenizer: Any, tokens: list[int], beginning: str) -> int:
    """Return the index of the first token at which the decoded text starts with `beginning`. Its length would not tell:
    a character of several tokens decodes to one or more replacement characters until its last token."""

    def reached(last: int) -> bool:
        text = tokenizer.decode(tokens[: last + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.startswith(beginning)

    return min(bisect.bisect_left(range(len(tokens)), True, key=reached), len(tokens) - 1)


def named_rewards(task: Any, rollout: Rollout, seconds: float | None = None) -> tuple[list[str], Float[Tensor, "B R"]]:
    """Return the names of the task's several rewards, and a table with one row per completion and one column per name.

    Args:
        seconds: how long the task may take for one completion; None: no limit.

    Raises:
        TaskError: the task's code failed or took too long; no reward at all, completions whose rewards have other
            names, or a name whose column `reward_<name>` is another number.
    """
    found: list[dict[str, float]] = []
    for problem, text in zip(rollout.problems, rollout.completions, strict=True):
        with user_code(task, "rewards", problem, text, seconds):
            found.append({name: checked_reward(value) for name, value in task.rewards(problem, text).items()})
            if not found[-1] or found[-1].keys() != found[0].keys():
                wanted = f"{list(found[0])} for every completion" if found[0] else "one or more rewards"
                raise TaskError(f"expected {wanted}, got {list(found[-1])}")
    names = list(found[0])
    if taken := [name for name in names if f"reward_{name}" in {metric.name for metric in CATALOGUE["rollout"]}]:
        raise TaskError(f"task {task.name}, rewards: rows have a reward_{taken[0]} already; rename {taken[0]!r}")
    table = torch.tensor([[one[name] for name in names] for one in found])
    return names, table.to(rollout.input_ids.device)
