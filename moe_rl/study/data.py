"""Run folders as tidy tables: `load(path)` gives one row per measurement, with its arm and seed.

>>> data = load("runs/replay_vs_gspo")                                     # doctest: +SKIP
>>> data.rollouts.groupby(["arm", "step"])["reward"].mean()                # doctest: +SKIP

Only folders are read, never a model, so a study that was copied from a cluster loads the same.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.names import ROUNDING, nearest, run_place, seed_of
from moe_rl.study import shown
from moe_rl.study.declarations import check_declarations
from moe_rl.study.folders import (
    KINDS,
    Run,
    StudyDataError,
    folder_order,
    kind_table,
    load_run,
    mixed_settings,
    read_json,
    read_parquet,
    read_yaml,
    run_folders,
    seeds_in,
    stacked,
    step_of,
    update_of,
)
from moe_rl.study.words import not_mathematics

FIELDS = {kind: "timings" if kind == "step" else f"{kind}s" for kind in KINDS}
"""Kind of row -> field of StudyData that holds rows of this kind."""


@dataclass(frozen=True)
class StudyData:
    """A study, or a single run, as tables.

    `rollouts`, `updates`, `probes`, `evals`: one row per line of metrics.jsonl of that kind, with `arm` and
    `seed` in front (columns as the run wrote them; log-ratios in nats, rates as numerator and denominator).
    `timings`: seconds of each step. `engines`: the gap between rollout and training engine, one row per `pair`; empty
    where one engine did both. `decompositions`: the log-ratio split into weights, routes and their interaction, where
    the study asked for the split. `floors`: noise floors, which are what changes with equal weights, one row per
    `variant`. `tokens` is read on first use, `roundings` are the same study under other CPU kernels, `route_files`
    lists the stored routes, for `moe_rl.training.route_tables.read_route_table`. `not_started` names runs that the
    study declares and that have no folder yet, `notes` has remarks on what was odd in the folders.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    runs: tuple[Run, ...]
    rollouts: pd.DataFrame = field(default_factory=pd.DataFrame)
    updates: pd.DataFrame = field(default_factory=pd.DataFrame)
    probes: pd.DataFrame = field(default_factory=pd.DataFrame)
    evals: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: tuple[str, ...] = ()
    not_started: tuple[str, ...] = ()
    timings: pd.DataFrame = field(default_factory=pd.DataFrame)
    engines: pd.DataFrame = field(default_factory=pd.DataFrame)
    decompositions: pd.DataFrame = field(default_factory=pd.DataFrame)
    floors: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def arms(self) -> pd.DataFrame:
        """One row per arm, in the study's order: label, objective, replay, noise, method, seeds, finished."""
        declared = declared_arms(self.config)
        rows: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            row = rows.setdefault(
                run.arm,
                {
                    "label": _drawable(str(declared.get(run.arm, {}).get("label") or run.setting("label") or run.arm)),
                    "objective": run.objective,
                    "replay": run.replay,
                    "noise": run.noise,
                    "method": run.method,
                    "seeds": [],
                    "finished": 0,
                },
            )
            row["seeds"].append(run.seed)
            row["finished"] += run.finished
        order = [arm for arm in declared if arm in rows] + [arm for arm in rows if arm not in declared]
        return pd.DataFrame.from_dict({arm: rows[arm] for arm in order}, orient="index").rename_axis("arm")

    def __repr__(self) -> str:
        return f"{self._title}\n{self._overview.to_string(float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._title)}</p>{self._overview.to_html(float_format='{:.3f}'.format)}"

    @property
    def _title(self) -> str:
        """Name of the study, finished runs and numbers of rows, in one line."""
        tables = {name: getattr(self, name) for name in FIELDS.values() if name != "timings"}
        rows = ", ".join(f"{name} {len(table)}" for name, table in tables.items() if len(table))
        finished, notes = len(self.runs) - len(self.unfinished), f"; {len(self.notes)} notes" if self.notes else ""
        return f"{self.name}: {finished} of {len(self.runs)} runs finished; rows: {rows or 'none'}{notes}"

    @cached_property
    def _overview(self) -> pd.DataFrame:
        """Table with one row per arm, as `moe_rl.study.shown.overview` makes it."""
        of_policy = {run.arm for run in self.runs if run.responses == "policy"}
        return shown.overview(self.arms, self.rollouts, self.probes, of_policy)

    def rates(
        self, level: str = "slot", by: str | Sequence[str] = ("arm", "update"), table: str = "probes"
    ) -> pd.DataFrame:
        """Return expert-change rates: the share of slots, of (token, site) pairs or of tokens that changed.

        Counts are summed before they are divided. One row per group, with `rate`, `changed` and `total`.

        Args:
            level: `slot`, `site` or `token`.
            by: columns, e.g. `arm`, `seed`, `step`, `update` (`variant` in floors, which have no `update`);
                `routing_site` gives each site its row (slots only).
            table: `probes` (old policy against new, both with live routing), `updates` (update forward against old
                policy), `engines` or `floors`.

        Raises StudyDataError: an unknown level, table or column, or rows without these counts.

        >>> data.rates("slot", by=["arm", "update"])                               # doctest: +SKIP
        """
        if table not in shown.TABLES:
            raise StudyDataError(f"rates: no table {table!r}{nearest(table, shown.TABLES)}")
        return shown.rates(getattr(self, table), level, by, table)

    @staticmethod
    def describe(name: str) -> "shown.Described":
        """Return definition, unit, quotient and source of a metric, in every kind of row that has it.

        The result shows itself in a notebook. `slot_change` and similar rates are kept as two counts, `slots_changed`
        over `slots`. Raises StudyDataError: an unknown name; the message has the nearest.

        >>> StudyData.describe("grad_norm")
        grad_norm, update rows [1]: global L2 norm of the gradient before clipping
          (r = new / old probability of a token, d = log r (nats), s = exp(mean of d over a sequence))
        """
        return shown.describe(name)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The study's own env.json (of the command that started it); empty for one run alone and for joined studies."""
        file = self.folder / "env.json"
        return read_json(file) if file.exists() and len(self.runs) != 1 and not self._joined else {}

    @cached_property
    def roundings(self) -> dict[str, "StudyData"]:
        """The same study under other roundings, by name: its folders `rounding_<name>` that hold runs."""
        if self._joined:
            return {}
        folders = [folder for folder in sorted(self.folder.glob(f"{ROUNDING}*")) if any(folder.glob("*/seed*"))]
        return {folder.name.removeprefix(ROUNDING): load(folder) for folder in folders}

    @property
    def _joined(self) -> bool:
        """Whether several studies were joined, which have no folder in common."""
        return self.folder == Path()

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @property
    def unfinished(self) -> list[Run]:
        """Runs without DONE: still running, interrupted or crashed; their rows so far are in the tables."""
        return [run for run in self.runs if not run.finished]

    def runs_of(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.arm == arm]

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """Table with a row per token and update of all stored steps: arm, seed, step and the columns of the files.

        docs/metrics.md, section "tokens", defines these: `update`, `seq`, `pos`, `old_logp` (nats), `flips`, ...
        """
        tables, places = [], []
        for i, run in enumerate(self.runs):
            for file in sorted((run.folder / "tokens").glob("*.parquet")):
                tables.append(read_parquet(file))
                places.append((i, step_of(file)))
        if not tables:
            return pd.DataFrame(columns=["arm", "seed", "step", "update", "old_logp", "logp_natural", "logp_replayed"])
        frame = stacked(tables)
        rows = [table.num_rows for table in tables]
        numbers = np.repeat([i for i, _ in places], rows)
        frame["arm"] = pd.Categorical([run.arm for run in self.runs])[numbers].remove_unused_categories()
        frame["seed"] = np.array([run.seed for run in self.runs])[numbers]
        frame["step"] = np.repeat([step for _, step in places], rows)
        return frame

    @cached_property
    def route_files(self) -> pd.DataFrame:
        """Table of stored routes, which are read on demand: arm, seed, step, update (0: the old policy's) and path.

        The files of a run are in the order of steps and updates; `moe_rl.training.route_tables.read_route_table` reads
        one.
        """
        rows = [
            {"arm": run.arm, "seed": run.seed, "step": step_of(file), "update": update_of(file), "path": file}
            for run in self.runs
            for file in sorted((run.folder / "routes").glob("[!.]*.parquet"), key=lambda f: (step_of(f), update_of(f)))
        ]
        return pd.DataFrame(rows, columns=["arm", "seed", "step", "update", "path"])


