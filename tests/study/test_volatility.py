"""Reward against volatility: the committed tables, each number where its arm and condition say."""

import runpy
from pathlib import Path

import pandas as pd
import pytest

from moe_rl.study.figures.over_studies import volatility_figure

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "analysis" / "volatility.py"))


def test_the_table_holds_the_committed_numbers(script):
    table = script["volatility_table"]().set_index(["study", "arm"])
    assert set(table["source"]) == set(script["SOURCES"]) and table.notna().all(axis=None)
    for study, arm, measured in (
        ("replay_vs_gspo", "gspo_noise02", "grpo_noise02"),
        ("levers_router", "grpo_replay_full", "grpo_full"),
        ("minibatches", "grpo_n16", "grpo_n16"),
    ):
        finals = pd.read_csv(ROOT / f"docs/results/{study}/final_reward.csv").set_index("arm")
        shares = pd.read_csv(ROOT / f"docs/results/{study}/volatility.csv").set_index("arm")
        row = table.loc[[(study, arm)]].iloc[0]
        assert row["final"] == finals.loc[arm, "final"] and row["n"] == finals.loc[arm, "n"]
        assert row["slots_rerouted"] == shares.loc[measured, "slots_rerouted"]
    engine = table.loc[[("dppo_mismatch", "dppo_int4")]].iloc[0]["slots_rerouted"]
    assert engine == pytest.approx(0.042, abs=0.001), "of the engine, not of the update forward, where it is 0.007"


def test_each_source_is_a_panel_and_each_method_stands_at_its_own_reward(script):
    table = script["volatility_table"]()
    made = volatility_figure(table)
    axes = [ax for ax in made.figure.axes if ax.get_visible()]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in axes] == list(table["source"].unique())
    drawn = {line.get_label(): line for line in axes[0].lines}
    natural = table[(table["study"] == "replay_vs_gspo") & (table["method"] == "gspo")]
    assert list(drawn["GSPO"].get_ydata()) == list(natural["final"])
    assert list(drawn["GSPO"].get_xdata()) == pytest.approx(list(100 * natural["slots_rerouted"]))


def test_no_two_labels_have_one_colour_and_marker_and_methods_differ_in_colour(script):
    table = script["volatility_table"]()
    lines = {line.get_label(): line for ax in volatility_figure(table).figure.axes for line in ax.lines}
    known = table.drop_duplicates("label").set_index("label")["method"]
    assert set(known.index) <= set(lines)
    assert len({(lines[label].get_color(), lines[label].get_marker()) for label in known.index}) == len(known)
    assert len({lines[label].get_color() for label in known.index}) == known.nunique()


def test_a_star_stands_where_the_reward_is_held_out(script):
    for source, rows in script["volatility_table"]().groupby("source"):
        finals = [pd.read_csv(ROOT / f"docs/results/{study}/final_reward.csv") for study in rows["study"].unique()]
        assert ("*" in source) == any("held out" in set(final.get("measured", ())) for final in finals)
