"""`DONE`: the last file of a run. It says what the run wrote, so that a run with data missing does not pass for one
that is done."""

import json
from pathlib import Path
from typing import Any

from moe_rl.checks import is_sealed, other_size, sealed, sha256_of_bytes, sizes
from moe_rl.files import write_json
from moe_rl.tables import TABLES

NAME = "DONE"


def write_done(folder: Path, **facts: Any) -> None:
    """Write `folder`/DONE: `facts`; number of rows, bytes and SHA-256 of `metrics.jsonl`; bytes of every table (which
    have checksums of their own) and of every file of the checkpoint, with the SHA-256 of its `state.json`, which has
    those of the others."""
    metrics = _bytes(folder / "metrics.jsonl")
    covered = {
        **facts,
        "metrics": {"rows": metrics.count(b"\n"), "bytes": len(metrics), "sha256": sha256_of_bytes(metrics)},
        "tables": sizes(folder, *TABLES),
        "checkpoint": sizes(folder, "checkpoint/*"),
        "state_sha256": sha256_of_bytes(_bytes(folder / "checkpoint" / "state.json")),
    }
    write_json(folder / NAME, sealed(covered))


def what_is_lost(folder: Path, checkpoint: bool = False) -> str:
    """What a run that is DONE no longer has as it was written, in words with the file; empty if nothing, or if the run
    is not DONE, or is so by an earlier version, which did not say what it wrote.

    Args:
        checkpoint: whether it is missed, too; what reads numbers only does without.
    """
    path = folder / NAME
    if not path.exists():
        return ""
    try:
        done = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error})"
    if isinstance(done, dict) and list(done) == ["seconds"]:
        return ""
    if not is_sealed(done):
        return f"{path} is damaged: its content is not what was written"
    missing = other_size(folder, {"metrics.jsonl": done["metrics"]["bytes"], **done["tables"]})
    if missing:
        return missing
    if sha256_of_bytes(_bytes(folder / "metrics.jsonl")) != done["metrics"]["sha256"]:
        return f"{folder / 'metrics.jsonl'} is damaged: its content is not what was written"
    if not checkpoint:
        return ""
    state = folder / "checkpoint" / "state.json"
    changed = other_size(folder, done["checkpoint"])
    if not changed and sha256_of_bytes(_bytes(state)) != done["state_sha256"]:
        changed = f"{state} is damaged: its content is not what was written"
    return changed


def remedy(folder: Path) -> str:
    """What to do about a run that lost something."""
    return f"The run is not done without it. Restore it from a copy, or move {folder} away to run it again."


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
