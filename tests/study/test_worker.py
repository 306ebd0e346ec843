"""Workers make many runs and survive the end of any of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_rl.study.launchers import Processes
from moe_rl.study.runs import Run, last_line
from moe_rl.study.worker import Worker
from moe_rl.training import RunConfig

NEEDS_PROC = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")


def wait(worker, log):
    return until(lambda: worker.ended(log))


def starts(monkeypatch, change):
    """Workers begin with this line of code."""
    begin, code = subprocess.Popen, f"import moe_rl.study.worker as worker; {change}; worker.serve()"
    monkeypatch.setattr(
        "moe_rl.study.worker.subprocess.Popen",
        lambda words, **how: begin([words[0], "-c", code, words[-1]], **how),
    )


@pytest.fixture
def light(monkeypatch):
    """Workers import nothing before their first run: what the tests that ask for this run needs no transformers."""
    starts(monkeypatch, "worker.NEEDED = ()")


@pytest.fixture
def worker(tmp_path):
    worker = Worker("native", tmp_path / "worker.log")
    yield worker
    worker.stop()


def test_a_worker_goes_on_after_runs_that_ended_well_badly_and_by_a_signal(light, worker, tmp_path):
    said = {}
    for name, arguments in {"good": ["--version"], "bad": ["stdy"], "again": ["--version"]}.items():
        worker.begin(arguments, tmp_path / name)
        said[name] = (wait(worker, tmp_path / name), (tmp_path / name).read_text())
    assert said["good"] == said["again"] and said["good"][0] == 0 and said["good"][1].startswith("moe_rl ")
    assert said["bad"][0] == 2 and "did you mean 'study'" in said["bad"][1]
    worker.begin(["watch", "/nonexistent"], tmp_path / "watch")
    assert wait(worker, tmp_path / "watch") == 1 and "Traceback" not in (tmp_path / "watch").read_text()
    assert worker.alive() and (tmp_path / "worker.log").read_text() == ""


def test_where_a_worker_may_not_fork_its_runs_are_the_same(monkeypatch, tmp_path):
    """On a Mac, and beside a GPU."""
    starts(monkeypatch, "worker._may_fork = lambda: False")
    worker = Worker("native", tmp_path / "worker.log")
    try:
        for name, arguments, status in (("good", ["--version"], 0), ("bad", ["stdy"], 2)):
            worker.begin(arguments, tmp_path / name)
            assert wait(worker, tmp_path / name) == status
        assert (tmp_path / "good").read_text().startswith("moe_rl ") and worker.alive()
    finally:
        worker.stop()


@NEEDS_PROC
def test_of_a_worker_that_is_killed_no_run_goes_on_and_each_says_why(light, tmp_path):
    """Also of one whose run has forked a process that lives on and holds what it would be heard by."""
    processes, study = Processes(), begun(tmp_path)[0]
    runs = [
        Run("a", seed, tmp_path / str(seed), tmp_path / f"a_seed{seed}.log", RunConfig(), "native") for seed in (0, 1)
    ]
    for run in runs:
        processes.start(run, ["watch", study])
    worker = processes.workers["native"]
    children = {child for run in runs for child in children_of(worker.process.pid, run.log)}
    assert len(children) == 2 and [processes.ended(run) for run in runs] == [None, None]
    worker.process.kill()
    worker.process.wait()
    assert [processes.ended(run) for run in runs] == [False, False] and not processes.worker_of
    assert all(run.reason().startswith("the process that started it ended with status -9") for run in runs)
    again = Run("a", 2, tmp_path / "2", tmp_path / "a_seed2.log", RunConfig(), "native")
    processes.start(again, ["--version"])
    assert processes.workers["native"] is not worker and until(lambda: processes.ended(again)) is False
    assert again.problem == "its process ended with status 0 before the run was done"
    processes.leave()
    assert not any(alive(int(child)) for child in children)


@NEEDS_PROC
def test_a_run_that_is_killed_has_ended_though_a_process_that_it_forked_has_not(worker, tmp_path):
    """And what it starts reads no requests of the worker's."""
    task = tmp_path / "own.py"
    task.write_text(OWN)
    study = tmp_path / "own.yaml"
    study.write_text(f"name: own\narms: {{a: {{}}}}\nbase: {{task: {{name: '{task}:Own'}}}}\n")
    arguments = ["run", study, "--arm", "a", "--trust", "--output", tmp_path / "run"]
    worker.begin(arguments, tmp_path / "log")
    assert wait(worker, tmp_path / "log") == -signal.SIGKILL
    assert last_line(tmp_path / "log") == "ended by SIGKILL"
    left = int((tmp_path / "left").read_text())
    assert alive(left) and (tmp_path / "read").read_text() == ""
    os.kill(left, signal.SIGKILL)


