"""Progress in words: of one run as plain lines, and the pieces that a display of many is made of."""

import re
import time
from typing import Any

COLD_START_EVERY = 50  # steps of supervised training between lines


class Lines:
    """Called with every row that a run writes; prints a line per step: reward, slots changed, time left."""

    def __init__(self, steps: int):
        self.steps = steps
        self.first: tuple[int, float] | None = None
        self.reward: float | None = None
        self.change: float | None = None

    def __call__(self, row: dict[str, Any]) -> None:
        if row["kind"] == "cold_start":
            if row["step"] % COLD_START_EVERY == 0 or row["step"] == row["steps"]:
                self.say(f"cold start: step {row['step']}/{row['steps']}, loss {row['loss']:.3f}")
        elif row["kind"] == "eval":
            self.say(f"step {row['step']}/{self.steps}: held-out reward {number(row['reward'])}")
        elif row["kind"] == "rollout":
            self.reward = row["reward"]
            self.first = self.first or (row["step"], time.monotonic())
        elif row["kind"] == "probe":
            self.change = row["slots_changed"] / row["slots"] if row["slots"] else None
        elif row["kind"] == "step":
            done = row["step"] + 1
            left = None
            if self.first is not None and done > self.first[0]:
                left = (time.monotonic() - self.first[1]) / (done - self.first[0]) * (self.steps - done)
            self.say(
                f"step {done}/{self.steps}: reward {number(self.reward)}, slots changed {percent(self.change)}, "
                f"{clock(left)} left"
            )

    def say(self, text: str) -> None:
        print(text, flush=True)


_RANK = re.compile(r"^\[[a-z]+\d+\]: ?", re.M)  # before each line of a traceback where there are several ranks
_STEP = re.compile(r"^(?:cold start: )?step \d+/\d+.*\n?", re.M)  # of Lines
_TORCHRUN = re.compile(r"^[\w.]+\.ChildFailedError:.*\n?", re.M)  # at the end of its traceback; a summary follows
_ERROR = re.compile(
    r"^moe-rl: error: *(.*)|^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?!Traceback)(\S.*)", re.M
)


def error_in(text: str) -> str:
    """The first line of the error with which what a run printed ends, "" where it does not: that of `moe-rl: error:`,
    else an exception. Of ranks under torchrun the first to fail, as the others may fail of that; torchrun's own summary
    is left out."""
    *ended, last = _TORCHRUN.split(_STEP.split(_RANK.sub("", text))[-1])
    if found := _ERROR.findall(last):
        return next((ours for ours, _ in reversed(found) if ours), found[-1][1])
    for part in reversed(ended):
        if found := _ERROR.findall(part):
            return found[0][0] or found[0][1]
    return ""


def clock(seconds: float | None) -> str:
    """3:05 or 1:02:30; ? where unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
