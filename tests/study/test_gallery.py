"""What figures of the gallery plot: means, ranges, rates and variances against the tables that they come from."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from moe_rl.study import RunWriter, load
from moe_rl.study.comparing import comparisons
from moe_rl.study.figures import (
    NothingToDraw,
    clipped_tokens,
    expert_change,
    final_reward,
    gradient_norm,
    gradient_peaks,
    minibatches,
    ratio_variance,
    reward,
    tail_fraction,
    variance_by_flips,
    variance_factors,
)
from moe_rl.study.figures.gallery.decomposition import left_out
from moe_rl.study.figures.gallery.dose_response import method_label
from moe_rl.study.figures.gallery.variance_by_flips import predictor_flips
from moe_rl.study.figures.layout import shown
from moe_rl.study.figures.register import Drawing
from moe_rl.study.figures.routing import binomial_of, short_sites


def test_reward_table_is_mean_and_range_of_the_seeds(data):
    frame = reward(data).frame.set_index(["arm", "step"])
    seeds = data.rollouts.query("arm == 'gspo' and step == 5").set_index("seed")["reward"]
    row = frame.loc[("gspo", 5)]
    assert row["mean"] == pytest.approx(seeds.mean())
    assert (row["low"], row["high"]) == pytest.approx((seeds.min(), seeds.max()))  # n = 3: the range
    assert row["n"] == 3
    assert row["seed1"] == seeds[1]


def test_replay_under_noise_is_its_natural_run_with_all_seeds(data):
    natural, noise = shown(data)
    assert noise.arms == ("grpo_noise", "gspo_noise") and noise.stand_in == "grpo_replay", "one seed stands for nothing"
    assert natural.stand_in is None
    drawn = reward(data)
    lines = {line.get_label(): line for line in drawn.figure.axes[1].lines}
    means = data.rollouts.query("arm == 'grpo_replay'").groupby("step")["reward"].mean()
    assert lines["GRPO + Routing Replay, its natural run"].get_ydata() == pytest.approx(means.to_numpy())
    assert "grpo_replay_noise" not in set(drawn.frame["arm"])
    assert "by construction its natural run" in drawn.caption
    differs = data.rollouts.copy()
    differs.loc[differs["arm"] == "grpo_replay_noise", "reward"] += 0.1
    assert "grpo_replay_noise" in shown(_with(data, rollouts=differs))[1].arms, "a run that does not repeat is shown"


def test_change_rate_pools_counts_and_marks_the_paper_on_slots_only(data):
    figure = expert_change(data)
    rows = data.probes.query("arm == 'grpo' and seed == 0 and update == 2")
    row = figure.frame.query("arm == 'grpo' and definition == 'site' and update == 2").iloc[0]
    assert row["seed0"] == pytest.approx(rows["sites_changed"].sum() / rows["sites"].sum())
    texts = [" ".join(text.get_text() for text in ax.texts) for ax in figure.figure.axes]
    assert "denominator not defined" in texts[0]
    assert not any("GSPO paper" in text for text in texts[1:])
    dotted = [any(np.allclose(line.get_ydata(), 10) for line in ax.lines) for ax in figure.figure.axes]
    assert dotted == [True, True, False, False, False, False]  # slot, slot, site, ..: natural, noise


def test_the_papers_value_is_named_but_not_drawn_where_it_would_flatten_the_data(one_seed):
    probes = one_seed.probes.assign(slots_changed=(one_seed.probes["slots"] * 0.002).astype(int))
    figure = expert_change(_with(one_seed, probes=probes)).figure
    assert "above this axis" in figure.axes[0].texts[0].get_text()
    assert figure.axes[0].get_ylim()[1] < 1


def test_clipped_fraction_pools_updates_and_gives_zero_a_place(one_seed):
    updates = one_seed.updates.copy()
    updates["tokens"] = 1000
    updates["clipped_tokens"] = 0
    updates.loc[(updates["arm"] == "gspo") & (updates["update"] == 4), "clipped_tokens"] = 80
    figure = clipped_tokens(_with(one_seed, updates=updates))
    means = figure.frame.set_index(["arm", "step"])["mean"]
    assert means[("gspo", 0)] == 80 / 4000  # pooled over the four updates
    assert means[("grpo", 0)] == 0.0  # the table keeps the zero that a log axis cannot show
    ax = figure.figure.axes[0]
    open_markers = [line for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert len(open_markers) == 1
    assert open_markers[0].get_ydata()[0] == pytest.approx(0.01 / 4)  # a quarter of the lowest power of ten
    assert any(text.get_text() == "0" for text in ax.texts)


def test_ticks_of_a_log_axis_go_by_the_range_that_is_shown(one_seed):
    """Where nothing is clipped the data are one point, and the axis four powers of ten."""
    updates = one_seed.updates.assign(clipped_tokens=0)
    ax = clipped_tokens(_with(one_seed, updates=updates)).figure.axes[0]
    low, high = ax.get_ylim()
    assert [tick for tick in ax.get_yticks() if low <= tick <= high] == pytest.approx([1e-3, 1e-2, 1e-1, 1])


def test_variance_factors_are_of_natural_arms_and_by_update(data):
    figure = variance_factors(data)
    frame = figure.frame.set_index(["factor", "arm", "update"])
    probes = data.probes.query("arm == 'gspo' and seed == 2 and update == 3")
    median = (probes["var_token_natural"] / probes["var_token_replayed"]).median()
    assert frame.loc[("replay", "gspo", 3), "seed2"] == pytest.approx(median)
    every = data.probes.query("arm == 'gspo' and update == 3")
    ratio = every["var_token_natural"].mean() / every["var_sequence_natural"].mean()
    assert frame.loc[("averaging", "gspo", 3), "of_means"] == pytest.approx(ratio)
    assert set(figure.frame["arm"]) == {"grpo", "grpo_replay", "gspo"}, "stress arms are another question"
    crosses = [line for line in figure.figure.axes[1].lines if line.get_marker() == "x"]
    assert sorted(line.get_ydata()[2] for line in crosses) == pytest.approx(
        sorted(frame.loc[("averaging", arm, 3), "of_means"] for arm in ("grpo", "grpo_replay", "gspo"))
    )


def test_variance_in_training_is_the_mean_of_later_updates(data):
    frame = ratio_variance(data).frame
    updates = data.updates.query("arm == 'gspo' and seed == 2 and step == 4 and update > 1")
    drawn = frame.query("arm == 'gspo' and quantity == 'in-run token' and step == 4")["seed2"].iloc[0]
    assert drawn == pytest.approx(updates["var_token_log_ratio"].mean())


@pytest.mark.parametrize("arms", [2, 8])
def test_sequences_of_no_variance_cost_tokens_no_line(tmp_path, arms):
    """As in a trainer whose minibatches have one sequence each."""
    for i in range(arms):
        with RunWriter(tmp_path, arm=f"a{i}") as run:
            for step in range(3):
                run.update(step, 1, var_token_log_ratio=0.1 + step, var_sequence_log_ratio=0.0)
    frame = ratio_variance(load(tmp_path)).frame
    assert set(frame["quantity"]) == {"in-run token"} and len(frame) == 3 * arms


def test_flips_belong_to_the_token_that_they_predict():
    table = pd.DataFrame(
        {"arm": "a", "seed": 0, "step": 0, "update": 1, "seq": [0, 0, 0, 1, 1], "pos": [2, 0, 1, 0, 1],
         "flips": [9, 4, 5, 7, 8]}
    )  # fmt: skip
    moved = predictor_flips(table)
    # sequence 0 has flips 4, 5, 9 by position: position 1 is predicted at 0 (4), position 2 at 1 (5)
    assert moved[["seq", "pos", "flips"]].values.tolist() == [[0, 1, 4], [0, 2, 5], [1, 1, 7]]
    behind = predictor_flips(table.replace({"pos": {2: 5}}))  # three tokens of a tool's text before the last
    assert behind[["seq", "pos", "flips"]].values.tolist() == [[0, 1, 4], [1, 1, 7]]


def test_flips_need_no_sorting_where_rows_are_in_order(data):
    tokens = data.tokens.query("arm == 'grpo' and seed == 0")
    columns = ["step", "update", "seq", "pos", "flips"]
    keys = ["step", "update", "seq", "pos"]
    found = predictor_flips(tokens)[columns].reset_index(drop=True)
    other = predictor_flips(tokens.sample(frac=1, random_state=0))[columns].sort_values(keys).reset_index(drop=True)
    assert found.sort_values(keys).reset_index(drop=True).equals(other)
    assert len(found) == len(tokens) - tokens.groupby(["step", "update", "seq"]).ngroups


def test_variance_by_flips_rises_with_flips_and_not_under_replay(data):
    frame = variance_by_flips(data).frame.query("arm == 'grpo'").set_index(["routing", "flips"])
    assert frame.loc[("natural", 2), "mean"] > 3 * frame.loc[("natural", 0), "mean"]
    assert frame.loc[("replayed", 2), "mean"] < 2 * frame.loc[("replayed", 0), "mean"]


def test_responses_of_one_token_have_no_position_that_predicts_one(tmp_path):
    tokens = {"seq": [0, 1], "pos": [0, 0], "token": [1, 2], "update": [1, 1], "flips": [0, 1]}
    with RunWriter(tmp_path, arm="a") as run:
        run.rollout(0, reward=0.5)
        run.tokens(0, **tokens, old_logp=[-1.0, -2.0], logp_natural=[-1.1, -2.1], logp_replayed=[-1.0, -2.0])
    with pytest.raises(NothingToDraw, match="variance_by_flips: no stored response has a second token"):
        variance_by_flips(load(tmp_path))


def test_variance_by_flips_is_of_seeds_with_their_interval(data):
    row = variance_by_flips(data).frame.query("arm == 'gspo' and routing == 'natural' and flips == 1").iloc[0]
    tokens = data.tokens.query("arm == 'gspo'").sort_values(["seed", "step", "update", "seq", "pos"])
    before = tokens.groupby(["seed", "step", "update", "seq"])["flips"].shift(1)
    ratios = (tokens["logp_natural"] - tokens["old_logp"])[before == 1]
    variances = ratios.groupby(tokens["seed"]).var()
    assert [row["seed0"], row["seed1"], row["seed2"]] == pytest.approx(variances.tolist())
    assert row["mean"] == pytest.approx(np.exp(np.log(variances).mean()))
    assert (row["low"], row["high"]) == pytest.approx((variances.min(), variances.max()))  # n = 3: the range


def test_tail_counts_ratios_on_both_sides():
    from moe_rl.study.figures.gallery.tail_fraction import TAUS

    frame = tail_fraction(_token_study([0.0, 0.05, -0.05, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])).frame
    natural = frame.query("routing == 'natural'").set_index("tau")["fraction"]
    assert natural.iloc[0] == 0.4  # |log r| > log 1.01: four of ten
    assert natural[TAUS[TAUS > 1.1][0]] == 0.2  # e^0.05 = 1.05 is below, e = 2.72 above
    assert natural.iloc[-1] == 0.0


def test_binomial_has_the_mean_of_the_counts():
    assert binomial_of(np.array([1.0, 2.0, 1.0])).tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert binomial_of(np.array([5.0, 0.0, 0.0])).tolist() == [1.0, 0.0, 0.0]


def test_site_names_are_shortened_to_what_differs():
    assert short_sites(["m.layers.0.mlp.gate", "m.layers.10.mlp.gate"]) == (["0", "10"], "m.layers.·.mlp.gate")
    assert short_sites(["gate"]) == (["gate"], "gate")
    assert short_sites(["enc.0.gate", "dec.0.gate"]) == (["enc", "dec"], "·.0.gate")
    assert short_sites(["a.0.b", "a.1.c"]) == (["0.b", "1.c"], "a.·")


def test_final_reward_lists_every_arm_with_its_interval(data):
    figure = final_reward(data)
    table = figure.frame.set_index("arm")
    last = data.rollouts.query("arm == 'grpo' and step >= 2").groupby("seed")["reward"].mean()
    assert table.loc["grpo", "final"] == pytest.approx(last.mean())
    assert (table.loc["grpo", "low"], table.loc["grpo", "high"]) == pytest.approx((last.min(), last.max()))
    words = " ".join(text.get_text() for text in figure.figure.axes[0].texts)
    assert f"{last.mean():.3f} [{last.min():.3f}, {last.max():.3f}]" in words


def test_final_reward_shows_every_paired_difference(data):
    figure = final_reward(data)
    pairs = comparisons(data)
    below = figure.figure.axes[1]
    assert [tick.get_text() for tick in below.get_yticklabels()] == [
        "Replay − GRPO", "GSPO − GRPO", "GSPO − GRPO", "Replay − GRPO",
    ]  # fmt: skip
    seeds = [
        c.get_offsets()[:, 0] for c in below.collections if isinstance(c, PathCollection) and len(c.get_offsets()) == 3
    ]
    assert [list(x) for x in seeds] == [pytest.approx(pair.result.differences) for pair in pairs]
    assert {line.get_xdata()[0] for line in below.lines} == {0, -0.05, 0.05}, "no difference, and those of no interest"
    assert figure.tables["differences"]["difference"].tolist() == [pair.result.difference.estimate for pair in pairs]


def test_more_paired_differences_than_final_reward_can_show_are_in_its_table(data, monkeypatch):
    monkeypatch.setattr(sys.modules["moe_rl.study.figures.gallery.final_reward"], "MOST_PAIRS", 3)
    figure = final_reward(data)
    assert len(figure.figure.axes) == 1 and len(figure.tables["differences"]) == 4
    assert "The 4 differences between arms are in its table" in figure.caption


def _with(data, **frames):
    from dataclasses import replace

    return replace(data, **frames)


def _token_study(log_ratios):
    """A one-run study of which only tokens matter."""
    from moe_rl.study.data import Run, StudyData

    run = Run("grpo", 0, Path("grpo/seed0"), True, {"method": {"objective": "grpo"}}, {})
    empty = pd.DataFrame()
    data = StudyData("tokens", Path(), {}, (run,), empty, empty, empty, empty)
    log_ratios = np.array(log_ratios)
    vars(data)["tokens"] = pd.DataFrame(
        {"arm": "grpo", "seed": 0, "step": 0, "update": 1, "old_logp": -2.0, "logp_natural": -2.0 + log_ratios,
         "logp_replayed": -2.0}
    )  # fmt: skip
    return data


def test_a_mean_of_clipped_shares_is_of_the_shares_and_not_of_the_place_of_zero(data):
    """Two seeds of three clip nothing: a third of the other's share, in a band that ends at the place of zero."""
    rows = data.updates[(data.updates["arm"] == "grpo") & (data.updates["update"] == 1)]
    updates = rows.assign(tokens=1000, clipped_tokens=np.where(rows["seed"] == 0, 30, 0))
    ax = clipped_tokens(_with(data, updates=updates)).figure.axes[0]
    line = next(line for line in ax.lines if line.get_label() == "GRPO")
    assert line.get_ydata() == pytest.approx([0.01] * len(line.get_ydata()))
    (band,) = ax.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == pytest.approx((0.01 / 4, 0.03))


