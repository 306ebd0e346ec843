"""Figures that only some studies have: doses, the decomposition; the noise floor beside change rates."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from synthetic import write_study

from moe_rl.study import RunWriter, load, reading
from moe_rl.study.figures import (
    FIGURES,
    NothingToDraw,
    change_by_position,
    decomposition,
    decomposition_by_site,
    design_effect,
    divergence,
    dose_response,
    each_figure,
    expert_change,
    gradient_bias,
    look_of,
)
from moe_rl.study.figures.gallery.design_effect import design_effects
from moe_rl.study.result_tables import result_tables
from moe_rl.study.results import markdown
from moe_rl.study.summary import in_run_variance, last_updates, noise_floor, routing_noise, routing_noise_ratios


def test_a_study_in_which_nothing_is_solved_or_moves_is_drawn_without_complaint(tmp_path):
    data = load(write_study(tmp_path / "still", ("grpo", "gspo"), (0,), 3, tokens_every=1))
    data.tokens[["logp_natural", "logp_replayed"]] = 0.0
    data.tokens["old_logp"] = 0.0
    still = replace(
        data,
        rollouts=data.rollouts.assign(reward=0.0),
        updates=data.updates.assign(k3=0.0),
        probes=data.probes.assign(overdispersion=np.nan),
    )
    vars(still)["tokens"] = data.tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = {figure.name: figure for figure in each_figure(still)}
    assert {"reward", "dynamics", "flips_per_token"} <= drawn.keys()
    assert not {"variance_by_flips", "tail_fraction", "log_ratio_bands"} & drawn.keys(), (
        "no variance has no place on a log axis"
    )
    assert drawn["reward"].figure.axes[0].get_ylim() == (0, 1)
    assert not any("nan" in text.get_text() for ax in drawn["flips_per_token"].figure.axes for text in ax.texts)


@pytest.fixture(scope="module")
def split(data):
    """The study with a decomposition whose parts are known: weight 1, routing 3, covariance 0.5, no interaction."""
    rows = []
    for run in data.runs:
        for step in (0, 1):
            for update in (1, 2):
                row = {"arm": run.arm, "seed": run.seed, "step": step, "update": update}
                for level, scale in (("token", 1.0), ("sequence", 0.1)):
                    row |= {f"{level}_variance": 5 * scale, f"{level}_var_weight": scale}
                    row |= {f"{level}_var_routing": 3 * scale, f"{level}_var_interaction": 0.0}
                    row |= {f"{level}_cov_weight_routing": 0.5 * scale}
                    row |= {f"{level}_cov_weight_interaction": 0.0, f"{level}_cov_routing_interaction": 0.0}
                weight = 3.0 if step else 1.0  # (3 * 0.8 + 1 * 0.4) / 4 = 0.7
                row |= {
                    "replay_effect_var": weight,
                    "site_names": ["l.0.gate", "l.1.gate"],
                    "design_effect_routing": 2.0,
                }
                row |= {"token_share_routing": 0.7, "averaging_routing": 10.0}
                row |= {"site_token_share_alone": [0.8 if step else 0.4, 0.1], "site_token_share_last": [0.5, 0.5]}
                rows.append(row)
    return replace(data, decompositions=pd.DataFrame(rows))


@pytest.fixture(scope="module")
def doses(data):
    """The study with two more arms of GSPO, at other doses."""
    runs, frames = list(data.runs), {"updates": [data.updates], "rollouts": [data.rollouts]}
    for noise in (0.1, 0.3):
        for run in data.runs_of("gspo_noise"):
            config = {**run.config, "method": {**run.config["method"], "noise": noise}}
            runs.append(replace(run, arm=f"gspo_{noise}", config=config))
        for name, parts in frames.items():
            rows = getattr(data, name)
            parts.append(rows[rows["arm"] == "gspo_noise"].assign(arm=f"gspo_{noise}"))
    more = (
        frames["updates"][-1].eval("slots_changed = slots // 10"),
        frames["updates"][1].eval("slots_changed = slots // 5"),
    )
    updates = pd.concat([data.updates, more[1], more[0]])
    return replace(data, runs=tuple(runs), updates=updates, rollouts=pd.concat(frames["rollouts"]))


def test_dose_is_measured_in_the_update_forward(data, doses):
    with pytest.raises(NothingToDraw, match=r"has arms with 4 doses of selection noise \(most: 2\)"):
        dose_response(data)
    figure = dose_response(doses)
    lines = [line for ax in figure.figure.axes for line in ax.lines if len(line.get_xdata()) > 2]
    assert lines and all(line.get_linestyle() == "None" for line in lines), "marks alone, no line through them"
    frame = figure.frame
    final = frame[frame["quantity"] == "final"].set_index("arm")
    assert final.loc["grpo_noise", "dose"] == pytest.approx(45)
    assert final.loc["grpo_replay", "dose"] == 0
    assert final.loc["grpo", "dose"] == pytest.approx(100 * (0 + 120 + 240 + 360) / (4 * 12800))
    last = data.rollouts.query("arm == 'gspo_noise' and step >= 2").groupby("seed")["reward"].mean()
    assert final.loc["gspo_noise", "mean"] == pytest.approx(last.mean())
    assert (final.loc["gspo_noise", "low"], final.loc["gspo_noise", "high"]) == pytest.approx((last.min(), last.max()))
    declared = dose_response(replace(doses, config={**doses.config, "outcome": "held_out"}))
    names = [drawn.figure.axes[0].get_ylabel() for drawn in (figure, declared)]
    assert names == ["final reward", "held-out reward"] and "or the held-out reward where" in declared.caption
    variance = frame[frame["quantity"] == "variance"].set_index("arm")
    mine = data.updates.query("arm == 'gspo' and update > 1").groupby(["seed", "step"])["var_token_log_ratio"].mean()
    assert variance.loc["gspo", "mean"] == pytest.approx(mine.groupby("seed").mean().mean())


def test_a_replay_run_stands_for_every_dose_and_another_methods_single_run_does_not(doses):
    def dotted(data):
        lines = dose_response(data).figure.axes[0].lines
        return [line.get_color() for line in lines if list(line.get_xdata()) == [0, 1]]  # from one side to the other

    assert dotted(doses) == [look_of("grpo_replay").colour]
    natural = replace(doses, runs=tuple(run for run in doses.runs if run.arm != "grpo_noise"))
    natural = replace(natural, updates=doses.updates[doses.updates["arm"] != "grpo_noise"])
    assert dotted(natural) == [look_of("grpo_replay").colour], "GRPO without noise is one dose of GRPO"


def test_without_doses_there_is_no_dose_response(tmp_path):
    plain = load(write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0,), steps=2))
    with pytest.raises(NothingToDraw, match="no method of this study has arms with 4 doses"):
        dose_response(plain)
    skipped = []
    special = [name for name, figure in FIGURES.items() if figure.special]
    assert {"dose_response", "minibatches", "engine_mismatch", "decomposition"} <= set(special)
    assert not {figure.name for figure in each_figure(plain, skipped)} & set(special)
    assert not any(reason.startswith(tuple(special)) for reason in skipped)


def test_change_by_position_is_flips_over_sites_at_that_position(data):
    frame = change_by_position(data).frame
    tokens = data.tokens.query("arm == 'grpo' and seed == 1 and update == 4 and pos == 3")
    row = frame[(frame["arm"] == "grpo") & (frame["position"] == 3)].iloc[0]
    assert row["seed1"] == pytest.approx(tokens["flips"].mean() / 4)


def probed(value):
    """One probe: 40 responses of 4 tokens, whose routing part is `value(response, position)`; odd positions flip."""
    rows = [
        {"seq": seq, "pos": pos, "logp_natural": value(seq, pos), "logp_replayed": 0.0, "flips": pos % 2}
        for seq in range(40)
        for pos in range(4)
    ]
    return pd.DataFrame(rows).assign(arm="grpo", seed=0, step=0, update=1)


def test_the_design_effect_tells_tokens_that_move_together_from_independent_and_from_cancelling_ones():
    def by_length(tokens, name="design_effect"):
        return design_effects(tokens).set_index("length")[name].to_dict()

    together = probed(lambda seq, pos: (-1.0) ** seq)
    assert by_length(together) == pytest.approx({1: 1, 2: 2, 4: 4})
    assert by_length(together, "tokens_flipped") == pytest.approx({1: 1, 2: 0, 4: 0}), "every second token flips"
    cancelling = probed(lambda seq, pos: (-1.0) ** pos)
    assert by_length(cancelling) == pytest.approx({1: 1, 2: 0, 4: 0})
    rng = np.random.default_rng(0)
    independent = pd.concat(
        [probed(lambda seq, pos: rng.normal()).assign(step=step) for step in range(200)], ignore_index=True
    )
    found = design_effects(independent).groupby("length")["design_effect"].mean()
    assert found.to_dict() == pytest.approx({1: 1, 2: 1, 4: 1}, abs=0.05)
    short = together[together["pos"] < 3]
    assert set(by_length(short)) == {1, 2}, "no whole block of four, and tokens outside whole blocks do not count"
    assert design_effects(together.assign(logp_natural=0.0)).empty
    assert design_effects(together[together["seq"] < 20]).groupby("length").size().to_dict() == {1: 1, 2: 1}
    both = pd.concat([together, together.assign(arm="other trainer", flips=np.nan)])
    found = design_effects(both).set_index(["arm", "length"])
    assert found.loc["other trainer", "design_effect"].to_dict() == pytest.approx({1: 1, 2: 2, 4: 4})
    assert found.loc["other trainer", "tokens_flipped"].isna().all()
    assert design_effects(together.assign(flips=together["flips"].where(together["pos"] < 2))).equals(
        design_effects(together[together["pos"] < 2])
    ), "tokens whose routes are not known, of a probe that has others'"


def test_the_figure_of_the_design_effect_is_the_median_over_probes(data):
    made = design_effect(data)
    row = made.frame[(made.frame["arm"] == "grpo") & (made.frame["length"] == 2)].iloc[0]
    probes = design_effects(data.tokens).query("arm == 'grpo' and seed == 1 and length == 2")
    assert row["seed1"] == pytest.approx(probes["design_effect"].median())


def test_gradients_are_told_by_the_median_over_probes_with_layers_apart(data):
    with pytest.raises(NothingToDraw, match="gradient_bias: the runs recorded no gradient_cosine"):
        gradient_bias(data)
    cosines = np.linspace(0.2, 0.9, len(data.probes))
    probes = data.probes.assign(
        gradient_cosine=cosines,
        router_gradient_cosine=cosines / 2,
        gradient_halves_cosine=0.1,
        gradient_norm_ratio=1.5,
        router_gradient_norm_ratio=None,
        layer_names=[["other", "0"]] * len(cosines),
        layer_gradient_cosine=[[cosine, -cosine] for cosine in cosines],
    )
    compared = replace(data, probes=probes)
    expected = probes.query("arm == 'grpo' and seed == 1 and update == 4")["gradient_cosine"].median()
    frame = gradient_bias(compared).frame.set_index(["quantity", "arm", "update"])
    assert frame.loc[("gradient_cosine", "grpo", 4), "seed1"] == pytest.approx(expected)
    assert frame.loc[("gradient_halves_cosine", "grpo", 4), "mean"] == pytest.approx(0.1)
    table = result_tables(compared)["gradients"].set_index(["arm", "update"]).loc[("grpo", 4)]
    assert table["layer_0"] == pytest.approx(-table["gradient_cosine"]) and table["layer_other"] > 0
    assert "| grpo | 4 |" in markdown("gradients", result_tables(compared)["gradients"])
    earlier = replace(compared, probes=probes.drop(columns=["layer_names", "layer_gradient_cosine"]))
    assert gradient_bias(earlier).frame["quantity"].nunique() == 3, "runs of versions that did not tell layers apart"
    of_grpo = probes["arm"] == "grpo"
    layers = {name: probes[name].where(of_grpo) for name in ("layer_names", "layer_gradient_cosine")}
    mixed = result_tables(replace(compared, probes=probes.assign(**layers)))["gradients"].set_index("arm")
    assert mixed.loc["grpo", "layer_0"].notna().all() and mixed.loc["gspo", "layer_0"].isna().all()
    frozen = replace(compared, probes=probes.assign(router_gradient_cosine=None))
    assert gradient_bias(frozen).frame["quantity"].nunique() == 2, "routers that are not trained have no gradient"
    fewest = replace(data, probes=data.probes.assign(gradient_cosine=cosines, gradient_halves_cosine=0.1))
    assert set(gradient_bias(fewest).frame["quantity"]) == {"gradient_cosine", "gradient_halves_cosine"}
    assert "gradient_cosine" in result_tables(fewest)["gradients"]


def test_extreme_tokens_come_from_the_probe_or_else_from_the_tokens(data):
    frame = divergence(data).frame.query("quantity == 'F(2)'").set_index(["arm", "step"])
    row = data.probes.query("arm == 'grpo' and seed == 0 and step == 3 and update == 4").iloc[0]
    assert frame.loc[("grpo", 3), "seed0"] == row["extreme_2_natural"] / row["tokens"]
    older = replace(data, probes=data.probes.drop(columns="extreme_2_natural"))
    again = divergence(older).frame.query("quantity == 'F(2)'").set_index(["arm", "step"])
    stored = data.tokens.query("arm == 'grpo' and seed == 0 and step == 3 and update == 4")
    extreme = (stored["logp_natural"] - stored["old_logp"]).abs() > np.log(2)
    assert again.loc[("grpo", 3), "seed0"] == pytest.approx(extreme.mean())
    assert ("grpo", 1) not in again.index, "only stored steps have tokens"
    null = replace(data, probes=data.probes.assign(extreme_2_natural=None))
    assert divergence(null).frame.equals(divergence(older).frame), "counts that are null are none"


@pytest.mark.parametrize("arms", [2, 8])  # panels; a row per arm
@pytest.mark.parametrize("values", [{"extreme_2_natural": 3}, {"extreme_2_natural": None, "tokens": 9}, {}])
def test_kl_is_drawn_where_extreme_tokens_were_not_counted(tmp_path, arms, values):
    for i in range(arms):
        with RunWriter(tmp_path, arm=f"a{i}") as run:
            for step in range(2):
                run.rollout(step, reward=0.3)
                run.probe(step, 1, k3_natural=0.1, **values)
    figure = divergence(load(tmp_path))
    assert set(figure.frame["quantity"]) == {"k3_natural"} and len(figure.figure.axes) == 1
    assert "F(2): not recorded." in figure.caption


def test_shares_of_the_decomposition_hold_half_of_the_covariance(split):
    figure = decomposition(split)
    frame = figure.frame.query("arm == 'grpo' and seed == 0 and update == 2 and level == 'token'").set_index("part")
    assert frame["share"].to_dict() == pytest.approx({"weight": 1.5 / 5, "routing": 3.5 / 5, "interaction": 0.0})
    assert frame.loc["routing", "variance"] == pytest.approx(3.0)
    words = [s.text for s in reading.read(split) if s.topic == "Where the log-ratio comes from"]
    assert "GSPO: routing has 70 % of the variance of the token log-ratio and 70 % of that of the sequence" in words[0]
    assert "divides by 10, and by 10 in the median probe (design effect there 2;" in words[0]
    still = split.decompositions.assign(**{f"{lv}_var_routing": 0.0 for lv in ("token", "sequence")})
    said = " ".join(s.text for s in reading.read(replace(split, decompositions=still)) if "log-ratio comes" in s.topic)
    assert "GSPO: no route changed" in said and "nan" not in said
    one = replace(split, decompositions=split.decompositions.assign(sequence_var_routing=float("nan")))
    assert any("GSPO: the variance over sequences is not known, or 0" in s.text for s in reading.read(one))
    probes = result_tables(split)["decomposed_probes"]
    assert len(probes) == len(split.decompositions) and (probes["token_var_routing"] == 3.0).all()


def test_a_step_without_a_gradient_is_no_point_of_the_log_axis(data):
    updates = data.updates.copy()
    updates.loc[(updates["arm"] == "grpo") & (updates["seed"] == 0) & (updates["step"] == 3), "grad_norm"] = 0.0
    frame = FIGURES["gradient_norm"](replace(data, updates=updates)).frame.query("arm == 'grpo' and step == 3")
    seeds = frame[["seed1", "seed2"]].to_numpy()[0]
    assert frame["mean"].item() == pytest.approx(np.exp(np.log(seeds).mean())) and np.isnan(frame["seed0"].item())


@pytest.mark.parametrize("arms", [2, 8])  # of one method: small panels, of eight too
def test_an_arm_without_a_gradient_costs_no_other_its_line(tmp_path, arms):
    def write(folder, still):
        for i in range(arms):
            with RunWriter(folder, arm=f"a{i}") as run:
                for step in range(3):
                    run.update(step, 1, grad_norm=0.0 if i in still else 1.0)
        return load(folder)

    figure = FIGURES["gradient_norm"](write(tmp_path / "one", {1}))
    assert set(figure.frame["arm"]) == {f"a{i}" for i in range(arms)} - {"a1"}
    assert len(figure.figure.axes) == arms - 1
    with pytest.raises(NothingToDraw, match="gradient_norm: every norm is 0"):
        FIGURES["gradient_norm"](write(tmp_path / "none", set(range(arms))))


@pytest.mark.parametrize("name", ["gradient_norm", "gradient_peaks"])
def test_no_gradient_at_all_is_no_empty_axis(data, name):
    with pytest.raises(NothingToDraw, match=f"{name}: every norm is 0"):
        FIGURES[name](replace(data, updates=data.updates.assign(grad_norm=0.0)))


def test_routing_noise_is_compared_by_geometric_mean_and_seed(split):
    rows = split.decompositions
    rows = rows[rows["arm"].isin(["grpo", "gspo"])].copy()
    factor = np.where(rows["step"] == 0, 0.01, 100.0)  # one step of 100 times the other: arithmetic would hide the rest
    less = np.where(rows["arm"] == "gspo", 0.5, 1.0) * (1 + 0.01 * rows["seed"])
    rows["token_var_routing"] = 3 * factor * less
    study = replace(split, decompositions=rows)
    table = routing_noise(study).query("level == 'token' and update == 2").set_index(["arm", "seed"])["variance"]
    assert table["grpo", 0] == pytest.approx(3.0), "geometric mean of 0.03 and 300"
    assert table["gspo", 2] == pytest.approx(3.0 * 0.5 * 1.02)
    pairs = {(pair.arm, pair.other): pair.result for pair in routing_noise_ratios(study)}
    result = pairs["gspo", "grpo"]
    assert np.exp(result.difference.estimate) == pytest.approx(0.5)
    assert (result.interest, result.verdict) == (pytest.approx(np.log(1.25)), "too few pairs")  # three seeds
    words = [s.text for s in reading.read(study) if s.topic == "Where the log-ratio comes from"]
    assert "GSPO over GRPO ×0.5 (range [0.5, 0.5], 3 seeds): too few pairs" in words[1]
    one = replace(study, runs=tuple(replace(run, finished=run.seed == 0) for run in study.runs))
    words = [s.text for s in reading.read(one) if s.topic == "Where the log-ratio comes from"]
    assert "GSPO over GRPO ×0.5 (1 seed): too few pairs" in words[1]
    assert len(routing_noise(replace(study, decompositions=pd.DataFrame()))) == 0


def test_routing_noise_of_unfinished_runs_is_not_compared(split):
    """As no reward of theirs is: seed by seed over finished runs, and no pair without a seed of both."""

    def without(*unfinished):
        runs = (replace(run, finished=(run.arm, run.seed) not in unfinished) for run in split.runs)
        found = routing_noise_ratios(replace(split, runs=tuple(runs)))
        return {(pair.arm, pair.other): pair.result.seeds for pair in found}

    assert without()["gspo", "grpo"] == (0, 1, 2)
    assert without(("gspo", 1))["gspo", "grpo"] == (0, 2)
    assert ("gspo", "grpo") not in without(("gspo", 0), ("gspo", 1), ("grpo", 2))


def test_an_arm_with_one_update_per_step_has_a_variance_too(data):
    """Under noise or with old tokens that of its first update is not 0, however many updates other arms make."""
    rows = data.updates
    rows = rows[(rows["arm"] != "gspo") | (rows["update"] == 1)]
    found = in_run_variance(replace(data, updates=rows)).set_index(["arm", "seed", "step"])
    one = rows[rows["arm"] == "gspo"].set_index(["arm", "seed", "step"])["var_token_log_ratio"]
    assert len(one) and found["token"].loc[one.index].tolist() == one.tolist()
    rest = found.drop(index="gspo")
    assert rest.equals(in_run_variance(data).set_index(["arm", "seed", "step"]).drop(index="gspo"))


def test_shares_of_sites_are_pooled_by_the_size_of_the_effect(split):
    frame = decomposition_by_site(split).frame.query("arm == 'gspo' and seed == 2").set_index(["site", "kind"])["share"]
    assert frame[("l.0.gate", "alone")] == pytest.approx(0.7)
    assert frame[("l.1.gate", "last")] == pytest.approx(0.5)


def test_arms_with_fewer_updates_keep_their_own_last_one():
    rows = pd.DataFrame({"arm": ["a", "a", "b"], "update": [1, 4, 1], "x": [1, 2, 3]})
    assert last_updates(rows)["x"].tolist() == [2, 3]


def test_a_study_without_decomposition_says_so(data):
    for draw in (decomposition, decomposition_by_site):
        with pytest.raises(NothingToDraw, match="recorded no"):
            draw(data)


def test_the_noise_floor_stands_beside_the_change_rates(data):
    def floor(variant, changed):
        counts = {"slots_changed": changed, "slots": 1000, "sites_changed": changed, "sites": 500}
        return {"arm": "grpo", "seed": 0, "step": 0, "variant": variant, **counts, "tokens_changed": changed,
                "tokens": 100, "gap_mean": 1e-7 * changed, "gap_max": 1e-6 * changed}  # fmt: skip

    rows = [floor("repeat", 0), floor("batch", 1), floor("experts", 2), floor("bf16", 10)]
    measured = replace(data, floors=pd.DataFrame(rows))
    table = noise_floor(measured)
    assert table.loc["own", ["slot", "site", "token"]].tolist() == pytest.approx([0.002, 0.004, 0.02])
    assert table.loc["bf16", "gap_max"] == pytest.approx(1e-5)
    figure = expert_change(measured)
    assert (
        "own arithmetic (repeated, other batch shapes, other experts implementation) 0.2 % of slots" in figure.caption
    )
    for ax, level in zip(figure.figure.axes[::2], (0.2, 0.4, 2.0), strict=True):
        assert any(np.allclose(line.get_ydata(), level) for line in ax.lines)
    words = " ".join(s.text for s in reading.read(measured))
    assert "in a bf16 copy 1 % of slots, 2 % of sites and 10 % of tokens change" in words
    assert "of the updates, not of arithmetic" not in words, "the floor is not zero here"
    assert noise_floor(data).empty
    assert "noise floor" not in expert_change(data).caption


def test_blocks_lengths_are_the_ticks_of_the_design_effect(data):
    for ax in FIGURES["design_effect"](data).figure.axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert set(ax.get_xticks()) == set(lines["a block moves as one"].get_xdata()[-4:])


def test_one_step_has_its_interval_and_a_mark_for_the_natural_replay_run(tmp_path):
    made = FIGURES["reward"](load(write_study(tmp_path / "one", seeds=(0, 1, 2), steps=1, sequences=8)))
    natural, noisy = made.figure.axes
    bars = [path.vertices for lines in natural.collections for path in lines.get_paths() if len(path.vertices) == 2]
    assert len(bars) == 3 and all(low < high for (_, low), (_, high) in bars), "a band of one point has no width"
    assert all(line.get_marker() not in ("", "None") for line in noisy.lines if "natural run" in line.get_label())
