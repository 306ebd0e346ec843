"""Largest gradients with a method over without it, from the committed tables."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moe_rl.study.figures.over_studies import gradients_figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "analysis" / "gradients.py"))


@pytest.fixture(scope="module")
def table(script):
    return script["gradients_table"]()


def test_a_pair_differs_in_the_method_alone(script):
    pairs = set(script["pairs"]())
    assert ("replay_vs_gspo", "gspo_noise02", "grpo_noise02", "GSPO") in pairs
    assert ("updates_per_batch_engine", "r3_n64", "grpo_n64", "R3") in pairs
    assert ("lag", "replay_lag2", "grpo_lag2", "R2") in pairs
    named = {(study, arm, other) for study, arm, other, _ in pairs}
    assert ("replay_vs_gspo", "grpo_replay", "grpo_noise02") not in named, "one has noise"
    assert ("updates_per_batch", "replay_n16", "grpo_n64") not in named, "another number of updates"
    assert ("replay_vs_gspo", "gspo", "grpo_replay") not in named, "two methods"


def test_a_seed_counts_once_over_its_repetitions(table):
    files = [RESULTS / name / "updates.csv" for name in ("minibatches", "minibatches_intel")]
    logs = [np.log(pd.read_csv(file).pivot(index="seed", columns="arm", values="grad_norm_largest")) for file in files]
    each = [one["grpo_replay_n8"] - one["grpo_n8"] for one in logs]
    both = pd.concat(each).groupby(level=0).mean()
    row = table.query("study == 'minibatches' and arm == 'grpo_replay_n8'").iloc[0]
    half = stats.t.ppf(0.975, len(both) - 1) * both.std() / np.sqrt(len(both))
    expected = np.exp([both.mean(), both.mean() - half, both.mean() + half])
    assert row[["ratio", "low", "high"]].to_numpy(float) == pytest.approx(expected)
    assert (row["n"], row["runs"]) == (len(both), sum(map(len, each)))
    assert row["below"] == sum((one < 0).sum() for one in each)


def test_runs_that_studies_share_are_one_pair_and_every_pair_is_a_mark(table):
    shared = table.query("method == 'GSPO' and arm == 'gspo_n64' and other == 'grpo_n64'")
    assert list(shared["study"]).count("updates_per_batch") == 1 and "updates_per_batch_why" not in set(shared["study"])
    axes = gradients_figure(table).figure.axes
    assert [ax.get_title(loc="left").split("\n")[0] for ax in axes] == list(table["method"].unique())
    for ax, (_, rows) in zip(axes, table.groupby("method", sort=False), strict=True):
        assert ax.collections[-1].get_offsets().tolist() == rows[["without", "ratio"]].to_numpy().tolist()
        assert f"{(rows['ratio'] < 1).sum()} of {len(rows)} below 1" in ax.get_title(loc="left")


def test_declared_pairs_are_tested_by_study_and_rounding(script, tmp_path):
    folder = tmp_path / "dual_clip_noise"
    folder.mkdir()
    (folder / "env.json").write_text(json.dumps({"study": folder.name}))
    rng = np.random.default_rng(0)
    arms = {
        "grpo": 1.0,
        "dual": 0.2,
        "grpo_noise02": 1.0,
        "dual_noise02": 1.0,
        "grpo_noise05": 1.0,
        "dual_noise05": 9.0,
    }
    rows = [
        {"arm": arm, "seed": seed, "rounding": rounding, "grad_norm_largest": size * np.exp(rng.normal(0, 0.1))}
        for rounding in ("native", "default")
        for arm, size in arms.items()
        for seed in range(12)
    ]
    pd.DataFrame(rows).to_csv(folder / "updates.csv", index=False)
    found = script["declared_table"](tmp_path)
    assert list(found["rounding"]) == ["native"] * 3 + ["default"] * 3
    assert list(found["verdict"]) == ["lower", "not resolved", "higher"] * 2
    assert list(found["ratio"].round(1))[:3] == [0.2, pytest.approx(1.0, abs=0.2), pytest.approx(9.0, abs=1)]
    shutil.copytree(folder, tmp_path / "dual_clip_noise_intel")
    again = script["declared_table"](tmp_path)
    assert list(dict.fromkeys(again["rounding"])) == ["native", "default", "intel", "intel_default"]
    assert list(again["verdict"]) == 2 * list(found["verdict"])
    first = found.iloc[0]
    assert first["p"] == pytest.approx(2 / 2**12) and first["adjusted"] == pytest.approx(3 * first["p"])
