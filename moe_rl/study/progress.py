"""Progress of one run, from the rows that the run writes, as plain lines; and the error with which its log ends."""

import re
import time
from dataclasses import dataclass
from typing import Any

COLD_START_EVERY = 50  # steps of supervised training between lines


@dataclass(kw_only=True)
class Progress:
    """Progress of a run: its number of steps done, and the reward and change rate that were measured last.

    The pace is measured from `began`, the time at which the run began the step `first_step`.
    """

    steps: int
    step: int = 0
    reward: float | None = None
    change: float | None = None
    first_step: int | None = None
    began: float = 0.0

    def begin(self, step: int) -> None:
        """Measure the pace from now on, with `step` as the first step."""
        self.first_step, self.began = step, time.monotonic()

    def take(self, row: dict[str, Any]) -> None:
        """Update the progress from one row that the run wrote."""
        if row["kind"] == "rollout":
            self.reward = None if row["reward"] is None else float(row["reward"])
        elif row["kind"] == "probe":
            self.change = row["slots_changed"] / row["slots"] if row["slots"] else None
        elif row["kind"] == "step":
            self.step = min(int(row["step"]) + 1, self.steps)

    def left(self) -> float | None:
        """Return the seconds that the run still needs at its pace; None while the pace is not known."""
        if self.first_step is None or self.step <= self.first_step:
            return None
        return (time.monotonic() - self.began) / (self.step - self.first_step) * (self.steps - self.step)

    def latest(self) -> str:
        """Return the latest reward, the latest change rate and the time left as text."""
        return f"reward {number(self.reward)}, slots changed {percent(self.change)}, {clock(self.left())} left"


class Lines(Progress):
    """Progress that prints a line per step; to be called with every row that a run writes."""

    def __call__(self, row: dict[str, Any]) -> None:
        self.take(row)
        if row["kind"] == "cold_start":
            if row["step"] % COLD_START_EVERY == 0 or row["step"] == row["steps"]:
                print(f"cold start: step {row['step']}/{row['steps']}, loss {row['loss']:.3f}", flush=True)
        elif row["kind"] == "eval":
            print(f"step {row['step']}/{self.steps}: held-out reward {number(row['reward'])}", flush=True)
        elif row["kind"] == "step":
            if self.first_step is None:
                self.first_step, self.began = row["step"], time.monotonic() - (row["seconds"] or 0.0)
            print(f"step {self.step}/{self.steps}: {self.latest()}", flush=True)


_RANK = re.compile(r"^\[[a-z]+\d+\]: ?", re.M)  # begins each line of a traceback if there are several ranks
_STEP = re.compile(r"^(?:cold start: )?step \d+/\d+.*\n?", re.M)  # printed by Lines
_TORCHRUN = re.compile(r"^[\w.]+\.ChildFailedError:.*\n?", re.M)  # ends the traceback of torchrun; its summary follows
_ERROR = re.compile(
    r"^moe-rl: error: *(.*)|^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?!Traceback)(\S.*)", re.M
)


def error_in(text: str) -> str:
    """Return the first line of the error with which a run's output ends, "" if it does not end with an error.

    The error is that of `moe-rl: error:`, else an exception. Of several ranks under torchrun, it is that of the first
    rank to fail, as the others may fail for that reason; torchrun's own summary is left out.
    """
    *ended, last = _TORCHRUN.split(_STEP.split(_RANK.sub("", text))[-1])
    if found := _ERROR.findall(last):
        return next((ours for ours, _ in reversed(found) if ours), found[-1][1])
    for part in reversed(ended):
        if found := _ERROR.findall(part):
            return found[0][0] or found[0][1]
    return ""


def clock(seconds: float | None) -> str:
    """Return seconds as text, 3:05 or 1:02:30; ? for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
