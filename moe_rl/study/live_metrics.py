"""Metrics that the live page can draw besides its own curves: every number of the catalogue, by kind of row."""

import re
from functools import lru_cache
from typing import Any

KINDS = ("rollout", "update", "probe", "eval", "step", "engine", "decomposition")
"""Kinds of rows with one value per step (floors are of a whole run, tokens are files)."""
_NO_NUMBER = ("names", "name", "words", "boolean", "id", "index")


@lru_cache(maxsize=1)
def choosable() -> dict[str, dict[str, Any]]:
    """`kind.name` -> kind, name, unit, definition, and `over`: the name of the denominator where the value is a count
    that the catalogue divides by another value of its row."""
    from moe_rl.measure.catalogue import CATALOGUE  # torch takes seconds: only where metrics are chosen

    found = {}
    for kind in KINDS:
        names = {metric.name for metric in CATALOGUE[kind]}
        for metric in CATALOGUE[kind]:
            if not metric.is_list and metric.unit not in _NO_NUMBER and "<" not in metric.name:
                of = re.match(r"over (\w+)", metric.over)
                over = of[1] if of and of[1] in names else ""
                about = {"kind": kind, "name": metric.name, "unit": metric.unit, "definition": metric.definition}
                found[f"{kind}.{metric.name}"] = {**about, "over": over}
    return found
