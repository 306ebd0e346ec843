"""The committed tables of a study, and the same study run again elsewhere: another processor is another rounding."""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

import pandas as pd

from moe_rl.rollout.engine_config import WEIGHT_FORMATS
from moe_rl.study.comparing import compare_runs, comparisons
from moe_rl.study.config import changed_settings, load_study
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.power import fewest_pairs
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
        both[_called(name, rounding)] = Rounding(run_outcomes(study), comparisons(study))
    if not {f"{pair.arm} - {pair.other}" for pair in both[name].pairs} & set(known):
        raise ResultsError(f"{folder}: none of its comparisons ({', '.join(known)}) has runs in {data.name}")
    return {"roundings": conclusions_of(both), "variance_components": components_of(both)}


def tables_of_repetition(data: StudyData, folder: Path, name: str) -> dict[str, pd.DataFrame]:
    """`against_published`; no tables where the published study compares no arms, so that no conclusions could survive.
    Raises ResultsError where nothing of it is published, too."""
    if not folder.is_dir():
        raise ResultsError(
            f"{folder}: no such folder, and runs called {data.name}_{name} are set beside the committed results of "
            f"{data.name}. Do this from the root of the repository, write {data.name} first, or rename the runs' folder"
        )
    if (folder / "comparisons.csv").is_file():
        return against_published(data, folder, name)
    check_settings(data)
    return {}


def _study_of(folder: Path) -> tuple[str, str]:
    """The study that committed tables are of, and what it is called where it was run again: NAME of the folder
    STUDY_NAME, empty for the study's own folder."""
    study = json.loads((folder / "env.json").read_bytes())["study"]
    return study, "" if folder.name == study else folder.name.removeprefix(f"{study}_")


def _called(name: str, rounding: str) -> str:
    """What a rounding of the runs in the folder STUDY_NAME is called beside those of the study itself."""
    return f"{name}_{rounding}" if name and rounding != NATIVE else name or rounding


def _roundings_of(folder: Path) -> pd.DataFrame:
    """The table `roundings` of a folder without its pooled rows. A folder STUDY_NAME whose table has no rounding NAME
    was not set beside the study: its roundings, `native` too, are its own, and called as `_called` says."""
    _, name = _study_of(folder)
    table = pd.read_csv(folder / "roundings.csv")
    table = table[table["rounding"] != "pooled"]
    if name and name not in set(table["rounding"]):
        table = table.assign(rounding=[_called(name, one) for one in table["rounding"]])
    return table


def repetitions(results: Path, study: str | None = None) -> Iterator[pd.DataFrame]:
    """The committed comparisons of every repetition of every study, or of one: rows of a table `roundings` with `study`
    and `folder`. Each rounding of a study once; left out are those with so few pairs that no difference could be
    resolved (`fewest_pairs`)."""
    seen = set()
    for file in sorted(results.glob("*/roundings.csv")):
        of, _ = _study_of(file.parent)
        if study not in (None, of):
            continue
        for rounding, table in _roundings_of(file.parent).groupby("rounding", sort=False):
            resolvable = table["n"].max() >= fewest_pairs(len(table))
            if rounding != NATIVE and resolvable and (of, rounding) not in seen:
                seen.add((of, rounding))
                yield table.assign(study=of, folder=file.parent.name)


def published_repetitions(results: Path, study: str, arm: str, other: str) -> list[dict[str, object]]:
    """rounding, n, difference, low, high and verdict of arm - other in the committed tables of `results`: as the
    study was run first (`native`), then its `repetitions`; empty where it was never compared. A study may have declared
    the comparison the other way round."""
    first = pd.read_csv(results / study / "comparisons.csv").assign(rounding=NATIVE)
    found: list[dict[str, object]] = []
    for row in pd.concat([first, *repetitions(results, study)]).to_dict("records"):
        if {row["arm"], row["other"]} != {arm, other}:
            continue
        ends, verdict = (row["difference"], row["low"], row["high"]), row["verdict"]
        if row["arm"] == other:
            ends = (-ends[0], -ends[2], -ends[1])
            verdict = {"higher": "lower", "lower": "higher"}.get(verdict, verdict)
        one = dict(zip(("difference", "low", "high"), ends, strict=True))
        found.append({"rounding": row["rounding"], "n": row["n"], **one, "verdict": verdict})
    return found


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


