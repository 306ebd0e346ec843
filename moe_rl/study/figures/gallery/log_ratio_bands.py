"""Quantiles of |log r| against the step: live routing as shades, replay as lines."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import MANY, drawn_arms, many, short_label, wrapped_panels
from moe_rl.study.figures.register import PAIR, Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import GREY, INK, NothingToDraw, arm_colour, log_y, step_axis
from moe_rl.study.summary import last_updates

QUANTILES = (0.5, 0.9, 0.99)


@figure(
    title="Quantiles of the size of the token log-ratio.",
    caption=(
        "After the last update of the stored steps: size |log r| that 50 %, 90 % and 99 % of the response tokens stay "
        "below, quantiles of each seed; live routing, and the same tokens and weights replayed."
    ),
    needs={"tokens": ["old_logp", "logp_natural", "logp_replayed", "update"]},
    rank=130,
    notes=(PAIR,),
)
def log_ratio_bands(data: StudyData) -> Drawing:
    tokens = last_updates(data.tokens.dropna(subset=["old_logp", "logp_natural", "logp_replayed"]))
    found = []
    for kind in ("natural", "replayed"):
        size = (tokens[f"logp_{kind}"] - tokens["old_logp"]).abs()
        of_seed = size.groupby([tokens["arm"], tokens["step"], tokens["seed"]], observed=True)
        table = of_seed.quantile(np.array(QUANTILES)).unstack()
        found.append(table.assign(n=of_seed.size(), routing=kind).reset_index())
    by_seed = pd.concat(found, ignore_index=True)
    grouped = by_seed.groupby(["arm", "step", "routing"], observed=True)
    medians = grouped[list(QUANTILES)].median().assign(n=grouped["n"].sum()).reset_index()
    if not (medians[0.99] > 0).any():
        raise NothingToDraw("log_ratio_bands: every log-ratio is 0, the policies did not move")
    frame = medians.rename(columns={q: f"quantile_{q:g}" for q in QUANTILES})
    arms = drawn_arms(data, list(frame["arm"].unique()))
    if many(data) or len(arms) > 2 * MANY:
        return _rows(data, by_seed, frame)
    titles = max(short_label(data, arm).count("\n") for arm in arms)
    drawn, axes = wrapped_panels(len(arms), 4, 0.7, 1.6 + 0.1 * max(0, titles - 2), sharex=True, sharey=True)
    for ax, arm in zip(axes.flat, arms, strict=False):
        of = {str(kind): part.set_index("step") for kind, part in medians[medians["arm"] == arm].groupby("routing")}
        _bands(ax, of, arm_colour(data, arm))
        ax.set_title(short_label(data, arm), fontsize=7)
    values = medians[list(QUANTILES)].to_numpy(dtype=float)
    axes[0, 0].set_ylim(max(float(values[values > 0].min()) / 2, 1e-6), float(values.max()) * 2)
    log_y(axes[0, 0])
    for i, ax in enumerate(axes.flat[: len(arms)]):
        lowest = i + axes.shape[1] >= len(arms)
        ax.xaxis.set_tick_params(labelbottom=lowest)
        if lowest:
            step_axis(ax)
            ax.xaxis.get_major_locator().set_params(nbins=4)
    for ax in axes[:, 0]:
        ax.set_ylabel("|log r|, nats")
    shades = [Patch(color=GREY, alpha=alpha, label=label) for alpha, label in ((0.5, "50–90 %"), (0.25, "90–99 %"))]
    dashed = Line2D([], [], color=INK, lw=0.9, ls=(0, (3, 1.5)), label="50, 90, 99 %, replayed")
    drawn.legend(handles=[*shades, dashed], loc="outside upper left", ncols=3, borderaxespad=0.3)
    said = (
        "Median over seeds; log axis. Shades: live routing; dashed: replayed. A line below the axis is less than a "
        "millionth."
    )
    return Drawing(drawn, frame, said)


def _bands(ax: Axes, of: dict[str, pd.DataFrame], colour: str) -> None:
    """Draw shades between the quantiles of live routing, and lines at the quantiles under replay."""
    for kind, table in of.items():
        if len(table) == 1:  # one stored step, made wide enough for a band
            table = pd.concat([table.set_index(table.index - 0.4), table.set_index(table.index + 0.4)])
        x = table.index.to_numpy(dtype=float)
        sizes = table[list(QUANTILES)].clip(lower=1e-9)
        if kind == "natural":
            ax.fill_between(x, sizes[0.5], sizes[0.9], color=colour, alpha=0.55, lw=0)
            ax.fill_between(x, sizes[0.9], sizes[0.99], color=colour, alpha=0.25, lw=0)
        else:
            for q in QUANTILES:
                ax.plot(x, sizes[q], color=INK, lw=0.9, ls=(0, (3, 1.5)))


def _rows(data: StudyData, by_seed: pd.DataFrame, frame: pd.DataFrame) -> Drawing:
    """Draw many arms in a row each: the size that 99 % of the tokens stay below, mean over the stored steps."""
    sizes = by_seed.groupby(["routing", "arm", "seed"], observed=True)[0.99].mean().unstack("seed")
    table = {str(kind): part.droplevel("routing") for kind, part in sizes.groupby(level="routing")}
    dots = [Dots(table["natural"], "natural"), Dots(table["replayed"], "replayed", open=True)]
    drawn = arm_rows(data, [Column("|log r| that 99 % of tokens stay below, nats", dots)])
    drawn.axes[0].set_xlim(left=0)
    said = (
        "Of many arms only the 99 % quantile is drawn: mean over the stored steps of a seed, then over seeds, with the "
        "interval, on a linear axis; the table has all, as medians over seeds."
    )
    return Drawing(drawn.figure, frame, said, interval="bar")
