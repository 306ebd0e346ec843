"""The noise floor by site, by position and as histograms: pooled by hand, drawn beside rates, absent in old runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from synthetic import FLOORS, SITES, write_study

from moe_rl.study import load
from moe_rl.study.figures import (
    change_by_position,
    dose_response,
    each_figure,
    expert_change,
    expert_change_by_site,
    flips_per_token,
    variance_by_flips,
)
from moe_rl.study.floors import floor_by_position, floor_by_site, floor_histogram, floor_variance


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    return load(write_study(folder, ("grpo", "gspo", "grpo_noise"), (0, 1), steps=7, sequences=12, tokens_every=3))


@pytest.fixture(scope="module")
def measured(plain):
    return replace(plain, floors=pd.DataFrame(FLOORS))


def test_floors_pool_runs_and_take_the_largest_of_the_own_variants(measured):
    by_site = floor_by_site(measured, SITES)
    # bf16: (8 + 8) / (200 + 600), (4 + 0) / 800, (0 + 4) / 800, (2 + 2) / 800; own: batch 2/200, experts 4/200
    assert by_site["bf16"].tolist() == pytest.approx([0.02, 0.005, 0.005, 0.005])
    assert by_site["own"].tolist() == pytest.approx([0.01, 0.02, 0, 0])
    by_position = floor_by_position(measured)
    assert by_position["bf16"].tolist() == pytest.approx([8 / 760, 14 / 760, 3 / 80])
    assert by_position["own"].tolist() == pytest.approx([2 / 160, 4 / 160, 0])
    # pairs of positions; the last bin has 80 / 4 = 20 tokens
    pairs = floor_by_position(measured, width=2)
    assert pairs.index.tolist() == [0.5, 2.5] and pairs["bf16"].tolist() == pytest.approx([22 / 1520, 3 / 80])
    assert floor_by_position(measured, width=2, fewest=21).index.tolist() == [0.5]
    flips = floor_histogram(measured, "flips_histogram")
    assert flips["bf16"].tolist() == pytest.approx([380 / 400, 16 / 400, 3 / 400, 1 / 400, 0])
    assert flips["own"].tolist() == pytest.approx([0.97, 0.02, 0.01, 0, 0]), "experts changes more than batch"
    variance = floor_variance(measured)
    assert variance.loc["own", "var_token"] == pytest.approx(3e-14)
    assert variance.loc["bf16", "var_sequence"] == pytest.approx(2e-5)  # mean of 1e-5 and 3e-5


def test_a_floor_has_the_n_of_the_runs_that_measured_it(plain):
    figure = expert_change(replace(plain, floors=pd.DataFrame(FLOORS[:5])))  # one of six runs with bf16, two without
    counts = figure.frame.dropna(subset=["condition"]).groupby("condition")["n"].unique()
    assert counts["floor, own"].tolist() == [2] and counts["floor, bf16"].tolist() == [1]


def test_arms_of_fewer_layers_have_their_own_sites_on_the_same_axis(measured):
    probes = measured.probes.copy()
    for name in ("site_names", "site_slots_changed", "site_slots"):
        probes[name] = [v[:2] if a == "grpo" else v for v, a in zip(probes[name], probes["arm"], strict=True)]
    figure = expert_change_by_site(replace(measured, probes=probes))
    found, whole = (
        one.frame.dropna(subset=["update"]).set_index(["arm", "update", "site"])["rate"]
        for one in (figure, expert_change_by_site(measured))
    )
    assert set(whole.index) - set(found.index) == {key for key in whole.index if key[0] == "grpo" and key[2] >= 2}
    np.testing.assert_array_equal(found, whole[found.index])
    shallow, deep = (np.asarray(ax.images[0].get_array().filled(np.nan)) for ax in figure.figure.axes[:2])
    assert shallow.shape == deep.shape and np.isnan(shallow[2:]).all() and np.isfinite(shallow[:2]).all()


def test_the_heat_map_has_the_floor_once_on_the_same_scale_and_apart(measured):
    figure = expert_change_by_site(measured)
    *arms, floor = [ax for ax in figure.figure.axes if ax.images]
    assert len(arms) == 3 and floor.get_title(loc="left") == "Noise floor:\nequal weights"
    assert [tick.get_text() for tick in floor.get_xticklabels()] == ["own", "bf16"]
    np.testing.assert_allclose(floor.images[0].get_array(), [[1, 2], [2, 0.5], [0, 0.5], [0, 0.5]])
    assert {ax.images[0].get_clim() for ax in (*arms, floor)} == {arms[0].images[0].get_clim()}
    assert floor.spines["left"].get_visible() and not arms[0].spines["left"].get_visible()
    frame = figure.frame.set_index(["arm", "site"])["rate"]
    assert frame["floor, bf16"][0] == pytest.approx(0.02) and frame["floor, own"][1] == pytest.approx(0.02)
    assert "noise floor" in figure.caption and "not recorded" not in figure.caption


def test_flips_and_positions_carry_their_floor(measured):
    figure = flips_per_token(measured)
    frame = figure.frame.set_index(["histogram", "arm", "value"])["share"]
    assert frame["flips_histogram", "floor, bf16", 1] == pytest.approx(16 / 400)
    assert frame["deviation_histogram", "floor, own", 1] == pytest.approx(4 / 400)
    marks = [c for c in figure.figure.axes[0].collections if isinstance(c, LineCollection)]
    levels = {round(float(segment[0, 1]), 6) for mark in marks for segment in mark.get_segments()}
    assert levels == {0.02, 0.01, 0.04, 0.0075, 0.0025}, "of 1 and more flips; 0 flips are no change"
    # 5 of 400 slots... as one number each: own tokens 3 / 100 (experts), bf16 tokens 20 / 400
    assert "3 % of tokens; a bf16 copy" in figure.caption and "5 % of tokens" in figure.caption
    figure = change_by_position(measured)
    floor = figure.frame[figure.frame["condition"] == "floor, bf16"].set_index("position")["mean"]
    assert floor.to_dict() == pytest.approx({0.0: 8 / 760, 1.0: 14 / 760}), "position 2 has 20 tokens, fewer than 30"
    lines = {line.get_label(): line for line in figure.figure.axes[0].lines}
    assert lines["equal weights: bf16 copy"].get_ydata() == pytest.approx([800 / 760, 1400 / 760])
    assert lines["equal weights: own arithmetic"].get_ydata() == pytest.approx([1.25, 2.5])
    assert figure.figure.axes[0].get_ylim()[1] > 1400 / 760
    still = replace(measured)
    still.__dict__["tokens"] = measured.tokens.assign(flips=0)
    assert change_by_position(still).figure.axes[0].get_ylim()[1] > 2.5, "a floor above what changed is drawn, too"


def test_a_dose_and_a_variance_have_their_floor_where_the_axis_shows_it(measured, monkeypatch):
    monkeypatch.setattr("moe_rl.study.figures.gallery.dose_response.FEWEST_DOSES", 2)
    figure = dose_response(measured)
    floor = figure.frame[figure.frame["quantity"] == "floor"].set_index("method")["dose"]
    assert floor.to_dict() == pytest.approx({"own": 100 * 4 / 800, "bf16": 100 * 28 / 3200})
    drawn = {line.get_label(): line.get_xdata()[0] for line in figure.figure.axes[0].lines}
    assert drawn["equal weights: bf16 copy"] == pytest.approx(0.875) and "noise floor" in figure.caption
    figure = variance_by_flips(measured)
    low = figure.figure.axes[0].get_ylim()[0]
    drawn = {line.get_label() for line in figure.figure.axes[0].lines}
    assert ("equal weights: bf16 copy" in drawn) == (low <= 2e-4)
    assert low > 3e-14 and "equal weights: own arithmetic" not in drawn, "an axis is not stretched to it"
    assert "own arithmetic (repeated, other batch shapes, other experts implementation) 3e-14" in figure.caption


def test_bins_of_few_distinct_tokens_are_not_drawn(plain):
    figure = variance_by_flips(plain)
    bins = figure.tables["bins"].query("arm == 'grpo'")
    frame = bins.groupby("flips").agg({"tokens": "sum", "rows": "sum", "drawn": "first"})
    tokens = plain.tokens.query("arm == 'grpo'").sort_values(["seed", "step", "update", "seq", "pos"])
    before = tokens.groupby(["seed", "step", "update", "seq"])["flips"].shift(1)
    found = {
        n: {tuple(key) for key in tokens[before == n][["seed", "step", "seq", "pos"]].to_numpy()} for n in frame.index
    }
    assert frame["tokens"].to_dict() == {n: len(keys) for n, keys in found.items()}
    assert frame["rows"].sum() == before.notna().sum() > 3 * frame.loc[0, "tokens"], "four updates of one token are one"
    assert frame["drawn"].to_dict() == {n: len(keys) >= 50 for n, keys in found.items()}
    assert not frame["drawn"].all(), "the synthetic study has a rare number of flips"


def test_runs_of_older_versions_are_drawn_without_and_say_so(plain):
    totals = ["arm", "seed", "step", "variant", "slots_changed", "slots", "sites_changed", "sites", "tokens_changed"]
    older = replace(plain, floors=pd.DataFrame(FLOORS)[[*totals, "tokens", "gap_mean", "gap_max", "var_token"]])
    figures = {figure.name: figure for figure in each_figure(older)}
    assert "Noise floor by site: not recorded." in figures["expert_change_by_site"].caption
    assert "Noise floor by position: not recorded." in figures["change_by_position"].caption
    assert "Noise floor, equal weights" in figures["flips_per_token"].caption, "one number was recorded"
    assert not figures["expert_change_by_site"].frame["arm"].str.startswith("floor").any()
    never = {figure.name: figure for figure in each_figure(plain)}
    assert "Noise floor of flips: not recorded." in never["flips_per_token"].caption
    assert set(never) == set(figures)
    resumed = replace(plain, floors=pd.DataFrame([*FLOORS, {name: FLOORS[0][name] for name in totals}]))
    assert floor_by_site(resumed, SITES).equals(floor_by_site(replace(plain, floors=pd.DataFrame(FLOORS)), SITES))
    assert floor_by_site(resumed, SITES[:2]).empty, "another model's sites are not these"
