"""Every notebook runs from top to bottom, says what it needs first, and is committed without outputs.

The first runs in a kernel, as Jupyter would have it. The others run in IPython, in a process that has imported torch,
and with short cold starts: what their cells say of the numbers is not tested here.
"""

import os
import re
import sys
from pathlib import Path

import forked
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS_A_STUDY = {"02_replay_vs_gspo"}  # executed in tests/study/test_analysis.py, on a study folder
COLD_START = re.compile(r"(?<=ColdStartConfig\(steps=)\d+")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_states_its_question_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = notebook.cells[0].source.lower()
    assert all(word in first for word in ("question", "run time", "inputs"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None and not cell.outputs for cell in code)


@pytest.mark.slow
def test_the_first_notebook_runs_in_a_kernel(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(NOTEBOOKS[0].parent)}}).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS[1:] if p.stem not in NEEDS_A_STUDY], ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path):
    if path.stem == "06_trl":
        pytest.importorskip("trl")
    process = forked.FORKS.Process(target=run_cells, args=(path, tmp_path / "log"))
    process.start()
    process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 0 and "Out[" in said, said


def run_cells(path, log):
    """Run a notebook's code cells in this process, up to the first that fails; their output goes to `log`."""
    forked.print_to(log)
    os.chdir(path.parent)
    sys.path[:] = [path for path in sys.path if Path(path).name != "fake_vllm"]  # other tests' stand-in is not TRL's
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # a notebook's
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(COLD_START.sub("80", cell.source), store_history=True).raise_error()
