"""Study files: a base configuration, arms that depart from it, and seeds, as YAML and as frozen dataclasses."""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moe_rl.names import LONGEST, arm_refusal, nearest
from moe_rl.objectives.bounds import SEED, unknown
from moe_rl.policy.models import seeded
from moe_rl.settings import FREE, differences, laid_over, plain, with_defaults
from moe_rl.study.declarations import Outcome, check_declarations
from moe_rl.study.shipped import ConfigError, read_study_file
from moe_rl.training import RunConfig, validate
from moe_rl.training.config import DPO
from moe_rl.training.method import resolve_method, resolved_objective


class DamagedRunError(ConfigError):
    """Error for a run folder that lost some of what was written; the message names the file and the remedy."""


@dataclass(frozen=True)
class Arm:
    """One arm of a study: its label, and what it changes in the base configuration."""

    label: str
    """Name in figures."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Nested fields of RunConfig that differ from the base."""
    seeds: tuple[int, ...] | None = None
    """Seeds of this arm alone; None takes the study's."""
    note: str = ""
    """A sentence for the report."""


@dataclass(frozen=True)
class StudyConfig:
    """A study: arms x seeds under one base configuration."""

    name: str
    question: str
    arms: dict[str, Arm]
    seeds: tuple[int, ...]
    base: RunConfig = field(default_factory=RunConfig)
    notes: str = ""
    comparisons: tuple[tuple[str, str], ...] | None = None
    """Pairs of arms [treatment, control] that the study is to compare: one family, fixed before it is run. None: each
    arm of a condition is compared with the first, if the two differ in the method alone or in something else alone; the
    report says that such comparisons were not declared."""
    outcome: Outcome = "sampled"
    """What a final reward is, and with it what is compared: the mean of the last steps, of responses that the rollout
    engine samples; or the held-out reward of the last policy, whose responses the training engine samples."""
    interest: float = 0.05
    """Smallest difference of final reward that is of interest."""
    alarms: dict[str, Any] = field(default_factory=dict)
    """The study's own thresholds in place of those of `moe_rl.study.alarms`, by name, null to switch an alarm off; and
    alarms that the study adds, each by its fields (`moe_rl.study.alarms.FIELDS`)."""

    def with_arms(self, names: Sequence[str]) -> "StudyConfig":
        """Return the study with some of its arms, in its own order, and the comparisons among them.

        The first arm is the control if no comparisons are declared.
        """
        kept = None if self.comparisons is None else tuple(p for p in self.comparisons if set(p) <= set(names))
        ordered = sorted(names, key=list(self.arms).index)
        return dataclasses.replace(self, arms={name: self.arms[name] for name in ordered}, comparisons=kept)

    def with_base(self, base: RunConfig) -> "StudyConfig":
        """Return the study over another base configuration.

        Raises ConfigError: a field in which the new base differs could change no run.
        """
        if base.seed != self.base.seed:
            raise ConfigError(f"seed: {base.seed} would change nothing: the seeds of a study are given by --seeds")
        old, new = plain(self.base), plain(base)
        of_arms = [differences(laid_over(old, a.changes), laid_over(new, a.changes)) for a in self.arms.values()]
        for name, (_, given) in differences(old, new).items():
            if not any(name in changed for changed in of_arms):
                raise ConfigError(
                    f"{name}: {given!r} would change nothing, for every arm sets it itself "
                    f"({', '.join(self.arms)}). Edit the study file, or run one arm with it: moe-rl run"
                )
        return dataclasses.replace(self, base=base)

    def runs(self) -> list[tuple[str, int]]:
        """Return (arm, seed) of every run, seeds outermost, so that early results compare all arms."""
        seeds = sorted({seed for arm in self.arms.values() for seed in (arm.seeds or self.seeds)})
        return [(name, s) for s in seeds for name, arm in self.arms.items() if s in (arm.seeds or self.seeds)]

    def resolve(self, arm: str, seed: int) -> RunConfig:
        """Return the full configuration of one run. Raises ConfigError: an unknown arm, or values that cannot run."""
        if arm not in self.arms:
            raise ConfigError(f"unknown arm {arm!r} in study {self.name!r}{nearest(arm, self.arms)}")
        if refusal := SEED.refusal("seed", seed):  # before the model's seeds, which are derived from it
            raise ConfigError(refusal)
        merged = laid_over(dataclasses.asdict(self.base), self.arms[arm].changes)
        config = build(RunConfig, {**merged, "seed": seed}, f"arms.{arm}")
        config = dataclasses.replace(config, model=seeded(config.model, seed))
        try:
            validate(config)
        except ValueError as error:
            raise ConfigError(f"arm {arm!r}: {error}") from error
        return config


