"""Figures: what was plotted, what the captions say, one look per method, stable files."""

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from synthetic import write_study

from moe_rl.study import load
from moe_rl.study.figures import (
    FIGURES,
    NothingToDraw,
    clipped_tokens,
    draw_all,
    draw_some,
    each_figure,
    expert_change,
    final_reward,
    gallery,
    look_of,
    ratio_variance,
    reward,
    save_figure,
    tail_fraction,
    variance_by_flips,
    variance_factors,
)
from moe_rl.study.figures.gallery.variance_by_flips import predictor_flips
from moe_rl.study.figures.layout import shown
from moe_rl.study.figures.register import figure
from moe_rl.study.figures.routing import binomial_of, short_sites
from moe_rl.study.figures.style import LOOKS, arm_looks, conditions
from moe_rl.study.summary import comparisons

INTERVALS = ("evaluation_low", "evaluation_high")  # one seed has none


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=7, sequences=6, tokens_every=3)


@pytest.fixture(scope="module")
def data(folder):
    return load(folder)


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    return load(write_study(tmp_path_factory.mktemp("runs") / "one", arms=("grpo", "gspo"), seeds=(0,), steps=3))


@pytest.mark.parametrize("name", [name for name, one in FIGURES.items() if not one.special])
def test_every_figure_says_what_it_plots(data, name):
    figure = FIGURES[name](data)
    assert figure.name == name
    assert "n = 3 seeds per arm" in figure.caption and figure.caption.endswith(".")
    assert figure.caption == " ".join((figure.own, *figure.notes)), "what it shares with others comes last"
    under = figure.figure._supxlabel.get_text()
    assert under.startswith("n = 3 seeds per arm"), "the picture alone says its n"
    assert ("their range" in under) == ("the range of the 3 seeds" in figure.caption)
    arms = set(figure.frame["arm"].dropna())
    assert arms <= set(data.arms.index)
    if name == "alarms":  # has the runs that crossed a threshold
        return
    assert {"grpo", "grpo_replay", "gspo"} <= arms
    if name != "variance_factors":  # of natural arms only
        assert "stress test" in figure.caption and {"grpo_noise", "gspo_noise"} <= arms
    values = (
        figure.frame["mean"]
        if "mean" in figure.frame
        else figure.frame.select_dtypes("number").drop(columns=["low", "high", "sd", *INTERVALS], errors="ignore")
    )
    assert len(values) > 0
    assert np.isfinite(values.to_numpy(dtype=float)).all()


def test_a_file_of_the_gallery_is_one_figure_of_its_name():
    files = {Path(file).stem for file in Path(gallery.__file__).parent.glob("[!_]*.py")}
    assert files == set(FIGURES)
    for name, one in FIGURES.items():
        assert one.draw.__module__ == f"{gallery.__name__}.{name}" and one.draw.__name__ == name
        assert one.title.endswith(".") and one.caption.endswith(".")
    ranks = [one.rank for one in FIGURES.values()]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)


def test_figures_are_drawn_by_name_and_unknown_ones_are_refused(folder, tmp_path):
    written = draw_some(folder, ["reward", "gradient_norm", "reward"], tmp_path)
    assert {path.stem for path in written} == {path.stem for path in tmp_path.iterdir()} == {"reward", "gradient_norm"}
    with pytest.raises(ValueError, match="unknown figure 'expert_chnage'; did you mean 'expert_change'"):
        draw_some(tmp_path / "no such folder", ["expert_chnage"])


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="figure 'reward' is registered twice"):
        figure(title="Again.", caption="Again.", needs={})(_another_reward())


def _another_reward():
    def reward(data):
        raise NotImplementedError

    return reward


def test_interval_and_its_worth_are_in_the_caption(data, one_seed):
    assert "bars and bands: the range of the 3 seeds, which is no confidence interval" in reward(data).caption
    assert "one seed: no interval" in reward(one_seed).caption
    assert reward(one_seed).frame["low"].isna().all()


def test_reward_table_is_mean_and_range_of_the_seeds(data):
    frame = reward(data).frame.set_index(["arm", "step"])
    seeds = data.rollouts.query("arm == 'gspo' and step == 5").set_index("seed")["reward"]
    row = frame.loc[("gspo", 5)]
    assert row["mean"] == pytest.approx(seeds.mean())
    assert (row["low"], row["high"]) == pytest.approx((seeds.min(), seeds.max()))  # n = 3: the range
    assert row["n"] == 3
    assert row["seed1"] == seeds[1]


