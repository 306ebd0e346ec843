"""Verifiable tasks: the protocol `Task`, a source of problems and a judge of completions; and the calling of its code.

Tasks and verifiers are other people's code: an error in it is reported with task, prompt and completion.
"""

import hashlib
import math
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol, runtime_checkable

HELD_OUT_SHARE = 0.1
"""Share of all prompts that are held out: never trained on."""


class TaskError(ValueError):
    """An error of a task: it does not exist, cannot be built, or its code failed. The message names field or prompt."""


Messages = tuple[tuple[str, str], ...]
"""The type of a conversation: (role, content) of each message."""


@dataclass(frozen=True)
class Problem:
    """One prompt with the answer and the other data that its verifier needs.

    prompt: the text that the policy continues; if there are messages, their text, to read.
    answer: the right answer, for the verifier.
    messages: the prompt as a conversation, for the tokenizer's chat template; None: `prompt` is used unchanged.
    index: number of the problem in the task's data set, for a verifier that looks it up; None: no number.
    fields: further data for the verifier, by name, such as test cases; values of JSON types.
    """

    prompt: str
    answer: str
    messages: Messages | None = None
    index: int | None = None
    fields: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)


@runtime_checkable
class Task(Protocol):
    """The protocol of a task: the attributes and methods that sampling and training use.

    Optional parts, each needed only by those features that use it:

    - `demonstration(problem, rng, noise) -> str`: a completion to imitate, without the end token, in which a decision
      is wrong with probability `noise`. For the cold start of the tiny model, and for SFT.
    - `step_rewards(problem, completion) -> list[tuple[int, float]]`: for each step, the number of characters of the
      completion up to the step's end, and its reward. For process supervision.
    - `chats`: true if its problems hold messages, so that a tokenizer without a chat template is refused early.
    - `reply(problem, transcript) -> str | None`: for several turns. `transcript` is everything after the prompt, end
      tokens of earlier turns included; the reply is appended (no loss, ratio or length counts its tokens) and the
      policy goes on; None or an empty text ends the conversation. `max_turns`: turns of the policy at most (4).
    - `held_out_problems`: a list of all held-out problems, if there are few. Evaluation then repeats none before it
      asked all; without this list, held-out problems are drawn one by one by `problem`.
    - `rewards(problem, completion) -> dict[str, float]`: several rewards, the same names for every completion. For
      multi-reward advantages.
    - `identity`: a text that differs between two variants of the task that a few problems do not tell apart. For kept
      cold starts and resumed runs.
    """

    @property
    def name(self) -> str:
        """Return the task's name in reports."""

    @property
    def alphabet(self) -> str:
        """Return every character of the task's prompts and completions: the tiny model's vocabulary."""

    @property
    def max_new_tokens(self) -> int:
        """Return the length limit of a completion in tokens, the end token included."""

    def problem(self, rng: random.Random, held_out: bool = False) -> Problem:
        """Draw a problem. No prompt is ever drawn both with `held_out` and without."""

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of `completion` (its text, without the end token). Must accept any text."""


class VerifiableTask:
    """Base class of tasks that define `draw`, from which it makes `problem`, with a held-out split by a prompt's hash.

    A subclass is best a frozen dataclass whose fields are its options. A subclass defines `name`, `alphabet`,
    `max_new_tokens`, `draw(rng)` and `reward(problem, completion)`:

    >>> class Double(VerifiableTask):
    ...     name, alphabet, max_new_tokens = "double", "0123456789=^$", 5
    ...     def draw(self, rng):
    ...         n = rng.randrange(1000)
    ...         return Problem(f"^{n}=", str(2 * n))
    ...     def reward(self, problem, completion):
    ...         return float(completion == problem.answer)
    >>> Double().problem(random.Random(0)), isinstance(Double(), Task)
    (Problem(prompt='^776=', answer='1552', messages=None, index=None), True)
    """

    def draw(self, rng: random.Random) -> Problem:
        """Draw a problem at random, training or held-out."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(rng) -> Problem")

    def problem(self, rng: random.Random, held_out: bool = False) -> Problem:
        """Draw problems until a prompt is of the wanted split, and return it; TaskError if 10,000 draws bring none."""
        for _ in range(10_000):
            drawn = self.draw(rng)
            if is_held_out(drawn.prompt) == held_out:
                return drawn
        raise TaskError(
            f"{type(self).__name__}: no {'held-out' if held_out else 'training'} prompt in 10,000 draws. The "
            "task has too few different prompts to split; make its options larger."
        )


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt is held out for evaluation: by SHA-256 of its text, whatever the seed or the run.

    >>> sum(is_held_out(str(n)) for n in range(10_000))
    1018
    """
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32


# -- running a task's code ---------------------------------------------------------------------------------------------

LARGEST_REWARD = 1e9
"""Largest absolute value of a reward: beyond, differences between rewards are lost in fp32, and squares overflow."""


@contextmanager
def user_code(
    task: Any, part: str, problem: Problem | None = None, completion: str | None = None, seconds: float | None = None
) -> Iterator[None]:
    """Context manager: run a task's own code, and turn its errors into TaskError.

    Args:
        part: name of the method that is called, for the message.
        problem, completion: what the code is called with, for the message.
        seconds: how long the code may take; None: no limit. Enforced in the main thread of Unix systems, between Python
            instructions: a call into C that never returns is not interrupted.

    Raises:
        TaskError: the code raised an exception, `SystemExit` included, or did not return in time.
    """
    try:
        with _time_limit(seconds):
            yield
    except (Exception, SystemExit) as error:
        where = "" if problem is None else f"; prompt {shortened(problem.prompt)}"
        where += "" if completion is None else f", completion {shortened(completion)}"
        said = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}{_place(task, error)}"
        raise TaskError(f"task {task.name}, {part}: {said}{where}") from error


def problems_of(task: Any, rng: random.Random, count: int, held_out: bool = False) -> list[Problem]:
    """Draw `count` problems of the task. From a list (`held_out_problems`) they come in a random order, which begins
    again after the last one. Raises TaskError if the task's code raises, or gives something that is no Problem."""
    with user_code(task, "problem"):
        if held_out and (listed := getattr(task, "held_out_problems", None)):
            drawn = list(islice(cycle(rng.sample(listed, len(listed))), count))
        else:
            drawn = [task.problem(rng, held_out=held_out) for _ in range(count)]
        for problem in drawn:
            if not isinstance(problem, Problem) or not isinstance(problem.prompt, str):
                raise TaskError(f"expected a Problem whose prompt is a text, got {shortened(repr(problem))}")
    return drawn


