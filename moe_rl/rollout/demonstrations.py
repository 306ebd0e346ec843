"""Demonstrations in the form of a rollout, for imitation in the same loop."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.sampler import encode_prompts
from moe_rl.rollout.task import Problem, user_code


def demonstrate(task: Any, tokenizer: Any, problems: Sequence[Problem], rng: random.Random) -> Rollout:
    """The task's own clean answers, one per problem, each with its end token; groups of one.

    Prompt and answer are tokenized apart, as in sampling. `logps` are 0: no policy drew these tokens.

    Raises:
        AttributeError: the task has no `demonstration`.
    """
    texts = []
    for problem in problems:
        with user_code(task, "demonstration", problem):
            texts.append(task.demonstration(problem, rng, 0.0))
    prompts, prompt_mask = encode_prompts(tokenizer, problems)
    answers = [list(ids) for ids in tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]]
    lengths = torch.tensor([len(ids) for ids in answers])
    written = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(written.shape, int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0))
    ids[written] = torch.tensor([token for row in answers for token in row])

    def behind(prompt: Tensor, answer: Tensor) -> Tensor:
        return torch.cat([prompt, answer], 1)

    input_ids = behind(prompts, ids)
    return Rollout(
        input_ids=input_ids,
        attention_mask=behind(prompt_mask, written),
        completion_mask=behind(torch.zeros_like(prompt_mask), written),
        logps=torch.zeros(input_ids.shape),
        rewards=torch.full((len(texts),), float("nan")),
        finished=torch.ones(len(texts), dtype=torch.bool),
        group_size=1,
        problems=list(problems),
        completions=texts,
    )
