"""Figures over several studies; each draws a table that a script of `analysis/` makes."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures.saving import StudyFigure, save_figure, styled
from moe_rl.study.figures.style import GREY, INK, PAGE, WIDTH, legend_above, log_x, log_y, look_of, panels, twin
from moe_rl.study.statistics import INTEREST, Verdict

ROW = 0.24  # inches: height of a method's row
REPEATED = 0.27  # of a row's height: distance of the repetitions of a cell, less if there are more than three
REPETITIONS = (
    "Mean over seeds of the paired differences and its 95 % interval; below each other: the study as it was run first, "
    "and again under other roundings or on another processor, cold starts made anew."
)


def draw_from_results(doc: str | None, figures: Callable[[], Iterable[StudyFigure]]) -> None:
    """Run the command line of a script that draws committed tables, `python analysis/SCRIPT.py DIR`; `doc`: its
    help."""
    with ends_with_its_reader():
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("folder", type=Path, help="where to write each figure as .pdf, .svg, .png and .csv")
        folder = parser.parse_args().folder
        for figure in figures():
            print(*save_figure(figure, folder), sep="\n")


def by_cause(table: pd.DataFrame, causes: Iterable[str], rows: Iterable[str]) -> pd.DataFrame:
    """Return `published_differences` in the form that `cures_figure` takes: claims are causes, comparisons rows, in
    this order."""
    table = table.rename(columns={"claim": "cause", "comparison": "row"})
    orders = {"cause": list(causes), "row": list(rows)}
    return table.assign(**{name: pd.Categorical(table[name], order) for name, order in orders.items()})


@styled
def cures_figure(
    table: pd.DataFrame,
    name: str = "cures",
    title: str = "What each method gives back, by cause.",
    measured: str = "final reward less that of GRPO under the same cause",
    caption: str = "Columns are of different studies, and cells of one column may be of different seeds.",
    one_scale: bool = True,
) -> StudyFigure:
    """Draw differences of final reward with their intervals: a panel for each cause, and in all panels the same rows.

    Args:
        table: columns cause (a panel) and row (a method, a task), both categorical in the order in which they are
            drawn; difference, low, high, verdict. Several rows of a cell, repetitions, are drawn below each other.
        name, title: those of the figure; measured: the name of its axis; caption: the end of its caption.
        one_scale: whether all panels have the same range.
    """
    causes, names = (list(table[column].cat.categories) for column in ("cause", "row"))
    drawn, (axes,) = panels(1, len(causes), 1.12 + ROW * len(names), WIDTH, sharex=one_scale, sharey=True)
    narrow = len(causes) > 6
    for ax, cause in zip(axes, causes, strict=True):
        rows = table[table["cause"] == cause]
        ax.xaxis.set_major_locator(MaxNLocator(3))
        _differences(ax, rows, rows["row"].map(names.index).astype(float), "row")
        ax.set_title(cause, fontsize=6.2 if narrow else 7)
        if narrow:
            ax.tick_params(axis="x", labelsize=5.5)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    drawn.supxlabel(f"{measured}\n{_marks_explained(table)}", fontsize=7.5)
    marks = "Filled: higher or lower by the rules of its study, that is resolved from 0 and 0.05 at least; open: not"
    caption = f"{REPETITIONS} {marks}; blank: not run. {caption}"
    return StudyFigure(name, title, caption, drawn, table)


@styled
def claims_figure(
    table: pd.DataFrame,
    name: str = "claims",
    title: str = "What final rewards say of the papers' statements.",
    measured: str = "difference of final reward",
    caption: str = f"{REPETITIONS} Filled: higher or lower by the rules of its study; open: not.",
    interest: float = INTEREST,
) -> StudyFigure:
    """Draw differences of final reward with their intervals, under the statement that each difference is about.

    Args:
        table: columns claim, comparison (a row below its claim), difference, low, high, verdict; rows in the
            order in which they are drawn. Several rows of a comparison, repetitions, are drawn below each other.
        name, title, caption: those of the figure; measured: the name of its axis.
        interest: the smallest difference of interest, in units of reward.
    """
    lines: list[tuple[str, str]] = []
    for claim, rows in table.groupby("claim", sort=False):
        lines += [(str(claim), ""), *((str(claim), str(name)) for name in rows["comparison"].unique())]
    drawn, ((ax,),) = panels(1, 1, 0.9 + ROW * len(lines), WIDTH)
    cell = pd.Series(list(zip(table["claim"], table["comparison"], strict=True)), index=table.index)
    ax.axvspan(-interest, interest, color=GREY, alpha=0.15, lw=0, zorder=0)
    _differences(ax, table.assign(cell=cell), cell.map(lines.index).astype(float), "cell")
    ax.set_yticks(range(len(lines)), [comparison or claim for claim, comparison in lines])
    for label, (_, comparison) in zip(ax.get_yticklabels(), lines, strict=True):
        label.set_fontweight("normal" if comparison else "bold")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_xlabel(measured)
    marks = f"{_marks_explained(table)}; grey: within {interest}"
    drawn.supxlabel(marks, x=0.008, ha="left", fontsize=6.5, color=GREY)
    caption = f"{caption} Grey: within {interest}, the smallest difference of interest."
    return StudyFigure(name, title, caption, drawn, table)


def _marks_explained(table: pd.DataFrame) -> str:
    """Return what bars and filled marks mean, for the picture itself, which may be shown without its caption."""
    words = "bar: 95 % interval over seeds"
    return f"{words}; filled: higher or lower by the rules of its study" if _has_direction(table).any() else words


def _has_direction(table: pd.DataFrame) -> pd.Series:
    """Return for each row whether its verdict is higher or lower."""
    return table["verdict"].isin([Verdict.HIGHER, Verdict.LOWER])


def _differences(ax: Axes, rows: pd.DataFrame, places: pd.Series, cell: str) -> None:
    """Draw means and intervals at the height `places` of their `cell`; rows of one cell are repetitions, drawn below
    each other."""
    repetition = rows.groupby(cell, observed=True, sort=False)
    size = repetition["difference"].transform("size")
    places = places + REPEATED * (3 / size).clip(upper=1) * (repetition.cumcount() - (size - 1) / 2)
    ax.axvline(0, color=INK, lw=0.8, zorder=1)
    ax.hlines(places, rows["low"], rows["high"], color=GREY, lw=1.6, alpha=0.5, zorder=2)
    fill = [INK if one else "white" for one in _has_direction(rows)]
    ax.scatter(rows["difference"], places, s=11, c=fill, edgecolors=INK, linewidths=0.8, zorder=3)


SIGNALS = {"update": "#D55E00", "probe": "#0B4A8F", "rollout": INK}
"""Kind of the rows that a signal is read from -> the signal's colour."""