def checked_reward(value: Any) -> float:
    """Return a reward as a float. Raises TaskError if it is no number, not finite, or larger than `LARGEST_REWARD`."""
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"expected a number, got {value!r}") from error
    if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        raise TaskError(f"expected a finite reward of at most {LARGEST_REWARD:g} in absolute value, got {value!r}")
    return reward


def shortened(text: str, limit: int = 200) -> str:
    """Return the repr of a text for a message, cut to its first `limit` characters and then with its length."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


def _place(task: Any, error: BaseException) -> str:
    """Return, for a message, file and line of an error's last frame in the file of the task's class. Empty if there is
    none, or if the class is one of moe_rl's."""
    module = type(task).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f" ({file}, line {lines[-1]})" if lines and not module.startswith("moe_rl.") else ""


class _OverdueError(BaseException):
    """An error for code that ran too long; a BaseException, because verifiers catch every Exception."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Context manager: raise TaskError after `seconds`, by a timer signal. No limit if `seconds` is None or 0, outside
    the main thread, and on systems without such signals."""
    if not seconds or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    running, left, every = True, 0.0, 0.0

    def stop(*_: Any) -> None:
        if running:
            raise _OverdueError

    handler, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
    try:
        try:
            left, every = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again: code may catch the first one
            yield
        finally:
            running = False  # a signal from here on must not raise out of what follows
    except _OverdueError:
        raise TaskError(f"did not return within {seconds:g} seconds (task.verifier_seconds)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # the caller had set a timer
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), every)


def token_ids(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    """Return the `input_ids` of a text, or of each text of a list. Without `options`, an end token that the tokenizer
    puts behind a single text is removed, so that the text can be continued.

    Raises:
        TaskError: the tokenizer has no token for a part of the text, and no token for unknown parts.
    """
    try:
        ids = tokenizer(text, **options)["input_ids"]
        ended = not options and ids[-1:] == [getattr(tokenizer, "eos_token_id", None)]  # some tokenizers append it
        bare = token_ids(tokenizer, text, add_special_tokens=False) if ended else ids
        return ids[:-1] if ids[-1 - len(bare) : -1] == bare else ids
    except Exception as error:  # the tokenizers library raises no other class
        special = {token for token in tokenizer.all_special_tokens if len(token) > 1}
        known = set("".join(set(tokenizer.get_vocab()) - special))
        texts = [text] if isinstance(text, str) else text
        first = next((t for t in texts if set(t) - known), texts[0])
        lacks = ", ".join(map(repr, sorted(set(first) - known)))
        why = (
            f": it lacks {lacks}; a tiny model's tokenizer has only the characters of the task's `alphabet`"
            if lacks
            else ""
        )
        raise TaskError(f"the tokenizer cannot encode {first[:80]!r} ({error}){why}") from error


# -- prompts as messages -----------------------------------------------------------------------------------------------


def as_problem(asked: str | Messages, answer: str, *, chat: bool = False, instruction: str = "") -> Problem:
    """Build a Problem from a prompt, which is a text or a conversation.

    Args:
        asked: the text, or `((role, content), ...)`, the last of which is not the assistant's.
        answer: the right answer, for the verifier.
        chat: give a text as a message of the user.
        instruction: put behind the text, or behind the last message.

    >>> as_problem("1+1?", "2", chat=True, instruction=" Answer in one word.").messages
    (('user', '1+1? Answer in one word.'),)
    >>> as_problem("1+1=", "2").messages is None
    True
    """
    if isinstance(asked, str):
        text = asked + instruction
        return Problem(text, answer, (("user", text),) if chat else None)
    role, content = asked[-1]
    messages = (*asked[:-1], (role, content + instruction))
    return Problem("\n\n".join(f"{role}: {content}" for role, content in messages), answer, messages)


def message_tokens(tokenizer: Any, problem: Problem) -> list[int]:
    """Return the token ids of a problem's messages by the chat template, with the assistant's turn opened and without
    further special tokens (the template writes its own).

    Raises:
        TaskError: no chat template, or a template that refuses the messages.
    """
    assert problem.messages is not None
    if not getattr(tokenizer, "chat_template", None):
        raise TaskError(
            "the task gives messages and the tokenizer has no chat template. Give prompts as text, or use a model that "
            "was trained to chat."
        )
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # errors of Jinja, and those that templates raise themselves
        raise TaskError(
            f"the tokenizer's chat template refuses the messages of {problem.prompt[:80]!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return list(token_ids(tokenizer, text, add_special_tokens=False))
