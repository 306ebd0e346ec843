"""A number that is none, and where it came up."""

from collections.abc import Mapping
from typing import Any

import torch


class NotFiniteError(FloatingPointError):
    """Raised where such a number first shows; `moe_rl.training.incidents` keeps what it came of.

    Attributes:
        where: `update 2`, `sampling`, `scoring`.
        part: the minibatch, or the responses; what of it is a tensor, or routes, is kept.
        numbers: more about it, by name.
        everywhere: whether all ranks meet it at once.
    """

    def __init__(
        self, where: str, said: str, part: Any, numbers: Mapping[str, Any] | None = None, everywhere: bool = False
    ):
        super().__init__(f"{where}: {said}")
        self.where, self.part, self.numbers, self.everywhere = where, part, numbers or {}, everywhere


def prompt_of(rollout: Any, row: int, most: int = 200) -> str:
    """The prompt of a response, for a message."""
    prompt = rollout.problems[row].prompt
    return repr(prompt) if len(prompt) <= most else f"{prompt[:most]!r}... ({len(prompt)} characters)"


def gradient_incident(update: int, batch: Any, row: Mapping[str, Any], gradients: list[str]) -> NotFiniteError:
    """Of an update whose gradient norm is not finite: its row, and this rank's parameters with such gradients."""
    wrong = [
        name for name, value in row.items() if value is not None and not bool(torch.as_tensor(value).isfinite().all())
    ]
    return NotFiniteError(
        f"update {update}",
        f"the gradient norm is {float(row['grad_norm'])}, so the weights were left as they are (not finite: "
        f"{', '.join(wrong)}; gradients of {len(gradients)} parameters, the first of them "
        f"{gradients[0] if gradients else 'of another rank'}). A lower optim.learning_rate, a longer "
        "optim.warmup_updates or a tighter clip range usually helps; optim.on_nonfinite: skip goes on without such "
        "updates",
        batch,
        row,
        everywhere=True,
    )
