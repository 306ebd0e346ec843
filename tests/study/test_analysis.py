"""Scripts and the notebook: one script per figure, each draws what its name says; the notebook runs as it is."""

import runpy
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from synthetic import write_study

from moe_rl.study.figures import ENGINE_FIGURES, FIGURES, STUDY_FIGURES

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "notebooks" / "02_replay_vs_gspo.ipynb"
ALL = FIGURES | ENGINE_FIGURES | STUDY_FIGURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=4, sequences=4, tokens_every=3)


@pytest.mark.parametrize("name", ALL)
def test_there_is_a_script_for_every_figure(name, monkeypatch):
    drawn = []
    monkeypatch.syspath_prepend(str(ROOT / "analysis"))
    import _script

    monkeypatch.setattr(_script, "run", drawn.append)
    runpy.run_path(str(ROOT / "analysis" / f"{name}.py"), run_name="__main__")
    assert drawn == [ALL[name]]


def test_a_script_writes_its_figure(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "analysis"))
    monkeypatch.setattr(sys, "argv", ["gradient_norm.py", str(folder), "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "analysis" / "gradient_norm.py"), run_name="__main__")
    printed = capsys.readouterr().out.split()
    assert printed == [str(tmp_path / f"gradient_norm.{kind}") for kind in ("pdf", "svg", "png", "csv", "md")]
    assert all(Path(path).stat().st_size > 100 for path in printed)


@pytest.mark.parametrize("script", ["reward.py", "make_figures.py"])
def test_a_script_says_what_is_wrong_with_a_folder(script, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "analysis"))
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "analysis" / script), run_name="__main__")
    assert stop.value.code == 1 and "none: no such folder" in capsys.readouterr().err


def test_make_figures_draws_a_study(folder, monkeypatch, capsys):
    for name in set(FIGURES) - {"gradient_norm"}:
        monkeypatch.delitem(FIGURES, name)
    for name in list(STUDY_FIGURES):
        monkeypatch.delitem(STUDY_FIGURES, name)
    monkeypatch.setattr(sys, "argv", ["make_figures.py", str(folder)])
    runpy.run_path(str(ROOT / "analysis" / "make_figures.py"), run_name="__main__")
    assert capsys.readouterr().out == f"{folder / 'figures'}: 5 files\n"


def test_the_notebook_is_committed_without_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_runs(folder, monkeypatch):
    monkeypatch.setenv("MOE_RL_STUDY", str(folder))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
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
