"""Tables of a study by hand: change of slots by an expert's load, and what runs clipped."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic import write_rows
from token_files import write_step

from moe_rl.study.data import load, pooled_rate
from moe_rl.study.result_tables import change_by_load, result_tables, seed_means, update_outcomes
from moe_rl.study.results import markdown


def test_slots_that_changed_are_counted_with_the_load_of_the_expert_that_lost_them(tmp_path):
    """Two of six experts have all ten slots of a site, three times the even load; they lose two at one site, one at
    the other."""
    run = tmp_path / "grpo" / "seed0"
    for name in ("tokens", "routes"):
        (run / name).mkdir(parents=True)
    config = {"label": "GRPO", "seed": 0, "method": {"objective": "grpo", "replay": "none", "noise": 0.0}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "rollout", "step": 0, "reward": 0.5}) + "\n")
    assert not len(change_by_load(load(tmp_path)))
    write_step(run, 0)
    write_step(run, 10, kept=False)
    rows = change_by_load(load(tmp_path)).set_index("load")
    assert rows["experts"].tolist() == pytest.approx([4 / 6, 0, 0, 2 / 6])
    assert rows["slots"].tolist() == [0, 0, 0, 1]
    assert rows.loc["2 and more", "slot_change"] == pytest.approx(3 / 20)
    assert np.isnan(rows["slot_change"].iloc[:3]).all()


def test_what_a_run_clipped_is_a_share_of_all_its_tokens(tmp_path):
    for seed, clipped in ((0, 10), (1, 0)):
        rows = [
            {"kind": "update", "step": 0, "update": i, "slots": 8, "slots_changed": 0, "tokens": 50 * i}
            | {"clipped_tokens": clipped, "clipped_low_tokens": clipped // 2, "clipped_high_tokens": clipped // 5}
            | {"grad_norm": float(i), "ceiling_tokens": i * clipped // 10}
            for i in (1, 2, 3)
        ]
        write_rows(tmp_path / "grpo" / f"seed{seed}", rows, {})
    some, none = update_outcomes(load(tmp_path)).to_dict("records")
    assert (some["above_ceiling"], none["above_ceiling"]) == (pytest.approx(6 / 300), 0)
    assert (some["clipped"], some["clipped_low"], some["clipped_high"]) == (pytest.approx(30 / 300), 0.5, 0.2)
    assert none["clipped"] == 0 and np.isnan(none["clipped_low"])
    assert (none["grad_norm"], none["grad_norm_largest"]) == (2, 3)


def test_the_ratio_at_a_runs_peak_is_that_of_its_largest_update(tmp_path):
    norms = {0: [1.0, 9.0, 2.0, None], 1: [None, None, None, None]}
    for seed, of_run in norms.items():
        rows = [
            {"kind": "update", "step": 0, "update": i, "slots": 8, "slots_changed": 0}
            | {"grad_norm": norm, "probs_ratio_max": 10.0 * i}
            for i, norm in enumerate(of_run, start=1)
        ]
        write_rows(tmp_path / "grpo" / f"seed{seed}", rows, {})
    some, none = update_outcomes(load(tmp_path)).to_dict("records")
    assert (some["grad_norm_largest"], some["ratio_at_peak"]) == (9.0, 20.0)
    assert np.isnan(none["grad_norm_largest"])


def test_what_engine_corrections_took_is_a_share_of_all_tokens_of_the_arms_that_have_one(tmp_path):
    for arm in ("grpo", "icepop"):
        rows = [
            {"kind": "update", "step": 0, "update": i, "slots": 8, "slots_changed": 0}
            | {"tokens": 50 * i, "grad_norm": 1.0}
            for i in (1, 2, 3)
        ]
        for i, row in enumerate(rows, start=1):
            if arm == "icepop":
                row |= {"correction_weight_mean": 1 - i / 10, "correction_dropped_tokens": 10}
                row |= {"correction_truncated_tokens": 2 * i}
        write_rows(tmp_path / arm / "seed0", rows, {})
    table = update_outcomes(load(tmp_path)).set_index("arm")
    names = ["correction_weight", "correction_dropped", "correction_truncated"]
    assert table.loc["icepop", names].tolist() == pytest.approx([0.8, 30 / 300, 12 / 300])
    assert table.loc["grpo", names].isna().all()


def test_how_well_routes_were_foreseen_is_a_mean_over_updates(tmp_path):
    for arm, found in (("grpo", {}), ("pr2", {"predictor_kl": 2e-6, "predictor_kl_unmoved": 1e-6})):
        rows = [
            {"kind": "update", "step": 0, "update": i, "slots": 8, "slots_changed": 0, "grad_norm": 1.0}
            | ({name: i * value for name, value in found.items()} if i > 1 else {})
            for i in (1, 2, 3)
        ]
        write_rows(tmp_path / arm / "seed0", rows, {})
    table = update_outcomes(load(tmp_path)).set_index("arm")
    assert table.loc["pr2", ["predictor_kl", "predictor_kl_unmoved"]].tolist() == pytest.approx([5e-6, 2.5e-6])
    assert table.loc["grpo", "predictor_kl"] != table.loc["grpo", "predictor_kl"]


def test_what_another_trainer_wrote_in_part_is_no_table_and_no_error(tmp_path):
    """Each of these names stands alone: those that belong to it are missing."""
    update = {"kind": "update", "step": 0, "update": 1, "grad_norm": 1.0, "predictor_kl": 1e-6}
    update |= {"correction_weight_mean": 0.5, "correction_dropped_tokens": 3}
    rows = [update, {"kind": "rollout", "step": 0, "reward": 0.5, "old_tokens": 0.5}]
    rows += [{"kind": "decomposition", "step": 0, "update": 1, "token_var_routing": 0.1}]
    gradients = {"gradient_cosine": 0.5, "layer_names": ["0"], "layer_gradient_cosine": [0.5]}
    rows += [{"kind": "probe", "step": 0, "update": 1, "slots_changed": 1, "slots": 8, **gradients}]
    rows += [{"kind": "probe", "step": 1, "update": 1, **gradients, "layer_gradient_cosine": None}]
    for arm, rate in (("a", 1e-5), ("b", 1e-4), ("c", 1e-3)):
        write_rows(tmp_path / arm / "seed0", rows, {"optim": {"learning_rate": rate}})
    tables = result_tables(load(tmp_path))
    assert tables.keys().isdisjoint({"predictions", "versions", "decomposition", "decomposed_probes", "routing_noise"})
    assert tables["updates"]["correction_weight"].tolist() == [0.5] * 3
    assert not {"correction_dropped", "predictor_kl"} & set(tables["updates"])
    assert tables["gradients"]["layer_0"].tolist() == [0.5] * 3
    assert tables["rate_exponents"]["of"].tolist() == ["slots"]
    for unknown in ("auto", None):
        write_rows(tmp_path / "c" / "seed0", rows, {"optim": {"learning_rate": unknown}})
        assert "rate_exponents" not in result_tables(load(tmp_path))


def test_a_count_that_was_not_recorded_is_not_0():
    rows = pd.DataFrame(
        [("a", 2, 10), ("a", None, 10), ("b", None, 10), ("c", 1, None)], columns=["arm", "changed", "total"]
    )
    rates = pooled_rate(rows, "changed", "total", "arm")
    assert rates["a"] == 0.2 and rates[["b", "c"]].isna().all()


def test_seeds_without_a_value_are_not_counted_for_its_interval():
    table = pd.DataFrame({"arm": "grpo", "seed": range(4), "whole": 1.0, "partly": [1.0, 2.0, np.nan, np.nan]})
    row = seed_means(table, ["arm"]).iloc[0]
    assert (row["n"], row["partly"], row["partly_n"]) == (4, 1.5, 2) and "whole_n" not in row


@pytest.mark.filterwarnings("error")
def test_loads_that_were_never_finite_give_no_number_and_no_warning(tmp_path):
    for arm, load_of_sites in (("a", [None, None]), ("b", [1.0, None])):
        update = {"kind": "update", "step": 0, "update": 1, "max_vio": 0.5}
        probe = {"kind": "probe", "step": 0, "update": 1, "site_max_vio": load_of_sites}
        write_rows(tmp_path / arm / "seed0", [update, probe], {})
    table = result_tables(load(tmp_path))["balance"].set_index("arm")["max_vio"]
    assert np.isnan(table["a"]) and table["b"] == 1.0


@pytest.mark.filterwarnings("error")
def test_rates_without_a_denominator_are_unknown_without_a_warning(tmp_path):
    counts = {f"{unit}s{part}": 0 for unit in ("slot", "site", "token") for part in ("", "_changed")}
    write_rows(tmp_path / "a" / "seed0", [{"kind": "probe", "step": 0, "update": 1, **counts}], {})
    assert result_tables(load(tmp_path))["change_rates"]["slot"].isna().all()


def test_predictions_are_a_ratio_of_sums_over_updates_and_a_geometric_mean_over_seeds(tmp_path):
    """Of seed 0 (1 + 8) / (2 + 1) = 3 in all steps, 1/2 in the first ten, 8 later; seed 1 has a quarter of it."""
    for arm, seed, factor in (("grpo", 0, 0.0), ("pr2", 0, 1.0), ("pr2", 1, 0.25)):
        rows = [
            {"kind": "update", "step": step, "update": 2, "slots": 8, "slots_changed": 0, "grad_norm": 1.0}
            | ({"predictor_kl": factor * said, "predictor_kl_unmoved": unmoved} if factor else {})
            for step, said, unmoved in ((9, 1.0, 2.0), (10, 8.0, 1.0))
        ]
        write_rows(tmp_path / arm / f"seed{seed}", rows, {})
    table = result_tables(load(tmp_path))["predictions"]
    assert table["arm"].tolist() == ["pr2"] and table["n"].tolist() == [2]
    assert table.loc[0, ["all", "early", "later"]].tolist() == pytest.approx([1.5, 0.25, 4.0])
    assert "| pr2 | 2 | 1.50 [" in markdown("predictions", table)
    shutil.copytree(tmp_path / "grpo", tmp_path / "rounding_avx2" / "grpo")  # some of the arms
    tables = result_tables(load(tmp_path))
    assert tables["predictions"]["arm"].tolist() == ["pr2"] and set(tables["updates"]["rounding"]) == {"native", "avx2"}
    for run in (tmp_path / "rounding_avx2").glob("grpo/seed*"):
        write_rows(run, [{"kind": "rollout", "step": 0, "reward": 0.5}], {})
    assert set(result_tables(load(tmp_path))["updates"]["rounding"]) == {"native"}
