"""What a run keeps when a number is none, for a look at it afterwards."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_rl.files import write_json, write_tensors
from moe_rl.routing import RoutedExperts
from moe_rl.training.checkpoint import write_state
from moe_rl.training.not_finite import NotFiniteError
from moe_rl.training.state import State


def keep_incident(state: State, error: NotFiniteError) -> Path:
    """`incidents/step_NNNNNN_WHERE/`: what came of which numbers. Returns the folder; every rank must call it.

    `batch.safetensors` has the tensors of the minibatch, or of the responses that were sampled or scored;
    `routes.safetensors` their routes, where known (`RoutedExperts.load` reads them); `row.json` the numbers (not
    finite: as words); `state/` a checkpoint of that moment, in hub format. Under `optim.on_nonfinite: skip` the first
    incident alone has one, and none has where not every rank has met it.
    """
    place = state.folder / "incidents" / f"step_{state.step:06d}_{error.where.replace(' ', '_')}"
    everywhere = state.ranks.size == 1 or error.everywhere
    first = everywhere and state.ranks.first(lambda: _whole(state, place))
    if state.ranks.main:
        shutil.rmtree(place, ignore_errors=True)
        parts = error.part.parts
        for name, value in parts.items():
            if isinstance(value, RoutedExperts):
                value.save(place / f"{name}.safetensors")
        tensors = {name: part.detach().cpu().contiguous() for name, part in parts.items() if isinstance(part, Tensor)}
        write_tensors(place / "batch.safetensors", tensors)
        numbers = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in error.numbers.items()}
        write_json(place / "row.json", {name: _words(value) for name, value in numbers.items()})
    if first:
        write_state(state, place / "state")
    return place


def _whole(state: State, place: Path) -> bool:
    """Whether this incident is to have the state: a run that goes on would otherwise keep one for each."""
    others = [path for path in (state.folder / "incidents").glob("*/state") if path.parent != place]
    return state.config.optim.on_nonfinite == "stop" or not others


def _words(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value
