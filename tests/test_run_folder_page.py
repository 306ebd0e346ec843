"""The page of run folders: the rows, keys and figures that it names, and its example."""

import re
from pathlib import Path

from moe_rl.measure.catalogue import CATALOGUE, find
from moe_rl.run_rows import ROWS
from moe_rl.study import load
from moe_rl.study.figures import FIGURES

PAGE = (Path(__file__).parent.parent / "docs" / "run_folder.md").read_text()


def test_the_page_names_every_kind_of_row_its_keys_and_only_metrics_that_exist():
    table = dict(
        re.findall(
            r"^\| `(\w+)` \| ([^|]*) \|", PAGE[PAGE.index("## Rows") : PAGE.index("## What figures need")], re.MULTILINE
        )
    )
    named = {kind: tuple(re.findall(r"`(\w+)`", keys)) for kind, keys in table.items() if kind in ROWS}
    assert named == {kind: ("step", *keys) for kind, keys in ROWS.items()}
    for kind, name in re.findall(r"`(\w+)\.(\w+)`", PAGE):
        assert kind not in CATALOGUE or find(kind, name), f"{kind}.{name}"


def test_the_page_says_what_figures_need():
    section = PAGE.split("## What figures need")[1].split("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert {name for name, _ in told} == {name for name, figure in FIGURES.items() if figure.needs}
    for name, needs in told:
        columns = FIGURES[name].needs.items()
        assert needs == "; ".join(f"{table}: {', '.join(f'`{c}`' for c in names)}" for table, names in columns), name


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(compile(code, "docs/run_folder.md", "exec"), {})
    data = load(tmp_path / "runs" / "mine")
    assert data.unfinished == []
    assert (data.probes["slots_changed"] > 0).all()
    assert {"k3", "grad_norm", "trl/kl"} <= set(data.updates)
