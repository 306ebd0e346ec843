"""`env.json` of runs that were interrupted and went on under something else."""

import json
from dataclasses import replace

import pytest
from synthetic import read_rows, write_study

from moe_rl.policy import ColdStartConfig, ModelConfig, TinyConfig, models
from moe_rl.rollout import TaskConfig
from moe_rl.starts import begun_under, environments
from moe_rl.study import RunWriter, load, run
from moe_rl.study.config import ConfigError
from moe_rl.study.report import render_report
from moe_rl.training import EvalConfig, OptimConfig, ProbeConfig, RolloutConfig, RunConfig

START = ColdStartConfig(steps=2, batch_size=4, warmup_steps=1, check_problems=4)
TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
CONFIG = RunConfig(
    model=ModelConfig(tiny=TINY, cold_start=START),
    task=TaskConfig(name="mod_chain", options={"steps": 1}),
    rollout=RolloutConfig(prompts=4, group_size=4),
    optim=OptimConfig(steps=2, num_minibatches=1),
    eval=EvalConfig(prompts=4),
    probe=ProbeConfig(every=0),
    checkpoint_every=1,
)


class Stop(Exception):
    pass


def interrupted(folder, at, checkpoint=1):
    """A run that ends before row `at` of its rollouts."""

    def listen(row):
        if row["kind"] == "rollout" and row["step"] == at:
            raise Stop

    with pytest.raises(Stop):
        run.run_one(replace(CONFIG, checkpoint_every=checkpoint), folder, folder.parent / "starts", listen, "first")


def elsewhere(monkeypatch, **values):
    """From now on on another machine, whose cold start is another one."""
    here = run.environment
    monkeypatch.setattr(run, "environment", lambda command: {**here(command), **values})
    monkeypatch.setattr(models, "weights_sha256", lambda model: "0" * 64)


def test_a_run_that_goes_on_elsewhere_keeps_what_it_was_begun_with(tmp_path, monkeypatch):
    interrupted(tmp_path / "run", at=1)
    first = json.loads((tmp_path / "run" / "env.json").read_text())
    elsewhere(monkeypatch, kernels="OTHER")
    run.run_one(CONFIG, tmp_path / "run", tmp_path / "starts", command="second")
    last = json.loads((tmp_path / "run" / "env.json").read_text())
    assert (last["kernels"], last["command"]) == ("OTHER", "second")
    assert (last["weights_sha256"], last["cold_start"]) == (first["weights_sha256"], first["cold_start"])
    assert [start["kernels"] for start in last["earlier"]] == [first["kernels"]]
    assert last["earlier"][0]["started"] == first["started"] and "command" not in last["earlier"][0]


def test_a_run_of_which_nothing_is_left_begins_where_it_is(tmp_path, monkeypatch):
    interrupted(tmp_path / "run", at=1, checkpoint=10)
    elsewhere(monkeypatch, kernels="OTHER")
    run.run_one(replace(CONFIG, checkpoint_every=10), tmp_path / "run", tmp_path / "starts")
    last = json.loads((tmp_path / "run" / "env.json").read_text())
    assert last["weights_sha256"] == "0" * 64 and "earlier" not in last


def test_a_stopped_run_goes_on_and_keeps_its_policies_from_there(tmp_path):
    """Its rows are those of a run that kept none; its folder says what it was asked for last."""
    run.run_one(CONFIG, tmp_path / "whole", tmp_path / "starts")
    interrupted(tmp_path / "run", at=1)
    keeps = replace(CONFIG, keep_policy_every=2, checkpoint_every=5)
    for config in (keeps, replace(keeps, keep_policy_every=1)):  # it is done by then
        run.run_one(config, tmp_path / "run", tmp_path / "starts")
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
        assert load(tmp_path / "run").runs[0].setting("keep_policy_every") == 2
    interrupted(tmp_path / "older", at=1)
    older = tmp_path / "older" / "config.yaml"
    older.write_text("".join(line for line in older.open() if not line.startswith("keep_policy_every")))
    began = older.read_text()
    run.run_one(CONFIG, tmp_path / "older", tmp_path / "starts")
    assert older.read_text() == began, "what an older version can read, too, stays so"
    whole, halved = (read_rows(tmp_path / name) for name in ("whole", "run"))
    for row in (*whole, *halved):
        row.pop("seconds", None)
    assert halved == whole


