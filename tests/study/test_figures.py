"""Figures: what the captions say, one look per method, stable files."""

import dataclasses
import io
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from synthetic import write_study

from moe_rl.study import load
from moe_rl.study.figures import (
    FIGURES,
    NothingToDraw,
    draw_all,
    draw_some,
    each_figure,
    gallery,
    look_of,
    reward,
    save_figure,
    tail_fraction,
)
from moe_rl.study.figures.curves import curves, seed_tables
from moe_rl.study.figures.register import REGISTRY, figure
from moe_rl.study.figures.saving import house_style
from moe_rl.study.figures.style import LOOKS, arm_looks, conditions
from moe_rl.study.statistics import interval_note

INTERVALS = ("evaluation_low", "evaluation_high")  # one seed has none


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


def test_what_a_figure_needs_and_returns_is_checked(folder):
    def of_its_own(data):
        return None

    about = {"title": "Own.", "caption": "Own."}
    with pytest.raises(ValueError, match="figure 'of_its_own', needs: no table 'update'; did you mean 'updates'"):
        figure(**about, needs={"update": ["grad_norm"]})(of_its_own)
    with pytest.raises(ValueError, match="the columns of 'updates' are a list, got 'grad_norm'"):
        figure(**about, needs={"updates": "grad_norm"})(of_its_own)
    drawn = figure(**about, needs={"updates": ["grad_norm"]})(of_its_own)
    del REGISTRY["of_its_own"]
    with pytest.raises(TypeError, match="figure 'of_its_own' must return a Drawing, got NoneType"):
        drawn(load(folder))


def _another_reward():
    def reward(data):
        raise NotImplementedError

    return reward


def test_interval_and_its_worth_are_in_the_caption(data, one_seed):
    assert "bars and bands: the range of the 3 seeds, which is no confidence interval" in reward(data).caption
    assert "one seed: no interval" in reward(one_seed).caption
    assert reward(one_seed).frame["low"].isna().all()


@pytest.mark.parametrize("name", ["expert_change", "variance_factors", "divergence", "expert_change_by_site"])
def test_n_is_that_of_the_runs_that_have_what_the_figure_shows(data, name):
    """Probes of one seed in three, and of two in one arm: n of the figure, not of the study."""
    probes = data.probes[(data.probes["seed"] == 0) | ((data.probes["arm"] == "gspo") & (data.probes["seed"] == 1))]
    part = dataclasses.replace(data, probes=probes)
    figure = FIGURES[name](part)
    assert "n = 1 seed per arm (2 for GSPO)" in figure.caption and "the 3 seeds" not in figure.caption
    bands = "n = 1 to 2 seeds; band: 95 % Student from 6 seeds on, else their range"
    none = "n = 1 seed per arm (fewer or more in some)"
    assert figure.figure._supxlabel.get_text() == (none if name == "expert_change_by_site" else bands)
    if "n" in figure.frame:
        assert figure.frame.groupby("arm")["n"].max().to_dict().items() >= {"grpo": 1, "gspo": 2}.items()
    assert "n = 3 seeds per arm; " in reward(part).caption, "rewards were recorded by all"
    without = dataclasses.replace(data, probes=probes[probes["arm"] != "gspo"])
    assert "n = 1 seed per arm" in FIGURES[name](without).caption and "GSPO)" not in FIGURES[name](without).caption


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


@pytest.mark.parametrize("method", [*LOOKS, "my_method"])
def test_no_two_arms_of_a_method_look_the_same(method):
    names = [f"arm{i}" for i in range(20)]
    arms = pd.DataFrame({"method": method, "label": names}, index=names)
    looks = [look for look, _ in arm_looks(SimpleNamespace(arms=arms), names).values()]
    assert looks[0] == look_of(method) and len(set(looks)) == len(looks)
    assert len({str(look.dash) for look in looks[:5]}) == len({look.marker for look in looks[:5]}) == 5


def test_intervals_of_arms_of_few_and_many_seeds_are_told_apart(tmp_path):
    few = {
        "few": ({"label": "few", "seeds": [0], "method": {"objective": "sapo", "replay": "none", "noise": 0.0}}, 0.8)
    }
    few |= {f"few{k}": few["few"] for k in range(2)}
    many = write_study(tmp_path / "s", ("grpo", *few), tuple(range(6)), 5, sequences=4, more=few)
    figure = reward(load(many))
    assert "no interval" not in figure.caption and "95 % Student from 6 on, below that the range" in figure.caption
    assert figure.figure.get_supxlabel() == "n = 1 to 6 seeds; band: 95 % Student from 6 seeds on, else their range"
    assert interval_note(8, [8, 1]) == "intervals: 95 % Student over 8 seeds", "one seed has none"


