"""Workers make many runs and survive the end of any of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from moe_rl.study.worker import Worker


def wait(worker):
    for _ in range(6000):
        status = worker.ended()
        if status is not None:
            return status
        time.sleep(0.1)
    raise TimeoutError


@pytest.fixture
def worker(tmp_path):
    worker = Worker("native", tmp_path / "worker.log")
    yield worker
    worker.stop()


def test_a_worker_goes_on_after_runs_that_ended_well_badly_and_by_a_signal(worker, tmp_path):
    said = {}
    for name, arguments in {"good": ["--version"], "bad": ["stdy"], "again": ["--version"]}.items():
        worker.begin(arguments, tmp_path / name)
        said[name] = (wait(worker), (tmp_path / name).read_text())
    assert said["good"] == said["again"] and said["good"][0] == 0 and said["good"][1].startswith("moe_rl ")
    assert said["bad"][0] == 2 and "did you mean 'study'" in said["bad"][1]
    worker.begin(["watch", "/nonexistent"], tmp_path / "watch")
    assert wait(worker) == 1 and "Traceback" not in (tmp_path / "watch").read_text()
    assert worker.alive() and (tmp_path / "worker.log").read_text() == ""


def test_a_worker_that_is_killed_says_so(worker, tmp_path):
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.begin(["--version"], tmp_path / "log")
    assert wait(worker) == -signal.SIGKILL and not worker.alive()
    worker.begin(["--version"], tmp_path / "log")  # no error: what went wrong is said by `ended`
    assert wait(worker) == -signal.SIGKILL


def test_stopping_a_worker_ends_its_run(worker, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.yaml").write_text("name: x\narms: {a: {}}\n")
    log = tmp_path / "log"
    worker.begin(["watch", tmp_path / "study"], log)  # a server, which would go on for ever
    for _ in range(6000):
        if log.exists() and log.read_text():
            break
        time.sleep(0.1)
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    worker.stop()
    assert len(children) == 1 and not Path(f"/proc/{children[0]}").exists()
