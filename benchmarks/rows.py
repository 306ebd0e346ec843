"""Rows of results that every benchmark here writes with `--json FILE`, and functions for timing and options.

A file has one JSON object a line, with the same keys in all files:

- `benchmark`, `case`: the script, and what was measured
- `us`: median microseconds of one call; CPU time unless `note` says otherwise
- `limit_us`: a lower limit of the time for the same work, measured or computed; null if none is known
- `peer`, `peer_us`: what the case is compared with, and the peer's median microseconds
- `ratio`, `spread`: median and [lower, upper] quartile of us / peer_us within a round; extremes if rounds are few
- `note`: sizes, units, what differs
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rl.files import write_atomic


def command_line(doc: str | None, rounds: int | None = None, least: int = 1) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: `--json` and, unless `rounds` is None, `--rounds`.

    rounds: the default number of rounds. least: the smallest number that is accepted.
    """

    def number(text: str) -> int:  # argparse puts this name into the message of a ValueError
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"at least {least}, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results, one JSON object a line")
    if rounds:
        parser.add_argument("--rounds", type=number, default=rounds, help="of each comparison (default: %(default)s)")
    return parser


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, of this process with all its threads."""
    began = time.process_time()
    call()
    return time.process_time() - began


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most bytes on the CPU that torch held at once during `run`, beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))


def in_turns(
    calls: Mapping[Any, Callable[[], Any]],
    rounds: int,
    seconds: Callable[[Any], float] = cpu_seconds,
    shuffled: bool = False,
) -> dict[Any, list[float]]:
    """Make each call once per round, after one round of warm-up; return name -> seconds of each round.

    seconds: measures one call. shuffled: whether each round has its own random order.
    """
    found: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in random.sample(list(calls), len(calls)) if shuffled else calls:
            taken = seconds(calls[name])
            if number:
                found[name].append(taken)
    return found


def row(
    benchmark: str,
    case: str,
    seconds: Sequence[float],
    peer: str | None = None,
    peer_seconds: Sequence[float] | None = None,
    limit: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Return one row of results from seconds of each round, the peer's in the same rounds, and a limit in seconds."""
    ratio = spread = None
    if peer_seconds:
        of_rounds = ratios(seconds, peer_seconds)
        ratio, spread = statistics.median(of_rounds), quartiles(of_rounds)
    return {
        "benchmark": benchmark,
        "case": case,
        "us": 1e6 * statistics.median(seconds),
        "limit_us": None if limit is None else 1e6 * limit,
        "peer": peer,
        "peer_us": 1e6 * statistics.median(peer_seconds) if peer_seconds else None,
        "ratio": ratio,
        "spread": spread,
        "note": note,
    }


def ratios(seconds: Sequence[float], peer_seconds: Sequence[float]) -> list[float]:
    """Return seconds / peer seconds of each round."""
    return [a / b for a, b in zip(seconds, peer_seconds, strict=True)]


def resolved(same: Sequence[float]) -> float:
    """Return the smallest difference of a ratio from 1 that can be resolved, given the ratios of two equal sides.

    It is twice the standard error of their median, which is 1.2533 (IQR / 1.349) / sqrt(n).
    """
    low, high = quartiles(same)
    return 2 * 1.2533 * (high - low) / 1.349 / len(same) ** 0.5


def quartiles(values: Sequence[float]) -> list[float]:
    """Return [lower, upper] quartile, or [minimum, maximum] of fewer than four values."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file, one JSON object a line; do nothing if `path` is None."""
    if path is not None:
        write_atomic(path, "".join(json.dumps(one) + "\n" for one in rows))
