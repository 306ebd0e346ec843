"""Verifiers: they judge whether a completion gives the answer by text, last number or box, or mathematical equality."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from moe_rl.rollout.task import TaskError

MINUS = "\N{MINUS SIGN}"  # the typographic minus sign, which models write, too
NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(answer: str, completion: str) -> bool:
    """Return whether the whole completion is the answer, up to white space, case and a closing full stop.

    >>> exact_match("New York", " new\\n york."), exact_match("12", "It is 12")
    (True, False)
    """
    return normalised(completion) == normalised(answer)


def last_answer(answer: str, completion: str) -> bool:
    r"""Return whether the completion's last `\boxed{...}` is the answer; without a box, whether its last number is (if
    the answer is a number), else its last line. Numbers are compared by value.

    >>> last_answer("1000", r"First 7, then \boxed{1,000.0}."), last_answer("7", "5 + 2 = 7, I think.")
    (True, True)
    >>> last_answer("18", r"So it is \boxed{\$18}"), last_answer("18", "A change of -$18")
    (True, False)
    >>> last_answer("7", "7 or 8"), last_answer("Paris", "Is it Rome?\nParis.")
    (False, True)
    """
    completion = completion.replace(MINUS, "-")
    found = last_boxed(completion)
    answer, found = _plain(answer), None if found is None else _plain(found)
    if found is None and number(answer) is not None:
        numbers = NUMBER.findall(completion)
        found = numbers[-1] if numbers else ""
    elif found is None:
        lines = [line for line in completion.splitlines() if line.strip()]
        found = lines[-1] if lines else ""
    a, b = number(answer), number(found)
    return normalised(found) == normalised(answer) if a is None or b is None else a == b


def _plain(text: str) -> str:
    """Return a text without what LaTeX needs to write a number, a currency or a percent sign: escapes and spaces."""
    return re.sub(r"\\([$%])", r"\1", text).replace("{,}", ",").replace(r"\!", "").replace(r"\,", "")


def normalised(text: str) -> str:
    """Return the text with one space for any white space, casefolded, without a closing full stop, and with ASCII minus
    signs."""
    return " ".join(text.replace(MINUS, "-").split()).casefold().removesuffix(".")


def number(text: str) -> Decimal | None:
    """Return the value of a text that is one number, thousands separated by commas or not; None for any other text."""
    text = text.replace(MINUS, "-").strip().strip("$").removesuffix(".")
    if not NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`, braces balanced; None if there is no such box.

    >>> print(last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}"))
    \frac{1}{2}
    """
    opened: list[int | None] = []  # for each open brace, where its content begins; None: not the brace of a box
    boxes = {match.end() for match in re.finditer(r"\\boxed\s*\{", text)}
    last, found = -1, None
    for place, character in enumerate(text, start=1):
        if character == "{":
            opened.append(place if place in boxes else None)
        elif character == "}" and opened and (start := opened.pop()) is not None and start > last:
            last, found = start, text[start : place - 1]
    return found


class MathVerify:
    """A verifier of mathematical equality, by the math-verify package (an optional one) in a process of its own.

    A completion can hold `9^{9^{9^9}}`, on which sympy never returns and no signal interrupts it; the process is then
    killed, and the completion counts as wrong. The process is started at the first question.

    Raises:
        TaskError: the package is missing; an answer that math-verify cannot read, or not in time.
    """

    SECONDS = 5.0
    """Time limit for one completion or answer, the package's import not counted."""

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise TaskError(
                "task.options.verifier: math_verify needs the math-verify package: pip install '.[math-verify]' in the "
                "checkout of moe_rl; last_answer compares boxes and numbers without it"
            )
        self.process: Any = None
        self.read: str | None = None
        """The answer that the process has read and compares completions with."""
        self._died = False  # the process ended by itself at the last question
        self._end: Callable[[], Any] = lambda: None

    def __call__(self, answer: str, completion: str) -> bool:
        said = self._compare(answer, completion)
        if self._died:  # perhaps not of this question (out of memory, killed by another process): asked once more
            said = self._compare(answer, completion)
        if self.read is None and said != "equal":
            raise TaskError(
                f"math-verify cannot read the answer {answer!r}{said}; is it mathematics? See task.options.verifier"
            )
        return said == "equal"

    def _compare(self, answer: str, completion: str) -> str:
        """Return what the process says of a completion; or, with `read` None, the time after which it had not read the
        answer, empty if it read none."""
        if self.process is None or self.process.poll() is not None:  # ended between two questions, out of memory
            self._start()
        if answer != self.read:  # the completions of a group share an answer, which is sent once
            self.read = None
            said = self._ask("answer", answer)
            if said != "read":
                return "" if said else f" in {self.SECONDS:g} seconds"
            self.read = answer
        return self._ask("completion", completion)

    def _start(self) -> None:
        self._end()  # cleans up after a process that died by itself
        worker = Path(__file__).with_name("math_worker.py")
        self.process, self.read = None, None
        self.process = subprocess.Popen(  # -P: do not import from the script's own folder
            [sys.executable, "-P", str(worker), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._end = weakref.finalize(self, _end, self.process)
        if self._ask() != "ready":
            raise TaskError("math-verify could not be started; the reason stands above")

    def _ask(self, *question: str) -> str:
        """Return the process's answer to a question or, without one, its first line after the start. Empty if nothing
        came in time; the process is then ended, because a late answer would be taken for that to the next question."""
        said, late, process = "", threading.Event(), self.process

        def stop() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(self.SECONDS, stop)  # for the question, too: it can fill the pipe of a busy process
        try:
            if question:
                limit.start()
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            said = process.stdout.readline().strip()
        except BrokenPipeError:
            pass
        finally:
            limit.cancel()
            self._died = not said and not late.is_set()
            if not said:  # the process took too long or ran out of memory, or this one was interrupted
                self.process = None
                self._end()
        return said


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(OSError), process:  # `with` closes its pipes; an unread question may make that fail
        process.kill()


VERIFIERS: Mapping[str, Callable[[], Callable[[str, str], bool]]] = {
    "exact_match": lambda: exact_match,
    "last_answer": lambda: last_answer,
    "math_verify": MathVerify,
}
"""By name, functions that make a verifier `verify(answer, completion) -> bool`."""
