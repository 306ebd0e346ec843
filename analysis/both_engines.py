"""What last policies earn by the training engine and by copies of quantised weights, on the same prompts with the same
numbers drawn:

    python analysis/both_engines.py runs/trained_copy --formats int4 mxfp4 --to docs/results/trained_copy

Every finished run of a study, those of its roundings included, answers held-out prompts of its own task with the
weights that it ended with, once by each engine. Printed, and with --to written there:

- `both_engines.csv`: one row per run;
- `engine_rewards.csv`: means over seeds of each arm, a seed's roundings averaged first, with Student's 95 % intervals:
  rewards by each engine, and what rounding the weights costs (`lost_by_`);
- `rounding_costs.csv`: the arms that the study compares, told apart by the rules of docs/statistics.md, under each
  rounding by itself: by what rounding costs, all pairs and formats as one family, and by the rewards of the copies, as
  another; `pooled`, of the seeds that every rounding has, is without a test.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from moe_rl.files import write_atomic
from moe_rl.policy import ModelConfig
from moe_rl.policy.models import load_model, load_tokenizer
from moe_rl.processes import ends_with_its_reader
from moe_rl.rollout import TaskConfig, make_task, score, seeded_generator
from moe_rl.rollout.engine import Engine, ModelEngine
from moe_rl.rollout.engine_config import WEIGHT_FORMATS, EngineConfig
from moe_rl.rollout.engines import make_engine
from moe_rl.rollout.task import problems_of
from moe_rl.study.comparing import interest, pairs_to_compare, values_by_seed
from moe_rl.study.data import StudyData, load
from moe_rl.study.folders import read_yaml
from moe_rl.study.result_tables import seed_means
from moe_rl.study.statistics import compare_paired, judge, student_interval
from moe_rl.study.words import csv_text

TRANSFORMERS_EXPERTS = ModelConfig(experts_implementation="grouped_mm")
SEED = 0  # of prompts and sampling, in every run and for all engines
INTEREST = 0.02
"""Smallest difference of interest in what rounding costs, in units of reward."""


def quantised(weight_format: str) -> EngineConfig:
    """The engine of a format's name: weights rounded, products in bf16."""
    return EngineConfig(kind="hf", dtype="bfloat16", weight_format=weight_format)


def rewards(run: Path, prompts: int, engines: dict[str, EngineConfig]) -> dict[str, float]:
    """Mean reward of a run's last policy by the training engine, and by each of the others."""
    config = read_yaml(run / "config.yaml")
    task = make_task(TaskConfig(**config["task"]))
    problems = problems_of(task, random.Random(SEED), prompts, held_out=True)
    model = load_model(str(run / "checkpoint"), TRANSFORMERS_EXPERTS)
    tokenizer = load_tokenizer(str(run / "checkpoint"))
    made: dict[str, Engine] = {"training": ModelEngine(model, tokenizer)}
    made |= {name: make_engine(other, model, tokenizer) for name, other in engines.items()}
    found = {}
    for name, engine in made.items():
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


def with_losses(table: pd.DataFrame, formats: Sequence[str]) -> pd.DataFrame:
    """The table with what rounding to each format costs: reward by the training engine less reward by that copy."""
    return table.assign(**{f"lost_by_{name}": table["training"] - table[name] for name in formats})


def summary(table: pd.DataFrame, formats: Sequence[str]) -> pd.DataFrame:
    """Each arm's rewards by each engine, and what rounding costs it."""
    values = ["training", *formats, *(f"lost_by_{name}" for name in formats)]
    seeds = with_losses(table, formats).groupby(["arm", "seed"], sort=False)[values].mean()
    return seed_means(seeds.reset_index(), ["arm"], values, interval=student_interval)


def compared(
    table: pd.DataFrame, columns: Sequence[str], pairs: Sequence[tuple[str, str]], interest: float
) -> pd.DataFrame:
    """Arms told apart by each of the columns, seed by seed, as one family; of runs of one rounding."""
    rows, family = [], []
    for name in columns:
        seeds = values_by_seed(table, name)
        for arm, other in pairs:
            rows.append({"of": name, "arm": arm, "other": other})
            family.append(compare_paired(seeds.get(arm, {}), seeds.get(other, {}), interest))
    told = [
        {"n": one.n, **one.difference.columns("difference"), "p_adjusted": one.adjusted, "verdict": str(one.verdict)}
        for one in judge(family)
    ]
    return pd.DataFrame(rows).join(pd.DataFrame(told))


def comparisons(
    table: pd.DataFrame, formats: Sequence[str], pairs: Sequence[tuple[str, str]], interest: float
) -> pd.DataFrame:
    """`compared` by what rounding costs, and by the rewards of the copies, under each rounding; `pooled` has the mean
    over the roundings of each seed that all of them have, and no verdict. `interest` is of rewards."""
    lost = with_losses(table, formats)
    seeds = lost.groupby(["arm", "seed"], sort=False)
    whole = seeds.size() == lost["rounding"].nunique()
    pooled = seeds.mean(numeric_only=True)[whole].reset_index()
    found = []
    for columns, least in (([f"lost_by_{name}" for name in formats], INTEREST), (list(formats), interest)):
        for rounding, part in [*lost.groupby("rounding", sort=False), ("pooled", pooled)]:
            told = compared(part, columns, pairs, least).assign(rounding=rounding)
            if rounding == "pooled":
                told[["p_adjusted", "verdict"]] = [float("nan"), ""]
            found.append(told)
    return pd.concat(found, ignore_index=True) if pairs else pd.DataFrame()


def table_of(study: StudyData, arms: Sequence[str] | None, prompts: int, formats: Sequence[str]) -> pd.DataFrame:
    """`rewards` of every finished run of these arms (None: of all), with arm, seed and rounding."""
    engines = {name: quantised(name) for name in formats}
    rows = []
    for rounding, data in {"native": study, **study.roundings}.items():
        for run in data.runs:
            if run.finished and (arms is None or run.arm in arms):
                print(run.folder, file=sys.stderr)
                about = {"arm": run.arm, "seed": run.seed, "rounding": rounding}
                rows.append({**about, **rewards(run.folder, prompts, engines)})
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of a study, e.g. runs/corrections_reverse")
    parser.add_argument(
        "--formats", nargs="+", choices=WEIGHT_FORMATS, default=["int4"], help="of the copies (default: int4)"
    )
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts of each run (default %(default)s)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="also write the three tables here")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny policies
    study, options.formats = load(options.study), list(dict.fromkeys(options.formats))
    finished = {run.arm for data in (study, *study.roundings.values()) for run in data.runs if run.finished}
    lacking = [arm for arm in options.arms or () if arm not in finished]
    if lacking or not finished:
        parser.error(
            f"{options.study}: no finished run of {' or '.join(lacking or ['any arm'])} in it (ARM/seedN/DONE)"
        )
    table = table_of(study, options.arms, options.prompts, options.formats)
    pairs = [pair for pair in pairs_to_compare(study) if set(pair) <= set(table["arm"])]
    tables = {
        "both_engines": table,
        "engine_rewards": summary(table, options.formats),
        "rounding_costs": comparisons(table, options.formats, pairs, interest(study)),
    }
    for name in ("engine_rewards", "rounding_costs"):
        print(tables[name].round(3).to_string(index=False), end="\n\n")
    for name, found in tables.items() if options.to else ():
        digits = "%.10g" if name == "both_engines" else "%.6g"  # means of 512 rewards, exact: what is equal stays equal
        write_atomic(options.to / f"{name}.csv", csv_text(found, digits))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
