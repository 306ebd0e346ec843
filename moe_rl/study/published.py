"""Comparison of a study's committed tables with repetitions of the study: another processor is another rounding."""

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
from moe_rl.study.roundings import NATIVE, Rounding, components_of, conclusions_of, other_roundings
from moe_rl.study.shipped import shipped_studies
from moe_rl.study.statistics import Interval, student_interval

RESULTS = Path("docs") / "results"


class ResultsError(ValueError):
    """Error about committed tables that are missing or do not fit, or a marker that cannot be read.

    The message says where, and what to do.
    """


NAMES = ("arm", "other", "label", "other_label", "rounding")
"""Columns of committed tables that hold names."""


def read_table(file: Path) -> pd.DataFrame:
    """Return a committed table. Its `NAMES` are texts, also those that look like a number (`8`).

    Only an empty cell is a missing value, not a name such as `null`.
    """
    return pd.read_csv(file, dtype=dict.fromkeys(NAMES, str), keep_default_na=False, na_values=[""])


def published_roundings(folder: Path) -> dict[str, Rounding]:
    """Return the roundings of a committed `runs.csv` by name, in its order, `native` first.

    Each has its runs, and the comparisons of `comparisons.csv` computed from these runs.

    Raises ResultsError where the folder has no such tables.
    """
    for name in ("runs.csv", "comparisons.csv"):
        if not (folder / name).is_file():
            raise ResultsError(
                f"{folder}: no {name}; expected the committed results of a study that compares arms, from "
                "the root of the repository"
            )
    runs, table = read_table(folder / "runs.csv"), read_table(folder / "comparisons.csv")
    if "rounding" not in runs:
        runs["rounding"] = NATIVE
    pairs = list(zip(table["arm"], table["other"], table["noise"].astype(float), strict=True))
    return {
        str(name): Rounding(part, compare_runs(part, pairs, float(table["interest"].iloc[0])))
        for name, part in runs.groupby("rounding", sort=False)
    }


def check_settings(data: StudyData) -> None:
    """Raise ResultsError if a run, under any rounding, has other settings than the package's study of that name."""
    path = shipped_studies().get(data.name)
    if path is None:
        return
    study = load_study(path)
    for run in (run for runs in (data, *data.roundings.values()) for run in runs.runs):
        known = run.arm in study.arms
        changed = changed_settings(run.config, study.resolve(run.arm, run.seed)) if known else ["no such arm"]
        if changed:
            raise ResultsError(
                f"{run.name} was run with other settings than those of {path}, of which the results are "
                f"committed: {', '.join(changed)}"
            )


def against_published(data: StudyData, folder: Path, name: str) -> dict[str, pd.DataFrame]:
    """Return the tables `roundings` and `variance_components` of a published study with the same study run again.

    `roundings` says what becomes of each published conclusion (`conclusions_of`). The runs of `data`, which are the
    study run again, count as the rounding `name`, and those of its `other_roundings` as further ones.

    Raises ResultsError where none of the published comparisons has runs in `data`, or runs have other settings than the
    study of that name.
    """
    check_settings(data)
    both = published_roundings(folder)
    known = [f"{pair.arm} - {pair.other}" for pair in both[NATIVE].pairs]
    for rounding, study in {NATIVE: data, **other_roundings(data)}.items():
        both[_rounding_name(name, rounding)] = Rounding(run_outcomes(study), comparisons(study))
    if not {f"{pair.arm} - {pair.other}" for pair in both[name].pairs} & set(known):
        raise ResultsError(f"{folder}: none of its comparisons ({', '.join(known)}) has runs in {data.name}")
    return {"roundings": conclusions_of(both), "variance_components": components_of(both)}


def tables_of_repetition(data: StudyData, folder: Path, name: str) -> dict[str, pd.DataFrame]:
    """Return the tables of `against_published`, or none if the published study compares no arms.

    Raises ResultsError as `against_published` does, and where there is no `folder` of the published study.
    """
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
    """Return the study that committed tables are of, and the name of its repetition.

    The name is NAME of a folder STUDY_NAME, empty for the folder of the study itself.
    """
    study = json.loads((folder / "env.json").read_bytes())["study"]
    return study, "" if folder.name == study else folder.name.removeprefix(f"{study}_")


def _rounding_name(name: str, rounding: str) -> str:
    """Return the name that a rounding of the runs in a folder STUDY_NAME has beside the roundings of STUDY itself."""
    return f"{name}_{rounding}" if name and rounding != NATIVE else name or rounding


def _roundings_of(folder: Path) -> pd.DataFrame:
    """Return the table `roundings` of a folder without the pooled rows.

    If the table of a folder STUDY_NAME has no rounding NAME, the folder was not compared with STUDY: all roundings of
    the table, also `native`, are then of the folder's own runs and get the names of `_rounding_name`.
    """
    _, name = _study_of(folder)
    table = read_table(folder / "roundings.csv")
    table = table[table["rounding"] != "pooled"]
    if name and name not in set(table["rounding"]):
        table = table.assign(rounding=[_rounding_name(name, one) for one in table["rounding"]])
    return table