def _signal_panels(
    table: pd.DataFrame, order: list[str], of_updates: tuple[str, ...], nothing: float, height: float
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]], list[str]]:
    """Return a figure with a panel for each number of steps and a row for each signal of `order`, each axes with its
    rows of the table, and the colours of the signals. A line at `nothing` is where a signal tells nothing."""
    steps = table["steps"].unique()
    drawn, (axes,) = panels(1, len(steps), height, PAGE, sharey=True)
    for ax, step in zip(axes, steps, strict=True):
        ax.axvline(nothing, color=INK, lw=0.8, zorder=1)
        ax.set_title(f"after {step} steps", fontsize=7)
        ax.tick_params(axis="y", length=0)
        ax.spines[["left", "right", "top"]].set_visible(False)
    axes[0].set_yticks(range(len(order)), order, fontsize=6.5)
    axes[0].set_ylim(-0.6, len(order) - 0.4)
    rows = [table[table["steps"] == step].set_index("signal").reindex(order) for step in steps]
    kinds = {"reward": "rollout"} | dict.fromkeys(of_updates, "update")
    return drawn, list(zip(axes, rows, strict=True)), [SIGNALS[kinds.get(name, "probe")] for name in order]


def _kinds_legend(drawn: Figure, ax: Axes, colours: list[str], others: Sequence[PathCollection] = ()) -> None:
    """Draw a legend of the kinds of rows that signals are read from, after the marks `others`."""
    marks = [
        ax.scatter([], [], c=colour, s=14, label=f"of {name}s") for name, colour in SIGNALS.items() if colour in colours
    ]
    columns = 2 if others else len(marks)
    drawn.legend(handles=[*others, *marks], loc="outside upper right", ncols=columns, fontsize=6.5, frameon=False)


