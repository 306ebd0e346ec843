"""No number that is none passes for a result, and user code that fails says where."""

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from micro import MICRO, rows
from safetensors.torch import load_file

from moe_rl.policy.models import ModelConfig, load_model
from moe_rl.policy.tiny import ColdStartConfig
from moe_rl.rollout.task import TaskError
from moe_rl.routing import RoutedExperts
from moe_rl.training import MethodConfig, ProbeConfig, run, train
from moe_rl.training.incidents import NotFiniteError, keep_incident
from moe_rl.training.loop import collect_batch

OVERFLOW = replace(MICRO, optim=replace(MICRO.optim, aux_loss_coef=1e38))


def test_a_gradient_that_is_no_number_stops_the_run_and_moves_nothing(state_of, tmp_path):
    state = state_of(OVERFLOW, tmp_path)
    before = {name: weight.clone() for name, weight in state.policy.state_dict().items()}
    said = (
        r"step 0, update 1: the gradient norm is (nan|inf).*not finite: .*grad_norm.*first of them .*weight.*incidents"
    )
    with pytest.raises(FloatingPointError, match=said):
        run(state)
    assert all(torch.equal(weight, before[name]) for name, weight in state.policy.state_dict().items())
    kept = tmp_path / "incidents" / "step_000000_update_1"
    assert json.loads((kept / "row.json").read_text())["grad_norm"] in ("nan", "inf")
    assert RoutedExperts.load(kept / "routes.safetensors").shape[0] == 8
    assert not rows(tmp_path, "update")
    weights = load_model(str(kept / "state"), ModelConfig(path="", dtype="float32")).state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items()), "any tool opens it"
    assert (kept / "state" / "optimizer.safetensors").exists() and (kept / "state" / "rng.safetensors").exists()


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_or_it_is_left_out_and_said_so(state_of, tmp_path, objective):
    """A value model does not move either."""
    optim = replace(OVERFLOW.optim, on_nonfinite="skip")
    state = state_of(replace(OVERFLOW, method=MethodConfig(objective=objective), optim=optim), tmp_path)
    modules = [module for module, _ in state.trained.values()]
    before = [{name: weight.clone() for name, weight in module.state_dict().items()} for module in modules]
    run(state)
    updates = rows(tmp_path, "update")
    assert len(updates) == 4 and all(row["skipped"] and row["grad_norm"] is None for row in updates)
    for module, old in zip(modules, before, strict=True):
        assert all(torch.equal(weight, old[name]) for name, weight in module.state_dict().items())
    assert len(modules) == (2 if objective == "ppo" else 1)
    kept = [folder.name for folder in (tmp_path / "incidents").iterdir() if (folder / "batch.safetensors").exists()]
    assert len(kept) == 4
    assert [path.parent.name for path in tmp_path.glob("incidents/*/state")] == ["step_000000_update_1"]


@pytest.mark.parametrize("then", ["stop", "skip"])
def test_a_gradient_of_the_value_model_counts_as_one_of_the_policy(state_of, tmp_path, then):
    optim = replace(MICRO.optim, on_nonfinite=then)
    state = state_of(replace(MICRO, method=MethodConfig(objective="ppo"), optim=optim, probe=ProbeConfig(0)), tmp_path)
    modules = [module for module, _ in state.trained.values()]
    before = [{name: weight.clone() for name, weight in module.state_dict().items()} for module in modules]
    state.critic.model.head.weight.register_hook(lambda gradient: gradient * math.nan)
    if then == "stop":
        with pytest.raises(FloatingPointError, match=r"beside the policy .*value_grad_norm.*first .* value.head.w"):
            run(state)
    else:
        run(state)
        assert all(r["skipped"] and r["grad_norm"] and r["value_grad_norm"] is None for r in rows(tmp_path, "update"))
    for module, old in zip(modules, before, strict=True):
        assert all(torch.equal(weight, old[name]) for name, weight in module.state_dict().items())
    assert len(list((tmp_path / "incidents").iterdir())) == (1 if then == "stop" else 4)


def break_at(state, step, module):
    """`module` is full of NaN from the last update before `step` on."""
    append = state.log.append

    def broken(kind, number, **values):
        append(kind, number, **values)
        if kind == "step" and number == step - 1:
            with torch.no_grad():
                module.weight.fill_(float("nan"))

    state.log.append = broken


@pytest.mark.parametrize("step", [1, 2])
def test_a_policy_of_nans_has_no_samples_and_no_held_out_rewards(state_of, tmp_path, step):
    state = state_of(MICRO, tmp_path)
    break_at(state, step, state.policy.lm_head)
    with pytest.raises(FloatingPointError, match=rf"step {step}, sampling: logps of .* not finite.* to '\^.*incidents"):
        run(state)
    assert {row["step"] for row in rows(tmp_path, "update")} == set(range(step))
    assert {row["step"] for row in rows(tmp_path, "eval")} == {0}
    kept = tmp_path / "incidents" / f"step_{step:06d}_sampling"
    assert not load_file(kept / "batch.safetensors")["logps"].isfinite().all()
    assert load_file(kept / "state" / "model.safetensors")["lm_head.weight"].isnan().all()