def load(path: str | Path) -> StudyData:
    """Load a study folder `runs/<study>` or one run folder `runs/<study>/<arm>/seed<k>`.

    Unfinished runs are loaded as far as they got and listed in `unfinished`; an interrupted last line is left out with
    a note. Raises StudyDataError: there is no run, or something else is damaged (the message names file and line).
    """
    path = Path(path).expanduser()
    path = path if path.parts else path.resolve()  # Path() stands for joined studies
    if not path.is_dir():
        raise StudyDataError(no_folder(path))
    if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
        place = run_place(path)
        folders, above, again = [path], place.parent.parent / "study.yaml", False
        config = read_yaml(above) if above.exists() else {}
        config["name"] = f"{place.parent.name}/{place.name}"
    else:
        folders = run_folders(path)
        own, above = path / "study.yaml", path.resolve().parent / "study.yaml"
        config = read_yaml(own) if own.exists() else {}
        _check_readable(path, config)
        check_declared(own, config)
        if not folders:
            started = f"a study without runs yet; start it with: moe-rl study {own}"
            raise StudyDataError(f"{path}: {started}" if config else nothing_here(path))
        again = not config and path.resolve().name.startswith(ROUNDING) and above.exists()
        if again:
            config = read_yaml(above)
            config["name"] = f"{config.get('name', above.parent.name)}, {path.resolve().name.replace('_', ' ', 1)}"
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    runs = [load_run(folder, number, rows) for number, folder in enumerate(sorted(folders, key=folder_order))]
    found: dict[str, Run] = {}
    for run in runs:
        if (other := found.setdefault(run.name, run)) is not run:
            raise StudyDataError(f"{other.folder} and {run.folder} both hold {run.name}: move one of them away")
    tables = {name: kind_table(kind, rows.pop(kind), runs) for kind, name in FIELDS.items()}
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes] + mixed_settings(runs)
    name = str(config.get("name") or path.resolve().name)
    there = {(run.arm, run.seed) for run in runs}
    if folders != [path]:
        known = {*declared_arms(config), *(run.arm for run in runs)}
        compared = dict.fromkeys(str(arm) for pair in config.get("comparisons") or () for arm in pair)
        gone = [arm for arm in compared if arm not in known]
        notes += [f"comparisons name {arm}, of which there is no run{nearest(arm, known)}" for arm in gone]
    wanted = [] if folders == [path] or again else declared_runs(own, config)
    waiting = tuple(f"{arm}/seed{seed}" for arm, seed in wanted if (arm, seed) not in there)
    return StudyData(name, path, config, tuple(runs), notes=tuple(notes), not_started=waiting, **tables)


