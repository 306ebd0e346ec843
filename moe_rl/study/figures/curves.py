"""Figures of lines: one table per arm (rows x, columns seeds), drawn as mean and interval over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moe_rl.study.curves import COLLAPSE_RULE
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.figures.layout import (
    Limits,
    arm_grid,
    condition_panels,
    crowded,
    drawn_arms,
    grey_background,
    headroom,
    label_grid,
    many,
    same_axes,
    shown,
)
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import THIN_LINES, Look, arm_colour, arm_looks, legend_above, log_y, step_axis
from moe_rl.study.outcomes import final_rewards
from moe_rl.study.statistics import seed_band


def seed_tables(rows: pd.DataFrame, x: str, y: str) -> dict[str, pd.DataFrame]:
    """Return for each arm the table of `y` with rows x and one column per seed, mean over repeated rows. Arms without
    any value are left out."""
    wide = rows.groupby(["arm", x, "seed"], observed=True)[y].mean().unstack("seed")
    parts = wide.groupby(level="arm", observed=True, sort=False)
    tables = {str(arm): part.droplevel("arm").dropna(axis=1, how="all") for arm, part in parts}
    return {arm: table for arm, table in tables.items() if len(table.columns)}


def pooled_tables(rows: pd.DataFrame, changed: str, total: str, x: str) -> dict[str, pd.DataFrame]:
    """Return tables as `seed_tables` does, of the rate Σ changed / Σ total."""
    rates = pooled_rate(rows, changed, total, ["arm", x, "seed"])
    return seed_tables(rates.rename("rate").reset_index(), x, "rate")


def over_seeds(
    table: pd.DataFrame, geometric: bool = False, floor: float = -np.inf
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean over the columns and the lower and upper end of its interval; `geometric`: of the logarithms.
    Results below `floor` are set to it."""
    values = table.to_numpy(dtype=float)
    if geometric:
        with np.errstate(divide="ignore"):  # one zero makes the geometric mean zero
            values = np.log(values)
    mean = pd.DataFrame(values).mean(axis=1).to_numpy()
    low, high = seed_band(values.T)
    mean, low, high = (np.exp(mean), np.exp(low), np.exp(high)) if geometric else (mean, low, high)
    return np.maximum(mean, floor), np.maximum(low, floor), np.maximum(high, floor)


def highest(tables: Mapping[str, pd.DataFrame]) -> float:
    """Return the highest upper end of the intervals of `over_seeds`, which may be above all seeds; NaN without any."""
    return float(pd.Series(np.concatenate([over_seeds(table)[2] for table in tables.values()])).max())


def summarise(table: pd.DataFrame, geometric: bool = False, **labels: Any) -> pd.DataFrame:
    """Return a table with seeds as columns as tidy rows: labels, x, n, mean, low, high (`over_seeds`) and each seed's
    value."""
    mean, low, high = over_seeds(table, geometric)
    present = np.isfinite(table.to_numpy(dtype=float)).sum(1)
    columns = {**labels, str(table.index.name): table.index, "n": present, "mean": mean, "low": low, "high": high}
    columns |= {f"seed{seed}": table[seed].to_numpy() for seed in table.columns}
    return pd.DataFrame(columns)


