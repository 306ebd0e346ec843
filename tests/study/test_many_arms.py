"""Figures of few arms and of many: every word can be read, every arm is found."""

from dataclasses import replace
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from sweeps import mostly_swept
from synthetic import ARMS, FLOORS, write_study

from moe_rl.study import load
from moe_rl.study.figures import FIGURES
from moe_rl.study.figures.layout import MANY, many, short_label
from moe_rl.study.figures.rows import LETTERS, Column, Dots, arm_rows
from moe_rl.study.figures.saving import house_style
from moe_rl.study.figures.style import log_y, look_of

LABELS = (
    "GSPO-token, process supervision",
    "GRPO + geometric rejection",
    "RSPO, weight after the clip",
    "SAPO",
    "DAPO",
)
STUDIES = ("crowd", "wide", "doses", "pair", "brief", "single", "two", "wordy", "wordy_crowd")
DRAWN = [name for name, figure in FIGURES.items() if not figure.special]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Fourteen arms without noise, of which some have long labels; two seeds."""
    more = {}
    for i in range(11):
        label = f"{LABELS[i % len(LABELS)]}{'' if i < len(LABELS) else f' {i}'}"
        method = {"objective": ("rspo", "sapo", "dapo")[i % 3], "replay": "none", "noise": 0.0}
        more[f"arm_{i}"] = {"label": label, "method": method}, 0.65 + 0.02 * i
    return small(tmp_path_factory, more)


@pytest.fixture(scope="module")
def wide(crowd):
    """The same with numbers that need room: long ones on short axes, up to ten flips of a token, a noise floor."""
    arm = pd.factorize(crowd.rollouts["arm"])[0]
    lengths = crowd.rollouts.assign(response_length=24.15 + 0.065 * arm)
    study = replace(crowd, rollouts=lengths, floors=pd.DataFrame(FLOORS))
    study.__dict__["tokens"] = crowd.tokens.assign(flips=crowd.tokens["flips"] * 3)  # what is read once and kept
    return study


@pytest.fixture(scope="module")
def doses(tmp_path_factory):
    """Three arms under each of two doses, as the main study has them."""
    more = {
        f"{arm}_{noise}": ({**ARMS[arm], "method": {**ARMS[arm]["method"], "noise": noise}}, 0.8)
        for noise in (0.02, 0.05)
        for arm in ("grpo", "gspo")
    }
    return small(tmp_path_factory, more)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two arms of one method, which get one row of panels."""
    return small(tmp_path_factory, {"slow": ({**ARMS["grpo"], "label": "GRPO, slow"}, 0.8)}, ("grpo",))


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """Six arms of short names beside a noise floor, whose rows have longer ones."""
    more = {f"a{i}": ({**ARMS["grpo"], "label": f"a{i}"}, 0.8) for i in range(5)}
    return replace(small(tmp_path_factory, more, ("grpo",)), floors=pd.DataFrame(FLOORS))


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    """Three arms whose labels say all that they change, and differ at their ends."""
    said = "GRPO, learning rate 0.0005 with a warmup of 20 updates, clip range 0.2 to 0.27, penalty on the KL of 0.01"
    kinds = ("grpo", "gspo", "sapo")
    more = {f"a{k}": ({"label": f"{said}, number {k}", "method": {**ARMS["grpo"]["method"], "objective": k}}, 0.8)
            for k in kinds}  # fmt: skip
    return small(tmp_path_factory, more, ())


