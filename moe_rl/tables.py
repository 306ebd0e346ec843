"""Parquet files with a checksum of their whole content. Every subpackage may import this module; it imports none of
them.

Parquet's own page checksums leave headers and footer uncovered, and a damaged footer reaches the parser first.
Therefore `MARK` and the SHA-256 of all other bytes are written just before the footer, where no reader looks, and are
checked before anything is parsed. Files of other programs, and of earlier versions, have no mark and are not checked.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.files import write_atomic

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

TABLES = ("tokens/*.parquet", "routes/*.parquet")
"""Patterns of the tables in a run folder."""
MARK = bytes.fromhex("a3f1c85e9d0b47628e15d7f03c6ab924")
SEALED = b"moe_rl.sealed"
"""Key in the schema's metadata that says that the file has a mark, so that a damaged mark is not taken for a missing
one."""
FOOTER_MARK = bytes.fromhex("5b27e0941fd84ac3b6697d02f1ac83e5")
"""Bytes before `MARK` that the SHA-256 of the footer follows, so that parts of a file can be read and trusted."""
DIGEST = hashlib.sha256().digest_size


class DamagedTableError(ValueError):
    """An error: a Parquet file is missing, unreadable or not what was written; the message names the file."""


def write_table(
    path: Path,
    columns: dict[str, Any] | Iterable[dict[str, Any]],
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write one immutable Parquet file (zstd) with its checksums, atomically; `metadata` goes to the schema as JSON
    strings.

    Args:
        columns: those of the whole table, or of one row group after the other.
        options: further options of `pyarrow.parquet.ParquetWriter`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = (pa.table(group) for group in ([columns] if isinstance(columns, dict) else columns))
    first = next(groups)
    header: dict[Any, Any] = {key: json.dumps(value) for key, value in (metadata or {}).items()}
    schema = first.schema.with_metadata({**header, SEALED: "1"})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd", compression_level=1, **options) as writer:
        for group in itertools.chain([first], groups):
            table = group.replace_schema_metadata(schema.metadata)
            writer.write_table(table, max(1, len(table)))  # by default pyarrow cuts groups of more than 1Mi rows
    data = sink.getvalue().to_pybytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # the footer ends with its length and PAR1
    pages = data[:footer] + FOOTER_MARK + hashlib.sha256(data[footer:]).digest()
    digest = hashlib.sha256(pages + data[footer:]).digest()
    write_atomic(path, pages + MARK + digest + data[footer:])


def read_table(path: str | Path) -> "pyarrow.Table":
    """Read a Parquet file as a table, after comparing its content with its checksum, if the file has one.

    Raises:
        DamagedTableError: the file is missing, unreadable, or not the bytes that `write_table` wrote; names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(path):
        data = Path(path).read_bytes()
    place = data.rfind(MARK)
    end = place + len(MARK) + DIGEST
    if place >= 0 and hashlib.sha256(data[:place] + data[end:]).digest() != data[place + len(MARK) : end]:
        raise DamagedTableError(f"{path} is damaged: its content is not what was written")
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except Exception as error:  # pyarrow raises many kinds, without the file's name
        raise DamagedTableError(f"{path}: not a readable Parquet file ({error}); copied incompletely?") from error
    if place < 0 and SEALED in (table.schema.metadata or {}):
        raise DamagedTableError(f"{path} is damaged: its checksum is not what was written")
    return table


def open_table(path: str | Path) -> "pyarrow.parquet.ParquetFile":
    """Open a file of `write_table` to read parts of it. The footer is checked now, and each page when it is read if the
    file was written with `write_page_checksum`. A file without a checksum of its footer is read whole, and checked,
    first.

    Raises:
        DamagedTableError: as `read_table`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tail, footer = _tail(path)
    if not tail.startswith(FOOTER_MARK):
        sink = pa.BufferOutputStream()
        pq.write_table(read_table(path), sink)
        return pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    if hashlib.sha256(footer).digest() != tail[len(FOOTER_MARK) :][:DIGEST]:
        raise DamagedTableError(f"{path} is damaged: its footer is not what was written")
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:
        raise DamagedTableError(f"{path}: not a readable Parquet file ({error}); copied incompletely?") from error


def seal_of(path: str | Path) -> str | None:
    """Return the checksum stored in a file of `write_table`, in hexadecimal, without reading the content; None if there
    is none.

    Raises:
        DamagedTableError: the file cannot be read.
    """
    tail, _ = _tail(path)
    return tail[-DIGEST:].hex() if tail[-DIGEST - len(MARK) :].startswith(MARK) else None


@contextlib.contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Context manager: turn an OSError into a DamagedTableError that names the file."""
    try:
        yield
    except OSError as error:
        raise DamagedTableError(f"{path}: cannot be read ({error.strerror or error})") from error


def _tail(path: str | Path) -> tuple[bytes, bytes]:
    """Return the bytes before a Parquet file's footer, two marks and checksums long, and the footer with its length."""
    with _reading(path), open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        length = 8 + int.from_bytes(file.read(8)[:4], "little")
        before = 2 * (len(MARK) + DIGEST)
        file.seek(max(0, size - length - before))
        data = file.read() if length + before <= size else b""
    return data[:before], data[before:]


def header_of(table: "pyarrow.Table | pyarrow.parquet.ParquetFile") -> dict[str, Any]:
    """Return the `metadata` that `write_table` was given; what other programs put there and is no JSON is left out."""
    found: dict[str, Any] = {}
    schema = table.schema_arrow if hasattr(table, "schema_arrow") else table.schema
    for key, value in (schema.metadata or {}).items():
        with contextlib.suppress(ValueError):
            found[key.decode()] = json.loads(value)
    return found
