"""Change of slots by an expert's load: by hand, from token and route files."""

import json

import numpy as np
import pytest
import yaml
from token_files import write_step

from moe_rl.study.change_by_load import change_by_load
from moe_rl.study.data import load


def test_slots_that_changed_are_counted_with_the_load_of_the_expert_that_lost_them(tmp_path):
    """Two of six experts have all ten slots of a site, three times the even load; they lose two at one site, one at
    the other."""
    run = tmp_path / "grpo" / "seed0"
    for name in ("tokens", "routes"):
        (run / name).mkdir(parents=True)
    config = {"label": "GRPO", "seed": 0, "method": {"objective": "grpo", "replay": "none", "noise": 0.0}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "rollout", "step": 0, "reward": 0.5}) + "\n")
    assert not len(change_by_load(load(tmp_path)))
    write_step(run, 0)
    write_step(run, 10, kept=False)
    rows = change_by_load(load(tmp_path)).set_index("load")
    assert rows["experts"].tolist() == pytest.approx([4 / 6, 0, 0, 2 / 6])
    assert rows["slots"].tolist() == [0, 0, 0, 1]
    assert rows.loc["2 and more", "slot_change"] == pytest.approx(3 / 20)
    assert np.isnan(rows["slot_change"].iloc[:3]).all()
