"""How far the policy moves within a step: KL and extreme tokens."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import collapse_note, curve_frame, draw_arms, mark_collapses, seed_tables
from moe_rl.study.figures.layout import condition_panels, crowded
from moe_rl.study.figures.notes import GEOMETRIC, PROBE, lines_note
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import NothingToDraw, legend_above, log_y, step_axis
from moe_rl.study.summary import last_updates

LABELS = {"k3_natural": "KL (k3)\nnats / token", "F(2)": "F(2)\n% of tokens"}


@figure(
    title="KL and extreme tokens by step.",
    caption=(
        "After the last update of a step. k3 = mean(r − 1 − log r), r = new/old, an estimate of KL(old‖new); log "
        "axis. F(2): share of tokens whose ratio or its inverse exceeds 2. Pair: two policies, one engine; R3's "
        "values of F(2) are of two engines and are not drawn."
    ),
    needs={"probes": ["k3_natural"]},
    rank=60,
    notes=(PROBE, GEOMETRIC),
)
def divergence(data: StudyData) -> Drawing:
    """KL(old || new) and F(2) after the last update of each step, with the steps at which runs collapsed."""
    rows = last_updates(data.probes.dropna(subset=["k3_natural"]))
    tables = {
        "k3_natural": seed_tables(rows, "step", "k3_natural"),
        "F(2)": seed_tables(extreme_share(data), "step", "F(2)"),
    }
    frame = pd.concat(
        [curve_frame(data, table, name, name != "F(2)") for name, table in tables.items()], ignore_index=True
    )
    if crowded(data):
        columns = [
            Column(LABELS["k3_natural"], [Dots.each(tables["k3_natural"], pd.DataFrame.median)], log=True),
            Column(LABELS["F(2)"], [Dots.each(tables["F(2)"], pd.DataFrame.median, 100)]),
        ]
        said = "Median over the steps of a run; by step in the table."
        return Drawing(arm_rows(data, columns).figure, frame, said, interval="bar")
    drawn, axes, each = condition_panels(data, 1.55, rows=2)
    for line, (name, label) in zip(axes, LABELS.items(), strict=True):
        for ax, one in zip(line, each, strict=True):
            scale = 100 if name == "F(2)" else 1
            draw_arms(ax, data, one.arms, tables[name], thin=False, scale=scale, geometric=name != "F(2)")
            mark_collapses(ax, data, one.arms)
        line[0].set_ylabel(label)
    log_y(axes[0, 0])
    axes[1, 0].set_ylim(bottom=0)
    for ax in axes[1]:
        step_axis(ax)
    legend_above(drawn, axes)
    return Drawing(drawn, frame, f"{lines_note(data)}{collapse_note(data)}", interval="band")


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
