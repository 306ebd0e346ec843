"""The run folder as written by training: append-only metrics, Parquet tables, atomic files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_rl.files import atomic_file, naming


def write_table(path: Path, columns: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """One immutable Parquet file (zstd), written atomically; `metadata` goes to the schema as JSON strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    if metadata:
        table = table.replace_schema_metadata({key: json.dumps(value) for key, value in metadata.items()})
    with atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd", compression_level=1)


class RunLog:
    """`metrics.jsonl` of one run: one JSON object per line, each with its `kind` and `step`.

    Args:
        folder: the run folder.
        listener: called with every row as it is written (progress displays).
    """

    def __init__(self, folder: Path, listener: Callable[[dict[str, Any]], None] | None = None):
        self.path = folder / "metrics.jsonl"
        self.listener = listener

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Write one row. Floats that are not finite are written as null: JSON has no NaN."""
        row = {"kind": kind, "step": step, **{key: _plain(value) for key, value in values.items()}}
        line = json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"
        with naming(self.path), open(self.path, "ab") as file:
            file.write(line.encode())
        if self.listener:
            self.listener(row)

    def keep_until(self, step: int) -> None:
        """Drop the rows of `step` and later, and a half-written last line: what a resumed run computes again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().splitlines():
            try:
                if json.loads(line)["step"] < step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError):
                break  # an interrupted write; nothing after it belongs to the checkpoint
        with atomic_file(self.path) as file:
            file.writelines(kept)


class NoLog(RunLog):
    """Of ranks that do not write."""

    def __init__(self) -> None:
        self.listener = None

    def append(self, kind: str, step: int, **values: Any) -> None:
        pass

    def keep_until(self, step: int) -> None:
        pass


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
