"""Progress of the runs of a study, read from their run folders and logs, and shown on a terminal or as plain lines."""

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
from rich.markup import escape
from rich.table import Table

from moe_rl.study.cursor import follow
from moe_rl.study.progress import Progress, clock, error_in, number, percent
from moe_rl.study.words import count
from moe_rl.training import RunConfig

PLAIN_SECONDS = 15.0  # between progress lines if there is no terminal
RECENT = 20  # latest steps of a run from which times are estimated


@dataclass
class Run(Progress):
    """One run of a study, that is, an arm and seed under one rounding: where the run writes, and its state.

    note: what its launcher says while the run has not begun (a job that waits in a queue, or was not taken).
    problem: why the run ended, where its log does not say everything.
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
        """Whether the run is running and has no reward yet: it makes a cold start, or waits for one."""
        return self.state == "running" and self.reward is None

    def begins_like(self, other: "Run") -> bool:
        """Return whether this run and `other` need the same cold start."""
        mine, others = ((run.rounding, run.config.task, run.config.model) for run in (self, other))
        return mine == others and self.config.model.path is None and self.config.model.cold_start is not None

    def read(self) -> None:
        """Read what the run wrote to metrics.jsonl since the last call.

        A fault of the file or of a line is reported by the run itself, and is passed over here.
        """
        path = self.folder / "metrics.jsonl"
        self.counting = self.state == "running" and self.first_step is None
        with contextlib.suppress(OSError):
            path.stat()  # raises if the file is gone: then what was read stays
            self.since = follow(path, self.since, self.take, self._forget)

    def _forget(self) -> None:
        """Forget what was read before, because a resumed run has rewritten its metrics.jsonl."""
        self.step, self.reward, self.change, self.first_step = 0, None, None, None
        self.took.clear()
        self.counting = self.state == "running"

    def take(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
            super().take(row)
            if row["kind"] == "step" and self.counting:
                self.begin(self.step)  # the last row of one reading counts: earlier ones may be of an earlier start
            if row["kind"] == "step" and math.isfinite(seconds := float(row["seconds"])):
                self.took.append(seconds / self.batch)

    def beginning(self) -> str:
        """Return what is said of a run before its first step, "" later.

        How far its cold start is, that it waits for the cold start of another run, or why it was not taken.
        """
        if not self.starting:  # a resumed run's job may wait in a queue
            return self.note if self.state in ("waiting", "running") else ""
        if self.note:
            return self.note
        said = last_line(self.log)
        return said if said.startswith("cold start") else "starting"

    def reason(self) -> str:
        """Return why the run did not finish, and where its log is; a run that could not even begin has no log."""
        said = self.problem or last_line(self.log)
        return f"{said} (log: {self.log})" if self.log.exists() else said

    def pace(self) -> float | None:
        """Return the seconds that the run takes for each response; None if not known.

        The mean of the latest steps or, if larger, for a finished run the mean over its whole time. The whole time may
        include a cold start; it is too short if the run went on from an earlier start.
        """
        whole = self.seconds / (self.steps * self.batch) if self.state == "done" else 0.0
        return max(whole, fmean(self.took) if self.took else 0.0) or None


def last_line(log: Path) -> str:
    """Return the error with which a log ends, else its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return error_in(text) or (text.splitlines() or ["no output"])[-1]


def totals(runs: list[Run], workers: int) -> tuple[int, float | None]:
    """Return the number of runs that are done, and the seconds left for all runs (None if not known).

    The time of each run is estimated at its own pace, else at the pace of its arm's runs, which make similar cold
    starts, else at the pace of the latest steps of all runs.
    """
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
    """Show after every poll how far the runs are: in a table that redraws itself on a terminal, else as plain lines."""
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
            escape(run.arm),
            run.name.removeprefix(f"{run.arm} seed "),  # with its rounding
            escape(run.beginning() or run.state),
            f"{run.step}/{run.steps}",
            number(run.reward),
            percent(run.change),
            clock(run.left()) if run.state == "running" else "",
        )
    return table


def _lines(runs: list[Run], workers: int, polls: Iterable[None]) -> None:
    """Print how far the runs are, every few seconds and when a run ends."""
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
