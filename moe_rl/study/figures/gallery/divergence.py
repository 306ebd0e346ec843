"""How far the policy moves within a step: KL and extreme tokens."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import collapse_note, curve_frame, draw_arms, mark_collapses, seed_tables
from moe_rl.study.figures.layout import condition_panels, crowded
from moe_rl.study.figures.notes import GEOMETRIC, PROBE, lines_note
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import legend_above, log_y, step_axis
from moe_rl.study.summary import last_updates

SCALES = {"k3_natural": 1, "F(2)": 100}
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
    tables = {"k3_natural": seed_tables(rows, "step", "k3_natural")}
    if extreme := seed_tables(extreme_share(data), "step", "F(2)"):
        tables["F(2)"] = extreme
    missing = "" if extreme else " F(2): not recorded."
    frame = pd.concat(
        [curve_frame(data, table, name, name != "F(2)") for name, table in tables.items()], ignore_index=True
    )
    if crowded(data):
        columns = [
            Column(LABELS[name], [Dots.each(table, pd.DataFrame.median, SCALES[name])], log=name != "F(2)")
            for name, table in tables.items()
        ]
        said = f"Median over the steps of a run; by step in the table.{missing}"
        return Drawing(arm_rows(data, columns).figure, frame, said, interval="bar")
    drawn, axes, each = condition_panels(data, 1.55, rows=len(tables))
    for line, (name, table) in zip(axes, tables.items(), strict=True):
        for ax, one in zip(line, each, strict=True):
            draw_arms(ax, data, one.arms, table, thin=False, scale=SCALES[name], geometric=name != "F(2)")
            mark_collapses(ax, data, one.arms)
        line[0].set_ylabel(LABELS[name])
        if name == "F(2)":
            line[0].set_ylim(bottom=0)
        else:
            log_y(line[0])
    for ax in axes[-1]:
        step_axis(ax)
    legend_above(drawn, axes)
    return Drawing(drawn, frame, f"{lines_note(data, thin=False)}{collapse_note(data)}{missing}", interval="band")


def extreme_share(data: StudyData) -> pd.DataFrame:
    """F(2) by arm, seed and step, live routing, after the last update: from the probe's counts, else from the stored
    tokens (runs of versions that did not count them); empty where neither was recorded."""
    keys = ["arm", "seed", "step"]
    if {"extreme_2_natural", "tokens"} <= set(data.probes):
        rows = last_updates(data.probes)
        share = rows["extreme_2_natural"].astype(float) / rows["tokens"].astype(float)
        if share.notna().any():
            return rows[keys].assign(**{"F(2)": share})
    columns = ["update", "logp_natural", "old_logp"]
    if not set(columns) <= set(data.tokens):
        return pd.DataFrame(columns=[*keys, "F(2)"])
    last = last_updates(data.tokens.dropna(subset=columns))
    extreme = (last["logp_natural"] - last["old_logp"]).abs() > np.log(2)
    return extreme.groupby([last[key] for key in keys], observed=True).mean().rename("F(2)").reset_index()