KINDS: dict[str, tuple[str, ...]] = {
    "final": ("final",),
    "sampled": ("sampled",),
    "held_out": ("held_out",),
    "held_out_less_sampled": ("held_out", "sampled"),
    "best_less_final": ("best", "final"),
    **{f"by_{name}": (name,) for name in ("training", *WEIGHT_FORMATS)},
    **{f"lost_by_{name}": ("training", name) for name in WEIGHT_FORMATS},
}
"""What of a run -> its column, and the one that is taken from it. Sampled are responses of the rollout engine, in the
last steps, held out ones of the training engine; final is the reward that the study compares, best that of the best
five steps in a row. The others are of `both_engines.csv`: the same last policies, prompts and random numbers by the
training engine and by copies with weights of these formats."""


def published_values(
    results: Path, name: str, of: str = "final", roundings: bool = False, without_failed: bool = False
) -> pd.Series:
    """Of STUDY:ARM the arm's values, of STUDY:ARM:OTHER the paired differences, from the committed `runs.csv`; indexed
    by the study that it is or repeats, the rounding and the seed.

    of: see `KINDS`. roundings: those that the study was repeated under, too. without_failed: leave out runs that
    failed, and of two arms the pairs in which one did.

    Raises:
        ResultsError: what no table holds, among it the runs of a rounding of which the comparisons alone are committed.
    """
    study, *arms = name.split(":")
    if len(arms) not in (1, 2) or not (results / study / "runs.csv").is_file():
        raise ResultsError(f"{name}: expected STUDY:ARM or STUDY:ARM:OTHER, arms of {results}/STUDY/runs.csv")
    table = pd.read_csv(results / study / "runs.csv")
    if "rounding" not in table:
        table["rounding"] = NATIVE
    if "sampled" not in table:
        table["sampled"] = table["final"].mask(table["measured"] == "held out")
    if (both := results / study / "both_engines.csv").is_file():
        table = table.merge(pd.read_csv(both), how="left", on=["arm", "seed", "rounding"])
    if unknown := set(arms) - set(table["arm"]):
        known = ", ".join(dict.fromkeys(table["arm"]))
        raise ResultsError(f"{name}: {study} has no arm {' or '.join(sorted(unknown))}; it has {known}")
    if not roundings:
        table = table[table["rounding"] == NATIVE]
    elif lacking := _without_runs(results / study, table):
        raise ResultsError(
            f"{name}: of the runs of {study} under {', '.join(lacking)} only its comparisons are kept "
            f"({results / study / 'roundings.csv'}), so that there is nothing to average; leave out --roundings"
        )
    repeated, _ = _study_of(results / study)
    rows = table.set_index([table["rounding"].rename(None), table["seed"].rename(None)])
    try:
        found, *less = (rows[name] for name in KINDS[of])
    except KeyError as error:
        raise ResultsError(
            f"{name}: {study} has no both_engines.csv with the column {error} (analysis/both_engines.py)"
        ) from error
    found = found - less[0] if less else found
    if without_failed:
        found = found.mask(rows["failed"].astype(bool))
    arm, *other = (found[rows["arm"] == one] for one in arms)
    return pd.concat({repeated: (arm - other[0] if other else arm).dropna()})


def less_same_seeds(found: pd.Series, other: pd.Series) -> pd.Series:
    """`published_values` less those of another study, run by run of a rounding and seed that both have. Raises
    ResultsError where they have none in common."""
    shared = found.droplevel(0).sub(other.droplevel(0)).dropna()
    if shared.empty:
        raise ResultsError("no run of the same rounding and seed in both studies, so that nothing can be taken away")
    return pd.concat({found.index[0][0]: shared})


def _without_runs(folder: Path, runs: pd.DataFrame) -> list[str]:
    """The roundings of a folder's own runs that its table `roundings` has, and `runs` has not."""
    if not (folder / "roundings.csv").is_file():
        return []
    _, name = _study_of(folder)
    own = [one for one in _roundings_of(folder)["rounding"].unique() if not name or f"{one}_".startswith(f"{name}_")]
    return [one for one in own if one not in {_called(name, rounding) for rounding in runs["rounding"]}]


def over_seeds(found: pd.Series) -> Interval:
    """Student's interval of `published_values`, of which a seed counts once: the mean of its repetitions. Raises
    ResultsError where different studies share seeds: what they share is not independent."""
    seeds = {str(study): set(part.index.get_level_values(2)) for study, part in found.groupby(level=0, sort=False)}
    for one, other in combinations(seeds, 2):
        if shared := sorted(seeds[one] & seeds[other]):
            raise ResultsError(
                f"{one} and {other} share the seeds {', '.join(map(str, shared))}, which would count as independent; "
                "name studies of different seeds"
            )
    return student_interval(found.groupby(level=[0, 2]).mean().to_numpy())
