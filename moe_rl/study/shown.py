"""Tables that a study shows in a notebook: an overview, rates of change, and the meaning of a metric's name."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from moe_rl.names import nearest
from moe_rl.study.curves import final_value
from moe_rl.study.folders import StudyDataError

if TYPE_CHECKING:
    from moe_rl.measure.catalogue import Metric

LEVELS = ("slot", "site", "token")
TABLES = ("probes", "updates", "engines", "floors")
SYMBOLS = "r = new / old probability of a token, d = log r (nats), s = exp(mean of d over a sequence)"


def overview(
    arms: pd.DataFrame, rollouts: pd.DataFrame, probes: pd.DataFrame, of_policy: Collection[str]
) -> pd.DataFrame:
    """Return a table with one row per arm: the arm, its runs, steps, reward and change rate.

    Columns: label, method, noise, runs, how many are finished, steps, the mean of the runs' final rewards (NaN for arms
    that are not in `of_policy`, whose responses are not their policy's), and the share of expert slots that changed,
    pooled over the arm's probes (NaN without probes).
    """
    table = arms.assign(runs=arms["seeds"].map(len))[["label", "method", "noise", "runs", "finished"]]
    if not (table["noise"] > 0).any():
        table = table.drop(columns="noise")
    if len(rollouts):
        table["steps"] = (rollouts.groupby("arm", observed=True)["step"].max() + 1).reindex(table.index)
        final = rollouts.sort_values("step").groupby(["arm", "seed"], observed=True)["reward"].agg(final_value)
        table["reward"] = final.groupby("arm", observed=True).mean().reindex(table.index.intersection(list(of_policy)))
    if {"slots_changed", "slots"} <= set(probes):
        table["slot_change"] = rates(probes, "slot", ["arm"]).set_index("arm")["rate"].reindex(table.index)
    return table


def rates(rows: pd.DataFrame, level: str, by: str | Sequence[str], table: str = "probes") -> pd.DataFrame:
    """Return rates of change, as `StudyData.rates` does; `rows` are the rows of the table called `table`."""
    if level not in LEVELS:
        raise StudyDataError(f"rates: no level {level!r}{nearest(level, LEVELS)}")
    keys = [by] if isinstance(by, str) else list(by)
    changed, total = f"{level}s_changed", f"{level}s"
    if "routing_site" in keys:
        if level != "slot":
            raise StudyDataError("rates: by routing site only slots are counted")
        rows, changed, total = _by_site(rows), "site_slots_changed", "site_slots"
    if not {changed, total} <= set(rows):
        raise StudyDataError(f"rates: the {table} of this study have no {changed} and {total}")
    known = [str(name) for name in rows if rows[name].map(_is_key).all()]
    for name in keys:
        if name not in known:
            hint = "; did you mean 'routing_site'?" if name == "site" else nearest(name, [*known, "routing_site"])
            raise StudyDataError(f"rates: cannot group by {name!r}{hint}")
    rows = counted(rows, changed, total)
    if keys:
        sums = rows.groupby(keys, sort=False, observed=True)[[changed, total]].sum().reset_index()
    else:
        sums = rows[[changed, total]].sum().to_frame().T
    found = sums.rename(columns={changed: "changed", total: "total"})
    found["rate"] = found["changed"] / found["total"].where(found["total"] > 0)
    return found[[*keys, "rate", "changed", "total"]]


def counted(rows: pd.DataFrame, changed: str, total: str) -> pd.DataFrame:
    """Return the rows with both counts NaN where one is NaN: a missing count is not 0."""
    known = rows[[changed, total]].notna().all(axis=1)
    return rows.assign(**{name: rows[name].where(known) for name in (changed, total)})


def _by_site(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one row per routing site, with its name as `routing_site`."""
    needed = ["site_names", "site_slots_changed", "site_slots"]
    if not set(needed) <= set(rows):
        raise StudyDataError("rates: this table has no counts by routing site")
    rows = rows.dropna(subset=needed).explode(needed, ignore_index=True)
    numbers = {name: pd.to_numeric(rows[name]) for name in needed[1:]}  # `explode` makes objects
    return rows.assign(**numbers).rename(columns={"site_names": "routing_site"})


