"""CPU seconds of a training step of two checkouts, or of one checkout with two settings, measured in turns.

    git worktree add --detach ../before HEAD~5
    python benchmarks/two_versions.py ../before .
    python benchmarks/two_versions.py . . --set-b rollout.scoring=decoding

Both sides train the tiny policy (GRPO with R2, 256 sequences a step, probes every five steps) in a process of their
own, one thread each. They take their steps in turns, so that neither runs while the other is measured, and the order
within a pair of steps alternates. Printed: median seconds of each side, median and quartiles of b / a over the pairs
after the first two, and the ratio of the sums.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

WARMUP = 2
SETTINGS: dict[str, Any] = {
    "model": {"tiny": {"router_init_scale": 0.1}, "cold_start": {"steps": 60}, "device": "cpu"},
    "task": {"name": "mod_chain"},
    "method": {"objective": "grpo", "replay": "R2"},
    "rollout": {"prompts": 32, "group_size": 8},
    "optim": {"num_minibatches": 4, "learning_rate": 5e-4},
    "eval": {"every": 0, "prompts": 64},
    "probe": {"every": 5, "floor": False},
    "checkpoint_every": 10**6,
}
# Program of a side, run inside its checkout. It prints a line after each step, and goes on when it has read one.
SIDE = """
import json, sys, time
from pathlib import Path
said, sys.stdout = sys.stdout, sys.stderr
import torch
torch.set_num_threads(1)
import moe_rl
assert Path(moe_rl.__file__).parents[1] == Path.cwd(), f"measures {moe_rl.__file__}"
from moe_rl.study.config import build
from moe_rl.study.run import run_one
from moe_rl.training.config import RunConfig
try:
    from moe_rl.processes import keep_freed_memory
    keep_freed_memory()  # as `moe-rl` does
except ImportError:
    pass
began = time.process_time()
def listen(row):
    global began
    if row["kind"] == "step":
        print(time.process_time() - began, file=said, flush=True)
        sys.stdin.readline()
        began = time.process_time()
folder = Path(sys.argv[1])
run_one(build(RunConfig, json.loads(sys.argv[2]), "settings"), folder / "run", folder / "cold_starts", listen)
"""


class Side:
    """One of the two sides: a process that trains one step at a time."""

    def __init__(self, checkout: Path, settings: dict[str, Any], folder: Path):
        folder.mkdir()
        self._errors = folder / "errors.txt"
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SIDE, str(folder), json.dumps(settings)],
                env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                cwd=checkout,  # `-c` imports from this folder first
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def step(self, first: bool = False) -> float:
        """Let the process make its next step; return its CPU seconds. Raises SystemExit if the process failed."""
        assert self._process.stdin and self._process.stdout
        if not first:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side failed:\n{self._errors.read_text()[-2000:]}")
        return float(line)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def changed(settings: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Return a copy of `settings` with every change `key.key=value` applied."""
    settings = json.loads(json.dumps(settings))
    for change in changes:
        path, _, value = change.partition("=")
        *parents, last = path.split(".")
        place = settings
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = yaml.safe_load(value)
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="a checkout")
    parser.add_argument("b", type=Path, help="another, or the same")
    parser.add_argument("--steps", type=int, default=40, help="steps of each side, the first two of which do not count")
    for name, what in (("--set", "both sides"), ("--set-a", "the first"), ("--set-b", "the second")):
        parser.add_argument(name, action="append", default=[], metavar="KEY.KEY=VALUE", help=f"a setting of {what}")
    options = parser.parse_args()
    if options.steps <= WARMUP + 1:
        parser.error(f"--steps: at least {WARMUP + 2}")
    for path in (options.a, options.b):
        if not (path / "moe_rl" / "__init__.py").is_file():
            parser.error(f"{path} is no checkout of moe_rl")
    base = changed(SETTINGS, [*options.set, f"optim.steps={options.steps + 1}"])
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side(path.resolve(), changed(base, changes), Path(folder) / name)
            for name, path, changes in (("a", options.a, options.set_a), ("b", options.b, options.set_b))
        ]
        try:
            pairs = [[side.step(first=True) for side in sides]]
            for step in range(1, options.steps):
                order = (0, 1) if step % 2 else (1, 0)
                took = {side: sides[side].step() for side in order}
                pairs.append([took[0], took[1]])
        finally:
            for side in sides:
                side.stop()
    a, b = zip(*pairs[WARMUP:], strict=True)
    ratios = [y / x for x, y in zip(a, b, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"CPU seconds of a step: a {statistics.median(a):.3f}, b {statistics.median(b):.3f}")
    print(f"b / a: {median:.3f} [{low:.3f}, {high:.3f}] over {len(ratios)} pairs; of the sums {sum(b) / sum(a):.3f}")


if __name__ == "__main__":
    main()
