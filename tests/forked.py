"""Processes for tests, forked from a server that has imported torch and transformers once for all of them.

A process that imports them itself takes ten CPU seconds before it does anything. Tests of how processes are started
(test_worker.py, test_launch.py, one test in test_cli.py) do not use this module: they start processes as the package
does.
"""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from moe_rl.study import worker

multiprocessing.set_forkserver_preload(list(worker.NEEDED))
FORKS: Any = multiprocessing.get_context("forkserver")


def run_two(function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, port, *args)` in each of two processes, for gloo to meet at the free port `port`.

    Raises an exception of torch.multiprocessing if one of the processes raises.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(function, args=(port, *args), nprocs=2, start_method="forkserver")


def start(words: Sequence[object], log: Path, environ: Mapping[str, str] | None = None) -> BaseProcess:
    """Start `moe-rl WORDS` in the current folder; its output is appended to `log`."""
    arguments = [str(word) for word in words], str(log), dict(os.environ if environ is None else environ)
    process: BaseProcess = FORKS.Process(target=_command, args=arguments)
    process.start()
    return process


def moe_rl(*words: object, environ: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run `moe-rl WORDS` in the current folder to its end; its output, errors included, is the result's stdout."""
    with tempfile.NamedTemporaryFile() as log:
        process = start(words, Path(log.name), environ)
        process.join()
        return CompletedProcess(words, process.exitcode or 0, Path(log.name).read_text())


def print_to(log: Path) -> None:
    """Append this process's output and errors to `log` from now on."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _command(arguments: list[str], log: str, environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    worker._run(arguments, log, os.getppid())


class Worker:
    """Stand-in for `moe_rl.study.worker.Worker` that forks runs from this module's server.

    Its runs have the kernels of this process, so `rounding` must be `native`.
    """

    def __init__(self, rounding: str, log: Path):
        assert rounding == "native", f"{rounding}: the server has loaded torch"
        self.log = log
        self.runs: dict[Path, BaseProcess] = {}

    def begin(self, arguments: Sequence[object], log: Path) -> None:
        self.runs[log] = start(arguments, log)

    def ended(self, log: Path) -> int | None:
        status = self.runs[log].exitcode
        if status is not None:
            del self.runs[log]
        return status

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        for run in self.runs.values():
            run.terminate()
            run.join()
