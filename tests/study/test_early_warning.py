"""Early warning: areas under the ROC curve and rank correlations derived by hand."""

import math
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata, spearmanr

from moe_rl.study import RunWriter, load
from moe_rl.study.early_warning import (
    UPDATE_SIGNALS,
    arms_of,
    auc,
    auc_within,
    correlations_within,
    early_warning,
    origins,
    pairs_within,
    rank_correlation,
    ranks_within,
    run_signals,
)
from moe_rl.study.figures.over_studies import beyond_reward_figure


def test_auc_counts_the_pairs_that_are_told_apart():
    values = np.array([0.1, 0.4, 0.35, 0.8])
    bad = np.array([False, False, True, True])
    assert auc(values, bad) == 3 / 4  # of four pairs (bad, good) one is the wrong way round: 0.35 against 0.4
    assert auc(-values, bad) == 1 / 4
    assert auc(np.ones(4), bad) == 0.5


def test_auc_leaves_out_what_is_missing_and_knows_when_it_cannot_tell():
    assert auc(np.array([1.0, np.nan, 2.0]), np.array([False, False, True])) == 1.0
    assert math.isnan(auc(np.arange(3.0), np.zeros(3, bool)))


def test_within_an_arm_only_its_own_runs_are_compared():
    rows = [(0, "a", 2.0, True), (0, "a", 1.0, False), (1, "a", 10.0, True), (1, "a", 11.0, False)]
    rows += [(1, "a", 12.0, False), (0, "b", 50.0, False), (0, "b", math.nan, True)]
    table = pd.DataFrame(rows, columns=["study", "arm", "signal", "bad"])
    pairs = pairs_within(table["bad"].to_numpy(bool), arms_of(table))
    values = table["signal"].to_numpy()
    assert sorted(zip(*pairs, strict=True)) == [(0, 1), (2, 3), (2, 4), (6, 5)]
    assert auc_within(values, pairs, np.ones(7)) == 1 / 3  # 2 > 1; 10 < 11, 12; one of (nan, 50) is missing
    assert auc_within(values, pairs, np.array([2, 1, 1, 1, 0, 1, 1])) == 2 / 3  # twice the first pair, one of arm 1
    assert math.isnan(auc_within(values, (np.array([], int), np.array([], int)), np.ones(7)))


def test_runs_under_another_rounding_are_another_arm(folder, tmp_path):
    twice = Path(shutil.copytree(folder, tmp_path / folder.name))
    shutil.copytree(folder, twice / "rounding_avx2")
    signals_of = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "early_warning.py"))["signals_of"]
    both = signals_of(twice, (5,))
    assert signals_of(twice, (5,), "avx2").equals(both[both["rounding"] == "avx2"])
    assert len(signals_of(folder, (5,), "native")) == len(both) / 2 and not len(signals_of(folder, (5,), "avx2"))
    assert both.groupby("rounding").size().to_dict() == {"native": len(both) / 2, "avx2": len(both) / 2}
    bad = (both["rounding"] == "avx2").to_numpy()
    assert not len(pairs_within(bad, arms_of(both))[0])
    assert len(pairs_within(bad, arms_of(both.drop(columns="rounding")))[0])


def test_runs_without_updates_have_their_reward_and_runs_without_rollouts_have_no_signals(tmp_path):
    """As other trainers may write them: GRPO here, and supervised training that samples nothing."""
    for arm in ("grpo", "sft"):
        for seed in (0, 1):
            with RunWriter(tmp_path, arm=arm, seed=seed, config={"objective": arm}) as run:
                run.eval(0, reward=0.1)
                for step in range(7 if arm == "grpo" else 0):
                    run.rollout(step, reward=0.1 * step)
                if (arm, seed) == ("grpo", 1):
                    run.update(0, 1, grad_norm=2.0)
                run.eval(7, reward=0.7)
    table = run_signals(load(tmp_path), (5,))
    assert list(zip(table["arm"], table["seed"], strict=True)) == [("grpo", 0), ("grpo", 1)]
    assert table["reward"].tolist() == pytest.approx([0.2, 0.2])  # mean of 0, 0.1, .., 0.4
    assert table["grad_norm"].tolist() == pytest.approx([math.nan, 2.0], nan_ok=True)


def test_rank_correlation_sees_order_alone():
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1.0)
    assert rank_correlation(a, np.array([4.0, 1.0, 3.0, 2.0])) == pytest.approx(-0.4)  # 1 - 6 * 14 / (4 * 15)
    assert math.isnan(rank_correlation(a, np.ones(4)))


