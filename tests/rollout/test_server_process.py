"""A server in a process of its own: whatever happens to it is one clear error, and nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_python import REPOSITORY, SERVER, fake_python

from moe_rl.rollout.engine_config import EngineError
from moe_rl.rollout.vllm_servers import ServerProcess

PARENT = """
import sys, time
from moe_rl.rollout.vllm_servers import ServerProcess
server = ServerProcess(sys.argv[1:], "the server", 60.0)
server.ask({"do": "echo", "word": "ready"})
print(server.process.pid, server.folder, flush=True)
server.ask({"do": "hang"})
"""


def command(folder):
    return [fake_python(folder, SERVER), "-I", "server.py"]


@pytest.fixture
def server(tmp_path):
    server = ServerProcess(command(tmp_path), "the server", 30.0)
    yield server
    server.close()


def gone(server):
    return server.process.poll() is not None and not server.folder.exists()


def test_headers_and_arrays_go_there_and_back(server):
    big = np.arange(3_000_000, dtype=np.int64).reshape(3, -1).T  # not contiguous, more than any pipe holds
    header, found = server.ask({"do": "echo", "word": "grüße"}, {"big": big, "none": np.zeros((0, 2), np.float32)})
    assert header == {"asked": "grüße"} and found["none"].shape == (0, 2)
    assert found["big"].dtype == np.int64 and np.array_equal(found["big"], big * 2)
    server.close()
    assert gone(server) and server.process.returncode == 0, "it ended by itself when its input ended"
    with pytest.raises(EngineError, match="the server was closed"):
        server.ask({"do": "echo", "word": ""})


def test_what_the_server_raises_is_said_and_it_goes_on(server):
    with pytest.raises(EngineError, match=r"(?s)the server could not fail: ValueError: no such thing; .*Traceback"):
        server.ask({"do": "fail"})
    assert server.ask({"do": "echo", "word": "on"})[0] == {"asked": "on"}


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (
            "crash",
            r"(?s)ended while it was asked to crash with exit status 3; its last lines:\n.*  a kernel went wrong$",
        ),
        ("hang", r"(?s)gave no answer to 'hang' in 1 s \(rollout.engine.timeout\) and was stopped; .*\n  thinking$"),
        ("babble", r"sent an answer to 'babble' that cannot be read"),
    ],
)
def test_a_server_that_crashes_hangs_or_babbles_is_named_and_ended(server, do, message):
    server.ask({"do": "echo", "word": "up"})
    server.seconds = 1.0
    with pytest.raises(EngineError, match=message):
        server.ask({"do": do})
    assert gone(server)


def test_an_interrupted_request_leaves_no_answer_to_the_next(server, monkeypatch):
    answer = ServerProcess.answer

    def interrupted(self, wait):
        answer(self, wait)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ServerProcess, "answer", interrupted)
        server.ask({"do": "echo", "word": "A"})
    assert gone(server)
    with pytest.raises(EngineError, match="the server was closed"):
        server.ask({"do": "echo", "word": "B"})


def test_a_program_that_cannot_be_started_or_ends_at_once(tmp_path):
    with pytest.raises(EngineError, match=r"the server cannot be started: /no/such/program: No such file"):
        ServerProcess(["/no/such/program"], "the server", 5.0)
    server = ServerProcess([sys.executable, "-c", "raise SystemExit('no vllm here')"], "the server", 30.0)
    with pytest.raises(EngineError, match=r"(?s)ended while it was asked to open with exit status 1.*no vllm here"):
        server.ask({"do": "open"})


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_a_hanging_server_ends_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    time.sleep(0.5)  # it hangs by now
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not Path(f"/proc/{pid}").exists() and not Path(folder).exists()
