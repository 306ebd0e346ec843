"""The runs of a study as the study sees them: how far each is, by its run folder and its log; and all of them, on a
terminal or as plain lines."""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.study.cursor import follow
from moe_rl.study.progress import Progress, clock, error_in, number, percent
from moe_rl.study.words import count
from moe_rl.training import RunConfig

PLAIN_SECONDS = 15.0  # between progress lines where there is no terminal


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
    since: str = field(default="", repr=False)
    counting: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.steps = self.config.optim.steps

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
        self.counting = self.state == "running"

    def take(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
            super().take(row)
            if row["kind"] == "step" and self.counting:
                self.begin(self.step)  # to the last row of one reading: those before may be of an earlier start

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

    def left(self, usual: float | None = None) -> float | None:
        """Seconds that this run still needs, from its own pace or from a finished run's."""
        own = super().left()
        return usual * (1 - self.step / self.steps) if own is None and usual else own


def last_line(log: Path) -> str:
    """The error that a log ends with, else its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return error_in(text) or (text.splitlines() or ["no output"])[-1]


def totals(runs: list[Run], workers: int) -> tuple[int, float | None]:
    """Runs that are done, and seconds left for all of them."""
    done = [run.seconds for run in runs if run.state == "done" and run.seconds]
    known = {run.name: own for run in runs if run.state == "running" and (own := run.left()) is not None}
    usual = sum(done) / len(done) if done else None
    if usual is None and known:  # as the slowest that runs
        paces = [known[run.name] / max(1, run.steps - run.step) for run in runs if run.name in known]
        usual = max(paces) * max(run.steps for run in runs)
    left = [run.left(usual) for run in runs if run.state in ("running", "waiting")]
    finished = sum(run.state == "done" for run in runs)
    if any(x is None for x in left):
        return finished, None
    return finished, max([sum(x for x in left if x is not None) / workers, *known.values()])


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
