"""Parquet files that know whether they are whole. Every room may use it; it knows none of them.

Parquet's own page checksums leave headers and footer uncovered, and a damaged footer reaches the parser first. So just
before the footer, where no reader looks, stand `MARK` and the SHA-256 of all other bytes; they are checked before
anything is parsed. Files of other programs, and of earlier versions, have no mark and are read as they are.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.files import write_atomic

if TYPE_CHECKING:
    import pyarrow

TABLES = ("tokens/*.parquet", "routes/*.parquet")
"""Where a run folder has tables."""
MARK = bytes.fromhex("a3f1c85e9d0b47628e15d7f03c6ab924")
SEALED = b"moe_rl.sealed"
"""Key in the schema's metadata that says that there is a mark, so that a damaged one is not taken for none."""


class DamagedTableError(ValueError):
    """A Parquet file that is not what was written, or none; the message names it."""


def write_table(path: Path, columns: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """One immutable Parquet file (zstd), written atomically; `metadata` goes to the schema as JSON strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    facts: dict[Any, Any] = {key: json.dumps(value) for key, value in (metadata or {}).items()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({**facts, SEALED: "1"}), sink, compression="zstd", compression_level=1)
    data = sink.getvalue().to_pybytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # ends with its length and PAR1
    write_atomic(path, data[:footer] + MARK + hashlib.sha256(data).digest() + data[footer:])


def read_table(path: str | Path) -> "pyarrow.Table":
    """A Parquet file as a table.

    Raises:
        DamagedTableError: missing, unreadable, or not the bytes that `write_table` wrote; names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DamagedTableError(f"{path}: cannot be read ({error.strerror or error})") from error
    place = data.rfind(MARK)
    end = place + len(MARK) + hashlib.sha256().digest_size
    if place >= 0 and hashlib.sha256(data[:place] + data[end:]).digest() != data[place + len(MARK) : end]:
        raise DamagedTableError(f"{path} is damaged: its content is not what was written")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except Exception as error:  # pyarrow raises many kinds; the file is what matters
        raise DamagedTableError(f"{path}: not a readable Parquet file ({error}); copied incompletely?") from error
    if place < 0 and SEALED in (table.schema.metadata or {}):
        raise DamagedTableError(f"{path} is damaged: its checksum is not what was written")
    return table


def facts_of(table: "pyarrow.Table") -> dict[str, Any]:
    """The `metadata` that `write_table` was given; what other programs put there and is no JSON is left out."""
    found: dict[str, Any] = {}
    for key, value in (table.schema.metadata or {}).items():
        with contextlib.suppress(ValueError):
            found[key.decode()] = json.loads(value)
    return found
