"""Rows of `metrics.jsonl` and tables of tokens: kinds of rows, the keys that tell rows apart, and checks of their
values."""

import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from moe_rl.checks import parse_json
from moe_rl.names import nearest
from moe_rl.runlog import RunFolderError, json_value
from moe_rl.tables import read_table

ROWS: dict[str, tuple[str, ...]] = {
    "rollout": (),
    "update": ("update",),
    "probe": ("update",),
    "eval": (),
    "step": (),
    "engine": ("pair", "update"),
    "decomposition": ("update",),
    "floor": ("variant",),
}
"""Kind of row in metrics.jsonl -> the fields, besides `step`, that tell rows of this kind apart."""

_TYPES: dict[str, Any] = {"step": int, "update": int, "pair": str, "variant": str, "reward": int | float | None}
"""Types that these fields must have where they are present; all other fields are numbers, texts and lists."""

_CLIPPED = ("clip_fraction", "clip_frac", "clip_ratio", "clipfrac", "pg_clipfrac")
OTHER_NAMES = {
    **dict.fromkeys(_CLIPPED, "clipped_tokens over tokens"),
    **{f"{unit}_change": f"{unit}s_changed over {unit}s" for unit in ("slot", "site", "token")},
    "kl": "k3 (to the old policy) or ref_kl (to the reference)",
    **dict.fromkeys(("approx_kl", "ppo_kl"), "k3 (to the old policy)"),
}
"""Names that other trainers give a metric -> the name here."""

FOREIGN = "/"
"""A metric whose name has a slash is the trainer's own, and is kept as it is (`mine/kl`)."""


