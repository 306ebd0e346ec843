"""The movement of the policy within a step: KL and extreme tokens, with the steps at which runs collapsed."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import Quantity, by_step, collapse_note, curve_frame, seed_tables
from moe_rl.study.figures.register import GEOMETRIC, PROBE, Drawing, figure, lines_note
from moe_rl.study.summary import last_updates


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
    rows = last_updates(data.probes.dropna(subset=["k3_natural"]))
    kl = seed_tables(rows, "step", "k3_natural")
    shown = {"k3_natural": Quantity(kl, "KL (k3)\nnats / token", log=True)}
    if extreme := seed_tables(extreme_share(data), "step", "F(2)"):
        shown["F(2)"] = Quantity(extreme, "F(2)\n% of tokens", 100, zero=True)
    parts = [curve_frame(data, one.tables, name, one.log) for name, one in shown.items()]
    drawn, interval = by_step(data, shown, 1.55, pd.DataFrame.median)
    said = "Median over the steps of a run; by step in the table."
    if interval == "band":
        said = f"{lines_note(data, thin=False)}{collapse_note(data)}"
    said += "" if extreme else " F(2): not recorded."
    return Drawing(drawn, pd.concat(parts, ignore_index=True), said, interval)


def extreme_share(data: StudyData) -> pd.DataFrame:
    """Return F(2) by arm, seed and step, live routing, after the last update: from the probe's counts or, in runs of
    versions that did not count, from the stored tokens; empty if neither was recorded."""
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
