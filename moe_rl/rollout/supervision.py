"""More than one verdict per completion: rewards of steps, placed on tokens, and several rewards side by side.

Both are optional parts of a task (see `moe_rl.rollout.task.Task`).
"""

import bisect
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.task import TaskError, checked_reward, user_code


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
