"""Prompts -> completions, their log-probabilities, rewards and routes.

- `task`             what a verifiable task is
- `character_tasks`, `calculator`, `string_tasks` the small ones that come along
- `jsonl_task`       a file of prompts and answers
- `gym_task`         reasoning-gym
- `verifiers`        is the answer right?
- `tasks`            tasks by name, one's own included
- `chat`             prompts as messages
- `engine`           a model answers; random numbers by seed and purpose; `sampling` for whoever has no run
- `engine_config`, `engines` who else samples
- `vllm_engine`, `vllm_place` vLLM, in a process and a Python of its own: here (`server_process`) or elsewhere
  (`server_http`); `vllm_host` is what runs there
- `supervision`      the task answers; rewards of steps, several rewards
- `completions`, `joining` prompts and what comes of them as tensors; several as one
"""

from moe_rl.rollout.completions import Rollout, score
from moe_rl.rollout.engine import Engine, Tolerance, seeded_generator, seeded_random
from moe_rl.rollout.sampling import sample
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
