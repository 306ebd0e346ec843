"""The density of old against new token probabilities, natural above, replayed below."""

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import drawn_arms, many, short_label
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import GREY, PAGE, panels
from moe_rl.study.summary import last_updates

EDGES = np.linspace(0, 1, 41)
# the scale begins with a middle tone, so that one token is seen on a white and on a dark page
SCALE = LinearSegmentedColormap.from_list("tokens", ["#7fa8d1", "#3d7ab8", "#7b4fa0", "#c2387a", "#f08a24", "#ffd84d"])


@figure(
    title="Token probability, old against new.",
    caption=(
        "Probability of each stored response token under the old policy and after the last update of its step, with "
        "live routing and with the old routes forced on the same weights; all stored steps and seeds; log colour. "
        "|Δp|: mean absolute difference."
    ),
    needs={"tokens": ["old_logp", "logp_natural", "logp_replayed", "update"]},
    rank=150,
)
def probability_scatter(data: StudyData) -> Drawing:
    tokens = last_updates(data.tokens.dropna(subset=["old_logp", "logp_natural", "logp_replayed"]))
    arms = drawn_arms(data, list(tokens["arm"].unique()))
    gaps = _gaps(tokens)
    if many(data) or len(arms) > 8:
        dots = [Dots(gaps["natural"], "natural"), Dots(gaps["replayed"], "replayed", open=True)]
        rows = arm_rows(data, [Column("mean |Δp| of a token", dots)])
        rows.axes[0].set_xlim(left=0)
        said = "Of many arms only |Δp| is drawn."
        return Drawing(rows.figure, rows.frame, said, interval="bar")
    grids = {}
    for arm in arms:
        of_arm = tokens[tokens["arm"] == arm]
        old = np.exp(of_arm["old_logp"])
        for kind in ("natural", "replayed"):
            grids[arm, kind] = np.histogram2d(old, np.exp(of_arm[f"logp_{kind}"]), bins=[EDGES, EDGES])[0]
    columns = min(4, len(arms))
    lines = -(-len(arms) // columns)
    height = 0.45 + lines * (2 * 0.86 * PAGE / max(columns, 3) + 0.35)
    drawn, axes = panels(2 * lines, columns, height, PAGE, sharex=True, sharey=True)
    norm = LogNorm(1, max(2.0, max(grid.max() for grid in grids.values())))
    parts = []
    for (arm, kind), grid in grids.items():
        i = arms.index(arm)
        ax = axes[2 * (i // columns) + (kind == "replayed"), i % columns]
        shown = np.where(grid.T > 0, grid.T, np.nan)
        mesh = ax.imshow(shown, origin="lower", extent=(0, 1, 0, 1), cmap=SCALE, norm=norm, interpolation="nearest")
        ax.grid(False)
        ax.plot([0, 1], [0, 1], color=GREY, lw=0.5)
        ax.text(0.04, 0.96, f"|Δp| {gaps[kind].loc[arm].mean():.3f}", transform=ax.transAxes, va="top", fontsize=6.5)
        ax.set_xticks([0, 0.5, 1], ["0", ".5", "1"])
        ax.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
        if kind == "natural":
            ax.set_title(short_label(data, arm), fontsize=7)
        x, y = np.nonzero(grid)
        cells = {"old_from": EDGES[x], "new_from": EDGES[y], "tokens": grid[x, y]}
        parts.append(pd.DataFrame({"arm": arm, "routing": kind, **cells}))
    for k, row in enumerate(axes):
        row[0].set_ylabel(f"{'replayed' if k % 2 else 'natural'}\nnew probability")
        for ax in row:
            if not ax.has_data():
                ax.remove()
    for ax in axes[-1]:
        ax.set_xlabel("old probability")
    alive = [ax for ax in axes.flat if ax.figure]
    drawn.colorbar(mesh, ax=alive, shrink=0.8, aspect=28, pad=0.02, label="tokens per cell").outline.set_visible(False)
    return Drawing(drawn, pd.concat(parts))


def _gaps(tokens: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return for each kind the mean absolute difference of probability: index arm, columns seeds."""
    old, run = np.exp(tokens["old_logp"]), [tokens["arm"].astype(str), tokens["seed"]]
    gaps = {kind: (np.exp(tokens[f"logp_{kind}"]) - old).abs() for kind in ("natural", "replayed")}
    return {kind: gap.groupby(run).mean().unstack("seed") for kind, gap in gaps.items()}
