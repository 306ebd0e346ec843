"""Statistics: goldens derived by hand, and the properties that few seeds must not break."""

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moe_rl.study import statistics as S
from moe_rl.study.curves import area_under_curve, detect_collapse, final_value
from moe_rl.study.power import fewest_pairs, pairs_needed, resolvable_difference


def test_a_geometric_mean_is_of_what_has_a_logarithm():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = S.geometric_interval([2.0, 8.0, 0.0, -1.0, np.nan])
    assert (found.estimate, found.low, found.high) == pytest.approx((4.0, 2.0, 8.0))
    assert (found.n, found.method) == (2, "range")


def test_few_seeds_have_a_range_and_six_an_interval():
    five = S.seed_interval([0.1, 0.5, 0.3, 0.2, 0.4])
    assert (five.estimate, five.low, five.high, five.method) == (pytest.approx(0.3), 0.1, 0.5, "range")
    values = [0.1, 0.5, 0.3, 0.2, 0.4, np.nan, 0.3]
    six = S.seed_interval(values)
    # mean 0.3, sum of squares .04 + .04 + .01 + .01 = .1, s = √(.1/5); t_{.975, 5} = 2.570582
    half = 2.570582 * np.sqrt(0.02) / np.sqrt(6)
    assert (six.low, six.high, six.n) == (pytest.approx(0.3 - half, abs=1e-6), pytest.approx(0.3 + half, abs=1e-6), 6)
    assert not S.seed_interval([0.3]).known
    assert S.seed_interval([]).n == 0 and np.isnan(S.seed_interval([]).estimate)


@settings(max_examples=25)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(0, 7))
def test_band_is_the_pointwise_interval(columns, missing):
    table = np.array(columns).T
    table[: min(missing, 7), 0] = np.nan
    low, high = S.seed_band(table)
    for i in range(table.shape[1]):
        interval = S.seed_interval(table[:, i])
        assert np.allclose([low[i], high[i]], [interval.low, interval.high], equal_nan=True)


