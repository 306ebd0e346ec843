"""Helpers of figures of routing change: site names, lists of counts, the binomial distribution."""

import numpy as np
import pandas as pd
from matplotlib.axis import Axis

from moe_rl.study.figures.style import NothingToDraw


def binomial_of(counts: np.ndarray) -> np.ndarray:
    """Return the probabilities of Binomial(N, p) with N = len(counts) - 1 trials and the mean of the counted values."""
    from scipy import stats

    trials = len(counts) - 1
    if not trials:
        return np.ones(1)
    mean = float(np.average(np.arange(trials + 1), weights=counts))
    return np.asarray(stats.binom.pmf(np.arange(trials + 1), trials, mean / trials))


def stacked(lists: pd.Series, figure: str) -> np.ndarray:
    """Return a column of lists as an array [rows, entries], null as NaN. Raises NothingToDraw if the lists differ in
    length."""
    lengths = set(map(len, lists))
    if len(lengths) > 1:
        raise NothingToDraw(
            f"{figure}: rows of one arm have a {lists.name} of {' and '.join(map(str, sorted(lengths)))} entries"
        )
    array = np.array(lists.tolist())
    return array.astype(float) if array.dtype == object else array


def site_ticks(axis: Axis, short: list[str]) -> None:
    """Write the names of `short_sites` beside the sites 0, 1, ... of an axis: all of them, or some twelve."""
    step = max(1, len(short) // 12)
    axis.set_ticks(range(0, len(short), step), short[::step])


def short_sites(names: list[str]) -> tuple[list[str], str]:
    """Return site names without what they share, and the shared pattern: layers.0.gate, layers.1.gate -> 0, 1.

    >>> short_sites(["layers.0.gate", "layers.1.gate"])
    (['0', '1'], 'layers.·.gate')
    """
    if len(names) < 2:
        return names, names[0] if names else ""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    front = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    back = next((i for i in range(shortest - front) if len({p[-1 - i] for p in parts}) > 1), 0)
    short = [".".join(p[front : len(p) - back]) for p in parts]
    return short, ".".join([*parts[0][:front], "·", *parts[0][len(parts[0]) - back :]])