@styled
def early_warning_figure(table: pd.DataFrame, of_updates: tuple[str, ...], level: float = 0.95) -> StudyFigure:
    """Draw the area under the ROC curve by signal, one panel for each number of steps; signals in the order of the
    first panel.

    Args:
        table: what `early_warning` returns.
        of_updates: the signals that are read from updates; all others but the reward are read from probes.
        level: the confidence level of the intervals.
    """
    first = table[table["steps"] == table["steps"].iloc[0]].set_index("signal")["auc"]
    order = list((first - 0.5).abs().sort_values().index)
    places = np.arange(len(order))
    height = 0.8 + 0.17 * max(len(order), 4)
    drawn, panels, colours = _signal_panels(table, order, of_updates, nothing=0.5, height=height)
    for ax, rows in panels:
        ax.hlines(places, rows["auc_low"], rows["auc_high"], colors=colours, lw=3, alpha=0.35)
        ax.scatter(rows["auc"], places, c=colours, s=14, zorder=3)
        ax.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "0.5", "1"])
    runs, bad = int(table["runs"].max()), int(table["bad"].max())
    drawn.supxlabel(
        f"area under the ROC curve (0.5: it tells nothing)\n{runs} runs, {bad} ended badly; bar: {100 * level:g} % "
        "bootstrap over cold starts",
        fontsize=7,
    )
    _kinds_legend(drawn, panels[0][0], colours)
    caption = (
        "How well the mean of a signal over a run's first steps tells whether it will fail, end below its start or "
        "collapse. Below 0.5 a signal falls before a bad end. Signals of updates are of the ratio as it was used; "
        "signals of probes are of live routing."
    )
    return StudyFigure("early_warning", "Which signal warns first.", caption, drawn, table)


@styled
def beyond_reward_figure(table: pd.DataFrame, of_updates: tuple[str, ...], level: float = 0.95) -> StudyFigure:
    """Draw the correlation of signals of the first steps with the final reward among the runs of one arm, and what
    remains of the correlation if the reward of these steps is held fixed; one panel for each number of steps.

    Args:
        table: what `early_warning` returns, of studies that kept the reward.
        of_updates, level: as in `early_warning_figure`.
    """
    first = table[table["steps"] == table["steps"].iloc[0]].set_index("signal")["beyond_reward"]
    order = [*first.dropna().abs().sort_values().index, "reward"]
    places = np.arange(len(order))
    drawn, panels, colours = _signal_panels(table, order, of_updates, nothing=0.0, height=0.9 + 0.19 * len(order))
    for ax, rows in panels:
        for name, height, face in (("correlation_within", 0.16, "white"), ("beyond_reward", -0.16, None)):
            ax.hlines(places + height, rows[f"{name}_low"], rows[f"{name}_high"], colors=colours, lw=2, alpha=0.3)
            ax.scatter(rows[name], places + height, c=face or colours, edgecolors=colours, s=12, lw=0.8, zorder=3)
        ax.set(xlim=(-1, 1), xticks=[-1, -0.5, 0, 0.5, 1], xticklabels=["−1", "−0.5", "0", "0.5", "1"])
    drawn.supxlabel(
        f"rank correlation with the final reward among the runs of one arm\n{int(table['runs'].max())} runs; "
        f"bar: {100 * level:g} % bootstrap over cold starts",
        fontsize=7,
    )
    shapes = [
        panels[0][0].scatter([], [], c=face, edgecolors=GREY, s=12, lw=0.8, label=label)
        for face, label in (("white", "by itself"), (GREY, "with the reward of these steps held fixed"))
    ]
    _kinds_legend(drawn, panels[0][0], colours[:-1], shapes)
    caption = (
        "Spearman's correlation of the mean of a signal over a run's first steps with its final reward, among the runs "
        "of one arm (mean over arms): by itself, and the partial correlation given the training reward of the same "
        "steps. A signal whose second interval holds 0 was not seen to warn of more than the reward itself does."
    )
    title = "What signals of the first steps tell beyond the reward of these steps."
    return StudyFigure("beyond_reward", title, caption, drawn, table)


