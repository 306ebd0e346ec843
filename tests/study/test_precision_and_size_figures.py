"""The figures of the studies `precision`, `depth_width`, `minibatches`: what they read, and where they are absent."""

import copy
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from synthetic import write_rows, write_study

from moe_rl.study import RunWriter
from moe_rl.study.config import load_study
from moe_rl.study.data import load
from moe_rl.study.figures import change_by_position, decomposition_by_site, depth_width, minibatches, precision
from moe_rl.study.figures.gallery.depth_width import along, power_law, size_rows
from moe_rl.study.figures.gallery.precision import engine_format, flip_ratio, precision_rows, precision_table
from moe_rl.study.figures.style import NothingToDraw
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.result_tables import rate_exponents, result_tables
from moe_rl.study.results import markdown
from moe_rl.study.shipped import find_study


def engine_rows(step, changed, gap, forced):
    both = {"kind": "engine", "step": step, "update": 0}
    both |= {"var_token": gap**2, "var_sequence": 0.0, "extreme_fraction": 0.0}
    live = {"pair": "engines", "slots_changed": changed, "slots": 1000, "gap_mean": gap, "k3": gap**2 / 2}
    live |= {"sites_changed": 0, "sites": 1, "tokens_changed": 0, "tokens": 1}
    return [both | live, both | {"pair": "engines_replayed", "gap_mean": forced, "k3": forced**2 / 2}]


@pytest.fixture
def engines(tmp_path):
    formats = {
        "fp32": ({"dtype": "float32"}, 0, 0.0),
        "fp16": ({"dtype": "float16"}, 10, 0.01),
        "bf16": ({"dtype": "bfloat16"}, 80, 0.08),
        "int4": ({"dtype": "bfloat16", "weight_format": "int4"}, 300, 0.3),
    }
    for arm, (engine, changed, gap) in formats.items():
        for seed in (0, 1):
            rows = [row for step in (0, 1) for row in engine_rows(step, changed * (1 + seed), gap, gap / 4)]
            rows += [{"kind": "rollout", "step": step, "reward": 0.5} for step in (0, 1)]
            write_rows(tmp_path / arm / f"seed{seed}", rows, {"rollout": {"engine": {"kind": "hf", **engine}}})
    return tmp_path


def test_engines_of_several_formats_are_told_apart_by_their_flips_and_shares(engines):
    data = load(engines)
    rows = precision_rows(data).set_index(["arm", "seed", "step"])
    assert rows.loc[("bf16", 1, 0), "slot_change"] == pytest.approx(0.16)
    assert rows.loc[("bf16", 0, 1), "routing_share"] == pytest.approx(0.75), "of 0.08 nats a quarter is left"
    assert pd.isna(rows.loc[("fp32", 0, 0), "routing_share"]), "of no gap there is no share"
    formats = {run.arm: engine_format(run.config) for run in data.runs}
    assert formats["int4"] == ("int4", False) and formats["fp16"] == ("float16", False)
    assert flip_ratio(data, formats) == "0.12 [0.12, 0.12]", "an eighth in both seeds"
    figure = precision(data)
    assert "fp16 changes 0.12" in figure.caption and len(figure.figure.axes) == 3
    assert "n = 2 seeds per arm;" in figure.caption
    rounded = {"rollout": {"engine": {"kind": "hf", "dtype": "bfloat16", "router_format": "int4"}}}
    rows = [*engine_rows(0, 100, 0.1, 0.1), {"kind": "rollout", "step": 0, "reward": 0.5}]
    write_rows(engines / "routers" / "seed0", rows, rounded)
    assert "n = 2 seeds per arm;" in precision(load(engines)).caption, "an arm that is not drawn is not counted"
    drawn = figure.frame[(figure.frame["arm"] == "int4") & (figure.frame["quantity"] == "slot_change")]
    assert drawn["mean"].tolist() == pytest.approx([0.45, 0.45])


