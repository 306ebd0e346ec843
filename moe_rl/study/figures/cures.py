"""What each method gives back of what a cause costs GRPO: causes side by side, a row for each method."""

import pandas as pd
from matplotlib.figure import Figure

from moe_rl.study.figures.saving import StudyFigure, styled
from moe_rl.study.figures.style import GREY, INK, WIDTH
from moe_rl.study.statistics import Verdict

ROW = 0.24  # inches
APART = 0.27  # of a row: repetitions of a cell


@styled
def cures_figure(table: pd.DataFrame) -> StudyFigure:
    """Final reward of each method less that of GRPO under the same cause, with its interval.

    Args:
        table: columns cause (a panel), method (a row), both categorical in the order in which they are drawn;
            difference, low, high, verdict. Several rows of a cell, repetitions, are drawn below each other.
    """
    causes, methods = (list(table[name].cat.categories) for name in ("cause", "method"))
    drawn = Figure(figsize=(WIDTH, 1.0 + ROW * len(methods)))
    axes = drawn.subplots(1, len(causes), sharex=True, sharey=True, squeeze=False)[0]
    for ax, cause in zip(axes, causes, strict=True):
        rows = table[table["cause"] == cause]
        repetition = rows.groupby("method", observed=True)
        below = repetition.cumcount() - (repetition["difference"].transform("size") - 1) / 2
        places = rows["method"].map(methods.index).astype(float) + APART * below
        told = rows["verdict"].isin([Verdict.HIGHER, Verdict.LOWER])
        ax.axvline(0, color=INK, lw=0.8, zorder=1)
        ax.hlines(places, rows["low"], rows["high"], color=GREY, lw=1.6, alpha=0.5, zorder=2)
        fill = [INK if one else "white" for one in told]
        ax.scatter(rows["difference"], places, s=11, c=fill, edgecolors=INK, linewidths=0.8, zorder=3)
        ax.set_title(cause, fontsize=7)
        ax.grid(axis="y", visible=False)
    axes[0].set_xticks([-0.25, 0, 0.25], ["−.25", "0", ".25"])
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    drawn.supxlabel("final reward less that of GRPO under the same cause", fontsize=7.5)
    caption = (
        "Mean over seeds of the paired differences and its 95 % interval; below each other: the study as it was run "
        "first, and again under other roundings or on another processor, cold starts made anew. Filled: higher or "
        "lower by the rules of its study, that is told from 0 and 0.05 at least; open: not; blank: not run. Columns "
        "are of different studies, and cells of one column may be of different seeds."
    )
    return StudyFigure("cures", "What each method gives back, by cause.", caption, drawn, table)
