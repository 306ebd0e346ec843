"""Rows of two engines: read as a table, drawn where they are there, absent from every other study."""

import pytest
from synthetic import add_rows, write_study

from moe_rl.study.data import StudyDataError, load
from moe_rl.study.figures import FIGURES, each_figure, engine_mismatch
from moe_rl.study.figures.gallery.engine_mismatch import engine_table
from moe_rl.study.figures.style import NothingToDraw


def add_engines(folder, **changes):
    for run in folder.glob("*/seed*"):
        rows = []
        for step in (0, 1):
            both = {"kind": "engine", "step": step, "update": 0, "k3": 1e-4, "extreme_fraction": 0.0}
            live = {"pair": "engines", "var_token": 1e-3 * (1 + step), "var_sequence": 4e-5}
            live |= {"slots_changed": 3, "slots": 60}
            live |= {"sites_changed": 3, "sites": 30, "tokens_changed": 2, "tokens": 10}
            forced = {"pair": "engines_replayed", "var_token": 2e-5, "var_sequence": 0.0}
            rows += [both | row | changes for row in (live, forced)]
        add_rows(run, *rows)


@pytest.fixture
def folder(tmp_path):
    return write_study(tmp_path / "two", arms=("grpo", "gspo"), seeds=(0, 1), steps=2, tokens_every=10**9)


def test_the_table_is_means_over_steps_and_shares_over_the_first_update(folder):
    add_engines(folder)
    data = load(folder)
    assert not data.notes and len(data.engines) == 2 * 2 * 2 * 2
    table = engine_table(data).set_index(["arm", "seed", "routing"])
    row = table.loc["gspo", 1, "live"]
    assert row["var_token"] == pytest.approx(1.5e-3)  # (1e-3 + 2e-3) / 2
    assert row["slots_changed_share"] == pytest.approx(3 / 60) and row["tokens_changed_share"] == pytest.approx(0.2)
    assert row["clip_low"] == 0.003 and table.loc["grpo", 0, "live"]["clip_low"] == 0.2
    first = data.updates[(data.updates["update"] == 1) & (data.updates["arm"] == "gspo") & (data.updates["seed"] == 1)]
    assert row["clipped_first"] == first["clipped_tokens"].sum() / first["tokens"].sum()
    assert table.loc["gspo", 1, "R3"]["var_token"] == pytest.approx(2e-5)


def test_the_figure_draws_every_arm_and_says_what_is_what(folder):
    add_engines(folder)
    figure = engine_mismatch(load(folder))
    left, right = figure.figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["GRPO", "GSPO"]
    assert left.get_xscale() == "log" and "log(π_old / μ)" in left.get_xlabel() and "first update" in right.get_xlabel()
    # large marks of GRPO: token live, token R3, sequence live; the R3 sequence variance of 0 has no place on a log axis
    large = [line.get_xdata()[0] for line in left.lines if line.get_markersize() == 5 and line.get_ydata()[0] == 0]
    assert large == pytest.approx([1.5e-3, 2e-5, 4e-5])
    assert "Noise floor" not in figure.caption
    bars = [line.get_xdata()[0] for line in left.lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"]
    assert bars == pytest.approx([0.2**2, 0.003**2])
    assert "n = 2 seeds" in figure.caption and len(figure.render("svg")) > 1000


def test_the_floor_of_equal_weights_stands_where_the_axis_shows_it(folder):
    add_engines(folder)
    floors = (("repeat", 1e-15), ("experts", 3e-15), ("bf16", 2e-4))
    counts = {f"{name}{end}": 0 for name in ("slots", "sites", "tokens") for end in ("_changed", "")}
    rows = [
        {"kind": "floor", "step": 0, "variant": v, "var_token": x, "var_sequence": x / 3} | counts for v, x in floors
    ]
    add_rows(folder / "grpo" / "seed0", *rows)
    figure = engine_mismatch(load(folder))
    shown = [line for line in figure.figure.axes[0].lines if str(line.get_label()).startswith("equal weights")]
    assert [line.get_xdata()[0] for line in shown] == pytest.approx([2e-4]), "own arithmetic is far to the left"
    named = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert named[-1] == "equal weights: bf16 copy"
    assert "implementation) 3e-15 by token, 1e-15 by sequence; a bf16 copy 0.0002 by token" in figure.caption


def test_studies_of_one_engine_neither_have_nor_miss_it(folder, monkeypatch):
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", {name: FIGURES[name] for name in ("reward", "engine_mismatch")})
    skipped = []
    names = {figure.name for figure in each_figure(load(folder), skipped)}
    assert "engine_mismatch" not in names and not any("engine" in reason for reason in skipped)
    with pytest.raises(NothingToDraw, match="engine_mismatch: the runs recorded no var_token"):
        engine_mismatch(load(folder))
    add_engines(folder)
    assert "engine_mismatch" in {figure.name for figure in each_figure(load(folder))}


def test_a_row_without_its_pair_is_damage(folder):
    add_engines(folder, pair=None)
    add_rows(next(folder.glob("*/seed*")), {"kind": "step", "step": 2, "seconds": 1})
    with pytest.raises(StudyDataError, match="lacks pair"):
        load(folder)
