"""A kill before and after every file operation of a run: what lies on the disk then is taken away and finished."""

import builtins
import io
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kills import twin_of
from small_runs import METHODS, STEPS, complete, differing, log_of, start, wait

from moe_rl.study.run import run_one

OPERATIONS: list[tuple[Any, str]] = [
    *((os, name) for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "open", "chmod")),
    (builtins, "open"),
    (io, "open"),
]
WORTHWHILE = ("grpo + R2", "grpo + R3", "ppo", "dpo", "grpo, learned reward")
"""Methods that keep different things: routes, a second model, pairs, comparisons."""


@dataclass
class Stops:
    """Of one method: file operations of a run, different states of its folder that a kill before or after one of them
    leaves, how many of these were finished, and those that did not end as the twin."""

    method: str
    operations: int = 0
    states: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list)


def around(before: Callable[[], None], after: Callable[[], None]) -> None:
    """From now on in this process, call these around every file operation."""

    def wrapped(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            before()
            result = operation(*args, **options)
            after()
            return result

        return act

    for module, name in OPERATIONS:
        setattr(module, name, wrapped(getattr(module, name)))


def keep_states(folder: Path, kept: Path) -> None:
    """Run one method to its end; every state of its folder around a file operation goes to `kept`/N, and their number
    and that of the operations to `kept`/counts. In this process, which is of no use afterwards."""
    busy, last, counts = [False], [""], [0, 0]
    kept.mkdir()

    def look() -> None:
        if busy[0]:
            return
        busy[0] = True
        try:
            found = state_of(folder)
            if found != last[0]:
                shutil.copytree(folder, kept / str(counts[1]))
                last[0] = found
                counts[1] += 1
        finally:
            busy[0] = False

    def before() -> None:
        counts[0] += not busy[0]
        look()

    around(before, look)
    run_one(METHODS[folder.parent.name], folder)
    busy[0] = True
    (kept / "counts").write_text(f"{counts[0]} {counts[1]}")


def state_of(folder: Path) -> str:
    if not folder.exists():
        return ""
    paths = sorted(folder.rglob("*"))
    stats = [(path, path.lstat()) for path in paths]
    return repr([(str(path), stat.st_size, stat.st_ino, stat.st_mtime_ns) for path, stat in stats])


def stopped_runs(method: str, root: Path, most: int | None = None, seed: int = 0) -> Stops:
    """Finish every state, or `most` of them drawn at random, and compare with the run that was not stopped."""
    place = root / method
    twin = twin_of(method, place)
    child = start(lambda: keep_states(place / "run", place / "states"), place / "run.log")
    assert wait(child, 600) == 0, (place / "run.log").read_text()
    operations, states = map(int, (place / "states" / "counts").read_text().split())
    assert states > STEPS, f"{operations} operations left {states} states"
    found = Stops(method, operations, states)
    chosen = range(states) if most is None else random.Random(seed).sample(range(states), min(most, states))
    for number in chosen:
        folder = place / f"stop{number}"
        (place / "states" / str(number)).rename(folder)
        status = complete(METHODS[method], folder)
        wrong = differing(folder, twin.content) if status == 0 else [f"exit status {status}: {log_of(folder)}"]
        found.finished += 1
        if wrong:
            found.wrong.append(f"state {number}: {', '.join(wrong[:5])}")
        else:
            shutil.rmtree(folder)
    shutil.rmtree(place / "states")
    return found
