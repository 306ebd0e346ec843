"""Run folders as tidy tables: `load(path)` gives one row per measurement, with its arm and seed.

>>> data = load("runs/replay_vs_gspo")                                     # doctest: +SKIP
>>> data.rollouts.groupby(["arm", "step"])["reward"].mean()                # doctest: +SKIP

It reads folders only, never a model, so a study that was copied from a cluster loads the same.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pandas.api.types import is_object_dtype

KINDS = ("rollout", "update", "probe", "eval", "step", "engine", "decomposition", "floor")
FIELDS = dict(
    zip(
        KINDS,
        ("rollouts", "updates", "probes", "evals", "timings", "engines", "decompositions", "floors"),
        strict=True,
    )
)
"""Kind of row -> field of StudyData that holds it."""
_MORE_KEYS = {
    "update": ["update"],
    "probe": ["update"],
    "engine": ["pair", "update"],
    "decomposition": ["update"],
    "floor": ["variant"],
}
_KEYS = {kind: ["arm", "seed", "step", *_MORE_KEYS.get(kind, [])] for kind in KINDS}
_NEEDED = {
    "rollout": ("step", "reward"),
    "update": ("step", "update"),
    "probe": ("step", "update"),
    "eval": ("step",),
    "engine": ("step", "update", "pair"),
    "decomposition": ("step", "update"),
    "floor": ("step", "variant"),
}
_SEED_FOLDER = re.compile(r"seed(\d+)")
ROUNDING = "rounding_"
"""A study's folder `rounding_<name>` holds arms and seeds that were run again under another rounding."""
SOURCES = {"sft": "demonstrations", "rft": "initial", "dpo": "initial"}
"""Objectives that learn from others' responses than their own policy's, unless `method.source` says otherwise."""
_Yaml = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


class StudyDataError(ValueError):
    """A run folder that cannot be read: says which file, where in it, and what to do."""


