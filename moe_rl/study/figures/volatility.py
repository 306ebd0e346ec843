"""Final reward against routing volatility, one panel for each source of it."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from moe_rl.study.figures.saving import StudyFigure, styled
from moe_rl.study.figures.style import WIDTH, legend_above, look_of

COLUMNS = 4
APART, WIDEST = 2.0, 8.0  # points between the marks of two methods in one condition, and over all of them
LINEAR = 1.0  # %; below it the axis is linear, so that 0 has a place


@styled
def volatility_figure(table: pd.DataFrame) -> StudyFigure:
    """Mean final reward with its interval by method, against what share of the slots a condition re-routes.

    Args:
        table: columns source (a panel), condition, method, label, slots_rerouted (a share), final, low, high; rows in
            the order in which they are drawn. The conditions of a source and method are joined by a line.
    """
    sources = list(table["source"].unique())
    lines = -(-len(sources) // COLUMNS)
    drawn = Figure(figsize=(WIDTH, 0.5 + 1.75 * lines))
    axes = drawn.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for ax, source in zip(axes, sources, strict=False):
        methods = list(table[table["source"] == source].groupby("method", sort=False))
        apart = min(APART, WIDEST / len(methods))
        for i, (method, rows) in enumerate(methods):
            look, x = look_of(str(method)), 100 * rows["slots_rerouted"]
            aside = ScaledTranslation(apart * (i - (len(methods) - 1) / 2) / 72, 0, drawn.dpi_scale_trans)
            place = {"color": look.colour, "transform": ax.transData + aside}
            ax.vlines(x, rows["low"], rows["high"], lw=2.0, alpha=0.35, **place)
            style = {"lw": 0.9, "mec": "white", "mew": 0.5, "ms": 4.5, "zorder": 3, "label": rows["label"].iloc[0]}
            ax.plot(x, rows["final"], look.marker, ls=look.dash, **style, **place)
        ax.set_title(source, fontsize=7)
    for ax in axes[len(sources) :]:
        ax.set_visible(False)
    axes[0].set_xscale("symlog", linthresh=LINEAR, linscale=0.5)
    axes[0].set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes[0].set_xlim(-0.4, 100)
    axes[0].set_ylim(0, 1)
    axes[0].set_yticks(np.linspace(0, 1, 5), ["0", "", "0.5", "", "1"])
    drawn.supxlabel("slots re-routed, %", fontsize=7.5)
    drawn.supylabel("final reward", fontsize=7.5)
    legend_above(drawn, axes[: len(sources)])
    caption = (
        "Slots re-routed: by the update forward of GRPO without replay, against the old policy, pooled over all "
        "updates; where the rollout engine differs, by the engine against the training model. Mean over seeds and its "
        "95 % interval; marks of one condition stand a little apart."
    )
    return StudyFigure("volatility", "Final reward by routing volatility and its source.", caption, drawn, table)
