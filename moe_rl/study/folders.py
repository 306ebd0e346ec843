"""Reading of run folders: configuration, environment and metrics, checked line by line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.api.types import is_object_dtype

from moe_rl.checks import parse_json
from moe_rl.done import NAME, remedy, what_is_lost
from moe_rl.names import run_place, seed_of
from moe_rl.run_rows import ROWS, row_problem
from moe_rl.settings import FREE, at, flatten
from moe_rl.tables import DamagedTableError, read_table
from moe_rl.yaml_files import YamlError, parse_yaml

if TYPE_CHECKING:
    import pyarrow

KINDS = tuple(ROWS)
_OF_A_RUN = ("label", "note", "run", "distributed")
"""Parts of a configuration that each run of an arm may have in its own way."""
SOURCES = {"sft": "demonstrations", "rft": "initial", "dpo": "initial"}
"""Objective that learns from others' responses than its own policy's -> their source, unless `method.source` is set."""


class StudyDataError(ValueError):
    """Error for a run folder that cannot be read; the message says which file, where in it, and what to do."""


@dataclass(frozen=True)
class Run:
    """One (arm, seed): its folder, resolved configuration and environment, and whether it finished."""

    arm: str
    seed: int
    folder: Path
    finished: bool = False
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    environment: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arm}/seed{self.seed}"

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting: of the top of the configuration, else of its `method`, `objective` or `arm`, else
        `default`."""
        for place in (self.config, self.config.get("method"), self.config.get("objective"), self.config.get("arm")):
            if isinstance(place, dict) and place.get(name) is not None and not isinstance(place[name], dict):
                return place[name]
        return default

    @property
    def objective(self) -> str:
        """Name of the objective, e.g. `grpo`."""
        return str(self.setting("objective") or self.setting("method") or self.arm)

    @property
    def replay(self) -> str:
        """Kind of replay as the configuration names it; `none` without replay."""
        replay = self.setting("replay", "none")
        return "none" if replay is False else str(replay)  # YAML reads off, no and false as False

    @property
    def noise(self) -> float:
        """Scale of the selection noise in router-logit units: a stress test, 0 in a natural run."""
        noise = at(self.config, "method", "noise")  # elsewhere the word is another trainer's
        return float(noise) if isinstance(noise, int | float) and not isinstance(noise, bool) else 0.0

    @property
    def responses(self) -> str:
        """Source of the responses that the run learns from and that its training rewards are of.

        One of `policy`, `initial`, `demonstrations`.
        """
        source = self.setting("source")
        known = source in ("policy", *SOURCES.values())  # else another trainer's name of a data set
        return str(source if known else SOURCES.get(self.objective.lower(), "policy"))

    @property
    def rounding(self) -> str:
        """CPU kernels that the run was asked to use; `native` if nobody asked for any."""
        return str(self.environment.get("rounding") or "native")

    @property
    def method(self) -> str:
        """Objective and replay in one word, the key of a colour in figures: `grpo`, `grpo_replay`, `grpo_pr2`, ..."""
        kind = self.replay.lower()
        return self.objective if kind in ("none", "") else f"{self.objective}_{'pr2' if kind == 'pr2' else 'replay'}"


def mixed_settings(runs: Sequence[Run]) -> list[str]:
    """Return a note on each setting in which the runs of one arm differ, because such runs, pooled, are no arm.

    Left out are seeds, settings that change no number (`FREE`), and texts that every run has of its own, as names and
    places are.
    """
    by_arm: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append((run, flatten(run.config)))
    said = []
    for arm, held in by_arm.items():
        for name in dict.fromkeys(name for _, config in held for name in config):
            if name in FREE or name.endswith("seed") or name.split(".")[0] in _OF_A_RUN:
                continue
            first: dict[str, tuple[Run, Any]] = {}
            there = [(run, config[name]) for run, config in held if name in config]
            for run, value in there:
                first.setdefault(repr(value), (run, value))
            names = len(first) == len(there) and all(isinstance(value, str) for _, value in there)
            if len(first) > 1 and not names:
                each = ", ".join(f"{value!r:.40} in seed{run.seed}" for run, value in list(first.values())[:3])
                said.append(f"{arm}: its runs differ in {name} ({each}), and count as one arm all the same")
    return said


