"""All runs of a study in parallel processes: one thread each, progress, and resumption of what is unfinished."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_rl.checks import parse_json
from moe_rl.files import sole_writer, write_atomic
from moe_rl.study.config import ConfigError, DamagedRunError, StudyConfig, dump_study
from moe_rl.study.progress import clock, number, percent
from moe_rl.study.run import check_folder, check_here, environment
from moe_rl.study.worker import Worker
from moe_rl.training import RunConfig
from moe_rl.training.launch import launched_processes

POLL_SECONDS = 1.0
PLAIN_SECONDS = 15.0  # between progress lines where there is no terminal


class StudyFailed(RuntimeError):
    """Some runs did not finish; the message says which, why and how to go on."""


@dataclass
class Run:
    """One (arm, seed) under one rounding: where it writes, what it is doing."""

    arm: str
    seed: int
    folder: Path
    log: Path
    config: RunConfig
    rounding: str = "native"
    worker: Worker | None = None
    state: str = "waiting"
    began: float = 0.0
    seconds: float = 0.0
    step: int = 0
    first_step: int | None = None
    reward: float | None = None
    change: float | None = None
    refusal: str = ""
    offset: int = field(default=0, repr=False)
    inode: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}" + ("" if self.rounding == "native" else f" {self.rounding}")

    @property
    def steps(self) -> int:
        return self.config.optim.steps

    @property
    def starting(self) -> bool:
        """Running, and before its first step: where it makes a cold start, or waits for one."""
        return self.state == "running" and self.reward is None

    @property
    def said(self) -> str:
        """Why it failed: the last line of its log, unless it could not even begin."""
        return self.refusal or f"{_last_line(self.log)} (log: {self.log})"

    def begins_like(self, other: "Run") -> bool:
        """Whether both need the same cold start."""
        same = (self.rounding, self.config.task, self.config.model) == (
            other.rounding,
            other.config.task,
            other.config.model,
        )
        return same and self.config.model.path is None and self.config.model.cold_start is not None

    def read(self) -> None:
        """Take in what the run wrote to metrics.jsonl since the last call. What is wrong with the file, or with a line
        of it, the run itself says: here it stops nothing."""
        with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "rb") as file:
            # A resume rewrites the file: whatever it was, what was read before no longer ends where it did.
            inode = os.fstat(file.fileno()).st_ino
            if self.offset and (inode != self.inode or not _ends_line(file, self.offset)):
                self.offset, self.step, self.reward, self.change = 0, 0, None, None
            self.inode = inode
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
                    self.take(parse_json(line))

    def take(self, row: dict[str, Any]) -> None:
        if row["kind"] == "rollout":
            self.reward = None if row["reward"] is None else float(row["reward"])
        elif row["kind"] == "probe":
            self.change = row["slots_changed"] / row["slots"] if row["slots"] else None
        elif row["kind"] == "step":
            self.step = min(int(row["step"]) + 1, self.steps)
            if self.first_step is None and self.worker is not None:
                self.first_step, self.began = self.step, time.monotonic()

    def beginning(self) -> str:
        """What a run says before its first step: how far its cold start is, or that it waits for another's."""
        if not self.starting:
            return ""
        said = _last_line(self.log)
        return said if said.startswith("cold start") else "starting (arms of one seed share its cold start)"

    def left(self, usual: float | None) -> float | None:
        """Seconds that this run still needs, from its own pace or from a finished run's."""
        if self.state == "done":
            return 0.0
        if self.first_step is not None and self.step > self.first_step:
            pace = (time.monotonic() - self.began) / (self.step - self.first_step)
            return pace * (self.steps - self.step)
        return usual * (1 - self.step / self.steps) if usual else None


def run_study(
    study: StudyConfig,
    output: Path,
    cold_starts: Path,
    workers: int,
    command: str,
    roundings: Sequence[str] = ("native",),
) -> None:
    """Run every (arm, seed) of `study` under `output`, `workers` at a time; finished runs are kept.

    Each of `roundings` repeats all of it, cold starts included, with other CPU kernels: `native` in `output` itself,
    the others in `output/rounding_NAME`, which is a study folder of its own.

    Raises:
        ConfigError: a run folder belongs to another configuration, or a rounding that this machine does not have;
            nothing is started.
        ModelError, EngineError: an arm that this machine cannot run; nothing is started.
        InUseError: another process runs this study.
        StudyFailed: runs that ended with an error, or whose folder is damaged, after all the others were finished.
    """
    check_labels(study)
    check_roundings(roundings, torch.backends.cpu.get_cpu_capability())
    places = {name: output if name == "native" else output / f"rounding_{name}" for name in roundings}
    runs = [run for name, place in places.items() for run in _runs(study, place, name)]
    with sole_writer(output, command):
        _run_all(study, places, runs, cold_starts, workers, command)


def _run_all(
    study: StudyConfig, places: dict[str, Path], runs: list[Run], cold_starts: Path, workers: int, command: str
) -> None:
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
        (place / "logs").mkdir(exist_ok=True)
        write_atomic(place / "study.yaml", dump_study(study))
        write_atomic(place / "env.json", json.dumps(environment(command), indent=1) + "\n")
    console = Console()
    display = _Live(console, runs, workers) if console.is_terminal else _Plain(console, runs, workers)
    with display:
        for _ in _schedule(runs, cold_starts, workers):
            display.show()
    failed = [run for run in runs if run.state == "failed"]
    if failed:
        reasons = "\n".join(f"  {run.name}: {run.said}" for run in failed)
        raise StudyFailed(
            f"{len(failed)} of {len(runs)} runs did not finish:\n{reasons}\n"
            "The others are complete. The same command goes on from the last checkpoints."
        )