def repetitions(results: Path, study: str | None = None) -> Iterator[pd.DataFrame]:
    """Yield the committed comparisons of every repetition of all studies, or of one study.

    Each is the rows of one rounding in a table `roundings`, with the columns `study` and `folder`. Each rounding of a
    study comes once, without `native`; roundings with so few pairs that no difference could be resolved
    (`fewest_pairs`) are left out.
    """
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
    """Return rounding, n, difference, low, high and verdict of arm - other from the committed tables in `results`.

    The study as it was run first (`native`) comes first, then its `repetitions`; the list is empty if the two arms were
    never compared. The values of a comparison that was declared the other way round are turned round.
    """
    first = read_table(results / study / "comparisons.csv").assign(rounding=NATIVE)
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
"""A declared comparison: the study, the arm, and the other arm, whose value is subtracted."""


def published_differences(results: Path, declared: Mapping[str, Mapping[str, Declared]]) -> pd.DataFrame:
    """Return the `published_repetitions` of every comparison under its heading, in order, for `claims_figure`."""
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
"""Quantity of a run -> its column in the committed tables, and the column that is subtracted from it, if any.

`sampled` is the reward of the rollout engine's responses in the last steps, `held_out` that of the training engine's
responses; `final` is the reward that the study compares, `best` that of the best five steps in a row. `training` and
the formats are columns of `both_engines.csv`: rewards of the same last policies, on the same prompts with the same
random numbers, by the training engine and by copies with weights of these formats."""


def published_values(
    results: Path, name: str, of: str = "final", roundings: bool = False, without_failed: bool = False
) -> pd.Series:
    """Return an arm's values (STUDY:ARM) or the paired differences of two arms (STUDY:ARM:OTHER) from `runs.csv`.

    The values are indexed by the study (if STUDY is a repetition, the study that it repeats), the rounding and the
    seed. of: a quantity of `KINDS`. roundings: include the roundings under which the study was repeated.
    without_failed: leave out runs that failed and, with two arms, the pairs in which one run failed.

    Raises:
        ResultsError: no table holds the values, also where only the comparisons of a rounding are committed and not
            its runs.
    """
    study, *arms = name.split(":")
    if len(arms) not in (1, 2) or not (results / study / "runs.csv").is_file():
        raise ResultsError(f"{name}: expected STUDY:ARM or STUDY:ARM:OTHER, arms of {results}/STUDY/runs.csv")
    table = read_table(results / study / "runs.csv")
    if "rounding" not in table:
        table["rounding"] = NATIVE
    if "sampled" not in table:
        table["sampled"] = table["final"].mask(table["measured"] == "held out")
    if (both := results / study / "both_engines.csv").is_file():
        table = table.merge(read_table(both), how="left", on=["arm", "seed", "rounding"])
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


def published_updates(results: Path, study: str) -> pd.DataFrame:
    """Return the tables `updates` of a study and of its repetitions, with the columns `folder` and `rounding`.

    There is one row per run: what `update_outcomes` returns. Roundings of a folder STUDY_NAME are told from those of
    STUDY (`_rounding_name`).
    """
    files = [file for file in sorted(results.glob(f"{study}*/updates.csv")) if _study_of(file.parent)[0] == study]
    tables = {file.parent.name: read_table(file) for file in files}
    rows = pd.concat([table.assign(folder=folder) for folder, table in tables.items()], ignore_index=True)
    kernels = rows["rounding"].fillna(NATIVE) if "rounding" in rows else [NATIVE] * len(rows)
    names = [_study_of(results / folder)[1] for folder in rows["folder"]]
    return rows.assign(rounding=[_rounding_name(*both) for both in zip(names, kernels, strict=True)])


def less_same_seeds(found: pd.Series, other: pd.Series) -> pd.Series:
    """Return `published_values` minus those of another study, for each rounding and seed that both have.

    Raises ResultsError where the two have none in common.
    """
    shared = found.droplevel(0).sub(other.droplevel(0)).dropna()
    if shared.empty:
        raise ResultsError("no run of the same rounding and seed in both studies, so that nothing can be taken away")
    return pd.concat({found.index[0][0]: shared})


def _without_runs(folder: Path, runs: pd.DataFrame) -> list[str]:
    """Return the roundings of a folder's own runs that are in its table `roundings` but not in `runs`."""
    if not (folder / "roundings.csv").is_file():
        return []
    _, name = _study_of(folder)
    own = [one for one in _roundings_of(folder)["rounding"].unique() if not name or f"{one}_".startswith(f"{name}_")]
    return [one for one in own if one not in {_rounding_name(name, rounding) for rounding in runs["rounding"]}]


def over_seeds(found: pd.Series) -> Interval:
    """Return Student's interval of `published_values`, in which each seed counts once, as the mean of its repetitions.

    Raises ResultsError where different studies share seeds: their values are then not independent.
    """
    seeds = {str(study): set(part.index.get_level_values(2)) for study, part in found.groupby(level=0, sort=False)}
    for one, other in combinations(seeds, 2):
        if shared := sorted(seeds[one] & seeds[other]):
            raise ResultsError(
                f"{one} and {other} share the seeds {', '.join(map(str, shared))}, which would count as independent; "
                "name studies of different seeds"
            )
    return student_interval(found.groupby(level=[0, 2]).mean().to_numpy())
