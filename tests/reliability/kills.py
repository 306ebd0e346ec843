"""Part `kills` of the campaign: a run that is killed at random and goes on must end as one that was not killed."""

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

from small_runs import ended, start, wait
from twins import log_of, twin_of

from moe_rl.study.run import run_one

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass
class Kills:
    """Results for one method: runs, kills by signal, and runs that did not end as their twin, with differing files."""

    method: str
    runs: int = 0
    kills: dict[str, int] = field(default_factory=lambda: {number.name: 0 for number in SIGNALS})
    wrong: list[str] = field(default_factory=list)


def killed_runs(method: str, runs: int, root: Path, seed: int = 0) -> Kills:
    """Make runs that are killed up to four times at random moments and then go on to the end; return the results."""
    twin, found = twin_of(method, root), Kills(method)
    for index in range(runs):
        rng = random.Random(f"{seed} {method} {index}")
        folder = root / f"run{index}"
        for _ in range(rng.randint(2, 4)):
            child = start(lambda folder=folder: run_one(twin.config, folder), log_of(folder))
            if ended(child, rng.uniform(0, 0.8 * twin.seconds)) is not None:
                break
            number = rng.choice(SIGNALS)
            os.kill(child, number)
            wait(child)
            found.kills[number.name] += 1
        found.runs += 1
        if wrong := twin.other(folder):
            found.wrong.append(f"run {index}: {wrong}")
    return found
