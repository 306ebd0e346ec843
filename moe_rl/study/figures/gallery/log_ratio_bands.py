"""How wide token log-ratios spread, live and replayed."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import MANY, drawn_arms, many, short_label
from moe_rl.study.figures.notes import PAIR
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import GREY, PAGE, look_of, step_axis
from moe_rl.study.summary import last_updates

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BANDS = ((0.01, 0.99, 0.16), (0.05, 0.95, 0.28), (0.25, 0.75, 0.55))


@figure(
    title="Quantiles of the token log-ratio.",
    caption=(
        "After the last update of the stored steps: 98 %, 90 % and 50 % of the response tokens lie within the shades, "
        "from light to dark; quantiles of each seed, mean over seeds. Upper row: live routing; lower row: the same "
        "tokens and weights, replayed."
    ),
    needs={"tokens": ["old_logp", "logp_natural", "logp_replayed", "update"]},
    rank=130,
    notes=(PAIR,),
)
def log_ratio_bands(data: StudyData) -> Drawing:
    """Quantiles of the token log-ratio against the step, natural above, replayed below."""
    tokens = last_updates(data.tokens.dropna(subset=["old_logp", "logp_natural", "logp_replayed"]))
    found = []
    for kind in ("natural", "replayed"):
        ratio = tokens[f"logp_{kind}"] - tokens["old_logp"]
        of_seed = ratio.groupby([tokens["arm"], tokens["step"], tokens["seed"]], observed=True)
        found.append(
            of_seed.quantile(np.array(QUANTILES)).unstack().assign(n=of_seed.size(), routing=kind).reset_index()
        )
    by_seed = pd.concat(found, ignore_index=True)
    names = list(QUANTILES)
    means = by_seed.groupby(["arm", "step", "routing"], observed=True)[names].mean()
    means["n"] = by_seed.groupby(["arm", "step", "routing"], observed=True)["n"].sum()
    frame = means.reset_index().rename(columns={q: f"quantile_{q:g}" for q in names})
    arms = drawn_arms(data, list(frame["arm"].unique()))
    if many(data) or len(arms) > 2 * MANY:
        return _rows(data, by_seed, frame)
    columns = min(4, len(arms))
    lines = -(-len(arms) // columns)
    drawn = Figure(figsize=(PAGE, 0.5 + 2.1 * lines))
    axes = drawn.subplots(2 * lines, columns, squeeze=False, sharex=True, sharey=True)
    for i, arm in enumerate(arms):
        line, column = 2 * (i // columns), i % columns
        for k in range(2):  # natural, replayed
            colour = look_of(str(data.arms["method"][arm])).colour
            of = means.reset_index().query("arm == @arm and routing == @kind").set_index("step")
            _bands(axes[line + k, column], of, colour)
        axes[line, column].set_title(short_label(data, arm), fontsize=7)
    for k, row in enumerate(axes):
        row[0].set_ylabel(f"{'replayed' if k % 2 else 'natural'}\nlog r, nats")
        for ax in row:
            if not ax.has_data():
                ax.remove()
    for ax in axes[-1]:
        if ax.figure:
            step_axis(ax)
            ax.xaxis.get_major_locator().set_params(nbins=4)
    return Drawing(drawn, frame)


def _bands(ax: Axes, table: pd.DataFrame, colour: str) -> None:
    if len(table) == 1:  # one stored step: a band needs a width
        table = pd.concat([table.set_index(table.index - 0.4), table.set_index(table.index + 0.4)])
    for low, high, alpha in BANDS:
        ax.fill_between(table.index.to_numpy(float), table[low], table[high], color=colour, alpha=alpha, lw=0)
    ax.axhline(0, color=GREY, lw=0.6)


def _rows(data: StudyData, by_seed: pd.DataFrame, frame: pd.DataFrame) -> Drawing:
    """Many arms: the width of the middle 98 % of tokens, mean over the stored steps."""
    wide = by_seed.assign(width=by_seed[0.99] - by_seed[0.01])
    widths = wide.groupby(["routing", "arm", "seed"], observed=True)["width"].mean().unstack("seed")
    table = {str(kind): part.droplevel("routing") for kind, part in widths.groupby(level="routing")}
    dots = [Dots(table["natural"], "natural"), Dots(table["replayed"], "replayed", open=True)]
    drawn = arm_rows(data, [Column("width of the middle 98 % of tokens' log r, nats", dots)])
    drawn.axes[0].set_xlim(left=0)
    said = (
        "Of many arms only the width of the lightest band is drawn (mean over stored steps); the rest is in the table."
    )
    return Drawing(drawn.figure, frame, said, interval="bar")
