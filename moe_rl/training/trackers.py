"""Experiment trackers: sends metrics to one through accelerate, if `tracker` names one."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from moe_rl.settings import flatten
from moe_rl.training.state import Listener

PROJECT = "moe_rl"
_PACKAGES = {"trackio": ("trackio",), "wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}
_INSTALL = {"trackio": "pip install '.[trackers]' in the checkout of moe_rl", "wandb": "pip install wandb"}


class TrackerError(ValueError):
    """Error for a tracker that is not installed or did not start."""


def check_tracker(name: str | None) -> None:
    """Raise TrackerError if the tracker's package is missing, in which case accelerate would silently track nothing."""
    if name is None or any(find_spec(package) for package in _PACKAGES[name]):
        return
    install = _INSTALL.get(name, "pip install tensorboard")
    raise TrackerError(f"tracker: {name} is not installed. {install}, or leave tracker out (metrics.jsonl has it all)")


def start_tracker(
    accelerator: Accelerator, name: str, folder: Path, config: Any, listener: Listener | None = None
) -> Listener:
    """Start a tracker run named after the run folder; return a function to call with every row of `metrics.jsonl`.

    Args:
        accelerator: made with `log_with=name`.
        config: a RunConfig; stored with the tracker run, flattened. The tracker's own step counts updates.
        listener: is called with every row as well.

    Raises:
        TrackerError: accelerate does not offer this tracker here.
    """
    if name not in map(str, accelerator.log_with) or name not in LOGGER_TYPE_TO_CLASS:
        raise TrackerError(f"tracker: accelerate does not offer {name} here, though its package is installed")
    run = "/".join(folder.absolute().parts[-3:])
    options: dict[str, dict[str, Any]] = {"trackio": {"name": run}, "wandb": {"name": run, "dir": str(folder)}}
    project = run.replace("/", "_") if name == "tensorboard" else PROJECT
    if name == "tensorboard":
        (folder / "tracker").mkdir(parents=True, exist_ok=True)
    settings = flatten(dataclasses.asdict(config))
    known = {name: value if isinstance(value, int | float | str) else str(value) for name, value in settings.items()}
    accelerator.init_trackers(project, config=known, init_kwargs=options)

    def tell(row: dict[str, Any]) -> None:
        if listener:
            listener(row)
        last = row.get("update", config.optim.num_minibatches if row["kind"] == "step" else 1)
        accelerator.log(scalars(row), step=row["step"] * config.optim.num_minibatches + max(last, 1) - 1)

    return tell


def scalars(row: dict[str, Any]) -> dict[str, float | int]:
    """Return the numbers of a row, with its kind in their names; other values are only in the files.

    >>> scalars({"kind": "rollout", "step": 3, "reward": 0.5, "note": None, "sites": ["a"], "greedy": False})
    {'rollout/reward': 0.5}
    """
    kind = "/".join(str(row[key]) for key in ("kind", "pair", "variant") if key in row)
    return {
        f"{kind}/{key}": value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "update")
    }
