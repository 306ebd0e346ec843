"""Whole runs on a GPU, as rows for docs/gpu.md: FSDP2 in one rank against one process, and the main study in small.

    python benchmarks/gpu_runs.py fsdp2 --folder FOLDER     # NCCL; --device cpu: gloo
    python benchmarks/gpu_runs.py study --folder FOLDER

`fsdp2` makes the first steps of one run twice, in one process and under torchrun with `distributed.strategy: fsdp2` on
one rank, and compares every loss; the cold start of both is made before, by a run of one step that is not counted.
`study` runs all arms of experiments/quick.yaml.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import command_line, row, write

QUICK = Path(__file__).resolve().parents[1] / "experiments" / "quick.yaml"


def moe_rl(*words: object, torchrun: bool = False) -> float:
    """Run `moe-rl WORDS`, whose output goes to this process's output; return its wall-clock seconds."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] if torchrun else []
    began = time.perf_counter()
    subprocess.run([sys.executable, *launch, "-m", "moe_rl", *map(str, words)], check=True)
    return time.perf_counter() - began


def losses(folder: Path) -> list[float]:
    """Return the loss of every update of a run folder."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "update"]


def fsdp2(folder: Path, device: str, steps: int, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row that compares a run under fsdp2 on one rank with the same run in one process."""
    same = [*more, "--arm", "grpo", "--model.device", device, "--cold-starts", folder / "cold_starts"]
    moe_rl("run", QUICK, *same, "--optim.steps", 1, "--output", folder / "before")
    same += ["--optim.steps", steps]
    one = moe_rl("run", QUICK, *same, "--output", folder / "one")
    sharded = ["--distributed.strategy", "fsdp2", "--distributed.processes", 1]
    rank = moe_rl("run", QUICK, *same, *sharded, "--output", folder / "fsdp2", torchrun=True)
    expected, found = losses(folder / "one"), losses(folder / "fsdp2")
    if len(expected) != len(found) or not expected:
        raise SystemExit(f"{len(expected)} updates in one process and {len(found)} under fsdp2")
    gap = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    size = max(abs(a) for a in expected)
    note = f"wall clock; {len(found)} updates; losses differ by at most {gap:.1e}, the largest is {size:.1e}"
    case = f"run of {steps} steps on {device}, one rank"
    return [row("fsdp2", case, [rank], "one process", [one], note=note)]


def study(folder: Path, device: str, steps: int, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row with the time of experiments/quick.yaml and the last held-out reward of every arm."""
    from moe_rl.study import load

    where = ["--output", folder / "quick", "--cold-starts", folder / "cold_starts"]
    seconds = moe_rl("study", QUICK, "--model.device", device, "--optim.steps", steps, *more, *where, "--no-figures")
    data = load(folder / "quick")
    ends = data.evals.sort_values("step").groupby(["arm", "seed"]).reward.last()
    rewards = ", ".join(f"{arm} {reward:.3f}" for (arm, _), reward in ends.items())
    note = f"wall clock; held-out reward at the end: {rewards}"
    return [row("study", f"quick, all arms, {steps} steps each, on {device}", [seconds], note=note)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["fsdp2", "study"])
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are written")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    make = {"fsdp2": fsdp2, "study": study}[options.what]
    rows = make(options.folder, options.device, options.steps)
    for line in rows:
        print(line["case"], line["note"])
    write(options.json, rows)


if __name__ == "__main__":
    main()