@styled
def gradients_figure(table: pd.DataFrame) -> StudyFigure:
    """Draw how a method changes the largest gradient norm of a run, against that norm without the method.

    Args:
        table: columns method (a panel), without (the median run's largest norm without the method), and the ratio of
            the norms with and without the method: ratio, low, high; one row per pair of arms.
    """
    methods = list(table["method"].unique())
    drawn, (axes,) = panels(1, len(methods), 2.6, PAGE, sharex=True, sharey=True)
    for ax, method in zip(axes, methods, strict=True):
        rows = table[table["method"] == method]
        ax.axhline(1, color=INK, lw=0.8, zorder=1)
        ax.vlines(rows["without"], rows["low"], rows["high"], color=GREY, lw=1.4, alpha=0.4, zorder=2)
        told = (rows["high"] < 1) | (rows["low"] > 1)
        fill = [INK if one else "white" for one in told]
        ax.scatter(rows["without"], rows["ratio"], s=11, c=fill, edgecolors=INK, linewidths=0.8, zorder=3)
        below, resolved = (rows["ratio"] < 1).sum(), (rows["high"] < 1).sum()
        ax.set_title(f"{method}\n{below} of {len(rows)} below 1,\n{resolved} with the bar", fontsize=7)
    log_x(axes[0])
    log_y(axes[0])
    axes[0].set_ylabel("with the method, over without it")
    drawn.supxlabel("largest gradient norm of the median run without the method\nbar: 95 % interval", fontsize=7.5)
    caption = (
        "Each mark is a pair of arms of one study that differ in the method alone; the ratio is a geometric mean over "
        "seeds with Student's 95 % interval. Filled: the interval is without 1. Pairs that share cold starts or runs "
        "are no independent evidence; nothing corrects the intervals for their number."
    )
    title = "Largest gradient norm of a run, with a method over without it."
    return StudyFigure("gradients", title, caption, drawn, table)


COLUMNS = 3
APART, WIDEST = 2.0, 8.0  # points: between the marks of two methods in one condition, and over all marks
LINEAR = 1.0  # %; below it the axis is linear, so that 0 has a place


@styled
def volatility_figure(table: pd.DataFrame, measured: str = "final reward") -> StudyFigure:
    """Draw the mean final reward with its interval by method, against the share of slots that a condition re-routes.

    Args:
        table: columns source (a panel), condition, method, label, slots_rerouted (a share), final, low, high; rows in
            the order in which they are drawn. The conditions of a source and label are joined by a line; labels of one
            method share its colour and differ in dash and marker.
        measured: the name of the axis of rewards.
    """
    sources = list(table["source"].unique())
    lines = -(-len(sources) // COLUMNS)
    drawn, grid = panels(lines, COLUMNS, 0.5 + 1.75 * lines, WIDTH, sharex=True, sharey=True)
    axes = grid.ravel()
    known = table.drop_duplicates("label")
    number = known.groupby("method", sort=False).cumcount()
    looks = {
        label: twin(look_of(str(method)), int(twins))
        for label, method, twins in zip(known["label"], known["method"], number, strict=True)
    }
    for ax, source in zip(axes, sources, strict=False):
        lines_of = list(table[table["source"] == source].groupby("label", sort=False))
        apart = min(APART, WIDEST / len(lines_of))
        for i, (label, rows) in enumerate(lines_of):
            look, x = looks[label], 100 * rows["slots_rerouted"]
            aside = ScaledTranslation(apart * (i - (len(lines_of) - 1) / 2) / 72, 0, drawn.dpi_scale_trans)
            place = {"color": look.colour, "transform": ax.transData + aside}
            ax.vlines(x, rows["low"], rows["high"], lw=2.0, alpha=0.35, **place)
            style = {"lw": 0.9, "mec": "white", "mew": 0.5, "ms": 4.5, "zorder": 3, "label": label}
            ax.plot(x, rows["final"], look.marker, ls=look.dash, **style, **place)
        ax.set_title(source, fontsize=7)
    for ax in axes[len(sources) :]:
        ax.set_visible(False)
    for ax in axes[: len(sources)][-COLUMNS:]:  # the lowest of each column
        ax.tick_params(labelbottom=True)
    axes[0].set_xscale("symlog", linthresh=LINEAR, linscale=0.5)
    axes[0].set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes[0].set_xlim(-0.4, 100)
    axes[0].set_ylim(0, 1)
    axes[0].set_yticks(np.linspace(0, 1, 5), ["0", "", "0.5", "", "1"])
    drawn.supxlabel("slots re-routed, %\nbar: 95 % interval over seeds", fontsize=7.5)
    drawn.supylabel(measured, fontsize=7.5)
    legend_above(drawn, axes[: len(sources)])
    caption = (
        "Slots re-routed: by the update forward of GRPO without replay, against the old policy, pooled over all "
        "updates; where the rollout engine differs, by the engine against the training model. Mean over seeds and its "
        "95 % interval; marks of one condition stand a little apart."
    )
    return StudyFigure("volatility", "Final reward by routing volatility and its source.", caption, drawn, table)
