"""Every notebook runs from top to bottom, says what it needs first, and is committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS_A_STUDY = {"02_replay_vs_gspo"}  # executed in tests/study/test_analysis.py, on a study folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_states_its_question_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = notebook.cells[0].source.lower()
    assert all(word in first for word in ("question", "run time", "inputs"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem not in NEEDS_A_STUDY], ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    if path.stem == "06_trl":
        pytest.importorskip("trl")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
