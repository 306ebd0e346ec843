"""Rows of a run that is being written, as the live page draws them: curves, routing sites and experts, chosen metrics.

`new_rows` and `new_sites` answer with the next cursor, too (`moe_rl.study.cursor`).
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.study.cursor import read_since, stamp
from moe_rl.study.floors import FLOORS
from moe_rl.study.token_view import TokenStep, labelled, slots_left, stored_steps, tokens_file

COLUMNS = {
    "rollout": ("step", "reward", "response_length"),
    "eval": ("step", "reward"),
    "update": ("step", "update", "clipped_tokens", "tokens", "grad_norm"),
    "probe": ("step", "update", "slots_changed", "slots", "var_token_natural", "var_sequence_natural", "entropy"),
    "step": ("step", "seconds"),
    "floor": ("step", "floor", "slots_changed", "slots"),
}
"""Kind of row -> the values that are sent for curves, in this order."""

_FLOOR_OF = {variant: floor for floor, variants in FLOORS.items() for variant in variants}


def new_rows(path: Path, since: str = "", metrics: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the curves' values of rows after the cursor `since`: `rows` is {kind: [[value, ...], ...]}.

    Values are in the order of COLUMNS: null for a value that is not finite, false for one that the row does not have.

    metrics: chosen metrics (`choosable`); `chosen` in the answer has for each of them, from every row with the metric,
        [step, value or null, denominator or null, update or null]. Of rows of the kind "engine" only those of the pair
        "engines" are taken.
    """
    rows, answer = read_since(path, since)
    series: dict[str, list[list[Any]]] = {kind: [] for kind in COLUMNS}
    chosen: dict[str, list[list[Any]]] = {key: [] for key in metrics or ()}
    for row in rows:
        for key, about in (metrics or {}).items():
            if row.get("kind") == about["kind"] and row.get("pair", "engines") == "engines":
                value, over = _number(row.get(about["name"])), _number(row.get(about["over"]))
                if about["name"] in row and isinstance(row.get("step"), int):
                    chosen[key].append([row["step"], value, over, row.get("update")])
        columns = COLUMNS.get(str(row.get("kind")))
        if columns and isinstance(row.get("step"), int):
            floor = _FLOOR_OF.get(str(row.get("variant")))
            values = (floor if name == "floor" else name in row and _number(row[name]) for name in columns)
            series[row["kind"]].append([*values])
    return {**answer, "rows": {kind: values for kind, values in series.items() if values}, "chosen": chosen}


def new_sites(path: Path, since: str = "") -> dict[str, Any]:
    """Return the slot change by routing site, from probe rows after the cursor `since`.

    `rows` are [step, update, [fraction, ...]]. `floor` is the same with equal weights: [own or bf16, [fraction, ...]]
    of each variant of a floor in the file's new rows.
    """
    rows, answer = read_since(path, since)
    found: list[list[Any]] = []
    floor: list[list[Any]] = []
    names: list[str] = []
    for row in rows:
        changed, total = row.get("site_slots_changed"), row.get("site_slots")
        if not isinstance(changed, list) or not isinstance(total, list):
            continue
        rates = [_number(c / t) if t and c is not None else None for c, t in zip(changed, total, strict=False)]
        if row.get("kind") == "probe":
            found.append([row.get("step"), row.get("update"), rates])
            names = row.get("site_names") or names
        elif row.get("kind") == "floor" and row.get("variant") in _FLOOR_OF:
            floor.append([_FLOOR_OF[row["variant"]], rates])
    return {**answer, "rows": found, "floor": floor, **labelled(names)}


def expert_counts(folder: Path) -> dict[str, Any]:
    """Return counts of tokens by site and expert over all stored steps.

    `old` and `new` [L][E], counted over the response tokens' own positions; `moved` [L][E]: slots that left the expert
    (its old tokens that the new policy sends elsewhere). `steps` are the steps that were counted; sites are empty if no
    step's routes were kept.
    """
    found = {step: _step_counts(folder, step, stamp(tokens_file(folder, step))) for step in stored_steps(folder)}
    counted = {step: counts for step, counts in found.items() if counts}
    sites = next((sites for sites, _ in counted.values()), ())
    sums = np.sum([counts for _, counts in counted.values()], axis=0).tolist() if counted else [[]] * 3
    return {"steps": list(counted), **labelled(sites), **dict(zip(("old", "new", "moved"), sums, strict=True))}


@lru_cache(maxsize=512)
def _step_counts(folder: Path, step: int, _stamp: tuple[int, ...]) -> tuple[list[str], np.ndarray] | None:
    """Return the sites of one stored step and counts [3, L, E] (old, new, left); None if its routes were not kept."""
    stored = TokenStep(folder, step)
    if not stored.routed:
        return None
    routes = stored.routes(0)
    experts = int(np.max(routes.num_experts))  # one number, or one of each site
    old, new = (stored.all_experts(update) for update in (0, stored.updates[-1]))
    left = np.where(slots_left(old, new), old, -1)
    counts = [
        [np.bincount(ids[ids >= 0], minlength=experts) for ids in which.swapaxes(0, 1)] for which in (old, new, left)
    ]
    return list(routes.sites), np.array(counts)


def _number(value: Any) -> Any:
    """Return a number as it fits on a screen (six digits); None for what is not finite or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
