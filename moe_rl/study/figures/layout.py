"""The layout of panels: panels by condition while arms are few, one small panel per arm when arms are many."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from moe_rl.study.arms import condition_label, dose_label, full_label, replay_stands_for_noise
from moe_rl.study.data import StudyData
from moe_rl.study.figures.register import repeats
from moe_rl.study.figures.style import PAGE, PALE, Condition, conditions, log_y, panels
from moe_rl.study.words import cut

Limits = tuple[float | int | None, float | int | None]
TALL = 5
"""Most lines of a panel's title."""
MANY = 6
"""Most arms of one condition that can still be told apart in one panel."""


@dataclass(frozen=True)
class Shown(Condition):
    """A condition and its arms as figures show them.

    A replay run under noise that repeats its natural run, as it must, is not among `arms`; `stand_in` is the arm of
    that natural run, with all its seeds. `heading` stands over rows, `panel` over axes, in two short lines; both have
    the measured share of slots re-routed."""

    stand_in: str | None
    heading: str
    panel: str


def shown(data: StudyData) -> list[Shown]:
    """Return the conditions with the arms that figures show: natural routing first, then growing noise."""
    repeated = repeats(data)
    found = []
    for condition in conditions(data):
        arms = tuple(arm for arm in condition.arms if arm not in repeated)
        natural = replay_stands_for_noise(data, condition.noise)
        if any(data.arms["replay"][arm].lower() != "none" for arm in arms):
            natural = None  # its own replay arm is drawn
        noise = condition.noise
        panel = f"σ = {noise:g} (stress test)\n{dose_label(data, noise)}".rstrip() if noise else "natural routing"
        found.append(Shown(noise, arms, natural, condition_label(data, noise), panel))
    return [each for each in found if each.arms]


def drawn_arms(data: StudyData, present: Sequence[str] | None = None) -> list[str]:
    """Return the arms of all conditions that figures draw, restricted to those in `present` if it is given."""
    return [arm for each in shown(data) for arm in each.arms if present is None or arm in present]


def many(data: StudyData) -> bool:
    """Return whether a condition has more arms than one panel can hold, or two arms of one method, which look alike."""
    methods = data.arms["method"]
    return any(len(each.arms) > MANY or methods[list(each.arms)].duplicated().any() for each in shown(data))


def crowded(data: StudyData) -> bool:
    """Return whether a grid of quantities x conditions would be too narrow, so that arms get a row each."""
    return many(data) or len(shown(data)) > 3


def short_label(data: StudyData, arm: str, width: int = 17) -> str:
    """Return the label of an arm in at most `TALL` short lines. Its middle is left out where it is longer; a name and
    its value (`N = 4`) stay together."""
    label = full_label(data, arm).replace("Routing Replay", "Replay")
    label = label.replace("noise σ", "noise\u00a0σ").replace(" = ", "\u00a0=\u00a0")
    shorter = (cut(label, letters) for letters in (len(label), *range(TALL * width, width, -1)))
    return "\n".join(next(lines for short in shorter if len(lines := textwrap.wrap(short, width)) <= TALL))


def fixed_figure(height: float) -> Figure:
    """Return a figure whose axes are placed by hand, because a layout engine would take seconds for forty panels."""
    figure = Figure(figsize=(PAGE, height))
    figure.set_layout_engine("none")
    return figure


def condition_panels(data: StudyData, height: float, rows: int = 1) -> tuple[Figure, np.ndarray, list[Shown]]:
    """Return a figure, its axes [rows, conditions] with shared scales, and the conditions. A single row is wrapped
    after three conditions."""
    each = shown(data)
    most, sharey = (3, True) if rows == 1 else (len(each), "row")
    figure, axes = wrapped_panels(rows * len(each), most, 0.75, height, sharex=True, sharey=sharey)
    if axes.shape[1] == 1:
        figure.set_figwidth(0.8 * PAGE)
    grid = axes.reshape(1, -1)[:, : len(each)] if rows == 1 else axes
    for i, (ax, one) in enumerate(zip(grid[0], each, strict=True)):
        ax.set_title(one.panel, fontsize=7)
        if rows == 1 and i + axes.shape[1] >= len(each):  # the lowest panel of a column has the numbers
            ax.tick_params(labelbottom=True)
    return figure, grid, each


