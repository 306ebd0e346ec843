"""analysis/both_engines.py: last policies by two engines, on the same prompts with the same random numbers."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from moe_rl.done import write_done
from moe_rl.policy import ModelConfig, ModelError, TinyConfig
from moe_rl.rollout import TaskConfig
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.study.config import dump_run
from moe_rl.study.published import ResultsError, published_values
from moe_rl.study.results import markdown
from moe_rl.training import OptimConfig, ProbeConfig, RolloutConfig, RunConfig, train

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "both_engines.py"))
CONFIG = RunConfig(
    model=ModelConfig(
        tiny=TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8),
        cold_start=None,
        device="cpu",
    ),
    task=TaskConfig(name="mod_chain", options={"steps": 1}),
    rollout=RolloutConfig(prompts=2, group_size=2),
    optim=OptimConfig(steps=1, num_minibatches=1),
    probe=ProbeConfig(every=0),
)


def test_an_engine_of_the_same_arithmetic_earns_the_same_and_every_finished_run_has_a_row(
    tmp_path, monkeypatch, capsys
):
    run = tmp_path / "grpo" / "seed0"
    train(CONFIG, run)
    (run / "config.yaml").write_text(dump_run(CONFIG), encoding="utf-8")
    write_done(run)
    # an untrained policy earns nothing: what it said stands for the reward
    monkeypatch.setitem(
        SCRIPT["rewards"].__globals__, "score", lambda _, said: SimpleNamespace(rewards=said.logps.sum(1))
    )
    engines = {"fp32": EngineConfig(kind="hf", dtype="float32")}
    engines |= {name: SCRIPT["quantised"](name) for name in ("int4", "mxfp4")}
    found = SCRIPT["rewards"](run, 64, engines)
    assert found["training"] == found["fp32"] and len({found[name] for name in ("training", "int4", "mxfp4")}) == 3
    to = tmp_path / "tables"
    monkeypatch.setattr(sys, "argv", ["both_engines.py", str(tmp_path), "--prompts", "64", "--to", str(to)])
    SCRIPT["main"]()
    (row,) = pd.read_csv(to / "both_engines.csv").to_dict("records")
    assert (row["arm"], row["seed"], row["rounding"]) == ("grpo", 0, "native")
    said = capsys.readouterr().out
    assert row["training"] == pytest.approx(found["training"], rel=1e-5) and "grpo" in said
    assert "Empty" not in said and not (to / "rounding_costs.csv").exists(), "one arm: nothing is compared"
    (run / "checkpoint" / "expert_bias.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="of a run with optim"):
        SCRIPT["rewards"](run, 64, engines)
    monkeypatch.setattr(sys, "argv", ["both_engines.py", str(tmp_path), "--arms", "gspo"])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "no finished run of gspo in it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["both_engines.py", str(tmp_path), "--arms", "grpo", "gpso"])
    with pytest.raises(SystemExit):  # before the arms that there are have answered
        SCRIPT["main"]()
    assert "no finished run of gpso in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "nowhere: no such folder"), ([".", "--prompts", "0"], "--prompts 0: at least one is needed")],
)
def test_bad_input_is_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["both_engines.py", *arguments])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert message in capsys.readouterr().err


def test_what_rounding_costs_is_told_of_the_committed_tables_by_pairs_too():
    results = Path(__file__).parents[2] / "docs" / "results"
    table = pd.read_csv(results / "int4_sort" / "both_engines.csv")
    lost = (table["training"] - table["int4"]).groupby([table["arm"], table["seed"]]).mean()
    told = published_values(results, "int4_sort:grpo_int4:old_int4", "lost_by_int4", roundings=True)
    assert len(told) == 18 and told.mean() == pytest.approx((lost["grpo_int4"] - lost["old_int4"]).mean())
    with pytest.raises(ResultsError, match=r"lag_sort has no both_engines\.csv with the column 'int4'"):
        published_values(results, "lag_sort:grpo", "by_int4")


def test_pairs_in_which_a_run_failed_can_be_left_out():
    results = Path(__file__).parents[2] / "docs" / "results"
    runs = pd.read_csv(results / "trained_copy_reverse" / "runs.csv").query("rounding == 'native'").set_index("seed")
    told = published_values(results, "trained_copy_reverse:old_int4:grpo_fp32", without_failed=True)
    arm, other = (runs[runs["arm"] == name] for name in ("old_int4", "grpo_fp32"))
    expected = (arm["final"] - other["final"])[~arm["failed"] & ~other["failed"]]
    assert len(told) == 9 and told.droplevel([0, 1]).to_dict() == pytest.approx(expected.to_dict())


def test_a_seeds_roundings_count_once():
    rows = [
        {"arm": "grpo", "seed": seed, "rounding": rounding, "training": 0.5 + shift + seed / 10, "int4": 0.5}
        for seed in (0, 1, 2)
        for rounding, shift in (("native", 0.1), ("avx2", -0.1))
    ]
    (told,) = SCRIPT["summary"](pd.DataFrame(rows), ["int4"]).to_dict("records")
    found = [told["n"], *(told[f"lost_by_int4{end}"] for end in ("", "_low", "_high"))]
    assert found == pytest.approx([3, 0.1, -0.1484, 0.3484], abs=1e-4), "Student's t of two degrees is 4.303"


def test_arms_are_told_apart_by_what_rounding_costs_them_as_one_family_of_all_formats():
    rows = [
        {"arm": arm, "seed": seed, "training": 0.8, "int4": 0.8 - cost + seed / 1000, "mxfp4": 0.7 + seed / 1000}
        for arm, cost in (("old", 0.0), ("fp32", 0.1))
        for seed in range(9)
    ]
    rows[0]["int4"] -= 0.01  # the differences scatter
    table = pd.concat(pd.DataFrame(rows).assign(rounding=name) for name in ("native", "avx2"))
    found = SCRIPT["comparisons"](table, ["int4", "mxfp4"], [("old", "fp32")], 0.05)
    told = found[found["rounding"] == "avx2"].set_index("of")
    verdicts = {"lost_by_int4": "lower", "lost_by_mxfp4": "no difference of interest", "int4": "higher"}
    assert told["verdict"].to_dict() == {**verdicts, "mxfp4": "no difference of interest"}
    assert told["p_adjusted"][["lost_by_int4", "int4"]].tolist() == pytest.approx([2 * 2 / 2**9] * 2), "Holm over two"
    assert told["difference"]["lost_by_int4"] == pytest.approx(-0.1 + 0.01 / 9)
    pooled = found[found["rounding"] == "pooled"]
    assert pooled["difference"].tolist() == pytest.approx(told["difference"].tolist()) and not pooled["verdict"].any()
    lacking = table[(table["seed"] > 0) | (table["rounding"] == "native")]
    counts = SCRIPT["comparisons"](lacking, ["int4"], [("old", "fp32")], 0.05).groupby("rounding", sort=False)["n"]
    assert counts.max().to_dict() == {"native": 9, "avx2": 8, "pooled": 8}, "seeds that every rounding has"
    page = markdown("rounding_costs", found)
    assert "| int4 | old − fp32 | 9 | −0.099 [−0.101, −0.096], lower | −0.099 [−0.101, −0.096], lower |" in page
    rewards = markdown("engine_rewards", SCRIPT["summary"](table, ["int4", "mxfp4"]))
    assert rewards.splitlines()[0] == (
        "| arm | n | reward by training | reward by int4 | reward by mxfp4 | lost by int4 | lost by mxfp4 |"
    )
