"""The script that draws figures and the notebook: each runs as it is."""

import errno
import os
import runpy
import shutil
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from nbclient import NotebookClient
from synthetic import add_rows, write_study

from moe_rl.study import load
from moe_rl.study.figures import FIGURES

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "notebooks" / "02_replay_vs_gspo.ipynb"
SCRIPT = ROOT / "analysis" / "make_figures.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=4, sequences=4, tokens_every=3)


def test_the_script_draws_the_figures_that_are_named(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(folder), "--only", "gradient_norm", "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path}: 5 files\n"
    assert {path.name for path in tmp_path.iterdir()} == {
        f"gradient_norm.{kind}" for kind in ("pdf", "svg", "png", "csv", "md")
    }


def test_the_script_draws_a_study(folder, monkeypatch, capsys):
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", {"gradient_norm": FIGURES["gradient_norm"]})
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(folder)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out == f"{folder / 'figures'}: 5 files\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: no such folder"),
        ([".", "--only", "rewrad"], "unknown figure 'rewrad'; did you mean 'reward'?"),
    ],
)
def test_the_script_says_what_is_wrong(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 1 and message in capsys.readouterr().err


def test_the_notebook_is_committed_without_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_runs(folder, monkeypatch):
    monkeypatch.setenv("MOE_RL_STUDY", str(folder))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.output_type in ("error", "stderr")]
    assert sum("data:image/png;base64" in str(output.get("data", {}).get("text/html", "")) for output in shown) == 6
    words = "".join(output.get("text", "") for output in shown)
    assert "16 of 16 runs are finished" in words


def test_the_tunings_rule():
    """Chosen: the best of those above the default in every seed and by 0.05 in the mean; open: what may yet be."""
    choose = runpy.run_path(str(ROOT / "analysis" / "tuning.py"))["choose"]
    nan = float("nan")
    rows = {
        ("grpo", "default"): (0.80, 0.70),
        ("grpo", "a little better"): (0.84, 0.75),  # by 0.045
        ("grpo", "best in one seed"): (0.99, 0.69),
        ("grpo", "better"): (0.84, 0.77),
        ("grpo", "best"): (0.81, 0.82),
        ("gspo", "default"): (0.80, nan),
        ("gspo", "may yet win"): (0.81, nan),
        ("gspo", "cannot any more"): (0.80, nan),
        ("gspo", "not begun"): (nan, nan),
    }
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(rows, names=["method", "label"])
    table = choose(table)
    assert list(table.index[table["chosen"]]) == [
        ("grpo", "best"),
        ("gspo", "default"),
    ]
    assert list(table.index[table["open"]]) == [("gspo", "may yet win"), ("gspo", "not begun")]
    assert table.loc[("grpo", "a little better"), "gain"] == pytest.approx(0.045)

    one = choose(table[[0]])  # on one seed nothing is chosen, and what is above the default is open
    assert list(one.index[one["chosen"]]) == [("grpo", "default"), ("gspo", "default")]
    assert [label for _, label in one.index[one["open"]]] == [
        "a little better",
        "best in one seed",
        "better",
        "best",
        "may yet win",
        "not begun",
    ]


def test_a_gain_of_exactly_what_is_asked_is_enough():
    """0.85 less 0.80 is 0.0499999999 in binary."""
    choose = runpy.run_path(str(ROOT / "analysis" / "tuning.py"))["choose"]
    index = pd.MultiIndex.from_product([["grpo"], ["default", "better"]], names=["method", "label"])
    assert choose(pd.DataFrame([(0.80, 0.80), (0.85, 0.85)], index=index))["chosen"].tolist() == [False, True]


def test_the_tunings_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = write_study(tmp_path / "tuning", ("grpo",), (0, 1), 2, tokens_every=9)
    for run in folder.glob("*/seed*"):
        add_rows(run, {"kind": "eval", "step": 2, "reward": 0.5, "reward_n": 9})
    table = tmp_path / "tables" / "tuning.csv"
    monkeypatch.setattr(sys, "argv", ["tuning.py", str(folder), "--csv", str(table)])
    runpy.run_path(str(ROOT / "analysis" / "tuning.py"), run_name="__main__")
    assert pd.read_csv(table)["chosen"].tolist() == [True]
    table.write_text("before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        runpy.run_path(str(ROOT / "analysis" / "tuning.py"), run_name="__main__")
    assert [path.read_text() for path in table.parent.iterdir()] == ["before"]


def test_a_dose_that_has_not_begun_is_missing_from_the_score(tmp_path):
    """Else a setting that has its natural runs alone would be above a default that has those under noise, too."""
    folder = write_study(tmp_path / "tuning", ("grpo", "grpo_noise", "gspo", "gspo_noise"), (0, 1), 2, tokens_every=9)
    config = yaml.safe_load((folder / "study.yaml").read_text())
    for arm, about in config["arms"].items():
        about["label"] = f"GRPO: {'default' if arm.startswith('grpo') else 'half the rate'}"
    (folder / "study.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for run in folder.glob("*/seed*"):
        add_rows(run, {"kind": "eval", "step": 2, "reward": 0.5 if "noise" in run.parent.name else 0.8, "reward_n": 9})
    scores = runpy.run_path(str(ROOT / "analysis" / "tuning.py"))["scores"]
    assert scores(load(folder)).to_numpy().tolist() == [[0.65, 0.65], [0.65, 0.65]]
    run = load(folder).runs[0]
    (run.folder / "DONE").rename(folder / "kept")  # not finished: its last evaluation so far is no score
    assert scores(load(folder)).isna().to_numpy().sum() == 1
    (folder / "kept").rename(run.folder / "DONE")
    shutil.rmtree(folder / "gspo_noise")
    assert scores(load(folder)).iloc[1].isna().all()
