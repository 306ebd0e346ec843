"""Settings chosen by the tuning study, by the rule in experiments/tuning.yaml:  python analysis/tuning.py runs/tuning

An arm's label is `METHOD: SETTING`. Arms with the same label are one setting under several doses of noise; a method's
first setting is its default.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.study import StudyData, load
from moe_rl.study.curves import TIE
from moe_rl.study.data import declared_arms

GAIN = 0.05
"""Smallest mean gain over the default, over seeds, with which a setting can be chosen."""
FEWEST = 2
"""Smallest number of seeds with which anything but the default is chosen."""


def scores(data: StudyData) -> pd.DataFrame:
    """Return the last policy's held-out reward, mean over doses: one row per (method, setting), one column per seed.

    The value of a seed is NaN unless all doses of the setting are finished in it.
    """
    if data.evals.empty:
        raise ValueError(f"{data.folder}: no run has evaluated its policy yet")
    declared = {arm: str(about.get("label") or arm) for arm, about in declared_arms(data.config).items()}
    labels = pd.Series({**declared, **data.arms["label"]})  # an arm that has not begun counts as a missing dose
    done = {(run.arm, run.seed) for run in data.runs if run.finished}
    evals = data.evals[[run in done for run in zip(data.evals["arm"], data.evals["seed"], strict=True)]]
    last = evals[evals["step"] > 0].groupby(["arm", "seed"])["reward"].last().unstack("seed")
    last = last.reindex(index=labels.index, columns=sorted({*data.config.get("seeds", ()), *data.seeds}))
    last = last.set_axis(pd.MultiIndex.from_arrays([labels.str.partition(": ")[0], labels], names=["method", "label"]))
    return last.groupby(level=["method", "label"], sort=False).agg(lambda doses: doses.mean(skipna=False))


def choose(scores: pd.DataFrame) -> pd.DataFrame:
    """Return `scores` with `gain`, the mean paired difference from the method's default, `open`, and `chosen`.

    With fewer than `FEWEST` seeds the default stays chosen. A setting can be chosen if it is above the default by
    `GAIN` in the mean and above it in every seed. A setting that is not above the default in some seed is out, whatever
    its other seeds would say, so these need not be run. `open`: a setting that may still be chosen but lacks seeds.
    """
    parts = []
    for _, own in scores.groupby(level="method", sort=False):
        above = own - own.iloc[0]
        gain = above.mean(axis=1, skipna=False) * (1.0 if own.shape[1] >= FEWEST else float("nan"))
        allowed = (above > 0).all(axis=1) & (gain >= GAIN * (1 - TIE))
        best = own[allowed].mean(axis=1).idxmax() if allowed.any() else own.index[0]
        undecided = gain.isna() & ~(above <= 0).any(axis=1) & (own.index != own.index[0])
        parts.append(own.assign(gain=gain, open=undecided, chosen=own.index == best))
    return pd.concat(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the study's folder, e.g. runs/tuning")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    given = parser.parse_args()
    try:
        table = choose(scores(load(given.folder)))
    except ValueError as error:  # no such folder, damaged files
        parser.exit(1, f"{error}\n")
    print(table.round(3).to_string())
    if given.csv:
        write_atomic(given.csv, table.to_csv())
    if table["open"].any():
        print("Settings that are `open` need their other seeds before anything is chosen.")
