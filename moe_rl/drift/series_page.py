"""Table, figures and page of a series of checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from moe_rl.drift.figures import LOOKS
from moe_rl.drift.output import page_of
from moe_rl.drift.words import adapters_sentence, floor_text, floors_of, measured_sentence, number, percent
from moe_rl.study.figures.floor import FLOOR_LINES
from moe_rl.study.figures.routing import short_sites, site_ticks
from moe_rl.study.figures.saving import StudyFigure, save_figure, styled
from moe_rl.study.figures.style import label_bar, legend_above, panels
from moe_rl.study.words import cut

LEVELS = {"slot": ("#D55E00", "o"), "site": ("#0B4A8F", "s"), "token": ("#27B08B", "^")}
SWAPS = {
    "both": ("#D55E00", "o", "new routers, new body"),
    "body": ("#0B4A8F", "s", "old routers, new body"),
    "routers": ("#27B08B", "^", "new routers, old body"),
}


def series_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table of one row per checkpoint.

    `slot_change`, `slots_changed`, `slots`, ...: against the first checkpoint; `step_*`: against the one before;
    `swap_routers_*`, `swap_body_*`: the first checkpoint with only the routers, or only the body, of this one; then the
    entries of `gap_split`."""
    table = []
    for row in rows:
        found: dict[str, Any] = {"name": row["name"]}
        parts = {"": row["change"], "step_": row["step"]}
        parts |= {f"swap_{name}_": rates for name, rates in (row["gate_swap"] or {}).items()}
        for prefix, rates in parts.items():
            for level, rate in rates.items():
                found[f"{prefix}{level}_change"] = rate["rate"]
                found |= {f"{prefix}{level}s_changed": rate["changed"], f"{prefix}{level}s": rate["of"]}
        table.append(found | {name: value for name, value in row["gap"].items() if name not in found})
    return pd.DataFrame(table)


