"""`DONE`: the last file of a run. It says what the run wrote, so that a run with data missing does not pass for one
that is done. Every room may use it; it knows none of them."""

import os
from pathlib import Path
from typing import Any

from moe_rl.checks import damage_of, is_sealed, other_size, parse_json, sealed, sha256_of_bytes, sizes
from moe_rl.files import sync_folder, write_json
from moe_rl.tables import TABLES

NAME = "DONE"


def write_done(folder: Path, **values: Any) -> None:
    """Write `folder`/DONE: `values`; number of rows, bytes and SHA-256 of `metrics.jsonl`; bytes of every table (which
    have checksums of their own) and of every file of the checkpoint, with the SHA-256 of its `state.json`, which has
    those of the others. What it names is on the disk before it is."""
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
    """What a run no longer has as it wrote it, in words with the file; empty if nothing.

    A run that is DONE is asked for all that it wrote, any other for what its checkpoint saw; one of an earlier version,
    which did not say, for nothing.

    Args:
        checkpoint: whether that of a run that is DONE is missed, too; what reads numbers only does without.
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
    try:
        state = parse_json(_bytes(folder / "checkpoint" / "state.json"))
    except (OSError, ValueError):  # none yet, or being replaced; or damaged, which who goes on from it will say
        return None
    return state if is_sealed(state) else None


def _lost_since(folder: Path, state: dict[str, Any]) -> str:
    return _lost_rows(folder, state["metrics"]) or other_size(folder, state["metrics"].get("tables") or {})


def _lost_rows(folder: Path, written: dict[str, Any]) -> str:
    path = folder / "metrics.jsonl"
    rows = _bytes(path)[: written["bytes"]]
    damage = damage_of(rows, written["bytes"], written["sha256"])
    return f"{path} is not what was written: {damage}" if damage else ""


def remedy(folder: Path) -> str:
    """What to do about a run that lost something: of one that is DONE, and has its checkpoint with all that this saw,
    also to go on from there."""
    away = f"Without it the run is not what it was. Restore it from a copy, or move {folder} away to run it again."
    done, state = folder / NAME, _checkpoint_state(folder)
    if not (done.exists() and state) or _lost_since(folder, state):
        return away
    if not all((folder / "checkpoint" / name).is_file() for name in state.get("files", ())):
        return away
    return f"{away} Or delete {done}: the run then goes on from its checkpoint (step {state.get('step')})."


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