def test_correlations_within_an_arm_and_beyond_the_reward_are_those_of_scipy_in_each_arm():
    draw = np.random.default_rng(0)
    arm = np.repeat([0, 1, 2], [8, 12, 4])
    reward = draw.normal(size=24) + 10 * arm
    signal, final = reward + draw.normal(size=24), reward + draw.normal(size=24)
    signal[9] = np.nan
    known = np.isfinite(signal)
    values = (signal, final, reward)
    plain, beyond, runs = [], [], []
    for one in (0, 1):  # the third has too few runs
        s, f, r = (of[(arm == one) & known] for of in values)
        sf, sr, rf = spearmanr(s, f)[0], spearmanr(s, r)[0], spearmanr(r, f)[0]
        plain.append(sf)
        beyond.append((sf - sr * rf) / math.sqrt((1 - sr**2) * (1 - rf**2)))
        runs.append(len(s))
    found = correlations_within(*values, arm, np.ones(24))
    assert found == pytest.approx((np.average(plain, weights=runs), np.average(beyond, weights=runs)))
    twice = [np.append(of, of[:8]) for of in values]
    counted = correlations_within(*values, arm, np.where(arm == 0, 2.0, 1.0))
    assert counted == pytest.approx(correlations_within(*twice, np.append(arm, arm[:8]), np.ones(32)))


def test_a_resample_averages_over_the_arms_that_all_runs_have():
    """An arm of five runs, of which a resample drew four, counts; else the interval would be of other arms."""
    arm = np.repeat([0, 1], [5, 8])
    signal = np.concatenate([np.arange(5.0), np.arange(8.0)])
    final = np.concatenate([np.arange(5.0), -np.arange(8.0)])
    nothing = np.full(13, np.nan)
    times = np.ones(13)
    assert correlations_within(signal, final, nothing, arm, times)[0] == pytest.approx((5 - 8) / 13)
    times[:5] = [2, 0, 1, 1, 1]
    assert correlations_within(signal, final, nothing, arm, times)[0] == pytest.approx((5 - 8) / 13)
    times[:5] = [3, 0, 2, 0, 0]  # of two runs no correlation can be told
    assert correlations_within(signal, final, nothing, arm, times)[0] == pytest.approx(-1)


def test_ranks_within_an_arm_are_the_middle_ranks_of_scipy_but_for_a_constant():
    arm, values = np.array([1, 0, 1, 0, 1, 1]), np.array([2.0, 5.0, 1.0, 5.0, 2.0, np.nan])
    ranks = ranks_within(values, arm, np.array([1, 1, 1, 1, 1, 0]))
    for one in (0, 1):
        mine = (arm == one) & np.isfinite(values)
        assert ranks[mine] - ranks[mine].mean() == pytest.approx(rankdata(values[mine]) - rankdata(values[mine]).mean())


def test_a_signal_that_only_follows_the_reward_tells_nothing_beyond_it():
    draw = np.random.default_rng(1)
    arm = np.repeat([0, 1], 300)
    reward = draw.normal(size=600)
    signal, final = -reward + 0.5 * draw.normal(size=600), reward + draw.normal(size=600)
    plain, beyond = correlations_within(signal, final, reward, arm, np.ones(600))
    assert plain < -0.5 and abs(beyond) < 0.1
    plain, beyond = correlations_within(reward, final, reward, arm, np.ones(600))
    assert plain > 0.6 and math.isnan(beyond), "the reward itself has nothing left beyond the reward"
    plain, beyond = correlations_within(signal, final, np.full(600, np.nan), arm, np.ones(600))
    assert plain < -0.4 and math.isnan(beyond), "no reward was kept"


def test_the_reward_of_the_first_steps_is_a_signal_like_the_others(folder):
    data = load(folder)
    first = data.rollouts[data.rollouts["step"] < 3].groupby(["arm", "seed"])["reward"].mean()
    found = run_signals(data, (3,)).set_index(["arm", "seed"])["reward"]
    pd.testing.assert_series_equal(found, first.reindex(found.index))
    table = early_warning([run_signals(data, (3,))], 20).set_index("signal")
    assert math.isnan(table.loc["reward", "beyond_reward"])
    without = early_warning([run_signals(data, (3,)).drop(columns="reward")], 20)
    assert without["beyond_reward"].isna().all() and "reward" not in set(without["signal"])


def test_a_run_that_two_studies_hold_counts_once_and_a_cold_start_is_one_cluster(folder):
    data = load(folder)
    table, again = (run_signals(study, (5,)) for study in (data, replace(data, name="another")))
    once, twice = early_warning([table], 20), early_warning([table, again], 20)
    assert twice["runs"].sum() == 2 * once["runs"].sum(), "runs that did not keep their start are taken as different"
    starts = [replace(run, environment={"weights_sha256": f"cold start {run.seed}"}) for run in data.runs]
    known = replace(data, runs=tuple(starts))
    assert set(origins(known, "0")["cold_start"]) == {f"cold start {seed}" for seed in known.seeds}
    table, again = (run_signals(study, (5,)) for study in (known, replace(known, name="another")))
    assert set(table["cold_start"]) == set(again["cold_start"]) and len(set(table["cold_start"])) == len(known.seeds)
    assert early_warning([table], 20).equals(early_warning([table, again], 20))


