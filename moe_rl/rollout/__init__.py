"""Prompts -> completions, their log-probabilities, rewards and routes.

- `task`             what a verifiable task is; prompts as messages
- `character_tasks`, `string_tasks` the small ones that come along
- `jsonl_task`       a file of prompts and answers
- `gym_task`         reasoning-gym
- `verifiers`        is the answer right?
- `tasks`            tasks by name, one's own included
- `engine`           a model answers, also for whoever has no run (`sample`); random numbers by seed and purpose
- `engine_config`, `engines` who else samples
- `vllm_engine`      vLLM, in a process and a Python of its own, here or elsewhere (`vllm_servers`); `vllm_host` is what
  runs there
- `supervision`      the task answers; rewards of steps, several rewards
- `completions`      prompts and what comes of them as tensors; several as one
- `continuing`, `dapo` responses that go on; groups that are replaced, and what overlong responses pay
"""

from moe_rl.rollout.completions import Rollout, score
from moe_rl.rollout.engine import Engine, Tolerance, sample, seeded_generator, seeded_random
from moe_rl.rollout.supervision import demonstrate, named_rewards, step_rewards
from moe_rl.rollout.task import Problem, Task, TaskError, VerifiableTask, is_held_out
from moe_rl.rollout.tasks import TASKS, TaskConfig, make_task

__all__ = [
    "TASKS",
    "Engine",
    "Problem",
    "Rollout",
    "Task",
    "TaskConfig",
    "TaskError",
    "Tolerance",
    "VerifiableTask",
    "demonstrate",
    "is_held_out",
    "make_task",
    "named_rewards",
    "sample",
    "score",
    "seeded_generator",
    "seeded_random",
    "step_rewards",
]