def test_rewards_of_other_responses_than_the_policys_are_said_to_be_so(one_seed):
    runs = tuple(
        dataclasses.replace(run, config={**run.config, "method": {"objective": "sft"}}) if run.arm == "gspo" else run
        for run in one_seed.runs
    )
    assert (
        "GSPO: rewards of responses that are not the policy's." in reward(dataclasses.replace(one_seed, runs=runs)).own
    )
    assert "not the policy's" not in reward(one_seed).caption


def test_an_arm_whose_name_begins_with_an_underscore_is_in_the_legend(one_seed):
    arms = {"grpo": {"label": "_grpo"}, "gspo": {"label": "GSPO"}}
    figure = reward(dataclasses.replace(one_seed, config={**one_seed.config, "arms": arms}))
    assert [text.get_text().strip() for text in figure.figure.legends[0].get_texts()] == ["_grpo", "GSPO"]


def test_figures_are_the_same_bytes_each_time(one_seed):
    first, second = reward(one_seed), reward(one_seed)
    for kind in ("pdf", "svg", "png"):
        assert first.render(kind) == second.render(kind)
        assert first.render(kind) == first.render(kind)
    assert b"CreationDate" not in first.render("pdf")
    assert b"<dc:date>" not in first.render("svg")


def test_a_figure_that_was_changed_is_drawn_anew_and_laid_out_anew(one_seed):
    drawn = reward(one_seed)
    axes, before = drawn.figure.axes[0], drawn.render("png")
    left = axes.get_position().x0
    axes.set_ylabel("reward\nin four\nlines\nof text")
    assert drawn.render("png") != before
    assert axes.get_position().x0 > left + 0.01
    assert drawn.render("png") is drawn.render("png")


def test_text_of_a_figure_is_one_line(one_seed):
    drawn = reward(one_seed)
    rows = len(drawn.frame)
    parts = f".figure, .caption, .frame of {rows} rows, .save(folder)"
    assert repr(drawn) == f"StudyFigure(reward: Reward against RL step. {parts})"
    assert repr(reward) == "Registered(name='reward', title='Reward against RL step.')"


def test_drawing_leaves_no_trace_in_matplotlibs_settings(one_seed):
    before = dict(mpl.rcParams)
    reward(one_seed).render("svg")
    assert dict(mpl.rcParams) == before


def test_the_house_style_leaves_interactive_mode_alone():
    """The first figure in a notebook loads its backend, which switches it on: off again, no figure would be shown."""
    before = mpl.is_interactive()
    try:
        for mode in (True, False, True):
            with suppress(NothingToDraw), house_style():
                mpl.interactive(mode)
                raise NothingToDraw
            assert mpl.is_interactive() == mode
            with house_style():
                assert mpl.is_interactive() == mode
    finally:
        mpl.interactive(before)


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
    need_tokens |= {"design_effect"}
    assert names == {name for name, one in FIGURES.items() if not one.special} - need_tokens
    assert {reason.split(":")[0] for reason in skipped} == need_tokens


def test_a_figure_that_fails_costs_no_other_and_fails_the_tests(data, monkeypatch):
    def fails(data):
        raise KeyError("sites")

    broken = dataclasses.replace(FIGURES["gradient_norm"], draw=fails)
    figures = {"gradient_norm": broken, "reward": FIGURES["reward"]}
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", figures)
    skipped = []
    with pytest.warns(RuntimeWarning, match="a figure failed: gradient_norm: KeyError: 'sites'"):
        assert [figure.name for figure in each_figure(data, skipped)] == ["reward"]
    assert skipped == ["gradient_norm: KeyError: 'sites'"]
    with pytest.raises(RuntimeWarning, match="a figure failed: gradient_norm"):
        list(each_figure(data))


def test_nothing_at_all_to_draw_is_an_error(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0,), steps=1, unfinished=(("grpo", 0),))
    with pytest.raises(NothingToDraw, match=r"nothing to draw yet. None of its runs \(1 begun\) has made a step"):
        draw_all(folder)


def test_unfinished_runs_are_marked(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), steps=6, unfinished=(("grpo", 1),))
    figure = reward(load(folder))
    assert "unfinished runs included as far as they got: grpo/seed1" in figure.caption
    assert figure.frame.set_index("step")["n"].tolist() == [3, 3, 3, 2, 2, 2]


