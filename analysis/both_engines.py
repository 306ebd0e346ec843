"""What last policies earn by the training engine and by an int4 engine, on the same prompts with the same numbers
drawn:

    python analysis/both_engines.py runs/corrections_reverse --csv FILE

Every finished run of a study, those of its roundings included, answers held-out prompts of its own task twice with the
weights that it ended with. One row per run in the file; printed are means over seeds, each seed's roundings averaged
first, with Student's 95 % intervals.
"""

import argparse
import random
import sys
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.rollout import TaskConfig, make_task, score, seeded_generator
from moe_rl.rollout.engine import ModelEngine
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.rollout.engines import make_engine
from moe_rl.rollout.task import problems_of
from moe_rl.study.data import load
from moe_rl.study.folders import read_yaml
from moe_rl.study.statistics import student_interval

INT4 = EngineConfig(kind="hf", dtype="bfloat16", weight_format="int4")
SEED = 0  # of prompts and sampling, in every run and for both engines


def rewards(run: Path, prompts: int, other: EngineConfig = INT4) -> dict[str, float]:
    """Mean reward of a run's last policy by the training engine and by the other one."""
    config = read_yaml(run / "config.yaml")
    task = make_task(TaskConfig(**config["task"]))
    problems = problems_of(task, random.Random(SEED), prompts, held_out=True)
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoint")
    rounded = make_engine(other, model, tokenizer)
    rounded.sync(model.state_dict(), 0)
    found = {}
    for name, engine in {"training": ModelEngine(model, tokenizer), "int4": rounded}.items():
        rollout = engine.sample(
            problems,
            group_size=1,
            max_new_tokens=task.max_new_tokens,
            temperature=config["rollout"]["temperature"],
            generator=seeded_generator(SEED, "both engines", 0),
            record_routes=False,
        )
        found[name] = score(task, rollout).rewards.mean().item()
    return found


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Each arm's rewards and their difference, training less int4."""
    table = table.assign(difference=table["training"] - table["int4"])
    seeds = table.groupby(["arm", "seed"], sort=False)[["training", "int4", "difference"]].mean()
    return seeds.groupby(level="arm", sort=False).agg(lambda values: str(student_interval(values.to_numpy())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What last policies earn by the training engine and by an int4 engine, on the same prompts."
    )
    parser.add_argument("study", type=Path, help="folder of a study, e.g. runs/corrections_reverse")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts of each run (default %(default)s)")
    parser.add_argument("--csv", type=Path, help="also write a row per run here")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny policies
    study = load(options.study)
    rows = []
    for rounding, data in {"native": study, **study.roundings}.items():
        for run in data.runs:
            if (run.folder / "DONE").is_file() and (options.arms is None or run.arm in options.arms):
                print(run.folder, file=sys.stderr)
                about = {"arm": run.arm, "seed": run.seed, "rounding": rounding}
                rows.append({**about, **rewards(run.folder, options.prompts)})
    if not rows:
        parser.error(
            f"{options.study}: no finished run of {' or '.join(options.arms or ['any arm'])} in it (ARM/seedN/DONE)"
        )
    table = pd.DataFrame(rows)
    print(summary(table).to_string())
    if options.csv:
        write_atomic(options.csv, table.to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
