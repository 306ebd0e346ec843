"""Reward that last policies, trained with engines of different formats, lose when their weights are rounded.

    python analysis/rounding_costs.py DIR

Reads the committed tables of docs/results (`both_engines.csv`), so that it needs no runs; draws DIR/rounding_costs.pdf,
.svg, .png and writes what is drawn beside them as CSV: reward by the training engine minus reward by a copy with
rounded weights, on the same held-out prompts with the same random numbers.
"""

from pathlib import Path

import pandas as pd

from moe_rl.study.figures.over_studies import claims_figure, draw_from_results
from moe_rl.study.figures.saving import StudyFigure
from moe_rl.study.published import over_seeds, published_values

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TASKS = {
    "equations": "trained_copy",
    "sorting": "trained_copy_sort",
    "reversing": "trained_copy_reverse",
}
ARMS = {"engine fp32": "grpo_fp32", "engine int4": "old_int4", "engine mxfp4": "old_mxfp4"}
FORMATS = ("int4", "mxfp4")
INTEREST = 0.02  # as in both_engines.py


def costs_table() -> pd.DataFrame:
    """Return the table for `claims_figure`: one row per task, format and arm."""
    rows = []
    for task, study in TASKS.items():
        for rounded in FORMATS:
            for trained, arm in ARMS.items():
                values = published_values(RESULTS, f"{study}:{arm}", f"lost_by_{rounded}", roundings=True)
                found = over_seeds(values)
                about = {"claim": f"{task}, rounded to {rounded}", "comparison": trained, "study": study, "arm": arm}
                rows.append({**about, "n": found.n, **found.columns("difference")})
    return pd.DataFrame(rows).assign(verdict="")


def figure() -> StudyFigure:
    return claims_figure(
        costs_table(),
        name="rounding_costs",
        title="What rounding their weights costs policies that were trained with an engine of each format.",
        measured="reward by the training engine less reward by the rounded copy",
        caption="Mean over seeds with its 95 % interval; both roundings of a seed averaged first.",
        interest=INTEREST,
    )


if __name__ == "__main__":
    draw_from_results(__doc__, lambda: [figure()])
