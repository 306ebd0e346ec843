"""docs/measure.md: its script runs as it stands, and what its table calls is there."""

import importlib
import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")


def test_the_script_runs_from_top_to_bottom(capsys):
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    names = {}
    exec(compile(code, "docs/measure.md", "exec"), names)
    said = capsys.readouterr().out
    assert "tokens clipped" in said and "'slot_change'" in said and "router shift: mean 0.9" in said
    assert names["floor"]["repeat"]["slots_changed"] == 0 < names["floor"]["repeat"]["slots"]
    rates = names["change_counts"](names["routes"], names["recording"].routes, names["completion"])
    assert rates.slots_changed > 0
    apart, plain = (
        names["apart"],
        names["token_logps"](*(names[name] for name in ("model", "ids", "attention", "completion"))).logps,
    )
    torch.testing.assert_close(apart, plain[1:].repeat_interleave(2, 0).detach())
    gap = names["gap"]
    assert "% is routing" in said and gap["measured"] == 80 and 0 < gap["gap_mean"] < 0.1
    assert gap["routing_share_gap_mean"] == 1 - gap["gap_mean_replayed"] / gap["gap_mean"]


def test_what_the_table_names_is_there():
    places = re.findall(r"`(moe_rl\.[a-z_.]+)\.([A-Za-z_]+)", PAGE)
    assert len(places) > 12
    for module, name in places:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