def _is_key(value: object) -> bool:
    """Return whether rows can be grouped by a value: by text or a whole number."""
    return isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())


@dataclass(frozen=True)
class Described:
    """The meaning of a metric's name in each kind of row that has such a metric."""

    name: str
    metrics: "tuple[tuple[str, Metric], ...]"

    def __repr__(self) -> str:
        parts = []
        for kind, metric in self.metrics:
            lines = [f"{self.name}, {kind} rows [{metric.unit}]: {metric.definition}"]
            lines += [f"  = {metric.over}"] if metric.over else []
            lines += [f"  only with: {metric.when}"] if metric.when else []
            lines += [f"  source: {metric.source}"] if metric.source else []
            parts.append("\n".join(lines))
        return "\n".join((*parts, f"  ({SYMBOLS})"))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(kind)}</td>"
            + "".join(f"<td>{escape(text or '–')}</td>" for text in (m.unit, m.definition, m.over, m.when, m.source))
            + "</tr>"
            for kind, m in self.metrics
        )
        head = "".join(f"<th>{word}</th>" for word in ("rows", "unit", "definition", "quotient", "only with", "source"))
        return (
            f"<b><code>{escape(self.name)}</code></b><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<small>{escape(SYMBOLS)}</small>"
        )


IN_LOGS = {
    "max_vio": ("probe", "site_max_vio", "the log has their mean"),
    "replayed_fraction": ("update", "replayed_rows", "the log has the quotient"),
    "engine_slot_change": ("engine", "slots_changed", "pair engines; the log has the quotient"),
    **{
        f"engine_{name}{suffix}": ("engine", name, f"pair engines{suffix}")
        for name in ("k3", "gap_mean")
        for suffix in ("", "_replayed")
    },
}
"""Name after `routing/` in the log of TRL or ms-swift -> kind of row, name in that row, and how the two numbers differ.
It has only names that the catalogue lacks, or has for another number."""


def describe(name: str) -> Described:
    """Return the meaning of a metric's name, as `StudyData.describe` does."""
    from moe_rl.measure.catalogue import CATALOGUE, find

    asked, name = name, name.removeprefix("routing/")  # as in the log of TRL
    if name in IN_LOGS and (asked != name or not any(find(kind, name) for kind in CATALOGUE)):
        kind, name, note = IN_LOGS[name]
        (entry,) = (m for m in CATALOGUE[kind] if m.name == name)
        return Described(name, ((kind, entry._replace(definition=f"{entry.definition} ({note})")),))
    if name == "first_change":
        raise StudyDataError(f"{asked} is asserted while a trainer trains; no row holds it (docs/integrations.md)")
    level = name.removesuffix("_change")
    name = f"{level}s_changed" if level in LEVELS else name  # a rate is kept as both of its counts
    name = f"extreme_2{name.removeprefix('f2')}" if name in ("f2", "f2_natural") else name
    found = tuple((kind, metric) for kind in CATALOGUE if (metric := find(kind, name)) is not None)
    if not found:
        known = {metric.name for metrics in CATALOGUE.values() for metric in metrics}
        raise StudyDataError(
            f"no metric {name!r}{nearest(name, known, listed=False)} (docs/metrics.md has all; a name with a slash is "
            "of the trainer that wrote it)"
        )
    return Described(name, found)


KINDS = ("rollout", "update", "probe", "eval", "step", "engine", "decomposition")
"""Kinds of rows with one value per step (floors are of a whole run, tokens are files)."""
_NO_NUMBER = ("names", "name", "words", "boolean", "id", "index")


@lru_cache(maxsize=1)
def choosable() -> dict[str, dict[str, Any]]:
    """Return the metrics that can be chosen to be drawn: `kind.name` -> kind, name, unit, definition and `over`.

    `over` is the name of the denominator, if the value is a count that the catalogue divides by another value of its
    row; else empty.
    """
    from moe_rl.measure.catalogue import CATALOGUE  # imports torch, which takes seconds

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
