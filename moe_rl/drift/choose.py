"""Which checkpoints are meant: folders as they are, run folders, and folders that hold several."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from moe_rl.drift.errors import DriftError

CHECKPOINT = "checkpoint"
"""Where a run folder of ours has its model."""


def chosen(given: Sequence[str]) -> list[str]:
    """Every checkpoint that the arguments mean, in order.

    - a folder with a config.json, or a hub id: itself
    - a run folder of ours: its checkpoint
    - any other folder: all checkpoints right inside it, in the order of the numbers in their names (checkpoint-500
      before checkpoint-1000); one argument that is a checkpoint and holds others (a trainer's output folder): these,
      then itself.

    Raises:
        DriftError: a folder without checkpoints; fewer than two in all.
    """
    found = []
    for path in given:
        found += _inside(path, alone=len(given) == 1)
    if len(found) < 2:
        what = f"only {found[0]}" if found else "none"
        raise DriftError(f"two or more checkpoints are compared, and there is {what}: drift OLD NEW [...], or a folder")
    return found


def _inside(path: str, alone: bool) -> list[str]:
    folder = Path(path).expanduser()
    own = _is_checkpoint(folder)
    if not folder.is_dir() or (own and not alone):
        return [path]
    if not own and _is_checkpoint(folder / CHECKPOINT):
        return [str(folder / CHECKPOINT)]
    children = sorted((child for child in folder.iterdir() if _is_checkpoint(child)), key=lambda c: in_order(c.name))
    if own:
        return [*map(str, children), path]
    if not children and not alone:
        return [path]  # what is wrong with it is said where it is loaded, by its place
    if not children:
        raise DriftError(f"{folder.absolute()} holds no checkpoint: no config.json in it, nor in a folder right inside")
    return [str(child) for child in children]


def in_order(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which step-2 comes before step-10.

    >>> sorted(["step-10", "step-2", "final"], key=in_order)
    ['final', 'step-2', 'step-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts if part]


def steps_of(names: Sequence[str]) -> list[int] | None:
    """The last number in every name, where these grow from name to name; else None.

    >>> steps_of(["ckpt-500", "ckpt-1000"]), steps_of(["base", "ckpt-1000"])
    ([500, 1000], None)
    """
    numbers = [re.findall(r"\d+", name) for name in names]
    if not all(numbers):
        return None
    steps = [int(found[-1]) for found in numbers]
    return steps if all(a < b for a, b in pairwise(steps)) else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file()