def section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a mapping in a configuration by the names that lead to it; empty if no mapping is there."""
    found = at(config, *names)
    return found if isinstance(found, dict) else {}


def folder_order(folder: Path) -> tuple[str, int]:
    """Return the sort key of a run folder: arms by name, seeds by number."""
    return folder.parent.name, seed_of(folder) or 0


def run_folders(study: Path) -> list[Path]:
    """Return the run folders ARM/seedN below a study's folder."""
    return [f for f in sorted(study.glob("*/seed*")) if f.is_dir() and seed_of(f) is not None]


def seeds_in(folder: Path) -> set[int]:
    """Return the seeds of the run folders that an arm's folder holds."""
    return {seed for path in folder.glob("seed*") if (seed := seed_of(path)) is not None}


def load_run(folder: Path, number: int, rows: dict[str, list[dict[str, Any]]]) -> Run:
    """Load the run of a folder; its metrics are added to `rows` by kind, marked with the run's number."""
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    environment = read_json(folder / "env.json") if (folder / "env.json").exists() else {}
    arm = config["arm"] if isinstance(config.get("arm"), str) else run_place(folder).parent.name
    seed = run_seed(folder, config)
    notes: list[str] = []
    lost = what_is_lost(folder)
    if lost:
        raise StudyDataError(f"{lost}. {remedy(folder)}")
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        for row in read_lines(metrics, notes):
            row[_RUN] = number
            rows[row.pop("kind")].append(row)
    else:
        notes.append("no metrics.jsonl yet")
    return Run(str(arm), seed, folder, (folder / NAME).exists(), config, environment, tuple(notes))


def run_seed(folder: Path, config: dict[str, Any]) -> int:
    """Return the seed of the run in a folder, by its `config.yaml` or, without one there, by the folder's name.

    Raises StudyDataError: the seed in `config.yaml` is no whole number, or the folder is named after another seed.
    """
    named = seed_of(run_place(folder))
    seed = config.get("seed")
    seed = named or 0 if seed is None else seed
    if type(seed) is not int:
        raise StudyDataError(f"{folder / 'config.yaml'}: seed: expected a whole number, got {seed!r:.40}")
    if named not in (None, seed):
        raise StudyDataError(
            f"{folder} holds a run of seed {seed} (config.yaml): a copy of a run is no other seed. Name the folder "
            f"seed{seed}, or move it away"
        )
    return seed


_RUN = "\0run"  # key of the run's number in a row: no metric has such a name


def kind_table(kind: str, rows: list[dict[str, Any]], runs: list[Run]) -> pd.DataFrame:
    """Return all runs' rows of a kind as one table, in the order of runs and keys.

    Of repeated rows the last is kept, and the run gets a note in `runs`, unless `rollout.lag` explains the repetition.
    """
    keys = ["step", *ROWS[kind]]
    if not rows:
        return pd.DataFrame(columns=["arm", "seed", *keys])
    frame = pd.DataFrame(rows)
    number = frame[_RUN].to_numpy()
    frame = frame.drop(columns=[name for name in ("arm", "seed") if name in frame])
    frame.insert(0, "arm", pd.Series([run.arm for run in runs]).iloc[number].set_axis(frame.index))
    frame.insert(1, "seed", np.array([run.seed for run in runs])[number])
    for column in filter(lambda name: name != "arm" and is_object_dtype(frame[name]), frame.columns):
        # null is a number that was not finite or not asked for
        if all(value is None or isinstance(value, int | float) for value in frame[column]):
            frame[column] = frame[column].astype(float)
    keys = [_RUN, *keys]
    again = frame.duplicated(keys)
    if again.any():  # the later row counts
        for i in frame.loc[again, _RUN].unique():
            if not _sampled_ahead(runs[i], frame[frame[_RUN] == i], keys):
                note = f"repeated {kind} rows after a resume; the last of each was kept"
                runs[i] = replace(runs[i], notes=(*runs[i].notes, note))
        frame = frame.drop_duplicates(keys, keep="last")
    return frame.sort_values(keys).drop(columns=_RUN).reset_index(drop=True)


