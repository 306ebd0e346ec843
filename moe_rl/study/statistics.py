"""Numbers across seeds: intervals, tests of paired differences, and the verdicts that follow from them.

Everything here is a function of small arrays with one value per seed; nothing draws and nothing reads files. Rewards
are fractions in [0,1] wherever the examples name a unit. How often the rules below are right, with runs that fail among
the others, is simulated in `moe_rl.study.simulation`; docs/statistics.md has the table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import exp
from typing import Any

import numpy as np

from moe_rl.study.curves import TIE, Numbers

FEWEST = 6
"""Fewest seeds with Student's interval, and fewest pairs with a verdict: with five the exact test cannot reach 5 %."""

INTEREST = 0.05
"""Smallest difference of interest, in units of reward, where a study names none."""

ALPHA = 0.05
"""Error rate of a family of comparisons."""

_ENUMERATE_UP_TO = 16  # n with 2^15 sign patterns; above, as many random ones


@dataclass(frozen=True)
class Interval:
    """An estimate over n seeds with its interval; `low` and `high` are NaN where n < 2 allows no interval."""

    estimate: float
    low: float
    high: float
    n: int
    method: str

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def columns(self, name: str, ends: str = "") -> dict[str, float]:
        """Return columns of a table: the estimate as `name`, the interval as `low` and `high`, prefixed by `ends`."""
        return {name: self.estimate, f"{ends}low": self.low, f"{ends}high": self.high}

    def exp(self) -> "Interval":
        """Return the interval of the quantity of which this interval is the logarithm."""
        return replace(self, estimate=exp(self.estimate), low=exp(self.low), high=exp(self.high))

    @property
    def bounds(self) -> str:
        """The interval as text: `[0.100, 0.200]`, with `range` where it is a range, – where there is no interval."""
        return f"[{self.low:.3f}, {self.high:.3f}]" + " range" * (self.method == "range") if self.known else "–"

    def text(self, form: str) -> str:
        """Return estimate and interval as text, numbers in this form; the estimate alone if there is no interval."""
        return f"{self.estimate:{form}}" + (f" [{self.low:{form}}, {self.high:{form}}]" if self.known else "")

    def __str__(self) -> str:
        return self.text(".3f") + ("" if self.known else f" (n={self.n}, no interval)")


def _finite(values: Numbers | Mapping[int, float]) -> np.ndarray:
    array = np.asarray(list(values.values()) if isinstance(values, Mapping) else values, dtype=float).ravel()
    return array[np.isfinite(array)]


def seed_interval(values: Numbers | Mapping[int, float]) -> Interval:
    """Return the interval that tables and figures show: Student's from six seeds on, below that the range of the seeds.

    values: one a seed, or a mapping seed -> value, as `compare_paired` takes. Those that are not finite are left out.

    The range is no confidence interval: that of n = 3 holds the centre of a symmetric distribution in 75 % of studies.

    >>> str(seed_interval([0.1, 0.2, 0.6])), seed_interval([0.1, 0.2, 0.6]).method
    ('0.300 [0.100, 0.600]', 'range')
    >>> str(seed_interval({0: 0.1, 1: 0.2, 2: 0.6})), seed_interval([0.4]).known
    ('0.300 [0.100, 0.600]', False)
    """
    array = _finite(values)
    if 2 <= array.size < FEWEST:
        return Interval(float(array.mean()), float(array.min()), float(array.max()), array.size, "range")
    return student_interval(array)


def geometric_interval(values: Numbers) -> Interval:
    """Return the geometric mean with `seed_interval` of the logarithms; values that are not above 0 are left out."""
    array = _finite(values)
    return seed_interval(np.log(array[array > 0])).exp()


def student_interval(values: Numbers) -> Interval:
    """Return Student's 95 % interval, mean ± t_{.975, n-1} s / √n: exact if seeds scatter normally.

    Values that are not finite are left out.

    >>> str(student_interval([1.0, 2.0, 3.0]))       # 2 ± 4.303 * 1 / √3
    '2.000 [-0.484, 4.484]'
    """
    array = _finite(values)
    n = array.size
    if n < 2:
        estimate = float(array.mean()) if n else np.nan
        return Interval(estimate, np.nan, np.nan, n, "none")
    mean, half = float(array.mean()), float(student_factor(n) * array.std(ddof=1))
    return Interval(mean, mean - half, mean + half, n, "Student t")


