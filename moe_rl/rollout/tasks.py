"""Verifiable tasks: where prompts come from, and what a completion is worth.

A task of one's own is a class with `problem` and `reward` (see `Task`; `VerifiableTask` gives the held-out split and
the checks). It is named in a config by where it lives, so nothing has to be registered and every process finds it:

    task: {name: my_package.tasks:Countdown, options: {numbers: 4}}
    task: {name: tasks/countdown.py:Countdown}
"""

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

BOS, EOS = "^", "$"
"""What begins every prompt and ends every completion of the character-level tasks."""

HELD_OUT_SHARE = 0.1
"""Share of all prompts that is never trained on."""


class TaskError(ValueError):
    """A task that does not exist or cannot be built; the message names the field and the nearest match."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what its verifier needs to know."""

    prompt: str
    answer: str


@runtime_checkable
class Task(Protocol):
    """What sampling and training need of a task.

    `demonstration(problem, rng, noise) -> str` is optional: a completion to imitate, without the end token, in which
    a share `noise` of the decisions is random. Only the cold start of the tiny model asks for it.
    """

    @property
    def name(self) -> str:
        """How the task is called in reports."""

    @property
    def alphabet(self) -> str:
        """Every character of its prompts and completions; the tiny model's vocabulary. Empty: any text."""

    @property
    def max_new_tokens(self) -> int:
        """Length limit of a completion in tokens, the end token included."""

    def problem(self, rng: random.Random, held_out: bool = False) -> Problem:
        """Draw a problem. No prompt is ever drawn both with `held_out` and without."""

    def reward(self, problem: Problem, completion: str) -> float:
        """What `completion` (its text, without the end token) is worth. Must accept any text."""


class VerifiableTask:
    """Base of the tasks here: gives `problem` from `draw`, with a held-out split by a hash of the prompt.

    A subclass is a frozen dataclass whose fields are its options, with `name`, `alphabet`, `max_new_tokens`,
    `draw(rng)` and `reward(problem, completion)`.
    """

    def draw(self, rng: random.Random) -> Problem:
        """Any problem, of either split."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(rng) -> Problem")

    def problem(self, rng: random.Random, held_out: bool = False) -> Problem:
        """Draw until the prompt is of the wanted split; TaskError if that does not happen in 10,000 draws."""
        for _ in range(10_000):
            drawn = self.draw(rng)
            if is_held_out(drawn.prompt) == held_out:
                return drawn
        raise TaskError(
            f"{type(self).__name__}: no {'held-out' if held_out else 'training'} prompt in 10,000 draws; the task has "
            "too few different prompts to split. Make its options larger."
        )


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to evaluation: SHA-256 of its text, so the split never depends on a seed or a run.

    >>> sum(is_held_out(str(n)) for n in range(10_000))
    1019
    """
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32


@dataclass(frozen=True)
class ModChain(VerifiableTask):
    """A chain of modular arithmetic, written out step by step: `^3+4*5-6+2=` -> `3+4=0;0*5=0;0-6=1;1+2=3.`

    Operators apply from left to right, each result modulo `modulus`. Reward 1 if the completion is a chain of `steps`
    equations closed by a full stop and its last digit is the answer, else 0. What stands between is not checked: a
    slip that cancels out is worth as much as none.
    """

    modulus: int = 7
    steps: int = 4
    operators: str = "+-*"

    name: ClassVar[str] = "mod_chain"

    def __post_init__(self) -> None:
        _require(2 <= self.modulus <= 10, "modulus", "between 2 and 10 (one digit)", self.modulus)
        _require(self.steps >= 1, "steps", "at least 1", self.steps)
        _require(
            self.operators != "" and set(self.operators) <= set("+-*"),
            "operators",
            "some of + - *",
            self.operators,
        )

    @property
    def alphabet(self) -> str:
        return "0123456789"[: self.modulus] + "+-*=;." + BOS + EOS

    @property
    def max_new_tokens(self) -> int:
        return 6 * self.steps + 1

    def draw(self, rng: random.Random) -> Problem:
        text = str(int(rng.random() * self.modulus))
        for _ in range(self.steps):
            text += rng.choice(self.operators) + str(int(rng.random() * self.modulus))
        return Problem(f"{BOS}{text}=", self._chain(text)[-2])

    def reward(self, problem: Problem, completion: str) -> float:
        digit = f"[0-{self.modulus - 1}]"
        equation = rf"{digit}[+*-]{digit}=({digit})"
        match = re.fullmatch(rf"(?:{equation};){{{self.steps - 1}}}{equation}\.", completion)
        return float(match is not None and match[2] == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """The chain; each result is, with probability `noise`, a random digit that the next step goes on from."""
        return self._chain(problem.prompt[1:-1], rng, noise)

    def _chain(self, text: str, rng: random.Random | None = None, noise: float = 0.0) -> str:
        value, parts = int(text[0]), []
        for operator, operand in zip(text[1::2], text[2::2], strict=True):
            b = int(operand)
            result = {"+": value + b, "-": value - b, "*": value * b}[operator] % self.modulus
            if rng is not None and rng.random() < noise:
                result = int(rng.random() * self.modulus)
            parts.append(f"{value}{operator}{b}={result}")
            value = result
        return ";".join(parts) + "."


@dataclass(frozen=True)
class StringTask(VerifiableTask):
    """Base of the one-answer tasks: reward 1 for exactly the answer, else 0."""

    length: int = 8
    symbols: str = "abcdefgh"

    def __post_init__(self) -> None:
        _require(self.length >= 1, "length", "at least 1", self.length)
        distinct = len(set(self.symbols)) == len(self.symbols) >= 2
        reserved = set(self.symbols) & set(BOS + EOS + "=")
        _require(
            distinct and not reserved, "symbols", "2 or more distinct characters, none of ^ $ =", self.symbols
        )

    @property
    def alphabet(self) -> str:
        return self.symbols + "=" + BOS + EOS

    @property
    def max_new_tokens(self) -> int:
        return self.length + 1

    def answer(self, text: str) -> str:
        """What `text` asks for."""
        raise NotImplementedError(f"{type(self).__name__} must define answer(text) -> str")

    def draw(self, rng: random.Random) -> Problem:
        text = "".join(rng.choices(self.symbols, k=self.length))
        return Problem(f"{BOS}{text}=", self.answer(text))

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """The answer; each character is, with probability `noise`, a random one of those that answers use."""
        symbols = "".join(sorted(set(self.symbols) - set("+")))
        return "".join(rng.choice(symbols) if rng.random() < noise else c for c in problem.answer)


@dataclass(frozen=True)
class Copy(StringTask):
    """`^bca=` -> `bca`"""

    name: ClassVar[str] = "copy"

    def answer(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Reverse(StringTask):
    """`^bca=` -> `acb`"""

    name: ClassVar[str] = "reverse"

    def answer(self, text: str) -> str:
        return text[::-1]


@dataclass(frozen=True)
class Sort(StringTask):
    """`^bca=` -> `abc` (in the order of `symbols`)"""

    name: ClassVar[str] = "sort"

    def answer(self, text: str) -> str:
        return "".join(sorted(text, key=self.symbols.index))


@dataclass(frozen=True)
class Parity(StringTask):
    """`^1011=` -> `1`: whether the number of ones is odd."""

    length: int = 12
    symbols: str = "01"

    name: ClassVar[str] = "parity"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.symbols == "01", "symbols", "'01'", self.symbols)

    @property
    def max_new_tokens(self) -> int:
        return 2

    def answer(self, text: str) -> str:
        return str(text.count("1") % 2)


@dataclass(frozen=True)
class Add(StringTask):
    """`^27+85=` -> `112`: two numbers of up to `length` digits."""

    length: int = 3
    symbols: str = "0123456789+"

    name: ClassVar[str] = "add"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.symbols == "0123456789+", "symbols", "the digits and +", self.symbols)

    @property
    def max_new_tokens(self) -> int:
        return self.length + 2

    def answer(self, text: str) -> str:
        a, b = text.split("+")
        return str(int(a) + int(b))

    def draw(self, rng: random.Random) -> Problem:
        text = f"{rng.randrange(10**self.length)}+{rng.randrange(10**self.length)}"
        return Problem(f"{BOS}{text}=", self.answer(text))


