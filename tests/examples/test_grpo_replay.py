"""The one-file example is the trainer's algorithm: the same weights, bit for bit."""

import importlib.util
from pathlib import Path

import pytest
import torch
from sweeps import sweep

from moe_rl.policy import ModelConfig, TinyConfig, load_policy, seeded
from moe_rl.rollout import TaskConfig, make_task
from moe_rl.training import EvalConfig, MethodConfig, OptimConfig, ProbeConfig, RolloutConfig, RunConfig, begin, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_replay.py"


def example():
    spec = importlib.util.spec_from_file_location("grpo_replay", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--steps", "0", "--steps: at least 1, got 0"), ("--seed", "-1", "--seed: at least 0, got -1")],
)
def test_no_steps_and_no_seed_are_refused_before_the_cold_start(monkeypatch, capsys, option, value, message):
    monkeypatch.setattr("sys.argv", ["grpo_replay.py", option, value])
    with pytest.raises(SystemExit):
        example().main()
    assert message in capsys.readouterr().err


def test_it_offers_the_methods_that_it_makes():
    """The others would run, with the advantages of GRPO."""
    assert {"grpo", "gspo", "drpo"} < set(example().METHODS)
    assert not {"ppo", "sft", "rft", "dr_grpo", "minirl", "rspo", "grpo_tis"} & set(example().METHODS)


class ByParity:
    """A verifier under which a random policy has reward variance."""

    def __init__(self, task):
        self.name, self.alphabet, self.max_new_tokens = task.name, task.alphabet, task.max_new_tokens
        self.problem = task.problem

    def reward(self, problem, completion):
        return float(sum(map(ord, completion)) % 2)


@pytest.mark.parametrize(
    ("objective", "replay", "scoring", "shared"),
    [
        ("grpo", True, "pass", False),
        ("gspo", False, "pass", False),
        sweep("grpo", True, "decoding", False),
        sweep("drpo", True, "pass", False),
        sweep("grpo", True, "pass", True),
        ("gspo", False, "decoding", True),
    ],
)
def test_it_ends_with_the_trainers_weights(tmp_path, monkeypatch, objective, replay, scoring, shared):
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    config = RunConfig(
        model=ModelConfig(tiny=tiny, cold_start=None, device="cpu"),
        task=TaskConfig(name="mod_chain", options={"steps": 1}),
        method=MethodConfig(objective=objective, replay="R2" if replay else "none"),
        rollout=RolloutConfig(prompts=8, group_size=4, scoring=scoring),
        optim=OptimConfig(steps=4, num_minibatches=4, learning_rate=1e-2, warmup_updates=3, share_prompts=shared),
        eval=EvalConfig(every=0, prompts=2),
        probe=ProbeConfig(every=0),
        seed=3,
    )
    monkeypatch.setattr("moe_rl.training.setup.make_task", lambda config: ByParity(make_task(config)))
    state = begin(config, tmp_path)
    run(state)
    task = ByParity(make_task(config.task))
    policy, tokenizer = load_policy(seeded(config.model, config.seed), task)
    start = {name: weight.clone() for name, weight in policy.state_dict().items()}
    sizes = {"prompts": 8, "group_size": 4, "num_minibatches": 4, "learning_rate": 1e-2, "warmup_updates": 3}
    example().train(policy, tokenizer, task, objective, replay, scoring == "pass", shared, steps=4, seed=3, **sizes)
    ours = state.policy.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in policy.state_dict().items())
    assert not any(torch.equal(weight, start[name]) for name, weight in ours.items() if "norm" not in name)


def test_it_is_one_short_file():
    assert len(EXAMPLE.read_text().splitlines()) <= 150
