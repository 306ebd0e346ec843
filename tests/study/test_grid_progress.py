"""A study reads the progress of its runs while they write: also while one that goes on rewrites what it had written."""

import os

import pytest
from rich.console import Console

from moe_rl.runlog import RunLog
from moe_rl.study.progress import Lines, clock, number, percent
from moe_rl.study.runs import Run, _table, totals
from moe_rl.training import OptimConfig, RolloutConfig, RunConfig

STEPS = 5


def reader(folder, arm="a", steps=STEPS, prompts=32):
    config = RunConfig(optim=OptimConfig(steps=steps), rollout=RolloutConfig(prompts=prompts))
    return Run(arm, 0, folder, folder / "log", config)


def seen(run):
    run.read()
    return run.step, run.reward, run.change


def write(log, step, seconds=0.5):
    log.append("rollout", step, reward=step / 8)
    log.append("probe", step, update=1, slots_changed=step, slots=16)
    log.append("step", step, seconds=seconds)


def replaced(log, mark):
    """As a run does that goes on from its checkpoint: another file of the same name."""
    log.resume(mark)


def cut_off(log, mark):
    """In place."""
    os.truncate(log.path, mark.bytes)


@pytest.mark.parametrize("rewrite", [replaced, cut_off])
@pytest.mark.parametrize("before", [1, 4])
def test_a_run_that_goes_on_between_two_polls(tmp_path, before, rewrite):
    """Whatever the run keeps of what the study had read, and however much it has written again by the next poll. A
    step's time has other digits each time, so that lines no longer end where they did."""
    for kept in range(before + 1):
        for again in range(STEPS - kept + 1):
            folder = tmp_path / f"{kept}_{again}"
            folder.mkdir()
            log, study = RunLog(folder), reader(folder)
            marks = [log.mark()]
            for step in range(before):
                write(log, step)
                marks.append(log.mark())
            assert seen(study) == (before, (before - 1) / 8, (before - 1) / 16)
            log = RunLog(folder)
            rewrite(log, marks[kept])
            for step in range(kept, kept + again):
                write(log, step, seconds=0.123456789 * (step + 1))
            assert seen(study) == seen(reader(folder)), f"kept {kept}, again {again}: not as one who reads it first"


@pytest.mark.parametrize("rewrite", [replaced, cut_off])
def test_the_pace_of_a_run_that_goes_on_is_that_of_its_new_steps(tmp_path, monkeypatch, rewrite):
    """Rows of an earlier start took no time in this one, also where they are read a second time."""
    now = [0.0]
    monkeypatch.setattr("moe_rl.study.runs.time.monotonic", lambda: now[0])
    log, study, marks = RunLog(tmp_path), reader(tmp_path), []
    for step in range(3):
        write(log, step)
        marks.append(log.mark())
    study.read()
    study.state = "running"
    log = RunLog(tmp_path)
    now[0] = 100.0
    rewrite(log, marks[1])
    study.read()
    assert study.left() is None, "no step of its own yet"
    now[0] = 110.0
    write(log, 2, seconds=0.25)
    study.read()
    assert study.left() == 10.0 * (STEPS - 3)


def test_a_run_counts_the_sampling_of_its_first_step(monkeypatch, capsys):
    """The rollout's row comes after it: two seconds a step, and nine steps are left."""
    now = [0.0]
    monkeypatch.setattr("moe_rl.study.progress.time.monotonic", lambda: now[0])
    lines = Lines(steps=10)
    for step in range(2):
        now[0] += 1.8
        lines({"kind": "rollout", "step": step, "reward": 0.5})
        now[0] += 0.2
        lines({"kind": "step", "step": step, "seconds": 2.0})
    assert [line.split(", ")[-1] for line in capsys.readouterr().out.splitlines()] == ["0:18 left", "0:16 left"]


