"""Mean reward of the sampled batch against the RL step, one panel per condition."""

import numpy as np
import pandas as pd

from moe_rl.study.arms import full_label
from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import collapse_note, curves, highest, mark_collapses, seed_tables
from moe_rl.study.figures.layout import many, shown
from moe_rl.study.figures.register import Drawing, figure, lines_note
from moe_rl.study.figures.style import reward_limits


@figure(
    title="Reward against RL step.",
    caption="Mean reward of the responses sampled at each RL step, before the updates of that step.",
    needs={"rollouts": ["reward"]},
    rank=10,
)
def reward(data: StudyData) -> Drawing:
    rows = data.rollouts.dropna(subset=["reward"])
    tables = seed_tables(rows, "step", "reward")
    limits = reward_limits(pd.Series([*rows["reward"], np.minimum(1.0, highest(tables))]))
    drawn = curves(data, tables, "reward, mean\nover responses", quantity="reward", ylim=limits)
    for ax, arms in drawn.panels:
        mark_collapses(ax, data, arms)
    drawn.legend()
    sizes = rows.groupby("arm", observed=True)["reward_n"].median().dropna() if "reward_n" in rows else ()
    ends = dict.fromkeys(f"{int(end(sizes))}" for end in (min, max) if len(sizes))
    responses = f"{' to '.join(ends)} responses a step. " if ends else ""
    grid = many(data)  # a panel for each arm has neither thin lines nor a stand-in
    natural = None if grid else next((each.stand_in for each in shown(data) if each.stand_in), None)
    stands = (
        f" {full_label(data, natural)} never sees the noise: its run there is by construction its natural run, which "
        "is drawn thin."
        if natural
        else ""
    )
    others = dict.fromkeys(full_label(data, run.arm) for run in data.runs if run.responses != "policy")
    foreign = f" {', '.join(others)}: rewards of responses that are not the policy's." if others else ""
    said = f"{responses}{lines_note(data, thin=not grid)}{collapse_note(data)}{stands}{foreign}"
    return Drawing(drawn.figure, drawn.frame, said, interval="band")
