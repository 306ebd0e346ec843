"""How far the policy moves within a step: KL and extreme tokens; and where in a response routing changes."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_along
from moe_rl.study.figures.routing import PROBE
from moe_rl.study.figures.style import (
    NothingToDraw,
    StudyFigure,
    arm_looks,
    conditions,
    draw_seeds,
    legend_above,
    lines_note,
    log_y,
    need,
    noise_note,
    panels,
    seed_table,
    seeds_note,
    step_axis,
    styled,
    summarise,
)
from moe_rl.study.figures.training import collapse_note, mark_collapse
from moe_rl.study.floors import MISSING, floor_by_position
from moe_rl.study.summary import last_updates

BINS = 40
FEWEST_TOKENS = 30
FLOOR = (
    "Dashed: noise floor at the same positions, equal weights before the first update, in the runs' own arithmetic and "
    "in a bf16 copy. "
)


@styled
def divergence(data: StudyData) -> StudyFigure:
    """KL(old || new) and F(2) after the last update of each step, with the steps at which runs collapsed."""
    rows = need(data.probes, ["k3_natural"], "divergence")
    rows = last_updates(rows)[["arm", "seed", "step", "k3_natural"]]
    tails = extreme_share(data)
    shown = conditions(data)
    figure, axes = panels(2, len(shown), 4.4, sharex=True, sharey="row")
    parts = []
    quantities = (("k3_natural", rows, "KL (k3), nats/token"), ("F(2)", tails, "F(2), % of tokens"))
    for line, (name, table_rows, label) in zip(axes, quantities, strict=True):
        for ax, condition in zip(line, shown, strict=True):
            for arm, (look, text) in arm_looks(data, condition.arms).items():
                table = seed_table(table_rows[table_rows["arm"] == arm], "step", name)
                if not table.empty:
                    parts.append(summarise(table, quantity=name, condition=condition.name, arm=arm))
                    draw_seeds(ax, 100 * table if name == "F(2)" else table, look, text)
            mark_collapse(ax, data, condition)
        line[0].set_ylabel(label)
    for ax, condition in zip(axes[0], shown, strict=True):
        ax.set_title(condition.title(len(shown) - 1))
        log_y(ax)
    for ax in axes[1]:
        ax.set_ylim(bottom=0)
        step_axis(ax)
    legend_above(figure, axes)
    caption = (
        f"{PROBE} (the last of a step). Top: k3 = mean(r − 1 − log r), r = new/old, an estimate of KL(old‖new), log "
        "axis. Bottom: F(2), the share of tokens whose ratio or its inverse exceeds 2. Pair: two policies, one engine; "
        "R3's values of F(2) are of two engines and are not drawn. "
        f"{lines_note(data)}{collapse_note(data)}{noise_note(data)} {seeds_note(data)}"
    )
    return StudyFigure("divergence", "KL and extreme tokens by step.", caption, figure, pd.concat(parts))


def extreme_share(data: StudyData) -> pd.DataFrame:
    """F(2) by arm, seed and step, live routing, after the last update: from the probe's counts, else from the stored
    tokens (runs of versions that did not count them)."""
    keys = ["arm", "seed", "step"]
    if "extreme_2_natural" in data.probes:
        rows = last_updates(data.probes)
        return rows[keys].assign(**{"F(2)": rows["extreme_2_natural"] / rows["tokens"]})
    tokens = data.tokens
    if tokens.empty:
        raise NothingToDraw("divergence: the runs recorded neither extreme tokens nor token tables")
    last = last_updates(tokens)
    extreme = (last["logp_natural"] - last["old_logp"]).abs() > np.log(2)
    return extreme.groupby([last[key] for key in keys], observed=True).mean().rename("F(2)").reset_index()


@styled
def change_by_position(data: StudyData) -> StudyFigure:
    """Share of routing sites that change, by the position of the token in its response."""
    sites = need(data.probes, ["site_names"], "change_by_position")["site_names"].map(len).max()
    rows = need(data.tokens, ["flips", "pos", "update"], "change_by_position")
    rows = last_updates(rows)
    width = max(1, -(-int(rows["pos"].max() + 1) // BINS))
    rows = rows.assign(position=rows["pos"] // width * width + (width - 1) / 2, rate=rows["flips"] / sites)
    enough = rows.groupby(["arm", "position"], observed=True)["rate"].transform("size") >= FEWEST_TOKENS
    rows = rows[enough]
    if rows.empty:
        raise NothingToDraw(f"change_by_position: no position has {FEWEST_TOKENS} stored tokens")
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.7, sharex=True, sharey=True)
    floor = floor_by_position(data, width, FEWEST_TOKENS)
    parts = [
        pd.DataFrame({"condition": f"floor, {name}", "position": floor.index, "mean": floor[name]}) for name in floor
    ]
    for ax, condition in zip(axes[0], shown, strict=True):
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            table = seed_table(rows[rows["arm"] == arm], "position", "rate")
            if not table.empty:
                draw_seeds(ax, 100 * table, look, label)
                parts.append(summarise(table, condition=condition.name, arm=arm))
        draw_along(ax, 100 * floor)
        ax.set_title(condition.title(len(shown) - 1))
        step_axis(ax, "position in the response")
    axes[0, 0].set_ylabel("sites changed, %")
    axes[0, 0].set_ylim(bottom=0)
    legend_above(figure, axes)
    bins = f"bins of {width} positions; " if width > 1 else ""
    caption = (
        f"{PROBE} (the last of a step), stored steps. Share of routing sites whose set of experts changed at the "
        f"token of this position (0: the first of the response); {bins}positions with fewer than {FEWEST_TOKENS} "
        "tokens are left out. Responses of different length mix at late positions. "
        f"{FLOOR if len(floor) else MISSING.format('by position')}"
        f"{lines_note(data)}{noise_note(data)} {seeds_note(data)}"
    )
    return StudyFigure("change_by_position", "Expert change by token position.", caption, figure, pd.concat(parts))


__all__ = ["change_by_position", "divergence", "extreme_share"]