def wrapped_panels(count: int, most: int, head: float, each: float, **shared: Any) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes [lines, columns] for `count` panels, at most `most` of them side by side; axes that
    are left over are removed. `head` and `each` are inches: for legend and labels, and for a line of panels."""
    columns = min(most, count)
    lines = -(-count // columns)
    figure, axes = panels(lines, columns, head + lines * each, PAGE, **shared)
    for ax in axes.flat[count:]:
        ax.remove()
    return figure, axes


def arm_grid(data: StudyData, arms: Sequence[str], above: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with one small panel per arm, titled with the arm's label, and the axes; numbers are on the outer
    axes only. `above`: inches left free."""
    height, foot = 0.72, 0.62
    columns = min(5 if len(arms) > 8 else 4, max(2, len(arms)))
    lines = -(-len(arms) // columns)
    titles = [short_label(data, arm) for arm in arms]
    left, right, gap, head = 0.52, 0.06, 0.1, 0.1 + 0.09 * max(title.count("\n") + 1 for title in titles)
    wide = (PAGE - left - right - gap * (columns - 1)) / columns
    above += 0.06
    total = above + lines * (height + head) + foot
    figure = fixed_figure(total)
    axes: list[Axes] = []
    for i, title in enumerate(titles):
        line, column = divmod(i, columns)
        x, top = left + column * (wide + gap), total - above - line * (height + head) - head
        # axes are not shared and labels are placed by hand: the alternatives take most of the time with forty axes
        ax = figure.add_axes((x / PAGE, (top - height) / total, wide / PAGE, height / total))
        ax.set_title(title, fontsize=6, y=1.04, pad=0, linespacing=1.0)
        ax.xaxis.set_label_coords(0.5, 0)
        ax.yaxis.set_label_coords(0, 0.5)
        ax.tick_params(labelsize=6.5, labelleft=column == 0, labelbottom=i + columns >= len(arms))
        axes.append(ax)
    return figure, axes


def headroom(axes: Sequence[Axes], low: float, high: float) -> float:
    """Return the upper limit of a linear axis from `low`: `high`, or more, so that above the data a twentieth of their
    distance from `low` is free. A margin by the data's own range alone would vanish where the data are nearly
    constant."""
    top = max(ax.dataLim.y1 for ax in axes)
    return max(high, top + 0.05 * (top - low)) if np.isfinite(top) else high


def same_axes(axes: Sequence[Axes], ylim: Limits, log: bool) -> None:
    """Set one range and one set of ticks for all panels of `arm_grid`; call this when everything is drawn."""
    x, y = np.array([ax.get_xlim() for ax in axes]), np.array([ax.get_ylim() for ax in axes])
    if log:
        least = min(ax.dataLim.minposy for ax in axes)
        log = bool(np.isfinite(least))
        y = np.array([[least / 1.3, ax.dataLim.y1 * 1.3] for ax in axes]) if log else y
    low, high = (given if given is not None else found for given, found in zip(ylim, (y.min(), y.max()), strict=True))
    if not log and ylim[1] is None:
        high = headroom(axes, low, high)
    for ax in axes:
        ax.set_xlim(x.min(), x.max())
        if log:
            log_y(ax, low, high)
        else:
            ax.set_ylim(low, high)


def label_grid(
    figure: Figure, axes: Sequence[Axes], xlabel: str, ylabel: str, extra: str = "", above: float = 0.0
) -> None:
    """Write one label for all panels of `arm_grid` on either side; `above` as given to `arm_grid`; `extra` is a line
    about what is drawn in grey."""
    height = figure.get_figheight()
    right = max(ax.get_position().x1 for ax in axes)
    figure.text((0.52 / PAGE + right) / 2, 0.27 / height, xlabel, ha="center", va="center", fontsize=7.5)
    side = ylabel.replace("\n", " ")
    label = figure.text(0.1 / PAGE, 0.5 + 0.3 / height, side, ha="center", va="center", rotation=90, fontsize=7.5)
    for size in (7.5, 7, 6.5, 6, 5.5, 5):  # smaller until the label fits between the line about n and a legend
        label.set_fontsize(size)
        length = label.get_window_extent().height / figure.dpi
        if length <= height - above - 0.18:
            break
    label.set_y(min(0.5 + 0.3 / height, 1 - (length / 2 + above + 0.03) / height))
    if extra:
        figure.text(0.992, 0.27 / height, extra, ha="right", va="center", fontsize=6.5, color="#6b6b6b")


def grey_background(figure: Figure, axes: Sequence[Axes], lines: dict[str, pd.Series]) -> None:
    """Draw the lines of all arms in grey behind every panel. They are drawn once, as a picture that each panel shows:
    as a vector in every panel they would be most of the file. Axis limits and scales must be final."""
    first = axes[0]
    box = first.get_position()
    size = box.width * figure.get_figwidth(), box.height * figure.get_figheight()
    small = Figure(figsize=size, dpi=220, facecolor="none")
    small.set_layout_engine("none")
    canvas = FigureCanvasAgg(small)
    ax = small.add_axes((0, 0, 1, 1), facecolor="none")
    ax.set(xscale=first.get_xscale(), yscale=first.get_yscale())
    ax.set(xlim=first.get_xlim(), ylim=first.get_ylim())
    ax.axis("off")
    paths = [np.column_stack([s.index.to_numpy(float), s.to_numpy(float)]) for s in lines.values()]
    ax.add_collection(LineCollection(paths, colors=PALE, linewidths=0.5, antialiaseds=False), autolim=False)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba()).copy()
    picture[..., 3] = np.where(picture[..., 3] > 0, 120, 0)  # pale on a white and on a dark page
    for panel in axes:
        shown = AxesImage(panel, extent=(0, 1, 0, 1), interpolation="nearest", zorder=0.5)
        shown.set_data(picture)
        shown.set_transform(panel.transAxes)
        panel.add_artist(shown)  # imshow would set the axis limits to those of the picture
