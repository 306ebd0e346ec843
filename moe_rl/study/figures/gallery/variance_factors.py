"""The factors by which replay and averaging divide the variance of the log-ratio, by update, in natural arms."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curve_frame, draw_seeds, seed_tables
from moe_rl.study.figures.layout import many
from moe_rl.study.figures.register import GEOMETRIC, PAIR, Drawing, figure, lines_note, runs_in
from moe_rl.study.figures.rows import Column, Dots, arm_rows, by_seed
from moe_rl.study.figures.style import GREY, PAGE, NothingToDraw, arm_looks, legend_above, log_y, panels
from moe_rl.study.summary import factor_table, independent_averaging, last_updates, probe_factors

TITLES = {
    "replay": "what replay divides by:\nVar(log r) of tokens, natural / replayed",
    "averaging": "what averaging divides by:\nVar(log r), tokens / sequence means",
}

SHORT = {"replay": "replay factor:\nnatural / replayed", "averaging": "averaging factor:\ntokens / sequences"}


@figure(
    title="Replay and averaging factors.",
    caption=(
        "Natural arms only. For every seed the median over the probes of all steps of a ratio of two variances on the "
        "same weights and tokens, then the mean over seeds. 1 (dotted): nothing is removed."
    ),
    needs={"probes": ["var_token_natural", "var_token_replayed", "var_sequence_natural"]},
    rank=40,
    notes=(PAIR, GEOMETRIC),
)
def variance_factors(data: StudyData) -> Drawing:
    natural = data.arms.index[data.arms["noise"] == 0]
    rows = probe_factors(data)
    rows = rows[rows["arm"].isin(natural)]
    tables = {name: seed_tables(rows.dropna(subset=[name]), "update", name) for name in TITLES}
    if not all(tables.values()):
        raise NothingToDraw("variance_factors: no natural arm has variances above 0")
    parts = [curve_frame(data, table, geometric=True).assign(factor=name) for name, table in tables.items()]
    means = factor_table(data).rename(columns={f"{name}_of_means": name for name in TITLES})
    long = means.melt(["arm", "update"], list(TITLES), "factor", "of_means")
    frame = pd.concat(parts, ignore_index=True).merge(long, how="left", on=["arm", "update", "factor"])
    length, words = independent_averaging(data)
    said = f"Independent tokens would give averaging {words}{' (dotted)' if np.isfinite(length) else ''}."
    lines = {"replay": [1.0], "averaging": [1.0, length] if np.isfinite(length) else [1.0]}
    runs = runs_in(rows.dropna(subset=list(TITLES), how="all"))
    if many(data):
        return Drawing(_rows(data, rows, lines), frame, said, interval="bar", runs=runs)
    drawn, (axes,) = panels(1, 2, 2.6, PAGE)
    looks = arm_looks(data, [str(arm) for arm in natural])
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        for arm, (look, label) in looks.items():
            if arm in tables[name]:
                draw_seeds(ax, tables[name][arm], look, label, geometric=True)
                of = long[(long["arm"] == arm) & (long["factor"] == name)]
                ax.plot(of["update"], of["of_means"], "x", color=look.colour, ms=4, mew=1)
        for value in lines[name]:
            ax.axhline(value, color=GREY, lw=0.9, ls=(0, (1, 2)))
        log_y(ax)
        ax.set_title(title, fontsize=7)
        ax.set_xlabel("update within the step")
        ax.set_xticks(sorted(rows["update"].unique())[:: max(1, rows["update"].nunique() // 8)])
    axes[0].set_ylabel("factor,\nmedian over steps")
    cross = Line2D([], [], color=GREY, ls="", marker="x", ms=4, mew=1, label="ratio of the mean variances")
    legend_above(drawn, axes, [cross])
    said += f" Crosses: the ratio of the mean variances, which large variances dominate. {lines_note(data)}"
    return Drawing(drawn, frame, said, interval="band", runs=runs)


def _rows(data: StudyData, rows: pd.DataFrame, lines: dict[str, list[float]]) -> Figure:
    """Draw many arms in a row each: both factors after the first and after the last update."""
    first, last = rows[rows["update"] == rows["update"].min()], last_updates(rows)
    columns = [
        Column(
            SHORT[name],
            [
                Dots(by_seed(first, name), "after the first update", open=True),
                Dots(by_seed(last, name), "after the last"),
            ],
            log=True,
            lines=lines[name],
        )
        for name in TITLES
    ]
    return arm_rows(data, columns).figure
