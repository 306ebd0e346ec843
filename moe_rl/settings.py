"""Nested settings as plain data, as a run keeps them in its `config.yaml`: what differs, and what an earlier version
did not know yet. Every room may use it; it knows none of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

FREE = ("checkpoint_every", "keep_policy_every", "tracker")
"""Settings of a run of moe_rl that change none of its numbers and tables: what else is kept, where rows are sent as
well. It may go on with others, and arms that differ in them are one experiment."""


def differences(a: Any, b: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted fields in which two nested mappings differ, with both values; one that is not there counts as None."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*a, *(k for k in b if k not in a)]:
            found |= differences(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return {} if a == b or repr(a) == repr(b) else {prefix: (a, b)}  # NaN is not equal to itself


def at(settings: Any, *names: str) -> Any:
    """What nested mappings hold under these names, one inside the other; None where something else is on the way, as in
    a file of another trainer may be.

    >>> at({"optim": {"steps": 31}}, "optim", "steps"), at({"optim": "adam"}, "optim", "steps")
    (31, None)
    """
    for name in names:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names.

    >>> flatten({"optim": {"steps": 31}, "seed": 0})
    {'optim.steps': 31, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def listed(changed: Mapping[str, tuple[Any, Any]], most: int = 5) -> str:
    """What `differences` found, in words."""
    words = "; ".join(f"{name}: {a!r} there, {b!r} now" for name, (a, b) in list(changed.items())[:most])
    return words + (f" and {len(changed) - most} more" if len(changed) > most else "")


def laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`; mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = laid_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def plain(value: Any) -> Any:
    """Nested dataclasses, mappings and sequences as mappings and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def with_defaults(stored: Any, now: Any) -> Any:
    """`stored`, which some version wrote of a dataclass like `now`, with every field that it lacks at that field's
    default: what a run did before there was the field.

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
