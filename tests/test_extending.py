"""docs/extending.md, executed: its diffs apply to a copy of the package, and what they add works there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"^## (.+?)$.*?```diff\n(.*?)```", PAGE, re.S | re.M))

USES = {
    "A method": """
import torch
from moe_rl.objectives import OBJECTIVES, policy_loss, token_weights
from moe_rl.objectives.methods_table import methods_markdown
from moe_rl.training import MethodConfig, RunConfig, validate
from moe_rl.training.method import resolved_objective

logps = torch.tensor([[-1.0, -1.0]]) + torch.tensor([[1.15, 1.05]]).log()
out = policy_loss("grpo_tight", logps, torch.full((1, 2), -1.0), torch.ones(1), torch.ones(1, 2))
assert out.clipped.tolist() == [[True, False]]
assert "| `grpo_tight` | token | clip | [0.9, 1.1] |" in methods_markdown()
config = RunConfig(method=MethodConfig(objective="grpo_tight"))
validate(config)
assert resolved_objective(config)["clip_low"] == 0.1
""",
    "A gate": """
import math
import torch
from moe_rl.objectives import Objective, policy_loss, token_weights
from moe_rl.objectives.gates import GATES
from moe_rl.training import MethodConfig, RunConfig, validate
from moe_rl.training.method import resolve_method

assert GATES["log_mask"].knobs == ("clip_low", "clip_high")
objective = Objective(gate="log_mask", clip_low=0.2, clip_high=0.3)
logps = torch.tensor([[-1.0 + 0.4, -1.0 + 0.1, -1.0 - 0.4]], requires_grad=True)
arguments = (torch.full((1, 3), -1.0), torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3))
out = policy_loss(objective, logps, *arguments)
out.loss.backward()
assert out.clipped.tolist() == [[True, False, True]]
torch.testing.assert_close(logps.grad, torch.tensor([[0.0, -math.exp(0.1) / 3, 0.0]]))
torch.testing.assert_close(token_weights(objective, logps, *arguments).weight, -logps.grad)
config = RunConfig(method=MethodConfig(objective="grpo", gate="log_mask"))
validate(config)
assert resolve_method(config, 1).objective.gate == "log_mask"
""",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package with every diff of the page applied."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "moe_rl", folder / "moe_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name, diff in DIFFS.items():
        applied = subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, capture_output=True)
        assert applied.returncode == 0, f"the diff of '{name}' in docs/extending.md is stale: {applied.stderr}"
    return folder


def test_every_diff_of_the_page_is_used():
    assert list(DIFFS) == list(USES)


def test_what_the_diffs_add_works(copy):
    program = "\n".join(USES.values())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, env={"PYTHONPATH": str(copy)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
