"""Scripts that read the committed tables of several studies."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from moe_rl.study.published import KINDS, less_same_seeds, published_values
from moe_rl.study.statistics import student_interval

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def script(name: str) -> dict:
    return runpy.run_path(str(ROOT / "analysis" / f"{name}.py"))


@pytest.mark.parametrize("name", ["change_by_load", "survival"])
def test_a_script_of_committed_tables_alone_refuses_a_folder_of_runs(name, monkeypatch, capsys):
    """Else its numbers would be taken for those of the folder."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", "runs/mine"])
    with pytest.raises(SystemExit, match="2"):
        script(name)["main"]()
    said = capsys.readouterr()
    assert not said.out and "unrecognized arguments: runs/mine" in said.err


def test_pairs_of_studies_are_joined_by_seed_and_arms_that_are_none_are_refused(monkeypatch, capsys):
    pooled = script("pooled")
    name = "methods_stale{}:gspo_partial:grpo_partial"
    stale, again = published_values(RESULTS, name.format("")), published_values(RESULTS, name.format("_intel"))
    assert len(stale) == 9 and min(stale) > 0
    monkeypatch.setattr("sys.argv", ["pooled.py", name.format(""), name.format("_intel")])
    pooled["main"]()
    both = student_interval((stale.to_numpy() + again.to_numpy()) / 2).text(".5f")
    assert capsys.readouterr().out == f"18 values, {sum(stale > 0) + sum(again > 0)} above 0, of 9 seeds: {both}\n"
    with pytest.raises(ValueError, match="methods_stale has no arm gspo; it has cispo_partial, dppo_partial"):
        published_values(RESULTS, "methods_stale:grpo:gspo")
    with pytest.raises(ValueError, match=r"of the runs of replay_vs_gspo under avx2 only its comparisons are kept"):
        published_values(RESULTS, "replay_vs_gspo:gspo:grpo", roundings=True)
    assert len(published_values(RESULTS, name.format("_intel"), roundings=True)) == 9, "its native runs are the study's"
    monkeypatch.setattr("sys.argv", ["pooled.py", "replay_vs_gspo:grpo", "decomposition:grpo"])
    with pytest.raises(SystemExit, match="2"):
        pooled["main"]()
    said = capsys.readouterr()
    assert not said.out and "replay_vs_gspo and decomposition share the seeds 0, 1, 2, 3, 4, 5" in said.err
    with pytest.raises(ValueError, match="expected STUDY:ARM or STUDY:ARM:OTHER"):
        published_values(RESULTS, "no_such_study:a:b")


def test_differences_of_any_two_arms_are_those_of_the_tables_under_one_rounding_and_over_both(monkeypatch, capsys):
    pooled, results = script("pooled"), ROOT / "docs" / "results" / "int4_sort"
    declared = pd.read_csv(results / "comparisons.csv").set_index(["arm", "other"])
    pair = ("old_int4", "grpo_int4")
    first = [float(value) for value in declared.loc[pair, "differences"].split()]
    assert published_values(RESULTS, "int4_sort:old_int4:grpo_int4").to_numpy() == pytest.approx(first, abs=5e-5)
    rows = pd.read_csv(results / "roundings.csv").set_index(["arm", "other", "rounding"])
    monkeypatch.setattr("sys.argv", ["pooled.py", "--roundings", "int4_sort:old_int4:grpo_int4"])
    pooled["main"]()
    mean, low, high = rows.loc[(*pair, "pooled"), ["difference", "low", "high"]]
    printed = re.findall(r"-?\d\.\d{5}", capsys.readouterr().out.rpartition("of 9 seeds: ")[2])
    assert [float(number) for number in printed] == pytest.approx([mean, low, high], abs=1e-5)
    runs = pd.read_csv(results / "runs.csv").query("rounding == 'native'").set_index(["arm", "seed"])["held_out"]
    held = published_values(RESULTS, "int4_sort:old_int4:grpo_fp32", "held_out").to_numpy()
    assert held == pytest.approx((runs["old_int4"] - runs["grpo_fp32"]).to_numpy())
    table = pd.read_csv(results / "final_reward.csv").set_index("arm")
    own = {kind: published_values(RESULTS, "int4_sort:sapo_int4", kind).mean() for kind in list(KINDS)[:4]}
    assert own["final"] == pytest.approx(table.loc["sapo_int4", "final"], abs=1e-5)
    assert own["held_out_less_sampled"] == pytest.approx(own["held_out"] - own["final"])


