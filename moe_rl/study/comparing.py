"""Comparisons of arms: which arms are compared (as declared, or as a study's arms allow), and with what result."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.study.arms import METHOD_FIELDS, arm_settings, per_study, replay_stands_for_noise, replays_all
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import reward_names, run_outcomes
from moe_rl.study.power import pairs_needed, resolvable_difference
from moe_rl.study.statistics import ALPHA, INTEREST, Comparison, compare_paired, judge, seed_interval


@dataclass(frozen=True)
class Pair:
    """A comparison of two arms by their final rewards, `arm` minus `other`.

    `noise` is the condition: the noise of the noisier arm. `beside` compares the other reward of both arms, if they
    have one: the reward of the last evaluations or, if the study declares held-out reward as its outcome, the reward as
    the rollout engine sampled it.
    """

    noise: float
    arm: str
    other: str
    result: Comparison
    beside: Comparison | None = None

    @property
    def resolves(self) -> float:
        """Smallest true difference that this n finds with 80 % power as the first of its family (at alpha / family).

        It is computed from the measured spread.
        """
        one = self.result
        return resolvable_difference(one.sd, one.n, alpha=ALPHA / max(1, one.family))

    @property
    def needed(self) -> int | None:
        """Number of pairs that would find the smallest difference of interest, from the measured spread, or None."""
        return pairs_needed(self.result.sd, self.result.interest, max(1, self.result.family))


def declared(data: StudyData) -> list[tuple[str, str]] | None:
    """Return (treatment, control) of each of the study file's `comparisons`; None if the file declares none.

    Arms that have no run yet are included.
    """
    given = data.config.get("comparisons")
    if not isinstance(given, list | tuple):
        return None
    return [(str(pair[0]), str(pair[1])) for pair in given if isinstance(pair, list | tuple) and len(pair) == 2]


def interest(data: StudyData) -> float:
    """Return the study's smallest difference of interest, in units of reward."""
    given = data.config.get("interest")
    return float(given) if isinstance(given, int | float) and given > 0 else INTEREST


def pairs_to_compare(data: StudyData) -> list[tuple[str, str]]:
    """Return (arm, other) of all comparisons: the declared ones whose arms have runs, or those that the arms allow.

    If the study declares none, each arm of a condition is compared with the first, if the two differ in the method
    alone or in something else alone: a difference between arms that differ in both says nothing of either. Under noise
    the natural replay run stands for replay if it is the same by construction.
    """
    given = declared(data)
    if given is not None:
        return [(arm, other) for arm, other in given if arm in data.arms.index and other in data.arms.index]
    differ = arm_settings(data)[0]
    of_method = np.array([name.split(".")[0] in METHOD_FIELDS for name in differ.index], dtype=bool)
    inside, outside = differ[of_method].astype(str), differ[~of_method].astype(str)
    found = []
    for noise in sorted(data.arms["noise"].unique()):
        arms = [str(arm) for arm in data.arms.index[data.arms["noise"] == noise]]
        natural = replay_stands_for_noise(data, float(noise))
        if natural is not None:
            method = data.arms["method"]
            arms = [arm for arm in arms if method[arm] != method[natural] or not replays_all(data, arm)] + [natural]
        found += [
            (arm, arms[0])
            for arm in arms[1:]
            if inside[arm].equals(inside[arms[0]]) or outside[arm].equals(outside[arms[0]])
        ]
    return found


@per_study
def comparisons(data: StudyData) -> list[Pair]:
    """Return the study's family of comparisons, over finished runs, with p adjusted for their number.

    Final rewards are compared, or held-out rewards if the responses of one of the arms are not its policy's or the
    study declares `outcome: held_out`.
    """
    noise = data.arms["noise"]
    pairs = [(arm, other, float(max(noise[arm], noise[other]))) for arm, other in pairs_to_compare(data)]
    return compare_runs(run_outcomes(data), pairs, interest(data))


def compare_runs(runs: pd.DataFrame, pairs: Iterable[tuple[str, str, float]], least: float) -> list[Pair]:
    """Return the comparisons of a table of `run_outcomes`, for given pairs (arm, other, noise).

    least: the smallest difference of interest.
    """
    runs = runs[runs["finished"].astype(bool)]
    final, held = values_by_seed(runs, "final"), values_by_seed(runs, "held_out")
    others = values_by_seed(runs, "sampled") if "sampled" in runs else held
    by_held_out = set(runs["arm"][runs["measured"] == "held out"])
    found = []
    for arm, other, noise in pairs:
        chosen = held if by_held_out & {arm, other} else final
        beside = compare_paired(others.get(arm, {}), others.get(other, {}), least)
        result = compare_paired(chosen.get(arm, {}), chosen.get(other, {}), least)
        found.append(Pair(noise, arm, other, result, beside if beside.n else None))
    judged = judge([pair.result for pair in found])
    return [replace(pair, result=result) for pair, result in zip(found, judged, strict=True)]


def values_by_seed(rows: pd.DataFrame, name: str) -> dict[str, dict[int, float]]:
    """Return arm -> seed -> value of the column `name`, from a table with one row per run."""
    return {
        str(arm): dict(zip(part["seed"].astype(int), part[name].astype(float), strict=True))
        for arm, part in rows.groupby("arm", sort=False)
    }


def comparison_table(data: StudyData) -> pd.DataFrame:
    """Return one row per comparison, as it is published.

    Columns: arms, n, difference with interval, p before and after adjustment, verdict, the difference of the reward
    beside it (`held_out_` or `sampled_`), the measured spread and what it resolves.
    """
    rows: list[dict[str, Any]] = []
    name = reward_names(run_outcomes(data))[1].replace(" ", "_")
    for pair in comparisons(data):
        one = pair.result
        beside = pair.beside.difference if pair.beside else seed_interval([])
        rows.append(
            {
                "arm": pair.arm,
                "other": pair.other,
                "noise": pair.noise,
                "declared": declared(data) is not None,
                "n": one.n,
                **one.difference.columns("difference"),
                "interval": one.difference.method,
                "p": one.p,
                "p_adjusted": one.adjusted,
                "p_equivalent": one.p_equivalent,
                "p_equivalent_adjusted": one.adjusted_equivalent,
                "family": one.family,
                "interest": one.interest,
                "verdict": str(one.verdict),
                **beside.columns(f"{name}_difference", f"{name}_"),
                "sd": one.sd,
                "resolves": pair.resolves if one.tested else np.nan,
                "pairs_needed": pair.needed,
                "differences": " ".join(f"{d:.4f}" for d in one.differences),
            }
        )
    return pd.DataFrame(rows)
