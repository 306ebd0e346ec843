"""Parts `soak` and `scale` of the campaign: memory and open files of a long run; cost of reading many runs."""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from small_runs import METHODS, start, wait
from synthetic import write_study

from moe_rl.study.data import load
from moe_rl.study.report import draw_study
from moe_rl.training import train

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Soak:
    """Memory in MB and open files after a quarter of the steps and at the end; kB per step, fitted between these."""

    method: str
    steps: int
    memory_before: float
    memory_after: float
    kb_per_step: float
    files_before: int
    files_after: int


def soaked(method: str, steps: int, root: Path) -> Soak:
    """Make one run with token tables, checkpoints and evaluations every ten steps; return its memory and open files."""
    config = METHODS[method]
    config = replace(
        config,
        optim=replace(config.optim, steps=steps),
        probe=replace(config.probe, tokens_every=10),
        eval=replace(config.eval, every=10),
        checkpoint_every=10,
    )
    seen = root / "seen.json"

    def run() -> None:
        found: list[tuple[int, int]] = []

        def look(row: dict[str, object]) -> None:
            if row["kind"] == "step":
                memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
                found.append((memory, len(os.listdir("/proc/self/fd"))))

        train(config, root / "run", listener=look)
        seen.write_text(json.dumps(found))

    status = wait(start(run, root / "log"), 7200)
    assert status == 0, (root / "log").read_text()
    memory, files = (np.array(values, dtype=float) for values in zip(*json.loads(seen.read_text()), strict=True))
    rest = np.arange(steps // 4, steps)
    slope = np.polyfit(rest, memory[rest], 1)[0]
    return Soak(
        method, steps, memory[rest[0]] / 1e6, memory[-1] / 1e6, slope / 1e3, int(files[rest[0]]), int(files[-1])
    )


@dataclass
class Scale:
    """CPU seconds to read a study's folders (`load`), and to draw all its figures and the report (`report`)."""

    runs: int
    steps: int
    load: float
    report: float


def scaled(seeds: int, steps: int, root: Path) -> Scale:
    """Measure the reading and reporting of a synthetic study of five arms with so many seeds."""
    arms = ("grpo", "grpo_replay", "gspo", "grpo_noise", "gspo_noise")
    folder = write_study(root / "many", arms, tuple(range(seeds)), steps, tokens_every=steps)
    began = time.process_time()
    runs = len(load(folder).runs)
    read = time.process_time()
    draw_study(folder)
    return Scale(runs, steps, read - began, time.process_time() - read)
