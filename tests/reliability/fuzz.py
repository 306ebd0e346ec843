"""Random input: every case ends with an answer or with one of our own messages, in time; nothing damaged passes."""

import collections
import json
import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz_kinds import KINDS, Kind, Wrong
from small_runs import start, wait

SECONDS = 20.0  # of CPU, for one case; a folder's figures take some


class Hang(BaseException):
    """A case that took longer."""


@dataclass
class Fuzzed:
    """Of one kind: cases, how they ended, and for each that ended badly how to have it again."""

    kind: str
    what: str
    cases: int = 0
    answered: int = 0
    refused: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def fuzzed(name: str, first: int, cases: int, root: Path) -> Fuzzed:
    """Cases `first`.. of a kind in a process of its own, so that a crash is counted, too."""
    root.mkdir(parents=True, exist_ok=True)
    child = start(lambda: _cases(name, first, cases, root), root / "log")
    status = wait(child, 3600)
    found = (
        Fuzzed(**json.loads((root / "found.json").read_text()))
        if (root / "found.json").exists()
        else Fuzzed(name, KINDS[name].what)
    )
    if status:
        found.tracebacks.append(f"cases {first}..{first + cases}: the process ended with {status}: see {root / 'log'}")
    return found


def _cases(name: str, first: int, cases: int, root: Path) -> None:
    kind, found = KINDS[name], Fuzzed(name, KINDS[name].what)
    case = kind.prepare(root)
    signal.signal(signal.SIGPROF, _stop)
    for number in range(first, first + cases):
        _one(kind, case, number, found)
    (root / "found.json").write_text(json.dumps(vars(found)))


def _one(kind: Kind, case: Callable[[random.Random], str], number: int, found: Fuzzed) -> None:
    found.cases += 1
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        said = case(random.Random(f"{found.kind} {number}"))
        found.answered += said == "answered"
        found.refused += said == "refused"
    except Wrong as error:
        found.wrong.append(f"case {number}: {error}")
    except kind.refusals:
        found.refused += 1
    except Hang:
        found.hangs.append(f"case {number}: {_place()}")
    except BaseException:
        found.tracebacks.append(f"case {number}: {_place()}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _place() -> str:
    lines = traceback.format_exc().strip().splitlines()
    own = [line.strip() for line in lines if "moe_rl/" in line and "tests/" not in line]
    return f"{lines[-1][:200]} {own[-1] if own else ''}"


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hang


def block_of(name: str) -> int:
    """Cases of a kind that are recorded together: less than a minute's."""
    return 800 if KINDS[name].weight > 2 else 100


def shares(cases: int) -> dict[str, int]:
    """How many of so many cases are of each kind."""
    weights = {name: kind.weight for name, kind in KINDS.items()}
    whole = sum(weights.values())
    return {name: max(1, -(-cases * weight // whole)) for name, weight in weights.items()}


def summary(parts: list[Fuzzed]) -> collections.Counter[str]:
    """Counts of all."""
    found: collections.Counter[str] = collections.Counter()
    for part in parts:
        found.update(cases=part.cases, answered=part.answered, refused=part.refused)
        found.update(tracebacks=len(part.tracebacks), hangs=len(part.hangs), wrong=len(part.wrong))
    return found