@pytest.fixture(scope="module")
def wordy_crowd(tmp_path_factory):
    """Seven of them."""
    said = "GRPO, learning rate 0.0005 with a warmup of 20 updates, clip range 0.2 to 0.27, penalty on the KL of 0.01"
    return small(
        tmp_path_factory, {f"a{k}": ({**ARMS["grpo"], "label": f"{said}, arm {k}"}, 0.8) for k in range(7)}, ()
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two arms, side by side in a narrow figure."""
    return small(tmp_path_factory, {}, ("grpo", "gspo"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One arm."""
    return small(tmp_path_factory, {}, ("grpo",))


def small(tmp_path_factory, more, others=("grpo", "grpo_replay", "gspo")):
    arms = (*others, *more)
    folder = tmp_path_factory.mktemp("runs") / "small"
    return load(write_study(folder, arms, (0, 1), 6, sequences=8, tokens_every=3, more=more))


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("study", mostly_swept(STUDIES, ("wide", "doses", "wordy_crowd")))
def test_words_lie_inside_the_figure_and_not_on_one_another(study, name, request):
    _readable(FIGURES[name](request.getfixturevalue(study)))


def test_numbers_of_many_digits_stand_apart_below_a_narrow_axis(brief):
    """Three of 0.3975, 0.4000, 0.4025 would have room in all, and none between them."""
    ends = pd.DataFrame([[0.39609, 0.40469]] * len(brief.arms), index=brief.arms.index)
    drawn = arm_rows(brief, [Column("", [Dots(ends)])], beside=3.44)
    numbers = sorted((box.x0, box.x1) for words, box in _words(drawn.figure) if words.startswith("0."))
    assert min((b - a for (_, a), (b, _) in pairwise(numbers)), default=9.0) > 4


def test_the_number_of_seeds_below_a_tall_figure_lies_on_nothing(crowd):
    arms = [str(arm) for arm in crowd.arms.index]
    study = replace(crowd, config={**crowd.config, "comparisons": [[arm, arms[0]] for arm in arms[1:]]})
    study.arms["label"] = [f"GRPO + Routing Replay, learning rate {i}e-4" for i in range(len(arms))]
    figure = FIGURES["final_reward"](study)
    assert figure.figure.get_figheight() > 7
    boxes = dict(_words(figure.figure))
    (seeds,) = (box for words, box in boxes.items() if words.startswith("n = "))
    label = boxes["paired difference of final reward"]
    assert seeds.y1 < label.y0 + 1


def _readable(figure):
    """No word is cut off, none lies on another."""
    name, boxes = figure.name, _words(figure.figure)
    assert len(boxes) > 5
    page = figure.figure.bbox
    for words, box in boxes:
        inside = page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1 and page.y0 - 1 <= box.y0 and box.y1 <= page.y1 + 1
        assert inside, f"{name}: {words!r} is cut off"
    for (one, a), (other, b) in combinations(boxes, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide < 1.5 or high < 2.5, f"{name}: {one!r} lies on {other!r}"


def _words(figure):
    """What is written, and where."""
    canvas = FigureCanvasAgg(figure)
    with house_style():
        figure.draw_without_rendering()  # where places are found, as when it is saved
    renderer = canvas.get_renderer()
    hidden = set()  # tick labels beyond the axis are kept by matplotlib, and not drawn
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        drawn = {id(label) for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
        ticks = [label for tick in (*axis.majorTicks, *axis.minorTicks) for label in (tick.label1, tick.label2)]
        hidden |= {id(label) for label in ticks} - drawn
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if id(text) not in hidden]


def test_many_arms_have_a_panel_each_before_all_others_in_grey(crowd):
    assert many(crowd) and len(crowd.arms) > 2 * MANY
    figure = FIGURES["reward"](crowd)
    panels = figure.figure.axes
    assert [ax.get_title(loc="left") for ax in panels] == [short_label(crowd, str(arm)) for arm in crowd.arms.index]
    assert not figure.figure.legends, "titles name the arms"
    for ax, method in zip(panels, crowd.arms["method"], strict=True):
        (line,) = [line for line in ax.lines if line.get_linewidth() > 1]
        assert line.get_color() == look_of(method).colour
        (grey,) = ax.images
        assert 0.005 < (np.asarray(grey.get_array())[..., 3] > 0).mean() < 0.6
    assert {ax.get_ylim() for ax in panels} == {panels[0].get_ylim()}, "one scale for all"


def test_rows_of_many_arms_are_in_the_order_of_the_study_and_rewards_are_sorted(crowd):
    labels = [str(label) for label in crowd.arms["label"]]
    rows = FIGURES["expert_change"](crowd).figure.axes
    ticks = [tick.get_text() for tick in rows[0].get_yticklabels()]
    assert [" ".join(text.split("\n")) for text in ticks] == labels and len(rows) == 3
    assert max(len(line) for text in ticks for line in text.split("\n")) <= LETTERS, "longer ones in two lines"
    rewards = FIGURES["final_reward"](crowd)
    means = rewards.frame.set_index("label")["final"]
    shown = [tick.get_text() for tick in rewards.figure.axes[0].get_yticklabels()]
    assert [" ".join(text.split("\n")) for text in shown] == list(means.sort_values(ascending=False).index)
    assert "no ranking" in rewards.caption


def test_numbers_at_the_ends_of_neighbouring_columns_stand_apart(brief):
    arms = brief.arms.index
    logarithmic = pd.DataFrame(np.geomspace(0.0019, 0.045, 2 * len(arms)).reshape(-1, 2), index=arms)
    linear = pd.DataFrame(np.linspace(0.1, 2.6, 2 * len(arms)).reshape(-1, 2), index=arms)
    drawn = arm_rows(brief, [Column("one", [Dots(logarithmic)], log=True), Column("other", [Dots(linear)])])
    drawn.axes[1].set_xlim(0, 2.7)  # a number at its very end, beside the last of the other
    numbers = sorted((box.x0, box.x1) for words, box in _words(drawn.figure) if words.replace(".", "").isdigit())
    assert len(numbers) >= 6 and min(b - a for (_, a), (b, _) in pairwise(numbers)) > 3


def test_comparisons_of_two_conditions_lie_inside_however_they_are_declared(doses):
    pairs = [["gspo", "grpo"], ["gspo_0.02", "grpo_0.02"], ["grpo_replay", "grpo"], ["gspo_0.05", "grpo_0.05"]]
    pairs += [["grpo_replay", "gspo"], ["grpo_0.02", "gspo_0.05"]]
    figure = FIGURES["final_reward"](replace(doses, config={**doses.config, "comparisons": pairs})).figure
    ticks = [ax.get_yticks() for ax in figure.axes if len(ax.get_yticks()) == len(pairs)]
    assert ticks and all(max(ax.get_ylim()) > max(ax.get_yticks()) for ax in figure.axes if len(ax.get_yticks()))


def test_the_label_of_a_row_of_panels_ends_below_the_legend_above_it(pair):
    study = replace(pair, floors=pd.DataFrame(FLOORS))
    study.__dict__["tokens"] = pair.tokens
    figure = FIGURES["change_by_position"](study)
    (label,) = [box for words, box in _words(figure.figure) if words.startswith("sites changed")]
    assert label.y1 < figure.figure.legends[0].get_window_extent().y0 + 2, "its box is a little higher than its words"


@pytest.mark.parametrize(("low", "high"), [(0.14, 7.3), (0.014, 0.69), (0.15, 7.3), (1.1, 109), (0.9, 91)])
def test_a_log_axis_of_less_than_two_decades_has_two_numbers(low, high):
    figure = Figure(figsize=(1.5, 1.3))
    ax = figure.subplots()
    ax.plot([1, 2], [low, high])
    log_y(ax, low, high)
    figure.draw_without_rendering()
    assert len([y for y in ax.get_yticks() if low <= y <= high]) >= 2


def test_a_tail_says_of_which_axis_it_is_the_logarithm(pair):
    tail = FIGURES["tail_fraction"](pair)
    ax = tail.figure.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "log") and "log-log" not in tail.caption


def test_a_constant_quantity_is_told_and_not_drawn(crowd, doses):
    constant = replace(doses, rollouts=doses.rollouts.assign(response_length=25.0))
    figure = FIGURES["dynamics"](constant)
    assert "Not drawn: response length tokens, which stays at 25." in figure.caption
    assert not any("length" in ax.get_ylabel() for ax in figure.figure.axes)
    changing = doses.rollouts.assign(response_length=25.0 + doses.rollouts["step"])
    drawn = FIGURES["dynamics"](replace(doses, rollouts=changing))
    assert any("length" in ax.get_ylabel() for ax in drawn.figure.axes)


def test_drawing_is_alike_under_other_settings_of_matplotlib(doses):
    plain = FIGURES["gradient_norm"](doses).render("svg")
    with matplotlib.rc_context({"font.size": 20, "figure.constrained_layout.use": True, "axes.grid": False}):
        assert FIGURES["gradient_norm"](doses).render("svg") == plain


def test_rows_on_a_log_axis_are_geometric_means_as_their_caption_says(pair):
    arms = pair.arms.index
    tens = pd.DataFrame([[0.01, 1.0], [0.0, 0.1]], index=arms)
    drawn = arm_rows(pair, [Column("", [Dots(tens)], log=True)])
    means = [x for dots in drawn.axes[0].collections[2:] for x in np.asarray(dots.get_offsets())[:, 0]]
    assert means == pytest.approx([0.1, 0.1]), "of 0.01 and 1; and of 0.1, for 0 has no place"
    assert list(drawn.frame["mean"]) == pytest.approx([0.1, 0.1])
    assert drawn.frame.loc[0, ["low", "high"]].tolist() == pytest.approx([0.01, 1.0])


def test_labels_that_differ_at_their_ends_differ_in_rows(wordy):
    ticks = [tick.get_text() for tick in FIGURES["final_reward"](wordy).figure.axes[0].get_yticklabels()]
    assert len(set(ticks)) == 3 and all("\n" in text and text.endswith(("grpo", "gspo", "sapo")) for text in ticks)


def test_the_last_steps_of_a_row_are_those_of_each_run(crowd):
    """A run that stopped earlier is in the mean of the last five steps, with its own."""
    rollouts = crowd.rollouts.assign(response_length=10.0 * crowd.rollouts["seed"] + crowd.rollouts["step"])
    short = (rollouts["arm"] == "grpo") & (rollouts["seed"] == 1)
    figure = FIGURES["dynamics"](replace(crowd, rollouts=rollouts[~(short & (rollouts["step"] > 0))]))
    column = next(ax for ax in figure.figure.axes if "response length" in ax.get_title(loc="left"))
    means = np.concatenate([c.get_offsets()[:, 0] for c in column.collections if len(c.get_offsets()) == 14])
    assert means[0] == pytest.approx((3.0 + 10.0) / 2), "steps 1 to 5 of seed 0, step 0 of seed 1"


def test_what_is_not_drawn_of_many_arms_is_not_said(crowd, data):
    assert (
        "Thin lines" not in FIGURES["reward"](crowd).caption and "is drawn thin" not in FIGURES["reward"](crowd).caption
    )
    assert "Thin lines" in FIGURES["reward"](data).caption
    assert all("Thin lines" not in FIGURES[name](data).caption for name in ("dynamics", "divergence"))
    bands, rows = FIGURES["log_ratio_bands"](data), FIGURES["log_ratio_bands"](crowd)
    assert "Median over seeds; log axis" in bands.caption and "log axis" not in rows.caption
    assert "mean over the stored steps of a seed, then over seeds" in rows.caption


def test_axes_that_share_a_scale_are_logarithmic_if_any_of_them_has_a_value_above_0():
    first, second = Figure().subplots(1, 2, sharey=True)
    first.plot([0, 1], [0, 0])
    second.plot([0, 1], [1e-6, 1e-2])
    log_y(first)
    assert first.get_yscale() == second.get_yscale() == "log"
