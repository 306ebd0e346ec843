"""A study folder as it grows: what `moe-rl watch` tells its page. Stateless, so that nothing has to be kept in step.

`LiveStudy.overview` looks at folders and file sizes; `new_rows` and `new_sites` read `metrics.jsonl` from a cursor on
and answer with the next one. A run that was resumed has rewritten its file: the cursor no longer fits, and the answer
says `reset`.
"""

import json
import math
import re
import time
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moe_rl.study.data import Run, StudyData, StudyDataError
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.figures.screen import on_dark
from moe_rl.study.figures.style import arm_looks, conditions
from moe_rl.study.summary import full_label

CHUNK = 2_000_000
"""Bytes of metrics.jsonl in one answer; the page asks again while there is `more`."""

COLUMNS = {
    "rollout": ("step", "reward", "response_length"),
    "eval": ("step", "reward"),
    "update": ("step", "update", "clipped_tokens", "tokens", "grad_norm"),
    "probe": (
        "step",
        "update",
        "slots_changed",
        "slots",
        "var_token_natural",
        "var_sequence_natural",
        "entropy",
    ),
    "step": ("step", "seconds"),
}
"""What curves are made of: per kind of row, the values that are sent, in this order."""

_SEED = re.compile(r"seed(\d+)")
_CHECKED = 256  # bytes before a cursor that must not have changed


class LiveError(ValueError):
    """A request for something that is not there; the message says what and what is."""


@dataclass(frozen=True)
class LiveRun:
    """One (arm, seed) that was declared or has written something."""

    arm: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm}/seed{self.seed}"


class LiveStudy:
    """A study folder, or one run folder, as it is on disk at this moment.

    Raises StudyDataError if the folder is missing, or holds neither a study nor a run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise StudyDataError(
                f"{self.folder}: no such folder; expected runs/STUDY or runs/STUDY/ARM/seedN. Start the study first "
                "(moe-rl study FILE), then watch its folder."
            )
        self.single = any((self.folder / name).exists() for name in ("metrics.jsonl", "config.yaml"))
        if not self.single and not (self.folder / "study.yaml").exists() and not self._found():
            inside = sorted(p.parent.name for p in self.folder.glob("*/study.yaml"))
            hint = f" It holds studies: {', '.join(inside)}. Name one of them." if inside else ""
            raise StudyDataError(
                f"{self.folder}: neither a study (study.yaml) nor a run (ARM/seedN/metrics.jsonl) is in it.{hint}"
            )

    def overview(self) -> dict[str, Any]:
        """Runs with state and size, arms with their looks: what changes while a study runs, without its numbers."""
        config, runs = self._config(), self.runs()
        base, declared = config.get("base") or {}, _declared(config)
        known = {
            run.name: _read_yaml(run.folder / "config.yaml") or _merged(base, declared.get(run.arm, {})) for run in runs
        }
        arms = self._arms(runs, known)
        return {
            "name": str(config.get("name") or self.folder.resolve().name),
            "question": str(config.get("question") or ""),
            "folder": str(self.folder),
            "conditions": arms.pop("conditions"),
            "arms": arms["arms"],
            "runs": [self._state(run, known[run.name]) for run in runs],
        }

    def runs(self) -> list[LiveRun]:
        """Declared and found runs, arms in the study's order, then by seed."""
        if self.single:
            folder = self.folder.resolve()
            match = _SEED.fullmatch(folder.name)
            return [LiveRun(folder.parent.name, int(match[1]) if match else 0, self.folder)]
        config = self._config()
        found = {(run.arm, run.seed): run for run in self._found()}
        for arm, about in _declared(config).items():
            for seed in about.get("seeds") or config.get("seeds") or ():
                found.setdefault((arm, int(seed)), LiveRun(arm, int(seed), self.folder / arm / f"seed{seed}"))
        order = {arm: i for i, arm in enumerate(_declared(config))}
        return sorted(found.values(), key=lambda run: (order.get(run.arm, len(order)), run.arm, run.seed))

    def run(self, name: str) -> LiveRun:
        """The run called ARM/seedN. Raises LiveError for any other name: paths are never made from requests."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            raise LiveError(f"no run {name!r}; there are {', '.join(runs) or 'none yet'}")
        return runs[name]

    def _found(self) -> list[LiveRun]:
        folders = [f for f in self.folder.glob("*/seed*") if f.is_dir()]
        matches = [(f, _SEED.fullmatch(f.name)) for f in folders]
        return [LiveRun(f.parent.name, int(match[1]), f) for f, match in matches if match]

    def _config(self) -> dict[str, Any]:
        folder = self.folder.resolve().parent.parent if self.single else self.folder
        config = dict(_read_yaml(folder / "study.yaml"))
        if self.single:
            config["name"] = f"{self.folder.resolve().parent.name}/{self.folder.resolve().name}"
        return config

    def _state(self, run: LiveRun, config: dict[str, Any]) -> dict[str, Any]:
        """`done`, `failed` (its log ends with an error), `running` (unfinished), `starting` or `waiting`."""
        metrics, state, problem = run.folder / "metrics.jsonl", "waiting", ""
        try:
            stat = metrics.stat()
            size, changed = stat.st_size, stat.st_mtime
            state = "running"
        except OSError:
            size, changed = 0, None
            state = "starting" if (run.folder / "config.yaml").exists() else "waiting"
        if (run.folder / "DONE").exists():
            state = "done"
        else:
            problem = _error_in(
                self.folder / "logs" / f"{run.arm}_seed{run.seed}.log", metrics, run.folder / "env.json"
            )
            state = "failed" if problem else state
        steps = (config.get("optim") or {}).get("steps")
        return {
            "run": run.name,
            "arm": run.arm,
            "seed": run.seed,
            "state": state,
            "problem": problem,
            "steps": steps,
            "bytes": size,
            "age": None if changed is None else round(max(0.0, time.time() - changed), 1),
        }

    def _arms(self, runs: list[LiveRun], configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Looks and labels from the figures' own functions, on a study without rows."""
        if not runs:
            return {"conditions": [], "arms": []}
        known = [Run(run.arm, run.seed, run.folder, False, configs[run.name], {}) for run in runs]
        none = pd.DataFrame()
        data = StudyData("", self.folder, self._config(), tuple(known), none, none, none, none)
        shown = conditions(data)
        return {
            "conditions": [condition.title() for condition in shown],
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
        }