def test_precision_of_a_study_is_a_table_over_seeds_with_growth_over_the_steps(tmp_path):
    """The gap doubles, so that k3 is four times as large, and forcing removes three quarters, then half."""
    for arm, dtype, scale in (("fp32", "float32", 0), ("fp16", "float16", 1), ("bf16", "bfloat16", 8)):
        for seed in (0, 1):
            gaps = [0.01 * scale * (2 if step >= 5 else 1) for step in range(10)]
            rows = [
                row
                for step, gap in enumerate(gaps)
                for row in engine_rows(step, 10 * scale, gap, gap / (2 if step >= 5 else 4))
            ]
            rows += [{"kind": "rollout", "step": step, "reward": 0.5} for step in range(10)]
            rows += [{"kind": "update", "step": 0, "update": 1, "tokens": 9, "clipped_tokens": 0}]
            write_rows(tmp_path / arm / f"seed{seed}", rows, {"rollout": {"engine": {"kind": "hf", "dtype": dtype}}})
    data = load(tmp_path)
    row = precision_table(data).set_index(["arm", "seed"]).loc[("bf16", 1)]
    assert row["slot_change"] == pytest.approx(0.08) and row["routing_share"] == pytest.approx(0.625)
    assert row["k3_growth"] == pytest.approx(4) and row["share_growth"] == pytest.approx(-0.25)
    table = result_tables(data)["precision"].set_index("arm")
    assert table.loc["fp16", "slot_change"] == pytest.approx(0.01) and table.loc["fp16", "n"] == 2
    assert pd.isna(table.loc["fp32", "k3_growth"]), "where engines agree nothing grows"
    assert table.loc["bf16", "k3"] == pytest.approx(0.08 * 0.08, rel=1e-6), "geometric mean of 0.08²/2 and 0.16²/2"
    lines = markdown("precision", table.reset_index()).splitlines()
    assert lines[2].startswith("| bf16 | 2 | 8.00 [8.00, 8.00] |") and lines[-1].endswith("| – | – | – | – |")


def test_sizes_of_a_study_are_tables_of_rates_and_of_exponents(sizes):
    tables = result_tables(load(sizes))
    deep = tables["sizes"].set_index("arm").loc["deep"]
    assert deep["slot_change"] == pytest.approx(0.08) and deep["removed"] == pytest.approx(1e-3 * 64)
    assert deep["independent_sites"] == pytest.approx(6.579, abs=1e-3), "0.9^6.579 = 1/2 of the tokens unchanged"
    lines = markdown("power_laws", tables["power_laws"]).splitlines()
    assert "| layers | slots | 2 | +1.00 [1.00, 1.00] |" in lines and len(lines) == 2 + 4 + 1, (
        "four quantities of the figure, and independent sites"
    )
    assert "precision" not in tables and "| 8 | 16 | 2 | 2 | 8.0 [8.0, 8.0] |" in markdown("sizes", tables["sizes"])


def test_what_an_engine_computes_in_is_read_from_its_configuration():
    def of(engine, optim=None, **model):
        return engine_format({"rollout": {"engine": engine}, "model": model, "optim": optim or {}})

    assert of({"kind": "self"}) == of({"kind": "hf", "router_format": "int4"}) == ("", False)
    assert of({"kind": "hf", "dtype": "bfloat16"}, dtype="bfloat16") == ("bfloat16", True)
    assert of({"kind": "hf", "dtype": "bfloat16", "weight_format": "fp8"}) == ("fp8", False)
    assert of({"kind": "hf", "weight_format": "int4"}, {"weight_format": "int4"}) == ("int4", True)


@pytest.fixture
def sizes(tmp_path):
    """Slot change 0.01 L, whatever the seed; the variance that replay removes 1e-3 L²; one run never at that reward."""
    for arm, layers, experts in (("base", 4, 16), ("deep", 8, 16), ("deeper", 16, 16), ("wide", 4, 64)):
        for seed in (0, 1):
            tiny = {"num_layers": layers, "num_experts": experts, "num_experts_per_tok": 2}
            rows = []
            for step, reward in enumerate((0.2, 0.5, 0.9)):
                if (arm, seed) == ("deeper", 1):
                    reward = 0.9
                rows.append({"kind": "rollout", "step": step, "reward": reward})
                wild = 1 if reward == 0.5 else 5  # what happens at other rewards is not read
                for update in (1, 2):
                    probe = {
                        "kind": "probe",
                        "step": step,
                        "update": update,
                        "slots": 1000,
                        "sites": 500,
                        "tokens": 100,
                    }
                    probe |= {
                        "slots_changed": 10 * layers * wild * update // 2,
                        "sites_changed": 50,
                        "tokens_changed": 50,
                    }
                    probe |= {"var_token_natural": 1e-3 * layers**2 * wild + 0.5, "var_token_replayed": 0.5}
                    rows.append(probe)
            write_rows(tmp_path / arm / f"seed{seed}", rows, {"model": {"tiny": tiny}})
    return tmp_path


