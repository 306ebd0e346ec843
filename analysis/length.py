"""Reward that old tokens cost GRPO, and that GSPO wins back, by the length of responses on one task (question 4).

    python analysis/length.py DIR --csv docs/results/old_tokens_length_slopes/slopes.csv

Reads the committed tables of docs/results/old_tokens_length, so that it needs no runs. Prints the slopes that the study
declared, for each rounding and for each seed's mean over the roundings if the seed has all of them (`pooled`, not
declared). A slope is that of one seed's difference of final reward over log2 of the tokens of a response, by least
squares. Printed are the mean slope with Student's 95 % interval over seeds and the p of the exact sign-flip test,
adjusted by Holm over the four differences. Draws DIR/old_tokens_length as .pdf, .svg and .png and writes what is drawn
beside them as CSV.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures.over_studies import by_cause, cures_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.published import published_differences, published_values
from moe_rl.study.statistics import holm, sign_flip_test, student_interval
from moe_rl.study.words import csv_text

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
STUDY = "old_tokens_length"
TOKENS = {4: 5, 8: 9, 16: 17, 24: 25}
"""Letters of the task -> tokens of a response, its end included."""
DIFFERENCES = {
    "GRPO, waited − fresh": ("grpo_lag", "grpo"),
    "GSPO − GRPO, waited": ("gspo_lag", "grpo_lag"),
    "GRPO, mixed − whole": ("grpo_partial", "grpo"),
    "GSPO − GRPO, mixed": ("gspo_partial", "grpo_partial"),
}
"""Name -> arm and other arm, which is subtracted. Mixed: responses of three versions of the weights."""


def differences(arm: str, other: str) -> pd.DataFrame:
    """Return paired differences of final reward: one row per rounding and seed, one column per number of letters."""
    columns = {n: published_values(RESULTS, f"{STUDY}:{arm}_{n}:{other}_{n}", roundings=True) for n in TOKENS}
    return pd.DataFrame(columns).droplevel(0)


def slopes(values: pd.DataFrame) -> np.ndarray:
    """Return each row's least-squares slope over log2 of the tokens; rows that lack a length are left out."""
    x = np.log2([TOKENS[n] for n in values])
    x -= x.mean()
    return values.dropna().to_numpy() @ x / (x @ x)


def slopes_table() -> pd.DataFrame:
    """Return the table of slopes, in reward per doubling of the tokens: one row per rounding and difference."""
    rows = []
    found = {name: differences(*arms) for name, arms in DIFFERENCES.items()}
    roundings = list(next(iter(found.values())).index.unique(0))
    for rounding in [*roundings, "pooled"]:
        family = []
        for name, values in found.items():
            seeds = values.dropna().groupby(level=1)  # rows with all lengths; pooled: under every rounding
            whole = seeds.mean()[seeds.size() == len(roundings)]
            one = slopes(whole if rounding == "pooled" else values.loc[rounding])
            interval = student_interval(one)
            about = {"rounding": rounding, "of": name, "n": interval.n, **interval.columns("slope")}
            family.append({**about, "p_adjusted": float(sign_flip_test(one))})
        adjusted = pd.DataFrame(family)
        adjusted["p_adjusted"] = holm(adjusted["p_adjusted"].to_numpy()) if rounding != "pooled" else np.nan
        rows.append(adjusted)
    return pd.concat(rows, ignore_index=True)


def drawn() -> pd.DataFrame:
    """Return the table for `cures_figure`; costs of waiting and mixing were not declared by length: without verdict."""
    names = {n: f"{n} letters, {tokens} tokens" for n, tokens in TOKENS.items()}
    gains = {
        cause: {names[n]: (STUDY, f"{arm}_{n}", f"{other}_{n}") for n in TOKENS}
        for cause, (arm, other) in DIFFERENCES.items()
        if cause.startswith("GSPO")
    }
    rows = published_differences(RESULTS, gains).to_dict("records")
    for cause in [cause for cause in DIFFERENCES if cause not in gains]:
        values = differences(*DIFFERENCES[cause])
        for n, name in names.items():
            for rounding in values.index.unique(0):
                interval = student_interval(values.loc[rounding, n].dropna().to_numpy())
                about = {"claim": cause, "comparison": name, "rounding": rounding}
                rows.append({**about, **interval.columns("difference"), "verdict": ""})
    return by_cause(pd.DataFrame(rows), DIFFERENCES, names.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"where to write {STUDY}.pdf, .svg, .png and .csv")
    parser.add_argument("--csv", type=Path, help="also write the table of slopes to this file")
    options = parser.parse_args()
    table = slopes_table()
    print(table.to_string(index=False))
    if options.csv:
        write_atomic(options.csv, csv_text(table))
    figure = cures_figure(
        drawn(),
        STUDY,
        "What old tokens cost GRPO, and GSPO gives back, by the length of responses.",
        "difference of final reward; panels have scales of their own",
        "Costs were declared as slopes over the lengths, not at one length: they are open.",
        one_scale=False,
    )
    for file in save_figure(figure, options.folder):
        print(file)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