@lru_cache
def student_factor(n: int) -> float:
    """Return t_{.975, n-1} / √n: the half-width of Student's interval in standard deviations."""
    from scipy import stats  # the import takes a second: only where it is needed

    return float(stats.t.ppf(0.975, n - 1) / np.sqrt(n))


def seed_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of `seed_interval` at every column: values [n, X] -> (low [X], high [X]).

    NaN (a seed that has not come that far) is left out pointwise; NaN where fewer than two seeds remain, and where a
    value is infinite (the logarithm of a zero).
    """
    values = np.asarray(values, dtype=float)
    present = ~np.isnan(values)
    n = np.where(np.isinf(values).any(0), 0, present.sum(0))
    low, high = np.full(n.shape, np.nan), np.full(n.shape, np.nan)
    some = n >= 2
    low[some] = np.where(present, values, np.inf)[:, some].min(0)
    high[some] = np.where(present, values, -np.inf)[:, some].max(0)
    for count in np.unique(n[n >= FEWEST]):
        here = np.flatnonzero(n == count)
        mean = np.nanmean(values[:, here], axis=0)
        half = student_factor(int(count)) * np.nanstd(values[:, here], axis=0, ddof=1)
        low[here], high[here] = mean - half, mean + half
    return low, high


def several_kinds(n: int, others: Iterable[int]) -> bool:
    """Return whether an arm with a number of seeds in `others` has another kind of interval than n seeds have."""
    return any(k >= 2 and (n < 2 or (k < FEWEST) != (n < FEWEST)) for k in others)


def interval_note(n: int, others: Iterable[int] = ()) -> str:
    """Return in words for a caption what the interval over n seeds is; `others`: numbers of seeds of other arms.

    >>> interval_note(1), interval_note(8)
    ('one seed: no interval', 'intervals: 95 % Student over 8 seeds')
    """
    if several_kinds(n, others):
        return (
            f"intervals, where there are several seeds: 95 % Student from {FEWEST} on, below that the range of the "
            "seeds, which is no confidence interval"
        )
    if n < 2:
        return "one seed: no interval" if n else "no seed"
    if n < FEWEST:
        return f"bars and bands: the range of the {n} seeds, which is no confidence interval"
    return f"intervals: 95 % Student over {n} seeds"


def interquartile_mean(values: Numbers) -> float:
    """Return the mean without the lowest and the highest ⌊n/4⌋ values (IQM as in rliable, 2108.13264 §4.3).

    Below four values nothing is cut, and the result is the plain mean. All values must be finite.

    >>> interquartile_mean([0.0, 1.0, 2.0, 99.0])
    1.5
    """
    array = np.sort(np.asarray(values, dtype=float))
    cut = len(array) // 4
    return float(array[cut : len(array) - cut].mean())


@lru_cache
def _sign_patterns(n: int) -> np.ndarray:
    """Return half of the 2^n sign patterns (the others are their negatives) as [M, n]; the first is all plus."""
    if n > _ENUMERATE_UP_TO:
        drawn = np.random.default_rng(0).integers(0, 2, (2 ** (_ENUMERATE_UP_TO - 1), n)) * -2 + 1
        drawn[0] = 1
        return drawn.astype(float)
    bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n)
    return 1.0 - 2.0 * (bits & 1)


def sign_flip_test(differences: np.ndarray) -> Any:
    """Return the two-sided p of the exact sign-flip test of paired differences: [..., n] -> [...].

    Fisher's randomisation test: p = share of the 2^n sign patterns under which |mean| is at least the observed one. The
    test is exact where every difference is as likely as its negative, as when the two arms are equal, with or without
    failing runs; it does not need normality. The least p is 2^(1-n). All patterns are used up to n = 16, above that
    2^15 drawn with a fixed seed, the observed one among them. Sums that differ by less than 3e-4 of the largest
    difference count as equal, because rewards in float32, or written with six digits, break ties. NaN where a
    difference is not finite.

    >>> float(sign_flip_test(np.array([0.1, 0.2, 0.3])))    # +++ and ---, of eight
    0.25
    """
    d = np.asarray(differences, dtype=float)
    n = d.shape[-1]
    if n == 0:
        return np.full(d.shape[:-1], np.nan)[()]
    patterns = _sign_patterns(n)
    known = np.isfinite(d).all(-1)  # else NaN would compare as False, which gives p = 0
    rows, found = np.where(known[..., None], d, 0.0).reshape(-1, n), []
    for part in np.array_split(rows, max(1, rows.shape[0] * len(patterns) // 2**22 + 1)):
        sums, largest = np.abs(part @ patterns.T), np.abs(part).max(-1, keepdims=True)
        found.append((sums >= np.abs(part.sum(-1, keepdims=True)) - 3e-4 * largest).mean(-1))
    return np.where(known, np.concatenate(found).reshape(d.shape[:-1]), np.nan)[()]


def equivalence_test(differences: np.ndarray, interest: float = INTEREST) -> Any:
    """Return p of two one-sided t tests (TOST, Schuirmann 1987) that |mean difference| < interest: [..., n] -> [...].

    It is the larger of the two p of the hypotheses mean <= -interest and mean >= interest, and below alpha exactly when
    the 1 - 2 alpha Student interval lies within ± interest. NaN for n < 2, and where a difference is not finite.

    >>> print(f"{equivalence_test(np.array([0.01, -0.01, 0.02, -0.02, 0.0, 0.0])):.4f}")
    0.0002
    """
    from scipy import stats

    d = np.asarray(differences, dtype=float)
    n = d.shape[-1]
    if n < 2:
        return np.full(d.shape[:-1], np.nan)[()]
    known = np.isfinite(d).all(-1)  # else NaN would compare as False, which gives p = 0
    d = np.where(known[..., None], d, 0.0)
    mean, error = d.mean(-1), d.std(-1, ddof=1) / np.sqrt(n)
    scattered = error > 1e-12 * interest  # rounding gives equal numbers a small standard deviation
    t = (interest - np.abs(mean)) / np.where(scattered, error, 1.0)
    p = np.where(scattered, stats.t.sf(t, n - 1), np.abs(mean) >= interest * (1 - TIE))
    return np.where(known, p, np.nan)[()]


def holm(probabilities: Numbers) -> np.ndarray:
    """Return Holm's (1979) adjusted p of a family: p below alpha have a family-wise error rate of at most alpha.

    With the p sorted upwards, the i-th of m is multiplied by m - i + 1 (i = 1..m), kept non-decreasing and at most 1.

    >>> holm([0.03, 0.01, 0.04]).round(3).tolist()      # .01 * 3; .03 * 2; max(.06, .04 * 1)
    [0.06, 0.03, 0.06]
    """
    p = np.asarray(probabilities, dtype=float)
    m = p.shape[-1]
    order = np.argsort(p, axis=-1)
    stepped = np.take_along_axis(p, order, -1) * (m - np.arange(m))
    adjusted = np.minimum(np.maximum.accumulate(stepped, axis=-1), 1.0)
    out = np.empty_like(adjusted)
    np.put_along_axis(out, order, adjusted, -1)
    return out


class Verdict(StrEnum):
    """The possible verdicts on a comparison; `judge` gives them."""

    HIGHER = "higher"
    LOWER = "lower"
    SMALL = "small difference"
    EQUIVALENT = "no difference of interest"
    NOT_RESOLVED = "not resolved"
    TOO_FEW = "too few pairs"


VERDICT_RULES = {
    Verdict.HIGHER: "the adjusted p of the sign-flip test is at most {alpha}, Student's interval excludes 0, and the "
    "mean difference is at least {interest}",
    Verdict.LOWER: "the same, in the other direction",
    Verdict.EQUIVALENT: "the adjusted p of the equivalence test (two one-sided t tests within ±{interest}) is at most "
    "{alpha}, whether or not 0 is excluded",
    Verdict.SMALL: "the difference is resolved from 0 as above, but its mean is less than {interest} and it was not "
    "shown to lie within ±{interest}: no news",
    Verdict.NOT_RESOLVED: "none of these: the runs do not tell; it does not mean that the arms are equal",
    Verdict.TOO_FEW: "fewer than {fewest} pairs: a range and no verdict, for the exact test cannot reach {alpha}",
}
"""Verdict -> the rule by which `judge` gives it; to be formatted with alpha, interest and fewest."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two arms a and b on the same seeds; differences are a minus b.

    `p` is that of the sign-flip test, `p_equivalent` that of equivalence within ±`interest`; `adjusted` and
    `adjusted_equivalent` are both p adjusted by Holm over a family of `family` tests (below six pairs, where
    nothing is tested, NaN). `difference` is Student's interval, below six pairs the range.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    difference: Interval
    p: float
    p_equivalent: float
    adjusted: float
    adjusted_equivalent: float
    family: int
    interest: float
    verdict: Verdict

    @property
    def n(self) -> int:
        return len(self.seeds)

    @property
    def tested(self) -> bool:
        return self.verdict != Verdict.TOO_FEW

    @property
    def apart(self) -> bool:
        """Whether the verdict is that one of the two arms is higher."""
        return self.verdict in (Verdict.HIGHER, Verdict.LOWER)

    @property
    def claims(self) -> bool:
        """Whether the verdict is that one arm is higher, or that there is no difference of interest."""
        return self.apart or self.verdict == Verdict.EQUIVALENT

    @property
    def sd(self) -> float:
        """Standard deviation of the paired differences."""
        return float(np.std(self.differences, ddof=1)) if self.n > 1 else float("nan")


