"""Figures with one row per arm, for any number of arms: dots for numbers, in columns side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import fixed_figure, shown
from moe_rl.study.figures.style import GREY, PAGE, arm_colour, inches, log_x
from moe_rl.study.statistics import geometric_interval, seed_interval
from moe_rl.study.words import cut

EACH = 0.185  # inches per row
LETTERS = 33
"""Most letters of a label on one line; longer labels are set in two lines and in a smaller font."""
DRAWN = 1.06  # drawn width over computed width: letters are drawn on whole pixels
LETTER = 0.05  # inches that a digit of a tick label takes


@dataclass(frozen=True)
class Dots:
    """Values by arm and seed (index arm, columns seeds), drawn as mean, interval and seeds; `open`: with hollow
    marks."""

    table: pd.DataFrame
    label: str = ""
    open: bool = False

    @classmethod
    def each(
        cls,
        tables: Mapping[str, pd.DataFrame],
        value: Callable[[pd.DataFrame], pd.Series],
        scale: float | int = 1,
        **how: Any,
    ) -> "Dots":
        """Return the dots of one number for each seed: `value` of the table of every arm (columns seeds), times
        `scale`."""
        return cls(scale * pd.DataFrame({arm: value(table) for arm, table in tables.items()}).T, **how)


@dataclass(frozen=True)
class Column:
    """One column of a row figure, which is one axes; `lines` are the values at which a line is drawn across the
    column."""

    title: str
    dots: Sequence[Dots]
    log: bool = False
    lines: Sequence[float | int] = ()


@dataclass(frozen=True)
class Rows:
    """A drawn row figure: `places` are the arms' y, `frame` the table of what is shown."""

    figure: Figure
    axes: list[Axes]
    places: dict[str, float]
    frame: pd.DataFrame


def arm_rows(
    data: StudyData,
    columns: Sequence[Column],
    order: Callable[[Sequence[str]], Sequence[str]] | None = None,
    beside: float = 0.0,
    below: float = 0.0,
) -> Rows:
    """Draw a row per arm under the heading of the arm's condition, and an axes per column.

    `order` may sort the arms within a condition; `beside` and `below` are inches left free for the caller."""
    present = {arm for column in columns for dots in column.dots for arm in dots.table.index}
    places, headings = _places(data, present, order)
    labels = {arm: str(data.arms["label"][arm]) for arm in places}
    longest = max(map(len, labels.values()))
    if longest > LETTERS:
        labels = {arm: in_two_lines(label) for arm, label in labels.items()}
    size = 7 if longest <= LETTERS else 6
    left = 0.15 + DRAWN * max(inches(label, size) for label in labels.values())
    gap, head, foot = 0.28, 0.36, 0.5 + below  # tick labels reach into a gap from both sides
    rows = max([*places.values(), *headings.values()]) + 1
    high = EACH * rows * (1.35 if longest > LETTERS else 1)  # two lines need room
    total = head + foot + high
    figure = fixed_figure(total)
    wide = (PAGE - left - 0.08 - beside - gap * (len(columns) - 1)) / len(columns)
    axes: list[Axes] = []
    for i, column in enumerate(columns):
        box = ((left + i * (wide + gap)) / PAGE, foot / total, wide / PAGE, high / total)
        ax = figure.add_axes(box, sharey=axes[0] if axes else None)
        axes.append(ax)
        _draw_column(ax, data, column, places)
        quiet_rows(ax)
        ax.set_title(column.title, fontsize=7, pad=4)
        ax.tick_params(axis="y", labelleft=not i)
    axes[0].set_yticks(list(places.values()), list(labels.values()), fontsize=size, linespacing=0.95)
    across = blended_transform_factory(figure.transFigure, axes[0].transData)
    for name, y in headings.items():
        axes[0].text(0.06 / PAGE, y, name, transform=across, fontsize=7, fontweight="bold", va="center")
    axes[0].set_ylim(rows - 0.5, -0.5)
    _key(figure, columns, total)
    return Rows(figure, axes, places, _frame(columns))