def test_a_study_of_the_same_seeds_is_taken_away_run_by_run(monkeypatch, capsys):
    pooled, names = script("pooled"), ("wide_policy:grpo_lower_rate:grpo", "wide_policy_dense:grpo_lower_rate:grpo")
    runs = [pd.read_csv(RESULTS / name.split(":")[0] / "runs.csv").drop_duplicates(["arm", "seed"]) for name in names]
    wide, dense = (table.pivot(index="seed", columns="arm", values="final") for table in runs)  # native runs come first
    expected = (wide["grpo_lower_rate"] - wide["grpo"]) - (dense["grpo_lower_rate"] - dense["grpo"])
    monkeypatch.setattr("sys.argv", ["pooled.py", names[0], "--less", names[1]])
    pooled["main"]()
    interval = student_interval(expected.to_numpy()).text(".5f")
    assert capsys.readouterr().out == f"12 values, {sum(expected > 0)} above 0, of 12 seeds: {interval}\n"
    both = [published_values(RESULTS, name, roundings=True) for name in names]
    shared = set(both[0].index.droplevel(0)) & set(both[1].index.droplevel(0))
    assert set(less_same_seeds(*both).index.droplevel(0)) == shared >= {("native", seed) for seed in wide.index}
    for wrong, message in (
        ([names[0], "--less", "int4_sort:old_int4"], "no run of the same rounding and seed"),
        ([*names, "--less", names[1]], "--less is taken from one STUDY:ARM[:OTHER]"),
    ):
        monkeypatch.setattr("sys.argv", ["pooled.py", *wrong])
        with pytest.raises(SystemExit, match="2"):
            pooled["main"]()
        assert message in capsys.readouterr().err


def test_routing_variances_are_compared_after_the_last_update_as_the_study_does():
    ratio = script("routing_noise")["ratio"]
    ones = (1.0, 1.0)
    by_step = {("a", 0): (2.0, 8.0), ("a", 1): ones, ("b", 0): ones, ("b", 1): ones, ("b", 2): (9.0, 9.0)}
    rows = [
        {"arm": arm, "seed": seed, "step": step, "update": update, "token_var_routing": value}
        for (arm, seed), values in by_step.items()
        for step, last in enumerate(values)
        for update, value in ((1, 1000.0), (2, last))
    ]
    estimate, low, high, pairs = ratio(pd.DataFrame(rows), "a", "b")
    assert (estimate, pairs) == (pytest.approx(2.0), 2), "geometric mean of 4 and 1; seed 2 has no pair"
    # log 4 and 0: standard error log 4 / 2, Student's t of one degree of freedom 12.706
    assert np.log(high / low) == pytest.approx(12.706 * np.log(4), rel=1e-3)
    committed = ROOT / "docs" / "results" / "decomposition"
    table = pd.read_csv(committed / "routing_noise.csv").set_index(["arm", "other"])
    probes = pd.read_csv(committed / "decomposed_probes.csv")
    for (arm, other), row in table.iterrows():
        assert ratio(probes, arm, other)[:3] == pytest.approx(tuple(row[["ratio", "low", "high"]]), rel=1e-4)


def test_a_probe_without_routing_variance_is_left_out_and_its_seed_is_not():
    """As in the study's own table; the logarithm of 0 would take the seed with it."""
    rows = [
        {"arm": arm, "seed": seed, "step": step, "update": 1, "token_var_routing": value}
        for arm, values in {"a": [2.0, 0.0], "b": [1.0, 1.0]}.items()
        for seed in (0, 1)
        for step, value in enumerate(values)
    ]
    estimate, _, _, pairs = script("routing_noise")["ratio"](pd.DataFrame(rows), "a", "b")
    assert (estimate, pairs) == (pytest.approx(2.0), 2)


def test_routing_variances_are_of_each_arms_own_last_update():
    """Arms may make different numbers of updates of a step."""
    rows = [
        {"arm": arm, "seed": seed, "step": 0, "update": update, "token_var_routing": value}
        for arm, values in {"a": [100.0, 2.0], "b": [1.0]}.items()
        for seed in (0, 1)
        for update, value in enumerate(values, 1)
    ]
    estimate, _, _, pairs = script("routing_noise")["ratio"](pd.DataFrame(rows), "a", "b")
    assert (estimate, pairs) == (pytest.approx(2.0), 2)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "pooled",
            ["lag:gspo_lag4:grpo_lag4", "lag:grpo_lag4:grpo"],
            "lag: named twice; of each seed the mean over other arms",
        ),
        ("routing_noise", ["gspo", "grpo", "--seeds", "900", "901"], "has no probe of these --seeds and --steps"),
        ("early_warning", ["docs/results/lag", "--resamples", "0"], "--resamples 0: expected at least 1"),
        ("early_warning", ["docs/results/lag", "--level", "95"], "--level 95: expected a share between 0 and 1"),
    ],
)
def test_scripts_say_what_they_cannot_answer(name, words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit, match="2"):
        script(name)["main"]()
    said = capsys.readouterr()
    assert not said.out and message in said.err


