"""Prompts -> completions, their log-probabilities, rewards and routes.

`tasks` says what is asked and what an answer is worth; `sampler` lets a model answer.
"""

from moe_rl.rollout.sampler import Rollout, sample, score
from moe_rl.rollout.tasks import (
    TASKS,
    Problem,
    Task,
    TaskConfig,
    TaskError,
    VerifiableTask,
    is_held_out,
    make_task,
)

__all__ = [
    "TASKS",
    "Problem",
    "Rollout",
    "Task",
    "TaskConfig",
    "TaskError",
    "VerifiableTask",
    "is_held_out",
    "make_task",
    "sample",
    "score",
]
