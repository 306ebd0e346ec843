"""Rows of a run that is being written: `metrics.jsonl` from a cursor on.

`new_rows` and `new_sites` answer with the next cursor. A run that was resumed has rewritten its file: the cursor no
longer fits, and the answer says `reset`.
"""

import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rl.checks import parse_json
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.floors import FLOORS

CHUNK = 2_000_000
"""Bytes of metrics.jsonl in one answer; the page asks again while there is `more`."""

COLUMNS = {
    "rollout": ("step", "reward", "response_length"),
    "eval": ("step", "reward"),
    "update": ("step", "update", "clipped_tokens", "tokens", "grad_norm"),
    "probe": (
        "step",
        "update",
        "slots_changed",
        "slots",
        "var_token_natural",
        "var_sequence_natural",
        "entropy",
    ),
    "step": ("step", "seconds"),
    "floor": ("step", "floor", "slots_changed", "slots"),
}
"""What curves are made of: per kind of row, the values that are sent, in this order."""

_CHECKED = 256  # bytes before a cursor that must not have changed
_FLOOR_OF = {variant: floor for floor, variants in FLOORS.items() for variant in variants}


class LiveError(ValueError):
    """A request for something that is not there; the message says what and what is."""


def new_rows(path: Path, since: str = "", metrics: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """The curves' values of rows after the cursor `since`, as {kind: [[value, ...], ...]} in the order of COLUMNS.

    metrics: chosen ones (`live_metrics.choosable`); `chosen` in the answer has of each
        [[step, value, denominator or null], ...]. Of rows of the kind "engine" those of the pair "engines".
    """
    rows, answer = read_since(path, since)
    series: dict[str, list[list[Any]]] = {kind: [] for kind in COLUMNS}
    chosen: dict[str, list[list[Any]]] = {key: [] for key in metrics or ()}
    for row in rows:
        for key, about in (metrics or {}).items():
            if row.get("kind") == about["kind"] and row.get("pair", "engines") == "engines":
                value, over = _number(row.get(about["name"])), _number(row.get(about["over"]))
                if value is not None and isinstance(row.get("step"), int):
                    chosen[key].append([row["step"], value, over])
        columns = COLUMNS.get(str(row.get("kind")))
        if columns and isinstance(row.get("step"), int):
            floor = _FLOOR_OF.get(str(row.get("variant")))
            series[row["kind"]].append([floor if name == "floor" else _number(row.get(name)) for name in columns])
    return {**answer, "rows": {kind: values for kind, values in series.items() if values}, "chosen": chosen}


def new_sites(path: Path, since: str = "") -> dict[str, Any]:
    """Slot change by routing site of probe rows after the cursor `since`: rows [step, update, [fraction, ...]]; with
    equal weights, `floor`: [own or bf16, [fraction, ...]] of each variant that is among them."""
    rows, answer = read_since(path, since)
    found: list[list[Any]] = []
    floor: list[list[Any]] = []
    names: list[str] = []
    for row in rows:
        changed, total = row.get("site_slots_changed"), row.get("site_slots")
        if not isinstance(changed, list) or not isinstance(total, list):
            continue
        rates = [_number(c / t) if t else None for c, t in zip(changed, total, strict=False)]
        if row.get("kind") == "probe":
            found.append([row.get("step"), row.get("update"), rates])
            names = row.get("site_names") or names
        elif row.get("kind") == "floor" and row.get("variant") in _FLOOR_OF:
            floor.append([_FLOOR_OF[row["variant"]], rates])
    labels, common = short_sites(names) if names else ([], "")
    return {**answer, "rows": found, "floor": floor, "sites": names, "labels": labels, "common": common}


def read_since(path: Path, since: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Whole lines after a cursor, at most about CHUNK bytes, and {since, more, reset, damaged}.

    `since` in the answer is the next cursor; `more`: ask again at once; `reset`: what was read before is no longer in
    the file (a resume rewrote it), forget it; `damaged`: lines that are not rows, left out. A last line without its
    end is left for later. A missing file has no rows. Raises LiveError for a cursor that is none.
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
        except ValueError:  # json's and unicode's
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged += 1
    return rows, {"since": cursor, "more": more, "reset": reset, "damaged": damaged}


def _before(file: Any, offset: int) -> int:
    """Checksum of what stands just before an offset; -1 if the file ends earlier."""
    start = max(0, offset - _CHECKED)
    file.seek(start)
    data = file.read(offset - start)
    return zlib.crc32(data) if len(data) == offset - start else -1


def _number(value: Any) -> Any:
    """Numbers as they fit on a screen (six digits); what is not finite or not a number as null."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
