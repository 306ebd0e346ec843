"""Part `operations` of the campaign: a kill before and after every file operation of a run.

The states of the run folder that such kills leave are copied, and runs go on from the copies to the end.
"""

import builtins
import hashlib
import io
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_runs import start, wait
from twins import log_of, twin_of

from moe_rl.study.run import run_one
from moe_rl.training import RunConfig

NAMES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "open", "chmod", "truncate")
OPERATIONS: list[tuple[Any, str]] = [*((os, name) for name in NAMES), (builtins, "open"), (io, "open")]
STEPS = 2
"""Steps of a run: the first step makes a checkpoint, the second replaces it."""
WHOLE = (
    "grpo + R2",
    "grpo + R3",
    "ppo",
    "dpo",
    "grpo, learned reward",
    "grpo, lag 2",
    "grpo, partial rollouts",
    "grpo, expert bias",
)
"""Methods whose runs keep different files: routes, a value model, other policies, comparisons, batches that wait,
drafts, biases. Each other method keeps the same files as one of these."""


@dataclass
class Stops:
    """Results for one method.

    Attributes:
        second: whether the run had been killed once before, between the renames that replace its checkpoint.
        operations: file operations of a run.
        states: different states of the run folder that a kill before or after an operation leaves.
        finished: how many of these states were run to the end.
        wrong: descriptions of the states that did not end as the twin.
    """

    method: str
    second: bool = False
    operations: int = 0
    states: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)


def stopped_runs(method: str, root: Path, most: int | None = None, second: bool = False) -> Stops:
    """Run every state of a run folder to the end, or `most` random ones, and compare with the run without a stop.

    second: take the states of a run that goes on after a first kill.
    """
    twin, found, states = twin_of(method, root, STEPS), Stops(method, second), root / "states"
    counts = states_of(twin.config, root / "run", states)
    if second:
        swapped = next(n for n in range(counts[1]) if between_renames(states / str(n)))
        (states / str(swapped)).rename(root / "again")
        shutil.rmtree(states)
        counts = states_of(twin.config, root / "again", states)
    found.operations, found.states = counts
    assert found.states > 10, f"{found.operations} operations left {found.states} states"
    numbers = range(found.states)
    for number in numbers if most is None else random.Random(method).sample(numbers, min(most, len(numbers))):
        folder = root / f"stop{number}"
        (states / str(number)).rename(folder)
        found.finished += 1
        if wrong := twin.other(folder):
            found.wrong.append(f"state {number}: {wrong}")
    shutil.rmtree(states)
    return found


def states_of(config: RunConfig, folder: Path, kept: Path) -> tuple[int, int]:
    """Run, or go on, to the end in a process of its own, and copy every state of the folder to `kept`/N.

    A state is what the folder holds before or after a file operation. Returns the numbers of operations and states.
    """
    counts = kept.with_name(f"{kept.name}.counts")
    child = start(lambda: keep_states(config, folder, kept, counts), log_of(folder))
    assert wait(child) == 0, log_of(folder).read_text()
    operations, states = map(int, counts.read_text().split())
    return operations, states


def keep_states(config: RunConfig, folder: Path, kept: Path, counts: Path) -> None:
    """Do the work of `states_of` in this process, whose file operations stay wrapped afterwards."""
    busy, operations, seen = [False], [0], set()
    kept.mkdir()

    def look() -> None:
        if busy[0] or not folder.exists():
            return
        busy[0] = True
        try:
            found = state_of(folder)
            if found not in seen:
                shutil.copytree(folder, kept / str(len(seen)))
                seen.add(found)
        finally:
            busy[0] = False

    def before() -> None:
        operations[0] += not busy[0]
        look()

    around(before, look)
    run_one(config, folder)
    busy[0] = True
    counts.write_text(f"{operations[0]} {len(seen)}")


def around(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around every file operation of this process from now on."""

    def wrapped(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            before()
            result = operation(*args, **options)
            after()
            return result

        return act

    for module, name in OPERATIONS:
        setattr(module, name, wrapped(getattr(module, name)))


def state_of(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder.

    The random part of a temporary file's name and the content of the lock, which names its holder, are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.[^.]*\.tmp$", ".tmp", path.relative_to(folder).as_posix())
        data = path.read_bytes() if path.is_file() and name != ".lock" else b""
        digest.update(f"{name} {path.is_dir()} {len(data)} ".encode() + data)
    return digest.hexdigest()


def between_renames(folder: Path) -> bool:
    """Return whether the old checkpoint was put aside and the new one is not in its place yet."""
    return (folder / "checkpoint.old").exists() and not (folder / "checkpoint").exists()