def test_independent_tokens_give_the_harmonic_length_of_natural_responses(data):
    """Two responses of 2 and 6 tokens: 2 / (1/2 + 1/6) = 3, not 4; those under noise are not in the figure."""
    rows = [("grpo", 1, 2.0), ("gspo", 1, 6.0), ("grpo_noise", 1, 100.0)]
    split = pd.DataFrame(rows, columns=["arm", "sequences", "harmonic_length"]).assign(seed=0, step=0, update=1)
    noisy = data.rollouts["arm"].isin(data.arms.index[data.arms["noise"] > 0])
    rollouts = data.rollouts.assign(response_length=np.where(noisy, 100.0, 4.0))
    known = variance_factors(_with(data, rollouts=rollouts, decompositions=split))
    unknown = variance_factors(_with(data, rollouts=rollouts))
    assert "averaging the harmonic mean length of the responses, 3.0 (dotted)." in known.caption
    assert "averaging at most the mean length of the responses, 4.0." in unknown.caption
    level = [[line.get_ydata()[0] for line in one.figure.axes[1].lines if len(line.get_xdata()) == 2]
             for one in (known, unknown)]  # fmt: skip
    assert level == [[1.0, pytest.approx(3.0)], [1.0]]


def test_what_is_said_of_all_runs_is_true_of_all(data):
    """Arms of other batches, other numbers of updates and fewer steps."""
    assert "256 responses a step." in reward(data).caption
    of_gspo = data.rollouts["arm"] == "gspo"
    larger = data.rollouts.assign(reward_n=data.rollouts["reward_n"].where(~of_gspo, 1024))
    assert "256 to 1024 responses a step." in reward(replace(data, rollouts=larger)).caption
    configs = [{**run.config, "optim": {"num_minibatches": 8 if run.arm == "gspo" else 2}} for run in data.runs]
    runs = tuple(replace(run, config=config) for run, config in zip(data.runs, configs, strict=True))
    assert "Every run samples equally often" in minibatches(replace(data, runs=runs)).caption
    short = replace(data, runs=runs, rollouts=data.rollouts[~of_gspo | (data.rollouts["step"] < 3)])
    said = minibatches(short).caption
    assert "Runs sample 3 to 7 batches." in said and "equally often" not in said


