"""How many published conclusions survived where a study was run again:  python analysis/survival.py

Reads the committed tables `roundings`: repetitions with other CPU kernels, on another processor, or with cold starts
made anew each time. Prints one row per study and repetition; --csv writes the table. Repetitions in which no difference
could be resolved are not counted.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study.published import read_table, repetitions
from moe_rl.study.roundings import on_its_side
from moe_rl.study.statistics import Verdict
from moe_rl.study.words import csv_text

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
CLAIMS = (Verdict.HIGHER, Verdict.LOWER, Verdict.EQUIVALENT)


def repeated_verdicts(results: Path = RESULTS) -> pd.DataFrame:
    """Return one row per comparison and repetition: `study` (the folder), `again` (the repetition), `claim`, `fate`.

    claim: the verdict of the original study.
    fate: "same": the repetition has the same verdict; "direction": it has another one, but its mean is on the claim's
        side of the difference of interest; "gone": neither. Of comparisons whose claim is none of `CLAIMS`: "new" if
        the repetition's verdict is one of them, else "none".
    """
    rows = []
    for table in repetitions(results):
        first = read_table(results / table["study"].iloc[0] / "comparisons.csv").set_index(["arm", "other"])
        for pair, again in table.set_index(["arm", "other"]).iterrows():
            of = {"study": again["folder"], "again": again["rounding"], "claim": first.loc[pair, "verdict"]}
            rows.append({**of, "fate": fate(first.loc[pair], again, first.loc[pair, "interest"])})
    return pd.DataFrame(rows)


def survival_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of `repeated_verdicts` per study and repetition; `claims`: comparisons that had a claim."""
    rows = []
    for (study, again), part in verdicts.groupby(["study", "again"], sort=False):
        counts = {name: int((part["fate"] == name).sum()) for name in ("same", "direction", "gone", "new")}
        rows.append({"study": study, "again": again, "claims": sum(counts.values()) - counts["new"], **counts})
    return pd.DataFrame(rows)


def fate(first: pd.Series, again: pd.Series, interest: float) -> str:
    """Return the fate of one comparison, as `repeated_verdicts` defines it."""
    if first["verdict"] not in CLAIMS:
        return "new" if again["verdict"] in CLAIMS else "none"
    if again["verdict"] == first["verdict"]:
        return "same"
    return "direction" if on_its_side(Verdict(first["verdict"]), again["difference"], interest) else "gone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.csv and options.csv.is_dir():
        parser.error(f"--csv {options.csv}: expected a file, and this is a folder")
    verdicts = repeated_verdicts()
    table = survival_table(verdicts)
    print(table.to_string(index=False))
    print(f"{len(table)} repetitions: {table.drop(columns=['study', 'again']).sum().to_dict()}")
    claims = verdicts[verdicts["claim"].isin(CLAIMS)]
    for what, part in claims.groupby(claims["claim"].where(claims["claim"] == Verdict.EQUIVALENT, "higher or lower")):
        print(f"{what}: {part['fate'].value_counts().to_dict()}")
    if options.csv:
        write_atomic(options.csv, csv_text(table))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
