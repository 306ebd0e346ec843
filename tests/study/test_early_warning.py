"""Early warning: areas under the ROC curve and rank correlations derived by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from moe_rl.study import load
from moe_rl.study.early_warning import auc, early_warning, origins, rank_correlation


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


def test_a_run_that_two_studies_hold_counts_once_and_a_cold_start_is_one_cluster(folder):
    data = load(folder)
    once, twice = early_warning([data], (5,), 20), early_warning([data, data], (5,), 20)
    assert twice["runs"].sum() == 2 * once["runs"].sum(), "runs that did not keep their start are taken as different"
    starts = [replace(run, environment={"weights_sha256": f"cold start {run.seed}"}) for run in data.runs]
    known = replace(data, runs=tuple(starts))
    assert set(origins(known, "0")["cold_start"]) == {f"cold start {seed}" for seed in known.seeds}
    once, twice = early_warning([known], (5,), 20), early_warning([known, known], (5,), 20)
    assert once.equals(twice)
