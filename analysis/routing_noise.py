"""Routing's part of the log-ratio's variance, by seeds and steps, from a study's committed table `decomposed_probes`.

    python analysis/routing_noise.py gspo_ordinary grpo_ordinary --steps 20 30

Given two arms, prints the first arm's routing part divided by the second's, where a routing part is that of the token
log-ratio's variance after the last update that the arm makes in a step. The ratio is a geometric mean over steps and
seeds, with Student's 95 % interval of its logarithm over the seeds; steps of variance 0 are left out, as in the study's
table `routing_noise`. Without arms, prints the medians of each arm's probes.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.statistics import student_interval
from moe_rl.study.summary import last_updates

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def ratio(probes: pd.DataFrame, arm: str, other: str, part: str = "routing") -> tuple[float, float, float, int]:
    """Return the variance of `part` under `arm` divided by that under `other`: estimate, low, high, number of seeds."""
    last = last_updates(probes).set_index(["arm", "seed", "step"])
    variances = last[f"token_var_{part}"]
    logs = np.log(variances[variances > 0]).groupby(["arm", "seed"]).mean()
    found = student_interval((logs[arm] - logs[other]).dropna().to_numpy()).exp()
    return found.estimate, found.low, found.high, found.n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", metavar="ARM", help="two arms of the study; none: medians of all")
    parser.add_argument("--study", default="decomposition", help="a folder of docs/results with decomposed_probes.csv")
    parser.add_argument("--part", choices=["routing", "weight"], default="routing")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 2**31), metavar=("FIRST", "LAST"))
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 2**31), metavar=("FIRST", "LAST"))
    options = parser.parse_args()
    file = RESULTS / options.study / "decomposed_probes.csv"
    if not file.is_file():
        parser.error(f"--study {options.study}: there is no {file}")
    probes = pd.read_csv(file)
    probes = probes[probes["seed"].between(*options.seeds) & probes["step"].between(*options.steps)]
    if probes.empty:
        parser.error(f"{file} has no probe of these --seeds and --steps")
    if not options.arms:
        columns = ["token_share_routing", "averaging_routing"]
        print(probes.groupby("arm")[columns].median().to_string(float_format="%.3g"))
        return
    known = list(probes["arm"].unique())
    if len(options.arms) != 2 or not set(options.arms) <= set(known):
        parser.error(f"expected two of {', '.join(known)}, got {' '.join(options.arms)}")
    estimate, low, high, seeds = ratio(probes, *options.arms, part=options.part)
    print(f"{seeds} seeds: {estimate:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
