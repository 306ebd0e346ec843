"""One run of a study as the study sees it: how far it is, read from its run folder and its log."""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_rl.study.cursor import follow
from moe_rl.study.progress import error_in
from moe_rl.training import RunConfig


@dataclass
class Run:
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
    began: float = 0.0
    seconds: float = 0.0
    step: int = 0
    first_step: int | None = None
    reward: float | None = None
    change: float | None = None
    note: str = ""
    problem: str = ""
    since: str = field(default="", repr=False)
    counting: bool = field(default=False, repr=False)

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
            if row["kind"] == "rollout":
                self.reward = None if row["reward"] is None else float(row["reward"])
            elif row["kind"] == "probe":
                self.change = row["slots_changed"] / row["slots"] if row["slots"] else None
            elif row["kind"] == "step":
                self.step = min(int(row["step"]) + 1, self.steps)
                if self.counting:  # to the last row of one reading: those before may be of an earlier start
                    self.first_step, self.began = self.step, time.monotonic()

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

    def left(self, usual: float | None) -> float | None:
        """Seconds that this run still needs, from its own pace or from a finished run's."""
        if self.state == "done":
            return 0.0
        if self.first_step is not None and self.step > self.first_step:
            pace = (time.monotonic() - self.began) / (self.step - self.first_step)
            return pace * (self.steps - self.step)
        return usual * (1 - self.step / self.steps) if usual else None


def last_line(log: Path) -> str:
    """The error that a log ends with, else its last line."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return error_in(text) or (text.splitlines() or ["no output"])[-1]
