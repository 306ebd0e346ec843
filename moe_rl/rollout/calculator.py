"""A small task in turns: modular arithmetic with a tool."""

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from moe_rl.rollout.character_tasks import BOS, EOS, Arithmetic, other
from moe_rl.rollout.task import Problem


@dataclass(frozen=True)
class Calculator(Arithmetic):
    """Modular arithmetic with a tool, in turns: `^3+4*5=` is answered by asking for one operation after the other.

    A turn ends with `$`. The policy writes `3+4$`, the tool `0;`, the policy `0*5$`, the tool `0;`, the policy its
    answer `!0$`. Operators apply from left to right, each result modulo `modulus`; the tool computes any two digits
    with an operator between them and replies `?;` to anything else. Reward 1 if the last turn is `!` and the right
    digit, else 0: the table of the operations need not be learned, the order of the questions must.
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
        """Turns of the policy: a question for each operation, and the answer."""
        return self.steps + 1

    def reply(self, problem: Problem, transcript: str) -> str | None:
        """What the tool says to the policy's last turn; None after an answer."""
        asked = self._turns(transcript)[-1]
        if asked.startswith("!"):
            return None
        digit = f"[0-{self.modulus - 1}]"
        return f"{self._operate(*asked)};" if re.fullmatch(f"{digit}[-+*]{digit}", asked) else "?;"

    def reward(self, problem: Problem, completion: str) -> float:
        return float(self._turns(completion)[-1] == f"!{problem.answer}")

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """A transcript, tool text included; each operand that the policy copies is, with probability `noise`, wrong."""
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
        """What the policy wrote, by turns: the tool's text, up to its `;`, begins all but the first."""
        first, *later = transcript.split(EOS)
        return [first, *(part.split(";", 1)[-1] for part in later)]
