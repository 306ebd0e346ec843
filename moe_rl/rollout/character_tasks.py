"""Small tasks of modular arithmetic, in characters, which the tiny model can learn in a minute on a CPU.

Every prompt begins with `^`; `$` is the end token, which the text of a completion does not contain.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from moe_rl.rollout.task import Problem, TaskError, VerifiableTask

BOS, EOS = "^", "$"


def require(ok: bool, option: str, expected: str, value: Any) -> None:
    """Raise TaskError, which names the option, unless `ok` is true."""
    if not ok:
        raise TaskError(f"task.options.{option}: expected {expected}, got {value!r}")


def other(symbols: str, right: str, rng: random.Random) -> str:
    """Draw one of the symbols at random, but never the symbol `right`."""
    return rng.choice([symbol for symbol in symbols if symbol != right])


@dataclass(frozen=True)
class Arithmetic(VerifiableTask):
    """Base class of the tasks of modular arithmetic: the prompt `^3+4*5=` asks for its operations from left to right,
    each result modulo `modulus`."""

    modulus: int = 7
    steps: int = 4
    operators: str = "+-*"

    def __post_init__(self) -> None:
        require(2 <= self.modulus <= 10, "modulus", "between 2 and 10 (one digit)", self.modulus)
        require(self.steps >= 1, "steps", "at least 1", self.steps)
        known = bool(self.operators) and set(self.operators) <= set("+-*")
        require(known, "operators", "some of + - *", self.operators)

    @property
    def _digits(self) -> str:
        return "0123456789"[: self.modulus]

    def draw(self, rng: random.Random) -> Problem:
        text = rng.choice(self._digits)
        for _ in range(self.steps):
            text += rng.choice(self.operators) + rng.choice(self._digits)
        value = text[0]
        for operator, operand in self._operations(text):
            value = self._operate(value, operator, operand)
        return Problem(f"{BOS}{text}=", value)

    @staticmethod
    def _operations(text: str) -> Iterator[tuple[str, str]]:
        """Return pairs (operator, right operand) of a text such as `3+4*5`, from left to right."""
        return zip(text[1::2], text[2::2], strict=True)

    def _operate(self, a: str, operator: str, b: str) -> str:
        left, right = int(a), int(b)
        return str({"+": left + right, "-": left - right, "*": left * right}[operator] % self.modulus)


@dataclass(frozen=True)
class ModChain(Arithmetic):
    """Task: a chain of modular arithmetic, spelled out; `^3+4*5-6+2=` is answered by `3+4=0;0*5=0;0-6=1;1+2=3.`

    Operators apply from left to right, each result modulo `modulus`. Reward 1 if the completion is a chain
    of `steps` equations closed by a full stop and its last digit is the answer, else 0. The other digits
    are not checked: a chain with wrong steps gets reward 1, too, if its last digit is right.
    """

    name: ClassVar[str] = "mod_chain"

    @property
    def alphabet(self) -> str:
        return self._digits + "+-*=;." + BOS + EOS

    @property
    def max_new_tokens(self) -> int:
        return 6 * self.steps + 1

    def reward(self, problem: Problem, completion: str) -> float:
        match = self._form(completion)
        return float(match is not None and match[2] == problem.answer)

    def rewards(self, problem: Problem, completion: str) -> dict[str, float]:
        """Return two rewards. `correct`: see `reward`; `format`: 1 for a closed chain of `steps` equations, whatever
        its digits, else 0."""
        return {
            "correct": self.reward(problem, completion),
            "format": float(self._form(completion) is not None),
        }

    def step_rewards(self, problem: Problem, completion: str) -> list[tuple[int, float]]:
        """Return (end, reward) of each step, an equation and its closing mark: reward 1 if the step equals the one at
        the same place of the right chain, else 0."""
        right = self._steps(self._chain(problem.prompt[1:-1], random.Random(0), 0.0))
        found, end = [], 0
        for number, step in enumerate(self._steps(completion)):
            end += len(step)
            found.append((end, float(number < len(right) and step == right[number])))
        return found

    @staticmethod
    def _steps(text: str) -> list[str]:
        return re.findall(r"[^;]+;?|;", text)

    def _form(self, completion: str) -> re.Match[str] | None:
        digit = f"[0-{self.modulus - 1}]"
        equation = rf"{digit}[+*-]{digit}=({digit})"
        return re.fullmatch(rf"(?:{equation};){{{self.steps - 1}}}{equation}\.", completion)

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """Return the chain, in which each result is, with probability `noise`, a wrong digit that the next equation
        begins with."""
        return self._chain(problem.prompt[1:-1], rng, noise)

    def _chain(self, text: str, rng: random.Random, noise: float) -> str:
        value, parts = text[0], []
        for operator, operand in self._operations(text):
            result = self._operate(value, operator, operand)
            if noise and rng.random() < noise:
                result = other(self._digits, result, rng)
            parts.append(f"{value}{operator}{operand}={result}")
            value = result
        return ";".join(parts) + "."


@dataclass(frozen=True)
class Calculator(Arithmetic):
    """Task: modular arithmetic with a tool, in turns; for `^3+4*5=` the policy asks for one operation after the other.

    A turn ends with `$`. The policy writes `3+4$`, the tool `0;`, the policy `0*5$`, the tool `0;`, the policy its
    answer `!0$`. Operators apply from left to right, each result modulo `modulus`; the tool computes any two digits
    with an operator between them and replies `?;` to anything else. Reward 1 if the last turn is `!` and the right
    digit, else 0. The policy has to learn the order of the questions, but not the results of the operations.
    """

    steps: int = 2

    name: ClassVar[str] = "calculator"

    @property
    def alphabet(self) -> str:
        return self._digits + "+-*=;!?" + BOS + EOS

    @property
    def max_new_tokens(self) -> int:
        return 4 * self.steps + 3

    @property
    def max_turns(self) -> int:
        """Return how many turns the policy has: a question for each operation, and the answer."""
        return self.steps + 1

    def reply(self, problem: Problem, transcript: str) -> str | None:
        """Return the tool's reply to the policy's last turn, or None if that turn is an answer."""
        asked = self._turns(transcript)[-1]
        if asked.startswith("!"):
            return None
        digit = f"[0-{self.modulus - 1}]"
        return f"{self._operate(*asked)};" if re.fullmatch(f"{digit}[-+*]{digit}", asked) else "?;"

    def reward(self, problem: Problem, completion: str) -> float:
        return float(self._turns(completion)[-1] == f"!{problem.answer}")

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """Return a transcript, tool text included, in which each digit that the policy copies is, with probability
        `noise`, a wrong one."""
        text = problem.prompt[1:-1]

        def copied(digit: str) -> str:
            return other(self._digits, digit, rng) if noise and rng.random() < noise else digit

        value, transcript = text[0], ""
        for operator, operand in self._operations(text):
            asked = f"{copied(value)}{operator}{copied(operand)}"
            value = self._operate(*asked)
            transcript += f"{asked}{EOS}{value};"
        return f"{transcript}!{copied(value)}"

    def _turns(self, transcript: str) -> list[str]:
        """Return the policy's text of each turn, without the tool's text, which ends with `;` and begins each turn but
        the first."""
        first, *later = transcript.split(EOS)
        return [first, *(part.split(";", 1)[-1] for part in later)]