def draw_seeds(
    ax: Axes,
    table: pd.DataFrame,
    look: Look,
    label: str,
    *,
    thin: bool = True,
    scale: float | int = 1,
    geometric: bool = False,
    floor: float = -np.inf,
    **line: Any,
) -> Line2D:
    """Draw the mean over seeds and the band of its interval (`over_seeds`), with thin lines for few seeds; return the
    mean's line."""
    table = scale * table
    mean, low, high = over_seeds(table, geometric, floor)
    x = table.index.to_numpy()
    every = max(1, len(x) // 8)
    start = (sum(map(ord, look.marker)) % every) if len(x) > 8 else 0  # stagger, so that markers do not hide each other
    if table.shape[1] > 1:
        if thin and table.shape[1] <= THIN_LINES:
            ax.plot(x, table, color=look.colour, lw=0.6, alpha=0.45)
        if len(x) > 1:
            ax.fill_between(x, low, high, color=look.colour, alpha=0.16, lw=0)
        else:  # a band of one point has no width
            ax.vlines(x, low, high, color=look.colour, alpha=0.4, lw=2.4)
    style = {"color": look.colour, "ls": look.dash, "marker": look.marker, "markevery": (start, every), **line}
    return ax.plot(x, mean, label=label, **style)[0]


def draw_arms(
    ax: Axes, data: StudyData, arms: Sequence[str], tables: Mapping[str, pd.DataFrame], **options: Any
) -> None:
    """Draw the lines of these arms with `draw_seeds`, each in its look and with its label; arms without a table are
    skipped."""
    for arm, (look, label) in arm_looks(data, arms).items():
        if arm in tables:
            draw_seeds(ax, tables[arm], look, label, **options)


def mark_collapses(ax: Axes, data: StudyData, arms: Sequence[str]) -> None:
    """Draw a cross at the foot of the axes for every run of these arms that collapsed, at the step of the collapse."""
    steps_of = final_rewards(data).set_index("arm")["collapse_steps"]
    for arm in arms:
        if steps := steps_of[arm]:
            foot, across = [0.02] * len(steps), ax.get_xaxis_transform()
            ax.plot(steps, foot, "x", color=arm_colour(data, arm), transform=across, mew=1.4, clip_on=False)


def collapse_note(data: StudyData) -> str:
    """Return the sentence of a caption on the crosses of `mark_collapses`; empty if no run collapsed."""
    fell = bool(final_rewards(data)["collapsed"].any())
    return f" ×: step at which a run collapsed ({COLLAPSE_RULE})." if fell else ""


@dataclass(frozen=True)
class Quantity:
    """A quantity that `by_step` draws: the tables of its arms, its label, and the factor `scale`; `log`: on a log axis,
    `zero`: on an axis that begins at 0."""

    tables: Mapping[str, pd.DataFrame]
    label: str
    scale: float | int = 1
    log: bool = False
    zero: bool = False


def by_step(
    data: StudyData,
    quantities: Mapping[str, Quantity],
    height: float,
    value: Callable[[pd.DataFrame], "pd.Series[float]"],
) -> tuple[Figure, str]:
    """Draw several quantities against the step, a row of panels for each and a column for each condition, with the
    steps at which runs collapsed; if that would be crowded, a row per arm with `value` of every run. Returns the
    figure, and how the interval is drawn ("band" or "bar")."""
    if crowded(data):
        columns = [
            Column(one.label, [Dots.each(one.tables, value, one.scale)], log=one.log) for one in quantities.values()
        ]
        return arm_rows(data, columns).figure, "bar"
    figure, axes, each = condition_panels(data, height, rows=len(quantities))
    for line, one in zip(axes, quantities.values(), strict=True):
        for ax, condition in zip(line, each, strict=True):
            draw_arms(ax, data, condition.arms, one.tables, thin=False, scale=one.scale, geometric=one.log)
            mark_collapses(ax, data, condition.arms)
        line[0].set_ylabel(one.label)
        if one.log:
            log_y(line[0])
        elif one.zero:
            line[0].set_ylim(bottom=0)
    for ax in axes[-1]:
        step_axis(ax)
    legend_above(figure, axes)
    return figure, "band"


Panels = list[tuple[Axes, tuple[str, ...]]]
"""Axes with the arms that are drawn in them."""


@dataclass(frozen=True)
class Curves:
    """A drawn figure of lines: `panels` are axes with the arms in them; `frame` is the table of what is shown."""

    figure: Figure
    panels: Panels
    frame: pd.DataFrame

    @property
    def axes(self) -> list[Axes]:
        return [ax for ax, _ in self.panels]

    def legend(self, *extra: Artist) -> None:
        """Draw one legend above the panels, with `extra` after the arms. Arms of small panels are in the titles
        instead."""
        legend_above(self.figure, self.axes, extra)


def curves(
    data: StudyData,
    tables: Mapping[str, pd.DataFrame],
    ylabel: str,
    xlabel: str = "RL step",
    *,
    quantity: str = "",
    scale: float | int = 1,
    log: bool = False,
    geometric: bool = False,
    thin: bool = True,
    floor: float = -np.inf,
    ylim: Limits = (None, None),
    above: float = 0.0,
) -> Curves:
    """Draw a line per arm: panels by condition, or one small panel per arm if a condition has many arms.

    `scale` multiplies what is drawn (100 for per cent), not the table. `geometric`: mean and interval of the
    logarithms, which a log axis of positive quantities needs (an interval of the plain mean may reach below 0).
    Means and bands are drawn at least at `floor`. `above`: inches left free above small panels, for a legend of what
    is drawn into them.
    """
    frame = curve_frame(data, tables, quantity, geometric)
    how: dict[str, Any] = {"scale": scale, "geometric": geometric, "floor": floor}
    if many(data):
        arms = drawn_arms(data, list(tables))
        figure, small = arm_grid(data, arms, above)
        looks, means = arm_looks(data, arms), {}
        for ax, arm in zip(small, arms, strict=True):
            marker = "" if len(tables[arm]) > 1 else "o"  # a line of one point shows nothing
            draw_seeds(ax, tables[arm], looks[arm][0], "", thin=False, marker=marker, ls="-", lw=1.3, **how)
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            means[arm] = pd.Series(over_seeds(scale * tables[arm], geometric, floor)[0], tables[arm].index)
        same_axes(small, ylim, log)
        grey_background(figure, small, means)
        label_grid(figure, small, xlabel, ylabel, "grey: all other arms", above)
        return Curves(figure, [(ax, (arm,)) for ax, arm in zip(small, arms, strict=True)], frame)
    figure, axes, each = condition_panels(data, 1.9)
    for i, (ax, one) in enumerate(zip(axes[0], each, strict=True)):
        draw_arms(ax, data, one.arms, tables, thin=thin, **how)
        if one.stand_in in tables:  # by construction equal to the replay run under noise: its mean, pale
            look, label = arm_looks(data, [str(one.stand_in)])[str(one.stand_in)]
            table = scale * tables[str(one.stand_in)]
            style: dict[str, Any] = {"ls": look.dash, "lw": 0.9, "alpha": 0.6}
            style["marker"] = "" if len(table) > 1 else look.marker  # a line of one point shows nothing
            mean = over_seeds(table, geometric, floor)[0]
            ax.plot(table.index, mean, color=look.colour, label=f"{label}, its natural run", **style)
        step_axis(ax, xlabel if ax.xaxis.get_tick_params().get("labelbottom", True) else "")
        if not i % 3:
            ax.set_ylabel(ylabel)
    if log:
        log_y(axes[0, 0], *ylim)
    elif ylim != (None, None):
        axes[0, 0].set_ylim(*ylim)
        if ylim[1] is None:
            axes[0, 0].set_ylim(top=headroom(axes[0], *axes[0, 0].get_ylim()))
    return Curves(figure, [(ax, one.arms) for ax, one in zip(axes[0], each, strict=True)], frame)


def curve_frame(
    data: StudyData, tables: Mapping[str, pd.DataFrame], quantity: str = "", geometric: bool = False
) -> pd.DataFrame:
    """Return the numbers of curves: `summarise` of every arm's table, with quantity, condition and arm; empty without
    tables."""
    labels = {"quantity": quantity} if quantity else {}
    parts = [
        summarise(tables[arm], geometric, **labels, condition=each.name, arm=arm)
        for each in shown(data)
        for arm in each.arms
        if arm in tables
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