OWN = """
import os, signal, subprocess, time
from pathlib import Path
HERE = Path(__file__).parent
(HERE / "read").write_text(subprocess.run(["head", "-n", "1"], capture_output=True, text=True).stdout)
left = os.fork()
if not left:
    time.sleep(600)
(HERE / "left").write_text(str(left))
os.kill(os.getpid(), signal.SIGKILL)
"""


def until(found):
    for _ in range(6000):
        if (value := found()) is not None:
            return value
        time.sleep(0.1)
    raise TimeoutError


def test_a_worker_that_is_killed_says_so(worker, tmp_path):
    logs = [tmp_path / name for name in ("one", "other", "third")]
    for log in logs[:2]:
        worker.begin(["--version"], log)
    os.kill(worker.process.pid, signal.SIGKILL)  # long before it has imported
    assert [wait(worker, log) for log in logs[:2]] == [-signal.SIGKILL] * 2 and not worker.alive()
    worker.begin(["--version"], logs[2])  # no error: what went wrong is said by `ended`
    assert wait(worker, logs[2]) == -signal.SIGKILL


def begun(folder):
    """The study's folder, for a server of its page, which would go on for ever; and the log in which it says so."""
    (folder / "study").mkdir()
    (folder / "study" / "study.yaml").write_text("name: x\narms: {a: {}}\n")
    return folder / "study", folder / "log"


def children_of(worker, log):
    """The processes of a worker's runs, once the one with this log has said something."""
    for _ in range(6000):
        if log.exists() and log.read_text():
            break
        time.sleep(0.1)
    return Path(f"/proc/{worker}/task/{worker}/children").read_text().split()


def child_of(worker, log):
    (child,) = children_of(worker, log)
    return int(child)


@NEEDS_PROC
def test_runs_of_a_worker_go_side_by_side_and_end_with_it(light, worker, tmp_path):
    study, log = begun(tmp_path)
    worker.begin(["watch", study], log)
    child = child_of(worker.process.pid, log)
    worker.begin(["--version"], tmp_path / "version")
    assert wait(worker, tmp_path / "version") == 0 and worker.ended(log) is None
    worker.begin(["watch", study], tmp_path / "killed")
    (other,) = {int(pid) for pid in children_of(worker.process.pid, tmp_path / "killed")} - {child}
    os.kill(other, signal.SIGKILL)
    assert wait(worker, tmp_path / "killed") == -signal.SIGKILL and worker.ended(log) is None
    worker.stop()
    assert not Path(f"/proc/{child}").exists()


STUDY = """
import sys, time
from pathlib import Path
from moe_rl.study.worker import Worker
worker = Worker("native", Path(sys.argv[2] + ".worker"))
worker.begin(["watch", sys.argv[1]], Path(sys.argv[2]))
print(worker.process.pid, flush=True)
time.sleep(600)
"""


@NEEDS_PROC
def test_a_study_that_is_killed_leaves_neither_workers_nor_runs(tmp_path):
    study = subprocess.Popen([sys.executable, "-c", STUDY, *begun(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(study.stdout.readline())
    child = child_of(worker, tmp_path / "log")
    study.kill()
    study.wait()
    for _ in range(1000):
        left = [number for number in (worker, child) if alive(number)]
        if not left:
            break
        time.sleep(0.1)
    assert left == []


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