def row_problem(row: Any) -> str:
    """Return why a JSON value cannot be a row that a run wrote; empty if it can. A row of an unknown kind can."""
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    kind = row.get("kind")
    if not isinstance(kind, str):
        return "lacks kind"
    missing = [name for name in ("step", *ROWS.get(kind, ())) if row.get(name) is None]
    if kind == "rollout" and "reward" not in row:
        missing.append("reward")
    if missing:
        return f"lacks {', '.join(missing)}"
    for name, wanted in _TYPES.items():
        if name in row and (not isinstance(row[name], wanted) or isinstance(row[name], bool)):
            return f"{name} cannot be {row[name]!r:.80}"
    return next((f"{name} cannot be {value!r:.80}" for name, value in row.items() if type(value) is dict), "")


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row from the others of its kind in a run, its step first. Of several rows with one key the
    last counts: a run that was resumed wrote the row again, or `rollout.lag` sampled several batches in the first
    step."""
    return (row["step"], *(row[name] for name in ROWS.get(row["kind"], ())))


def checked(kind: str, name: str, value: Any) -> Any:
    """Return a metric's value as JSON holds it. Raises RunFolderError for an unknown name or a value that does not fit
    it."""
    from moe_rl.measure.catalogue import CATALOGUE, find

    value = json_value(value, f"{kind} row, {name}")
    if FOREIGN in name:
        return value
    metric = find(kind, name)
    if metric is None:
        elsewhere = [other for other in CATALOGUE if other in ROWS and find(other, name)]
        near = nearest(name, [m.name for m in CATALOGUE[kind]], listed=False)
        if name in OTHER_NAMES:
            counts = ", a rate is kept as two counts" if " over " in OTHER_NAMES[name] else ""
            near = f"; ours is {OTHER_NAMES[name]}{counts}"
        hint = f"; it is one of {elsewhere[0]} rows" if elsewhere else near
        raise RunFolderError(
            f"{kind} row: no metric {name!r}{hint} (docs/metrics.md has all names; one of your own needs a slash, "
            f"e.g. 'mine/{name}')"
        )
    if metric.is_list != isinstance(value, list) and value is not None:
        wanted = "a list" if metric.is_list else "one value"
        raise RunFolderError(f"{kind} row, {name}: expected {wanted}, got {value!r}")
    words = metric.unit in ("name", "names", "words")
    items = [item for item in (value if metric.is_list else [value]) if item is not None]
    other = list if metric.unit == "boolean" else (list, bool)  # a list in a list, e.g. of a tensor [1, L]
    if any(isinstance(item, other) for item in items) or any(isinstance(item, str) != words for item in items):
        raise RunFolderError(f"{kind} row, {name}: expected {'text' if words else 'numbers'}, got {value!r}")
    return value


def check_lists(kind: str, values: dict[str, Any]) -> None:
    """Raise RunFolderError if the lists of a row by site, or those by layer, differ in length."""
    for of in ("site", "layer"):
        lengths = {name: len(v) for name, v in values.items() if name.startswith(f"{of}_") and isinstance(v, list)}
        if len(set(lengths.values())) > 1:
            raise RunFolderError(f"{kind} row: lists by {of} must have one length, got {lengths}")


def check_counts(kind: str, values: dict[str, Any]) -> None:
    """Raise RunFolderError if more changed than there is: `slots_changed` over `slots`, and every other pair of such
    names, is a share."""
    for name in values:
        of = name.removesuffix("_changed")
        if of == name or of not in values or "/" in name:  # a name with a slash is the trainer's own
            continue
        changed, there = (value if isinstance(value, list) else [value] for value in (values[name], values[of]))
        for some, whole in zip(changed, there, strict=False):
            if some is not None and whole is not None and not 0 <= some <= whole:
                raise RunFolderError(f"{kind} row: {name} is {some:g} of {of} {whole:g}")


def index_of(value: SupportsIndex, name: str, kind: str, least: int) -> int:
    """Return a whole number of any integer type as an int. Raises RunFolderError for other values and for those below
    `least`."""
    try:
        number = int(operator.index(value))  # operator.index(True) is True
    except TypeError:
        number = least - 1
    if number < least:
        raise RunFolderError(f"{kind}: {name} must be a whole number from {least} on, got {value!r}")
    return number


def words_of(kind: str, key: tuple[Any, ...]) -> str:
    """Return the key of a row in words."""
    return ", ".join(f"{name} {value}" for name, value in zip(("step", *ROWS[kind]), key[1:], strict=True))


def read_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield every whole line of a file of rows with the row in it; a last line without its end is left out. Raises
    RunFolderError for a damaged line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line)
                if not isinstance(row["kind"], str) or not isinstance(row["step"], int):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                raise RunFolderError(
                    f"{path} line {number} is damaged. Restore the file, or move the run folder away to run it again."
                ) from None
            yield line, row


TOKEN_COLUMNS = ("seq", "pos", "token", "update", "flips", "old_logp", "logp_natural")
"""Columns of tokens/*.parquet that are required."""
MORE_TOKEN_COLUMNS = ("logp_replayed", "reward", "text")
_WHOLE = TOKEN_COLUMNS[:5]


def token_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a table of tokens as arrays, after checking names, equal length and types. Missing numbers,
    and a missing column `logp_replayed` or `reward`, are NaN."""
    import numpy as np

    for name in columns:
        if name not in (*TOKEN_COLUMNS, *MORE_TOKEN_COLUMNS):
            raise RunFolderError(f"tokens: no column {name!r}{nearest(name, (*TOKEN_COLUMNS, *MORE_TOKEN_COLUMNS))}")
    if missing := [name for name in TOKEN_COLUMNS if name not in columns]:
        raise RunFolderError(f"tokens: {missing[0]} is missing; needed are {', '.join(TOKEN_COLUMNS)}")
    found: dict[str, Any] = {}
    for name, value in columns.items():
        held = json_value(value, f"tokens, {name}")
        if name not in (*_WHOLE, "text") and isinstance(held, list):
            held = [math.nan if item is None else item for item in held]
        nested = isinstance(held, list) and any(isinstance(item, list) for item in held)  # perhaps of unequal lengths
        array = np.asarray(held, dtype=object if nested or name == "text" else None)
        kinds = "O" if name == "text" else "iu" if name in _WHOLE else "iuf"
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):  # an empty array is float64
            wanted = "texts" if name == "text" else "whole numbers" if name in _WHOLE else "numbers"
            raise RunFolderError(f"tokens: {name} must be a list of {wanted}, got {array.dtype} {list(array.shape)}")
        if name == "text" and (strange := [item for item in held if not isinstance(item, str | None)]):
            raise RunFolderError(f"tokens: text must be a list of texts, got {strange[0]!r} in it")
        if name in _WHOLE and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
            raise RunFolderError(f"tokens: {name} holds {array.min()} to {array.max()}, but is kept in 32 bits")
        found[name] = array if kinds == "O" else array.astype(np.int32 if name in _WHOLE else np.float32)
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        raise RunFolderError(f"tokens: columns must have one length, got {lengths}")
    if not lengths["seq"]:
        raise RunFolderError("tokens: the columns have no rows; a step without tokens needs no table")
    for name in ("logp_replayed", "reward"):
        found.setdefault(name, np.full(lengths["seq"], np.nan, np.float32))
    return found


def with_other_updates(path: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a table of tokens together with the rows of other updates in the table at `path`, in the
    order of updates."""
    import pyarrow as pa

    if not path.exists():
        return columns
    there, new = read_table(path), set(columns["update"].tolist())
    kept = there.filter([update not in new for update in there["update"].to_pylist()])
    if not len(kept):
        return columns
    table = pa.concat_tables([kept, pa.table(columns)], promote_options="default").sort_by("update")
    return dict(zip(table.column_names, table.columns, strict=True))
