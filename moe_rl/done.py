"""`DONE`, the last file that a run writes: it records what the run wrote, so that a run with missing data does not pass
for a finished one. Every subpackage may import this module; it imports none of them."""

import os
from pathlib import Path
from typing import Any

from moe_rl.checks import damage_of, is_sealed, other_size, parse_json, sealed, sha256_of_bytes, sizes
from moe_rl.files import sync_folder, write_json
from moe_rl.tables import TABLES

NAME = "DONE"


def write_done(folder: Path, **values: Any) -> None:
    """Write `folder`/DONE, the record of what a run wrote, after all of that is on the disk.

    The record holds `values`; the number of rows, the bytes and the SHA-256 sum of `metrics.jsonl`; the bytes of every
    table (tables have checksums of their own) and of every file of the checkpoint; and the SHA-256 sum of the
    checkpoint's `state.json`, which has those of the other files."""
    path = folder / "metrics.jsonl"
    if path.exists():
        with open(path, "ab") as file:
            os.fsync(file.fileno())
    metrics = _bytes(path)
    covered = {
        **values,
        "metrics": {"rows": metrics.count(b"\n"), "bytes": len(metrics), "sha256": sha256_of_bytes(metrics)},
        "tables": sizes(folder, *TABLES),
        "checkpoint": sizes(folder, "checkpoint/*"),
        "state_sha256": sha256_of_bytes(_bytes(folder / "checkpoint" / "state.json")),
    }
    for place in {folder / Path(pattern).parent for pattern in TABLES}:
        if place.exists():
            sync_folder(place)
    write_json(folder / NAME, sealed(covered))
    sync_folder(folder)


def what_is_lost(folder: Path, checkpoint: bool = False) -> str:
    """Return a message about the first file of a run that is missing or no longer what the run wrote; empty if there is
    none.

    A run with a DONE file is checked for all that it wrote, any other run for what its checkpoint recorded. A run of an
    earlier version, which recorded nothing, is not checked.

    Args:
        checkpoint: whether to check the checkpoint of a run that is DONE, too; readers of numbers alone do not need it.
    """
    path = folder / NAME
    if not path.exists():
        state = _checkpoint_state(folder)
        return _lost_since(folder, state) if state else ""
    try:
        done = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        empty = isinstance(error, ValueError) and not _bytes(path)
        by_hand = "; it is empty, and is not made by hand: RunWriter.finish() writes it" if empty else ""
        return f"{path} cannot be read ({error}{by_hand})"
    if isinstance(done, dict) and set(done) <= {"seconds", "rows"}:
        return ""
    if not is_sealed(done):
        return f"{path} is damaged: its content is not what was written"
    lost = _lost_rows(folder, done["metrics"]) or other_size(folder, done["tables"])
    if lost or not checkpoint:
        return lost
    manifest = folder / "checkpoint" / "state.json"
    lost = other_size(folder, done["checkpoint"])
    if not lost and sha256_of_bytes(_bytes(manifest)) != done["state_sha256"]:
        lost = f"{manifest} is damaged: its content is not what was written"
    return lost


def _checkpoint_state(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint's `state.json`; None if it is missing or damaged."""
    try:
        state = parse_json(_bytes(folder / "checkpoint" / "state.json"))
    except (OSError, ValueError):  # missing, being replaced or damaged; resuming from it reports the damage
        return None
    return state if is_sealed(state) else None


def _lost_since(folder: Path, state: dict[str, Any]) -> str:
    """Return a message about the rows or tables that a checkpoint recorded and that are lost; empty if there are
    none."""
    return _lost_rows(folder, state["metrics"]) or other_size(folder, state["metrics"].get("tables") or {})


def _lost_rows(folder: Path, written: dict[str, Any]) -> str:
    """Return a message about the recorded rows of `metrics.jsonl` that are lost; empty if there are none."""
    path = folder / "metrics.jsonl"
    rows = _bytes(path)[: written["bytes"]]
    damage = damage_of(rows, written["bytes"], written["sha256"])
    return f"{path} is not what was written: {damage}" if damage else ""


def remedy(folder: Path) -> str:
    """Return advice on a run that lost data: to restore it or to move the run away. If the run is DONE and its
    checkpoint is there with all the data that it recorded, the advice is also to delete DONE and go on from the
    checkpoint."""
    away = f"Without it the run is not what it was. Restore it from a copy, or move {folder} away to run it again."
    done, state = folder / NAME, _checkpoint_state(folder)
    if not (done.exists() and state) or _lost_since(folder, state):
        return away
    if not all((folder / "checkpoint" / name).is_file() for name in state.get("files", ())):
        return away
    return f"{away} Or delete {done}: the run then goes on from its checkpoint (step {state.get('step')})."


def _bytes(path: Path) -> bytes:
    """Return a file's content; empty if there is no such file."""
    return path.read_bytes() if path.is_file() else b""
