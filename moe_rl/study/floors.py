"""Noise floors of change rates that figures draw by site, by position or as histograms.

All are pooled over the runs that recorded them. Runs of versions that recorded totals only have none: the tables are
empty, and a caption says so with `MISSING`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData

FLOORS = {"own": ("repeat", "batch", "experts"), "bf16": ("bf16",)}
"""Name of a noise floor -> the variants of which it is the largest.

`own` is what a run meets in its own arithmetic, `bf16` what a copy of that precision adds.
"""
MISSING = "Noise floor {}: not recorded. "


def floor_by_site(data: StudyData, sites: Sequence[str]) -> pd.DataFrame:
    """Return the slot change of each site with equal weights, one column per floor (fraction).

    Index: the place of a routing site in `sites`. Runs with other sites are left out.
    """
    rows = _recorded(data, ["site_names", "site_slots_changed", "site_slots"])
    rows = rows[rows["site_names"].map(list).map(list(sites).__eq__).astype(bool)]
    return _rates(rows, "site_slots_changed", "site_slots").rename_axis("site")


def floor_by_position(data: StudyData, width: int = 1, fewest: int = 1) -> pd.DataFrame:
    """Return the site change at each position of the response with equal weights, one column per floor (fraction).

    Index: the position (the middle of a bin of `width`). Bins of fewer than `fewest` tokens are left out.
    """
    rows = _recorded(data, ["site_names", "position_sites_changed", "position_sites"])
    sites = max(map(len, rows["site_names"]), default=0)
    table = _rates(rows, "position_sites_changed", "position_sites", width, fewest * sites)
    table.index = table.index * width + (width - 1) / 2
    return table.rename_axis("position")


def floor_histogram(data: StudyData, name: str) -> pd.DataFrame:
    """Return `flips_histogram` (share of tokens) or `deviation_histogram` (share of sites) with equal weights.

    Index: the number that changed; one column per floor. Of the variants of `own`, the one that changes most is taken.
    """
    rows = _recorded(data, [name])
    rows = rows[rows[name].map(len) == rows[name].map(len).max()] if len(rows) else rows
    found = {}
    for floor, parts in _by_floor(rows):
        sums = (np.sum(part[name].tolist(), axis=0) for part in parts)
        counts = max(sums, key=lambda counts: float(np.average(np.arange(len(counts)), weights=counts)))
        found[floor] = counts / counts.sum()
    return pd.DataFrame(found).rename_axis("value")


def floor_variance(data: StudyData) -> pd.DataFrame:
    """Return the variance of the log-ratio with equal weights, nats², mean over runs: one row per floor.

    Columns `var_token` and `var_sequence`, NaN if they were not recorded.
    """
    columns = ["var_token", "var_sequence"]
    rows = _recorded(data, [name for name in columns if name in data.floors]).reindex(columns=["variant", *columns])
    found = {floor: pd.DataFrame([part[columns].mean() for part in parts]).max() for floor, parts in _by_floor(rows)}
    return pd.DataFrame(found, columns, dtype=float).T


def floor_rates(table: pd.DataFrame, key: str, changed: str, of: str) -> pd.DataFrame:
    """Return the rates of a table that has a row per `variant` and `key`: one column per floor, index `key`.

    NaN without a denominator.
    """
    found = {}
    for floor, variants in FLOORS.items():
        rows = table[table["variant"].isin(variants)]
        if len(rows):
            rates = rows[changed] / rows[of].where(rows[of] > 0)
            found[floor] = rates.groupby(rows[key], sort=False).max()
    return pd.DataFrame(found, dtype=float)


def floor_runs(data: StudyData, floor: str) -> int:
    """Return how many runs measured a floor."""
    return len(data.floors.loc[data.floors["variant"].isin(FLOORS[floor]), ["arm", "seed"]].drop_duplicates())


def _recorded(data: StudyData, columns: list[str]) -> pd.DataFrame:
    """Return the rows of floors in which all these columns were recorded; an empty table if there are none."""
    if data.floors.empty or not {"variant", *columns} <= set(data.floors.columns):
        return pd.DataFrame(columns=["variant", *columns])
    return data.floors.dropna(subset=columns)


def _by_floor(rows: pd.DataFrame) -> Iterator[tuple[str, list[pd.DataFrame]]]:
    """Yield the floors that were measured, each with the rows of its variants."""
    for floor, variants in FLOORS.items():
        parts = [part for variant in variants if len(part := rows[rows["variant"] == variant])]
        if parts:
            yield floor, parts


def _rates(rows: pd.DataFrame, changed: str, total: str, width: int = 1, fewest: int = 1) -> pd.DataFrame:
    """Return rates by floor: lists summed over runs, in bins of `width` entries, changed over total.

    Of the variants of a floor, the largest rate is taken in each bin.
    """
    found = {}
    for floor, parts in _by_floor(rows):
        rates = []
        for part in parts:
            of = _binned(part[total].tolist(), width)
            with np.errstate(invalid="ignore"):
                rates.append(np.where(of >= max(1, fewest), _binned(part[changed].tolist(), width) / of, np.nan))
        found[floor] = pd.concat(map(pd.Series, rates), axis=1).max(axis=1)
    return pd.DataFrame(found, dtype=float).dropna(how="all")


def _binned(lists: list[list[int]], width: int) -> np.ndarray:
    """Return the sum of lists of any length, added entry by entry, then in groups of `width`."""
    length = -(-max(map(len, lists)) // width) * width
    return np.sum([np.pad(np.asarray(x, float), (0, length - len(x))) for x in lists], axis=0).reshape(-1, width).sum(1)
