"""docs/extending.md, executed: its diffs apply to a copy of the package, its files are written, and what they add
works there."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_rl.objectives import GATES, Objective, policy_loss, token_weights
from moe_rl.rollout import Problem, TaskConfig, TaskError, make_task
from moe_rl.rollout.engines import EngineConfig
from moe_rl.rollout.jsonl_task import JsonLines
from moe_rl.training import train
from moe_rl.training.method import resolve_method

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```diff\n(.*?)```", PAGE, re.S | re.M))
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.S))
sys.path.append(str(ROOT / "tests" / "training"))
from micro import MICRO, rows  # noqa: E402

USES = {
    "A method": """
import torch
from moe_rl.objectives import OBJECTIVES, policy_loss, token_weights
from moe_rl.objectives.methods_table import methods_markdown
from moe_rl.training import MethodConfig, RunConfig, validate
from moe_rl.training.method import resolved_objective

logps = torch.tensor([[-1.0, -1.0]]) + torch.tensor([[1.15, 1.05]]).log()
out = policy_loss("grpo_tight", logps, torch.full((1, 2), -1.0), torch.ones(1), torch.ones(1, 2))
assert out.clipped.tolist() == [[True, False]]
assert "| `grpo_tight` | token | clip | [0.9, 1.1] |" in methods_markdown()
config = RunConfig(method=MethodConfig(objective="grpo_tight"))
validate(config)
assert resolved_objective(config)["clip_low"] == 0.1
""",
}

USES["A metric"] = f"""
import sys
from dataclasses import replace
from pathlib import Path
sys.path.append({str(ROOT / "tests" / "training")!r})
from micro import MICRO, rows
from moe_rl.measure.catalogue import find, render
from moe_rl.training import train

assert find("probe", "experts_idle").unit == "fraction" and "| `experts_idle` | fraction |" in render()
folder = Path("run")
train(replace(MICRO, optim=replace(MICRO.optim, steps=1)), folder)
probes = rows(folder, "probe")
assert probes and all(0 <= row["experts_idle"] < 1 for row in probes)
"""

USES["A figure"] = """
import pandas as pd
from moe_rl.cli import main
from moe_rl.study.figures import FIGURES

assert "entropy" in FIGURES
main(["figures", "run", "entropy"])
drawn = Path("run/figures")
assert sorted(path.suffix for path in drawn.glob("entropy.*")) == [".csv", ".md", ".pdf", ".png", ".svg"]
assert (drawn / "entropy.md").read_text().startswith("**Entropy.** Mean entropy of the distributions")
means = [row["entropy"] for row in rows(folder, "update")]
assert abs(pd.read_csv(drawn / "entropy.csv")["mean"].iloc[0] - sum(means) / len(means)) < 1e-6
"""

MINE = """
from moe_rl.rollout.jsonl_task import JsonLines

class Mine(JsonLines):
    name = "mine"

    def reward(self, problem, completion):
        return len(completion) / len(problem.answer)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a folder with a copy of the package to which every diff of the page is applied."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "moe_rl", folder / "moe_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name, diff in DIFFS.items():
        applied = subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, capture_output=True)
        assert applied.returncode == 0, f"the diff of '{name}' in docs/extending.md is stale: {applied.stderr}"
    return folder


def test_every_diff_of_the_page_is_used():
    assert list(DIFFS) == list(USES)


def test_the_page_counts_the_lines_of_its_diffs():
    said = re.findall(r"(?m)^\| \[(a [a-z ]+)\].* (\d+) \|$", PAGE)
    lines = {name.lower(): len(re.findall(r"(?m)^\+(?!\+\+ ) *\S", diff)) for name, diff in DIFFS.items()}
    assert said and {name: int(count) for name, count in said} == {name: lines[name] for name, _ in said}


