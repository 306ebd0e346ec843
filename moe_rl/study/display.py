"""How far the runs of a study are, on a terminal or as plain lines."""

import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.study.progress import clock, number, percent
from moe_rl.study.runs import Run
from moe_rl.study.words import count

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
            clock(run.left(None)) if run.state == "running" else "",
        )
    return table


def _lines(runs: list[Run], workers: int, polls: Iterable[None]) -> None:
    """Every few seconds, and when something ends."""
    told, last = {run.name for run in runs if run.state == "done"}, time.monotonic()
    print(f"{count(len(runs), 'run')}, {len(told)} already done, {workers} at a time", flush=True)
    for _ in polls:
        finished, left = totals(runs, workers)
        total = f"study: {finished}/{len(runs)} done, {clock(left)} left"
        for run in runs:
            if run.state in ("done", "failed") and run.name not in told:
                told.add(run.name)
                end = f"done in {clock(run.seconds)}, reward {number(run.reward)}"
                print(f"{run.name}: {end if run.state == 'done' else run.reason()} | {total}", flush=True)
        if time.monotonic() - last < PLAIN_SECONDS:
            continue
        last = time.monotonic()
        for run in runs:
            if run.beginning():
                print(f"{run.name}: {run.beginning()} | {total}", flush=True)
            elif run.state == "running":
                print(
                    f"{run.name}: step {run.step}/{run.steps}, reward {number(run.reward)}, slots changed "
                    f"{percent(run.change)}, {clock(run.left(None))} left | {total}",
                    flush=True,
                )