def load_study(path: str | Path, merged: bool = False) -> StudyConfig:
    """Read a study file. Raises ConfigError naming the file, the field and what was expected.

    merged: see `parse_study`.
    """
    data = read_study_file(Path(path))
    try:
        return parse_study(data, merged)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


ARM_FIELDS = ("label", "seeds", "note")
"""Fields of an arm besides the settings that it changes."""


def parse_study(data: Any, merged: bool = False) -> StudyConfig:
    """Build a study from plain YAML data; every arm is resolved once, so that a mistake shows before anything runs.

    merged: True for the file of a study folder, in which arms of several commands came together, and for a file of
        which one run is made. Then two arms may have one label, or names that differ in upper and lower case only, and
        two arms that are compared may have no seed in common.
    """
    if not isinstance(data, dict):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"expected a mapping with name, question, seeds, base and arms, got {got}")
    arms = data.get("arms")
    if arms is None and data.get("studies"):
        raise ConfigError(f"lists studies and has no arms; load one of them: {data['studies']}")
    if not isinstance(arms, dict) or not arms:
        raise ConfigError("arms: expected a mapping of at least one arm name to what it changes")
    fields = _hints(RunConfig)
    parsed: dict[str, Arm] = {}
    for name, changes in arms.items():
        if isinstance(name, bool | None):
            raise ConfigError(
                f"arms: YAML reads an unquoted on, yes, off, no, true, false or null as {name}: quote the name"
            )
        _check_name(f"arms.{name}: an arm's name", name)
        if refusal := arm_refusal(str(name)):
            raise ConfigError(f"arms.{name}: {refusal}")
        other = next((other for other in parsed if other.casefold() == str(name).casefold()), None)
        if other is not None and not merged:
            raise ConfigError(f"arms.{name}: on a Mac its folder would be that of arm {other!r}; choose another name")
        if not isinstance(changes, dict | None):
            raise ConfigError(f"arms.{name}: expected a mapping of what the arm changes, got {changes!r}")
        changes = dict(changes or {})
        own = {key: changes.pop(key) for key in ARM_FIELDS if key in changes}
        if isinstance(own.get("label"), str):
            own["label"] = " ".join(own["label"].split())  # a folded text ends with a line break
        if "seed" in changes:
            raise ConfigError(
                f"arms.{name}.seed: would change nothing; the seeds of an arm are a list, arms.{name}.seeds"
            )
        for key in changes:
            if key not in fields:
                hint = _within(str(key), fields) or nearest(str(key), [*ARM_FIELDS, *fields])
                raise ConfigError(f"arms.{name}.{key}: unknown field{hint}")
        parsed[str(name)] = build(Arm, {"label": str(name), **own, "changes": changes}, f"arms.{name}")
    given = data.get("seeds", (0, 1, 2))
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"seeds: expected a list of at least one whole number, got {given!r}")
    given = {"seeds": given, "question": data.get("question", ""), "comparisons": _named(data.get("comparisons"))}
    study = build(StudyConfig, {**data, "arms": parsed, **given}, "")
    _check_name("name: a study's name", study.name)
    if study.base.seed != RunConfig().seed:
        raise ConfigError(f"base.seed: {study.base.seed} would change nothing; the seeds of a study are a list, seeds")
    check_seeds("seeds", study.seeds)
    for name, arm in study.arms.items():
        if arm.seeds is not None and not arm.seeds:
            raise ConfigError(f"arms.{name}.seeds: expected a list of at least one whole number, got []")
        check_seeds(f"arms.{name}.seeds", arm.seeds or ())
    resolved: dict[str, str] = {}
    called: dict[tuple[str, float], str] = {}
    for name, arm in study.arms.items():
        config = study.resolve(name, study.seeds[0])
        twin = resolved.setdefault(repr(config), name)
        if twin != name:
            raise ConfigError(f"arms.{name}: the same configuration as arm {twin!r}; an arm must change something")
        if not arm.label:
            raise ConfigError(f"arms.{name}.label: is empty; it is the arm's name in figures")
        told = 0.0 if "noise" in arm.label.lower() else config.method.noise  # as `full_label` adds noise to the label
        other = called.setdefault((arm.label, told), name)
        if other != name and not merged:
            raise ConfigError(
                f"arms.{name}.label: {arm.label!r} is the label of arm {other!r} too; nothing "
                "would tell them apart in figures"
            )
    try:
        check_declarations(vars(study))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_comparisons(study, merged)
    return study


def check_seeds(where: str, seeds: Sequence[int]) -> None:
    """Raise ConfigError for a value that is no seed, and for a seed that is given twice: both would be one run."""
    for i, seed in enumerate(seeds):
        if refusal := SEED.refusal(f"{where}[{i}]", seed):
            raise ConfigError(refusal)
        if seed in seeds[:i]:
            raise ConfigError(f"{where}[{i}]: seed {seed} is given twice; an arm runs once with each seed")


