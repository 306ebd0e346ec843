"""What a run keeps of an update that came out as no number, for a look at it afterwards."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_rl.files import write_json, write_tensors
from moe_rl.training.batch import Batch


def keep_incident(folder: Path, step: int, update: int, batch: Batch, row: dict[str, Any]) -> Path:
    """`incidents/step_NNNNNN_update_U/`: the minibatch (`batch.safetensors`), its routes (`routes.safetensors`,
    `RoutedExperts.load` reads them) and the update's row (`row.json`; not finite: as words). Returns the folder."""
    place = folder / "incidents" / f"step_{step:06d}_update_{update}"
    shutil.rmtree(place, ignore_errors=True)
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    write_tensors(place / "batch.safetensors", {name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    batch.routes.save(place / "routes.safetensors")
    numbers = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    write_json(place / "row.json", {name: _words(value) for name, value in numbers.items()})
    return place


def _words(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value
