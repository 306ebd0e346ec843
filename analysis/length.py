"""Differences of reward by the length of responses on one task (questions 4 and 9).

    python analysis/length.py DIR --csv docs/results

Reads the committed tables of the studies that vary length (`STUDIES`), so that it needs no runs. Prints for each study
the slopes that it declared, for each rounding and for each seed's mean over the roundings if the seed has all of them
(`pooled`, not declared). A slope is that of one seed's difference of final reward over log2 of a response's tokens, by
least squares. Printed are the mean slope with Student's 95 % interval over seeds and the p of the exact sign-flip
test, adjusted by Holm over the study's differences. Draws DIR/STUDY as .pdf, .svg and .png and writes what is drawn
beside them as CSV.
"""

import argparse
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Lengths:
    """A study whose arms differ in the length of responses; the name of such an arm ends with a number, as in grpo_4.

    Attributes:
        unit: what the number counts.
        tokens: number -> tokens of a response, its end included.
        differences: name -> arm and other arm, which is subtracted, without their numbers.
        by_length: those of the differences that were declared at each length, too; the others have no verdict there.
        title, caption: those of the figure.
    """

    unit: str
    tokens: dict[int, int]
    differences: dict[str, tuple[str, str]]
    by_length: tuple[str, ...]
    title: str
    caption: str


STUDIES = {
    "old_tokens_length": Lengths(
        unit="letters",
        tokens={4: 5, 8: 9, 16: 17, 24: 25},
        differences={  # mixed: responses of three versions of the weights
            "GRPO, waited − fresh": ("grpo_lag", "grpo"),
            "GSPO − GRPO, waited": ("gspo_lag", "grpo_lag"),
            "GRPO, mixed − whole": ("grpo_partial", "grpo"),
            "GSPO − GRPO, mixed": ("gspo_partial", "grpo_partial"),
        },
        by_length=("GSPO − GRPO, waited", "GSPO − GRPO, mixed"),
        title="What old tokens cost GRPO, and GSPO gives back, by the length of responses.",
        caption="Costs were declared as slopes over the lengths, not at one length: they are open.",
    ),
    "noise_length": Lengths(
        unit="equations",
        tokens={2: 13, 4: 25, 8: 49},
        differences={
            "replay − GRPO": ("replay", "grpo"),  # replay does not see the noise
            "dual clip − GRPO": ("dual", "grpo"),
            "GSPO − GRPO": ("gspo", "grpo"),
            "GSPO − replay": ("gspo", "replay"),
            "GSPO − dual clip": ("gspo", "dual"),
        },
        by_length=("GSPO − GRPO", "GSPO − replay", "GSPO − dual clip"),
        title="Differences under selection noise by the length of responses.",
        caption="Those without GSPO were declared as slopes over the lengths, not at one length: they are open.",
    ),
}


def differences(name: str, arm: str, other: str) -> pd.DataFrame:
    """Return paired differences of final reward in study `name`: one row per rounding and seed, one column per
    length."""
    columns = {
        n: published_values(RESULTS, f"{name}:{arm}_{n}:{other}_{n}", roundings=True) for n in STUDIES[name].tokens
    }
    return pd.DataFrame(columns).droplevel(0)


def slopes(values: pd.DataFrame, tokens: dict[int, int]) -> np.ndarray:
    """Return each row's least-squares slope over log2 of the tokens; rows that lack a length are left out."""
    x = np.log2([tokens[n] for n in values])
    x -= x.mean()
    return values.dropna().to_numpy() @ x / (x @ x)


def slopes_table(name: str) -> pd.DataFrame:
    """Return the table of slopes of a study, in reward per doubling of the tokens: one row per rounding and
    difference."""
    rows, study = [], STUDIES[name]
    found = {what: differences(name, *arms) for what, arms in study.differences.items()}
    roundings = list(next(iter(found.values())).index.unique(0))
    for rounding in [*roundings, "pooled"]:
        family = []
        for what, values in found.items():
            seeds = values.dropna().groupby(level=1)  # rows with all lengths; pooled: under every rounding
            whole = seeds.mean()[seeds.size() == len(roundings)]
            one = slopes(whole if rounding == "pooled" else values.loc[rounding], study.tokens)
            interval = student_interval(one)
            about = {"rounding": rounding, "of": what, "n": interval.n, **interval.columns("slope")}
            family.append({**about, "p_adjusted": float(sign_flip_test(one))})
        adjusted = pd.DataFrame(family)
        adjusted["p_adjusted"] = holm(adjusted["p_adjusted"].to_numpy()) if rounding != "pooled" else np.nan
        rows.append(adjusted)
    return pd.concat(rows, ignore_index=True)


def drawn(name: str) -> pd.DataFrame:
    """Return the table for `cures_figure`; a difference that was not declared at one length has no verdict there."""
    study = STUDIES[name]
    names = {n: f"{n} {study.unit}, {tokens} tokens" for n, tokens in study.tokens.items()}
    declared = {
        what: {names[n]: (name, f"{arm}_{n}", f"{other}_{n}") for n in names}
        for what, (arm, other) in study.differences.items()
        if what in study.by_length
    }
    rows = published_differences(RESULTS, declared).to_dict("records")
    for what in [what for what in study.differences if what not in declared]:
        values = differences(name, *study.differences[what])
        for n, row in names.items():
            for rounding in values.index.unique(0):
                interval = student_interval(values.loc[rounding, n].dropna().to_numpy())
                about = {"claim": what, "comparison": row, "rounding": rounding}
                rows.append({**about, **interval.columns("difference"), "verdict": ""})
    return by_cause(pd.DataFrame(rows), study.differences, names.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write each study's figure as .pdf, .svg, .png and .csv")
    parser.add_argument("--csv", type=Path, help="also write the slopes, as STUDY_slopes/slopes.csv below this folder")
    options = parser.parse_args()
    for name, study in STUDIES.items():
        table = slopes_table(name)
        print(name, table.to_string(index=False), sep="\n")
        if options.csv:
            write_atomic(options.csv / f"{name}_slopes" / "slopes.csv", csv_text(table))
        measured = "difference of final reward; panels have scales of their own"
        figure = cures_figure(drawn(name), name, study.title, measured, study.caption, one_scale=False)
        for file in save_figure(figure, options.folder):
            print(file)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