def in_two_lines(label: str) -> str:
    """Return a label in two lines, as even as they can be, if it has more than `LETTERS` letters. Its middle is left
    out if two lines do not hold the label."""
    if len(label) <= LETTERS:
        return label
    shorter = (cut(label, letters) for letters in (len(label), *range(2 * LETTERS, LETTERS, -1)))
    tried = (wrap(short, width) for short in shorter for width in range(len(short) // 2, LETTERS + 1))
    return "\n".join(next(lines for lines in tried if len(lines) <= 2))


def quiet_rows(ax: Axes) -> None:
    """Remove tick marks and spine beside the rows of an axes, and draw a faint line per row."""
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=6.5)
    ax.grid(axis="y", lw=0.4)
    ax.spines["left"].set_visible(False)


def _places(
    data: StudyData, present: set[str], order: Callable[[Sequence[str]], Sequence[str]] | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the y of every arm, and the y of every condition's heading, of which there are none if there is one
    condition."""
    places: dict[str, float] = {}
    headings: dict[str, float] = {}
    groups = [(each.heading, [arm for arm in each.arms if arm in present]) for each in shown(data)]
    groups = [(name, arms) for name, arms in groups if arms]
    y = 0.0
    for name, arms in groups:
        if len(groups) > 1:
            headings[name] = y
            y += 1
        for arm in order(arms) if order else arms:
            places[arm] = y
            y += 1
    return places, headings


def _draw_column(ax: Axes, data: StudyData, column: Column, places: dict[str, float]) -> None:
    """Draw one column of a row figure into its axes."""
    if column.log:
        ax.set_xscale("log")
    for dots in column.dots:
        table = dots.table.loc[[arm for arm in places if arm in dots.table.index]]
        colours = [arm_colour(data, arm) for arm in table.index]
        y = np.array([places[arm] for arm in table.index])
        values = table.to_numpy(dtype=float)
        draw_dots(ax, y, values, colours, dots.open, column.log)
    for value in column.lines:
        ax.axvline(value, color=GREY, lw=0.9, ls=(0, (1, 2)), zorder=1)
    ax.autoscale_view(scaley=False)
    if column.log:
        log_x(ax)
    else:
        _ticks(ax)


def _ticks(ax: Axes) -> None:
    """Set at most four intervals of ticks, as many as leave their labels room on the axis and between one another."""
    wide = ax.get_position().width * PAGE
    for most in (4, 3, 2):
        ax.xaxis.set_major_locator(MaxNLocator(most))
        low, high = ax.get_xlim()
        shown = [at for at in ax.get_xticks() if low <= at <= high]
        widths = [0.06 + LETTER * len(label) for label in ax.xaxis.get_major_formatter().format_ticks(shown)]
        apart = wide * min(np.diff(shown), default=high - low) / (high - low)
        if sum(widths) <= wide and max(widths, default=0.0) <= apart:
            break


def draw_dots(
    ax: Axes, y: np.ndarray, values: np.ndarray, colours: Sequence[str], hollow: bool = False, log: bool = False
) -> None:
    """Draw rows of values [rows, seeds] at `y`: mean, interval and, a little lower, every seed. `log`: mean and
    interval of the logarithms; values that are not above 0 are left out."""
    values = np.where(values > 0, values, np.nan) if log else values
    intervals = [(geometric_interval if log else seed_interval)(row) for row in values]
    known = [(one, h, c) for one, h, c in zip(intervals, y, colours, strict=True) if one.known]
    bars = [[(one.low, h), (one.high, h)] for one, h, _ in known]
    ax.add_collection(LineCollection(bars, colors=[c for *_, c in known], linewidths=3, alpha=0.4, zorder=2))
    if values.shape[1] > 1:
        each = values.shape[1]
        ax.scatter(
            values.ravel(), np.repeat(y + 0.27, each), s=5, c=list(np.repeat(np.array(colours), each)), linewidths=0,
            alpha=0.6, zorder=2.5, clip_on=False,
        )  # fmt: skip
    means = [one.estimate for one in intervals]
    face = "white" if hollow else list(colours)
    edge = list(colours) if hollow else "white"
    ax.scatter(
        means, y, s=22, c=face, edgecolors=edge, linewidths=0.8, zorder=3, clip_on=False
    )  # unclipped: marks at the ends of the axis are whole


def _key(figure: Figure, columns: Sequence[Column], total: float) -> None:
    """Draw the legend of filled and hollow marks, if the dots have labels."""
    named = {dots.label: dots.open for column in columns for dots in column.dots if dots.label}
    handles = [
        Line2D([], [], ls="", marker="o", ms=4, color=GREY, mfc="white" if hollow else GREY, label=label)
        for label, hollow in named.items()
    ]
    if handles:
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.17 / total), ncols=len(handles), fontsize=7,
            handletextpad=0.2, borderaxespad=0.1,
        )  # fmt: skip


def _frame(columns: Sequence[Column]) -> pd.DataFrame:
    """Return the table of what the columns show."""
    rows = []
    for column in columns:
        for dots in column.dots:
            for arm, values in zip(dots.table.index, dots.table.to_numpy(dtype=float), strict=True):
                one = (geometric_interval if column.log else seed_interval)(values)
                row = {"quantity": column.title.replace("\n", " "), "of": dots.label, "arm": arm, "n": one.n}
                seeds = {f"seed{seed}": value for seed, value in zip(dots.table.columns, values, strict=True)}
                rows.append(row | one.columns("mean") | seeds)
    return pd.DataFrame(rows)


def by_seed(rows: pd.DataFrame, y: str) -> pd.DataFrame:
    """Return the mean of column `y` over a run's rows: index arm, columns seeds."""
    return rows.groupby(["arm", "seed"], observed=True)[y].mean().unstack("seed")