def test_rates_are_read_at_equal_reward_after_the_last_update_and_fitted_by_seed(sizes):
    rows, left_out = size_rows(load(sizes))
    assert left_out == ["deeper/seed1"]
    row = rows.set_index(["arm", "seed"]).loc[("deep", 0)]
    assert row["slot_change"] == pytest.approx(0.08) and row["steps"] == 1 and row["site_change"] == pytest.approx(0.1)
    assert row["removed"] == pytest.approx(1e-3 * 64)
    layers = along(rows, "num_layers")
    assert sorted(layers["arm"].unique()) == ["base", "deep", "deeper"], "the wide one is of another width"
    fit = power_law(layers, "num_layers", "slot_change")
    assert fit["exponent"] == pytest.approx(1) and fit["level"] == pytest.approx(0.01) and fit["seeds"] == 2
    assert power_law(layers, "num_layers", "removed")["exponent"] == pytest.approx(2)
    assert power_law(layers, "num_layers", "site_change")["exponent"] == pytest.approx(0)


def test_a_count_that_is_missing_in_a_step_leaves_that_step_out(sizes):
    data = load(sizes)
    base = data.probes["arm"].isin(["base"])
    steps = [data.rollouts.assign(step=step, reward=0.5) for step in (0, 1)]
    probes = [data.probes.assign(step=step) for step in (0, 1)]
    probes[1].loc[base, "slots_changed"] = np.nan
    two = replace(data, rollouts=pd.concat(steps), probes=pd.concat(probes, ignore_index=True))
    one = replace(data, rollouts=steps[0], probes=probes[0])
    rates = [size_rows(study)[0].query("arm == 'base'")["slot_change"].tolist() for study in (one, two)]
    assert len(rates[0]) == 2 and rates[0] == rates[1]


def test_the_figure_has_the_axes_that_have_three_sizes_and_says_the_exponents(sizes):
    figure = depth_width(load(sizes))
    assert "n = 2 seeds per arm (1 for deeper);" in figure.caption, "the run that is left out is not counted"
    assert len(figure.figure.axes) == 2 and "deeper/seed1" in figure.caption
    assert "slots ~ layers^1 [1, 1]" in figure.caption and "removes ~ layers^2" in figure.caption
    assert set(figure.tables) == {"fits", "by_seed"} and len(figure.tables["fits"]) == 4


def test_large_marks_are_geometric_means_as_the_lines_are_fits_of_logarithms(sizes):
    file = sizes / "base" / "seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "probe":
            row["var_token_natural"] = 0.5 + 100 * (row["var_token_natural"] - 0.5)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawing = depth_width(load(sizes))
    removed = drawing.frame.set_index(["quantity", "size"]).loc[("removed", 4)]
    assert removed["geometric_mean"] == pytest.approx(10 * 1e-3 * 16)  # of 1 and 100 times; their mean is 50.5 times
    marks = [line for line in drawing.figure.axes[1].lines if line.get_markersize() == 5.5]
    assert marks[0].get_ydata()[0] == pytest.approx(10 * 1e-3 * 16)


def test_other_studies_have_neither_figure(sizes):
    with pytest.raises(NothingToDraw, match="no 3 sizes"):
        depth_width(load(sizes / "base" / "seed0"))
    with pytest.raises(NothingToDraw):
        precision(load(sizes / "base" / "seed0"))


