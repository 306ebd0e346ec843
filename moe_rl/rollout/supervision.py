"""What a task says besides one reward: demonstrations, in the form of a rollout; rewards of steps, placed on tokens;
several rewards side by side.

All are optional parts of a task (see `moe_rl.rollout.task.Task`).
"""

import bisect
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.rollout.completions import Rollout, encode_prompts, padding_token
from moe_rl.rollout.task import Problem, TaskError, checked_reward, token_ids, user_code


def demonstrate(task: Any, tokenizer: Any, problems: Sequence[Problem], rng: random.Random) -> Rollout:
    """The task's own clean answers, one per problem, each with its end token; groups of one.

    Prompt and answer are tokenized apart, as in sampling; what a tokenizer puts around a text (a beginning token) is
    around the prompt alone. `logps` are 0: no policy drew these tokens.

    Raises:
        TaskError: the task has no `demonstration`, or its code failed.
    """
    texts = []
    for problem in problems:
        with user_code(task, "demonstration", problem):
            texts.append(task.demonstration(problem, rng, 0.0))
    prompts, prompt_mask = encode_prompts(tokenizer, problems)
    ended = [text + tokenizer.eos_token for text in texts]
    answers = [list(ids) for ids in token_ids(tokenizer, ended, add_special_tokens=False)]
    lengths = torch.tensor([len(ids) for ids in answers])
    written = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(written.shape, padding_token(tokenizer))
    ids[written] = torch.tensor([token for row in answers for token in row])
    input_ids = torch.cat([prompts, ids], 1)
    return Rollout(
        input_ids=input_ids,
        attention_mask=torch.cat([prompt_mask, written], 1),
        completion_mask=F.pad(written, (prompts.shape[1], 0)),
        logps=torch.zeros(input_ids.shape),
        rewards=torch.full((len(texts),), float("nan")),
        finished=torch.ones(len(texts), dtype=torch.bool),
        group_size=1,
        problems=list(problems),
        completions=texts,
    )


def step_rewards(task: Any, tokenizer: Any, rollout: Rollout) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """The task's step rewards, each on the token that ends its step, and where steps end.

    A step ends on the first token whose text reaches the step's last character. Steps that end on one token (several
    characters in a token) add up.

    Raises:
        TaskError: a step that ends outside the completion.
    """
    B, T = rollout.input_ids.shape
    rewards, ends = torch.zeros(B, T), torch.zeros(B, T, dtype=torch.bool)
    first = rollout.completion_mask.int().argmax(1).tolist()
    for row, (problem, text) in enumerate(zip(rollout.problems, rollout.completions, strict=True)):
        tokens = rollout.input_ids[row, first[row] : first[row] + int(rollout.lengths[row])].tolist()
        with user_code(task, "step_rewards", problem, text):
            steps = [(end, checked_reward(reward)) for end, reward in task.step_rewards(problem, text)]
        for end, reward in steps:
            if not 1 <= end <= len(text):
                raise TaskError(
                    f"{task.name}.step_rewards: a step ends at character {end} of the {len(text)} of {text!r}; "
                    "expected the number of characters up to and with its last one"
                )
            column = first[row] + _token_reaching(tokenizer, tokens, end)
            rewards[row, column] += reward
            ends[row, column] = True
    device = rollout.input_ids.device
    return rewards.to(device), ends.to(device)


def _token_reaching(tokenizer: Any, tokens: list[int], end: int) -> int:
    """Index of the first token with which the text has `end` characters."""

    def length(count: int) -> int:
        text = tokenizer.decode(tokens[: count + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return len(text)

    return min(bisect.bisect_left(range(len(tokens)), end, key=length), len(tokens) - 1)


def named_rewards(task: Any, rollout: Rollout) -> tuple[list[str], Float[Tensor, "B R"]]:
    """The task's several rewards: their names and one column each.

    Raises:
        TaskError: completions whose rewards have other names.
    """
    found = []
    for problem, text in zip(rollout.problems, rollout.completions, strict=True):
        with user_code(task, "rewards", problem, text):
            found.append({name: checked_reward(value) for name, value in task.rewards(problem, text).items()})
    names = list(found[0])
    for text, one in zip(rollout.completions, found, strict=True):
        if list(one) != names:
            raise TaskError(f"{task.name}.rewards: expected {names} for every completion, got {list(one)} for {text!r}")
    table = torch.tensor([[one[name] for name in names] for one in found])
    return names, table.to(rollout.input_ids.device)
