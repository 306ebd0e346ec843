"""How far the runs of a study are, on a terminal or as plain lines."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.study.progress import clock, number, percent
from moe_rl.study.runs import Run

PLAIN_SECONDS = 15.0  # between progress lines where there is no terminal


def totals(runs: list[Run], workers: int) -> tuple[int, float | None]:
    """Runs that are done, and seconds left for all of them."""
    done = [run.seconds for run in runs if run.state == "done" and run.seconds]
    running = [run.left(None) for run in runs if run.state == "running"]
    known = [x for x in running if x is not None]
    usual = sum(done) / len(done) if done else None
    if usual is None and known:
        paces = [(run.left(None) or 0) / max(1, run.steps - run.step) for run in runs if run.state == "running"]
        usual = max(paces) * max(run.steps for run in runs)
    left = [run.left(usual) for run in runs if run.state in ("running", "waiting")]
    finished = sum(run.state == "done" for run in runs)
    if any(x is None for x in left):
        return finished, None
    total = sum(x for x in left if x is not None)
    return finished, max([total / workers, *known]) if left else 0.0


class LiveTable:
    """A table that redraws itself on a terminal."""

    def __init__(self, console: Console, runs: list[Run], workers: int):
        self.runs, self.workers = runs, workers
        self.live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "LiveTable":
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def show(self) -> None:
        finished, left = totals(self.runs, self.workers)
        table = Table(title=f"{finished}/{len(self.runs)} runs done, {clock(left)} left")
        for column in ("arm", "seed", "state", "step", "reward", "slots changed", "time left"):
            table.add_column(column, justify="left" if column in ("arm", "state") else "right")
        for run in self.runs:
            table.add_row(
                run.arm,
                str(run.seed),
                run.beginning() or run.state,
                f"{run.step}/{run.steps}",
                number(run.reward),
                percent(run.change),
                clock(run.left(None)) if run.state == "running" else "",
            )
        self.live.update(table, refresh=True)


class PlainLines:
    """Lines, every few seconds and when something ends, where there is no terminal."""

    def __init__(self, console: Console, runs: list[Run], workers: int):
        self.console, self.runs, self.workers = console, runs, workers
        self.told: set[str] = {run.name for run in runs if run.state == "done"}
        self.last = time.monotonic()

    def __enter__(self) -> "PlainLines":
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        self.say(f"{runs}, {len(self.told)} already done, {self.workers} at a time")
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)

    def show(self) -> None:
        finished, left = totals(self.runs, self.workers)
        total = f"study: {finished}/{len(self.runs)} done, {clock(left)} left"
        for run in self.runs:
            if run.state in ("done", "failed") and run.name not in self.told:
                self.told.add(run.name)
                end = f"done in {clock(run.seconds)}, reward {number(run.reward)}"
                self.say(f"{run.name}: {end if run.state == 'done' else run.reason()} | {total}")
        if time.monotonic() - self.last >= PLAIN_SECONDS:
            self.last = time.monotonic()
            for run in self.runs:
                if run.beginning():
                    self.say(f"{run.name}: {run.beginning()} | {total}")
                elif run.state == "running":
                    self.say(
                        f"{run.name}: step {run.step}/{run.steps}, reward {number(run.reward)}, slots changed "
                        f"{percent(run.change)}, {clock(run.left(None))} left | {total}"
                    )
