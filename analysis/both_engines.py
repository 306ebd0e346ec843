"""Rewards of each run's last policy by the training engine and by copies with quantised weights.

    python analysis/both_engines.py runs/trained_copy --formats int4 mxfp4 --to docs/results/trained_copy

Every finished run of a study, including the runs of the study's roundings, answers held-out prompts of its own task
with its final weights, once by each engine: the same prompts, and the same random numbers for sampling. Three tables
come of it (two if no arms are compared); all but the first are printed, and --to DIR writes all:

- `both_engines.csv`: one row per run;
- `engine_rewards.csv`: means over seeds of each arm, a seed's roundings averaged first, with Student's 95 % intervals:
  rewards by each engine, and what rounding the weights costs (`lost_by_`);
- `rounding_costs.csv`: comparisons of the arms that the study compares, by the rules of docs/statistics.md, under each
  rounding by itself. What rounding costs, for all pairs and formats, is one family of tests; the rewards of the copies
  are another. The rows `pooled`, over the seeds that every rounding has, are without a test.
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
SEED = 0  # random seed of prompts and sampling, the same in every run and for all engines
INTEREST = 0.02
"""Smallest difference of interest between two arms in what rounding costs, in units of reward."""


def quantised(weight_format: str) -> EngineConfig:
    """Return the settings of an engine with weights rounded to `weight_format` and products in bf16."""
    return EngineConfig(kind="hf", dtype="bfloat16", weight_format=weight_format)


def rewards(run: Path, prompts: int, engines: dict[str, EngineConfig]) -> dict[str, float]:
    """Return the mean reward of a run's last policy by the training engine (`training`) and by each of `engines`."""
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
    """Return `table` with the cost of each format, `lost_by_*`: reward by the training engine minus by that copy."""
    return table.assign(**{f"lost_by_{name}": table["training"] - table[name] for name in formats})


def summary(table: pd.DataFrame, formats: Sequence[str]) -> pd.DataFrame:
    """Return each arm's mean reward by each engine and mean cost of rounding to each format, with intervals."""
    values = ["training", *formats, *(f"lost_by_{name}" for name in formats)]
    seeds = with_losses(table, formats).groupby(["arm", "seed"], sort=False)[values].mean()
    return seed_means(seeds.reset_index(), ["arm"], values, interval=student_interval)


def compared(
    table: pd.DataFrame, columns: Sequence[str], pairs: Sequence[tuple[str, str]], interest: float
) -> pd.DataFrame:
    """Return the paired comparisons of `pairs` by each of `columns` as one family, from a table of one rounding."""
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
    """Return `compared` under each rounding, by what rounding to each format costs and by the rewards of the copies.

    The rounding `pooled` uses each seed's mean over the roundings, for seeds that all of them have, and has no verdict.
    interest: smallest difference of interest between rewards; between costs it is `INTEREST`.
    """
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
    return pd.concat(found, ignore_index=True)


def table_of(study: StudyData, arms: Sequence[str] | None, prompts: int, formats: Sequence[str]) -> pd.DataFrame:
    """Return `rewards` of every finished run of `arms` (None: all arms), one row each with arm, seed and rounding."""
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
    parser.add_argument("--to", type=Path, metavar="DIR", help="also write the tables here")
    options = parser.parse_args()
    if options.prompts < 1:
        parser.error(f"--prompts {options.prompts}: at least one is needed")
    torch.set_num_threads(1)  # the fastest for tiny policies
    options.formats = list(dict.fromkeys(options.formats))
    try:
        study = load(options.study)
    except ValueError as error:  # no such folder, damaged files
        parser.exit(1, f"{error}\n")
    runs = [run for data in (study, *study.roundings.values()) for run in data.runs if run.finished]
    if others := [run for run in runs if "task" not in run.config]:
        parser.error(f"{others[0].folder}: its config.yaml names no task, so that its policy cannot be sampled from")
    finished = {run.arm for run in runs}
    lacking = [arm for arm in options.arms or () if arm not in finished]
    if lacking or not finished:
        parser.error(
            f"{options.study}: no finished run of {' or '.join(lacking or ['any arm'])} in it (ARM/seedN/DONE)"
        )
    table = table_of(study, options.arms, options.prompts, options.formats)
    pairs = [pair for pair in pairs_to_compare(study) if set(pair) <= set(table["arm"])]
    tables = {"both_engines": table, "engine_rewards": summary(table, options.formats)}
    if pairs:
        tables["rounding_costs"] = comparisons(table, options.formats, pairs, interest(study))
    for name in list(tables)[1:]:
        print(tables[name].round(3).to_string(index=False), end="\n\n")
    for name, found in tables.items() if options.to else ():
        digits = "%.10g" if name == "both_engines" else "%.6g"  # exact means of 512 rewards: equal ones stay equal
        write_atomic(options.to / f"{name}.csv", csv_text(found, digits))


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