def test_a_band_over_an_infinite_value_is_no_band():
    """The logarithm of a zero, as of a gradient norm without a signal: neither a number nor a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = S.seed_band(np.array([[0.0, 1.0], [1.0, 2.0], [-np.inf, 3.0], [0.5, 4.0], [0.6, 2.0], [0.2, 2.5]]))
    assert np.isnan([low[0], high[0]]).all() and np.isfinite([low[1], high[1]]).all()


def test_student_interval_by_hand():
    # mean 2, s = 1, t_{.975, 2} = 4.3026527; half-width 4.3026527/√3 = 2.4841378
    interval = S.student_interval([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx((2 - 2.4841378, 2 + 2.4841378), abs=1e-6)
    assert not S.student_interval([1.0]).known


def test_notes_say_what_the_interval_is():
    assert S.interval_note(5) == "bars and bands: the range of the 5 seeds, which is no confidence interval"
    assert S.interval_note(6) == "intervals: 95 % Student over 6 seeds"
    assert S.interval_note(0) == "no seed"


def test_interquartile_mean():
    # eight values: two cut at each end, (3+4+5+6)/4
    assert S.interquartile_mean([8, 1, 2, 3, 4, 5, 6, 100]) == 4.5
    assert S.interquartile_mean([1.0, 2.0, 6.0]) == 3.0  # nothing to cut below four


@settings(max_examples=25)
@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=9))
def test_sign_flip_is_scipys_permutation_test(differences):
    d = np.round(differences, 3)
    theirs = stats.permutation_test(
        (d,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=2**9, vectorized=True, axis=-1
    )
    expected = np.mean(np.abs(theirs.null_distribution) >= abs(d.mean()) * (1 - 1e-9) - 1e-12)
    assert S.sign_flip_test(d) == pytest.approx(expected)


def test_sign_flip_by_hand():
    # -.1 .2 .4: |sum| = .5; of the eight sums ±.7 ±.5 ±.3 ±.1 four are at least as large
    assert S.sign_flip_test(np.array([-0.1, 0.2, 0.4])) == 0.5
    assert S.sign_flip_test(np.full(8, 0.3)) == 2 / 2**8
    assert S.sign_flip_test(np.zeros(8)) == 1.0
    assert S.sign_flip_test(np.array([[0.1, 0.2], [0.1, -0.1]])).tolist() == [0.5, 1.0]
    many = np.random.default_rng(0).normal(0.0, 1.0, 30)  # 2^30 patterns are sampled: close to the t test
    assert S.sign_flip_test(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)
    assert S.sign_flip_test(np.full(30, 0.1)) >= 2.0**-15


@pytest.mark.parametrize("rounded", [np.float32, lambda x: np.array([float(f"{v:.6g}") for v in x])])
def test_ties_of_rewards_stay_ties_however_they_are_written(rounded):
    """Of rewards that are sums over 192 responses; p of the same in whole numbers, whose ties are exact."""
    draw = np.random.default_rng(0)
    ones, others = draw.integers(100, 140, (2, 60, 8))
    for one, other in zip(ones, others, strict=True):
        found = np.asarray(rounded(one / 192), float) - np.asarray(rounded(other / 192), float)
        assert S.sign_flip_test(found) == S.sign_flip_test((one - other).astype(float))


@pytest.mark.parametrize("unit", [1e-13, 1e-6, 1.0, 1e9])
def test_sign_flip_does_not_depend_on_the_unit(unit):
    # all but the least are positive: ++++++ and that with the least flipped, of 32, and their negatives
    d = np.array([-0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
    assert S.sign_flip_test(d * unit) == 2 / 32
    assert S.sign_flip_test(np.abs(d) * unit) == 1 / 32


@pytest.mark.parametrize("test", [S.sign_flip_test, S.equivalence_test])
def test_what_is_not_finite_has_no_p(test):
    d = np.full((4, 6), 0.01)
    d[1, 2], d[2] = np.nan, np.inf
    found = test(d)
    assert np.isnan(found).tolist() == [False, True, True, False] and found[0] == test(d[0])
    assert np.isnan(test(d[1]))


def test_equivalence_is_two_one_sided_tests():
    d = np.array([0.03, -0.02, 0.01, 0.04, 0.0, 0.02])
    above = stats.ttest_1samp(d, -0.05, alternative="greater").pvalue
    below = stats.ttest_1samp(d, 0.05, alternative="less").pvalue
    assert S.equivalence_test(d, 0.05) == pytest.approx(max(above, below))
    assert S.equivalence_test(-d, 0.05) == pytest.approx(max(above, below))
    assert S.equivalence_test(np.zeros(6), 0.05) == 0.0  # no scatter at all, and inside
    assert S.equivalence_test(np.full(6, 0.05), 0.05) == 1.0
    assert np.isnan(S.equivalence_test(np.array([0.1])))


def test_holm_by_hand():
    # sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04 -> kept non-decreasing
    assert S.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert S.holm([0.6, 0.9]).tolist() == [1.0, 1.0]  # 2 · 0.6 is more than 1
    assert S.holm([]).size == 0


EQUAL = dict.fromkeys(range(8), 0.8)


def arm(*changes):
    return {seed: 0.8 + change for seed, change in enumerate(changes)}


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.11, 0.12, 0.08, 0.15, 0.10, 0.09, 0.13, 0.14), "higher"),
        ((-0.11, -0.12, -0.08, -0.15, -0.10, -0.09, -0.13, -0.14), "lower"),
        ((0.02, 0.021, 0.022, 0.019, 0.018, 0.02, 0.021, 0.02), "no difference of interest"),  # though it is not 0
        ((0.01, -0.01, 0.02, -0.02, 0.0, 0.01, -0.01, 0.0), "no difference of interest"),
        ((0.08, 0.03, 0.07, 0.02, 0.06, 0.05, 0.04, 0.02), "small difference"),  # mean .046: told from 0, not from .05
        ((0.2, -0.1, 0.1, -0.15, 0.05, 0.12, -0.2, 0.1), "not resolved"),
        ((0.9, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01), "not resolved"),  # all signs agree: no verdict by itself
        ((0.4, 0.4, 0.4, 0.4, 0.4), "too few pairs"),
    ],
)
def test_verdicts(differences, verdict):
    result = S.compare_paired(arm(*differences), EQUAL)
    assert result.verdict == verdict
    assert result.verdict in S.Verdict and set(S.VERDICT_RULES) == set(S.Verdict)


def test_a_difference_of_interest_is_the_studys_own():
    small = arm(0.02, 0.021, 0.022, 0.019, 0.018, 0.02, 0.021, 0.02)
    assert S.compare_paired(small, EQUAL, interest=0.01).verdict == "higher"


@pytest.mark.parametrize("higher", [0.3, 0.55, 0.85, 0.95])
def test_a_difference_that_is_the_one_of_interest_is_of_interest(higher):
    """However the means round: 0.85 - 0.8 is less than 0.05 in floats, 0.55 - 0.5 is more."""
    a, b = ({seed: value + 0.01 * (seed % 2) for seed in range(8)} for value in (higher, higher - 0.05))
    assert (S.compare_paired(a, b).verdict, S.compare_paired(b, a).verdict) == ("higher", "lower")


def test_a_family_pays_for_its_number():
    clear = S.compare_paired(arm(*[0.1, 0.11, 0.12, 0.09, 0.08, 0.1, 0.11, 0.1]), EQUAL)
    few = S.compare_paired(arm(0.1, 0.1, 0.1), EQUAL)
    assert (clear.p, clear.adjusted, clear.verdict) == (2 / 256, 2 / 256, "higher")
    six, seven = S.judge([clear] * 6 + [few]), S.judge([clear] * 7)
    assert {one.verdict for one in six[:6]} == {"higher"}  # 6 · .0078 = .047
    assert (six[6].verdict, six[0].family) == ("too few pairs", 6)  # untested, so it does not count
    assert {one.verdict for one in seven} == {"not resolved"}  # 7 · .0078 = .055
    assert seven[0].adjusted == pytest.approx(7 * 2 / 256)
    assert fewest_pairs(6) == 8 and fewest_pairs(7) == 9
    assert S.judge([]) == []


def test_equivalence_pays_for_the_number_of_its_family_too():
    near = S.compare_paired(arm(0.06, -0.05, 0.04, -0.03, 0.05, -0.04, 0.02, 0.01), EQUAL)
    assert near.verdict == "no difference of interest" and 0.01 < near.p_equivalent < 0.025
    two, four = S.judge([near] * 2), S.judge([near] * 4)
    assert {one.verdict for one in two} == {"no difference of interest"}
    assert {one.verdict for one in four} == {"not resolved"}
    assert four[0].adjusted_equivalent == pytest.approx(4 * near.p_equivalent)


def test_comparison_pairs_by_seed_and_ignores_the_rest():
    result = S.compare_paired({0: 1.0, 1: 2.0, 7: 9.0, 8: np.nan}, {0: 0.5, 1: 1.0, 8: 1.0, 9: 0.0})
    assert result.seeds == (0, 1)
    assert result.differences == (0.5, 1.0)
    assert result.sd == pytest.approx(np.sqrt(0.125))
    assert result.verdict == "too few pairs"
    assert S.compare_paired({}, {0: 1.0}).n == 0


@settings(max_examples=25)
@given(st.lists(st.floats(-1, 1), min_size=3, max_size=9))
def test_comparison_is_antisymmetric(differences):
    a, b = dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)
    forward, back = S.compare_paired(a, b), S.compare_paired(b, a)
    mirrored = {S.Verdict.HIGHER: S.Verdict.LOWER, S.Verdict.LOWER: S.Verdict.HIGHER}
    assert mirrored.get(forward.verdict, forward.verdict) == back.verdict
    assert (forward.p, forward.p_equivalent) == pytest.approx((back.p, back.p_equivalent), nan_ok=True)
    assert forward.difference.estimate == pytest.approx(-back.difference.estimate, abs=1e-12)


def test_area_and_final_value():
    # 0 -> 1 over one step (0.5), then 1 for two steps (2): 2.5 / 3
    assert area_under_curve([0, 1, 3], [0.0, 1.0, 1.0]) == pytest.approx(2.5 / 3)
    assert area_under_curve([4], [0.3]) == 0.3
    assert np.isnan(area_under_curve([], []))
    with pytest.raises(ValueError, match="one length, got 2 and 3"):
        area_under_curve([0, 1], [1, 2, 3])
    assert final_value([9, 9, 0, 0.2, 0.4, 0.6, 0.8]) == pytest.approx(0.4)
    assert final_value([0.25, 0.75]) == 0.5
    assert np.isnan(final_value([]))


def test_a_step_without_a_reward_is_in_no_number_of_a_run():
    nan = float("nan")
    assert final_value([9, nan, 0, 0.2, nan, 0.4, 0.6, 0.8, nan]) == pytest.approx(0.4), "five that have one"
    assert area_under_curve([0, 1, 2, 3], [nan, 0.0, nan, 1.0]) == pytest.approx(0.5), "from the first to the last"
    assert area_under_curve([0, 1], [nan, 0.3]) == 0.3


def test_collapse_is_a_lasting_fall_to_half():
    falling = [0.4, 0.8, 0.8, 0.3, 0.3, 0.3]
    found = detect_collapse(range(6), falling, window=1)
    assert found.collapsed
    assert found.step == 3
    assert found.fall == pytest.approx(1 - 0.3 / 0.8)
    assert not detect_collapse(range(6), [0.4, 0.8, 0.3, 0.3, 0.5, 0.8], window=1).collapsed  # it recovered
    degraded = detect_collapse(range(6), [0.6, 0.6, 0.6, 0.5, 0.45, 0.45], window=1)
    assert not degraded.collapsed
    assert degraded.fall == pytest.approx(0.25)


def test_rounding_decides_no_collapse():
    tail = [0.27, 0.34, 0.49, 0.33, 0.07]  # mean 0.3, half of 0.6, a bit more in floats
    assert detect_collapse(range(11), [0.6] * 6 + tail).step == 10
    assert not detect_collapse(range(11), [0.6] * 6 + [*tail[:4], 0.08]).collapsed


def test_collapse_on_short_and_flat_runs():
    assert not detect_collapse([0, 1], [0.5, 0.1]).collapsed  # no full window of five yet
    assert not detect_collapse(range(10), [0.0] * 10).collapsed  # nothing was ever learned
    assert not detect_collapse(range(10), [0.8] * 10).collapsed


def test_a_step_without_a_reward_hides_no_collapse():
    rewards = [0.8] * 8 + [0.1] * 8
    known = detect_collapse([*range(3), *range(4, 16)], rewards[:3] + rewards[4:])
    assert detect_collapse(range(16), [*rewards[:3], np.nan, *rewards[4:]]) == known and known.collapsed
    assert not detect_collapse(range(8), [np.nan] * 8).collapsed


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=30), st.floats(0.01, 100))
def test_collapse_does_not_depend_on_the_unit_of_reward(rewards, unit):
    steps = range(len(rewards))
    ours, scaled = (
        detect_collapse(steps, rewards, drop=0.4321),
        detect_collapse(steps, (unit * np.array(rewards)).tolist(), drop=0.4321),
    )
    assert ours.collapsed == scaled.collapsed


def test_resolvable_difference_against_tables_and_simulation():
    # Cohen's tables / G*Power, paired t, two-sided 5 %, power 80 %: n = 10 -> d_z = 0.996
    assert resolvable_difference(1.0, 10) == pytest.approx(0.996, abs=2e-3)
    # n = 3 by simulation of 200 000 studies at the returned effect
    delta = resolvable_difference(1.0, 3)
    sample = np.random.default_rng(0).normal(delta, 1, (200_000, 3))
    t = sample.mean(1) / (sample.std(1, ddof=1) / np.sqrt(3))
    assert np.mean(np.abs(t) > 4.30265) == pytest.approx(0.8, abs=0.005)
    assert resolvable_difference(0.02, 3) == pytest.approx(0.02 * delta)


def test_resolvable_difference_at_the_edges():
    assert np.isnan(resolvable_difference(0.1, 1))
    assert resolvable_difference(0.0, 3) == 0.0
    sizes = [resolvable_difference(0.05, n) for n in (2, 3, 5, 10, 30)]
    assert sizes == sorted(sizes, reverse=True)


def test_pairs_needed_is_the_inverse_of_what_n_resolves():
    n = pairs_needed(0.05, 0.05)
    assert resolvable_difference(0.05, n) <= 0.05 < resolvable_difference(0.05, n - 1)
    many = pairs_needed(0.05, 0.05, family=6)
    assert (
        resolvable_difference(0.05, many, alpha=0.05 / 6)
        <= 0.05
        < resolvable_difference(0.05, many - 1, alpha=0.05 / 6)
    )
    assert pairs_needed(0.001, 0.05) == 6  # never fewer than the exact test needs
    assert pairs_needed(0.001, 0.05, family=12) == 9
    assert pairs_needed(5.0, 0.01) is None
    assert pairs_needed(float("nan"), 0.05) is None


def test_values_without_seeds_are_not_compared():
    with pytest.raises(TypeError, match="each arm is a mapping seed -> value"):
        S.compare_paired([0.1, 0.2], [0.3, 0.4])
    with pytest.raises(TypeError, match=r"\.to_dict\(\) of a pandas Series whose index are the seeds"):
        S.compare_paired(pd.Series({3: 0.1}), pd.Series({3: 0.2}))
