"""What pip installs: a wheel that works without the checkout, and an instrument that needs no laboratory."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(*command, cwd, status=0, env=CLEAN):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT, env=os.environ)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel):
    """Return the `bin` of an environment with the wheel and the dependencies of this one, but not the checkout."""
    home = wheel.parent / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # A .pth file in a folder that a .pth file adds is not read, so an installed checkout is not found.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_holds_every_file_of_the_package_and_the_studies(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "moe_rl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {".j2", ".css", ".js", ".html", ".mplstyle"} <= {path.suffix for path in files}
    assert {str(path.relative_to(ROOT)) for path in files} <= names
    studies = {path.relative_to(ROOT) for path in (ROOT / "experiments").glob("**/*.yaml")}
    assert {f"moe_rl/{path}" for path in studies} <= names
    assert not [name for name in names if name.startswith(("tests/", "experiments/"))]


def test_the_installed_command_finds_the_shipped_studies_from_anywhere(installed, tmp_path):
    home = installed.parent
    where = run(installed / "python", "-c", "import moe_rl; print(moe_rl.__file__)", cwd=tmp_path)
    assert where.startswith(str(home)), "the checkout hides what was installed"
    listed = run(installed / "moe-rl", "study", cwd=tmp_path)
    assert all(f"  {path.stem} " in listed for path in (ROOT / "experiments").glob("*.yaml"))
    assert "GRPO + Routing Replay" in run(installed / "moe-rl", "study", "replay_vs_gspo", "--help", cwd=tmp_path)
    found = json.loads(run(installed / "moe-rl", "doctor", "replay_vs_gspo", "--json", cwd=tmp_path))
    assert found["study"]["name"] == "replay_vs_gspo" and found["study"]["plan"]["parameters"] > 100_000
    packages = {check["name"]: check["ok"] for check in found["checks"]}
    assert packages["torch"] and packages["pandas"], "both the instrument's and the laboratory's are checked"
    assert list(tmp_path.iterdir()) == []


# -- without the extra `lab` ------------------------------------------------------------------------------------------

# PyYAML and tokenizers are there all the same: transformers needs them.
LIGHT = """
import importlib.machinery, sys
class Light(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        lab = ("accelerate", "jinja2", "matplotlib", "pandas", "pyarrow", "rich", "scipy", "tyro")
        return None if name.split(".")[0] in lab else super().find_spec(name, path, target)
sys.meta_path[:] = [Light if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""
INSTRUMENT = """
import pkgutil, importlib
import torch, moe_rl.measure, moe_rl.objectives, moe_rl.routing
for room in (moe_rl.routing, moe_rl.objectives, moe_rl.measure):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from moe_rl.measure import token_logps
from moe_rl.objectives import OBJECTIVES, policy_loss
from moe_rl.routing import change_counts, record_routes, replay_routes

model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    intermediate_size=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2))
tokens, ones = torch.randint(20, (2, 5)), torch.ones(2, 5, dtype=torch.long)
answer = ones.bool().index_fill(1, torch.tensor([0]), False)
with record_routes(model) as old, torch.no_grad():
    before = token_logps(model, tokens, ones, answer).logps
with replay_routes(model, old.routes) as forced:
    logps = token_logps(model, tokens, ones, answer).logps
    policy_loss(OBJECTIVES["grpo"], logps, before, torch.tensor([1.0, -1.0]), answer).loss.backward()
assert forced.replayed_fraction == 1
print(change_counts(old.routes, old.routes).rates())
"""


def test_the_instrument_works_without_the_laboratory(tmp_path):
    here = {**CLEAN, "PYTHONPATH": str(ROOT)}
    said = run(sys.executable, "-c", LIGHT + INSTRUMENT, cwd=tmp_path, env=here)
    assert "'slot_change': 0" in said
    command = LIGHT + "from moe_rl.cli import main; main(['study'])"
    said = run(sys.executable, "-c", command, cwd=tmp_path, env=here, status=1)
    assert "pip install '.[lab]'" in said and "pandas" in said and "Traceback" not in said