def _named(pairs: Any) -> Any:
    """Return comparisons with text in place of numbers, as which YAML reads an unquoted name like 0.1, of arms too."""
    if isinstance(pairs, list):
        return [_named(part) for part in pairs]
    return str(pairs) if isinstance(pairs, int | float) and not isinstance(pairs, bool) else pairs


def _check_comparisons(study: StudyConfig, merged: bool) -> None:
    """Raise ConfigError for a comparison of an unknown arm or, unless `merged`, of arms without a common seed."""
    for i, pair in enumerate(study.comparisons or ()):
        for arm in pair:
            if arm not in study.arms:
                raise ConfigError(f"comparisons[{i}]: no arm is called {arm!r}{nearest(arm, study.arms)}")
        one, two = (set(study.arms[arm].seeds or study.seeds) for arm in pair)
        if not one & two and not merged:
            raise ConfigError(f"comparisons[{i}]: {pair[0]!r} and {pair[1]!r} have no seed in common to be paired by")


def _check_name(what: str, name: Any) -> None:
    """Raise ConfigError for a name that cannot be the name of a folder."""
    fits = len(str(name).encode()) <= LONGEST
    if not fits or not re.fullmatch(r"[^/\\\s.-][^/\\\x00-\x1f\x7f]{0,99}", str(name)):
        raise ConfigError(
            f"{what} becomes a folder's: at most 100 characters and {LONGEST} bytes, no slash or control character, no "
            f"'.', '-' or space at its start; got {str(name)[:120]!r}"
        )


def dump_run(config: RunConfig) -> str:
    """Return a resolved run configuration as YAML.

    `objective` has every field of what is minimised, with presets filled in.
    """
    return yaml.safe_dump(run_settings(config), sort_keys=False, allow_unicode=True)


def run_settings(config: RunConfig) -> dict[str, Any]:
    """Return as plain data what `dump_run` returns as YAML."""
    return {**plain(config), "objective": plain(resolved_objective(config))}


def changed_settings(stored: dict[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a run's `config.yaml`, read as plain data, differs from `config`, with both values.

    A setting that the version which wrote the file did not know counts as its default. Left out are settings that
    change no number (`FREE`), and how many processes are expected: a run may go on with others.
    """
    stored = with_defaults(stored, config)
    if config.method.objective != DPO:
        objective = resolve_method(config, budget=1).objective
        stored["objective"] = with_defaults(stored.get("objective"), objective)
    changed = differences(stored, run_settings(config))
    return {name: values for name, values in changed.items() if name not in (*FREE, "distributed.processes")}


def dump_study(study: StudyConfig) -> str:
    """Return a study as YAML that `load_study` reads back."""
    data = plain(study)
    for name, arm in data["arms"].items():
        own = {field: arm[field] for field in ARM_FIELDS if field != "seeds" or arm["seeds"]}
        data["arms"][name] = own | arm["changes"]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def build(cls: Any, data: Any, where: str) -> Any:
    """Build a dataclass from a mapping; unknown fields and wrong types raise ConfigError naming the dotted field."""
    if dataclasses.is_dataclass(data) and isinstance(data, cls):
        return data
    if isinstance(data, str) and hasattr(cls, "parse"):  # as on the command line: token_mask:0.5:5
        try:
            return cls.parse(data)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of {cls.__name__} fields, got {data!r}")
    hints = _hints(cls)
    values = {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise ConfigError(f"{name}: unknown field{_within(str(key), hints) or nearest(str(key), hints)}")
        values[key] = _convert(hints[key], value, name)
    for f in dataclasses.fields(cls):
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}.{f.name}: is missing".lstrip("."))
    try:
        return cls(**values)
    except ValueError as error:  # a class that checks its own values
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


_hints = cache(typing.get_type_hints)  # a study builds its few classes hundreds of times


def _within(key: str, hints: dict[str, Any]) -> str:
    """Return a hint at those sections among the fields that have a field called `key`; empty if none has."""
    kinds = {section: (hint, *typing.get_args(hint)) for section, hint in hints.items()}
    known = [name for name, of in kinds.items() if any(key in getattr(c, "__dataclass_fields__", ()) for c in of)]
    return f"; did you mean {' or '.join(f'{section}: {{{key}: ...}}' for section in known)}?" if known else ""


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert plain data to the type `hint`; raise ConfigError naming the field `where` if it does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _convert(option, value, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r}")
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(kinds) != len(value):
            raise ConfigError(f"{where}: expected {len(kinds)} values, got {len(value)}")
        return tuple(_convert(kind, value[i], f"{where}[{i}]") for i, kind in enumerate(kinds))
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(unknown(where, value, [str(choice) for choice in args]))
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a mapping, got {value!r}")
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # YAML 1.1 reads 1e-3 as a string
            return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
