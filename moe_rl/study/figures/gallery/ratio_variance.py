"""Variance of token and sequence log-ratios in training against the step."""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curve_frame, curves, draw_seeds, seed_tables
from moe_rl.study.figures.layout import crowded
from moe_rl.study.figures.register import GEOMETRIC, Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import GREY, NothingToDraw, arm_looks, log_y
from moe_rl.study.summary import in_run_variance


@figure(
    title="Variance of log-ratios in training.",
    caption=(
        "Variance over the training minibatches of a step, mean of the updates from the second on (of the only one, in "
        "an arm that makes one), under the arm's own routing (noise and replay included). Filled: tokens; open: "
        "length-normalised sequences. A variance of 0 has no place on the axis: such steps, and arms of such only, are "
        "left out. The arms follow different trajectories: what replay removes on the same weights is in the figure of "
        "factors."
    ),
    needs={"updates": ["var_token_log_ratio", "var_sequence_log_ratio"]},
    rank=110,
    notes=(GEOMETRIC,),
)
def ratio_variance(data: StudyData) -> Drawing:
    rows = in_run_variance(data)
    rows[["token", "sequence"]] = rows[["token", "sequence"]].replace(0.0, np.nan)  # 0 has no place on a log axis
    found = {level: seed_tables(rows.dropna(subset=[level]), "step", level) for level in ("token", "sequence")}
    if not found["token"]:
        raise NothingToDraw("ratio_variance: every log-ratio is 0, the policies did not move")
    frame = pd.concat([curve_frame(data, tables, f"in-run {level}", True) for level, tables in found.items()])
    if crowded(data):
        token = Dots.each(found["token"], pd.DataFrame.median, label="tokens")
        sequence = Dots.each(found["sequence"], pd.DataFrame.median, label="sequence means", open=True)
        drawn_rows = arm_rows(data, [Column("variance of log r in training, nats²", [token, sequence], log=True)])
        said = "Median over the steps of a run; by step in the table."
        return Drawing(drawn_rows.figure, frame, said, interval="bar")
    drawn = curves(data, found["token"], "variance of log r, nats²", log=True, geometric=True, thin=False, above=0.2)
    for ax, arms in drawn.panels:
        for arm, (look, _) in arm_looks(data, arms).items():
            if arm in found["sequence"]:
                draw_seeds(
                    ax, found["sequence"][arm], look, "_", thin=False, geometric=True, lw=0.9, ms=2.5, mfc="white"
                )
    drawn.axes[0].relim()
    drawn.axes[0].autoscale_view()
    log_y(drawn.axes[0])  # ticks of the longer range
    drawn.legend(
        Line2D([], [], color=GREY, marker="o", label="tokens"),
        Line2D([], [], color=GREY, marker="o", lw=0.9, ms=2.5, mfc="white", label="sequence means"),
    )
    return Drawing(drawn.figure, frame, interval="band")
