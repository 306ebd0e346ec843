"""Tasks and verifiers are other people's code: what goes wrong in it is said with task, prompt and completion."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moe_rl.rollout.task import Problem, TaskError

LARGEST_REWARD = 1e9
"""In absolute value; beyond, differences between rewards are lost in fp32, and their squares overflow."""


@contextmanager
def user_code(
    task: Any, part: str, problem: Problem | None = None, completion: str | None = None, seconds: float | None = None
) -> Iterator[None]:
    """Run a task's own code.

    Args:
        part: which method, for the message.
        seconds: how long it may take; None: no limit. Enforced in the main thread of Unix systems, between Python
            instructions: a call into C that never returns is not interrupted.

    Raises:
        TaskError: whatever it raised, `SystemExit` included, or that it did not return in time.
    """
    try:
        with _time_limit(seconds):
            yield
    except (Exception, SystemExit) as error:
        where = "" if problem is None else f"; prompt {_short(problem.prompt)}"
        where += "" if completion is None else f", completion {_short(completion)}"
        said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
        raise TaskError(f"task {task.name}, {part}: {said}{where}") from error


def checked_reward(value: Any) -> float:
    """A reward as a float.

    Raises:
        TaskError: not a number, not finite, or too large for fp32 to tell rewards apart.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"expected a number, got {value!r}") from error
    if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        raise TaskError(f"expected a finite reward of at most {LARGEST_REWARD:g} in absolute value, got {value!r}")
    return reward


def _short(text: str, limit: int = 200) -> str:
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    if not seconds or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TaskError(f"did not return within {seconds:g} seconds (task.verifier_seconds)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