def test_the_table_of_fates_is_written_into_a_new_folder(tmp_path, monkeypatch):
    survival = script("survival")
    one = {"study": "s", "again": "avx2", "claim": "higher", "fate": "same"}
    monkeypatch.setitem(survival["main"].__globals__, "repeated_verdicts", lambda: pd.DataFrame([one]))
    monkeypatch.setattr("sys.argv", ["survival.py", "--csv", str(tmp_path / "new" / "t.csv")])
    survival["main"]()
    assert pd.read_csv(tmp_path / "new" / "t.csv")["same"].tolist() == [1]


def test_load_ratios_know_the_arms_with_a_balancing_bias():
    ratios = script("change_by_load")["load_ratios"]().set_index(["study", "arm"])
    biased = ratios["biased"].astype(bool)
    assert (ratios.loc[~biased, "ratio"] > 1).all() and (ratios.loc[biased, "ratio"] < 1).all()
    assert biased.loc["methods_bias"].all() and not biased["levers_balance_replay", "grpo"]


def test_fates_of_conclusions_and_the_committed_table_of_them():
    survival = script("survival")

    def told(verdict, difference):
        return pd.Series({"verdict": verdict, "difference": difference})

    equal = "no difference of interest"
    cases = {
        ("higher", 0.2, "higher", 0.1): "same",
        ("higher", 0.2, "not resolved", 0.06): "direction",
        ("higher", 0.2, "not resolved", 0.04): "gone",
        ("lower", -0.2, "not resolved", -0.06): "direction",
        ("lower", -0.2, "higher", 0.2): "gone",
        (equal, 0.0, "not resolved", -0.04): "direction",
        (equal, 0.0, "lower", -0.2): "gone",
        ("not resolved", 0.1, "higher", 0.1): "new",
        ("not resolved", 0.1, "not resolved", 0.1): "none",
    }
    for (claim, first, verdict, again), expected in cases.items():
        assert survival["fate"](told(claim, first), told(verdict, again), 0.05) == expected
    committed = pd.read_csv(ROOT / "docs" / "results" / "survival" / "survival.csv")
    assert committed.equals(survival["survival_table"](survival["repeated_verdicts"]())), (
        "python analysis/survival.py --csv docs/results/survival/survival.csv"
    )
    native = pd.read_csv(ROOT / "docs" / "results" / "methods_int4" / "roundings.csv").query("rounding == 'native'")
    claims = native["verdict"].isin(survival["CLAIMS"]).sum()
    assert committed.set_index("study").loc["methods_int4", "claims"] == claims


def test_slopes_by_length_and_the_committed_table_of_them(monkeypatch):
    length = script("length")
    tokens = pd.Series(length["STUDIES"]["old_tokens_length"].tokens)
    rising = pd.DataFrame([0.1 * np.log2(tokens), 1 - 0.2 * np.log2(tokens), np.log2(tokens).where(tokens > 5)])
    assert length["slopes"](rising, dict(tokens)) == pytest.approx([0.1, -0.2]), "a seed that lacks a length has none"
    for study in length["STUDIES"]:
        committed = pd.read_csv(ROOT / "docs" / "results" / f"{study}_slopes" / "slopes.csv")
        pd.testing.assert_frame_equal(committed, length["slopes_table"](study), rtol=1e-5, check_dtype=False)
    line = np.log2(tokens)
    rows = {(rounding, seed): line * (1 + seed) for rounding in ("native", "avx2") for seed in (0, 1, 2)}
    rows["native", 2] = line.where(tokens > 5)
    monkeypatch.setitem(length["slopes_table"].__globals__, "differences", lambda *_: pd.DataFrame(rows).T)
    table = length["slopes_table"]("old_tokens_length").groupby("rounding", sort=False)[["n", "slope"]].first()
    assert table.to_numpy() == pytest.approx(np.array([[2, 1.5], [3, 2.0], [2, 1.5]])), "pooled: seeds that both have"
    monkeypatch.undo()
    drawn = length["drawn"]("old_tokens_length").set_index(["cause", "row", "rounding"])
    gain = pd.read_csv(ROOT / "docs" / "results" / "old_tokens_length" / "roundings.csv").set_index(["arm", "rounding"])
    there = drawn.loc[("GSPO − GRPO, mixed", "4 letters, 5 tokens", "avx2")]
    assert there["difference"] == gain.loc[("gspo_partial_4", "avx2"), "difference"]