def test_conditions_are_panels_and_methods_keep_their_colour(data):
    assert [(c.noise, c.arms) for c in conditions(data)] == [
        (0.0, ("grpo", "grpo_replay", "gspo")),
        (1.0, ("grpo_noise", "grpo_replay_noise", "gspo_noise")),
    ]
    natural, noise = reward(data).figure.axes
    colours = [
        {line.get_label(): line.get_color() for line in ax.lines if not line.get_label().startswith("_")}
        for ax in (natural, noise)
    ]
    assert {name: colour for name, colour in colours[1].items() if name in colours[0]} == {
        name: colours[0][name] for name in ("GRPO", "GSPO")
    }
    assert colours[0]["GSPO"] == LOOKS["gspo"].colour
    assert noise.get_title(loc="left") == "σ = 1 (stress test)\n45 % of slots re-routed", "the measured dose"
    assert natural.get_title(loc="left") == "natural routing"


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


def test_main_methods_differ_in_grey_dash_and_marker():
    def lightness(colour):
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16  # CIE L*

    looks = [LOOKS[name] for name in ("grpo", "grpo_replay", "gspo")]
    grey = sorted(lightness(look.colour) for look in looks)
    assert min(np.diff(grey)) > 9
    assert len({look.marker for look in looks}) == len({str(look.dash) for look in looks}) == 3


def test_an_unknown_method_gets_the_same_look_everywhere():
    assert look_of("my_method") == look_of("my_method")
    assert look_of("my_method").colour not in {look.colour for look in LOOKS.values()}


def test_arms_of_one_method_share_its_colour_and_differ_in_dash(tmp_path, data):
    looks = arm_looks(data, ["gspo", "gspo_noise"])
    assert looks["gspo"][0].colour == looks["gspo_noise"][0].colour
    assert looks["gspo"][0].dash != looks["gspo_noise"][0].dash


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


def test_flips_belong_to_the_token_that_they_predict():
    table = pd.DataFrame(
        {"arm": "a", "seed": 0, "step": 0, "update": 1, "seq": [0, 0, 0, 1, 1], "pos": [2, 0, 1, 0, 1],
         "flips": [9, 4, 5, 7, 8]}
    )  # fmt: skip
    moved = predictor_flips(table)
    # sequence 0 has flips 4, 5, 9 by position: position 1 is predicted at 0 (4), position 2 at 1 (5)
    assert moved[["seq", "pos", "flips"]].values.tolist() == [[0, 1, 4], [0, 2, 5], [1, 1, 7]]


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


def test_figures_are_the_same_bytes_each_time(one_seed):
    first, second = reward(one_seed), reward(one_seed)
    for kind in ("pdf", "svg", "png"):
        assert first.render(kind) == second.render(kind)
        assert first.render(kind) == first.render(kind)
    assert b"CreationDate" not in first.render("pdf")
    assert b"<dc:date>" not in first.render("svg")


def test_drawing_leaves_no_trace_in_matplotlibs_settings(one_seed):
    before = dict(mpl.rcParams)
    reward(one_seed).render("svg")
    assert dict(mpl.rcParams) == before


def test_saving_writes_five_files_whole(one_seed, tmp_path):
    figure = reward(one_seed)
    written = save_figure(figure, tmp_path / "out")
    assert [path.name for path in written] == [f"reward.{kind}" for kind in ("pdf", "svg", "png", "csv", "md")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in written)
    back = pd.read_csv(io.BytesIO((tmp_path / "out" / "reward.csv").read_bytes()))
    assert np.allclose(back["mean"], figure.frame["mean"], rtol=1e-6)
    caption = (tmp_path / "out" / "reward.md").read_text()
    assert caption.startswith("**Reward against RL step.** ")
    assert figure.caption in caption


def test_a_failed_write_leaves_the_old_file(one_seed, tmp_path, monkeypatch):
    figure = reward(one_seed)
    save_figure(figure, tmp_path)
    old = (tmp_path / "reward.pdf").read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save_figure(figure, tmp_path)
    assert (tmp_path / "reward.pdf").read_bytes() == old
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_figures_without_data_say_what_is_missing(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0,), steps=2, tokens_every=10**9)
    for run in folder.glob("*/seed*"):
        for file in (run / "tokens").iterdir():
            file.unlink()
    with pytest.raises(NothingToDraw, match="tail_fraction: the runs recorded no"):
        tail_fraction(load(folder))
    skipped = []
    names = {figure.name for figure in each_figure(load(folder), skipped)}
    need_tokens = {"tail_fraction", "variance_by_flips", "probability_scatter", "log_ratio_bands", "change_by_position"}
    assert names == {name for name, one in FIGURES.items() if not one.special} - need_tokens
    assert {reason.split(":")[0] for reason in skipped} == need_tokens


def test_nothing_at_all_to_draw_is_an_error(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0,), steps=1, unfinished=(("grpo", 0),))
    with pytest.raises(NothingToDraw, match="nothing to draw yet"):
        draw_all(folder)


def test_unfinished_runs_are_marked(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), steps=6, unfinished=(("grpo", 1),))
    figure = reward(load(folder))
    assert "unfinished runs included as far as they got: grpo/seed1" in figure.caption
    assert figure.frame.set_index("step")["n"].tolist() == [3, 3, 3, 2, 2, 2]


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