TASKS: dict[str, type] = {cls.name: cls for cls in (ModChain, Copy, Reverse, Sort, Parity, Add)}
"""The tasks that come along, by name."""


@dataclass(frozen=True)
class TaskConfig:
    """Which task, with which options."""

    name: str = "mod_chain"
    """A name in `TASKS`, or where one's own class lives: `package.module:Class` or `path/to/file.py:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task's class."""


def make_task(config: TaskConfig) -> Any:
    """Build the task that a config names; see `Task` for what it can do.

    Raises:
        TaskError: no such task, module, file or class; an unknown option (with the nearest match); an option of the
            wrong type or outside its range; a class that lacks a part of `Task`.

    >>> make_task(TaskConfig("mod_chain", {"steps": 2})).max_new_tokens
    13
    """
    cls = _own_class(config.name) if ":" in config.name else TASKS.get(config.name)
    if cls is None:
        own = "; a task of your own is named as package.module:Class or file.py:Class"
        raise TaskError(f"task.name: unknown task {config.name!r}{_nearest(config.name, TASKS)}{own}")
    if dataclasses.is_dataclass(cls):
        known = {f.name: f for f in dataclasses.fields(cls) if f.init}
        for key, value in config.options.items():
            if key not in known:
                raise TaskError(f"task.options.{key}: {config.name} has no such option{_nearest(key, known)}")
            kind = known[key].type
            accepted: Any = (int, float) if kind is float else kind
            wrong_bool = isinstance(value, bool) and kind in (int, float)
            if kind in (int, float, str, bool) and (wrong_bool or not isinstance(value, accepted)):
                raise TaskError(f"task.options.{key}: expected {kind.__name__}, got {value!r}")
    try:
        task = cls(**config.options)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {config.name}: {error}") from error
    parts = ("name", "alphabet", "max_new_tokens", "problem", "reward")
    missing = [part for part in parts if not hasattr(task, part)]
    if missing:
        raise TaskError(
            f"task {config.name}: {cls.__name__} lacks {', '.join(missing)}; see moe_rl.rollout.Task"
        )
    return task


def _own_class(path: str) -> type:
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            file = Path(place)
            if not file.is_file():
                raise TaskError(f"task.name: {path}: there is no file {file.resolve()}")
            # A name of its own, so that a file called e.g. random.py hides nothing.
            spec = importlib.util.spec_from_file_location(f"moe_rl_task_{file.stem}", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ImportError as error:
        raise TaskError(f"task.name: {path}: cannot import {place} ({error}); is it installed?") from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise TaskError(f"task.name: {place} has no class {name!r}{_nearest(name, classes)}")
    return cls


def _require(ok: bool, option: str, expected: str, value: Any) -> None:
    if not ok:
        raise TaskError(f"task.options.{option}: expected {expected}, got {value!r}")


def _nearest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
