"""Tasks made of your own prompts and answers: a file with a JSON object per line.

    {"prompt": "What is 12 * 12?", "answer": "144"}
    {"messages": [{"role": "user", "content": "What is 12 * 12?"}], "answer": 144}

Other fields are ignored, unless the option `fields` names them. The file is read once, when it is first needed.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from moe_rl.checks import parse_json
from moe_rl.rollout.character_tasks import BOS, EOS, require
from moe_rl.rollout.task import Messages, Problem, TaskError, as_problem, is_held_out
from moe_rl.rollout.verifiers import VERIFIERS


def alphabet_of(name: str, problems: Iterable[Problem]) -> str:
    """Return the characters of prompts and answers, for a tiny model. Raises TaskError if an answer contains the
    beginning or the end token of the tiny model's texts, because the text would end there."""
    found = {BOS, EOS}
    for problem in problems:
        if BOS in problem.answer or EOS in problem.answer:
            raise TaskError(
                f"{name}: the answer {problem.answer[:80]!r} holds {BOS} or {EOS}, the first and the last token of a "
                "tiny model's texts: write such answers otherwise, or name a model (model.path)"
            )
        found.update(problem.prompt, problem.answer)
    return "".join(sorted(found))


@dataclass(frozen=True)
class JsonLines:
    """Task: problems from a file; reward 1 if the verifier accepts the completion as the answer, else 0.

    A tenth of the prompts (by a hash of the text, whatever the seed) is held out for evaluation, unless `held_out`
    names a file of its own.
    """

    path: str = ""
    """The file; a relative path starts from the folder where the command runs."""
    held_out: str = ""
    """A file of prompts to evaluate on; then all of `path` is trained on."""
    verifier: str = "last_answer"
    """`exact_match`, `last_answer` or `math_verify` (`moe_rl.rollout.verifiers`)."""
    instruction: str = ""
    """Put behind every prompt."""
    chat: bool = False
    """Give text prompts as a message of the user, through the tokenizer's chat template."""
    max_new_tokens: int = 256
    fields: Sequence[str] = ()
    """Further fields that every line has, for a reward of your own: `problem.fields`. Then a line needs no answer."""

    name: ClassVar[str] = "jsonl"

    def __post_init__(self) -> None:
        if not self.path:
            raise TaskError("task.options.path: expected a file with a JSON object per line, got none")
        if self.verifier not in VERIFIERS:
            raise TaskError(
                f"task.options.verifier: expected one of {', '.join(VERIFIERS)}, got {self.verifier!r}; a reward of "
                "your own is a subclass of JsonLines (docs/extending.md)"
            )
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        named = isinstance(self.fields, list | tuple) and all(isinstance(name, str) for name in self.fields)
        taken = {"prompt", "messages", "answer"} & {*self.fields} if named else set()
        require(named and not taken, "fields", "a list of names other than prompt, messages and answer", self.fields)
        if self.fields and type(self).reward is JsonLines.reward:
            raise TaskError(
                f"task.options.fields: the verifier {self.verifier} looks at the answer alone; fields are for a "
                "`reward` of your own, in a subclass of JsonLines (docs/extending.md)"
            )

    @cached_property
    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """Return the problems to train on and the held-out problems, each in the file's order."""
        problems = self._read(self.path, "path")
        if not self.held_out:
            parts = [p for p in problems if not is_held_out(p.prompt)], [p for p in problems if is_held_out(p.prompt)]
            for part, what in zip(parts, ("to train on", "held out"), strict=True):
                if not part:
                    raise TaskError(
                        f"{self.path}: a tenth of the prompts is held out by a hash of their text, and of these "
                        f"{len(problems)} none is {what}. Give more prompts, or a file for task.options.held_out."
                    )
        else:
            parts = problems, self._read(self.held_out, "held_out")
        # A chat of one turn may be written in two ways.
        asked = [{p.messages or p.prompt: p.prompt for p in part} for part in parts]
        if both := [asked[0][one] for one in asked[0].keys() & asked[1].keys()]:
            where = (
                f"both {self.path} and {self.held_out}" if self.held_out else f"{self.path} as prompt and as messages"
            )
            raise TaskError(
                f"{len(both)} prompts are in {where}, e.g. {min(both)[:80]!r}: what is trained on cannot be held out"
            )
        return parts

    @property
    def held_out_problems(self) -> list[Problem]:
        """Return the held-out problems."""
        return self.problems[1]

    @property
    def chats(self) -> bool:
        """Return whether any problem holds messages, so that a chat template is needed."""
        return any(problem.messages is not None for part in self.problems for problem in part)

    @property
    def identity(self) -> str:
        """Return a SHA-256 digest of all problems."""
        said = repr(self.problems)
        if self.fields:
            said += repr([[problem.fields for problem in part] for part in self.problems])
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def alphabet(self) -> str:
        """Return the characters of all prompts and answers, for a tiny model."""
        return alphabet_of(self.name, (problem for part in self.problems for problem in part))

    def problem(self, rng: random.Random, held_out: bool = False) -> Problem:
        return rng.choice(self.problems[held_out])

    def reward(self, problem: Problem, completion: str) -> float:
        return float(self._verify(problem.answer, completion))

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """Return the answer or, with probability `noise`, the answer of a random training problem."""
        return self.problem(rng).answer if rng.random() < noise else problem.answer

    @cached_property
    def _verify(self) -> Any:
        return VERIFIERS[self.verifier]()

    def _read(self, path: str, option: str) -> list[Problem]:
        file = Path(path).expanduser()
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a byte order mark
        except FileNotFoundError:
            raise TaskError(f"task.options.{option}: there is no file {file.absolute()}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"task.options.{option}: cannot read {file.absolute()}: {error}") from error
        problems = [self._problem(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
        if not problems:
            raise TaskError(f"{file.absolute()} is empty; expected a JSON object per line")
        return problems

    def _problem(self, line: str, where: str) -> Problem:
        try:
            data = parse_json(line)
        except ValueError as error:
            raise TaskError(f"{where}: not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(data, dict):
            raise TaskError(f"{where}: expected an object with prompt or messages, and answer; got {line[:80]!r}")
        if ("prompt" in data) == ("messages" in data):
            raise TaskError(f"{where}: expected either prompt or messages, got the fields {', '.join(data) or 'none'}")
        if missing := [name for name in self.fields if name not in data]:
            raise TaskError(f"{where}: no field {', '.join(missing)}, which task.options.fields names")
        answer = data.get("answer")
        if isinstance(answer, float) and math.isfinite(answer):
            answer = format(Decimal(repr(answer)), "f")  # 0.00001, not 1e-05, which no completion writes
        if answer is None and self.fields:
            answer = ""
        elif isinstance(answer, bool) or not isinstance(answer, str | int) or not str(answer).strip():
            raise TaskError(f"{where}: answer: expected a text or a number, got {answer!r}")
        asked: str | Messages
        if "messages" in data:
            asked = _messages(data["messages"], where)
        elif isinstance(data["prompt"], str) and data["prompt"]:
            asked = data["prompt"]
        else:
            raise TaskError(f"{where}: prompt: expected a text, got {data['prompt']!r}")
        problem = as_problem(asked, str(answer), chat=self.chat, instruction=self.instruction)
        try:
            (problem.prompt + problem.answer).encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"{where}: holds half of a character ({error.reason}), which no tokenizer takes") from error
        return replace(problem, fields={name: data[name] for name in self.fields})


def _messages(given: Any, where: str) -> Messages:
    if not isinstance(given, list) or not given:
        raise TaskError(f"{where}: messages: expected a list of objects with role and content, got {given!r}")
    for i, message in enumerate(given):
        fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits or set(message) != {"role", "content"}:
            raise TaskError(f"{where}: messages[{i}]: expected role and content, both texts, got {message!r}")
    if given[-1]["role"] == "assistant":
        raise TaskError(f"{where}: messages: the last one is the assistant's, so nothing is left to answer")
    return tuple((message["role"], message["content"]) for message in given)
