"""Clustering of routing changes, against independence: sites changed on one token, slots changed at one site."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_levels, floor_note
from moe_rl.study.figures.layout import MANY, drawn_arms, many, short_label
from moe_rl.study.figures.register import PROBE, Drawing, figure
from moe_rl.study.figures.routing import binomial_of, stacked
from moe_rl.study.figures.rows import Column, Dots, arm_rows, by_seed
from moe_rl.study.figures.style import GREY, INK, PAGE, NothingToDraw, arm_colour, legend_above, log_y, panels
from moe_rl.study.floors import MISSING, floor_histogram
from moe_rl.study.summary import last_updates, noise_floor

HISTOGRAMS = {
    "flips_histogram": ("sites changed\non a token", "share of tokens"),
    "deviation_histogram": ("slots changed\nat a site", "share of sites"),
}


@figure(
    title="Flips per token and slots per site.",
    caption=(
        "After the last update of each step, pooled over steps and seeds; log axis. Circles: the binomial with the "
        "same mean, which independent flips of one rate would follow. “Variance ×”: variance of flips per token over "
        "that of independent sites with their own rates, mean over probes; above 1, flips cluster on tokens."
    ),
    needs={"probes": ["flips_histogram", "deviation_histogram"]},
    rank=90,
    notes=(PROBE,),
)
def flips_per_token(data: StudyData) -> Drawing:
    rows = last_updates(data.probes.dropna(subset=list(HISTOGRAMS)))
    arms = drawn_arms(data, list(rows["arm"].unique()))
    floors = {name: floor_histogram(data, name) for name in HISTOGRAMS}
    parts = [
        pd.DataFrame({"histogram": name, "arm": f"floor, {variant}", "value": table.index, "share": table[variant]})
        for name, table in floors.items()
        for variant in table
    ]
    sums = {
        (name, arm): np.nansum(stacked(rows.loc[rows["arm"] == arm, name], "flips_per_token"), axis=0)
        for name in HISTOGRAMS
        for arm in arms
    }
    arms = [arm for arm in arms if all(sums[name, arm].any() for name in HISTOGRAMS)]
    if not arms:
        raise NothingToDraw("flips_per_token: no arm has tokens in flips_histogram and sites in deviation_histogram")
    counted = {(name, arm): _counts(sums[name, arm]) for name in HISTOGRAMS for arm in arms}
    parts += [table.assign(histogram=name, arm=arm) for (name, arm), table in counted.items()]
    frame = pd.concat(parts)
    floor = floor_note(noise_floor(data), "Dashes: noise floor" if len(floors["flips_histogram"]) else "Noise floor")
    said = (floor or MISSING.format("of flips")).strip()
    if (many(data) or len(arms) > 2 * MANY) and "overdispersion" in rows:
        dots = Dots(by_seed(rows, "overdispersion"))
        spreads = Column("variance of flips per token\n/ that of independent sites", [dots], lines=(1,))
        few = "Of many arms only “variance ×” is drawn; the histograms are in the table."
        return Drawing(arm_rows(data, [spreads]).figure, frame, f"{few} {said}", interval="bar")
    columns = min(4, len(arms))
    lines = 2 * -(-len(arms) // columns)
    drawn, axes = panels(lines, columns, 0.6 + 1.35 * lines, PAGE)
    for i, arm in enumerate(arms):
        line, place = 2 * (i // columns), i % columns
        colour = arm_colour(data, arm)
        for k, name in enumerate(HISTOGRAMS):
            _histogram(axes[line + k, place], counted[name, arm], floors[name], colour)
            axes[line + k, place].tick_params(labelleft=place == 0)
        ax = axes[line, place]
        ax.set_title(short_label(data, arm), fontsize=7)
        spread = rows.loc[rows["arm"] == arm, "overdispersion"].mean() if "overdispersion" in rows else np.nan
        if np.isfinite(spread):
            ax.text(0.97, 0.97, f"variance ×{spread:.2g}", transform=ax.transAxes, ha="right", va="top", fontsize=6.5)
    for k, (name, (below, beside)) in enumerate(HISTOGRAMS.items()):
        seen = frame[(frame["histogram"] == name) & (frame["count"] > 0)]["share"]
        for line in axes[k::2]:
            line[0].set_ylabel(beside)
            for ax in line:
                if ax.has_data():
                    ax.set_ylim(float(seen.min()) / 3, 1.5)
                    log_y(ax)
                    ax.set_xlabel(below, fontsize=7)
                else:
                    ax.remove()
    legend_above(drawn, [ax for ax in axes.flat if ax.figure], [Patch(color=GREY, label="observed")])
    return Drawing(drawn, frame, said)


def _counts(counts: np.ndarray) -> pd.DataFrame:
    """Return a histogram's counts and shares, and the shares of a binomial with the same mean."""
    counts = counts.astype(float)
    shares = {"value": np.arange(len(counts)), "count": counts, "share": counts / counts.sum()}
    return pd.DataFrame({**shares, "binomial": binomial_of(counts)})


def _histogram(ax: Axes, table: pd.DataFrame, floor: pd.DataFrame, colour: str) -> None:
    """Draw a histogram with its binomial and its noise floor."""
    ax.bar(table["value"], table["share"], color=colour, width=0.72)
    ax.plot(table["value"], table["binomial"], "o--", color=INK, mfc="white", lw=0.9, ms=3, label="if independent")
    draw_levels(ax, floor[floor.index > 0])
    ax.set_xticks(table["value"].to_numpy()[:: max(1, len(table) // 5)])
