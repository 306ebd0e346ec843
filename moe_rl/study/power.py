"""Statistical power: the smallest difference that n seeds can resolve, and the seeds that a difference needs."""

from bisect import bisect_left
from functools import lru_cache

import numpy as np

from moe_rl.study.statistics import ALPHA, FEWEST

POWER = 0.8
MOST = 1000
"""Most pairs that `pairs_needed` considers."""


@lru_cache(maxsize=4096)
def _standardised(n: int, alpha: float) -> float:
    """Return the mean over standard deviation that a two-sided paired t-test of n differences finds with `POWER`."""
    from scipy import optimize, stats

    critical = stats.t.ppf(1 - alpha / 2, n - 1)
    # T' = (Z + nc) / √(V/(n-1)): integrate over V at the midpoints of 4000 equal shares of its distribution
    # (scipy's noncentral t returns NaN in the tails that n = 3 needs)
    spread = np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, n - 1) / (n - 1))

    def missing(standardised: float) -> float:
        nc = standardised * np.sqrt(n)
        found = stats.norm.sf(critical * spread - nc) + stats.norm.cdf(-critical * spread - nc)
        return float(found.mean() - POWER)

    return float(optimize.brentq(missing, 0.0, 1e5))


def resolvable_difference(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Return the smallest true mean difference that a two-sided paired t-test of n seeds finds with 80 % power.

    `sd` is the standard deviation of the paired differences (for unpaired arms of equal seed sd s, √2 s).
    Solves  P(|T'| > t_{1-α/2, n-1}) = 0.8  for T' noncentral t with noncentrality δ√n/sd. NaN if n < 2.

    >>> round(resolvable_difference(0.03, 8), 3)
    0.035
    """
    if n < 2 or not np.isfinite(sd):
        return float("nan")
    return sd * _standardised(n, alpha) if sd else 0.0


def fewest_pairs(family: int = 1) -> int:
    """Return the fewest pairs with which the exact sign-flip test can pass Holm over `family` comparisons.

    The least p of the test is 2^(1-n), so this is the smallest n with family · 2^(1-n) <= ALPHA, and never below six.

    >>> [fewest_pairs(m) for m in (1, 3, 6, 7, 12)]
    [6, 7, 8, 9, 9]
    """
    n = FEWEST
    while family * 2.0 ** (1 - n) > ALPHA:
        n += 1
    return n


def pairs_needed(sd: float, difference: float, family: int = 1) -> int | None:
    """Return the fewest pairs that find a true difference with 80 % power as the first of `family` by Holm.

    The test is paired t at ALPHA / family, with not fewer than `fewest_pairs`. None if `MOST` pairs are not
    enough, if `sd` is not finite, or if `difference` is not above 0.

    >>> pairs_needed(0.03, 0.05), pairs_needed(0.08, 0.05), pairs_needed(0.03, 0.05, family=6)
    (6, 23, 8)
    """
    if not (np.isfinite(sd) and difference > 0):
        return None
    counts = range(fewest_pairs(family), MOST + 1)
    place = bisect_left(counts, True, key=lambda n: resolvable_difference(sd, n, ALPHA / family) <= difference)
    return counts[place] if place < len(counts) else None