@dataclass(frozen=True)
class Run:
    """One (arm, seed): its folder, resolved configuration and environment, and whether it finished."""

    arm: str
    seed: int
    folder: Path
    finished: bool
    config: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by name, from the top of the configuration, its `method` or its resolved `objective`."""
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
        return str(self.setting("replay", "none"))

    @property
    def noise(self) -> float:
        """Scale of the selection noise in router-logit units: a stress test, 0 in a natural run."""
        return float(self.setting("noise", 0.0))

    @property
    def responses(self) -> str:
        """Whose responses the run learns from, and its training rewards are of: `policy`, `initial`,
        `demonstrations`."""
        return str(self.setting("source") or SOURCES.get(self.objective.lower(), "policy"))

    @property
    def rounding(self) -> str:
        """The CPU kernels that it ran under, where it was asked for; else `native`."""
        return str(self.environment.get("rounding") or "native")

    @property
    def method(self) -> str:
        """Objective and replay in one word, the key of a colour: `grpo`, `grpo_replay`, `gspo`, ..."""
        return self.objective if self.replay.lower() in ("none", "") else f"{self.objective}_replay"


@dataclass(frozen=True)
class StudyData:
    """A study, or a single run, as tables.

    `rollouts`, `updates`, `probes`, `evals`: one row per line of metrics.jsonl of that kind, with `arm` and
    `seed` in front (columns as the run wrote them; log-ratios in nats, rates as numerator and denominator).
    `timings`: seconds of each step. `engines`: the gap between rollout and training engine, one row per `pair`; empty
    where one engine did both. `decompositions`: the log-ratio split into weights, routes and their interaction, where
    the study asked for it. `floors`: what changes with equal weights, one row per `variant`. `tokens` is read on first
    use, `roundings` are the same study under other CPU kernels, `route_files` lists what `RoutedExperts.load` opens.
    `not_started` names runs that the study declares and that have no folder yet, `notes` what was odd while reading.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    runs: tuple[Run, ...]
    rollouts: pd.DataFrame
    updates: pd.DataFrame
    probes: pd.DataFrame
    evals: pd.DataFrame
    notes: tuple[str, ...] = ()
    not_started: tuple[str, ...] = ()
    timings: pd.DataFrame = field(default_factory=pd.DataFrame)
    engines: pd.DataFrame = field(default_factory=pd.DataFrame)
    decompositions: pd.DataFrame = field(default_factory=pd.DataFrame)
    floors: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def arms(self) -> pd.DataFrame:
        """One row per arm, in the study's order: label, objective, replay, noise, method, seeds, finished."""
        declared = _declared_arms(self.config)
        rows: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            row = rows.setdefault(
                run.arm,
                {
                    "label": declared.get(run.arm, {}).get("label") or run.setting("label") or run.arm,
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

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The study's own env.json (the command that started it); empty for a single run."""
        file = self.folder / "env.json"
        return _read_json(file) if file.exists() and len(self.runs) != 1 else {}

    @cached_property
    def roundings(self) -> dict[str, "StudyData"]:
        """The same study under other roundings, by name: those of its folders `rounding_<name>` that hold runs."""
        if self.folder == Path() and not (self.folder / "study.yaml").exists():  # several studies, joined
            return {}
        folders = [folder for folder in sorted(self.folder.glob(f"{ROUNDING}*")) if any(folder.glob("*/seed*"))]
        return {folder.name.removeprefix(ROUNDING): load(folder) for folder in folders}

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
        """Per-token facts of all stored steps: arm, seed, step, update, seq, pos, logps, flips, reward."""
        return self.read_tokens()

    def read_tokens(
        self, arm: str | None = None, seed: int | None = None, last_steps: int | None = None
    ) -> pd.DataFrame:
        """As `tokens`, for one arm or seed, or the last few stored steps of each run only."""
        parts = []
        for run in self.runs:
            if (arm is not None and run.arm != arm) or (seed is not None and run.seed != seed):
                continue
            files = sorted((run.folder / "tokens").glob("*.parquet"))
            for file in files[-last_steps:] if last_steps else files:
                parts.append(_read_parquet(file).assign(arm=run.arm, seed=run.seed, step=_step_of(file)))
        if not parts:
            return pd.DataFrame(columns=["arm", "seed", "step", "update", "old_logp", "logp_natural", "logp_replayed"])
        frame = pd.concat(parts, ignore_index=True)
        frame["arm"] = frame["arm"].astype("category")
        return frame

    @cached_property
    def route_files(self) -> pd.DataFrame:
        """Stored routes, on demand: arm, seed, step and path, for `moe_rl.training.route_tables.read_route_table`."""
        rows = [
            {"arm": run.arm, "seed": run.seed, "step": _step_of(file), "path": file}
            for run in self.runs
            for file in sorted((run.folder / "routes").glob("[!.]*.parquet"))
        ]
        return pd.DataFrame(rows, columns=["arm", "seed", "step", "path"])


def load(path: str | Path) -> StudyData:
    """Read `runs/<study>` or one run folder `runs/<study>/<arm>/seed<k>`.

    Unfinished runs are loaded as far as they got and listed in `unfinished`; an interrupted last line is left
    out with a note. Raises StudyDataError where there is no run, or naming file and line of any other damage.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise StudyDataError(f"{path}: no such folder; expected runs/<study> or runs/<study>/<arm>/seed<k>")
    if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
        folders, above, again = [path], path.resolve().parent.parent / "study.yaml", False
        config = _read_yaml(above) if above.exists() else {}
        config["name"] = f"{path.resolve().parent.name}/{path.resolve().name}"
    else:
        folders = [f for f in sorted(path.glob("*/seed*")) if f.is_dir() and _SEED_FOLDER.fullmatch(f.name)]
        own, above = path / "study.yaml", path.resolve().parent / "study.yaml"
        config = _read_yaml(own) if own.exists() else {}
        if not folders:
            raise StudyDataError(_nothing_here(path, bool(config)))
        again = not config and path.resolve().name.startswith(ROUNDING) and above.exists()
        if again:
            config = _read_yaml(above)
            config["name"] = f"{config.get('name', above.parent.name)}, {path.resolve().name.replace('_', ' ', 1)}"
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    runs = [_load_run(folder, number, rows) for number, folder in enumerate(sorted(folders, key=_folder_order))]
    tables = {}
    for kind in KINDS:
        tables[kind] = _table(kind, rows.pop(kind), runs)
    notes = tuple(f"{run.arm}/seed{run.seed}: {note}" for run in runs for note in run.notes)
    name = str(config.get("name") or path.resolve().name)
    waiting = () if folders == [path] or again else _missing(config, tuple(runs))
    return StudyData(name, path, config, tuple(runs), notes=notes, not_started=waiting, **_named(tables))


def join(studies: dict[str, StudyData]) -> StudyData:
    """Several studies as one, to compare them: arms become `<key>/<arm>`, everything else stays.

    >>> join({"lag 0": load("runs/a"), "lag 2": load("runs/b")}).rollouts      # doctest: +SKIP
    """
    runs, notes, declared, compared = [], [], {}, []
    tables: dict[str, list[pd.DataFrame]] = {kind: [] for kind in KINDS}
    for key, data in studies.items():
        for run in data.runs:
            runs.append(replace(run, arm=f"{key}/{run.arm}"))
        for arm, row in data.arms.iterrows():
            declared[f"{key}/{arm}"] = {"label": f"{row['label']} ({key})"}
        for kind, name in FIELDS.items():
            frame = getattr(data, name)
            tables[kind].append(frame.assign(arm=f"{key}/" + frame["arm"].astype(str)) if len(frame) else frame)
        notes += [f"{key}/{note}" for note in data.notes]
        compared += [[f"{key}/{arm}" for arm in pair] for pair in data.config.get("comparisons") or ()]
    name, config = " + ".join(studies), {"arms": declared, **({"comparisons": compared} if compared else {})}
    waiting = tuple(f"{key}/{run}" for key, data in studies.items() for run in data.not_started)
    stacked = _named({kind: _stack(frames) for kind, frames in tables.items()})
    return StudyData(name, Path(), config, tuple(runs), notes=tuple(notes), not_started=waiting, **stacked)


def _named(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Tables by the names of StudyData's fields, from tables by kind of row."""
    return {FIELDS[kind]: table for kind, table in tables.items()}


def _stack(frames: list[pd.DataFrame]) -> pd.DataFrame:
    # an empty frame has no column types; stacking it would turn the others' integers into objects
    return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)


def _folder_order(folder: Path) -> tuple[str, int]:
    match = _SEED_FOLDER.fullmatch(folder.name)
    return folder.parent.name, int(match.group(1)) if match else 0


def _load_run(folder: Path, number: int, rows: dict[str, list[dict[str, Any]]]) -> Run:
    """The run of a folder; its metrics are added to `rows` by kind, marked with the run's number."""
    config = _read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    environment = _read_json(folder / "env.json") if (folder / "env.json").exists() else {}
    match = _SEED_FOLDER.fullmatch(folder.resolve().name)
    arm = config["arm"] if isinstance(config.get("arm"), str) else folder.resolve().parent.name
    seed = int(match.group(1)) if match else int(config.get("seed", 0))
    notes: list[str] = []
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        for row in _read_lines(metrics, notes):
            row[_RUN] = number
            rows[row.pop("kind")].append(row)
    else:
        notes.append("no metrics.jsonl yet")
    return Run(str(arm), seed, folder, (folder / "DONE").exists(), config, environment, tuple(notes))


_RUN = "\0run"  # not a name that a row can have


def _table(kind: str, rows: list[dict[str, Any]], runs: list[Run]) -> pd.DataFrame:
    """All runs' rows of a kind as one table, in the order of runs and keys. Repeated rows are noted with their run."""
    keys = _KEYS[kind]
    if not rows:
        return pd.DataFrame(columns=keys)
    frame = pd.DataFrame(rows)
    number = frame[_RUN].to_numpy()
    frame = frame.drop(columns=[name for name in ("arm", "seed") if name in frame])
    frame.insert(0, "arm", np.array([run.arm for run in runs], dtype=object)[number])
    frame.insert(1, "seed", np.array([run.seed for run in runs])[number])
    for column in filter(lambda name: name != "arm" and is_object_dtype(frame[name]), frame.columns):
        # null: a number that was not finite or not asked for
        if all(value is None or isinstance(value, int | float) for value in frame[column]):
            frame[column] = frame[column].astype(float)
    keys = [_RUN, *keys[2:]]
    again = frame.duplicated(keys)
    if again.any():  # a resumed run wrote these steps again; the later row counts
        for i in frame.loc[again, _RUN].unique():
            note = f"repeated {kind} rows after a resume; the last of each was kept"
            runs[i] = replace(runs[i], notes=(*runs[i].notes, note))
        frame = frame.drop_duplicates(keys, keep="last")
    return frame.sort_values(keys).drop(columns=_RUN).reset_index(drop=True)


def _read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    unknown = set()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected an object, got {type(row).__name__}")
            kind = row.get("kind")
            missing = [name for name in _NEEDED.get(str(kind), ("step",)) if row.get(name) is None and name != "reward"]
            if kind == "rollout" and "reward" not in row:
                missing.append("reward")
            if kind is None or missing:
                raise ValueError(f"lacks {', '.join(missing) or 'kind'}")
        except ValueError as error:  # json's and unicode's errors are ValueErrors
            if number == len(lines):
                notes.append(f"{path.name} line {number} is cut off (interrupted write) and was left out")
                return
            raise StudyDataError(
                f"{path} line {number}: not a metrics row ({error}). The file was damaged after it was "
                "written: restore it, or delete this run's folder and run the study again (the rest is kept)."
            ) from error
        if kind in KINDS:
            yield row
        elif kind not in unknown:
            unknown.add(kind)
            notes.append(f"rows of kind {kind!r} were left out (written by another version?)")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), _Yaml)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StudyDataError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise StudyDataError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise StudyDataError(f"{path}: not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {"value": content}


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except Exception as error:  # pyarrow raises many kinds; the file is what matters
        raise StudyDataError(
            f"{path}: not a readable Parquet file ({error}). Delete it to go on without it."
        ) from error


def _step_of(path: Path) -> int:
    match = re.search(r"step_(\d+)", path.name)
    if not match:
        raise StudyDataError(f"{path}: expected a name like step_000012{path.suffix}")
    return int(match.group(1))


def _declared_arms(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arms = config.get("arms") or {}
    if isinstance(arms, dict):
        return {str(name): value if isinstance(value, dict) else {} for name, value in arms.items()}
    return {str(a.get("name")) if isinstance(a, dict) else str(a): a if isinstance(a, dict) else {} for a in arms}


def _missing(config: dict[str, Any], runs: tuple[Run, ...]) -> tuple[str, ...]:
    """Runs that the study declares and that have no folder yet."""
    there = {(run.arm, run.seed) for run in runs}
    declared = _declared_arms(config).items()
    wanted = [(arm, seed) for arm, about in declared for seed in about.get("seeds") or config.get("seeds") or ()]
    return tuple(f"{arm}/seed{seed}" for arm, seed in wanted if (arm, seed) not in there)


def _nothing_here(path: Path, is_study: bool) -> str:
    if is_study:
        return f"{path}: a study without runs yet; start it with: moe-rl study {path / 'study.yaml'}"
    inside = sorted(p.parent.name for p in path.glob("*/study.yaml"))
    hint = f" It holds studies: {', '.join(inside)}. Name one of them." if inside else ""
    return f"{path}: no run found; expected <arm>/seed<k>/metrics.jsonl below it.{hint}"
