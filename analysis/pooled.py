"""One comparison over several studies, from their committed tables:

    python analysis/pooled.py methods_stale:gspo_partial:grpo_partial partial_rollouts_anchor:gspo_partial:grpo_partial

prints the mean of all paired differences of final reward with Student's 95 % interval. No study declared it, so that it
is no test. A seed counts once: its differences in a study and in its repetitions (STUDY_intel) are averaged first, as
in the tables `roundings`. Pairs of several studies count as independent: name studies of different seeds only.
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.statistics import student_interval

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def differences(name: str) -> pd.Series:
    """Paired differences of STUDY:ARM:OTHER, by the study that it is or repeats and the place of the seed in it. Raises
    ValueError for what no table holds."""
    parts = name.split(":")
    if len(parts) != 3 or not (RESULTS / parts[0] / "comparisons.csv").is_file():
        raise ValueError(f"{name}: expected STUDY:ARM:OTHER, a comparison of docs/results/STUDY/comparisons.csv")
    study, arm, other = parts
    table = pd.read_csv(RESULTS / study / "comparisons.csv").set_index(["arm", "other"])
    if (arm, other) not in table.index:
        declared = ", ".join(f"{study}:{one}:{two}" for one, two in table.index)
        raise ValueError(f"{name}: not compared there; {study} has {declared}")
    values = [float(value) for value in str(table.loc[(arm, other), "differences"]).split()]
    repeated = json.loads((RESULTS / study / "env.json").read_text())["study"]
    return pd.Series(values, index=[f"{repeated}/{place}" for place in range(len(values))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One comparison over several studies of docs/results with different seeds."
    )
    parser.add_argument("names", nargs="+", metavar="STUDY:ARM:OTHER")
    try:
        values = pd.concat([differences(name) for name in parser.parse_args().names])
    except ValueError as error:
        parser.error(str(error))
    seeds = values.groupby(level=0).mean().to_numpy()
    print(f"{len(values)} pairs, {(values > 0).sum()} above 0, of {len(seeds)} seeds: {student_interval(seeds)}")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
