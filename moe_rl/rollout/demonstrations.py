"""Demonstrations in the form of a rollout, for imitation in the same loop."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.engine import encode_prompts
from moe_rl.rollout.sampler import padding_token
from moe_rl.rollout.task import Problem, token_ids, user_code


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
