"""analysis/arithmetic.py: the floor of a run's last policy on its own answers, and its mean over runs."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from moe_rl.policy import ModelConfig, TinyConfig
from moe_rl.rollout import TaskConfig
from moe_rl.training import OptimConfig, ProbeConfig, RolloutConfig, RunConfig, train

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "analysis" / "arithmetic.py"))
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


def test_a_finished_run_is_scored_in_every_way_on_what_it_answers(tmp_path):
    run = tmp_path / "grpo" / "seed0"
    train(CONFIG, run)
    (run / "config.yaml").write_text("task: {name: mod_chain, options: {steps: 1}}", encoding="utf-8")
    said = SCRIPT["answers"](run, 3)
    assert said == SCRIPT["answers"](run, 3) and len({line["prompt"] for line in said}) == 3
    rows = SCRIPT["floor_of"](run, 3).set_index(["dtype", "variant"])
    assert rows.loc[("float32", "repeat"), "gap_max"] == 0 and ("bfloat16", "decode") in rows.index
    assert (rows["measured"] > 0).all()


def test_means_are_over_runs_and_shares_of_nothing_are_left_out():
    names = SCRIPT["QUANTITIES"]
    about = {"arm": "grpo", "dtype": "float32", "variant": "decode"}
    floors = pd.DataFrame([{**about, "seed": value, **dict.fromkeys(names, float(value))} for value in (1, 2, 3)])
    floors.loc[0, "routing_share_m2"] = float("nan")
    (row,) = SCRIPT["seed_means"](floors, list(about), names, interval=SCRIPT["student_interval"]).to_dict("records")
    assert (row["n"], row["slot_change"], row["routing_share_m2"]) == (3, 2.0, 2.5)
    assert row["routing_share_m2_n"] == 2 and "slot_change_n" not in row
    assert row["slot_change_high"] == pytest.approx(2 + 4.303 / 3**0.5, abs=1e-3)


def test_a_folder_without_finished_runs_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "no finished run in it (seedN/DONE)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", str(tmp_path), "--prompts", "0"])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "--prompts 0: at least one is needed" in capsys.readouterr().err


def test_two_folders_that_would_be_one_arm_are_refused(tmp_path, monkeypatch, capsys):
    arms = [str(tmp_path / study / "rounding_avx2" / "grpo") for study in ("one", "other")]
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", *arms])
    with pytest.raises(SystemExit):
        SCRIPT["main"]()
    assert "rounding_avx2: grpo: two folders of this name would be one arm" in capsys.readouterr().err
