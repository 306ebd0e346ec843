"""Families of comparisons: what Holm ends at, which pairs are tested, which seeds count."""

import numpy as np

from moe_rl.study import statistics as S

EQUAL = dict.fromkeys(range(8), 0.8)


def arm(*changes):
    return {seed: 0.8 + change for seed, change in enumerate(changes)}


def test_holm_ends_at_one():
    assert S.holm([0.6, 0.9]).tolist() == [1.0, 1.0]  # 2 · 0.6 is more


def test_six_pairs_are_enough():
    six = S.compare_paired(arm(0.11, 0.12, 0.08, 0.15, 0.10, 0.09), EQUAL)
    assert (six.n, six.adjusted, six.verdict) == (6, 2 / 64, "higher")


def test_a_seed_that_either_arm_lacks_is_left_out():
    assert S.compare_paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 1: np.nan, 2: np.inf}).seeds == (0,)


def test_one_seed_beside_one_seed():
    assert not S.several_kinds(8, [1]) and S.several_kinds(8, [3]) and not S.several_kinds(3, [1, 5])
