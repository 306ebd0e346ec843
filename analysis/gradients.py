"""Largest gradient norm of a run, with a method over without (question 9):  python analysis/gradients.py DIR

Reads the committed tables of docs/results, so that it needs no runs. Compared are all pairs of arms of all studies that
differ in replay alone, and GRPO with GSPO or dual clip where all else is the same. The ratio of a pair is a geometric
mean over seeds; a seed counts once, as the mean of the logarithms of its roundings and repetitions. Draws
DIR/gradients.pdf, .svg, .png, writes what is drawn beside them as CSV, and the tests that studies declare as
DIR/declared.csv.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study.config import RunConfig, differences, load_study, run_settings
from moe_rl.study.figures.over_studies import gradients_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.published import published_updates
from moe_rl.study.shipped import shipped_studies
from moe_rl.study.statistics import ALPHA, geometric_interval, holm, sign_flip_test, student_interval
from moe_rl.study.words import csv_text

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
METHODS = {"R2": "R2", "R3": "R3", "gspo": "GSPO", "dual_clip": "dual clip"}
"""Replay or objective -> its name in the figure, in the order of the panels."""
OBJECTIVE = {"method.objective", "method.clip_low", "method.clip_high"}
"""Settings in which an objective and GRPO differ."""
DECLARED = {
    "dual_clip": [("replay", "grpo"), ("dual", "grpo"), ("dual", "replay"), ("replay_dual", "replay")],
    "dual_clip_noise": [("dual", "grpo"), ("dual_noise02", "grpo_noise02"), ("dual_noise05", "grpo_noise05")],
    "dual_clip_causes": [(f"dual_{cause}", f"grpo_{cause}") for cause in ("fast", "bias", "partial", "lag", "int4")],
    "dual_clip_tasks": [(f"dual_{task}", f"grpo_{task}") for task in ("sort", "add", "reverse")],
    "dual_clip_updates": [(f"dual_{pair}", f"grpo_{pair}") for pair in ("sort", "add", "reverse", "partial")],
}
"""Study -> the pairs of arms whose largest gradients the study declares to compare."""
FEWEST = 6  # seeds of a pair: below that there is no Student interval


def method_of(one: RunConfig, other: RunConfig) -> str | None:
    """Return the name in `METHODS` of what `one` has and `other` has not, if that is all in which they differ."""
    changed = {name for name in differences(run_settings(one), run_settings(other)) if not name.startswith("objective")}
    if changed == {"method.replay"} and other.method.replay == "none":
        return one.method.replay
    if "method.objective" in changed and changed <= OBJECTIVE and other.method.objective == "grpo":
        return one.method.objective
    return None


def pairs(results: Path = RESULTS) -> Iterator[tuple[str, str, str, str]]:
    """Yield study, arm, other arm and method for every pair that is compared."""
    for name, path in sorted(shipped_studies().items()):
        if not (results / name / "updates.csv").is_file():
            continue
        study = load_study(path)
        arms = {arm: study.resolve(arm, study.seeds[0]) for arm in study.arms}
        for arm, one in arms.items():
            for other, without in arms.items():
                if arm != other and (method := METHODS.get(method_of(one, without) or "")):
                    yield name, arm, other, method


def by_seed(norms: pd.DataFrame) -> np.ndarray:
    """Return the ratio of the first column to the second, a geometric mean over the runs of each seed."""
    positive = norms[(norms > 0).all(axis=1)]  # of a run in which most updates have no gradient the median is 0
    logs = np.log(positive.iloc[:, 0] / positive.iloc[:, 1])
    return np.exp(logs.groupby("seed").mean().to_numpy())


def gradients_table(results: Path = RESULTS) -> pd.DataFrame:
    """Return one row per pair, by method; pairs that are the same runs in several studies come once.

    Columns: method, study, arm, other, n (seeds), runs (pairs of runs), below (of them, those in which the largest norm
    is below that of the other arm), without (the other arm's median of the largest norms), the geometric mean `ratio`
    with its interval `low`, `high`, and the same of the median update's norm: median_ratio, median_low, median_high.
    """
    rows = []
    for study, arm, other, method in pairs(results):
        norms = published_updates(results, study).set_index(["folder", "rounding", "seed", "arm"])
        largest = norms["grad_norm_largest"].unstack("arm")[[arm, other]].dropna()
        found = geometric_interval(by_seed(largest))
        if found.n < FEWEST:
            continue
        runs, below = len(largest), int((largest[arm] < largest[other]).sum())
        about = {"method": method, "study": study, "arm": arm, "other": other, "n": found.n, "runs": runs}
        about |= {"below": below, "without": largest[other].median()}
        about |= {"ratio": found.estimate, "low": found.low, "high": found.high}
        median = geometric_interval(by_seed(norms["grad_norm"].unstack("arm")[[arm, other]].dropna()))
        rows.append(about | {"median_ratio": median.estimate, "median_low": median.low, "median_high": median.high})
    table = pd.DataFrame(rows).drop_duplicates(["method", "n", "runs", "without", "ratio"])
    return table.sort_values("method", key=lambda names: names.map(list(METHODS.values()).index), kind="stable")


def declared_table(results: Path = RESULTS) -> pd.DataFrame:
    """Return the tests of the pairs in `DECLARED`, one row per study, repetition and pair.

    Columns: study, rounding, arm, other, n (seeds), ratio, low, high (geometric mean of the largest norms' ratios, with
    Student's interval of the logarithms), p (sign-flip test of the logarithms), adjusted (by Holm over the pairs of the
    study), verdict: lower or higher where `adjusted` is at most 0.05.
    """
    tables = []
    for study, compared in DECLARED.items():
        if not (results / study / "updates.csv").is_file():
            continue
        kept = published_updates(results, study)
        for rounding, rows in kept.groupby("rounding", sort=False):
            logs = np.log(rows.pivot(index="seed", columns="arm", values="grad_norm_largest"))
            found = []
            for arm, other in compared:
                change = (logs[arm] - logs[other]).dropna().to_numpy()
                interval = student_interval(change).exp()
                about = {"study": study, "rounding": rounding, "arm": arm, "other": other, "n": interval.n}
                ends = {"ratio": interval.estimate, "low": interval.low, "high": interval.high}
                found.append(about | ends | {"p": float(sign_flip_test(change))})
            table = pd.DataFrame(found)
            table["adjusted"] = holm(table["p"])
            side = np.where(table["ratio"] < 1, "lower", "higher")
            tables.append(table.assign(verdict=np.where(table["adjusted"] <= ALPHA, side, "not resolved")))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the figure and the tables")
    folder = parser.parse_args().folder
    written = save_figure(gradients_figure(gradients_table()), folder)
    written.append(write_atomic(folder / "declared.csv", csv_text(declared_table(), "%.3g").encode()))
    print(*written, sep="\n")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