def join(studies: Mapping[str, StudyData]) -> StudyData:
    """Join several studies into one, to compare them: arms become `<key>/<arm>`, rows and declared comparisons stay.

    `interest`, `outcome` and `alarms` stay if all studies have the same; else the defaults hold, with a note if
    outcomes differ. Raises StudyDataError: no studies, or a value is no loaded study.

    >>> join({"lag 0": load("runs/a"), "lag 2": load("runs/b")}).rollouts      # doctest: +SKIP
    """
    if not isinstance(studies, Mapping) or not studies:
        what = "none" if isinstance(studies, Mapping) else type(studies).__name__
        raise StudyDataError(f"join: expected studies by name, {{'a': load(...), ...}}, got {what}")
    runs, notes, declared, compared = [], [], {}, []
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in FIELDS.values()}
    for key, data in studies.items():
        if not isinstance(data, StudyData):
            raise StudyDataError(f"join: {key!r} is {data!r:.80}, and loaded studies are joined: load(...) it first")
        runs += [replace(run, arm=f"{key}/{run.arm}") for run in data.runs]
        for arm, row in data.arms.iterrows():
            declared[f"{key}/{arm}"] = {"label": f"{row['label']} ({key})"}
        for name, frames in tables.items():
            frame = getattr(data, name)
            frames.append(frame.assign(arm=f"{key}/" + frame["arm"].astype(str)) if len(frame) else frame)
        notes += [f"{key}/{note}" for note in data.notes]
        compared += [[f"{key}/{arm}" for arm in pair] for pair in data.config.get("comparisons") or ()]
    title = " + ".join(studies)
    config: dict[str, Any] = {"arms": declared}
    configs = [data.config for data in studies.values()]
    if compared or all(isinstance(own.get("comparisons"), list | tuple) for own in configs):
        config["comparisons"] = compared  # an empty list if every study declares an empty list
    for name in ("interest", "outcome", "alarms"):
        if all(name in own and own[name] == configs[0][name] for own in configs):
            config[name] = configs[0][name]
    if len({own.get("outcome") or "sampled" for own in configs}) > 1:
        notes.append("the studies do not all declare one outcome; here that of all is of their last steps, as sampled")
    waiting = tuple(f"{key}/{run}" for key, data in studies.items() for run in data.not_started)
    # an empty frame has no column types; stacking it would turn integers of other frames into objects
    filled = {name: [frame for frame in frames if len(frame)] or frames[:1] for name, frames in tables.items()}
    whole = {name: pd.concat(frames, ignore_index=True) for name, frames in filled.items()}
    return StudyData(title, Path(), config, tuple(runs), notes=tuple(notes), not_started=waiting, **whole)