def test_n_counts_the_arms_that_are_drawn_and_no_others(data):
    """A stress arm of one seed is in neither figure."""
    configs = [{**run.config, "optim": {"num_minibatches": 8 if run.arm == "gspo" else 2}} for run in data.runs]
    runs = tuple(replace(run, config=config) for run, config in zip(data.runs, configs, strict=True))
    probes, rollouts = (
        rows[(rows["arm"] != "gspo_noise") | (rows["seed"] == 0)] for rows in (data.probes, data.rollouts)
    )
    one_run = replace(data, runs=runs, probes=probes, rollouts=rollouts)
    assert "n = 3 seeds per arm (1 for GSPO, noise σ = 1);" in reward(one_run).caption
    for figure in (variance_factors, minibatches):
        assert "n = 3 seeds per arm; bars and bands: the range of the 3 seeds" in figure(one_run).caption
    only = {("gspo", 0), ("gspo", 7)}
    drawn = Drawing(Figure(), data.rollouts, runs=only)
    one = replace(variance_factors, draw=lambda data: drawn)
    assert "n = 1 seed per arm" in one(data).caption, "a run that lacks what the figure needs is not counted"


def test_a_runs_peak_is_its_largest_update_and_updates_without_a_gradient_have_no_part_in_its_median(data):
    updates = data.updates.copy()
    one = (updates["arm"] == "grpo") & (updates["seed"] == 1)
    norms = np.linspace(0.5, 2.0, one.sum())
    norms[0], norms[3], norms[5] = 0.0, 1000.0, np.nan
    updates.loc[one, "grad_norm"] = norms
    frame = gradient_peaks(replace(data, updates=updates)).frame.query("arm == 'grpo'")
    assert list(frame["seed1"]) == [pytest.approx(np.nanmedian(norms[norms != 0])), 1000.0]
    others = updates.query("arm == 'grpo' and seed == 2")["grad_norm"]
    assert list(frame["seed2"]) == pytest.approx([others.median(), others.max()])


