"""Share of routing sites that change, by the position of the token in its response."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curves, seed_tables
from moe_rl.study.figures.floor import draw_along
from moe_rl.study.figures.register import LINES, PROBE, Drawing, figure
from moe_rl.study.figures.style import NothingToDraw
from moe_rl.study.floors import MISSING, floor_by_position
from moe_rl.study.summary import last_updates

BINS = 40
FEWEST_TOKENS = 30
FLOOR = (
    "Dashed: noise floor at the same positions, equal weights before the first update, in the runs' own arithmetic "
    "and in a bf16 copy."
)


@figure(
    title="Expert change by token position.",
    caption=(
        "After the last update of the stored steps: share of routing sites whose set of experts changed at the token "
        "of this position (0: the first of the response; it is the choice made at this token, which shapes the "
        "prediction of the next). Responses of different length mix at late positions."
    ),
    needs={"probes": ["site_names"], "tokens": ["flips", "pos", "update"]},
    rank=80,
    notes=(PROBE, LINES),
)
def change_by_position(data: StudyData) -> Drawing:
    named = data.probes.dropna(subset=["site_names"])
    sites = named["site_names"].map(len).groupby(named["arm"], observed=True).max()  # arms may differ in depth
    rows = last_updates(data.tokens.dropna(subset=["flips", "pos", "update"]))
    width = max(1, -(-int(rows["pos"].max() + 1) // BINS))
    rate = rows["flips"] / rows["arm"].map(sites).astype(float)
    rows = rows[["arm", "seed"]].assign(position=rows["pos"] // width * width + (width - 1) / 2, rate=rate)
    enough = rows.groupby(["arm", "position"], observed=True)["rate"].transform("size") >= FEWEST_TOKENS
    if not enough.any():
        raise NothingToDraw(f"change_by_position: no position has {FEWEST_TOKENS} stored tokens")
    floor = floor_by_position(data, width, FEWEST_TOKENS)
    tables = seed_tables(rows[enough], "position", "rate")
    xlabel = "position in the response" + (f"\n(bins of {width})" if width > 1 else "")
    drawn = curves(
        data, tables, "sites changed\nat the token, %", xlabel, scale=100, thin=False, ylim=(0, None), above=0.2
    )
    for ax in drawn.axes:
        if len(floor):  # also one that is above what changed
            ax.set_ylim(top=max(ax.get_ylim()[1], 105 * float(np.nanmax(floor.to_numpy()))))
        draw_along(ax, 100 * floor)
    drawn.legend()
    parts = [
        pd.DataFrame({"condition": f"floor, {name}", "position": floor.index, "mean": floor[name]}) for name in floor
    ]
    said = f"Positions with fewer than {FEWEST_TOKENS} tokens are left out. "
    said += FLOOR if len(floor) else MISSING.format("by position")
    return Drawing(drawn.figure, pd.concat([*parts, drawn.frame]), said.strip(), interval="band")