def judge(family: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of one family with adjusted p and verdicts, by `VERDICT_RULES`.

    Comparisons of fewer than six pairs are not tested and do not count in the family.
    """
    judged = [replace(one, verdict=Verdict.TOO_FEW) for one in family]
    tested = {i: one for i, one in enumerate(family) if one.n >= FEWEST}
    if not tested:
        return judged
    ends = [(one.difference.estimate, one.difference.low, one.difference.high, one.interest) for one in tested.values()]
    mean, low, high, interest = np.array(ends).T
    adjusted = holm([one.p for one in tested.values()])
    equivalent = holm([one.p_equivalent for one in tested.values()])
    found = verdicts(mean, low, high, adjusted, equivalent, interest)
    for (i, one), p, equal, verdict in zip(tested.items(), adjusted.tolist(), equivalent.tolist(), found, strict=True):
        judged[i] = replace(one, adjusted=p, adjusted_equivalent=equal, family=len(tested), verdict=Verdict(verdict))
    return judged


def verdicts(
    mean: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    adjusted: np.ndarray,
    equivalent: np.ndarray,
    interest: float | np.ndarray,
) -> np.ndarray:
    """Return the verdicts, as words, that the rule of `judge` gives to arrays of comparisons."""
    different = (adjusted <= ALPHA) & ((low > 0) | (high < 0))
    side = np.where(mean > 0, Verdict.HIGHER, Verdict.LOWER)
    large = np.abs(mean) >= interest * (1 - TIE)
    rules = [equivalent <= ALPHA, different & large, different]
    return np.select(rules, [Verdict.EQUIVALENT, side, Verdict.SMALL], Verdict.NOT_RESOLVED)


def compare_paired(a: Mapping[int, float], b: Mapping[int, float], interest: float = INTEREST) -> Comparison:
    """Compare two arms seed by seed, as a family of one comparison (`judge` takes more).

    `a` and `b` map a seed to its value; seeds of only one arm, or with a value that is not finite, are left out. Raises
    TypeError if one is not a mapping.

    >>> a = dict(enumerate([.87, .88, .93, .91, .84, .86, .90, .92]))
    >>> b = dict(enumerate([.75, .71, .83, .70, .74, .78, .77, .81]))
    >>> found = compare_paired(a, b)
    >>> str(found.difference), found.p, str(found.verdict)
    ('0.128 [0.092, 0.163]', 0.0078125, 'higher')
    """
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        raise TypeError(
            "compare_paired: each arm is a mapping seed -> value, so that seeds are paired: dict(zip(seeds, values)), "
            "or .to_dict() of a pandas Series whose index are the seeds"
        )
    seeds = tuple(sorted(s for s in a.keys() & b.keys() if np.isfinite(a[s]) and np.isfinite(b[s])))
    d = np.array([a[s] - b[s] for s in seeds])
    p, equal = float(sign_flip_test(d)), float(equivalence_test(d, interest))
    found = Comparison(
        seeds, tuple(map(float, d)), seed_interval(d), p, equal, np.nan, np.nan, 1, interest, Verdict.TOO_FEW
    )
    return judge([found])[0]
