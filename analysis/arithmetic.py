"""Noise floor of trained policies: what other arithmetic alone re-routes, and routing's share of the log-ratio.

    python analysis/arithmetic.py runs/engine_mismatch/grpo_fp32 runs/replay_vs_gspo/grpo --csv FILE

Every finished run of an arm (ARM/seedN) answers held-out prompts of its own task with its final weights. These answers
are scored again by every variant of the forward that `moe-rl floor` knows, in every dtype. The table has one row per
arm, dtype and variant: means over seeds with Student's 95 % intervals.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch

from moe_rl.drift.floor_run import run_floor
from moe_rl.drift.options import FloorOptions
from moe_rl.files import write_atomic
from moe_rl.policy import ModelConfig
from moe_rl.policy.models import load_model, load_tokenizer
from moe_rl.processes import ends_with_its_reader
from moe_rl.rollout import TaskConfig, make_task, sample
from moe_rl.rollout.task import problems_of
from moe_rl.study.folders import read_yaml
from moe_rl.study.result_tables import seed_means
from moe_rl.study.statistics import student_interval
from moe_rl.study.words import csv_text

QUANTITIES = ("slot_change", "token_change", "gap_mean", "routing_share_gap_mean", "routing_share_m2")
SEED = 0  # random seed of prompts and sampling, the same in every run


def answers(run: Path, prompts: int) -> list[dict[str, str]]:
    """Return held-out prompts of a run's task, each with the completion by the run's last policy."""
    task = make_task(TaskConfig(**read_yaml(run / "config.yaml")["task"]))
    problems = problems_of(task, random.Random(SEED), prompts, held_out=True)
    rollout = sample(
        load_model(str(run / "checkpoint"), ModelConfig(experts_implementation="grouped_mm")),
        load_tokenizer(str(run / "checkpoint")),
        problems,
        group_size=1,
        max_new_tokens=task.max_new_tokens,
        generator=torch.Generator().manual_seed(SEED),
    )
    said = zip(problems, rollout.completions, strict=True)
    return [{"prompt": problem.prompt, "completion": completion} for problem, completion in said]


def floor_of(run: Path, prompts: int) -> pd.DataFrame:
    """Return the table `floor.csv` of a run's last policy, measured on that policy's own answers."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in answers(run, prompts)), encoding="utf-8")
        options = FloorOptions(str(run / "checkpoint"), file, Path(folder) / "floor", sequences=prompts)
        return pd.read_csv(run_floor(options) / "floor.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path, nargs="+", metavar="ARM", help="folders of runs, e.g. runs/STUDY/ARM")
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts of each run (default 128)")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args()
    if options.prompts < 1:
        parser.error(f"--prompts {options.prompts}: at least one is needed")
    torch.set_num_threads(1)  # the fastest for tiny policies
    named = [f"{arm.resolve().parent.name}: {arm.name}" for arm in options.arms]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        parser.error(f"{', '.join(twice)}: two folders of this name would be one arm of the table; give one at a time")
    floors = []
    for arm, name in zip(options.arms, named, strict=True):
        runs = sorted(done.parent for done in arm.glob("seed*/DONE"))
        if not runs:
            parser.error(f"{arm}: no finished run in it (seedN/DONE); expected the folder of one arm, runs/STUDY/ARM")
        for run in runs:
            if "task" not in read_yaml(run / "config.yaml"):
                parser.error(f"{run}: its config.yaml names no task, so that its policy cannot be sampled from")
            print(run, file=sys.stderr)
            floors.append(floor_of(run, options.prompts).assign(arm=name, seed=run.name))
    table = seed_means(pd.concat(floors), ["arm", "dtype", "variant"], QUANTITIES, interval=student_interval)
    print(table.to_string(index=False, float_format="%.3g"))
    if options.csv:
        write_atomic(options.csv, csv_text(table))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
