# ruff: noqa: E501  (a table: one alarm, one line)
"""Alarms: at which steps a monitored signal crossed its threshold, and which signals crossed before a collapse.

`ALARMS` is the table of all thresholds, each with its source. A study file may set thresholds of its own
(`alarms: {ess: 0.5}`; null switches an alarm off) and add alarms on any metric
(`alarms: {low: {metric: rollout.reward, below: 0.2, window: 5}}`).
An alarm is no verdict: published thresholds are rules of thumb for large models, and no work has calibrated one against
collapses.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.names import nearest
from moe_rl.run_rows import FOREIGN, row_key, row_problem
from moe_rl.study.cursor import follow
from moe_rl.study.curves import detect_collapse
from moe_rl.study.words import not_mathematics


@dataclass(frozen=True)
class Alarm:
    """One alarm: a signal, which is a metric in rows of one kind, and its threshold.

    Attributes:
        name: key of the alarm in a study's `alarms`.
        title: name in words.
        kind: kind of the rows of metrics.jsonl that are read; of "engine" rows only those of the pair "engines".
        metric: name of the value that is watched.
        over: name of the denominator, if the metric is stored as a count; else empty.
        above: True if values above the threshold cross, False if values below the threshold do.
        threshold: in units of the value; for a `spike`, in standard deviations.
        spike: whether the value is compared with the run's own past (`Spikes`).
        source: where the threshold comes from.
        window: number of latest values whose mean is compared; nothing is compared before there are so many.
        declared: True for an alarm that the study adds; the report shows such an alarm even if no run has its metric.
    """

    name: str
    title: str
    kind: str
    metric: str
    above: bool
    threshold: float
    source: str
    over: str = ""
    spike: bool = False
    window: int = 1
    declared: bool = False

    def reads(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is one of those in which the alarm's signal may be."""
        return row.get("kind") == self.kind and (self.kind != "engine" or row.get("pair") == "engines")

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return a row's value of the signal, divided by `over` if that is set; None if the row has no value.

        A gradient norm that was not finite, which is null in its row, counts as infinite.
        """
        found = _number(row.get(self.metric))
        if found is None and self.metric == "grad_norm" and row.get("skipped") == 1:
            return math.inf
        if found is None or not self.over:
            return found
        total = _number(row.get(self.over))
        return found / total if total else None

    @property
    def rule(self) -> str:
        """Rule in words, for example `ess_token of the update rows below 0.3`."""
        of = f"{self.metric} / {self.over}" if self.over else self.metric
        of = f"mean of {self.window} values of {of}" if self.window > 1 else of
        beyond = f"{'above' if self.above else 'below'} {self.threshold:g}"
        if self.spike:
            beyond = f"more than {self.threshold:g} standard deviations above its moving mean"
        return f"{of} of the {self.kind} rows {beyond}"


VERL, NEMO = "verl, docs/algo/rollout_corr.md", "NeMo-RL, docs/guides/grpo.md"

ALARMS: tuple[Alarm, ...] = (
    Alarm("ess", "Effective sample size", "update", "ess_token", False, 0.3, f"{VERL} (there of pi_old / mu)"),
    Alarm("f2", "F(2), extreme tokens", "update", "extreme_2", True, 0.1, "R3, arXiv 2510.11370, as others quote it", "tokens"),
    Alarm("k3", "KL of the update (k3)", "update", "k3", True, 0.015, "OpenAI Spinning Up, PPO: stops a batch at 1.5 x target_kl 0.01 (there k1)"),
    Alarm("grad_norm", "Gradient norm", "update", "grad_norm", True, 2.5, "ZClip, arXiv 2504.02507: z 2.5, decay 0.97, 25 updates to warm up", spike=True),
    Alarm("margin", "Router shift over boundary margin", "probe", "shift_over_margin", True, 1.0, "by definition: below half the margin no choice can change; 1 is where half of the choices could"),
    Alarm("mult_prob_error", "Multiplicative probability error", "engine", "token_mult_prob_error", True, 1.05, "NeMo-RL, docs/adding-new-models.md: above 1.05 investigate"),
    Alarm("engine_k3", "KL between engines (k3)", "engine", "k3", True, 1e-3, f"{NEMO}: below 1e-3 acceptable"),
    Alarm("engine_ess", "Effective sample size between engines", "engine", "rollout_is_eff_sample_size", False, 0.3, VERL),
    Alarm("engine_f2", "F(2) between engines", "engine", "extreme_fraction", True, 0.1, "R3, arXiv 2510.11370, as others quote it"),
    Alarm("engine_chi2", "chi² between engines", "engine", "chi2_token", True, 1.0, VERL),
)  # fmt: skip
"""Built-in alarms, in the order in which reports and pages show them."""

DECAY, WARM_UP = 0.97, 25  # ZClip's decay of mean and variance, and number of values that only initialise them

MOST = 10_000
"""Most values that an alarm's window may have."""
FIELDS = ("metric", "above", "below", "spike", "over", "window", "title")
"""Fields of an alarm that a study adds; docs/run_folder.md has what each means."""