def new_rows(path: Path, since: str = "") -> dict[str, Any]:
    """The curves' values of rows after the cursor `since`, as {kind: [[value, ...], ...]} in the order of COLUMNS."""
    rows, answer = read_since(path, since)
    series: dict[str, list[list[Any]]] = {kind: [] for kind in COLUMNS}
    for row in rows:
        columns = COLUMNS.get(str(row.get("kind")))
        if columns and isinstance(row.get("step"), int):
            series[row["kind"]].append([_number(row.get(name)) for name in columns])
    return {**answer, "rows": {kind: values for kind, values in series.items() if values}}


def new_sites(path: Path, since: str = "") -> dict[str, Any]:
    """Slot change by routing site of probe rows after the cursor `since`: rows [step, update, [fraction, ...]]."""
    rows, answer = read_since(path, since)
    found: list[list[Any]] = []
    names: list[str] = []
    for row in rows:
        changed, total = row.get("site_slots_changed"), row.get("site_slots")
        if row.get("kind") == "probe" and isinstance(changed, list) and isinstance(total, list):
            rates = [_number(c / t) if t else None for c, t in zip(changed, total, strict=False)]
            found.append([row.get("step"), row.get("update"), rates])
            names = row.get("site_names") or names
    labels, common = short_sites(names) if names else ([], "")
    return {**answer, "rows": found, "sites": names, "labels": labels, "common": common}


def read_since(path: Path, since: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Whole lines after a cursor, at most about CHUNK bytes, and {since, more, reset, damaged}.

    `since` in the answer is the next cursor; `more`: ask again at once; `reset`: what was read before is no longer in
    the file (a resume rewrote it), forget it; `damaged`: lines that are not rows, left out. A last line without its
    end is left for later. A missing file has no rows. Raises LiveError for a cursor that is none.
    """
    match = re.fullmatch(r"(?:(\d{1,18})-([0-9a-f]{8}))?", since)
    if not match:
        raise LiveError(f"since: expected a cursor from an earlier answer, got {since!r}")
    offset, check = int(match[1] or 0), int(match[2] or "0", 16)
    try:
        with open(path, "rb") as file:
            reset = offset > 0 and _before(file, offset) != check
            offset = 0 if reset else offset
            file.seek(offset)
            data = file.read(CHUNK)
            if len(data) == CHUNK:
                data += file.readline()
            data = data[: data.rfind(b"\n") + 1]
            offset += len(data)
            more = bool(data) and file.read(1) != b""
            cursor = f"{offset}-{_before(file, offset):08x}" if offset else ""
    except FileNotFoundError:
        return [], {"since": "", "more": False, "reset": offset > 0, "damaged": 0}
    rows, damaged = [], 0
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # json's and unicode's
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged += 1
    return rows, {"since": cursor, "more": more, "reset": reset, "damaged": damaged}


def _before(file: Any, offset: int) -> int:
    """Checksum of what stands just before an offset; -1 if the file ends earlier."""
    start = max(0, offset - _CHECKED)
    file.seek(start)
    data = file.read(offset - start)
    return zlib.crc32(data) if len(data) == offset - start else -1


def _number(value: Any) -> Any:
    """Numbers as they fit on a screen (six digits); what is not finite or not a number as null."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _error_in(log: Path, *written: Path) -> str:
    """The error that a log ends with, unless the run wrote one of these files (began again, went on) after it."""
    try:
        stat = log.stat()
        with open(log, "rb") as file:
            file.seek(max(0, stat.st_size - 4000))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    if any(path.exists() and path.stat().st_mtime > stat.st_mtime + 1 for path in written):
        return ""
    last = text.splitlines()[-1] if text else ""
    if last.startswith("moe-rl: error:"):
        return last.removeprefix("moe-rl: error:").strip()
    return last if "Traceback (most recent call last)" in text and re.match(r"[\w.]+(: |$)", last) else ""


def _declared(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    arms = config.get("arms")
    return {str(k): v if isinstance(v, dict) else {} for k, v in arms.items()} if isinstance(arms, dict) else {}


def _merged(base: Any, changes: Any) -> dict[str, Any]:
    both = dict(base) if isinstance(base, dict) else {}
    for key, value in changes.items():
        both[key] = _merged(both.get(key), value) if isinstance(value, dict) else value
    return both


def _read_yaml(path: Path) -> dict[str, Any]:
    """A mapping, or an empty one where there is none (yet); parsed again only when the file changed."""
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _parsed(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _parsed(path: Path, _changed: int, _size: int) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
