"""Small tasks with one short answer: copy, reverse, sort, parity, addition of numbers."""

import random
from dataclasses import dataclass
from typing import ClassVar

from moe_rl.rollout.character_tasks import BOS, EOS, other, require
from moe_rl.rollout.task import Problem, VerifiableTask


@dataclass(frozen=True)
class StringTask(VerifiableTask):
    """Base class of the tasks with one short answer: reward 1 for exactly the answer, else 0."""

    length: int = 8
    symbols: str = "abcdefgh"

    def __post_init__(self) -> None:
        require(self.length >= 1, "length", "at least 1", self.length)
        distinct = len(set(self.symbols)) == len(self.symbols) >= 2
        usable = distinct and not set(self.symbols) & set(BOS + EOS + "=")
        require(usable, "symbols", "2 or more distinct characters, none of ^ $ =", self.symbols)

    @property
    def alphabet(self) -> str:
        return self.symbols + "=" + BOS + EOS

    @property
    def max_new_tokens(self) -> int:
        return self.length + 1

    def answer(self, text: str) -> str:
        """Return the right answer for the prompt's text, which stands between `^` and `=`."""
        raise NotImplementedError(f"{type(self).__name__} must define answer(text) -> str")

    def draw(self, rng: random.Random) -> Problem:
        text = "".join(rng.choices(self.symbols, k=self.length))
        return Problem(f"{BOS}{text}=", self.answer(text))

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == problem.answer)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """Return the answer, in which each character is, with probability `noise`, a wrong one."""
        return "".join(other(self.symbols, c, rng) if rng.random() < noise else c for c in problem.answer)


@dataclass(frozen=True)
class Copy(StringTask):
    """Task: repeat a string; `^bca=` is answered by `bca`."""

    name: ClassVar[str] = "copy"

    def answer(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class Reverse(StringTask):
    """Task: reverse a string; `^bca=` is answered by `acb`."""

    name: ClassVar[str] = "reverse"

    def answer(self, text: str) -> str:
        return text[::-1]


@dataclass(frozen=True)
class Sort(StringTask):
    """Task: sort a string in the order of `symbols`; `^bca=` is answered by `abc`."""

    name: ClassVar[str] = "sort"

    def answer(self, text: str) -> str:
        return "".join(sorted(text, key=self.symbols.index))


@dataclass(frozen=True)
class Parity(StringTask):
    """Task: tell whether the number of ones is odd; `^1011=` is answered by `1`."""

    length: int = 12
    symbols: ClassVar[str] = "01"  # type: ignore[misc]  # a field of the base is fixed here

    name: ClassVar[str] = "parity"

    @property
    def max_new_tokens(self) -> int:
        return 2

    def answer(self, text: str) -> str:
        return str(text.count("1") % 2)


@dataclass(frozen=True)
class Add(StringTask):
    """Task: add two numbers of up to `length` digits; `^27+85=` is answered by `112`."""

    length: int = 3
    symbols: ClassVar[str] = "0123456789"  # type: ignore[misc]  # as above

    name: ClassVar[str] = "add"

    @property
    def alphabet(self) -> str:
        return super().alphabet + "+"

    @property
    def max_new_tokens(self) -> int:
        return self.length + 2

    def answer(self, text: str) -> str:
        a, b = text.split("+")
        return str(int(a) + int(b))

    def draw(self, rng: random.Random) -> Problem:
        text = f"{rng.randrange(10**self.length)}+{rng.randrange(10**self.length)}"
        return Problem(f"{BOS}{text}=", self.answer(text))
