"""The table of `moe_rl.study.early_warning` as a picture."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moe_rl.study.figures.saving import StudyFigure, styled
from moe_rl.study.figures.style import INK, PAGE

COLOURS = {"update": "#D55E00", "probe": "#0B4A8F"}


@styled
def early_warning_figure(table: pd.DataFrame, of_updates: tuple[str, ...]) -> StudyFigure:
    """Area under the ROC curve by signal, one panel for each number of steps; signals in the order of the first panel.

    Args:
        table: what `early_warning` returns.
        of_updates: its signals that are read from updates; the others are a probe's.
    """
    steps = list(table["steps"].unique())
    first = table[table["steps"] == steps[0]].set_index("signal")["auc"]
    order = list((first - 0.5).abs().sort_values().index)
    drawn = Figure(figsize=(PAGE, 0.8 + 0.17 * len(order)))
    axes = drawn.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    for ax, step in zip(axes, steps, strict=True):
        rows = table[table["steps"] == step].set_index("signal").reindex(order)
        colours = [COLOURS["update" if name in of_updates else "probe"] for name in order]
        places = np.arange(len(order))
        ax.hlines(places, rows["auc_low"], rows["auc_high"], colors=colours, lw=3, alpha=0.35)
        ax.scatter(rows["auc"], places, c=colours, s=14, zorder=3)
        ax.axvline(0.5, color=INK, lw=0.8, zorder=1)
        ax.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0", "0.5", "1"])
        ax.set_title(f"after {step} steps", fontsize=7)
        ax.tick_params(axis="y", length=0)
        ax.spines[["left", "right", "top"]].set_visible(False)
    axes[0].set_yticks(range(len(order)), order, fontsize=6.5)
    axes[0].set_ylim(-0.6, len(order) - 0.4)
    runs, bad = int(table["runs"].max()), int(table["bad"].max())
    drawn.supxlabel(
        f"area under the ROC curve (0.5: it tells nothing)\n{runs} runs, {bad} ended badly; bar: 95 % bootstrap over "
        "cold starts",
        fontsize=7,
    )
    marks = [axes[0].scatter([], [], c=colour, s=14, label=f"of {name}s") for name, colour in COLOURS.items()]
    drawn.legend(handles=marks, loc="outside upper right", ncols=2, fontsize=6.5, frameon=False)
    caption = (
        "How well the mean of a signal over a run's first steps tells whether it will fail, end below its start or "
        "collapse. Below 0.5 a signal falls before a bad end. Signals of updates are of the ratio as it was used; "
        "signals of probes are of live routing."
    )
    return StudyFigure("early_warning", "Which signal warns first.", caption, drawn, table)
