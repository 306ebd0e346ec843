"""A study of seconds: a model of a few thousand parameters, and a verifier under which a random one has rewards."""

import json

from moe_rl.measure import token_logps
from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import TinyConfig
from moe_rl.rollout import TaskConfig
from moe_rl.training import EvalConfig, OptimConfig, ProbeConfig, RolloutConfig, RunConfig

MICRO = RunConfig(
    model=ModelConfig(
        tiny=TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8),
        cold_start=None,
    ),
    task=TaskConfig(name="mod_chain", options={"steps": 1}),
    rollout=RolloutConfig(prompts=4, group_size=4),
    optim=OptimConfig(steps=2, num_minibatches=2, learning_rate=1e-2, warmup_updates=2),
    eval=EvalConfig(prompts=8),
    probe=ProbeConfig(sequences=4, tokens_every=1),
    checkpoint_every=1,
)


class Judge:
    """A task whose verifier pays by parity, so that a random model has reward variance: for an even sum of characters;
    for steps; two rewards, of which one is short answers."""

    def __init__(self, task):
        self.task = task
        # isinstance(judge, Task) does not ask __getattr__ since Python 3.12.
        self.name, self.alphabet, self.max_new_tokens = task.name, task.alphabet, task.max_new_tokens
        self.problem = task.problem

    def __getattr__(self, name):
        return getattr(self.task, name)

    def reward(self, problem, completion):
        return float(sum(map(ord, completion)) % 2)

    def step_rewards(self, problem, completion):
        return [(end, float(ord(completion[end - 1]) % 2)) for end in range(2, len(completion) + 1, 2)]

    def rewards(self, problem, completion):
        return {"odd": self.reward(problem, completion), "short": float(len(completion) < 4)}


def judged(make_task):
    """`make_task`, its tasks under the Judge."""
    return lambda config: Judge(make_task(config))


def rows(folder, kind=None, timed=False, **values):
    """Rows of metrics.jsonl of one kind with these values; without a kind all but, unless `timed`, the step's times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [r for r in found if (r["kind"] == kind if kind else timed or r["kind"] != "step")]
    return [r for r in found if all(r[key] == value for key, value in values.items())]


def logps(state, model, part):
    """Log-probabilities of a batch or rollout under one of a run's models."""
    tokens = part.input_ids, part.attention_mask, part.completion_mask
    return token_logps(model, *tokens, temperature=state.config.rollout.temperature)