@pytest.mark.parametrize("name", ["precision", "depth_width"])
def test_the_study_files_resolve_and_every_arm_is_another_engine_or_size(name):
    study = load_study(find_study(name))
    configs = {arm: study.resolve(arm, 0) for arm in study.arms}
    if name == "precision":
        engines = {
            arm: (c.rollout.engine.dtype, c.rollout.engine.weight_format, c.model.dtype) for arm, c in configs.items()
        }
        assert len(set(engines.values())) == len(study.arms) == 7 and engines["int4"] == ("bfloat16", "int4", "float32")
    else:
        tiny = [c.model.tiny for c in configs.values()]
        assert {t.num_layers for t in tiny} == {2, 4, 8, 16, 24}
        assert {t.num_experts_per_tok for t in tiny} == {1, 2, 4, 8}
        assert {t.num_experts for t in tiny} == {8, 16, 32, 64, 128}


def test_exponents_of_the_learning_rate_are_fitted_where_every_arm_has_its_own(tmp_path):
    """Slots in proportion, sites by the square root, tokens not at all; and no table where two arms share a rate."""
    for arm, power in (("low", 0), ("mid", 2), ("high", 4)):
        for seed in (0, 1):
            counts = {"slots": 10_000, "sites": 10_000, "tokens": 100}
            changed = {"slots_changed": 10 * 2**power, "sites_changed": 10 * 2 ** (power // 2), "tokens_changed": 50}
            probe = {"kind": "probe", "step": 0, "update": 1, **counts, **changed}
            write_rows(tmp_path / arm / f"seed{seed}", [probe], {"optim": {"learning_rate": 1e-4 * 2**power}})
    table = rate_exponents(load(tmp_path)).set_index("of")
    assert table["exponent"].to_dict() == pytest.approx({"slots": 1, "sites": 0.5, "tokens": 0}, abs=1e-9)
    assert (table["seeds"] == 2).all() and (table["update"] == 1).all()
    write_rows(tmp_path / "same" / "seed0", [probe], {"optim": {"learning_rate": 1e-4}})
    assert rate_exponents(load(tmp_path)).empty


def test_arms_of_other_depths_have_their_own_sites(tmp_path, monkeypatch):
    """Every token changes at half of the sites, of eight in one arm and of two in the other."""
    sites = {"deep": 8, "shallow": 2}
    for arm, L in sites.items():
        names = [f"layers.{i}.gate" for i in range(L)]
        shares = {f"site_token_share_{kind}": [1 / L] * L for kind in ("alone", "last")}
        with RunWriter(tmp_path, arm=arm, seed=0) as run:
            run.rollout(0, reward=0.5)
            run.update(0, 1, loss=0.1, grad_norm=1.0)
            run.probe(0, 1, slots_changed=20 * L, slots=40 * L, site_names=names)
            run.row("decomposition", 0, update=1, replay_effect_var=1.0, site_names=names, **shares)
            n, place = 40, np.arange(40)
            logps = dict.fromkeys(("old_logp", "logp_natural", "logp_replayed"), [-1.0] * n)
            run.tokens(0, seq=place // 10, pos=place % 10, token=[1] * n, update=[1] * n, flips=[L // 2] * n, **logps)
    monkeypatch.setattr("moe_rl.study.figures.gallery.change_by_position.FEWEST_TOKENS", 1)
    drawn = change_by_position(load(tmp_path)).frame
    assert drawn.groupby("arm", observed=True)["mean"].mean().to_dict() == {"deep": 0.5, "shallow": 0.5}
    frame = decomposition_by_site(load(tmp_path)).frame
    assert frame.groupby("arm")["share"].mean().to_dict() == {arm: pytest.approx(1 / L) for arm, L in sites.items()}


def test_score_by_minibatches_takes_final_and_peak(data):
    with pytest.raises(NothingToDraw, match="the same number of updates per batch"):
        minibatches(data)
    runs = []
    for run in data.runs:
        config = copy.deepcopy(run.config)
        config["optim"]["num_minibatches"] = 8 if run.arm == "gspo" else 2
        runs.append(replace(run, config=config))
    rewards = data.rollouts["reward"].where(data.rollouts["step"] != 6, 0.0)  # a last step that fails
    changed = replace(data, runs=tuple(runs), rollouts=data.rollouts.assign(reward=rewards))
    frame = minibatches(changed).frame.set_index(["quantity", "arm"])
    assert frame.loc[("final", "gspo"), "updates"] == 8
    assert frame.loc[("final", "grpo"), "updates"] == 2
    assert not {arm for _, arm in frame.index} & {"grpo_noise", "gspo_noise"}
    of_arm = changed.rollouts.query("arm == 'gspo'").groupby("seed")["reward"]
    peaks = [max(np.mean(run[i : i + 5]) for i in range(3)) for _, run in of_arm]
    assert frame.loc[("peak", "gspo"), "mean"] == pytest.approx(np.mean(peaks))
    assert frame.loc[("final", "gspo"), "mean"] == pytest.approx(of_arm.apply(lambda r: r[-5:].mean()).mean())


def test_score_by_minibatches_is_the_declared_reward_and_names_each_kind_of_arm(tmp_path):
    data = load(write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0, 1), steps=2))
    config = copy.deepcopy(data.config)
    config["outcome"] = "held_out"
    config["arms"]["gspo"]["label"] = "GRPO without a clip, N = 8"
    runs = []
    for run in data.runs:
        of = copy.deepcopy(run.config)
        of["optim"]["num_minibatches"] = 8 if run.arm == "gspo" else 2
        of["method"]["objective"] = "grpo"
        runs.append(replace(run, config=of))
    drawn = minibatches(replace(data, config=config, runs=tuple(runs)))
    ends = run_outcomes(replace(data, config=config)).groupby("arm")["held_out"].mean()
    assert set(drawn.frame["quantity"]) == {"final"}
    assert drawn.frame.set_index("arm")["mean"].to_dict() == pytest.approx(ends.to_dict())
    assert drawn.figure.axes[0].get_ylabel() == "held-out reward"
    assert "GRPO without a clip" in {text.get_text() for text in drawn.figure.findobj(Text)}
    marks = {line.get_label(): line for line in drawn.figure.axes[0].lines}
    one, other = marks["GRPO"], marks["GRPO without a clip"]
    assert [*one.get_xdata(), *other.get_xdata()] == [2, 8], "an arm alone at its N stands at it"
    assert one.get_color() == other.get_color() and one.get_marker() != other.get_marker()


def test_arms_of_one_number_of_minibatches_and_one_name_are_told_apart(data):
    config = copy.deepcopy(data.config)
    config["arms"]["grpo_replay"]["label"] = "GRPO, half the rate"
    runs = []
    for run in data.runs:
        of = copy.deepcopy(run.config)
        of["optim"]["num_minibatches"] = 8 if run.arm == "gspo" else 2
        of["method"]["replay"] = "none"
        runs.append(replace(run, config=of))
    drawn = minibatches(replace(data, config=config, runs=tuple(runs)))
    marks = {line.get_label(): line for line in drawn.figure.axes[0].lines}
    one, other = marks["GRPO"], marks["GRPO, half the rate"]
    assert one.get_xdata()[0] < 2 < other.get_xdata()[0] and one.get_marker() != other.get_marker()
    config["arms"]["grpo"]["label"] = "_plain"
    (legend,) = minibatches(replace(data, config=config, runs=tuple(runs))).figure.legends
    assert "_plain" in {text.get_text().strip() for text in legend.get_texts()}, "matplotlib leaves out a leading _"


def test_sites_of_more_arms_than_are_drawn_are_in_the_table(tmp_path):
    for number in range(8):
        shares = {f"site_token_share_{kind}": [1.0] for kind in ("alone", "last")}
        with RunWriter(tmp_path, arm=f"arm{number}", seed=0) as run:
            run.rollout(0, reward=0.5)
            run.row("decomposition", 0, update=1, replay_effect_var=1.0, site_names=["layers.0.gate"], **shares)
    drawn = decomposition_by_site(load(tmp_path))
    assert "2 more arms are in the table." in drawn.caption and drawn.frame["arm"].nunique() == 8
