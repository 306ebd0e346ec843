"""What a benchmark found, as rows that `make bench` and `make gpu` put on their pages."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEYS = ("benchmark", "case", "us", "limit_us", "peer", "peer_us", "ratio", "spread", "note")


def row(
    benchmark: str,
    case: str,
    us: float | None = None,
    *,
    limit_us: float | None = None,
    peer: str | None = None,
    peer_us: float | None = None,
    ratios: Sequence[float] = (),
    note: str = "",
) -> dict[str, Any]:
    """One row.

    Args:
        us: microseconds of the case, a median.
        limit_us: what no implementation can go below, by the same clock.
        peer, peer_us: what it is compared with.
        ratios: time / peer's time in each round, both measured in turn; the row holds their median and quartiles
            (the extremes of fewer than four).
    """
    low, high = None, None
    if len(ratios) >= 4:
        low, _, high = statistics.quantiles(ratios, n=4)
    elif ratios:
        low, high = min(ratios), max(ratios)
    ratio = statistics.median(ratios) if ratios else None
    values = (benchmark, case, us, limit_us, peer, peer_us, ratio, None if low is None else [low, high], note)
    return dict(zip(KEYS, values, strict=True))


def write_rows(file: str | Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as JSON; nothing without a file."""
    if file is not None:
        Path(file).write_text(json.dumps(list(rows), indent=1) + "\n")