def test_what_the_diffs_add_works(copy):
    program = "\n".join(USES.values())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, env={"PYTHONPATH": str(copy)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a folder with the files of the page, which is also made the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_run_trains_on_the_page_s_task(own):
    config = replace(MICRO, task=TaskConfig("tasks.py:Double", {"below": 100}))
    train(config, own / "run")
    rewards = [row["reward"] for row in rows(own / "run", "rollout")]
    assert len(rewards) == 2 and all(0 <= reward < 1 for reward in rewards)
    assert [row["reward_n"] for row in rows(own / "run", "eval")] == [8, 8]


def test_a_run_trains_through_the_page_s_gate(own):
    method = replace(MICRO.method, objective="grpo", gate="gates.py:log_mask", clip_low=0.2, clip_high=0.3)
    config = replace(MICRO, method=method)
    train(config, own / "run")
    assert rows(own / "run", "update") and resolve_method(config, 1).objective.gate == "log_mask"
    assert GATES["log_mask"].knobs == ("clip_low", "clip_high")
    objective = Objective(gate="log_mask", clip_low=0.2, clip_high=0.3)
    logps = torch.tensor([[-1.0 + 0.4, -1.0 + 0.1, -1.0 - 0.4]], requires_grad=True)
    arguments = (torch.full((1, 3), -1.0), torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3))
    out = policy_loss(objective, logps, *arguments)
    out.loss.backward()
    assert out.clipped.tolist() == [[True, False, True]]
    torch.testing.assert_close(logps.grad, torch.tensor([[0.0, -math.exp(0.1) / 3, 0.0]]))
    torch.testing.assert_close(token_weights(objective, logps, *arguments).weight, -logps.grad)


def test_a_reward_of_ones_own_for_a_file_of_answers(own):
    (own / "mine.py").write_text(MINE, encoding="utf-8")
    (own / "questions.jsonl").write_text('{"prompt": "2*21=", "answer": 42}\n', encoding="utf-8")
    options = {"path": "questions.jsonl", "max_new_tokens": 4}
    task = make_task(TaskConfig("mine.py:Mine", options))
    assert (task.name, task.max_new_tokens, task.reward(Problem("2*21=", "42"), "4")) == ("mine", 4, 0.5)
    tests = [{"prompt": f"{n}!", "tests": [n, {"of": n}], "seen": 0} for n in range(60)]
    Path("questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tests))
    given = make_task(TaskConfig("mine.py:Mine", {**options, "fields": ["tests"]}))
    problem = given.problem(random.Random(0))
    n = int(problem.prompt[:-1])
    assert (problem.answer, problem.fields) == ("", {"tests": [n, {"of": n}]})
    with pytest.raises(TaskError, match="fields are for a `reward` of your own"):
        type("Named", (JsonLines,), {"name": "named"})(path="questions.jsonl", fields=["tests"])
    other = make_task(TaskConfig("mine.py:Mine", {**options, "fields": ["seen"]}))
    assert other.identity != given.identity, "other fields are another task"
    with pytest.raises(TaskError, match="line 1: no field test, which"):
        make_task(TaskConfig("mine.py:Mine", {**options, "fields": ["test"]})).problem(random.Random(0))
    with pytest.raises(TaskError, match="a reward of your own is a subclass of JsonLines"):
        make_task(TaskConfig("jsonl", {**options, "verifier": "mine.py:reward"}))


def test_a_run_samples_with_the_page_s_engine(own):
    engine = EngineConfig("engines.py:Copy", options={"dtype": "bfloat16"})
    config = replace(MICRO, rollout=replace(MICRO.rollout, engine=engine))
    train(config, own / "run")
    found = [row for row in rows(own / "run", "engine") if row["pair"] == "engines"]
    assert len(found) == 2
    for row in found:
        assert 0 < row["gap_mean"] < 0.5, "bfloat16 is not the training model's arithmetic"
        assert 0 < row["sync_gap"] <= row["sync_tolerance"] >= 2e-2, "the tolerance is the engine's own"
