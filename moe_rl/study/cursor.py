"""Reading of files while they are written: rows of a `metrics.jsonl` after a cursor, and stamps that show changes.

A run that was resumed has rewritten its file: an old cursor no longer fits, and the answer says `reset`.
"""

import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_rl.checks import parse_json
from moe_rl.run_rows import row_problem

CHUNK = 2_000_000
"""Approximate most bytes of metrics.jsonl in one answer; the caller asks again while there is `more`."""

_CHECKED = 256  # bytes before a cursor that must not have changed: the cursor has their checksum


class LiveError(ValueError):
    """Error for a request for something that is not there; the message says what is missing and what there is."""


def read_since(path: Path, since: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows in the whole lines after a cursor, at most about CHUNK bytes, and {since, more, reset, damaged}.

    `since` in the answer is the next cursor; `more`: ask again at once; `reset`: the rows that were read before are no
    longer in the file (a resume rewrote it), forget them; `damaged`: number of lines that are not rows, which are left
    out. A last line without its end is left for later. A missing file has no rows. Raises LiveError: `since` is no
    cursor.
    """
    match = re.fullmatch(r"(?:(\d{1,15})-([0-9a-f]{8}))?", since)
    if not match:
        raise LiveError(f"since: expected a cursor from an earlier answer, got {since!r}")
    offset, check = int(match[1] or 0), int(match[2] or "0", 16)
    try:
        with open(path, "rb") as file:
            reset = offset > os.fstat(file.fileno()).st_size or (offset > 0 and _before(file, offset) != check)
            offset = 0 if reset else offset
            file.seek(offset)
            data = file.read(CHUNK)
            if len(data) == CHUNK:
                data += file.readline()
            data = data[: data.rfind(b"\n") + 1]
            offset += len(data)
            more = bool(data) and file.read(1) != b""
            cursor = f"{offset}-{_before(file, offset):08x}" if offset else ""
    except FileNotFoundError:
        return [], {"since": "", "more": False, "reset": offset > 0, "damaged": 0}
    rows, damaged = [], 0
    for line in data.splitlines():
        try:
            row = parse_json(line)
        except ValueError:  # errors of JSON and of Unicode
            row = None
        if row_problem(row):
            damaged += 1
        else:
            rows.append(row)
    return rows, {"since": cursor, "more": more, "reset": reset, "damaged": damaged}


def follow(path: Path, since: str, take: Callable[[dict[str, Any]], None], forget: Callable[[], None]) -> str:
    """Hand every row after a cursor to `take`, after `forget` if the file was rewritten; return the next cursor."""
    more = True
    while more:
        rows, answer = read_since(path, since)
        if answer["reset"]:
            forget()
        for row in rows:
            take(row)
        since, more = answer["since"], answer["more"]
    return since


def _before(file: Any, offset: int) -> int:
    """Return the checksum of the bytes just before an offset; -1 if the file ends earlier."""
    start = max(0, offset - _CHECKED)
    file.seek(start)
    data = file.read(offset - start)
    return zlib.crc32(data) if len(data) == offset - start else -1


def stamp(*paths: Path) -> tuple[int, ...]:
    """Return the times and sizes of those files and folders that exist.

    A function that caches what it made of files takes their stamp as an argument, so that it makes the result again
    when a file has changed.
    """
    found: list[int] = []
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            found += [stat.st_mtime_ns, stat.st_size]
    return tuple(found)
