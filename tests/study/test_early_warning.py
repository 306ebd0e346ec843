"""Early warning: areas under the ROC curve and rank correlations derived by hand."""

import math

import numpy as np
import pytest

from moe_rl.study.early_warning import auc, rank_correlation


def test_auc_counts_the_pairs_that_are_told_apart():
    values = np.array([0.1, 0.4, 0.35, 0.8])
    bad = np.array([False, False, True, True])
    assert auc(values, bad) == 3 / 4  # of four pairs (bad, good) one is the wrong way round: 0.35 against 0.4
    assert auc(-values, bad) == 1 / 4
    assert auc(np.ones(4), bad) == 0.5


def test_auc_leaves_out_what_is_missing_and_knows_when_it_cannot_tell():
    assert auc(np.array([1.0, np.nan, 2.0]), np.array([False, False, True])) == 1.0
    assert math.isnan(auc(np.arange(3.0), np.zeros(3, bool)))


def test_rank_correlation_sees_order_alone():
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1.0)
    assert rank_correlation(a, np.array([4.0, 1.0, 3.0, 2.0])) == pytest.approx(-0.4)  # 1 - 6 * 14 / (4 * 15)
    assert math.isnan(rank_correlation(a, np.ones(4)))
