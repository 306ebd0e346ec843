"""Part `fuzz` of the campaign: random input, which must be answered or refused with our own message, in time."""

import collections
import json
import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz_kinds import KINDS, Kind
from small_runs import start, wait
from small_study import Wrong

SECONDS = 20.0  # CPU time limit of a case; drawing a folder's figures takes some seconds


class Hang(BaseException):
    """Signal that a case took longer than `SECONDS`."""


@dataclass
class Fuzzed:
    """Results for one kind of input: counts of cases by outcome, and the number of each case that ended badly."""

    kind: str
    what: str
    cases: int = 0
    answered: int = 0
    refused: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def fuzzed(name: str, first: int, cases: int, root: Path) -> Fuzzed:
    """Run `cases` cases of a kind from number `first` on, in a process of its own, so that a crash is counted, too."""
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
    """Return the last line of the current traceback, and its last place in the package."""
    lines = traceback.format_exc().strip().splitlines()
    own = [line.strip() for line in lines if "moe_rl/" in line and "tests/" not in line]
    return f"{lines[-1][:200]} {own[-1] if own else ''}"


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hang


def block_of(name: str) -> int:
    """Return the number of cases of a kind that make one block, which takes less than a minute."""
    return 800 if KINDS[name].weight > 2 else 100


def shares(cases: int) -> dict[str, int]:
    """Return kind -> its number of cases, when there are about `cases` in all."""
    weights = {name: kind.weight for name, kind in KINDS.items()}
    whole = sum(weights.values())
    return {name: max(1, -(-cases * weight // whole)) for name, weight in weights.items()}


def summary(parts: list[Fuzzed]) -> collections.Counter[str]:
    """Return the sums of all counts."""
    found: collections.Counter[str] = collections.Counter()
    for part in parts:
        found.update(cases=part.cases, answered=part.answered, refused=part.refused)
        found.update(tracebacks=len(part.tracebacks), hangs=len(part.hangs), wrong=len(part.wrong))
    return found
