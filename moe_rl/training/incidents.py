"""Incidents: the error for numbers that are not finite, and the files that a run keeps for looking into their cause."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_rl.files import write_json
from moe_rl.rollout.completions import Responses
from moe_rl.training.checkpoint import save_responses, write_state
from moe_rl.training.state import State


class NotFiniteError(FloatingPointError):
    """Error for a number that is not finite, raised where the number first shows; `keep_incident` keeps its cause.

    Attributes:
        where: `update 2`, `sampling`, `scoring`.
        part: the minibatch, or the responses, from which the number came; their tensors and routes are kept.
        numbers: more about the incident, by name.
        everywhere: whether the error is raised on all ranks at once.
    """

    def __init__(
        self, where: str, said: str, part: Responses, numbers: Mapping[str, Any] | None = None, everywhere: bool = False
    ):
        super().__init__(f"{where}: {said}")
        self.where, self.part, self.numbers, self.everywhere = where, part, numbers or {}, everywhere


def gradient_incident(update: int, batch: Responses, row: Mapping[str, Any], gradients: list[str]) -> NotFiniteError:
    """Return the error for an update with a gradient, of the policy or of a learner, whose norm is not finite.

    row: the row of kind "update".
    gradients: names of this rank's parameters whose gradients are not finite.
    """
    norm = float(row["grad_norm"])
    said = f"the gradient norm is {norm}"
    if math.isfinite(norm):
        said = "a gradient of what is trained beside the policy (a value model, predictors) is not finite"
    wrong = [
        name for name, value in row.items() if value is not None and not bool(torch.as_tensor(value).isfinite().all())
    ]
    return NotFiniteError(
        f"update {update}",
        f"{said}, so the weights were left as they are (not finite: {', '.join(wrong)}; "
        f"gradients of {len(gradients)} parameters, the first of them "
        f"{gradients[0] if gradients else 'of another rank'}). A lower optim.learning_rate, a longer "
        "optim.warmup_updates or a tighter clip range usually helps; optim.on_nonfinite: skip goes on without such "
        "updates",
        batch,
        row,
        everywhere=True,
    )


def keep_incident(state: State, error: NotFiniteError) -> Path:
    """Write an incident to the folder `incidents/step_NNNNNN_WHERE/` of the run, and return that folder.

    Every rank on which the error was raised must call this function. If the error need not be raised on all ranks, each
    rank writes a folder of its own, named `..._rankN/` on all ranks but the first.

    `batch.safetensors` has the tensors of the minibatch, or of the responses that were sampled or scored;
    `routes.safetensors` their routes, if known (`RoutedExperts.load` reads them); `row.json` the numbers (those not
    finite as text); `state/` a checkpoint of that moment, in hub format. Under `optim.on_nonfinite: skip` only the
    first incident has a `state/`, and an incident that need not be on every rank has none.
    """
    everywhere = state.ranks.size == 1 or error.everywhere
    own = "" if everywhere or state.ranks.main else f"_rank{state.ranks.rank}"
    place = state.folder / "incidents" / f"step_{state.step:06d}_{error.where.replace(' ', '_')}{own}"
    first = everywhere and state.ranks.first(lambda: _gets_state(state, place))
    if own or state.ranks.main:
        shutil.rmtree(place, ignore_errors=True)
        save_responses(place, "batch", error.part, prefix="")
        numbers = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in error.numbers.items()}
        write_json(place / "row.json", {name: _nonfinite_as_text(value) for name, value in numbers.items()})
    if first:
        write_state(state, place / "state")
    return place


def _gets_state(state: State, place: Path) -> bool:
    """Return whether this incident gets a `state/`. A run that goes on after incidents keeps only that of the first."""
    others = [path for path in (state.folder / "incidents").glob("*/state") if path.parent != place]
    return state.config.optim.on_nonfinite == "stop" or not others


def _nonfinite_as_text(value: Any) -> Any:
    """Return a value with floats that are not finite, in lists too, as text: JSON has none."""
    if isinstance(value, list):
        return [_nonfinite_as_text(one) for one in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
