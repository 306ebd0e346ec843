"""The main study's comparisons, task by task:  python analysis/tasks.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/tasks.pdf, .svg, .png and writes what is
drawn beside them as CSV.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures.over_studies import claims_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.published import published_repetitions

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

COMPARISONS = {
    "Replay − GRPO": ("grpo_replay", "grpo"),
    "GSPO − GRPO": ("gspo", "grpo"),
    "Replay − GRPO, noise 0.02": ("grpo_replay", "grpo_noise02"),
    "GSPO − GRPO, noise 0.02": ("gspo_noise02", "grpo_noise02"),
    "Replay − GRPO, noise 0.05": ("grpo_replay", "grpo_noise05"),
    "GSPO − GRPO, noise 0.05": ("gspo_noise05", "grpo_noise05"),
}
"""Comparison -> the arm, the arm that is taken from it."""
TASKS = {
    "equations (main study)": "replay_vs_gspo",
    "reverse 24 letters": "other_task_reverse",
    "sort 8 letters": "other_task_sort",
    "add 3 digits": "other_task_add",
}
"""Task -> the study that has it."""


def tasks_table() -> pd.DataFrame:
    """One row per comparison, task and rounding: what `claims_figure` takes."""
    return pd.DataFrame(
        {"claim": comparison, "comparison": task, "study": study, "arm": arm, "other": other, **found}
        for comparison, (arm, other) in COMPARISONS.items()
        for task, study in TASKS.items()
        for found in published_repetitions(RESULTS, study, arm, other)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw, from docs/results, the main study's differences of final reward on each task."
    )
    parser.add_argument("folder", type=Path, help="where to write tasks.pdf, .svg, .png and .csv")
    title = "The main study's comparisons on four tasks."
    for file in save_figure(claims_figure(tasks_table(), "tasks", title), parser.parse_args().folder):
        print(file)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
