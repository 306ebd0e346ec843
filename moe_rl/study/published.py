"""The committed tables of a study, and the same study run again elsewhere: another processor is another rounding."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path

import pandas as pd

from moe_rl.rollout.engine_config import WEIGHT_FORMATS
from moe_rl.study.comparing import compare_runs, comparisons
from moe_rl.study.config import changed_settings, load_study
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.roundings import NATIVE, Rounding, components_of, conclusions_of
from moe_rl.study.shipped import shipped_studies
from moe_rl.study.statistics import Interval, student_interval

RESULTS = Path("docs") / "results"


class ResultsError(ValueError):
    """Committed tables that are not there or do not fit, or a marker that cannot be read; says where and what to do."""


def published_roundings(folder: Path) -> dict[str, Rounding]:
    """The roundings that a committed `runs.csv` holds, `native` first, each with the comparisons of `comparisons.csv`.

    Raises ResultsError where the folder has no such tables.
    """
    for name in ("runs.csv", "comparisons.csv"):
        if not (folder / name).is_file():
            raise ResultsError(
                f"{folder}: no {name}; expected the committed results of a study that compares arms, from "
                "the root of the repository"
            )
    runs, table = pd.read_csv(folder / "runs.csv"), pd.read_csv(folder / "comparisons.csv")
    if "rounding" not in runs:
        runs["rounding"] = NATIVE
    pairs = list(zip(table["arm"], table["other"], table["noise"].astype(float), strict=True))
    return {
        str(name): Rounding(part, compare_runs(part, pairs, float(table["interest"].iloc[0])))
        for name, part in runs.groupby("rounding", sort=False)
    }


def check_settings(data: StudyData) -> None:
    """Raises ResultsError where a run has other settings than the study of that name that comes with the package."""
    path = shipped_studies().get(data.name)
    if path is None:
        return
    study = load_study(path)
    for run in data.runs:
        known = run.arm in study.arms
        changed = changed_settings(run.config, study.resolve(run.arm, run.seed)) if known else ["no such arm"]
        if changed:
            raise ResultsError(
                f"{run.name} was run with other settings than those of {path}, of which the results are "
                f"committed: {', '.join(changed)}"
            )


def against_published(data: StudyData, folder: Path, name: str) -> dict[str, pd.DataFrame]:
    """`roundings` and `variance_components` of a published study and of the same study run again: what becomes of each
    published conclusion (`conclusions_of`). The runs of `data` are the rounding `name`.

    Raises ResultsError where none of the published comparisons has runs here, or runs have other settings than the
    study of that name.
    """
    check_settings(data)
    both = published_roundings(folder)
    known = [f"{pair.arm} - {pair.other}" for pair in both[NATIVE].pairs]
    for rounding, study in {NATIVE: data, **data.roundings}.items():
        called = name if rounding == NATIVE else f"{name}_{rounding}"
        both[called] = Rounding(run_outcomes(study), comparisons(study))
    if not {f"{pair.arm} - {pair.other}" for pair in both[name].pairs} & set(known):
        raise ResultsError(f"{folder}: none of its comparisons ({', '.join(known)}) has runs in {data.name}")
    return {"roundings": conclusions_of(both), "variance_components": components_of(both)}


def published_repetitions(results: Path, study: str, arm: str, other: str) -> list[dict[str, object]]:
    """rounding, n, difference, low, high and verdict of arm - other in the committed tables of `results`: as the
    study was run first (`native`), then under other roundings and on other machines; empty where it was never compared.
    A study may have declared the comparison the other way round."""
    tables = [pd.read_csv(results / study / "comparisons.csv").assign(rounding=NATIVE)]
    for file in sorted(results.glob("*/roundings.csv")):
        if json.loads((file.parent / "env.json").read_text())["study"] == study:
            tables.append(pd.read_csv(file))
    found: dict[str, dict[str, object]] = {}
    for row in pd.concat(tables).to_dict("records"):
        if row["rounding"] == "pooled" or {row["arm"], row["other"]} != {arm, other}:
            continue
        ends, verdict = (row["difference"], row["low"], row["high"]), row["verdict"]
        if row["arm"] == other:
            ends = (-ends[0], -ends[2], -ends[1])
            verdict = {"higher": "lower", "lower": "higher"}.get(verdict, verdict)
        one = dict(zip(("difference", "low", "high"), ends, strict=True))
        found.setdefault(row["rounding"], {"rounding": row["rounding"], "n": row["n"], **one, "verdict": verdict})
    return list(found.values())


Declared = tuple[str, str, str]
"""Where a comparison was declared: study, arm, the arm that is taken from it."""


def published_differences(results: Path, declared: Mapping[str, Mapping[str, Declared]]) -> pd.DataFrame:
    """`published_repetitions` of every comparison under its heading, in order: what `claims_figure` takes."""
    return pd.DataFrame(
        {"claim": claim, "comparison": comparison, "study": study, "arm": arm, "other": other, **found}
        for claim, comparisons in declared.items()
        for comparison, (study, arm, other) in comparisons.items()
        for found in published_repetitions(results, study, arm, other)
    )


def _lost(weight_format: str, runs: pd.DataFrame) -> pd.Series:
    return runs["training"] - runs[weight_format]


KINDS: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "final": lambda runs: runs["final"],
    "held_out": lambda runs: runs["held_out"],
    "held_out_less_final": lambda runs: runs["held_out"] - runs["final"],
    "by_training": lambda runs: runs["training"],
    **{f"by_{name}": itemgetter(name) for name in WEIGHT_FORMATS},
    **{f"lost_by_{name}": partial(_lost, name) for name in WEIGHT_FORMATS},
}
"""Final reward is of responses that the rollout engine samples, held out of ones that the training engine does. The
others are of `both_engines.csv`: the same last policies, prompts and random numbers by the training engine and by
copies with weights of these formats."""


def published_values(
    results: Path, name: str, of: str = "final", roundings: bool = False, without_failed: bool = False
) -> pd.Series:
    """Of STUDY:ARM the arm's values, of STUDY:ARM:OTHER the paired differences, from the committed `runs.csv`; indexed
    by the study that it is or repeats, the rounding and the seed.

    of: see `KINDS`. roundings: those that the study was repeated under, too. without_failed: leave out runs that
    failed, and of two arms the pairs in which one did.

    Raises:
        ResultsError: what no table holds.
    """
    study, *arms = name.split(":")
    if len(arms) not in (1, 2) or not (results / study / "runs.csv").is_file():
        raise ResultsError(f"{name}: expected STUDY:ARM or STUDY:ARM:OTHER, arms of {results}/STUDY/runs.csv")
    table = pd.read_csv(results / study / "runs.csv")
    if "rounding" not in table:
        table["rounding"] = NATIVE
    if (both := results / study / "both_engines.csv").is_file():
        table = table.merge(pd.read_csv(both), how="left", on=["arm", "seed", "rounding"])
    if unknown := set(arms) - set(table["arm"]):
        known = ", ".join(dict.fromkeys(table["arm"]))
        raise ResultsError(f"{name}: {study} has no arm {' or '.join(sorted(unknown))}; it has {known}")
    if not roundings:
        table = table[table["rounding"] == NATIVE]
    repeated = json.loads((results / study / "env.json").read_text())["study"]
    rows = table.set_index([table["rounding"].rename(None), table["seed"].rename(None)])
    try:
        found = KINDS[of](rows)
    except KeyError as error:
        raise ResultsError(
            f"{name}: {study} has no both_engines.csv with the column {error} (analysis/both_engines.py)"
        ) from error
    if without_failed:
        found = found.mask(rows["failed"].astype(bool))
    arm, *other = (found[rows["arm"] == one] for one in arms)
    return pd.concat({repeated: (arm - other[0] if other else arm).dropna()})


def over_seeds(found: pd.Series) -> Interval:
    """Student's interval of `published_values`, of which a seed counts once: the mean of its repetitions."""
    return student_interval(found.groupby(level=[0, 2]).mean().to_numpy())
