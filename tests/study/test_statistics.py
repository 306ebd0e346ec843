"""Statistics: goldens derived by hand, and the properties that few seeds must not break."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.study import statistics as S

VALUES = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=6)


def test_bootstrap_of_three_seeds_is_their_range():
    # 27 resamples; the lowest mean (all three the minimum) has probability 1/27 = 3.7 % > 2.5 %
    interval = S.bootstrap_interval([0.40, 0.466, 0.475])
    assert interval.low == pytest.approx(0.40, abs=1e-12)
    assert interval.high == pytest.approx(0.475, abs=1e-12)
    assert interval.estimate == pytest.approx(0.447, abs=1e-12)
    assert interval.n == 3


def test_bootstrap_of_four_seeds_leaves_the_extreme_resample_out():
    # values 0,0,0,1: the mean of a resample is k/4 with k ~ Binomial(4, 1/4):
    # P(0) = .316, P(1) = .422, P(2) = .211, P(3) = .047, P(4) = .0039
    # up to 2/4: .316 + .422 + .211 = .949 < .975, so the 97.5 % quantile is 3/4
    interval = S.bootstrap_interval([0.0, 0.0, 0.0, 1.0])
    assert (interval.low, interval.high) == (0.0, 0.75)


def test_bootstrap_without_enough_seeds_or_spread():
    assert not S.bootstrap_interval([0.3]).known
    assert S.bootstrap_interval([]).n == 0
    assert np.isnan(S.bootstrap_interval([]).estimate)
    same = S.bootstrap_interval([0.5] * 9)
    assert (same.low, same.high) == (0.5, 0.5)
    assert S.bootstrap_interval([0.1, np.nan, 0.3]).n == 2


def test_bootstrap_of_many_seeds_is_scipys_bca_and_repeats():
    from scipy import stats

    values = np.random.default_rng(1).exponential(size=12)
    ours = S.bootstrap_interval(values)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    assert (ours.low, ours.high) == (theirs.low, theirs.high)
    assert S.bootstrap_interval(values) == ours


def test_bootstrap_refuses_a_confidence_that_is_none():
    with pytest.raises(ValueError, match=r"confidence must lie strictly between 0 and 1, got 95\.0"):
        S.bootstrap_interval([1.0, 2.0], confidence=95.0)


@settings(max_examples=25)
@given(VALUES, st.floats(0.1, 10), st.floats(-5, 5))
def test_bootstrap_moves_and_scales_with_the_values(values, scale, shift):
    one, other = S.bootstrap_interval(values), S.bootstrap_interval(scale * np.array(values) + shift)
    assert other.low == pytest.approx(scale * one.low + shift, abs=1e-9)
    assert other.high == pytest.approx(scale * one.high + shift, abs=1e-9)
    assert min(values) - 1e-12 <= one.low <= one.estimate + 1e-12 <= one.high + 2e-12 <= max(values) + 3e-12


@settings(max_examples=25)
@given(st.lists(VALUES.filter(lambda v: len(v) == 3), min_size=1, max_size=4))
def test_band_is_the_pointwise_interval(columns):
    table = np.array(columns).T
    low, high = S.bootstrap_band(table)
    for i, column in enumerate(columns):
        interval = S.bootstrap_interval(column)
        assert low[i] == pytest.approx(interval.low, abs=1e-9)
        assert high[i] == pytest.approx(interval.high, abs=1e-9)


def test_band_where_a_seed_stopped_early():
    low, high = S.bootstrap_band(np.array([[1.0, 1.0, 1.0], [2.0, 2.0, np.nan], [4.0, np.nan, np.nan]]))
    assert low.tolist()[:2] == [1.0, 1.0]
    assert high.tolist()[:2] == [4.0, 2.0]
    assert np.isnan([low[2], high[2]]).all()


def test_band_of_many_seeds_narrows():
    rng = np.random.default_rng(0)
    low, high = S.bootstrap_band(rng.normal(size=(40, 1)))
    # mean of 40 standard normals: half-width about 1.96/√40 = 0.31
    assert 0.4 < (high - low)[0] < 0.8


def test_student_interval_by_hand():
    # mean 2, s = 1, t_{.975, 2} = 4.3026527; half-width 4.3026527/√3 = 2.4841378
    interval = S.student_interval([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx((2 - 2.4841378, 2 + 2.4841378), abs=1e-6)
    assert not S.student_interval([1.0]).known


def test_notes_say_what_few_seeds_are_worth():
    assert "75 %" in S.small_sample_note(3)  # 1 - 2^-2
    assert "50 %" in S.small_sample_note(2)  # 1 - 2^-1
    assert "too narrow" in S.small_sample_note(5)
    assert S.small_sample_note(20) == ""


def test_interquartile_mean():
    # eight values: two cut at each end, (3+4+5+6)/4
    assert S.interquartile_mean([8, 1, 2, 3, 4, 5, 6, 100]) == 4.5
    assert S.interquartile_mean([1.0, 2.0, 6.0]) == 3.0  # nothing to cut below four
    assert S.interquartile_mean(np.array([[0.0, 1, 2, 9], [1, 1, 1, 1]]), axis=1).tolist() == [1.5, 1.0]


@settings(max_examples=25)
@given(VALUES, VALUES)
def test_probability_of_improvement_is_antisymmetric(a, b):
    forward, back = S.probability_of_improvement(a, b), S.probability_of_improvement(b, a)
    assert forward + back == pytest.approx(1.0)
    assert forward == np.mean([(x > y) + 0.5 * (x == y) for x, y in itertools.product(a, b)])


def test_comparison_verdicts():
    noise = {0: 0.466, 1: 0.475, 2: 0.398}
    clear = S.compare_paired({0: 0.829, 1: 0.816, 2: 0.852}, noise)
    # differences .363 .341 .454: mean .386, s = .0599, Student half-width 4.303 * .0599/√3 = .149 < .386
    assert clear.verdict == "separated"
    assert clear.difference.estimate == pytest.approx(0.386)
    assert clear.difference.low == pytest.approx(0.341)
    assert clear.sign_probability == 0.25
    assert clear.probability_of_improvement == 1.0
    # .165 .101 .112 -> mean .126, s .034, half-width .085: separated; one seed nearer to zero is not enough any more
    weak = S.compare_paired({0: 0.5, 1: 0.5, 2: 0.5}, {0: 0.2, 1: 0.45, 2: 0.49})
    assert weak.verdict == "same sign in every seed"  # differences .3 .05 .01: Student 0.12 ± 0.39
    mixed = S.compare_paired({0: 0.5, 1: 0.5, 2: 0.5}, {0: 0.4, 1: 0.4, 2: 0.6})
    assert mixed.verdict == "no separation"


def test_comparison_pairs_by_seed_and_ignores_the_rest():
    result = S.compare_paired({0: 1.0, 1: 2.0, 7: 9.0, 8: np.nan}, {0: 0.5, 1: 1.0, 8: 1.0, 9: 0.0})
    assert result.seeds == (0, 1)
    assert result.differences == (0.5, 1.0)
    assert result.verdict == "too few seeds"
    assert S.compare_paired({}, {0: 1.0}).n == 0


@settings(max_examples=25)
@given(st.lists(st.floats(-1, 1), min_size=3, max_size=5))
def test_comparison_is_antisymmetric(differences):
    a, b = dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0)
    forward, back = S.compare_paired(a, b), S.compare_paired(b, a)
    assert forward.verdict == back.verdict
    assert forward.difference.estimate == pytest.approx(-back.difference.estimate, abs=1e-12)


def test_area_and_final_value():
    # 0 -> 1 over one step (0.5), then 1 for two steps (2): 2.5 / 3
    assert S.area_under_curve([0, 1, 3], [0.0, 1.0, 1.0]) == pytest.approx(2.5 / 3)
    assert S.area_under_curve([4], [0.3]) == 0.3
    assert np.isnan(S.area_under_curve([], []))
    with pytest.raises(ValueError, match="one length, got 2 and 3"):
        S.area_under_curve([0, 1], [1, 2, 3])
    assert S.final_value([9, 9, 0, 0.2, 0.4, 0.6, 0.8]) == pytest.approx(0.4)
    assert S.final_value([0.25, 0.75]) == 0.5
    assert np.isnan(S.final_value([]))


def test_time_to_threshold_waits_for_a_full_window():
    steps, reward = range(6), [0.9, 0.0, 0.6, 0.6, 0.6, 0.6]
    # windows of two: (.9+0)/2, .3, .6, ... -> step 3; step 0 alone is not a window
    assert S.time_to_threshold(list(steps), reward, 0.6, window=2) == 3
    assert np.isnan(S.time_to_threshold(list(steps), reward, 0.95, window=2))


def test_collapse_is_a_lasting_fall_to_half():
    falling = [0.4, 0.8, 0.8, 0.3, 0.3, 0.3]
    found = S.detect_collapse(range(6), falling, window=1)
    assert found.collapsed
    assert found.step == 3
    assert found.fall == pytest.approx(1 - 0.3 / 0.8)
    assert not S.detect_collapse(range(6), [0.4, 0.8, 0.3, 0.3, 0.5, 0.8], window=1).collapsed  # it recovered
    degraded = S.detect_collapse(range(6), [0.6, 0.6, 0.6, 0.5, 0.45, 0.45], window=1)
    assert not degraded.collapsed
    assert degraded.fall == pytest.approx(0.25)


def test_collapse_on_short_and_flat_runs():
    assert not S.detect_collapse([0, 1], [0.5, 0.1]).collapsed  # no full window of five yet
    assert not S.detect_collapse(range(10), [0.0] * 10).collapsed  # nothing was ever learned
    assert not S.detect_collapse(range(10), [0.8] * 10).collapsed


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=30), st.floats(0.01, 100))
def test_collapse_does_not_depend_on_the_unit_of_reward(rewards, unit):
    steps = range(len(rewards))
    ours, scaled = (
        S.detect_collapse(steps, rewards, drop=0.4321),
        S.detect_collapse(steps, (unit * np.array(rewards)).tolist(), drop=0.4321),
    )
    assert ours.collapsed == scaled.collapsed


def test_resolvable_difference_against_tables_and_simulation():
    # Cohen's tables / G*Power, paired t, two-sided 5 %, power 80 %: n = 10 -> d_z = 0.996
    assert S.resolvable_difference(1.0, 10) == pytest.approx(0.996, abs=2e-3)
    # n = 3 by simulation of 200 000 studies at the returned effect
    delta = S.resolvable_difference(1.0, 3)
    sample = np.random.default_rng(0).normal(delta, 1, (200_000, 3))
    t = sample.mean(1) / (sample.std(1, ddof=1) / np.sqrt(3))
    assert np.mean(np.abs(t) > 4.30265) == pytest.approx(0.8, abs=0.005)
    assert S.resolvable_difference(0.02, 3) == pytest.approx(0.02 * delta)


def test_resolvable_difference_at_the_edges():
    assert np.isnan(S.resolvable_difference(0.1, 1))
    assert S.resolvable_difference(0.0, 3) == 0.0
    sizes = [S.resolvable_difference(0.05, n) for n in (2, 3, 5, 10, 30)]
    assert sizes == sorted(sizes, reverse=True)
