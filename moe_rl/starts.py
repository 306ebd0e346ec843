"""`env.json` of a run: versions of packages and, for a resumed run, the environments of earlier starts, perhaps of
other versions or another machine. Every subpackage may import this module; it imports none of them."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_rl.checks import parse_json

OF_THE_POLICY = ("weights_sha256", "cold_start")
BEGUN_WITH = (*OF_THE_POLICY, "task_sha256")
"""Keys of what a run starts from. They keep the values of the first start, whatever a later start loads before it
restores the checkpoint."""
EARLIER = "earlier"
_OF_ONE_START = ("started", "command", EARLIER, *BEGUN_WITH)


NOT_INSTALLED = "not installed"


def version_of(package: str) -> str:
    """Return the installed version of a package, or NOT_INSTALLED."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def begun_under(folder: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the `env.json` of a resumed run holds besides `now`, its environment from here on: what the run began
    with and, under `earlier`, the previous environments that differ, oldest first, without their commands."""
    try:
        old = parse_json((folder / "env.json").read_bytes())
    except (OSError, ValueError):
        return {}
    known, earlier = [_machine(json.loads(json.dumps(now)))], list[dict[str, Any]]()
    for start in reversed(environments(old)):
        if _machine(start) not in known:
            known.append(_machine(start))
            earlier.insert(0, {"started": start.get("started"), **_machine(start)})
    kept = {name: old[name] for name in BEGUN_WITH if isinstance(old, dict) and name in old}
    return {**kept, **({EARLIER: earlier} if earlier else {})}


def environments(environment: Any) -> list[dict[str, Any]]:
    """Return all environments in which a run was made, from its `env.json`: the earlier ones, then the last."""
    if not isinstance(environment, dict):
        return []
    earlier = environment.get(EARLIER)
    known = [start for start in earlier if isinstance(start, dict)] if isinstance(earlier, list) else []
    return [*known, {name: value for name, value in environment.items() if name != EARLIER}]


def _machine(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an environment that several starts can share: versions and machine."""
    return {name: value for name, value in start.items() if name not in _OF_ONE_START}
