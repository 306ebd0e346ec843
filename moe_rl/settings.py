"""Nested settings as plain data, as a run keeps them in its `config.yaml`: their differences, and defaults for what an
earlier version did not know yet. Every subpackage may import this module; it imports none of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

FREE = ("checkpoint_every", "keep_policy_every", "tracker")
"""Settings of a run of moe_rl that change none of its numbers and tables, only what else is kept and where rows are
also sent. A run may go on with other values of them, and arms that differ in them are one experiment."""


def differences(a: Any, b: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted fields in which two nested mappings differ, each with both values; a missing field counts as
    None."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*a, *(k for k in b if k not in a)]:
            found |= differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return {} if a == b or repr(a) == repr(b) else {prefix: (a, b)}  # NaN is not equal to itself


def at(settings: Any, *names: str) -> Any:
    """Return what nested mappings hold under these names, one inside the other. None if a name is missing or something
    else than a mapping is on the way, as may be in a file of another trainer.

    >>> at({"optim": {"steps": 31}}, "optim", "steps"), at({"optim": "adam"}, "optim", "steps")
    (31, None)
    """
    for name in names:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names.

    >>> flatten({"optim": {"steps": 31}, "seed": 0})
    {'optim.steps': 31, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def listed(changed: Mapping[str, tuple[Any, Any]], most: int = 5) -> str:
    """Return what `differences` found in words, at most `most` fields."""
    words = "; ".join(f"{name}: {a!r} there, {b!r} now" for name, (a, b) in list(changed.items())[:most])
    return words + (f" and {len(changed) - most} more" if len(changed) > most else "")


def laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with `changes` laid over it; mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = laid_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def plain(value: Any) -> Any:
    """Return nested dataclasses, mappings and sequences as dictionaries and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def with_defaults(stored: Any, now: Any) -> Any:
    """Return `stored`, which some version wrote of a dataclass like `now`, with every missing field set to that field's
    default, which is what a run did before the field existed.

    >>> @dataclasses.dataclass
    ... class Settings:
    ...     steps: int
    ...     later: int = 0
    >>> with_defaults({"steps": 3}, Settings(3)), with_defaults({"steps": 3, "later": 1}, Settings(3))
    ({'steps': 3, 'later': 0}, {'steps': 3, 'later': 1})
    """
    if isinstance(stored, list) and isinstance(now, list | tuple) and len(stored) == len(now):
        return [with_defaults(*pair) for pair in zip(stored, now, strict=True)]
    if not isinstance(stored, dict) or not dataclasses.is_dataclass(now) or isinstance(now, type):
        return stored
    filled = dict(stored)
    for f in dataclasses.fields(now):
        if f.name in stored:
            filled[f.name] = with_defaults(stored[f.name], getattr(now, f.name))
        elif f.default is not dataclasses.MISSING:
            filled[f.name] = plain(f.default)
        elif f.default_factory is not dataclasses.MISSING:
            filled[f.name] = plain(f.default_factory())
    return filled