class AlarmError(ValueError):
    """Error for a study's `alarms` that cannot be used; the message says which entry and what is known."""


def alarms_of(own: Mapping[str, Any] | None) -> tuple[Alarm, ...]:
    """Return the alarms of a study: the table with the study's own thresholds, then the alarms that the study adds.

    Alarms whose threshold is null are left out.

    >>> [alarm.threshold for alarm in alarms_of({"ess": 0.5, "f2": None}) if alarm.name in ("ess", "f2")]
    [0.5]
    >>> alarms_of({"low": {"metric": "rollout.reward", "below": 0.2, "window": 5}})[-1].rule
    'mean of 5 values of reward of the rollout rows below 0.2'

    Raises:
        AlarmError: an unknown name or field, a metric that no row has, a threshold that is no number.
    """
    own = own or {}
    if not isinstance(own, Mapping):
        raise AlarmError(f"alarms: expected a mapping of alarm to threshold, got {own!r}")
    table = {alarm.name: alarm for alarm in ALARMS}
    for name, value in own.items():
        if not isinstance(name, str):
            raise AlarmError(f"alarms: {name!r} is no name; put it in quotes")
        if name not in table:
            table[name] = _added(name, value, [*table])
        elif value is None:
            del table[name]
        else:
            what = "a finite number, or null to switch it off (another definition needs a name of its own)"
            source = f"this study ({table[name].threshold:g}: {table[name].source})"
            threshold = _threshold(f"alarms.{name}", value, what, table[name].spike)
            table[name] = replace(table[name], threshold=threshold, source=source)
    return tuple(table.values())


def _added(name: Any, given: Any, known: list[str]) -> Alarm:
    """Build an alarm that a study adds from its fields; raise AlarmError if they cannot be used."""
    where = f"alarms.{name}"
    if not isinstance(given, Mapping):
        raise AlarmError(
            f"{where}: no such alarm (one of your own is a mapping: {{metric: KIND.NAME, above: NUMBER}})"
            f"{nearest(str(name), known)}"
        )
    if unknown := [field for field in given if field not in FIELDS]:
        raise AlarmError(f"{where}.{unknown[0]}: no such field; there are {', '.join(FIELDS)}")
    if len(rules := [field for field in ("above", "below", "spike") if field in given]) != 1:
        raise AlarmError(f"{where}: expected one of above, below and spike, got {' and '.join(rules) or 'none'}")
    rule, window, title = rules[0], given.get("window", 1), given.get("title", str(name))
    threshold = _threshold(f"{where}.{rule}", given[rule], "a finite number", rule == "spike")
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MOST:
        raise AlarmError(f"{where}.window: expected a whole number of values from 1 to {MOST}, got {window!r}")
    if rule == "spike" and window > 1:
        raise AlarmError(f"{where}.window: a spike is told from a moving mean of its own; leave window out")
    if not isinstance(title, str) or not title.strip() or not_mathematics(title):
        raise AlarmError(f"{where}.title: expected a text that figures can draw, got {title!r}")
    kind, metric, over = _column(f"{where}.metric", given.get("metric"))
    if "over" in given:
        over = "" if given["over"] is None else _column(f"{where}.over", f"{kind}.{given['over']}")[1]
    spike, own = rule == "spike", "this study"
    return Alarm(str(name), title, kind, metric, rule != "below", threshold, own, over, spike, window, declared=True)