def test_names_and_notes_are_shown_as_they_are(tmp_path):
    """Also those that rich would read as markup; and a resumed run whose job waits says so."""
    run = reader(tmp_path, arm="a[red]b")
    run.state, run.reward, run.note = "running", 0.4, "job 17: x [/tmp/y]"
    console = Console(width=120)
    with console.capture() as shown:
        console.print(_table([run], 1))
    assert "a[red]b" in shown.get() and "job 17: x [/tmp/y]" in shown.get()


def test_a_file_that_is_gone_and_a_line_that_is_not_whole_yet(tmp_path):
    log, study = RunLog(tmp_path), reader(tmp_path)
    assert seen(study) == (0, None, None)
    write(log, 0)
    with open(log.path, "ab") as file:
        file.write(b'{"kind":"step","st')
    assert seen(study) == (1, 0.0, 0.0)
    with open(log.path, "ab") as file:
        file.write(b'ep":1}\n')
    assert seen(study)[0] == 2
    log.path.unlink()
    assert seen(study)[0] == 2
    log.path.mkdir()
    assert seen(study)[0] == 2


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[" * 100_000,
        "null",
        '{"kind":"rollout","reward":"much"}',
        '{"kind":"rollout","reward":[1]}',
        '{"kind":"rollout","reward":1e400}',
        '{"kind":"probe","slots_changed":1' + "0" * 400 + ',"slots":2}',
        '{"kind":"probe","slots_changed":"1","slots":2}',
        '{"kind":"step","step":1e400}',
        '{"kind":"step","step":1' + "0" * 400 + "}",
        '{"kind":"step","step":null}',
        '{"kind":"step"}',
    ],
)
def test_a_damaged_line_stops_neither_study_nor_display(tmp_path, line):
    log, study = RunLog(tmp_path), reader(tmp_path)
    study.state = "running"
    write(log, 0)
    study.read()
    study.first_step = 0
    with open(log.path, "a") as file:
        file.write(line + "\n")
    study.read()
    assert clock(totals([study], 1)[1]) + number(study.reward) + percent(study.change)
    write(log, 1)
    assert seen(study)[1:] == (1 / 8, 1 / 16)


def finished(folder, arm="a", seconds=0.0, each=0.0, **how):
    run = reader(folder, arm, **how)
    for step in range(run.steps):
        run.take({"kind": "step", "step": step, "seconds": each})
    run.state, run.seconds = "done", seconds
    return run


def test_a_slow_first_run_is_no_measure_of_other_arms(tmp_path):
    """Of its 300 seconds 250 were a cold start, which the others need not make again; the next seed's first will."""
    first = finished(tmp_path, seconds=300.0, each=10.0)
    assert totals([first, reader(tmp_path, "b"), reader(tmp_path, "c")], 1) == (1, 100.0)
    assert totals([first, reader(tmp_path, "b"), reader(tmp_path, "a")], 1) == (1, 50.0 + 300.0)
    went_on = finished(tmp_path, seconds=10.0, each=10.0)  # its last step alone
    assert totals([went_on, reader(tmp_path, "a")], 1) == (1, 50.0)


def test_arms_of_different_cost_are_not_taken_as_one(tmp_path):
    """Each arm at its own pace; one that has none yet by its responses, of which its steps may have more or fewer."""
    runs = [finished(tmp_path, "quick", 10.0, each=2.0), finished(tmp_path, "slow", 90.0, each=18.0)]
    assert totals([*runs, reader(tmp_path, "slow"), reader(tmp_path, "slow")], 2) == (2, 90.0)
    assert totals([*runs, reader(tmp_path, "other", steps=4, prompts=64)], 2) == (2, 80.0)
    running = reader(tmp_path, "slow")
    running.state = "running"
    assert totals([*runs, running], 1) == (2, 90.0) and totals([running], 1) == (0, None)
    assert totals(runs, 1) == (2, 0.0)


def test_runs_under_several_roundings_are_told_apart(tmp_path):
    runs = [Run("a", 0, tmp_path, tmp_path / "log", RunConfig(), rounding) for rounding in ("native", "avx2")]
    assert list(_table(runs, 1).columns[1].cells) == ["0", "0 avx2"]
