"""State of a study folder while it grows, for the page of `moe-rl watch`.

The module is stateless, so that nothing has to be kept in step. `LiveStudy.overview` looks at folders and file sizes;
`live_rows` reads what runs have written.
"""

import time
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_rl.done import NAME, remedy, what_is_lost
from moe_rl.files import still_written
from moe_rl.names import ROUNDING, run_place
from moe_rl.settings import at, laid_over
from moe_rl.study.arms import arm_settings, full_label
from moe_rl.study.cursor import LiveError, stamp
from moe_rl.study.data import (
    Run,
    StudyData,
    StudyDataError,
    check_declared,
    declared_arms,
    declared_runs,
    no_folder,
    nothing_here,
    study_names,
)
from moe_rl.study.figures.screen import on_dark
from moe_rl.study.figures.style import arm_looks, conditions
from moe_rl.study.folders import folder_order, read_yaml, run_folders, section
from moe_rl.study.progress import error_in

MOST = 16_384
"""Most runs whose parsed configurations are cached; with more, all would be read at every poll."""


class LiveStudy:
    """A study folder, or one run folder, as it is on disk at this moment.

    Raises StudyDataError: the folder is missing, or holds neither a study nor a run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise StudyDataError(
                f"{no_folder(self.folder)}. Start the study first (moe-rl study FILE), then watch its folder."
            )
        self.single = any((self.folder / name).exists() for name in ("metrics.jsonl", "config.yaml"))
        if not self.single and not (self.folder / "study.yaml").exists() and not self._found():
            raise StudyDataError(nothing_here(self.folder))

    def overview(self) -> dict[str, Any]:
        """Return what changes while a study runs, apart from its numbers: states of runs and looks of arms. Raises
        LiveError: the folder is gone."""
        if not self.folder.is_dir():
            raise LiveError(f"{self.folder} is gone, or no folder any more")
        config = self._config()
        base, declared = section(config, "base"), declared_arms(config)
        runs = [
            replace(run, config=_read_yaml(run.folder / "config.yaml") or laid_over(base, declared.get(run.arm, {})))
            for run in self.runs()
        ]
        return {
            "name": str(config.get("name") or self.folder.resolve().name),
            "question": str(config.get("question") or ""),
            **self._arms(runs, config),
            "runs": [self._state(run) for run in runs],
        }

    def runs(self) -> list[Run]:
        """Return declared and found runs, by arm in the study's order, then by seed, without reading their folders."""
        if self.single:
            return [Run(*folder_order(run_place(self.folder)), self.folder)]
        config = self._config()
        found = {(run.arm, run.seed): run for run in self._found()}
        for arm, seed in declared_runs(self._study / "study.yaml", config):
            found.setdefault((arm, seed), Run(arm, seed, self.folder / arm / f"seed{seed}"))
        order = {arm: i for i, arm in enumerate(declared_arms(config))}
        return sorted(found.values(), key=lambda run: (order.get(run.arm, len(order)), run.arm, run.seed))

    def run(self, name: str) -> Run:
        """Return the run called ARM/seedN. Raises LiveError: another name; paths are never made from requests."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            raise LiveError(f"no run {name!r}; there are {', '.join(runs) or 'none yet'}")
        return runs[name]

    def responses(self, name: str) -> str:
        """Return whose responses the run called ARM/seedN learns from (`Run.responses`).

        The run's config.yaml says it, as soon as the run has written that file.
        """
        run = self.run(name)
        return replace(run, config=_read_yaml(run.folder / "config.yaml")).responses

    def roundings(self) -> list["LiveStudy"]:
        """Return the same study under other roundings: its folders `rounding_<name>` that hold runs."""
        folders = [] if self.single else sorted(self.folder.glob(f"{ROUNDING}*"))
        return [LiveStudy(folder) for folder in folders if run_folders(folder)]

    @property
    def thresholds(self) -> Any:
        """The study's own `alarms`: thresholds, and alarms that the study adds; None without."""
        return self._config().get("alarms")

    def check(self) -> None:
        """Raise StudyDataError for a study.yaml that cannot be read or followed.

        The page passes over such a file while it is being written.
        """
        path = self._study / "study.yaml"
        if path.exists():
            check_declared(path, read_yaml(path))

    @property
    def _study(self) -> Path:
        """The folder of the study; `folder` may be one run in it."""
        return run_place(self.folder).parent.parent if self.single else self.folder

    def _found(self) -> list[Run]:
        return [Run(*folder_order(f), f) for f in run_folders(self.folder)]

    def _config(self) -> dict[str, Any]:
        config = dict(_read_yaml(self._study / "study.yaml"))
        if self.single:
            place = run_place(self.folder)
            config["name"] = f"{place.parent.name}/{place.name}"
        return config

    def _state(self, run: Run) -> dict[str, Any]:
        """Return the state of one run, with its problem, steps, bytes and times.

        state: `done`, `failed` (its log ends with an error, or a finished run has lost files), `stopped` (unfinished,
            and nothing writes to its folder), `running` (unfinished), `starting` or `waiting`.
        written: when the last row was written, in seconds since 1970.
        """
        metrics = run.folder / "metrics.jsonl"
        try:
            stat = metrics.stat()
            size, changed, state = stat.st_size, stat.st_mtime, "running"
        except OSError:
            size, changed = 0, None
            state = "starting" if (run.folder / "config.yaml").exists() else "waiting"
        if (run.folder / NAME).exists():
            parts = (run.folder / name for name in (NAME, metrics.name, "tokens", "routes"))
            problem = _lost(run.folder, stamp(*parts))
            state = "failed" if problem else "done"
        else:
            log, alive = self._study / "logs" / f"{run.arm}_seed{run.seed}.log", still_written(run.folder)
            problem = "" if alive else _error_in(log, metrics, run.folder / "env.json")
            problem = "" if problem.startswith("interrupted") else problem  # Ctrl-C stops a run
            stopped = state in ("running", "starting") and alive is False
            state = "failed" if problem else "stopped" if stopped else state
        steps = at(run.config, "optim", "steps")
        return {
            "run": run.name,
            "arm": run.arm,
            "seed": run.seed,
            "state": state,
            "problem": problem,
            "steps": steps if type(steps) is int else None,  # another trainer's may be anything
            "bytes": size,
            "written": changed,
            "age": None if changed is None else round(max(0.0, time.time() - changed), 1),
        }

    def _arms(self, runs: list[Run], config: dict[str, Any]) -> dict[str, Any]:
        """Return looks and labels of the arms, from the figures' own functions applied to a study without rows."""
        if not runs:
            return {"conditions": [], "arms": [], "settings": []}
        data = StudyData("", self.folder, config, tuple(runs))
        shown = conditions(data)
        differ, _ = arm_settings(data)
        return {
            "conditions": [condition.title for condition in shown],
            "arms": [
                {
                    "arm": arm,
                    "label": label,
                    "title": full_label(data, arm),
                    "condition": number,
                    "colour": {"light": look.colour, "dark": on_dark(look.colour)},
                    "dash": [] if look.dash == "-" else list(look.dash[1]),
                }
                for number, condition in enumerate(shown)
                for arm, (look, label) in arm_looks(data, condition.arms).items()
            ],
            "settings": [
                {"name": str(name), "values": {str(arm): _words(differ.loc[name, arm]) for arm in differ.columns}}
                for name in differ.index
            ],
        }