def test_a_reference_of_nans_is_named_with_the_prompt(state_of, tmp_path):
    state = state_of(replace(MICRO, method=MethodConfig(objective="grpo", kl_coef=0.1)), tmp_path)
    with torch.no_grad():
        state.reference.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"step 0, scoring: ref_logps of 16 of 16 .* to '\^.*scoring"):
        run(state)
    assert (tmp_path / "incidents" / "step_000000_scoring" / "batch.safetensors").exists()


@pytest.mark.parametrize("then", ["stop", "skip"])
def test_log_probabilities_that_are_none_in_an_update_name_it_and_are_kept(state_of, tmp_path, then):
    """The first update throws the weights so far that the second one's forward overflows."""
    optim = replace(MICRO.optim, learning_rate=1e36, warmup_updates=0, on_nonfinite=then)
    state = state_of(replace(MICRO, optim=optim, probe=ProbeConfig(every=0)), tmp_path)
    with pytest.raises(FloatingPointError, match=r"step 0, update 2: logps: .* are not finite.*incidents"):
        run(state)
    kept = tmp_path / "incidents" / "step_000000_update_2"
    assert (kept / "batch.safetensors").exists() and (kept / "state" / "model.safetensors").exists()


def test_a_rank_that_alone_meets_one_keeps_what_it_says_it_keeps(state_of, tmp_path):
    """Only its rows overflowed: the others do not come here, and rank 0 writes nothing."""
    state = state_of(MICRO, tmp_path)
    batch = collect_batch(state)
    state.ranks = SimpleNamespace(size=2, rank=1, main=False)
    kept = keep_incident(state, NotFiniteError("scoring", "logps of 1 of 8 responses are not finite", batch))
    assert kept.name == "step_000000_scoring_rank1"
    assert torch.equal(load_file(kept / "batch.safetensors")["input_ids"], batch.input_ids)


def failing(monkeypatch, reward):
    from moe_rl.rollout.character_tasks import ModChain

    monkeypatch.setattr(ModChain, "reward", reward)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "expected a finite reward.*got nan"),
        (1e38, r"expected a finite reward.*1e\+38"),
        ("good", "expected a number, got 'good'"),
    ],
)
def test_a_reward_that_is_no_number_names_prompt_completion_and_step(tmp_path, monkeypatch, value, said):
    failing(monkeypatch, lambda self, problem, completion: value)
    with pytest.raises(TaskError, match=rf"step 0: task mod_chain, reward: {said}; prompt '\^.*completion '.*goes on"):
        train(MICRO, tmp_path)


def test_an_exception_or_an_exit_in_a_verifier_is_no_success(tmp_path, monkeypatch):
    def leave(self, problem, completion):
        raise SystemExit(0)

    failing(monkeypatch, leave)
    with pytest.raises(TaskError, match=r"reward: SystemExit: 0; prompt"):
        train(MICRO, tmp_path)


@pytest.mark.parametrize(
    ("part", "advantage"), [("reward", None), ("step_rewards", "process"), ("rewards", "decoupled")]
)
def test_a_verifier_that_does_not_return_is_stopped(part, advantage, tmp_path, monkeypatch):
    monkeypatch.setattr(f"moe_rl.rollout.character_tasks.ModChain.{part}", lambda *_: time.sleep(600))
    method = MethodConfig(objective="grpo", advantage=advantage)
    began = time.monotonic()
    said = rf"{part}: did not return within 0\.2 seconds \(task\.verifier_seconds\); prompt"
    with pytest.raises(TaskError, match=said):
        train(replace(MICRO, method=method, task=replace(MICRO.task, verifier_seconds=0.2)), tmp_path)
    assert time.monotonic() - began < 500


def test_a_verifier_that_does_not_return_is_stopped_before_a_cold_start_too(tmp_path, monkeypatch):
    """On the empty completion, by which a kept cold start recognises its task: not of step 0, which names itself."""

    def hang(self, problem, completion):
        time.sleep(0 if completion else 0.5)
        return 0.0

    monkeypatch.setattr("moe_rl.rollout.character_tasks.ModChain.reward", hang)
    model = replace(MICRO.model, cold_start=ColdStartConfig(steps=1, check_problems=1))
    with pytest.raises(TaskError, match=r"^task mod_chain, reward: did not return within 0\.1 seconds .*completion ''"):
        train(replace(MICRO, model=model, task=replace(MICRO.task, verifier_seconds=0.1)), tmp_path)


def test_a_run_whose_task_failed_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """After the fault is mended, the numbers are those of a run without it."""
    from moe_rl.rollout.character_tasks import ModChain

    right = ModChain.reward
    train(MICRO, tmp_path / "whole")
    calls = [0]

    def once(self, problem, completion):
        calls[0] += 1
        if calls[0] > 30:  # in the second step
            raise RuntimeError("the judge is out")
        return right(self, problem, completion)

    failing(monkeypatch, once)
    with pytest.raises(TaskError, match=r"step 1: .*the judge is out"):
        train(MICRO, tmp_path / "broken")
    monkeypatch.setattr(ModChain, "reward", right)
    train(MICRO, tmp_path / "broken")
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
