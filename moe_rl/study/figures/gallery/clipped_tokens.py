"""Share of response tokens that the clip takes out of the gradient, on a log axis with a place for zero."""

import numpy as np

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curves, pooled_tables
from moe_rl.study.figures.register import LINES, Drawing, figure
from moe_rl.study.figures.style import GREY, NothingToDraw, look_of


@figure(
    title="Clipped tokens.",
    caption=(
        "Fraction of response tokens that the clip takes out of the gradient (A > 0 and ratio above the range, or A < "
        "0 and below; with a sequence ratio every token of a clipped sequence), pooled over all updates of a step; "
        "log axis. Steps in which no seed clipped a token stand below the dotted line, at 0. An arm's clip range "
        "stands in its configuration."
    ),
    needs={"updates": ["clipped_tokens", "tokens"]},
    rank=50,
)
def clipped_tokens(data: StudyData) -> Drawing:
    tables = pooled_tables(data.updates, "clipped_tokens", "tokens", "step")
    if not tables:
        raise NothingToDraw("clipped_tokens: tokens is 0 in every update")
    means = np.concatenate([table.mean(axis=1).to_numpy(dtype=float) for table in tables.values()])
    smallest = float(np.min(means[means > 0], initial=1.0)) if (means > 0).any() else 1e-3
    decade = 10.0 ** np.floor(np.log10(smallest))
    floor = decade / 4  # the place of zero, between two powers of ten
    ylim = (floor * 0.7, 1)
    drawn = curves(data, tables, "clipped / response tokens", log=True, thin=False, floor=floor, ylim=ylim)
    zeros = False
    for ax, arms in drawn.panels:
        for arm in arms:
            if arm in tables:
                none = tables[arm].index[tables[arm].mean(axis=1) == 0]
                zeros |= len(none) > 0
                look = look_of(str(data.arms["method"][arm]))
                ax.plot(none, np.full(len(none), floor), look.marker, mfc="white", mec=look.colour, ms=3, zorder=4)
    for ax in drawn.axes if zeros else ():
        ax.axhline(decade / 2, color=GREY, lw=0.6, ls=(0, (1, 2)))
        if ax.yaxis.get_tick_params().get("labelleft", True):
            ax.annotate(
                "0", (0, floor), xycoords=("axes fraction", "data"), xytext=(-4, 0), textcoords="offset points",
                ha="right", va="center", fontsize=7,
            )  # fmt: skip
    drawn.legend()
    return Drawing(drawn.figure, drawn.frame, interval="band", notes=(LINES,))
