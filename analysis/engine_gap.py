"""Whom does training with an int4 rollout engine teach, the engine or the training model?

    python analysis/engine_gap.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/engine_gap.pdf, .svg, .png and writes
what is drawn beside them as CSV: the held-out reward of the last policy, sampled by the training engine, less the final
reward, which is of responses that the rollout engine samples. No study declared it.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures.over_studies import claims_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.published import over_seeds, published_values

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TASKS = {"equations": "corrections_int4", "reverse 24 letters": "corrections_reverse"}
OTHERS = {"reverse 24 letters": "int4_reverse", "sort 8 letters": "int4_sort", "add 3 digits": "int4_add"}


def _of(arm: str, studies: dict[str, str]) -> list[tuple[str, str]]:
    return [(task, f"{study}:{arm}") for task, study in studies.items()]


ARMS: dict[str, list[tuple[str, str]]] = {
    "engine fp32": [*_of("grpo_fp32", TASKS), *_of("grpo_fp32", OTHERS)],
    "int4, ratio to the engine": [("equations", "anchor_int4:grpo"), *_of("grpo_int4", OTHERS)],
    "int4, ratio to the old policy": [
        *_of("grpo_int4", TASKS),
        ("equations", "anchor_int4:grpo_old"),
        *_of("old_int4", OTHERS),
    ],
    "int4, old policy + TIS": _of("tis_int4", TASKS),
    "int4, old policy + IcePop": _of("icepop_int4", TASKS),
    "int4, old policy + sequence MIS": _of("sequence_mis_int4", TASKS),
}
"""What GRPO was trained with -> task, STUDY:ARM."""


def gap_table() -> pd.DataFrame:
    """One row per arm: what `claims_figure` takes."""
    rows = []
    for trained, arms in ARMS.items():
        for task, name in arms:
            found = over_seeds(published_values(RESULTS, name, "held_out_less_final", roundings=True))
            rows.append(
                {"claim": trained, "comparison": task, "arm": name, "n": found.n, **found.columns("difference")}
            )
    return pd.DataFrame(rows).assign(verdict="")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw, from docs/results, how much more reward the training engine samples than the rollout engine."
    )
    parser.add_argument("folder", type=Path, help="where to write engine_gap.pdf, .svg, .png and .csv")
    figure = claims_figure(
        gap_table(),
        "engine_gap",
        "Reward as the training engine samples less reward as the rollout engine does, GRPO.",
        "held-out reward (training engine) less final reward (rollout engine)",
        "Mean over seeds and its 95 % interval, each seed's two roundings averaged first; below each other: two "
        "studies of one task, with other seeds. Declared by no study.",
    )
    for file in save_figure(figure, parser.parse_args().folder):
        print(file)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
