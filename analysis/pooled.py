"""A difference of final reward between two arms, over roundings and studies, from the committed tables:

    python analysis/pooled.py methods_stale:gspo_partial:grpo_partial partial_rollouts_anchor:gspo_partial:grpo_partial
    python analysis/pooled.py --roundings int4_sort:old_int4:grpo_fp32

prints the mean of all paired differences with Student's 95 % interval. It is no test, whether a study declared that
comparison or not. A seed counts once: its differences in a study and in its repetitions (--roundings, STUDY_intel) are
averaged first, as in the tables `roundings`. Pairs of several studies count as independent: name studies of different
seeds only.
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.statistics import student_interval

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
FIRST = "native"


def differences(name: str, column: str = "final", roundings: bool = False) -> pd.Series:
    """Paired differences of STUDY:ARM:OTHER, indexed by the study that it is or repeats, the rounding and the seed.

    column: of `runs.csv`. roundings: those that the study was repeated under, too.

    Raises:
        ValueError: what no table holds.
    """
    parts = name.split(":")
    if len(parts) != 3 or not (RESULTS / parts[0] / "runs.csv").is_file():
        raise ValueError(f"{name}: expected STUDY:ARM:OTHER, two arms of docs/results/STUDY/runs.csv")
    study, *pair = parts
    table = pd.read_csv(RESULTS / study / "runs.csv")
    if "rounding" not in table:
        table["rounding"] = FIRST
    if unknown := set(pair) - set(table["arm"]):
        arms = ", ".join(dict.fromkeys(table["arm"]))
        raise ValueError(f"{name}: {study} has no arm {' or '.join(sorted(unknown))}; it has {arms}")
    if not roundings:
        table = table[table["rounding"] == FIRST]
    repeated = json.loads((RESULTS / study / "env.json").read_text())["study"]
    rows = table.set_index([table["rounding"].rename(None), table["seed"].rename(None)])
    arm, other = (rows.loc[rows["arm"] == one, column] for one in pair)
    return pd.concat({repeated: (arm - other).dropna()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A difference of final reward between two arms, over roundings and studies of docs/results."
    )
    parser.add_argument("names", nargs="+", metavar="STUDY:ARM:OTHER", help="several: studies of different seeds")
    parser.add_argument("--roundings", action="store_true", help="the repetitions under other kernels, too")
    parser.add_argument("--held-out", action="store_true", help="of the last policy on held-out prompts instead")
    options = parser.parse_args()
    column = "held_out" if options.held_out else "final"
    try:
        values = pd.concat([differences(name, column, options.roundings) for name in options.names])
    except ValueError as error:
        parser.error(str(error))
    seeds = values.groupby(level=[0, 2]).mean().to_numpy()
    print(f"{len(values)} pairs, {(values > 0).sum()} above 0, of {len(seeds)} seeds: {student_interval(seeds)}")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