def test_arms_that_learn_from_the_same_demonstrations_are_not_one_run(folder):
    data = load(folder)
    runs = tuple(
        replace(run, config={"method": {"objective": "sft"}}, environment={"weights_sha256": f"w{run.seed}"})
        for run in data.runs
    )
    data = replace(data, runs=runs, rollouts=data.rollouts.assign(reward=1.0))
    table = run_signals(data, (5,))
    assert table["run"].nunique() == len(table) - 1 > table["cold_start"].nunique()  # grpo_replay_noise is grpo_replay
    assert set(run_signals(replace(data, name="another"), (5,))["run"]) == set(table["run"])


def test_committed_signals_are_read_as_run_folders_are(folder, tmp_path):
    signals_of = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "early_warning.py"))["signals_of"]
    of_runs = signals_of(folder, (3, 5))
    run_signals(load(folder), (2, 3, 5)).to_csv(tmp_path / "signals.csv", index=False)
    pd.testing.assert_frame_equal(signals_of(tmp_path, (3, 5)).reset_index(drop=True), of_runs, check_dtype=False)
    assert of_runs.groupby("steps").size().to_dict() == {3: len(of_runs) // 2, 5: len(of_runs) // 2}
    with pytest.raises(ValueError, match=r"signals.csv has the first \[2, 3, 5\] steps, not \[7\]"):
        signals_of(tmp_path, (5, 7))


def test_runs_without_a_reward_are_none_that_ended_well(folder):
    data = load(folder)
    some = data.rollouts.assign(reward=data.rollouts["reward"].where(data.rollouts["arm"] != "gspo"))
    assert set(run_signals(data, (5,))["arm"]) - set(run_signals(replace(data, rollouts=some), (5,))["arm"]) == {"gspo"}
    none = run_signals(replace(data, rollouts=data.rollouts.drop(columns="reward")), (5,))
    assert none.empty
    with pytest.raises(ValueError, match="no finished run has more steps than"):
        early_warning([none])


def test_a_run_of_which_nobody_can_tell_whether_it_failed_is_left_out_unless_it_collapsed(folder):
    """Rows from step 1 on: the policy has been updated before the first reward, and there is no evaluation."""
    data = load(folder)
    late = data.rollouts[data.rollouts["step"] > 0]
    later = replace(data, rollouts=late, evals=data.evals.iloc[:0])
    assert len(run_signals(data, (5,))) and run_signals(later, (5,)).empty
    one = (late["arm"] == "grpo") & (late["seed"] == 0)
    fallen = late.assign(reward=late["reward"].mask(one & (late["step"] > 1), 0.0).mask(one & (late["step"] == 1), 0.9))
    found = run_signals(replace(later, rollouts=fallen), (5,))
    assert [(run.arm, run.seed, run.bad) for run in found.itertuples()] == [("grpo", 0, True)]


def test_nothing_is_told_early_of_runs_that_are_over_by_then(folder):
    """Runs of 7 steps: their first 7, 10 or 20 are all that there is, and the end itself."""
    data = load(folder)
    assert set(run_signals(data, (5, 6, 7, 10, 20))["steps"]) == {5, 6}
    short = run_signals(data, (7, 10, 20))
    assert short.empty
    with pytest.raises(ValueError, match="no finished run has more steps than"):
        early_warning([short])


def test_the_script_draws_what_signals_tell_and_what_they_tell_beyond_the_reward(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "early_warning.py"))["main"]
    draw = np.random.default_rng(0)
    runs = pd.DataFrame([(arm, seed) for arm in ("a", "b") for seed in range(8)], columns=["arm", "seed"])
    runs["run"] = runs["cold_start"] = runs["arm"] + runs["seed"].astype(str)
    runs = runs.assign(final=draw.uniform(size=16), bad=lambda t: t["final"] < 0.3)
    signals = ["reward", "slot_change", "k3", "entropy"]
    table = pd.concat(runs.assign(steps=steps, **{s: draw.normal(size=16) for s in signals}) for steps in (3, 5))

    def drawn(kept):
        kept.to_csv(tmp_path / "signals.csv", index=False)
        for file in tmp_path.glob("*.png"):
            file.unlink()
        arguments = [
            str(tmp_path),
            "--steps",
            "3",
            "5",
            "--csv",
            str(tmp_path / "new" / "t.csv"),
            "--figures",
            str(tmp_path),
        ]
        arguments += ["--level", "0.99", "--resamples", "100"]
        monkeypatch.setattr("sys.argv", ["early_warning.py", *arguments])
        main()
        assert "beyond_reward" in capsys.readouterr().out
        return {file.name for file in tmp_path.glob("*.png")}

    assert drawn(table) == {"early_warning.png", "beyond_reward.png"}
    for name in ("early_warning", "beyond_reward"):
        assert "bar: 99 % bootstrap" in " ".join((tmp_path / f"{name}.svg").read_text().split())
    found = pd.read_csv(tmp_path / "new" / "t.csv")
    labels = beyond_reward_figure(found, UPDATE_SIGNALS).figure.axes[0].get_yticklabels()
    after_three = found[found["steps"] == 3].set_index("signal")["beyond_reward"].drop("reward").abs()
    assert [label.get_text() for label in labels] == [*after_three.sort_values().index, "reward"]
    assert drawn(table.drop(columns="reward")) == {"early_warning.png"}, "there is no reward to hold fixed"