def positions_of(results: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """Return the places of the checkpoints on the x axis, and its label: training steps if known, else 1, 2, ..."""
    steps = results["steps"]
    if steps is not None:
        return np.array(steps, float), "step"
    return np.arange(1.0, len(results["rows"]) + 1), "checkpoint"


@styled
def series_curves(results: Mapping[str, Any], note: str) -> StudyFigure:
    """Draw changes against the first checkpoint and the one before, log-ratios, and changes with swapped routers."""
    table = series_table(results["rows"])
    x, what = positions_of(results)
    swapped = "swap_body_slot_change" in table
    figure, axes = panels(2, 2, 4.4, sharex=True)
    (first, step), (gap, swap) = axes
    for level, (colour, marker) in LEVELS.items():
        first.plot(x, 100 * table[f"{level}_change"], color=colour, marker=marker, ms=3, label=f"{level}s")
        step.plot(x[1:], 100 * table[f"step_{level}_change"][1:], color=colour, marker=marker, ms=3)
    for floor, largest in floors_of(results["floor"]).items():
        for ax in (first, step):
            ax.axhline(100 * largest["slot"], **FLOOR_LINES[floor])
    for kind, column in (("natural", "gap_mean"), ("replayed", "gap_mean_replayed")):
        gap.plot(x, table[column], **{**LOOKS[kind], "ms": 3, "label": kind})
    if swapped:
        columns = {"both": "slot_change", "body": "swap_body_slot_change", "routers": "swap_routers_slot_change"}
        for name, (colour, marker, words) in SWAPS.items():
            values = 100 * table[columns[name]].fillna(0.0)  # the first checkpoint was not swapped with itself
            swap.plot(x, values, color=colour, marker=marker, ms=3, label=words)
        _legend(swap, len(SWAPS))
    else:
        swap.text(0.5, 0.5, "routers and body were not swapped", ha="center", transform=swap.transAxes)
    first.set(title=f"Against {cut(str(table['name'].iloc[0]), 36)}", ylabel="changed, %")
    step.set(title="Against the one before")
    gap.set(title="Log-ratio against the first", ylabel="mean |log r|, nats", xlabel=what)
    _legend(gap, 2)
    swap.set(title="Routers or body: slots", ylabel="changed, %", xlabel=what)
    for ax in axes.ravel():
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(figure, [first])
    caption = (
        "Upper: slots (experts replaced), sites ((token, router) pairs whose set differs) and tokens (with any site "
        "changed) against the first checkpoint and against the one before; dashed: slots changed at equal weights. "
        "Lower left: log-ratio of the text's tokens, natural and with the first checkpoint's routes replayed. "
        f"Lower right: {{old, new}} routers on {{old, new}} body, slots changed against the first. {note}"
    )
    return StudyFigure("series_curves", "Routing along the checkpoints.", caption, figure, table)


def _legend(ax: Axes, lines: int) -> None:
    """Add a legend of so many lines inside the axes, and raise their upper end so that it covers no curve."""
    ax.set_ylim(top=(1 + 0.23 * lines) * ax.dataLim.y1 or 1)
    ax.legend(loc="upper left")


@styled
def series_sites(sites: pd.DataFrame, results: Mapping[str, Any], note: str) -> StudyFigure:
    """Draw a heat map of slot change against the first checkpoint, site by checkpoint."""
    names = [row["name"] for row in results["rows"]]
    table = sites.assign(slot_change=sites["slots_changed"] / sites["slots"])
    order = list(dict.fromkeys(table["site"]))
    grid = 100 * table.pivot(index="site", columns="checkpoint", values="slot_change").loc[order, names].to_numpy()
    figure, axes = panels(1, 1, float(np.clip(1.2 + 0.2 * len(order), 2.0, 6)))
    ax = axes[0, 0]
    image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    short, common = short_sites(order)
    site_ticks(ax.yaxis, short)
    x, what = positions_of(results)
    ticks = range(0, len(names), max(1, -(-len(names) // 8)))
    ax.set_xticks(list(ticks), [f"{x[i]:g}" for i in ticks])
    ax.set(xlabel=what, ylabel="routing site")
    ax.grid(False)
    bar = figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
    label_bar(bar, "slots changed, %", 0.9 * (figure.get_figheight() - 0.6))
    caption = f"Slots changed against the first checkpoint by site ({common}, shallow to deep from the top). {note}"
    return StudyFigure("series_sites", "Routing along the checkpoints, by site.", caption, figure, table)


def draw(results: Mapping[str, Any], sites: pd.DataFrame, folder: Path) -> list[StudyFigure]:
    """Draw all figures, and save each in every format. sites: changes by checkpoint and site."""
    note = (
        f"{results['rows'][0]['tokens']:,} tokens, the same for all. Noise floor: {_floor(results) or 'not measured.'}"
    )
    drawn = [series_curves(results, note), series_sites(sites, results, note)]
    for figure in drawn:
        save_figure(figure, folder)
    return drawn


def render(results: Mapping[str, Any], figures: Sequence[StudyFigure]) -> str:
    """Return the page as HTML, self-contained and without scripts."""
    rows = [_cells(row) for row in results["rows"]]
    adapters = adapters_sentence(results) if results["adapters"] else ""
    tokens = f"{results['rows'][0]['tokens']:,} tokens of {results['examples']} examples"
    text = measured_sentence(results, tokens, results["rows"][0]["name"])
    return page_of("series", results, figures, floor=_floor(results), adapters=adapters, text=text, rows=rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a checkpoint's row of the page's table."""
    swap = row["gate_swap"] or {}
    rates = [row["change"][level]["rate"] for level in LEVELS] + [row["step"]["slot"]["rate"]]
    rates += [swap[name]["slot"]["rate"] if name in swap else None for name in ("routers", "body")]
    gap = row["gap"]
    return [
        row["name"],
        *map(percent, rates),
        number(gap["gap_mean"]),
        number(gap["gap_mean_replayed"]),
        percent(gap["routing_share_gap_mean"]),
    ]


def _floor(results: Mapping[str, Any]) -> str:
    """Return the noise floor of the first checkpoint in a sentence, empty if not measured."""
    return floor_text(results["rows"][0]["name"], results["floor"])
