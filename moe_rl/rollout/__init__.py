"""Tasks and rollouts: from prompts to completions with their log-probabilities, rewards and routes.

- `task`             the protocol of a verifiable task; problems, and prompts given as chat messages
- `character_tasks`, `string_tasks` the small tasks that come with the package
- `jsonl_task`       tasks made of a file of prompts and answers
- `gym_task`         tasks of reasoning-gym
- `verifiers`        functions that judge whether a completion gives the right answer
- `tasks`            the registry of tasks by name, and the loading of your own task classes
- `engine`           sampling with the model itself, also without a run (`sample`); random numbers by seed and purpose
- `engine_config`, `engines` the protocol and the settings of rollout engines, and those with weights of their own
- `vllm_engine`      vLLM in a process and a Python of its own, on this machine or another (`vllm_servers`); `vllm_host`
  is the code that runs there
- `supervision`      demonstrations by the task, rewards of single steps, several rewards per completion
- `completions`      the tensors of a rollout; several rollouts joined into one
- `continuing`       responses that are sampled in several parts: partial rollouts and several turns
- `dapo`             dynamic sampling and the penalty of overlong responses
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