def _column(where: str, name: Any) -> tuple[str, str, str]:
    """Return kind, name and denominator (or "") of a metric given as KIND.NAME; raise AlarmError if there is none."""
    from moe_rl.measure.catalogue import find  # imported here: it loads torch, which takes seconds
    from moe_rl.study.shown import KINDS, choosable

    kind, _, column = name.partition(".") if isinstance(name, str) else ("", "", "")
    if kind not in KINDS or not column:
        raise AlarmError(f"{where}: expected KIND.NAME, of the kinds {', '.join(KINDS)}; got {name!r}")
    if FOREIGN in column:  # another trainer's metric: unknown before a run has it
        return kind, column, ""
    if name in choosable():
        return kind, column, choosable()[name]["over"]
    if (pattern := find(kind, column)) is None or "<" not in pattern.name:
        near = nearest(name, choosable(), listed=False)
        raise AlarmError(f"{where}: {kind} rows have no number {column!r}{near} (docs/metrics.md has all names)")
    return kind, column, ""


def _threshold(where: str, value: Any, what: str, spike: bool) -> float:
    """Return a threshold as a finite number, above 0 for a spike; raise AlarmError for any other value."""
    found = None
    with suppress(ValueError, OverflowError):
        found = _number(float(value) if isinstance(value, str) else value)  # YAML 1.1 reads 1e-3 as a text
    if found is None:
        raise AlarmError(f"{where}: expected {what}; got {value!r}")
    if spike and found <= 0:
        raise AlarmError(f"{where}: standard deviations above the moving mean, so above 0; got {found:g}")
    return found


class Spikes:
    """Spike detector: ZClip's anomaly score (arXiv 2504.02507), z = (g - mean) / sd.

    Mean and variance are exponential moving ones. A value whose z is above the threshold enters mean and variance as
    mean + sd * threshold² / z, so that one spike does not hide the next. The first 25 values only initialise mean and
    variance.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def crosses(self, value: float) -> bool:
        """Return whether `value` is a spike against the values before it, and add the value to mean and variance."""
        if len(self.first) < WARM_UP:
            self.first.append(value)
            self.mean = sum(self.first) / len(self.first)
            self.variance = sum((x - self.mean) * (x - self.mean) for x in self.first) / len(self.first)
            return False
        sd = math.sqrt(self.variance)
        z = (value - self.mean) / sd if sd > 0 else (math.inf if value > self.mean else 0.0)
        spike = z > self.threshold
        seen = self.mean + (sd * self.threshold**2 / z if z < math.inf else 0.0) if spike else value
        self.mean = DECAY * self.mean + (1 - DECAY) * seen
        self.variance = DECAY * self.variance + (1 - DECAY) * (seen - self.mean) * (seen - self.mean)
        return spike


class RunAlarms:
    """The alarms of one run, computed from the rows of its metrics.jsonl.

    Of rows with one key (`row_key`) the last counts, as in `moe_rl.study.load`. A value that cannot be a row is left
    out.

    Attributes:
        own: whether the rewards are those of the policy's own responses; if not, the run has no collapse.
    """

    def __init__(self, alarms: Iterable[Alarm] = ALARMS, own: bool = True):
        self.alarms, self.own = tuple(alarms), own
        self._rewards: dict[int, float | None] = {}
        self._signals = {alarm.name: _Signal(alarm) for alarm in self.alarms}

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in one row."""
        if row_problem(row):
            return
        if row["kind"] == "rollout":
            self._rewards[row["step"]] = _number(row["reward"])
        for signal in self._signals.values():
            if signal.alarm.reads(row):
                signal.take(row_key(row), row)

    @property
    def seen(self) -> dict[str, int]:
        """Number of values that each alarm's signal has had, by the alarm's name."""
        return {name: signal.evaluated().seen for name, signal in self._signals.items()}

    @property
    def steps(self) -> dict[str, list[int]]:
        """The steps at which each alarm's metric had a value, by alarm."""
        return {name: list(signal.evaluated().steps) for name, signal in self._signals.items()}

    @property
    def nulls(self) -> dict[str, list[int]]:
        """Steps at which an alarm's metric was null (not finite, or not available), by alarm; without empty lists."""
        return {name: list(steps) for name, signal in self._signals.items() if (steps := signal.evaluated().nulls)}

    @property
    def crossed(self) -> dict[str, list[tuple[int, float]]]:
        """By alarm, the steps at which its signal crossed, each once, with the first value that crossed there."""
        return {name: list(signal.evaluated().crossed.items()) for name, signal in self._signals.items()}

    @property
    def collapse(self) -> int | None:
        """Step at which the run's reward collapsed (`moe_rl.study.curves.COLLAPSE_RULE`); None if it did not.

        None also for rewards that are not of the policy's own responses (`own`).
        """
        steps = sorted(self._rewards)
        found = detect_collapse(steps, np.array([self._rewards[step] for step in steps], dtype=float))
        return int(found.step) if self.own and found.collapsed else None

    def before_collapse(self) -> list[tuple[Alarm, int]]:
        """Return the alarms that had crossed by the step of the collapse, each with its first step, earliest first.

        Alarms with equal steps stay in the order of the table. The list is empty without a collapse.
        """
        end, crossed = self.collapse, self.crossed
        if end is None:
            return []
        first = [(alarm, crossed[alarm.name][0][0]) for alarm in self.alarms if crossed[alarm.name]]
        return sorted((pair for pair in first if pair[1] <= end), key=lambda pair: pair[1])

    def summary(self) -> dict[str, Any]:
        """Return the alarms of the run as plain data for JSON.

        Keys: `crossed` ({alarm: [[step, value], ...]}, null for an infinite value), `lacks` (alarms whose signal the
        run lacks), `nulls` ({alarm: number of steps at which its metric was null}), `collapse` (its step) and `first`
        ([[alarm, step], ...] of `before_collapse`).
        """
        return {
            "crossed": {name: [[step, _short(v)] for step, v in found] for name, found in self.crossed.items()},
            "nulls": {name: len(steps) for name, steps in self.nulls.items()},
            "lacks": [name for name, count in self.seen.items() if not count],
            "collapse": self.collapse,
            "first": [[alarm.name, step] for alarm, step in self.before_collapse()],
        }