@pytest.mark.parametrize(
    ("table", "cpu"), [("early_warning_intel/early_warning.csv", "Intel"), ("early_warning/committed_signals.csv", "")]
)
def test_published_early_warning_is_that_of_the_committed_signals(table, cpu):
    script_of = script("early_warning")
    folder = ROOT / "docs" / "results"
    committed = pd.read_csv(folder / table)
    steps = sorted(committed["steps"].unique())
    asked = [folder / name for name in (folder / "early_warning" / "studies.txt").read_text().split()]
    there = [one for one in asked if cpu in json.loads((one / "env.json").read_text())["cpu"]]
    found = script_of["early_warning"]([script_of["signals_of"](one, steps) for one in there], resamples=2)
    for name in {"runs", "bad", "auc", "within", "pairs", "correlation", "correlation_within"} & set(committed):
        assert found[name].to_numpy() == pytest.approx(committed[name].to_numpy(), abs=1e-5), name


@pytest.mark.parametrize(
    ("study", "rounding", "steps"),
    [
        ("early_signals", None, [5, 10]),
        ("early_signals", "native", [5, 10]),
        ("early_signals", "avx2", [5, 10]),
        ("early_signals_again", None, [5]),
    ],
)
def test_published_early_signals_are_those_of_the_committed_ones(study, rounding, steps):
    script_of, folder = script("early_warning"), ROOT / "docs" / "results"
    name = study + (f"_{rounding}" if rounding else "")
    committed = pd.read_csv(folder / "early_warning" / f"{name}.csv")
    table = script_of["signals_of"](folder / study, steps, rounding)
    found = script_of["early_warning"]([table], resamples=2)
    for column in ("runs", "bad", "within", "correlation_within", "beyond_reward"):
        assert found[column].to_numpy() == pytest.approx(committed[column].to_numpy(), abs=1e-5, nan_ok=True), column


def test_what_rounding_costs_is_the_mean_over_seeds_of_each_seeds_roundings():
    table = script("rounding_costs")["costs_table"]()
    (row,) = table.query("arm == 'old_int4' and claim == 'reversing, rounded to mxfp4'").to_dict("records")
    runs = pd.read_csv(RESULTS / "trained_copy_reverse" / "both_engines.csv").query("arm == 'old_int4'")
    lost = (runs["training"] - runs["mxfp4"]).groupby(runs["seed"]).mean()
    assert set(runs["rounding"]) == {"native", "avx2"} and row["n"] == len(lost) == 12
    interval = student_interval(lost.to_numpy())
    assert [row["difference"], row["low"], row["high"]] == pytest.approx(
        [interval.estimate, interval.low, interval.high]
    )
    assert len(table) == 18 and not table["verdict"].any(), "pooled: no test"


def test_windows_of_a_long_study_by_hand(monkeypatch):
    """Means of windows, the last evaluation in each, falls below the best window so far, and seeds before roundings."""
    windows = script("windows")
    rewards = {("a", 1): [0, 1, 1, 1, 0, 0], ("a", 2): [0, 0, 0, 1, 1, 1], ("b", 1): [0] * 6, ("b", 2): [0] * 6}
    steps = [(arm, seed, i, x) for (arm, seed), row in rewards.items() for i, x in enumerate(row)]
    columns = ["arm", "seed", "step", "reward"]
    data = SimpleNamespace(
        folder=Path("runs/s"),
        config={"interest": 0.4, "comparisons": [["a", "b"]]},
        runs=[SimpleNamespace(arm=arm, seed=seed, finished=arm == "a" or seed == 1) for arm, seed in rewards],
        rollouts=pd.DataFrame(steps, columns=columns),
        evals=pd.DataFrame([("a", 1, 0, 0.1), ("a", 1, 4, 0.7), ("a", 1, 6, 0.2), ("a", 2, 6, 0.4)], columns=columns),
        roundings={},
    )
    data.roundings = {"avx2": SimpleNamespace(**{**vars(data), "rollouts": data.rollouts.query("seed == 1")})}
    data.roundings["avx2"].runs = [run for run in data.runs if run.seed == 1]
    table = windows["windows_table"](data, 2).set_index(["rounding", "of", "steps"]).sort_index()
    reward, held_out, declined = (table[name]["native", "a"].tolist() for name in ("reward", "held_out", "declined"))
    assert reward == [0.25, 0.75, 0.5] and declined == [0, 0, 1]
    assert held_out == pytest.approx([float("nan"), 0.7, 0.3], nan_ok=True)
    assert table["reward"]["native", "a − b"].tolist() == [0.5, 1, 0], "of the one seed that finished in both"
    assert (
        table["n"]["all"].tolist() == table["n"]["native"].tolist() and table["declined"]["all", "a"].tolist()[-1] == 2
    )
    assert (table["reward"]["all"] == table["reward"]["native"]).all(), "a seed counts once"
    data.config = {"interest": None}
    assert set(windows["windows_table"](data, 2)["of"]) == {"a", "b"}, "nothing declared: the usual least difference"
    with pytest.raises(ValueError, match="runs/s: no finished run of 7 steps"):
        windows["windows_table"](data, 7)
