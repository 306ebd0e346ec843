"""F(τ), the share of tokens whose ratio or its inverse exceeds τ, by arm, live and replayed, log-log."""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curves
from moe_rl.study.figures.layout import many
from moe_rl.study.figures.register import LINES, PAIR, Drawing, figure
from moe_rl.study.figures.style import GREY, NothingToDraw, arm_colour, legend_above, plain
from moe_rl.study.summary import last_updates

TAUS = np.round(np.geomspace(1.01, 10, 60), 6)


@figure(
    title="Tail of the ratio, F(τ).",
    caption=(
        "F(τ): share of stored response tokens whose ratio r = new/old, or its inverse, exceeds τ, after the last "
        "update of a step, on a log axis; a line ends where no token is left. Dotted: replayed on the same weights. "
        "Pair: two policies, one engine, so published values for two engines are not drawn."
    ),
    needs={"tokens": ["old_logp", "logp_natural", "logp_replayed", "update"]},
    rank=140,
    notes=(PAIR, LINES),
)
def tail_fraction(data: StudyData) -> Drawing:
    tokens = last_updates(data.tokens.dropna(subset=["old_logp", "logp_natural", "logp_replayed"]))
    found = {kind: _tails(tokens, kind) for kind in ("natural", "replayed")}
    counts = tokens.groupby("arm", observed=True).size()
    natural = {arm: table.where(table.mean(axis=1) > 0).dropna(how="all") for arm, table in found["natural"].items()}
    natural = {arm: table for arm, table in natural.items() if len(table)}
    if not natural:
        raise NothingToDraw(f"tail_fraction: no ratio leaves {TAUS[0]:g}, the policies hardly moved")
    least = min(float(table.mean(axis=1).min()) for table in natural.values())
    ylim = (10 ** np.floor(np.log10(least)), 1)
    drawn = curves(data, natural, "tokens with\nmax(r, 1/r) > τ", "τ", log=True, thin=False, ylim=ylim)
    for ax, arms in drawn.panels:
        for arm in arms:
            if arm in found["replayed"]:
                share = found["replayed"][arm].mean(axis=1)
                colour = arm_colour(data, arm)
                ax.plot(share[share > 0], color=colour, ls=(0, (1, 1.5)), lw=1.1)
    first, last = drawn.axes[0], max(float(table.index.max()) for table in natural.values())
    if not many(data):  # with many arms the grey lines are a picture, which keeps its scale
        for ax in drawn.axes:
            ax.set_xscale("log")
        first.set_xlim(TAUS[0], min(TAUS[-1], max(1.1, last * 1.1)))
        top = first.get_xlim()[1]
        ticks = (1.1, 2, 3, 5, 10) if top > 3.5 else (1.1, 1.5, 2, 3) if top > 1.5 else (1.02, 1.1, 1.2, 1.3)
        for ax in drawn.axes:
            ax.set_xticks([t for t in ticks if t <= top])
            ax.xaxis.set_major_formatter(FuncFormatter(plain))
            ax.xaxis.set_minor_formatter(NullFormatter())
        legend_above(drawn.figure, drawn.axes, [Line2D([], [], color=GREY, ls=(0, (1, 1.5)), lw=1.1, label="replayed")])
    parts = [
        pd.DataFrame({"arm": arm, "routing": kind, "tau": TAUS, "fraction": table.mean(axis=1).to_numpy(),
                      "tokens": int(counts[arm])})
        for kind, tables in found.items() for arm, table in tables.items()
    ]  # fmt: skip
    return Drawing(drawn.figure, pd.concat(parts, ignore_index=True), interval="band")


def _tails(tokens: pd.DataFrame, kind: str) -> dict[str, pd.DataFrame]:
    """Return for each arm the share of tokens beyond every τ (rows), by seed (columns)."""
    size = (tokens[f"logp_{kind}"] - tokens["old_logp"]).abs()
    found: dict[str, dict[int, np.ndarray]] = {}
    for (arm, seed), part in size.groupby([tokens["arm"], tokens["seed"]], observed=True):
        values = np.sort(part.to_numpy(dtype=float))
        beyond = (values.size - np.searchsorted(values, np.log(TAUS), side="right")) / values.size
        found.setdefault(str(arm), {})[int(str(seed))] = beyond
    return {arm: pd.DataFrame(seeds, index=pd.Index(TAUS, name="tau")) for arm, seeds in found.items()}
