"""What sampling gives: completions with the sampler's own log-probabilities, rewards and, if recorded, routes."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.rollout.task import Problem, Task, checked_reward, user_code
from moe_rl.routing import RoutedExperts

Rows = TypeVar("Rows", bound="Responses")


@dataclass(frozen=True)
class Responses:
    """A row for each response: tensors `[B]` or `[B,T,...]`, and routes.

    Attributes:
        input_ids: prompt (left-padded) and completion (right-padded); the end token is part of the completion.
        attention_mask: False on padding.
        completion_mask: True on completion tokens.
    """

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """What a model is asked about: ids, those that are no padding, those of completions."""
        return self.input_ids, self.attention_mask, self.completion_mask

    @property
    def parts(self) -> dict[str, Any]:
        """Tensors and routes by name, without those that are None."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor | RoutedExperts)}

    def rows(self: Rows, index: Int[Tensor, " n"]) -> Rows:
        """The responses `index`, in that order."""
        return replace(
            self, **{n: part[index] if isinstance(part, Tensor) else part.rows(index) for n, part in self.parts.items()}
        )

    def columns(self: Rows, positions: slice) -> Rows:
        """A range of token positions of every response; what has no positions stays that of the whole."""
        wide = {name: part for name, part in self.parts.items() if len(part.shape) > 1}
        return replace(
            self, **{n: x[:, positions] if isinstance(x, Tensor) else x.columns(positions) for n, x in wide.items()}
        )

    def to(self: Rows, device: torch.device | str) -> Rows:
        """The same responses on another device."""
        return replace(self, **{name: part.to(device) for name, part in self.parts.items()})


@dataclass(frozen=True)
class Rollout(Responses):
    """Completions, one row each, groups contiguous: row `b` answers problem `b // group_size`.

    Attributes:
        input_ids, attention_mask, completion_mask: see `Responses`.
        logps: nats; the sampler's own log-probability of each completion token under the distribution that it was
            drawn from (at the sampling temperature; for greedy decoding: at temperature 1); 0 elsewhere. Detached.
        rewards: one per completion; NaN until `score` fills them.
        finished: True where the completion ended with an end token, False where the length limit cut it.
        group_size: completions per problem.
        problems: one per row.
        completions: text, one per row, without the end token.
        routes: the experts that decoding chose, `[B,T,L,K]`; -1 on padding and on each row's last token, which no
            router ever saw. None unless recorded.
        versions: of the weights that wrote each completion token, -1 elsewhere; None where one version wrote all.
    """

    logps: Float[Tensor, "B T"]
    rewards: Float[Tensor, " B"]
    finished: Bool[Tensor, " B"]
    group_size: int
    problems: list[Problem]
    completions: list[str]
    routes: RoutedExperts | None = None
    versions: Int[Tensor, "B T"] | None = None

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Completion tokens per row, the end token included."""
        return self.completion_mask.sum(1)

    @property
    def first(self) -> int:
        """The column in which the completions begin."""
        return int(self.completion_mask.any(0).int().argmax())

    @property
    def equal_groups(self) -> Bool[Tensor, " N"]:
        """Groups whose rewards are all equal, so that their group advantages are 0."""
        rewards = self.rewards.view(-1, self.group_size)
        return (rewards == rewards[:, :1]).all(1)

    def rows(self, index: Int[Tensor, " n"] | Bool[Tensor, " B"]) -> "Rollout":
        """The completions `index`, in that order, or those where it is True. `group_size` is kept: whether groups stay
        whole is up to `index`."""
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of rows must be [B] = [{len(self)}], got {list(index.shape)}")
            index = index.nonzero()[:, 0]
        return replace(
            super().rows(index.to(self.input_ids.device)),
            problems=[self.problems[i] for i in index.tolist()],
            completions=[self.completions[i] for i in index.tolist()],
        )


def unrouted_tokens(attention_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Tokens of a rollout that have no route by right: padding, and each row's last token, which was sampled and never
    fed back.

    >>> unrouted_tokens(torch.tensor([[False, True, True, False]])).int().tolist()
    [[1, 0, 1, 1]]
    """
    later = attention_mask.flip(1).cumsum(1).flip(1) > 1
    return ~(attention_mask & later)


def score(task: Task, rollout: Rollout, seconds: float | None = None) -> Rollout:
    """The rollout with its rewards: the task's verdict on every completion. The verifier must accept any text.

    Args:
        seconds: how long the verifier may take for one completion; None: no limit.

    Raises:
        TaskError: the verifier failed, took too long or gave no finite number; names the prompt and the completion.
    """
    rewards = []
    for problem, text in zip(rollout.problems, rollout.completions, strict=True):
        with user_code(task, "reward", problem, text, seconds):
            rewards.append(checked_reward(task.reward(problem, text)))
    return replace(rollout, rewards=torch.tensor(rewards).to(rollout.input_ids.device))
