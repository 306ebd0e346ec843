"""The runs of a study as the study sees them: how far each is, by its run folder and its log; and all of them, on a
terminal or as plain lines."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.study.cursor import follow
from moe_rl.study.progress import Progress, clock, error_in, number, percent
from moe_rl.study.words import count
from moe_rl.training import RunConfig

PLAIN_SECONDS = 15.0  # between progress lines where there is no terminal
RECENT = 20  # steps of a run by which others are estimated


@dataclass
class Run(Progress):
    """One (arm, seed) under one rounding: where it writes, what it is doing.

    note: of whoever starts it, while it has not begun (a job that waits in a queue, or was not taken).
    problem: why it ended, where its log does not say it all.
    """

    arm: str
    seed: int
    folder: Path
    log: Path
    config: RunConfig
    rounding: str = "native"
    state: str = "waiting"
    seconds: float = 0.0
    note: str = ""
    problem: str = ""
    steps: int = field(init=False)
    batch: int = field(init=False)
    since: str = field(default="", repr=False)
    counting: bool = field(default=False, repr=False)
    took: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)

    def __post_init__(self) -> None:
        self.steps = self.config.optim.steps
        self.batch = self.config.rollout.prompts * self.config.rollout.group_size

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}" + ("" if self.rounding == "native" else f" {self.rounding}")

    @property
    def starting(self) -> bool:
        """Running, and before its first step: where it makes a cold start, or waits for one."""
        return self.state == "running" and self.reward is None

    def begins_like(self, other: "Run") -> bool:
        """Whether both need the same cold start."""
        mine, others = ((run.rounding, run.config.task, run.config.model) for run in (self, other))
        return mine == others and self.config.model.path is None and self.config.model.cold_start is not None

    def read(self) -> None:
        """Take in what the run wrote to metrics.jsonl since the last call. What is wrong with the file, or with a line
        of it, the run itself says: here it stops nothing."""
        path = self.folder / "metrics.jsonl"
        self.counting = self.state == "running" and self.first_step is None
        with contextlib.suppress(OSError):
            path.stat()  # of a file that is gone, what was read stays
            self.since = follow(path, self.since, self.take, self._forget)

    def _forget(self) -> None:
        self.step, self.reward, self.change, self.first_step = 0, None, None, None
        self.took.clear()
        self.counting = self.state == "running"

    def take(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
            super().take(row)
            if row["kind"] == "step" and self.counting:
                self.begin(self.step)  # to the last row of one reading: those before may be of an earlier start
            if row["kind"] == "step" and math.isfinite(seconds := float(row["seconds"])):
                self.took.append(seconds / self.batch)

    def beginning(self) -> str:
        """What a run says before its first step: how far its cold start is, or that it waits for another's; why it was
        not taken."""
        if not self.starting:
            return self.note if self.state == "waiting" else ""
        if self.note:
            return self.note
        said = last_line(self.log)
        return said if said.startswith("cold start") else "starting"

    def reason(self) -> str:
        """Why it did not finish, and where to read on; a run that could not even begin has no log."""
        said = self.problem or last_line(self.log)
        return f"{said} (log: {self.log})" if self.log.exists() else said

    def pace(self) -> float | None:
        """Seconds for each response: what the latest steps took, and of a finished run all of its time, which may hold
        a cold start (less where it went on from an earlier start)."""
        whole = self.seconds / (self.steps * self.batch) if self.state == "done" else 0.0
        return max(whole, fmean(self.took) if self.took else 0.0) or None


def last_line(log: Path) -> str:
    """The error that a log ends with, else its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return error_in(text) or (text.splitlines() or ["no output"])[-1]


def totals(runs: list[Run], workers: int) -> tuple[int, float | None]:
    """Runs that are done, and seconds left for all of them: of each at its own pace, else at that of its arm's runs,
    which make cold starts alike; else at that of the steps of all."""
    paces: dict[str, list[float]] = {}
    for run in runs:
        if pace := run.pace():
            paces.setdefault(run.arm, []).append(pace)
    usual = [fmean(run.took) for run in runs if run.took]
    left = []
    for run in runs:
        if run.state in ("running", "waiting"):
            own, like = run.left(), paces.get(run.arm, usual)
            left.append(fmean(like) * run.batch * (run.steps - run.step) if own is None and like else own)
    finished = sum(run.state == "done" for run in runs)
    known = [one for one in left if one is not None]
    return finished, max(sum(known) / workers, *known, 0.0) if len(known) == len(left) else None


def show(runs: list[Run], workers: int, polls: Iterable[None]) -> None:
    """How far the runs are, after every poll: a table that redraws itself on a terminal, else plain lines."""
    console = Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for _ in polls:
                live.update(_table(runs, workers), refresh=True)
    else:
        _lines(runs, workers, polls)


def _table(runs: list[Run], workers: int) -> Table:
    finished, left = totals(runs, workers)
    table = Table(title=f"{finished}/{len(runs)} runs done, {clock(left)} left")
    for column in ("arm", "seed", "state", "step", "reward", "slots changed", "time left"):
        table.add_column(column, justify="left" if column in ("arm", "state") else "right")
    for run in runs:
        table.add_row(
            run.arm,
            str(run.seed),
            run.beginning() or run.state,
            f"{run.step}/{run.steps}",
            number(run.reward),
            percent(run.change),
            clock(run.left()) if run.state == "running" else "",
        )
    return table


def _lines(runs: list[Run], workers: int, polls: Iterable[None]) -> None:
    """Every few seconds, and when something ends."""
    told, last = {run.name for run in runs if run.state == "done"}, time.monotonic()
    print(f"{count(len(runs), 'run')}, {len(told)} already done, {workers} at a time", flush=True)
    for _ in polls:
        finished, left = totals(runs, workers)
        said = {}
        for run in runs:
            if run.state in ("done", "failed") and run.name not in told:
                told.add(run.name)
                end = f"done in {clock(run.seconds)}, reward {number(run.reward)}"
                said[run.name] = end if run.state == "done" else run.reason()
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            for run in runs:
                if run.beginning() or run.state == "running":
                    said[run.name] = run.beginning() or f"step {run.step}/{run.steps}, {run.latest()}"
        for name, words in said.items():
            print(f"{name}: {words} | study: {finished}/{len(runs)} done, {clock(left)} left", flush=True)
