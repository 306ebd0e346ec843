"""Change rate by update index within a step, under its three definitions: slots, sites and tokens."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.figures.curves import curve_frame, draw_arms, pooled_tables
from moe_rl.study.figures.floor import FLOOR_LINES, draw_across, floor_note
from moe_rl.study.figures.layout import condition_panels, crowded
from moe_rl.study.figures.register import PROBE, Drawing, figure, lines_note
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import GREY, NothingToDraw, legend_above
from moe_rl.study.floors import floor_runs
from moe_rl.study.summary import last_updates, noise_floor

GSPO_CHANGE = 0.10
"""GSPO (2507.18071) §5.3: "roughly 10% of the experts activated" per update; the denominator is not defined."""

DEFINITIONS = {
    "slot": ("slots_changed", "slots", "slots changed\n/ K·L·tokens, %"),
    "site": ("sites_changed", "sites", "sites changed\n/ L·tokens, %"),
    "token": ("tokens_changed", "tokens", "tokens with any\nsite changed, %"),
}
"""Name -> numerator, denominator, label. slot: expert slots replaced; site: (token, router) pairs whose set differs."""
COUNTS = [count for changed, total, _ in DEFINITIONS.values() for count in (changed, total)]


@figure(
    title="Expert change by update index.",
    caption=(
        "Changes and totals pooled over all steps of a seed. Slot: expert slots replaced, of K·L·tokens; site: "
        "(token, router) pairs whose set of experts differs; token: tokens with any site changed. The three differ by "
        "up to a factor of K·L and must not be compared with one another. Reference: the GSPO paper (§5.3), given "
        "with the slot definition only, per update, as the most plausible reading of “experts activated”."
    ),
    needs={"probes": COUNTS},
    rank=30,
    notes=(PROBE,),
)
def expert_change(data: StudyData) -> Drawing:
    rows = data.probes.dropna(subset=COUNTS)
    tables = {name: pooled_tables(rows, *counts[:2], "update") for name, counts in DEFINITIONS.items()}
    if not any(tables.values()):
        raise NothingToDraw("expert_change: slots, sites and tokens are 0 in every probe")
    floor = noise_floor(data)
    floors = [
        {"definition": name, "condition": f"floor, {variant}", "mean": rate, "n": floor_runs(data, str(variant))}
        for name in DEFINITIONS
        for variant, rate in floor[name].items()
    ]
    parts = [curve_frame(data, table).assign(definition=name) for name, table in tables.items() if table]
    frame = pd.concat([*parts, pd.DataFrame(floors)], ignore_index=True)
    if crowded(data):
        return _rows(data, rows, floor, frame)
    figure, axes, each = condition_panels(data, 1.5, rows=3)
    for line, (name, (_, _, words)) in zip(axes, DEFINITIONS.items(), strict=True):
        for ax, one in zip(line, each, strict=True):
            draw_arms(ax, data, one.arms, tables[name], scale=100)
            for variant, rate in floor[name].items():
                ax.axhline(100 * rate, **FLOOR_LINES[str(variant)])
        line[0].set_ylim(0, None)
        line[0].set_ylabel(words)
    _draw_reference(list(axes[0]))
    for ax in axes[-1]:
        ax.set_xlabel("update within the step")
        ax.set_xticks(sorted(rows["update"].unique())[:: max(1, rows["update"].nunique() // 8)])
    legend_above(figure, axes)
    return Drawing(figure, frame, f"{floor_note(floor)}{lines_note(data)}", interval="band")


def _rows(data: StudyData, rows: pd.DataFrame, floor: pd.DataFrame, frame: pd.DataFrame) -> Drawing:
    """Draw many arms in a row each: change rates after the first and after the last update."""
    ends = {"after the first update": rows[rows["update"] == 1], "after the last": last_updates(rows)}
    columns = []
    for i, (changed, total, words) in enumerate(DEFINITIONS.values()):
        rates = {label: pooled_rate(part, changed, total, ["arm", "seed"]) for label, part in ends.items()}
        dots = [Dots(100 * rate.unstack("seed"), label, open=k == 0) for k, (label, rate) in enumerate(rates.items())]
        columns.append(Column(words, dots, lines=() if i else (100 * GSPO_CHANGE,)))
    drawn = arm_rows(data, columns)
    for ax, name in zip(drawn.axes, DEFINITIONS, strict=True):
        ax.set_xlim(left=0)
        draw_across(ax, 100 * floor[name], vertical=True)
    said = f"Dotted: the paper's “roughly 10 %”, denominator not defined. {floor_note(floor)}".strip()
    return Drawing(drawn.figure, frame, said, interval="bar")


def _draw_reference(line: list[Axes]) -> None:
    """Draw the GSPO paper's value if the axis can show it without flattening the data; otherwise name it in a text."""
    ax, text = line[0], "GSPO paper: “roughly 10 %”,\ndenominator not defined"
    look: dict[str, Any] = {"fontsize": 6, "color": GREY}
    top = ax.get_ylim()[1]
    head = {"transform": ax.transAxes, "ha": "left", "va": "top", **look}
    if top < 30 * GSPO_CHANGE:
        ax.set_ylim(0, 1.35 * top)  # headroom for the text: data and noise floor fill the corners below
        ax.text(0.03, 0.98, f"{text} (above this axis)", **head)
        return
    ax.set_ylim(0, max(top, 115 * GSPO_CHANGE))
    for each in line:
        each.axhline(100 * GSPO_CHANGE, color=GREY, lw=1, ls=(0, (1, 2)))
    if top < 75 * GSPO_CHANGE:  # the text fits under the dotted line; otherwise it gets headroom
        ax.text(0.03, 98 * GSPO_CHANGE, text, transform=ax.get_yaxis_transform(), ha="left", va="top", **look)
    else:
        ax.set_ylim(0, 1.35 * ax.get_ylim()[1])
        ax.text(0.03, 0.98, f"dotted: {text}", **head)
