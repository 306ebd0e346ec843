"""Numbers across seeds: intervals, paired comparisons, curves in one number, and what n seeds can resolve.

Everything here is a function of small arrays (one value per seed, or one value per step); nothing draws and
nothing reads files. Rewards are fractions in [0,1] wherever the examples name a unit, but nothing assumes it.

With few seeds an interval promises less than its name. The percentile bootstrap of n = 3 values can only
return their range, which holds the true centre of a symmetric distribution in 1 - 2^(1-n) = 75 % of studies,
not 95 %; `small_sample_note` says so and captions print it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import factorial, prod
from typing import Any

import numpy as np

Numbers = Sequence[float | int] | np.ndarray

FINAL_STEPS = 5
"""Final reward is the mean over this many last steps."""

_ENUMERATE_UP_TO = 6  # 6^6 = 46656 resamples: the whole bootstrap distribution, no random numbers


@lru_cache
def _all_resamples(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n^n resamples of n values as multisets: indices [M, n], and how many of the n^n each one is.

    >>> _all_resamples(2)[0].tolist(), _all_resamples(2)[1].tolist()
    ([[0, 0], [0, 1], [1, 1]], [1, 2, 1])
    """
    draws = np.array(list(itertools.combinations_with_replacement(range(n), n)))
    repeats = (draws[:, :, None] == np.arange(n)).sum(1)
    return draws, np.array([factorial(n) // prod(map(factorial, row)) for row in repeats.tolist()])


@dataclass(frozen=True)
class Interval:
    """An estimate over n seeds with its interval; `low` and `high` are NaN where n < 2 allows none."""

    estimate: float
    low: float
    high: float
    n: int
    confidence: float
    method: str

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def __str__(self) -> str:
        if not self.known:
            return f"{self.estimate:.3f} (n={self.n}, no interval)"
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _finite(values: Numbers) -> np.ndarray:
    array = np.asarray(values, dtype=float).ravel()
    return array[np.isfinite(array)]


def bootstrap_interval(
    values: Numbers,
    statistic: Callable[..., Any] = np.mean,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of a statistic over seeds (Efron 1979); values that are not finite are left out.

    Up to six values all n^n resamples are enumerated and the percentile interval (inverse of the empirical
    distribution) is exact. From seven on, bias-corrected and accelerated (BCa, Efron 1987) with
    `scipy.stats.bootstrap` and a fixed generator, so that the same numbers give the same interval.
    `statistic` must accept `axis`.

    >>> str(bootstrap_interval([0.1, 0.2, 0.6]))     # n = 3: the range of the seeds, see the module's note
    '0.300 [0.100, 0.600]'
    >>> bootstrap_interval([0.4]).known
    False
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence!r}")
    array = _finite(values)
    n = array.size
    if n == 0:
        return Interval(np.nan, np.nan, np.nan, 0, confidence, "none")
    estimate = float(statistic(array, axis=0))
    if n < 2:
        return Interval(estimate, np.nan, np.nan, n, confidence, "none")
    if np.ptp(array) == 0.0:  # BCa is undefined here, and the answer needs no resampling
        return Interval(estimate, estimate, estimate, n, confidence, "degenerate")
    tail = (1.0 - confidence) / 2
    if n <= _ENUMERATE_UP_TO:
        draws, often = _all_resamples(n)
        means = statistic(array[draws], axis=1)
        low, high = np.quantile(means, [tail, 1.0 - tail], method="inverted_cdf", weights=often)
        return Interval(estimate, float(low), float(high), n, confidence, "percentile, all resamples")
    from scipy import stats  # a second of import: only where it is needed

    result = stats.bootstrap(
        (array,),
        statistic,
        confidence_level=confidence,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(estimate, float(result.low), float(result.high), n, confidence, "BCa")


def bootstrap_band(values: np.ndarray, confidence: float = 0.95, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pointwise percentile interval of the mean over seeds: values [n, X] -> (low [X], high [X]).

    All n^n resamples up to n = 6, else 2000 with a fixed generator, the same rows at every X. NaN (a seed that
    has not come that far) is left out pointwise; NaN where fewer than two seeds remain.
    """
    width = values.shape[1]
    low, high = np.full(width, np.nan), np.full(width, np.nan)
    tail = (1.0 - confidence) / 2
    present = np.isfinite(values)
    for pattern in np.unique(present, axis=1).T:
        rows = np.flatnonzero(pattern)
        if rows.size < 2:
            continue
        columns = np.flatnonzero((present == pattern[:, None]).all(axis=0))
        if rows.size <= _ENUMERATE_UP_TO:
            draws, often = _all_resamples(rows.size)
        else:
            draws = np.random.default_rng(seed).choice(rows.size, (2000, rows.size))
            often = np.ones(len(draws))
        # counts [resamples, n] @ values [n, X]: the means of all resamples at once
        share = (draws[:, :, None] == np.arange(rows.size)).sum(1) / rows.size
        means = share @ values[np.ix_(rows, columns)]
        ends = [tail, 1 - tail]
        low[columns], high[columns] = np.quantile(means, ends, axis=0, method="inverted_cdf", weights=often)
    return low, high


def student_interval(values: Numbers, confidence: float = 0.95) -> Interval:
    """Mean ± t_{n-1} s / √n: exact if seeds scatter normally, and far wider than the bootstrap at n = 3.

    >>> str(student_interval([1.0, 2.0, 3.0]))       # 2 ± 4.303 * 1 / √3
    '2.000 [-0.484, 4.484]'
    """
    array = _finite(values)
    n = array.size
    if n < 2:
        estimate = float(array.mean()) if n else np.nan
        return Interval(estimate, np.nan, np.nan, n, confidence, "none")
    from scipy import stats

    half = stats.t.ppf((1 + confidence) / 2, n - 1) * array.std(ddof=1) / np.sqrt(n)
    mean = float(array.mean())
    return Interval(mean, mean - float(half), mean + float(half), n, confidence, "Student t")


def small_sample_note(n: int) -> str:
    """What a 95 % bootstrap interval over n seeds really is, in words for a caption.

    >>> small_sample_note(1)
    'one seed: no interval'
    """
    if n < 1:
        return "no seed"
    if n == 1:
        return "one seed: no interval"
    if n <= 3:  # 1/n^n > 2.5 %: the percentile interval cannot leave the extreme resamples out
        share = 100 * (1 - 2.0 ** (1 - n))
        return f"at n = {n} the range of the seeds, which holds the true mean in about {share:.0f} % of studies"
    return f"n = {n} seeds are few: the interval tends to be too narrow" if n < 10 else ""


def interquartile_mean(values: Numbers, axis: int = -1) -> Any:
    """Mean without the lowest and the highest ⌊n/4⌋ values (IQM as in rliable, 2108.13264 §4.3).

    Below four values nothing is cut, and the result is the plain mean.

    >>> float(interquartile_mean([0.0, 1.0, 2.0, 99.0]))
    1.5
    """
    array = np.sort(np.asarray(values, dtype=float), axis=axis)
    n = array.shape[axis]
    cut = n // 4
    return np.take(array, np.arange(cut, n - cut), axis=axis).mean(axis=axis)


def probability_of_improvement(a: Numbers, b: Numbers) -> float:
    """P(a > b) + P(a = b)/2 over all pairs, the Mann-Whitney statistic (rliable, 2108.13264 §4.3).

    >>> probability_of_improvement([1, 2, 3], [1, 1, 1])    # 2 wins and 1 tie of 3, each counted 3 times
    0.8333333333333334
    """
    left, right = _finite(a)[:, None], _finite(b)[None, :]
    if not left.size or not right.size:
        return float("nan")
    return float(np.mean((left > right) + 0.5 * (left == right)))


@dataclass(frozen=True)
class Comparison:
    """Two arms on the same seeds: `difference` is a minus b; see `compare_paired` for the verdict's rule."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    difference: Interval
    student: Interval
    probability_of_improvement: float
    sign_probability: float
    verdict: str

    @property
    def n(self) -> int:
        return len(self.seeds)


def compare_paired(a: dict[int, float], b: dict[int, float], confidence: float = 0.95) -> Comparison:
    """Compare two arms seed by seed; `a` and `b` map a seed to its value, seeds of only one arm are left out.

    The verdict follows one rule, fixed before any run is read:

    - "separated": n >= 3, every seed has the same sign, and both the paired bootstrap interval and the paired
      Student interval exclude 0;
    - "same sign in every seed": as above, but the Student interval includes 0. Weak: without any effect all n
      signs agree with probability `sign_probability` = 2^(1-n), 25 % at n = 3;
    - "no separation": otherwise; "too few seeds": n < 3.

    >>> compare_paired({0: .83, 1: .82, 2: .85}, {0: .47, 1: .48, 2: .40}).verdict
    'separated'
    """
    seeds = tuple(sorted(s for s in a.keys() & b.keys() if np.isfinite(a[s]) and np.isfinite(b[s])))
    difference = np.array([a[s] - b[s] for s in seeds])
    n = len(seeds)
    interval = bootstrap_interval(difference, confidence=confidence)
    student = student_interval(difference, confidence=confidence)
    agree = n > 0 and (bool((difference > 0).all()) or bool((difference < 0).all()))
    excludes = interval.known and (interval.low > 0 or interval.high < 0)
    if n < 3:
        verdict = "too few seeds"
    elif not (agree and excludes):
        verdict = "no separation"
    elif student.low > 0 or student.high < 0:
        verdict = "separated"
    else:
        verdict = "same sign in every seed"
    improvement = probability_of_improvement([a[s] for s in seeds], [b[s] for s in seeds])
    signs = 2.0 ** (1 - n) if n else float("nan")
    return Comparison(seeds, tuple(float(d) for d in difference), interval, student, improvement, signs, verdict)


def final_value(values: Numbers, last: int = FINAL_STEPS) -> float:
    """Mean of the last five steps (fewer if the run is shorter): less noisy than the last step alone.

    >>> final_value([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    1.0
    """
    array = _finite(values)
    return float(array[-last:].mean()) if array.size else float("nan")


def area_under_curve(steps: Numbers, values: Numbers) -> float:
    """Trapezoid area divided by the span of the steps: the mean reward while training, in units of reward.

    >>> area_under_curve([0, 1, 3], [0.0, 1.0, 1.0])     # (0.5 * 1 + 1.0 * 2) / 3
    0.8333333333333334
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if x.shape != y.shape:
        raise ValueError(f"steps and values must have one length, got {x.size} and {y.size}")
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if x.size < 2:
        return float(y[0]) if y.size else float("nan")
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def trailing_mean(values: Numbers, window: int = FINAL_STEPS) -> np.ndarray:
    """Mean over the last `window` entries at every position (fewer at the start).

    >>> trailing_mean([1.0, 3.0, 5.0], window=2).tolist()
    [1.0, 2.0, 4.0]
    """
    array = np.asarray(values, dtype=float)
    # no running sum: its rounding would make a mean of equal numbers differ from that number
    return np.array([array[max(0, i - window + 1) : i + 1].mean() for i in range(array.size)])


def time_to_threshold(
    steps: Numbers,
    values: Numbers,
    threshold: float,
    window: int = FINAL_STEPS,
) -> float:
    """First step at which the trailing mean of `window` full steps reaches the threshold; NaN if none.

    >>> time_to_threshold([0, 1, 2, 3], [0.0, 0.9, 0.1, 0.9], 0.5, window=2)
    2.0
    """
    mean = trailing_mean(values, window)
    reached = np.flatnonzero((mean >= threshold) & (np.arange(mean.size) >= window - 1))
    return float(np.asarray(steps, dtype=float)[reached[0]]) if reached.size else float("nan")


@dataclass(frozen=True)
class Collapse:
    """`step` is where the run fell for good (NaN: it did not); `fall` = 1 - last/best trailing mean."""

    step: float
    best: float
    fall: float

    @property
    def collapsed(self) -> bool:
        return bool(np.isfinite(self.step))


COLLAPSE_RULE = (
    f"a run counts as collapsed when the mean reward of its last {FINAL_STEPS} steps has fallen to half or "
    f"less of the best {FINAL_STEPS}-step mean it had reached before, and stays there to its end"
)


def detect_collapse(
    steps: Numbers,
    rewards: Numbers,
    window: int = FINAL_STEPS,
    drop: float = 0.5,
) -> Collapse:
    """Apply `COLLAPSE_RULE`: the first step from which trailing mean <= (1 - drop) * best so far, to the end.

    >>> detect_collapse(range(6), [0.8, 0.8, 0.8, 0.2, 0.2, 0.2], window=1)
    Collapse(step=3.0, best=0.8, fall=0.75)
    """
    mean = trailing_mean(rewards, window)
    full = np.arange(mean.size) >= window - 1
    if not full.any():
        return Collapse(float("nan"), float("nan"), float("nan"))
    x, mean = np.asarray(list(steps), dtype=float)[full], mean[full]
    best = np.maximum.accumulate(mean)
    down = (mean <= (1 - drop) * best) & (best > 0)
    below_to_end = np.logical_and.accumulate(down[::-1])[::-1]
    first = np.flatnonzero(below_to_end)
    fall = float(1 - mean[-1] / best[-1]) if best[-1] > 0 else 0.0
    return Collapse(float(x[first[0]]) if first.size else float("nan"), float(best[-1]), fall)


def resolvable_difference(sd: float, n: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest true mean difference that a two-sided paired t-test of n seeds finds with this power.

    `sd` is the standard deviation of the paired differences (for unpaired arms of equal seed sd s, √2 s).
    Solves  P(|T'| > t_{1-α/2, n-1}) = power  for T' noncentral t with noncentrality δ√n/sd. NaN if n < 2.

    >>> round(resolvable_difference(0.03, 3), 3)
    0.098
    """
    if n < 2 or not np.isfinite(sd):
        return float("nan")
    if sd == 0.0:
        return 0.0
    from scipy import optimize, stats

    critical = stats.t.ppf(1 - alpha / 2, n - 1)
    # T' = (Z + nc) / √(V/(n-1)): integrate over V at the midpoints of 4000 equal shares of its distribution
    # (scipy's noncentral t returns NaN in the tails that n = 3 needs)
    spread = np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, n - 1) / (n - 1))

    def missing(standardised: float) -> float:
        nc = standardised * np.sqrt(n)
        found = stats.norm.sf(critical * spread - nc) + stats.norm.cdf(-critical * spread - nc)
        return float(found.mean() - power)

    return float(sd * optimize.brentq(missing, 0.0, 1000.0))