def _sampled_ahead(run: Run, rows: pd.DataFrame, keys: list[str]) -> bool:
    """Return whether rows that repeat a key are expected: a run under `rollout.lag` samples several batches first.

    Such rows are of the first step, and no key is repeated more than `rollout.lag` times.
    """
    lag = at(run.config, "rollout", "lag")
    if not isinstance(lag, int):
        return False
    again = rows[rows.duplicated(keys)]
    return bool((again["step"] == rows["step"].min()).all()) and int(again.groupby(keys).size().max()) <= lag


def read_lines(path: Path, notes: list[str], damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `metrics.jsonl` that are of known kinds.

    Args:
        notes: list that takes notes on the file.
        damaged: list that takes a message for each line that is no row; such a line is left out. A last line without
            its end is left out without a message, for it may still be being written. None: such a last line gives a
            note, any other raises StudyDataError.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    whole = len(lines)
    if rest:
        lines.append(rest)
    unknown = set()
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            if problem := row_problem(row):
                raise ValueError(problem)
        except ValueError as error:  # json's and unicode's errors are ValueErrors
            wrong = f"{path} line {number}: not a metrics row ({error})"
            if number > whole:
                if damaged is None:
                    notes.append(f"{path.name} line {number} is cut off (interrupted write) and was left out")
            elif damaged is None:
                raise StudyDataError(
                    f"{wrong}. The file was damaged after it was written: restore it, or delete this run's folder and "
                    "run the study again (the rest is kept)."
                ) from error
            else:
                damaged.append(wrong)
            continue
        kind = row["kind"]
        if kind in KINDS:
            yield row
        elif kind not in unknown:
            unknown.add(kind)
            notes.append(f"rows of kind {kind!r} were left out (written by another version?)")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; raise StudyDataError naming the file if the file holds none."""
    try:
        content = parse_yaml(path.read_bytes())
    except (OSError, YamlError) as error:
        raise StudyDataError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise StudyDataError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a mapping from a JSON file; any other value is returned as `{"value": ...}`.

    Raises StudyDataError: the file cannot be read or is no JSON; the message names the file.
    """
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StudyDataError(f"{path}: not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {"value": content}


def read_parquet(path: Path) -> "pyarrow.Table":
    """Read a Parquet file; raise StudyDataError naming the file if it cannot be read or is damaged."""
    try:
        return read_table(path)
    except DamagedTableError as error:
        raise StudyDataError(f"{error}. {remedy(path.parents[1])}") from error


def stacked(tables: "list[pyarrow.Table]") -> pd.DataFrame:
    """Return many small tables as one DataFrame, without columns of lists.

    The token view reads those columns, one step at a time. Converting tables one by one costs far more.
    """
    import pyarrow

    whole = pyarrow.concat_tables(tables, promote_options="permissive")
    left_out = [f.name for f in whole.schema if f.name.startswith("__index") or pyarrow.types.is_nested(f.type)]
    return whole.drop_columns(left_out).to_pandas(ignore_metadata=True)


def step_of(path: Path) -> int:
    """Return the step in a file name; raise StudyDataError if there is none."""
    match = re.search(r"step_(\d+)", path.name)
    if not match:
        raise StudyDataError(f"{path}: expected a name like step_000012{path.suffix}")
    return int(match.group(1))


def update_of(path: Path) -> int:
    """Return the update in a file name; 0 if there is none."""
    match = re.search(r"update_(\d+)", path.name)
    return int(match.group(1)) if match else 0