def pooled_rate(rows: pd.DataFrame, changed: str, total: str, by: str | list[str]) -> pd.Series:
    """Return Σ changed / Σ total over the rows of each group that have both; NaN if nothing was counted."""
    sums = shown.counted(rows, changed, total).groupby(by, observed=True)[[changed, total]].sum()
    return sums[changed] / sums[total].where(sums[total] > 0)


def declared_arms(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return arm -> what a study's configuration says of the arm.

    The configuration's `arms` are a mapping, or a list of names or mappings; the result is empty for anything else.
    """
    arms = config.get("arms")
    if isinstance(arms, list):
        return {str(a.get("name")) if isinstance(a, dict) else str(a): a if isinstance(a, dict) else {} for a in arms}
    return {str(k): v if isinstance(v, dict) else {} for k, v in arms.items()} if isinstance(arms, dict) else {}


def _drawable(label: str) -> str:
    """Return the label, with its dollars escaped if figures could not draw it.

    The command that runs a study refuses such labels; a study from elsewhere may have them.
    """
    return label.replace("$", r"\$") if not_mathematics(label) else label


def _check_readable(path: Path, config: dict[str, Any]) -> None:
    """Raise StudyDataError for an arm's folder that may not be read, because a search for runs passes over it."""
    for arm in declared_arms(config) or [child.name for child in path.iterdir()]:
        if os.path.isdir(path / arm) and not os.access(path / arm, os.R_OK | os.X_OK):
            raise StudyDataError(f"{path / arm}: you may not read this folder, and its runs belong to the study")


def check_declared(file: Path, config: dict[str, Any]) -> None:
    """Raise StudyDataError for declarations that cannot be followed: those of `check_declarations`, and seeds."""
    try:
        check_declarations(config)
    except ValueError as error:
        raise StudyDataError(f"{file}: {error}") from error
    declared_runs(file, config)


def declared_runs(file: Path, config: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (arm, seed) of every run that a study's configuration declares, arm by arm.

    file: where the configuration is from, for messages. Raises StudyDataError: seeds are no list of whole numbers.
    """
    arms = declared_arms(config)
    seeds = {"seeds": config.get("seeds"), **{f"arms.{arm}.seeds": about.get("seeds") for arm, about in arms.items()}}
    for name, given in seeds.items():
        if given is not None and not (isinstance(given, list) and all(type(seed) is int for seed in given)):
            raise StudyDataError(f"{file}: {name}: expected a list of whole numbers, got {given!r:.80}")
    return [(arm, seed) for arm in arms for seed in seeds[f"arms.{arm}.seeds"] or seeds["seeds"] or ()]


def no_folder(path: Path) -> str:
    """Return a message: why a path is no folder of runs, and what such a folder is called."""
    what = "a file" if path.exists() else "no such folder"
    return f"{path}: {what}; expected runs/STUDY or runs/STUDY/ARM/seedN"


def nothing_here(path: Path) -> str:
    """Return a message: why a folder without study.yaml and runs is no study, and which folder may be meant."""
    if seeds_in(path):
        return f"{path}: the runs of one arm; name their study, {path.resolve().parent}, or one of them"
    inside = sorted(study_names(path))
    hint = f" It holds studies: {', '.join(inside)}. Name one of them." if inside else ""
    return f"{path}: no study and no run found; expected ARM/seedN/metrics.jsonl in it.{hint}"


def study_names(path: Path) -> set[str]:
    """Return the names of the folders inside that hold a study.

    A study of other trainers' runs has no study.yaml; its folder is known by the runs in it.
    """
    declared = {p.parent.name for p in path.glob("*/study.yaml")}
    runs = (p.parent for p in path.glob("*/*/seed*/metrics.jsonl"))
    return declared | {run.parents[1].name for run in runs if seed_of(run) is not None}
