"""An arm's final reward, or the difference of two arms', over roundings and studies, from the committed tables:

    python analysis/pooled.py methods_stale:gspo_partial:grpo_partial partial_rollouts_anchor:gspo_partial:grpo_partial
    python analysis/pooled.py --roundings int4_sort:old_int4:grpo_fp32
    python analysis/pooled.py --roundings --of held_out_less_final int4_sort:old_int4

prints the mean with Student's 95 % interval over seeds; of two arms the differences are paired. It is no test, whether
a study declared that comparison or not. A seed counts once: its values in a study and in its repetitions (--roundings,
STUDY_intel) are averaged first, as in the tables `roundings`. Several studies count as independent: name studies of
different seeds only.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.statistics import student_interval

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
FIRST = "native"
KINDS: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "final": lambda runs: runs["final"],
    "held_out": lambda runs: runs["held_out"],
    "held_out_less_final": lambda runs: runs["held_out"] - runs["final"],
}
"""Final reward is of responses that the rollout engine samples, held out of ones that the training engine does."""


def values(name: str, of: str = "final", roundings: bool = False) -> pd.Series:
    """Of STUDY:ARM the arm's values, of STUDY:ARM:OTHER the paired differences, indexed by the study that it is or
    repeats, the rounding and the seed.

    of: see `KINDS`. roundings: those that the study was repeated under, too.

    Raises:
        ValueError: what no table holds.
    """
    study, *arms = name.split(":")
    if len(arms) not in (1, 2) or not (RESULTS / study / "runs.csv").is_file():
        raise ValueError(f"{name}: expected STUDY:ARM or STUDY:ARM:OTHER, arms of docs/results/STUDY/runs.csv")
    table = pd.read_csv(RESULTS / study / "runs.csv")
    if "rounding" not in table:
        table["rounding"] = FIRST
    if unknown := set(arms) - set(table["arm"]):
        known = ", ".join(dict.fromkeys(table["arm"]))
        raise ValueError(f"{name}: {study} has no arm {' or '.join(sorted(unknown))}; it has {known}")
    if not roundings:
        table = table[table["rounding"] == FIRST]
    repeated = json.loads((RESULTS / study / "env.json").read_text())["study"]
    rows = table.set_index([table["rounding"].rename(None), table["seed"].rename(None)])
    found = KINDS[of](rows)
    arm, *other = (found[rows["arm"] == one] for one in arms)
    return pd.concat({repeated: (arm - other[0] if other else arm).dropna()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="An arm's final reward, or the difference of two arms', over roundings and studies of docs/results."
    )
    parser.add_argument("names", nargs="+", metavar="STUDY:ARM[:OTHER]", help="several: studies of different seeds")
    parser.add_argument("--roundings", action="store_true", help="the repetitions under other kernels, too")
    parser.add_argument("--of", choices=KINDS, default="final", help="of which reward (default: %(default)s)")
    options = parser.parse_args()
    try:
        found = pd.concat([values(name, options.of, options.roundings) for name in options.names])
    except ValueError as error:
        parser.error(str(error))
    seeds = found.groupby(level=[0, 2]).mean().to_numpy()
    print(f"{len(found)} values, {(found > 0).sum()} above 0, of {len(seeds)} seeds: {student_interval(seeds)}")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
