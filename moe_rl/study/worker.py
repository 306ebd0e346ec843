"""A worker process that imports once and makes many runs, any number at a time, each in a process of its own.

Imports take four CPU seconds and more, as long as five RL steps of the tiny policy. Where it may (`_may_fork`), the
worker forks a process for each run after the imports, so that a run gets the imports, and the memory that they fill,
for nothing, and leaves nothing behind for the next run.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from moe_rl.processes import end_with_parent, importing, signal_name

NEEDED = (
    "moe_rl.cli",
    "moe_rl.study.run",
    "tyro",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""Modules that the worker imports for the runs; a run imports others itself, such as pyarrow, which starts a thread."""


class Worker:
    """The parent's side of a worker: starts the process, gives it runs and hears how the runs ended.

    A run is identified by its log.

    Args:
        rounding: `native`, or the instruction set that torch's kernels must use.
        log: file for the errors of the worker itself, such as that it cannot start; written anew.
    """

    def __init__(self, rounding: str, log: Path):
        self.log = log
        self._status: dict[str, int] = {}
        self._gone = False
        settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        if rounding != "native":
            settings["ATEN_CPU_CAPABILITY"] = rounding
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                env={**os.environ, **settings, "PYTHONUNBUFFERED": "1"},
            )

    def begin(self, arguments: Sequence[object], log: Path) -> None:
        """Start the run `moe-rl ARGUMENTS`, whose output goes to `log`."""
        request = {"arguments": [str(argument) for argument in arguments], "log": str(log)}
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker died; `ended` says so
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def ended(self, log: Path) -> int | None:
        """Return the exit status of the run with this log, negative for a signal; None while the run goes on.

        If the worker died, it is the worker's exit status (1 instead of 0).
        """
        answers, dead = self.process.stdout, not self.alive()  # first: then all its answers are in the pipe
        assert answers is not None
        while not self._gone and select.select([answers], [], [], 0)[0]:
            answer = answers.readline()
            self._status |= json.loads(answer) if answer else {}
            self._gone = not answer
        self._gone = self._gone or dead  # a process that a run left behind may keep the pipe open
        return self._status.pop(str(log), (self.process.wait() or 1) if self._gone else None)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the worker and its runs that go on."""
        self.process.terminate()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


# -- the worker's side ------------------------------------------------------------------------------------------------


def serve() -> None:
    """Take runs from standard input until its end; answer with the exit status of each run when the run has ended."""
    end_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that text which libraries print is not taken for an answer
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to the runs, and to the parent, which ends this process
    with importing():
        forks = _may_fork()
        for name in NEEDED if forks else ():
            importlib.import_module(name)
    gc.freeze()  # a garbage collection would write to the memory that runs share
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")  # Any: their types share no Process
    requests, runs, more = os.fdopen(0, "rb", buffering=0, closefd=False), dict[str, Any](), True
    while more or runs:
        # A process that a run left behind keeps the sentinel open: therefore exit codes are read once a second, too.
        ready = wait([run.sentinel for run in runs.values()] + [0] * more, timeout=1.0 if runs else None)
        for log in [log for log, run in runs.items() if run.sentinel in ready or run.exitcode is not None]:
            run = runs.pop(log)
            run.join()
            if run.exitcode < 0:  # a signal, which leaves no message
                _report(log, f"ended by {signal_name(-run.exitcode)}")
            print(json.dumps({log: run.exitcode}), file=answers, flush=True)
        if 0 in ready:
            line = requests.readline()
            more = line != b""
            if more:
                request = json.loads(line)
                run = context.Process(target=_run, args=(request["arguments"], request["log"], os.getpid()))
                try:
                    run.start()
                except OSError as error:  # no memory, or no more processes: the other runs go on
                    _report(request["log"], f"the run's process could not be started: {error}")
                    print(json.dumps({request["log"]: 1}), file=answers, flush=True)
                else:
                    runs[request["log"]] = run


def _report(log: str, error: str) -> None:
    """Add an error of which a run itself says nothing to the run's log, where the study and the live page find it."""
    with contextlib.suppress(OSError), open(log, "a") as file:
        print(f"moe-rl: error: {error}", file=file)


def _may_fork() -> bool:
    """Return whether runs may be forked: only on Linux, and only without an accelerator.

    A process that is forked from one that has asked for an accelerator cannot use the accelerator.
    """
    import torch

    return sys.platform == "linux" and not torch.accelerator.is_available()


def _run(arguments: list[str], log: str, worker: int) -> None:
    """Run `moe-rl ARGUMENTS` in this process, which ends with its worker."""
    end_with_parent(worker)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # else the run would read the requests
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["moe-rl", *arguments]
    runpy.run_module("moe_rl", run_name="__main__")  # as `python -m moe_rl` does


def _stop(number: int, frame: FrameType | None) -> None:
    for run in multiprocessing.active_children():
        run.terminate()
        run.join()
    os._exit(128 + number)


if __name__ == "__main__":
    serve()
