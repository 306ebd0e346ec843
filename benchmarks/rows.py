"""What every benchmark here writes with `--json FILE`: one JSON object a line, the same keys in all of them.

- `benchmark`, `case`: the script, and what was measured
- `us`: median microseconds of one call; CPU time unless `note` says otherwise
- `limit_us`: what the same work cannot be quicker than, measured or computed beside it; null where none is known
- `peer`, `peer_us`: what it is compared with, and the median microseconds of that
- `ratio`, `spread`: median and [lower, upper] quartile of us / peer_us within a round; the extremes of few rounds
- `note`: sizes, units, what differs
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results, one JSON object a line")


def check_rounds(parser: argparse.ArgumentParser, rounds: int, least: int = 1) -> None:
    """Refuse fewer rounds than the figures need, before anything is measured."""
    if rounds < least:
        parser.error(f"--rounds: at least {least}, got {rounds}")


def row(
    benchmark: str,
    case: str,
    seconds: Sequence[float],
    peer: str | None = None,
    peer_seconds: Sequence[float] | None = None,
    limit: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """One result: seconds of each round, those of the peer in the same rounds, and the limit in seconds."""
    ratio = spread = None
    if peer_seconds:
        ratios = [a / b for a, b in zip(seconds, peer_seconds, strict=True)]
        ratio, spread = statistics.median(ratios), quartiles(ratios)
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


def quartiles(values: Sequence[float]) -> list[float]:
    """[lower, upper] quartile; the extremes of fewer than four values."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file where one was asked for."""
    if path is not None:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
