"""`metrics.jsonl` as training writes it: one row at a time, and compared with the checkpoint when a run is resumed."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_rl.checks import damage_of, other_size, sizes
from moe_rl.files import atomic_file, naming, sync_folder
from moe_rl.tables import TABLES


class RunFolderError(ValueError):
    """An error in a row, a name or a folder, which cannot be right; the message says what, where, and what to do."""


class DamagedMetricsError(RuntimeError):
    """An error: `metrics.jsonl` or a table is not what its checkpoint recorded; the message names file, line and what
    to do."""


class Mark(NamedTuple):
    """The place up to which a run has written: bytes of `metrics.jsonl`, their SHA-256 sum, and bytes of each table by
    name (None in a mark of an earlier version, which did not record tables)."""

    bytes: int
    sha256: str
    tables: dict[str, int] | None = None


class RunLog:
    """`metrics.jsonl` of one run: one JSON object per line, each with its `kind` and `step`.

    Args:
        folder: the run folder.
        listener: called with every row as it is written (progress displays).
    """

    def __init__(self, folder: Path, listener: Callable[[dict[str, Any]], None] | None = None):
        self.path = folder / "metrics.jsonl"
        self.listener = listener
        self._bytes, self._digest = 0, hashlib.sha256()

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Write one row. Floats that are not finite are written as null: JSON has no NaN."""
        held = {name: json_value(value, f"{kind} row, {name}") for name, value in values.items()}
        row = {"kind": kind, "step": step, **held}
        line = json_line(row)
        try:
            with open(self.path, "ab") as file:
                file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._bytes += len(line)
        self._digest.update(line)
        if self.listener:
            self.listener(row)

    def mark(self) -> Mark:
        """Flush to the disk what was written, and return its `Mark`, which a checkpoint keeps so that a resumed run can
        recognise its rows."""
        with naming(self.path), open(self.path, "ab") as file:
            os.fsync(file.fileno())
        for place in {self.path.parent / Path(pattern).parent for pattern in TABLES}:
            if place.exists():
                sync_folder(place)
        return Mark(self._bytes, self._digest.hexdigest(), sizes(self.path.parent, *TABLES))

    def resume(self, mark: Mark | None) -> bool:
        """Drop the rows and tables behind `mark`, which the resumed run writes again (all rows and tables if `mark` is
        None, because there is no checkpoint); return whether there were any such rows.

        Raises:
            DamagedMetricsError: what was written before `mark` is missing or has changed. Nothing is dropped then.
        """
        size, sha256, tables = mark or Mark(0, hashlib.sha256().hexdigest(), {})
        written = self.path.read_bytes() if self.path.exists() else b""
        kept = written[:size]
        damage = damage_of(kept, size, sha256)
        wrong = f"{self.path}: {damage}" if damage else other_size(self.path.parent, tables or {})
        if wrong:
            raise DamagedMetricsError(
                f"{wrong}. The run cannot go on without what it wrote; nothing was changed. Restore the file from a "
                "copy, or move the run folder away to run it again."
            )
        for name in () if tables is None else sizes(self.path.parent, *TABLES).keys() - tables.keys():
            (self.path.parent / name).unlink()
        if len(written) > size:
            with atomic_file(self.path) as file:
                file.write(kept)
        self._bytes, self._digest = size, hashlib.sha256(kept)
        return len(written) > size


def json_line(row: dict[str, Any]) -> bytes:
    """Return a row as its line of `metrics.jsonl`."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def json_value(value: Any, where: str) -> Any:
    """Return a metric as JSON holds it: tensors and arrays as lists, None for numbers that are not finite. Raises
    RunFolderError, naming `where`, for any other kind of value."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_value(item, where) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise RunFolderError(f"{where}: expected a number, text or a list of them, got {type(value).__name__}")
