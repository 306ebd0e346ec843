"""The gap between the engine that samples and the one that trains: token and sequence ratios, live and under R3."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.figures.floor import draw_across, gap_note
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import in_two_lines
from moe_rl.study.figures.style import GREY, PAGE, arm_colour, panels
from moe_rl.study.floors import floor_variance

LEVELS = {"var_token": "o", "var_sequence": "^"}
PAIRS = {"engines": "live", "engines_replayed": "R3"}
MEASURED = ["var_token", "var_sequence", "k3", "extreme_fraction"]
WHAT = ("slots", "sites", "tokens")


@figure(
    title="Engine mismatch by level of the ratio.",
    caption=(
        "μ: the engine that sampled; π_old: the training engine at the same weights; tokens of the whole batch, live "
        "routing in both (filled) and with the rollout's routes forced on π_old (R3, open). Circles: tokens; "
        "triangles: means over sequences (log s of GSPO). Bar: square of the arm's lower clip range; where the ratio "
        "is anchored on μ, a spread to its right is clipped for the engine's sake alone. Right: tokens that the clip "
        "takes out of the first update of a step, when the policy has not moved; 0 by construction for the anchor "
        "π_old. Large: mean over seeds of the mean over steps; small: seeds. Engines of rounded routers are an "
        "emulation."
    ),
    needs={"engines": ["var_token", "var_sequence", "pair"]},
    rank=22,
    special=True,
)
def engine_mismatch(data: StudyData) -> Drawing:
    table = engine_table(data)
    arms = [str(arm) for arm in data.arms.index if arm in set(table["arm"])]
    height = 1.15 + 0.3 * max(len(arms), 4)  # fewer rows leave no room beside legend and labels
    drawn, ((left, right),) = panels(1, 2, height, PAGE, sharey=True, width_ratios=[2.2, 1])
    for y, arm in enumerate(arms):
        colour = arm_colour(data, arm)
        rows = table[table["arm"] == arm]
        for level, marker in LEVELS.items():
            for routing, face in (("live", colour), ("R3", "white")):
                values = rows.loc[rows["routing"] == routing, level].replace(0.0, np.nan).to_numpy(dtype=float)
                if np.isfinite(values).any():
                    style = {"marker": marker, "color": colour, "mfc": face, "ls": ""}
                    left.plot(values, [y + 0.18] * len(values), ms=2.2, alpha=0.6, **style)
                    left.plot([np.nanmean(values)], [y], ms=5, **style)
        clip = rows["clip_low"].iloc[0]
        if np.isfinite(clip) and clip > 0:
            left.plot([clip**2] * 2, [y - 0.32, y + 0.32], color=GREY, lw=1.4)
        clipped = rows.loc[rows["routing"] == "live", "clipped_first"].to_numpy(dtype=float)
        if np.isfinite(clipped).any():
            right.plot(100 * clipped, [y + 0.18] * len(clipped), "o", color=colour, ms=2.2, alpha=0.6)
            right.plot([100 * np.nanmean(clipped)], [y], "o", color=colour, ms=5)
    left.set_xscale("log")
    floor = floor_variance(data)
    draw_across(left, floor["var_token"], vertical=True)
    left.set_yticks(range(len(arms)), [in_two_lines(str(data.arms["label"][arm])) for arm in arms])
    left.set_ylim(len(arms) - 0.4, -0.6)
    left.set_xlabel("variance of log(π_old / μ), nats²")
    right.set_xlabel("clipped in the\nfirst update,\n% of tokens")
    most = max(right.get_xlim()[1], 1.0)
    right.set_xlim(min(-0.3, -0.03 * most), most)
    floors = [line for line in left.lines if str(line.get_label()).startswith("equal weights")]
    grey: dict[str, Any] = {"color": GREY, "ls": ""}
    marks = [
        Line2D([], [], marker=marker, mfc=face, label=f"{level.removeprefix('var_')}, {routing}", **grey)
        for level, marker in LEVELS.items()
        for routing, face in (("live", GREY), ("R3", "white"))
    ]
    clip_range = Line2D([], [], marker="|", ms=9, mew=1.4, label="clip range²", **grey)
    drawn.legend(handles=[*marks, clip_range, *floors], loc="outside upper left", ncols=3, borderaxespad=0.3)
    said = gap_note(floor, {"var_token": "by token", "var_sequence": "by sequence"}) + (
        "Dashed: by token." if floors else ""
    )
    return Drawing(drawn, table, said.strip())


def engine_table(data: StudyData) -> pd.DataFrame:
    """Return means over steps by arm, seed and routing (live, R3): `var_token`, `var_sequence` (nats²), `k3` (nats per
    token), `extreme_fraction` and, of live routing, shares of slots, sites and tokens changed; also `clipped_first`,
    share of tokens clipped in the first update, and `clip_low` of the arm. NaN where a trainer recorded none."""
    names = [*data.engines, *MEASURED, *(f"{what}{part}" for what in WHAT for part in ("_changed", ""))]
    rows = data.engines[data.engines["pair"].isin(list(PAIRS))].reindex(columns=list(dict.fromkeys(names)))
    rows["routing"] = rows["pair"].map(PAIRS)
    for what in WHAT:
        rows[f"{what}_changed_share"] = rows[f"{what}_changed"] / rows[what]
    measured = [*MEASURED, *(f"{what}_changed_share" for what in WHAT)]
    table = rows.groupby(["arm", "seed", "routing"], sort=False)[measured].mean().reset_index()
    updates = data.updates.reindex(columns=["arm", "seed", "update", "clipped_tokens", "tokens"])
    first = updates[updates["update"] == 1]
    shares = pooled_rate(first, "clipped_tokens", "tokens", ["arm", "seed"]).rename("clipped_first")
    clips = {run.arm: run.setting("clip_low", np.nan) for run in data.runs}
    table = table.join(shares, on=["arm", "seed"])
    return table.assign(clip_low=table["arm"].map(clips).astype(float))