def test_a_run_does_not_go_on_with_other_problems(tmp_path, monkeypatch):
    data = tmp_path / "sums.jsonl"
    lines = [json.dumps({"prompt": f"^{n}+1=", "answer": str(n + 1)}) for n in range(40)]
    data.write_text("\n".join(lines))
    task = TaskConfig(name="jsonl", options={"path": str(data), "max_new_tokens": 3})
    monkeypatch.setattr(f"{__name__}.CONFIG", replace(CONFIG, task=task, model=replace(CONFIG.model, cold_start=None)))
    interrupted(tmp_path / "run", at=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    data.write_text("\n".join([*lines[:-1], json.dumps({"prompt": "^39+1=", "answer": "41"})]))
    with pytest.raises(ConfigError, match=r"run was begun with other problems of the task jsonl: its data or code"):
        run.run_one(CONFIG, tmp_path / "run")
    assert before == {path: path.read_bytes() for path in before}
    data.write_text("\n".join(lines))
    run.run_one(CONFIG, tmp_path / "run")
    assert (tmp_path / "run" / "DONE").exists()


def test_a_task_that_draws_by_other_randomness_is_not_known_again_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import itertools\n"
        "from moe_rl.rollout.task import Problem\n"
        "COUNT = itertools.count()\n"
        "class Own:\n"
        "    name, alphabet, max_new_tokens = 'own', '0123456789=^$', 3\n"
        "    def problem(self, rng, held_out=False):\n"
        "        return Problem(f'^{next(COUNT)}=', '1')\n"
        "    def reward(self, problem, completion):\n"
        "        return float(completion == problem.answer)\n"
    )
    task = TaskConfig(name=f"{tmp_path / 'own.py'}:Own")
    assert run.check_task(replace(CONFIG, task=task)) == ""
    assert len(run.check_task(CONFIG)) == 64 and run.check_task(CONFIG) == run.check_task(CONFIG)
    monkeypatch.setattr(f"{__name__}.CONFIG", replace(CONFIG, task=task, model=replace(CONFIG.model, cold_start=None)))
    interrupted(tmp_path / "run", at=1)
    run.run_one(CONFIG, tmp_path / "run")
    assert (tmp_path / "run" / "DONE").exists()


def test_the_report_says_that_runs_of_one_task_were_asked_other_problems(tmp_path):
    folder = write_study(tmp_path / "s", ("grpo",), (0, 1), 2)
    words = "problems are not the same in all runs"
    for number, digest in enumerate(("a", "a")):
        file = folder / "grpo" / f"seed{number}" / "env.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "task_sha256": digest}))
    assert words not in render_report(load(folder), [])
    file.write_text(file.read_text().replace('"task_sha256": "a"', '"task_sha256": "b"'))
    assert words in render_report(load(folder), [])


def test_only_environments_that_were_others_are_kept_oldest_first(tmp_path):
    now, folder = {"kernels": "a", "started": "1", "command": "x"}, tmp_path
    assert begun_under(folder, now) == {}
    for number, kernels in enumerate("aabbca"):
        now = {"kernels": kernels, "started": str(number), "command": "x"}
        (folder / "env.json").write_text(json.dumps({**now, **begun_under(folder, now)}))
    held = json.loads((folder / "env.json").read_text())
    assert held["earlier"] == [{"started": "3", "kernels": "b"}, {"started": "4", "kernels": "c"}]
    assert [start["kernels"] for start in environments(held)] == ["b", "c", "a"]
    for strange in (None, [], {"earlier": 3}, {"earlier": [3, None]}):
        (folder / "env.json").write_text(json.dumps(strange))
        assert all(isinstance(start, dict) for start in environments(strange))
        assert set(begun_under(folder, now)) <= {"earlier"}


def test_a_writer_that_goes_on_keeps_the_earlier_versions(tmp_path, monkeypatch):
    for step, version in enumerate(("1.0", "2.0")):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        run = RunWriter(tmp_path, arm="mine", seed=0)
        run.rollout(step, reward=0.0)
        run.close()
    held = json.loads((run.folder / "env.json").read_text())
    assert held["versions"]["torch"] == "2.0"
    assert [start["versions"]["torch"] for start in held["earlier"]] == ["1.0"]


def test_the_report_has_all_environments_of_a_run(tmp_path):
    folder = write_study(tmp_path / "s", ("grpo",), (0, 1), 2)
    file = folder / "grpo" / "seed1" / "env.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, "earlier": [{**about, "git_commit": "e4e4e4", "git_dirty": True}]}))
    page = render_report(load(folder), [])
    assert "e4e4e4" in page and "uncommitted changes" in page
    assert "went on under other versions, or on another machine, than they began: grpo/seed1." in page