class _Signal:
    """The values of one alarm in a run's rows: number `seen`, their `steps`, steps of `nulls`, and crossings.

    `crossed` maps a step to the first value that crossed there. A value is evaluated once; all values are evaluated
    again if a row came late, or in place of another row.
    """

    def __init__(self, alarm: Alarm):
        self.alarm = alarm
        self._values: dict[tuple[Any, ...], float | None] = {}
        self._new: list[tuple[tuple[Any, ...], float | None]] = []
        self._last, self._late = tuple[Any, ...](), False
        self._begin()

    def _begin(self) -> None:
        self.seen, self.nulls, self.crossed = 0, dict[int, None](), dict[int, float]()
        self.steps = dict[int, None]()
        self._spikes, self._latest = Spikes(self.alarm.threshold), deque[float](maxlen=self.alarm.window)

    def take(self, key: tuple[Any, ...], row: Mapping[str, Any]) -> None:
        self._late |= key <= self._last
        self._last = max(key, self._last)
        self._values.pop(key, None)
        value = self.alarm.value(row)
        if value is not None or row.get(self.alarm.metric, 0) is None:
            self._values[key] = value
            self._new.append((key, value))

    def evaluated(self) -> "_Signal":
        """Evaluate the values that are new since the last call, or all if a row came late, and return this signal."""
        if self._late:
            self._begin()
            self._new, self._late = sorted(self._values.items()), False
        for key, value in self._new:
            self._look(key[0], value)
        self._new = []
        return self

    def _look(self, step: int, value: float | None) -> None:
        """Evaluate one value: note the step of a null, else count the value and note a crossing."""
        if value is None:
            self.nulls[step] = None
            return
        self.seen += 1
        self.steps[step] = None
        self._latest.append(value)
        mean = sum(self._latest) / self.alarm.window
        if self.alarm.spike and mean < math.inf:
            crosses = self._spikes.crosses(mean)
        else:
            crosses = mean > self.alarm.threshold if self.alarm.above else mean < self.alarm.threshold
        if crosses and len(self._latest) == self.alarm.window:
            self.crossed.setdefault(step, mean)


class LiveAlarms:
    """The alarms of one run that is being written; the rows of a run that was rewritten are read again."""

    def __init__(self, path: Path, alarms: tuple[Alarm, ...]):
        self.path, self.alarms, self.since = path, alarms, ""
        self._forget()

    def now(self, own: bool = True) -> dict[str, Any]:
        """Read new rows, and return `RunAlarms.summary` of all rows that are there; own: see `RunAlarms`."""
        self.since = follow(self.path, self.since, lambda row: self.state.take(row), self._forget)
        self.state.own = own
        return self.state.summary()

    def _forget(self) -> None:
        self.state = RunAlarms(self.alarms)


def _number(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _short(value: float) -> float | None:
    """Return `value` with four significant digits; None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