class LiveStudies:
    """The studies under a folder, which may be a run, a study, or a folder with studies in it (`runs/`).

    Raises StudyDataError: the folder is none of these.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.alone: LiveStudy | None = None
        try:
            self.alone = LiveStudy(self.folder)
        except StudyDataError:
            if not self.names():
                raise

    def names(self) -> list[str]:
        """Return the names of folders with a study, last written first; none if the folder itself is a study."""
        if self.alone is not None or not self.folder.is_dir():
            return []
        return sorted(study_names(self.folder), key=lambda name: (-_written(self.folder / name), name))

    def study(self, name: str = "") -> LiveStudy:
        """Return the study called `name`, without a name the first.

        If the folder itself is a study, the answer is that study. Raises LiveError: another name; paths are never made
        from requests.
        """
        if self.alone is not None:
            return self.alone
        names = self.names()
        if not names or (name and name not in names):
            raise LiveError(f"no study {name!r}; there are {', '.join(names) or 'none any more'}")
        return LiveStudy(self.folder / (name or names[0]))


def _written(study: Path) -> float:
    """Return the time at which a study was last written: its folder, or the rows of one of its runs."""
    times = [0.0]
    for path in (study, *study.glob("*/seed*/metrics.jsonl")):
        with suppress(FileNotFoundError):  # deleted in the meantime
            times.append(path.stat().st_mtime)
    return max(times)


def _words(value: Any) -> str | None:
    """Return a setting as it is shown; None if an arm does not have it."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)


@lru_cache(MOST)
def _lost(folder: Path, _stamp: tuple[int, ...]) -> str:
    """Return what a finished run has lost, in words (empty: nothing); looked at again when files or folders changed."""
    lost = what_is_lost(folder)
    return f"{lost}. {remedy(folder)}" if lost else ""


def _error_in(log: Path, *written: Path) -> str:
    """Return the error that a log ends with, or an empty text.

    Empty also if the run wrote one of the files `written` (began again, went on) after the log.
    """
    try:
        stat = log.stat()
        with open(log, "rb") as file:
            file.seek(max(0, stat.st_size - 32_000))  # torchrun's summary has 200 bytes for each rank
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    if any(path.exists() and path.stat().st_mtime > stat.st_mtime + 1 for path in written):
        return ""
    return error_in(text)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return a mapping from a YAML file, empty if there is none (yet); parsed again only when the file changed."""
    return _parsed(path, stamp(path))


@lru_cache(MOST)
def _parsed(path: Path, _stamp: tuple[int, ...]) -> dict[str, Any]:
    """Parse a YAML file, once for each stamp; the mapping is empty if the file cannot be read."""
    try:
        return read_yaml(path)
    except StudyDataError:
        return {}
