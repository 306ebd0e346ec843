"""What methods give back, by cause: the committed comparisons, each with the sign of method less GRPO."""

import runpy
import shutil
from io import BytesIO
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.image import imread

from moe_rl.study.figures.over_studies import claims_figure, cures_figure
from moe_rl.study.published import published_differences, published_repetitions, repetitions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "analysis" / "cures.py"))


@pytest.mark.parametrize(
    ("question", "name", "drawn"), [("q4", "cures", "CAUSES"), ("q8", "claims", "CLAIMS"), ("q4", "tasks", "BIAS")]
)
def test_a_questions_list_has_the_studies_that_its_figure_draws(question, name, drawn):
    listed = yaml.safe_load((ROOT / "experiments" / "findings" / f"{question}.yaml").read_text())["studies"]
    cells = runpy.run_path(str(ROOT / "analysis" / f"{name}.py"))[drawn]
    assert {study for of in cells.values() for study, *_ in of.values()} <= set(listed)


def test_a_cause_has_one_name_in_both_figures(script):
    assert list(script["CAUSES"]) == list(runpy.run_path(str(ROOT / "analysis" / "tasks.py"))["COSTS"])


def test_comparisons_have_the_sign_of_method_less_grpo():
    table = pd.read_csv(ROOT / "docs/results/methods_router/comparisons.csv").set_index(["arm", "other"])
    declared = table.loc[("grpo", "grpo_tenth")]
    turned, *_ = published_repetitions(RESULTS, "methods_router", "grpo_tenth", "grpo")
    assert declared["verdict"] == "lower" and turned["verdict"] == "higher"
    assert turned["difference"] == -declared["difference"] and turned["low"] == -declared["high"]
    as_declared, *_ = published_repetitions(RESULTS, "methods_router", "gmpo", "grpo")
    assert as_declared["low"] == table.loc[("gmpo", "grpo"), "low"]


def test_a_study_that_was_run_again_has_its_repetitions_once_each():
    found = published_repetitions(RESULTS, "replay_vs_gspo", "grpo", "grpo_replay")
    assert [one["rounding"] for one in found] == ["native", "avx2", "grouped_mm", "intel"]
    assert [one["n"] for one in found] == [9, 9, 9, 9], "with seven pairs no difference could be resolved"
    rows = pd.read_csv(ROOT / "docs/results/replay_vs_gspo_intel/roundings.csv")
    declared = rows.set_index(["arm", "other", "rounding"]).loc[("grpo_replay", "grpo", "intel")]
    assert (found[3]["low"], found[3]["high"]) == (-declared["high"], -declared["low"])


def test_a_rounding_of_a_study_counts_once_whichever_folders_name_it(tmp_path):
    name, again = "methods_noise", tmp_path / "methods_noise_mine"
    for folder in (tmp_path / name, again):
        shutil.copytree(RESULTS / name, folder)
    table = pd.read_csv(again / "roundings.csv")
    mine = table[table["rounding"] == "native"].assign(rounding="mine")
    pd.concat([table, mine]).to_csv(again / "roundings.csv", index=False)
    names = [(part["folder"].iloc[0], part["rounding"].iloc[0]) for part in repetitions(tmp_path)]
    assert names == [(name, "avx2"), (again.name, "mine")]


def test_each_cause_is_a_panel_and_marks_are_filled_where_the_verdict_tells(script):
    table = script["cures_table"]()
    assert set(table["cause"]) == set(script["CAUSES"])
    assert (table.loc[table["row"] == script["GONE"], "difference"] > 0).all(), "they are causes of a loss"
    made = cures_figure(table)
    noise = made.figure.axes[0]
    rows = table[table["cause"] == (noise.get_title(loc="left") or noise.get_title())]
    marks = noise.collections[-1]
    assert [x for x, _ in marks.get_offsets()] == list(rows["difference"])
    places = marks.get_offsets()[:, 1]
    assert len(set(places)) == len(rows) and list(places.round()) == list(rows["row"].cat.codes), "repetitions apart"
    filled = [tuple(colour[:3]) != (1, 1, 1) for colour in marks.get_facecolors()]
    assert filled == list(rows["verdict"].isin(["higher", "lower"]))


def test_every_task_has_a_row_below_every_comparison():
    figures = runpy.run_path(str(ROOT / "analysis" / "tasks.py"))["FIGURES"]
    for name, (title, declared) in figures.items():
        table = published_differences(RESULTS, declared)
        below = table.groupby("claim", sort=False)["comparison"].unique().map(list)
        assert below.to_dict() == {claim: list(tasks) for claim, tasks in declared.items()}, "all are committed"
        made = claims_figure(table, name, title)
        ax = made.figure.axes[0]
        assert made.name == name and ax.collections[-1].get_offsets()[:, 0].tolist() == table["difference"].tolist()
        assert len(ax.get_yticklabels()) == len(below) + below.map(len).sum()


def test_each_statement_has_its_comparisons_below_it_and_every_repetition_a_mark():
    claims = runpy.run_path(str(ROOT / "analysis" / "claims.py"))
    table = published_differences(RESULTS, claims["CLAIMS"])
    for claim, comparisons in claims["CLAIMS"].items():
        assert list(table.loc[table["claim"] == claim, "comparison"].unique()) == list(comparisons), "all are committed"
    assert table.groupby("comparison").size().min() >= 2, "each was run twice"
    ax = claims_figure(table).figure.axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    marks = ax.collections[-1].get_offsets()
    assert [x for x, _ in marks] == list(table["difference"])
    assert [labels[round(y)] for _, y in marks] == list(table["comparison"])


@pytest.mark.parametrize("name", ["old_token_tasks", "many_update_tasks", "ceiling_tasks", "int4_tasks"])
def test_the_longest_heading_ends_before_the_edge_of_the_picture(name):
    title, declared = runpy.run_path(str(ROOT / "analysis" / "tasks.py"))["FIGURES"][name]
    picture = imread(BytesIO(claims_figure(published_differences(RESULTS, declared), name, title).render("png")))
    assert (picture[:, :5, :3] == 1).all(), "bold letters begin at the very edge, or are cut off"


def test_a_star_stands_at_the_statements_comparisons_of_held_out_reward():
    for comparisons in runpy.run_path(str(ROOT / "analysis" / "claims.py"))["CLAIMS"].values():
        for name, (study, *_) in comparisons.items():
            measured = pd.read_csv(RESULTS / study / "final_reward.csv").get("measured", pd.Series(dtype=str))
            assert name.endswith("*") == (measured == "held out").any(), name


def test_pictures_say_what_bars_filled_marks_and_grey_are(script):
    bars, filled = "bar: 95 % interval over seeds", "; filled: higher or lower by the rules of its study"
    table = script["cures_table"]()
    assert cures_figure(table).figure.get_supxlabel().endswith(f"\n{bars}{filled}")
    told = table.rename(columns={"cause": "claim", "row": "comparison"})
    assert claims_figure(told).figure.get_supxlabel() == f"{bars}{filled}; grey: within 0.05"
    untold = told.assign(verdict="")
    assert claims_figure(untold, interest=0.02).figure.get_supxlabel() == f"{bars}; grey: within 0.02"