OWN = """
from moe_rl.study.figures.curves import curves, seed_tables
from moe_rl.study.figures.register import Drawing, figure

@figure(title="Rewards.", caption="Mean reward.", needs={"rollouts": ["reward"]})
def my_rewards(data):
    drawn = curves(data, seed_tables(data.rollouts, "step", "reward"), "reward")
    return Drawing(drawn.figure, drawn.frame)
"""


def test_a_figure_of_ones_own_file(folder, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    written = draw_some(folder, [f"{file}:my_rewards"], tmp_path)
    assert {path.name for path in written} >= {"my_rewards.png", "my_rewards.csv"}
    with pytest.raises(ValueError, match=r"mine.py has no @figure 'my_reward'; did you mean 'my_rewards'\?"):
        draw_some(folder, [f"{file}:my_reward"])
    with pytest.raises(TypeError, match=r"study.load|StudyData"):
        FIGURES["reward"](str(folder))


@pytest.mark.parametrize("shift", [-0.9, -2.0])
def test_rewards_below_zero_are_not_cut_off(data, shift):
    study = dataclasses.replace(data, rollouts=data.rollouts.assign(reward=data.rollouts["reward"] + shift))
    figure = reward(study)
    low, high = figure.figure.axes[0].get_ylim()
    assert low <= study.rollouts["reward"].min() < study.rollouts["reward"].max() <= high
    assert reward(data).figure.axes[0].get_ylim()[0] == 0


@pytest.mark.parametrize("arms", [("grpo", "gspo"), ("grpo", "grpo_replay", "gspo")])
def test_a_nearly_constant_curve_does_not_lie_on_the_upper_end_of_an_axis_from_zero(tmp_path, arms):
    study = load(write_study(tmp_path / "s", arms, (0, 1), 4, sequences=2))
    tables = seed_tables(study.updates.assign(flat=5.66 + 1e-3 * study.updates["step"]), "step", "flat")
    drawn = curves(study, tables, "flat", ylim=(0, None))
    for ax in drawn.axes:
        assert ax.get_ylim()[0] == 0 and 5.66 * 1.04 < ax.get_ylim()[1] < 5.66 * 1.1


def test_the_interval_of_a_caption_is_that_of_the_values_not_of_the_folders(tmp_path):
    arms, mixed = ("grpo", "gspo"), "95 % Student from 6 on, below that the range of the seeds"
    folder = write_study(tmp_path / "s", arms, tuple(range(6)), 4, sequences=2, unfinished=(("gspo", 5),))
    figure = FIGURES["final_reward"](load(folder))
    assert "n = 6 seeds per arm; intervals, where" in figure.caption and mixed in figure.caption, "five pairs: a range"
    assert "paired by seed over finished runs (pairs: 5)" in figure.own
    under = "n = 6 seeds per arm; bar: 95 % Student from 6 seeds on, else their range"
    assert figure.figure.get_supxlabel() == under
    band = reward(load(folder))  # the band of GSPO is a range from step 2 on
    assert mixed in band.caption and band.figure.get_supxlabel() == under.replace("bar", "band")
    (folder / "gspo" / "seed5" / "metrics.jsonl").write_text("")
    figure = FIGURES["final_reward"](load(folder))
    assert "n = 5 seeds per arm (6 for GRPO); " in figure.caption and mixed in figure.caption
    (folder / "grpo" / "seed5" / "metrics.jsonl").write_text("")
    assert (
        "n = 5 seeds per arm; bars and bands: the range of the 5 seeds" in FIGURES["final_reward"](load(folder)).caption
    )
    whole = load(write_study(tmp_path / "w", arms, tuple(range(6)), 4, sequences=2))
    for name in ("final_reward", "reward"):
        assert "n = 6 seeds per arm; intervals: 95 % Student over 6 seeds." in FIGURES[name](whole).caption


def test_final_rewards_are_called_held_out_where_the_study_declares_that(data):
    def axes(study):
        return [ax.get_xlabel() for ax in FIGURES["final_reward"](study).figure.axes if ax.get_xlabel()]

    assert axes(data) == ["final reward", "paired difference of final reward"]
    declared = dataclasses.replace(data, config={**data.config, "outcome": "held_out"})
    assert axes(declared) == ["held-out reward", "paired difference of held-out reward"]
