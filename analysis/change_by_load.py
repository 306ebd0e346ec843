"""How much more often slots of rarely used experts change, in all studies with the table `change_by_load`.

    python analysis/change_by_load.py

For each arm: the share of changed slots of experts with less than half of the even load, divided by that of experts
with at least twice the even load. Printed are median and range over arms, separately for arms with a balancing bias.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
ALL_BIASED = ("methods_bias", "levers_balance_live")
"""Prefixes of studies, with repetitions, whose arms all have a balancing bias; elsewhere an arm's name says so."""


def load_ratios() -> pd.DataFrame:
    """Return one row per arm with both rarely and often used experts: `study`, `arm`, `biased`, `ratio`."""
    rows = []
    for file in sorted(RESULTS.glob("*/change_by_load.csv")):
        study = file.parent.name
        for arm, part in pd.read_csv(file).groupby("arm"):
            change = part.set_index("load")["slot_change"]
            biased = study.startswith(ALL_BIASED) or "_bias" in str(arm)
            ratio = change["below 0.5"] / change["2 and more"]
            rows.append({"study": study, "arm": arm, "biased": biased, "ratio": ratio})
    return pd.DataFrame(rows).dropna()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for biased, part in load_ratios().groupby("biased"):
        low, median, high = part["ratio"].quantile([0, 0.5, 1])
        what = "with a balancing bias" if biased else "without"
        print(f"{len(part)} arms {what}, of {part['study'].nunique()} studies: {median:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
