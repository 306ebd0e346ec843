"""Entropy, response length and groups without signal against the step."""

import pandas as pd

from moe_rl.study.curves import FINAL_STEPS, final_value
from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import collapse_note, curve_frame, draw_arms, mark_collapses, seed_tables
from moe_rl.study.figures.layout import condition_panels, crowded
from moe_rl.study.figures.notes import lines_note
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import legend_above, step_axis

QUANTITIES = {
    "entropy": ("updates", "entropy\nnats / token", 1.0),
    "response_length": ("rollouts", "response length\ntokens", 1.0),
    "groups_equal": ("rollouts", "groups without\nsignal, %", 100.0),
}
CONSTANT = 0.01
"""A quantity whose means over seeds stay within this share of their mean is told, not drawn."""


@figure(
    title="Entropy, response length and groups without signal.",
    caption=(
        "Entropy of the distributions that response tokens are drawn from, mean over the updates of a step; mean "
        "length of the sampled responses; groups whose rewards are all equal, so that they teach nothing."
    ),
    needs={"rollouts": ["response_length"]},
    rank=200,
)
def dynamics(data: StudyData) -> Drawing:
    """Entropy, response length and groups without signal against the step; a row per quantity that changes."""
    found = {}
    for name, (source, _, _) in QUANTITIES.items():
        rows = getattr(data, source)
        if name in rows and rows[name].notna().any():
            found[name] = seed_tables(rows.dropna(subset=[name]), "step", name)
    frame = pd.concat([curve_frame(data, tables, name) for name, tables in found.items()], ignore_index=True)
    flat = [name for name in found if _flat(frame.loc[frame["quantity"] == name, "mean"])]
    drawn_names = [name for name in found if name not in flat] or flat
    told = [
        f"Not drawn: {QUANTITIES[name][1].replace(chr(10), ' ').split(',')[0]}, which stays at "
        f"{frame.loc[frame['quantity'] == name, 'mean'].mean():.3g}."
        for name in flat
        if name not in drawn_names
    ]
    if crowded(data):
        columns = [
            Column(words, [Dots.each(found[name], lambda table: table.apply(final_value), scale=scale)])
            for name in drawn_names
            for _, words, scale in [QUANTITIES[name]]
        ]
        told.append(f"Mean of the last {FINAL_STEPS} steps of each run; by step in the table.")
        return Drawing(arm_rows(data, columns).figure, frame, " ".join(told), interval="bar")
    figure, axes, each = condition_panels(data, 1.35, rows=len(drawn_names))
    for line, name in zip(axes, drawn_names, strict=True):
        for ax, one in zip(line, each, strict=True):
            draw_arms(ax, data, one.arms, found[name], thin=False, scale=QUANTITIES[name][2])
            mark_collapses(ax, data, one.arms)
        line[0].set_ylabel(QUANTITIES[name][1])
    for ax in axes[-1]:
        step_axis(ax)
    legend_above(figure, axes)
    return Drawing(
        figure, frame, " ".join([lines_note(data, thin=False) + collapse_note(data), *told]), interval="band"
    )


def _flat(means: pd.Series) -> bool:
    return bool(means.max() - means.min() <= CONSTANT * abs(means.mean()))
