"""Entropy, response length and groups without signal against the step; a row per quantity that changes."""

import pandas as pd

from moe_rl.study.curves import FINAL_STEPS, final_value
from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import Quantity, by_step, collapse_note, curve_frame, seed_tables
from moe_rl.study.figures.register import Drawing, figure, lines_note

QUANTITIES = {
    "entropy": ("updates", "entropy\nnats / token", 1.0),
    "response_length": ("rollouts", "response length\ntokens", 1.0),
    "groups_equal": ("rollouts", "groups without\nsignal, %", 100.0),
}
CONSTANT = 0.01
"""A quantity whose means over seeds span at most this share of their average is given in the caption, not drawn."""


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
    shown = {name: Quantity(found[name], *QUANTITIES[name][1:]) for name in drawn_names}
    drawn, interval = by_step(data, shown, 1.35, lambda table: table.apply(final_value))
    if interval == "bar":
        told.append(f"Mean of the last {FINAL_STEPS} steps of each run; by step in the table.")
    else:
        told.insert(0, lines_note(data, thin=False) + collapse_note(data))
    return Drawing(drawn, frame, " ".join(told), interval)


def _flat(means: pd.Series) -> bool:
    """Return whether means span at most the share `CONSTANT` of their average."""
    return bool(means.max() - means.min() <= CONSTANT * abs(means.mean()))
