"""Outcomes of runs and arms: final and held-out reward, and which runs failed, ended below their start or collapsed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.settings import at
from moe_rl.study.arms import per_study
from moe_rl.study.curves import GAIN, TIE, area_under_curve, detect_collapse, final_value
from moe_rl.study.data import StudyData
from moe_rl.study.statistics import interquartile_mean, seed_interval

_RUN = ["arm", "seed"]
OUTCOMES = ("failed", "below_start", "collapsed")
"""Columns that say what went wrong: booleans in `run_outcomes`, counts of runs in `final_rewards`."""


@per_study
def run_outcomes(data: StudyData) -> pd.DataFrame:
    """Return a table of how runs ended, with one row per run that recorded a reward.

    Columns: arm, seed, finished; `measured` ("last 5 steps", or "held out" where the responses are not the policy's or
    the study declares `outcome: held_out`), `final` (reward by that measure), `held_out` (reward of the last
    evaluation), `start` (held-out reward at step 0; where no evaluation was made at step 0, or the task is a data set,
    whose held-out lines are other problems, the mean reward of the first batch, which the policy answered before its
    first update); `gain` = final - start; `failed`, `below_start`, `collapsed` (booleans; the first two are true of
    finished runs only); `best`, `fall` and `collapse_step` of `detect_collapse`; `area` (`area_under_curve`). If the
    study declares `outcome: held_out`, there is also `sampled`: the mean reward of the last 5 steps, which is the final
    reward in other studies.
    """
    starts, ends = evaluations(data)
    declared_held_out = data.config.get("outcome") == "held_out"
    curves = dict(iter(data.rollouts.groupby(_RUN, observed=True)))
    rows = []
    for run in data.runs:
        key = (run.arm, run.seed)
        own = run.responses == "policy"
        curve = curves.get(key, pd.DataFrame(columns=["step", "reward"]))
        steps, rewards = curve["step"].to_numpy(), curve["reward"].to_numpy(float)
        if not steps.size and key not in starts | ends:
            continue
        held_out = ends.get(key, np.nan)
        first = rewards[0] if own and steps.size and steps[0] == 0 else np.nan
        by_steps = own and not declared_held_out
        sampled = final_value(rewards) if own else np.nan
        data_set = by_steps and at(run.config, "task", "name") == "jsonl"
        start, final = first if data_set else starts.get(key, first), sampled if by_steps else held_out
        collapse = detect_collapse(steps, rewards if own else np.full(steps.size, np.nan))
        rows.append(
            {
                "arm": run.arm,
                "seed": run.seed,
                "finished": run.finished,
                "measured": "last 5 steps" if by_steps else "held out",
                "final": final,
                "held_out": held_out,
                "sampled": sampled,
                "start": start,
                "gain": final - start,
                "failed": bool(run.finished and final - start <= GAIN * (1 + TIE)),
                "below_start": bool(run.finished and start - final > TIE * abs(start)),
                "collapsed": collapse.collapsed,
                "best": collapse.best,
                "fall": collapse.fall,
                "collapse_step": collapse.step,
                "area": area_under_curve(steps, rewards) if own else np.nan,
            }
        )
    columns = ["arm", "seed", "finished", "measured", "final", "held_out", *["sampled"] * declared_held_out]
    columns += ["start", "gain", *OUTCOMES, "best", "fall", "collapse_step", "area"]
    return pd.DataFrame(rows, columns=columns)


@per_study
def final_rewards(data: StudyData) -> pd.DataFrame:
    """Return one row per arm: final reward, the reward shown beside it, and the number of runs that failed.

    Intervals are over seeds (the range of the seeds if there are fewer than six). Columns: arm, label, noise, n,
    finished, measured, final, low, high, interval, sd, iqm, area, evaluation (held-out reward at the last evaluation)
    with evaluation_low and evaluation_high, start, best, fall, failed, below_start, collapsed (counts of runs),
    `judged` (number of finished runs with a start and a final reward, so that it is known whether they failed),
    `by_seed` and `evaluation_by_seed` (seed -> reward), `collapse_steps`. If `run_outcomes` has `sampled`, the columns
    of `sampled` take the place of those of `evaluation`.
    """
    runs = run_outcomes(data)
    beside, column = ("sampled", "sampled") if "sampled" in runs else ("evaluation", "held_out")
    parts = {str(arm): part for arm, part in runs.groupby("arm", sort=False)}
    rows = []
    for arm, about in data.arms.iterrows():
        of = parts.get(str(arm), runs.iloc[:0])
        final, other = (seed_interval(of[name].to_numpy(float)) for name in ("final", column))
        values = of["final"].dropna().to_numpy(float)
        rows.append(
            {
                "arm": arm,
                "label": about["label"],
                "noise": about["noise"],
                "n": len(values),
                "finished": about["finished"],
                "measured": ", ".join(dict.fromkeys(of["measured"])),
                **final.columns("final"),
                "interval": final.method,
                "sd": values.std(ddof=1) if len(values) > 1 else np.nan,
                "iqm": interquartile_mean(values) if len(values) else np.nan,
                "area": of["area"].mean(),
                **other.columns(beside, f"{beside}_"),
                "start": of["start"].mean(),
                "best": of["best"].mean(),
                "fall": of["fall"].mean(),
                **{name: int(of[name].sum()) for name in OUTCOMES},
                "judged": int((of["finished"].astype(bool) & of["gain"].notna()).sum()),
                "by_seed": dict(zip(of["seed"], of["final"], strict=True)),
                f"{beside}_by_seed": dict(zip(of["seed"], of[column], strict=True)),
                "collapse_steps": of["collapse_step"].dropna().tolist(),
            }
        )
    return pd.DataFrame(rows)


def reward_names(table: pd.DataFrame) -> tuple[str, str]:
    """Return the names of final reward and of the reward beside it in a table of `run_outcomes` or `final_rewards`."""
    measured = set(table["measured"]) - {""}  # an arm without a reward has ""
    final = "held-out reward" if measured == {"held out"} else "final reward"
    return final, "sampled" if "sampled" in table else "held out"


def start_name(data: StudyData) -> str:
    """Return in words what the column `start` of `run_outcomes` is in these runs."""
    held_out, starts = evaluations(data)[0], run_outcomes(data).dropna(subset=["start"]).set_index(_RUN)["start"]
    of_batch = sum(held_out.get(run) != start for run, start in starts.items())
    name = "the mean reward of the first batch" if of_batch == len(starts) else "the held-out reward at step 0"
    return f"{name} (of the first batch, where none was held out)" if 0 < of_batch < len(starts) else name


def counts_shown(row: Mapping[Any, Any]) -> list[str]:
    """Return the `OUTCOMES` of a row of `final_rewards` as tables and figures show them.

    Failed, and ended below the start: "1 of 2" if only 2 of the arm's runs can be judged (an unfinished run has not
    failed yet), "–" if none can. Collapsed: the number of runs.
    """
    judged, runs = row["judged"], len(row["by_seed"])
    of = f" of {judged}" if judged < runs else ""
    return [*(f"{row[name]}{of}" if judged else "–" for name in OUTCOMES[:2]), str(row[OUTCOMES[2]])]


def evaluations(data: StudyData) -> tuple[dict[Any, float], dict[Any, float]]:
    """Return two mappings (arm, seed) -> held-out reward: at step 0, if it was evaluated, and at the last evaluation.

    The last evaluation of an unfinished run counts only if it was made after step 0.
    """
    if data.evals.empty or "reward" not in data.evals:
        return {}, {}
    rows = data.evals.dropna(subset=["reward"]).sort_values("step", kind="stable")
    starts, last = rows[rows["step"] == 0].groupby(_RUN, observed=True), rows.groupby(_RUN, observed=True).last()
    begun = {(run.arm, run.seed) for run in data.runs if not run.finished}
    ends = last.loc[[step > 0 or run not in begun for run, step in last["step"].items()], "reward"]
    return starts["reward"].first().to_dict(), ends.to_dict()