def test_arms_that_are_left_to_the_table_are_counted():
    assert [*map(left_out, (0, 1, 2))] == ["", "1 more arm is in the table.", "2 more arms are in the table."]


def test_thin_lines_are_explained_where_they_are_drawn(data):
    for figure in (gradient_norm, variance_factors):
        assert "Thin lines: seeds; thick: their mean." in figure(data).caption


def test_a_method_is_called_by_what_the_labels_of_its_arms_share(data):
    arms = data.arms.loc[["grpo", "grpo_replay", "gspo"]]
    arms = arms.assign(method=["grpo", "grpo", "gspo"], label=["GRPO 16", "GRPO 64", "GSPO, N = 4"])
    named = copy.copy(data)
    vars(named)["arms"] = arms
    assert [method_label(named, method) for method in ("grpo", "gspo")] == ["GRPO", "GSPO"]
    vars(named)["arms"] = arms.assign(label=["Old", "New", "GSPO"])
    assert method_label(named, "grpo") == "Old"


def test_the_axis_of_rewards_holds_the_whole_interval(tmp_path):
    """One failing run of six widens Student's interval beyond the best seed."""
    for seed in range(6):
        with RunWriter(tmp_path, arm="grpo", seed=seed) as run:
            for step in range(2):
                run.rollout(step, reward=0.7 if seed else 0.0)
    drawn = reward(load(tmp_path))
    assert 0.75 < drawn.frame["high"].max() < drawn.figure.axes[0].get_ylim()[1] <= 1


def test_arms_of_one_label_are_each_counted(tmp_path):
    for arm, seeds, label in (("a", 3, "A"), ("b", 3, "B"), ("c", 2, "C"), ("d", 1, "C")):
        for seed in range(seeds):
            with RunWriter(tmp_path, arm=arm, seed=seed, config={"label": label}) as run:
                run.rollout(0, reward=0.5)
    assert "n = 3 seeds per arm (2 for C, 1 for C)" in reward(load(tmp_path)).caption
