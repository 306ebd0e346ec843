"""Procedurally generated tasks of reasoning-gym (an optional package), judged by that package's scorers."""

import importlib.util
import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from moe_rl.names import nearest
from moe_rl.rollout.character_tasks import require
from moe_rl.rollout.jsonl_task import alphabet_of
from moe_rl.rollout.task import Problem, TaskError, VerifiableTask, as_problem

TAGS = "\n\nGive the final answer between <answer> and </answer>."


@dataclass(frozen=True)
class ReasoningGym(VerifiableTask):
    """Task: questions of one reasoning-gym dataset; the reward is that of the dataset's scorer, from 0 to 1.

    The scorer sees the content of the completion's last `<answer>...</answer>` or, without one, the whole completion.
    """

    dataset: str = "chain_sum"
    """A name in `reasoning_gym.factory.DATASETS`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of the dataset's own configuration, e.g. `{max_terms: 4}`."""
    size: int = 100_000
    """Number of different questions; each question is made when it is drawn."""
    seed: int = 0
    """Seed of the questions; not the run's seed, so that all seeds of a study share the held-out questions."""
    instruction: str = TAGS
    """Put behind every question."""
    chat: bool = False
    """Give questions as a message of the user, through the tokenizer's chat template."""
    max_new_tokens: int = 256

    name: ClassVar[str] = "reasoning_gym"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise TaskError(
                "task.name: reasoning_gym needs the reasoning-gym package: pip install '.[reasoning-gym]' in the "
                "checkout of moe_rl"
            )
        for option in ("size", "max_new_tokens"):
            require(getattr(self, option) >= 1, option, "at least 1", getattr(self, option))

    @property
    def chats(self) -> bool:
        """Return whether the problems hold messages, so that a chat template is needed."""
        return self.chat

    @property
    def alphabet(self) -> str:
        """Return the characters of 256 questions and answers, for a tiny model."""
        rng = random.Random(0)
        return alphabet_of(self.name, (self.draw(rng) for _ in range(256)))

    def draw(self, rng: random.Random) -> Problem:
        index = rng.randrange(self.size)
        entry = self._questions[index]
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some datasets have a scorer and no answers
        problem = as_problem(entry["question"], answer, chat=self.chat, instruction=self.instruction)
        return replace(problem, index=index)

    def reward(self, problem: Problem, completion: str) -> float:
        from reasoning_gym.utils import extract_answer

        if problem.index is None:
            raise TaskError(f"reasoning_gym: {problem.prompt[:80]!r} is none of its questions: it has no index")
        given = extract_answer(completion)
        answer = completion.strip() if given is None else given
        try:
            return float(self._questions.score_answer(answer=answer, entry=self._questions[problem.index]))
        except ImportError as error:  # of every completion
            raise TaskError(f"reasoning_gym: the scorer of {self.dataset} needs a package: {error}") from error
        except Exception:  # some scorers fail on malformed answers
            return 0.0

    def demonstration(self, problem: Problem, rng: random.Random, noise: float = 0.0) -> str:
        """Return the answer or, with probability `noise`, the answer of a random question."""
        if not problem.answer:
            raise TaskError(
                f"reasoning_gym: {self.dataset} gives questions without answers: there is nothing to demonstrate "
                "(model.cold_start, method.source: demonstrations)"
            )
        return self.draw(rng).answer if rng.random() < noise else problem.answer

    @cached_property
    def _questions(self) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.dataset not in DATASETS:
            raise TaskError(f"task.options.dataset: unknown {self.dataset!r}{nearest(self.dataset, DATASETS)}")
        try:
            return reasoning_gym.create_dataset(self.dataset, size=self.size, seed=self.seed, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise TaskError(
                f"task.options.config: {self.dataset} cannot be made with {self.config}: {error}"
            ) from error
