"""Part `faults` of the campaign: a full or read-only disk, a second writer, a parent process that is killed.

After the fault the same command goes on, and the run must end as one without a fault.
"""

import builtins
import errno
import io
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_runs import IN_USE, METHODS, ended, start, wait
from twins import log_of, twin_of

from moe_rl.processes import end_with_parent
from moe_rl.study.run import run_one

METHOD = "ppo"  # because it has two models and two optimizers
WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


@dataclass
class Faults:
    """Results for one kind of fault.

    cases, met: cases, and how many of them met the fault.
    wrong: descriptions of the cases that did not end as the twin, or whose error named no file.
    """

    fault: str
    cases: int = 0
    met: int = 0
    wrong: list[str] = field(default_factory=list)


def refusing(number: int, at: int) -> None:
    """Make all writing operations of this process but the first `at` fail with the system error `number`."""
    done = [0]

    def wrapped(operation: Callable[..., Any], writes: Callable[..., bool], names: bool = False) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            if writes(*args, **options):
                done[0] += 1
                if done[0] > at:
                    raise OSError(number, os.strerror(number), *([str(args[0])] if names else []))
            return operation(*args, **options)

        return act

    def opened(path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return bool(set(mode) & set("wax+"))

    for name in ("fsync", "replace", "rename", "mkdir"):  # but for mkdir, moe_rl must add the file's name
        setattr(os, name, wrapped(getattr(os, name), lambda *_, **__: True, names=name == "mkdir"))
    os.open = wrapped(os.open, lambda path, flags, *_, **__: bool(flags & WRITING))
    builtins.open = wrapped(builtins.open, opened)
    io.open = wrapped(io.open, opened)


def full(folder: Path, rng: random.Random) -> None:
    """Make a run whose disk is full from a random operation on."""
    refusing(errno.ENOSPC, rng.randrange(150))
    run_one(METHODS[METHOD], folder)


def read_only(folder: Path, rng: random.Random) -> None:
    """Make a run whose disk is read-only from a random operation on."""
    refusing(errno.EROFS, rng.randrange(150))
    run_one(METHODS[METHOD], folder)


def short_files(folder: Path, rng: random.Random) -> None:
    """Make a run in which the system refuses files above a random length, also to compiled code."""
    limit = int(10 ** rng.uniform(2, 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_one(METHODS[METHOD], folder)


def named(act: Callable[[Path, random.Random], None], folder: Path, rng: random.Random) -> Callable[[], None]:
    """Return `act` as a call that ends the process at an OSError: with status 3 if the error names a file, else 4."""

    def run() -> None:
        try:
            act(folder, rng)
        except OSError as error:
            print(error, flush=True)
            os._exit(3 if error.filename else 4)

    return run


def disk(act: Callable[[Path, random.Random], None], folder: Path, rng: random.Random, found: Faults) -> str:
    """Run a fault of the disk; return what went wrong, or an empty text."""
    status = wait(start(named(act, folder, rng), log_of(folder)))
    found.met += status != 0
    return "" if status in (0, 3) else f"status {status}: {log_of(folder)}"


def two_writers(folder: Path, rng: random.Random, found: Faults, seconds: float) -> str:
    """Start the same run twice; return what went wrong, or an empty text. One of them must be refused."""
    first = start(lambda: run_one(METHODS[METHOD], folder), log_of(folder))
    time.sleep(rng.uniform(0, 0.7 * seconds))
    second = start(lambda: run_one(METHODS[METHOD], folder), log_of(folder))
    both = sorted([wait(first), wait(second)])
    found.met += both == [0, IN_USE]
    return "" if both in ([0, IN_USE], [0, 0]) else f"statuses {both}"  # both 0: one after the other


def orphan(folder: Path, rng: random.Random, found: Faults, seconds: float) -> str:
    """Kill a parent while its child runs; return an empty text if the child ends, too, else what went wrong."""
    note = folder.with_name(f"{folder.name}.child")

    def parent() -> None:
        own = os.getpid()

        def child() -> None:
            end_with_parent(own)
            run_one(METHODS[METHOD], folder)

        number = start(child, log_of(folder))
        note.write_text(str(number))
        wait(number)

    killed = start(parent, log_of(folder))
    if ended(killed, rng.uniform(0.1, 0.7) * seconds) is None:
        os.kill(killed, signal.SIGKILL)
        wait(killed)
        found.met += 1
    child = int(note.read_text()) if note.exists() else 0
    deadline = time.monotonic() + 100
    while child and alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    return "the child lives on" if child and alive(child) else ""


def alive(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


FAULTS: dict[str, Callable[[Path, random.Random, Faults, float], str]] = {
    "the disk is full from some file operation on": lambda *of: disk(full, *of[:3]),
    "no file may be longer than 100 bytes to 100 kB": lambda *of: disk(short_files, *of[:3]),
    "the disk is read-only from some file operation on": lambda *of: disk(read_only, *of[:3]),
    "a second process writes to the same folder": two_writers,
    "the parent process is killed": orphan,
}


def faulted_runs(fault: str, cases: int, root: Path, seed: int = 0) -> Faults:
    """Make runs that meet a fault at a random moment and then go on without it; return the results."""
    twin, found = twin_of(METHOD, root), Faults(fault)
    for index in range(cases):
        folder = root / f"run{index}"
        wrong = FAULTS[fault](folder, random.Random(f"{seed} {fault} {index}"), found, twin.seconds)
        wrong = ", ".join(filter(None, (wrong, twin.other(folder))))
        found.cases += 1
        if wrong:
            found.wrong.append(f"case {index}: {wrong}")
    return found