def check_labels(study: StudyConfig) -> None:
    """Raises ConfigError for a label that figures could not draw: between two `$` matplotlib reads mathematics."""
    for name, arm in study.arms.items():
        if "$" in arm.label:
            from matplotlib.mathtext import MathTextParser

            try:
                MathTextParser("path").parse(arm.label)
            except ValueError as error:
                raise ConfigError(
                    f"arms.{name}.label: {arm.label!r} is no mathematics that figures can draw "
                    f"({str(error).strip().splitlines()[-1]}); write \\$ for a dollar"
                ) from error


def check_roundings(names: Sequence[str], native: str) -> None:
    """Raises ConfigError unless every one of `names` is another instruction set than `native`, and one that this
    processor has: torch would use what it is told to and die of an illegal instruction."""
    smaller = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}.get(native, ())
    for name in names:
        if name not in ("native", *smaller):
            raise ConfigError(
                f"rounding {name!r}: torch uses {native} kernels here, so that {', '.join(('native', *smaller))} "
                f"{'is' if not smaller else 'are'} what can be compared"
            )


def _runs(study: StudyConfig, place: Path, rounding: str) -> list[Run]:
    """Every (arm, seed) of `study` in `place`, with what is there already. Raises as `run_study`."""
    runs = []
    for arm, seed in study.runs():
        config = study.resolve(arm, seed)
        folder = place / arm / f"seed{seed}"
        run = Run(arm, seed, folder, place / "logs" / f"{arm}_seed{seed}.log", config, rounding)
        try:
            run.state = "waiting" if check_folder(config, folder) else "done"
        except DamagedRunError as error:
            run.state, run.refusal = "failed", str(error)
        if run.state == "waiting":
            check_here(config)
        if run.state == "waiting" and (config.distributed.strategy != "none" or launched_processes() > 1):
            raise ConfigError(
                f"moe-rl study starts one process for each run; a run over several (distributed.strategy, torchrun) is "
                f"started by itself: torchrun --nproc_per_node N -m moe_rl run FILE --arm {arm} --seed {seed} "
                f"--output {folder}"
            )
        runs.append(run)
    return runs


def _next(waiting: list[Run], active: list[Run]) -> Run:
    """The first that would not have to wait for a cold start which another run is making; else the first."""
    making = [run for run in active if run.starting]
    free = (run for run in waiting if not any(run.begins_like(other) for other in making))
    return next(free, waiting[0])


def _schedule(runs: list[Run], cold_starts: Path, workers: int) -> Iterator[None]:
    """Start and watch the runs; yields once per poll. Processes end with their parent."""
    waiting = [run for run in runs if run.state == "waiting"]
    active: list[Run] = []
    idle: list[Worker] = []
    try:
        while waiting or active:
            while waiting and len(active) < workers:
                run = _next(waiting, active)
                waiting.remove(run)
                run.read()
                run.worker = _worker_for(run, idle)
                run.worker.begin(_arguments(run, cold_starts), run.log)
                run.state, run.began = "running", time.monotonic()
                run.seconds = time.monotonic()
                active.append(run)
            time.sleep(POLL_SECONDS)
            for run in list(active):
                run.read()
                assert run.worker is not None
                status = run.worker.ended()
                if status is not None:
                    run.state = "done" if status == 0 else "failed"
                    run.seconds = time.monotonic() - run.seconds
                    active.remove(run)
                    idle.append(run.worker)
            yield
    finally:
        for worker in [*idle, *(run.worker for run in active if run.worker is not None)]:
            worker.stop()


def _worker_for(run: Run, idle: list[Worker]) -> Worker:
    """An idle worker with the run's kernels, or a new one; the other idle ones are ended."""
    found = None
    while idle:
        worker = idle.pop()
        if found is None and worker.rounding == run.rounding and worker.alive():
            found = worker
        else:
            worker.stop()
    return found or Worker(run.rounding, run.log)


def _arguments(run: Run, cold_starts: Path) -> list[object]:
    study = run.log.parent.parent / "study.yaml"
    chosen = ["run", study, "--arm", run.arm, "--seed", run.seed]
    # Whoever started the study has decided about code that it names.
    return [*chosen, "--output", run.folder, "--cold-starts", cold_starts, "--trust"]


def _ends_line(file: BinaryIO, offset: int) -> bool:
    file.seek(offset - 1)
    return file.read(1) == b"\n"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "no output"


def _totals(runs: list[Run], workers: int) -> tuple[int, float | None]:
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


class _Live:
    """A table that redraws itself on a terminal."""

    def __init__(self, console: Console, runs: list[Run], workers: int):
        self.runs, self.workers = runs, workers
        self.live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "_Live":
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def show(self) -> None:
        finished, left = _totals(self.runs, self.workers)
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


class _Plain:
    """Lines, every few seconds and when something ends, where there is no terminal."""

    def __init__(self, console: Console, runs: list[Run], workers: int):
        self.console, self.runs, self.workers = console, runs, workers
        self.told: set[str] = {run.name for run in runs if run.state == "done"}
        self.last = time.monotonic()

    def __enter__(self) -> "_Plain":
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        self.say(f"{runs}, {len(self.told)} already done, {self.workers} at a time")
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)

    def show(self) -> None:
        finished, left = _totals(self.runs, self.workers)
        total = f"study: {finished}/{len(self.runs)} done, {clock(left)} left"
        for run in self.runs:
            if run.state in ("done", "failed") and run.name not in self.told:
                self.told.add(run.name)
                end = f"done in {clock(run.seconds)}, reward {number(run.reward)}"
                self.say(f"{run.name}: {end if run.state == 'done' else run.said} | {total}")
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


__all__ = ["ConfigError", "StudyFailed", "run_study"]
