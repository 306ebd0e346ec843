"""Comparison of runs of one study under several CPU kernels: components of the scatter, and verdicts that still hold.

The components are seed, rounding and the rest. Other kernels round differently, and a cold start of some hundred
updates turns the difference into other weights. The runs under other kernels lie in `rounding_<name>` beside the
study's own arms (`StudyData.roundings`); the study's own runs are called `native`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from moe_rl.study.arms import per_study
from moe_rl.study.comparing import Pair, comparisons, values_by_seed
from moe_rl.study.curves import TIE
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.statistics import Comparison, Verdict, seed_interval

NATIVE = "native"


class Survival(StrEnum):
    """What became of a comparison's verdict under the other roundings."""

    SURVIVES = "survives"
    DIRECTION = "same direction"
    FALLS = "does not survive"
    NO_CLAIM = "no claim"
    UNTESTED = "not run again"


SURVIVAL_RULES = {
    Survival.SURVIVES: "the verdict “higher”, “lower” or “no difference of interest” is the same in every rounding",
    Survival.DIRECTION: "the verdict is not the same in every rounding, but each mean difference is on its side of the "
    "difference of interest",
    Survival.FALLS: "the verdict is not the same in every rounding, nor is every mean difference on its side",
    Survival.NO_CLAIM: "there was no such verdict to begin with",
    Survival.UNTESTED: "no other rounding has pairs of these arms",
}
"""Survival -> the condition for it, worded to follow its name and a colon."""


@dataclass(frozen=True)
class Components:
    """Components of variance of a value[seed, rounding] = mean + seed + rounding + residual, all independent."""

    mean: float
    seeds: int
    roundings: int
    seed: float
    rounding: float
    residual: float


def components(values: np.ndarray) -> Components:
    """Return the components of variance of values [seeds, roundings] without gaps.

    By the analysis of variance of two crossed random factors without repetition (Searle, Casella, McCulloch 1992, ch.
    4): with the mean squares MS, residual = MS_res, seed = (MS_seed - MS_res) / roundings, rounding = (MS_rounding -
    MS_res) / seeds, each at least 0. NaN with fewer than two seeds or fewer than two roundings.

    >>> components(np.array([[1.0, 1.0], [3.0, 3.0]]))
    Components(mean=2.0, seeds=2, roundings=2, seed=2.0, rounding=0.0, residual=0.0)
    """
    S, R = values.shape
    if S < 2 or R < 2:
        return Components(float(values.mean()) if values.size else np.nan, S, R, np.nan, np.nan, np.nan)
    mean, by_seed, by_rounding = values.mean(), values.mean(1), values.mean(0)
    residual = values - by_seed[:, None] - by_rounding[None, :] + mean
    ms_residual = float((residual**2).sum() / ((S - 1) * (R - 1)))
    ms_seed = float(R * ((by_seed - mean) ** 2).sum() / (S - 1))
    ms_rounding = float(S * ((by_rounding - mean) ** 2).sum() / (R - 1))
    seed, rounding = max(0.0, (ms_seed - ms_residual) / R), max(0.0, (ms_rounding - ms_residual) / S)
    return Components(float(mean), S, R, seed, rounding, ms_residual)


@dataclass(frozen=True)
class Rounding:
    """A study under one rounding: its table of `run_outcomes`, and its comparisons."""

    runs: pd.DataFrame
    pairs: list[Pair]


def of_each_rounding(data: StudyData, table: Callable[[StudyData], pd.DataFrame]) -> pd.DataFrame:
    """Return a table of a study's runs; with `other_roundings`, the runs of all of them with a column `rounding`."""
    own = table(data)
    others = [table(study).assign(rounding=name) for name, study in other_roundings(data).items()]
    return pd.concat([own.assign(rounding=NATIVE), *others], ignore_index=True) if others else own


def same_kernels(data: StudyData) -> dict[str, list[str]]:
    """Return rounding -> names of its runs that had the same kernels as the native run of their arm and seed.

    Kernels are those of `kernels` in `env.json`. Such a run repeats the native run and says nothing about rounding; it
    can occur on a cluster of several processors.
    """
    native = {run.name: run.environment.get("kernels") for run in data.runs}
    found = {
        name: [run.name for run in study.runs if native.get(run.name) == run.environment.get("kernels", "")]
        for name, study in data.roundings.items()
    }
    return {name: runs for name, runs in found.items() if runs}


def other_roundings(data: StudyData) -> dict[str, StudyData]:
    """Return the roundings of a study by name, without those of `same_kernels`."""
    same = same_kernels(data)
    return {name: study for name, study in data.roundings.items() if name not in same}


def _roundings(data: StudyData) -> dict[str, Rounding]:
    """Return `native` and the `other_roundings` of a study by name."""
    studies = {NATIVE: data, **other_roundings(data)}
    return {name: Rounding(run_outcomes(study), comparisons(study)) for name, study in studies.items()}


@per_study
def component_table(data: StudyData) -> pd.DataFrame:
    """Return `components_of` the roundings of a study but those of `same_kernels`; empty if only `native` is left."""
    return components_of(_roundings(data))


@per_study
def conclusion_table(data: StudyData) -> pd.DataFrame:
    """Return `conclusions_of` the roundings of a study but those of `same_kernels`; empty if only `native` is left."""
    return conclusions_of(_roundings(data))


def components_of(roundings: Mapping[str, Rounding]) -> pd.DataFrame:
    """Return components of variance of every arm's final reward and of every comparison's paired difference.

    Used are the seeds that finished in every rounding that has the arm.

    Columns: what ("arm", "difference"), name, mean, seeds, roundings, and the standard deviations sd_seed (what a seed
    has in common in all roundings: its prompts, its sampling, what is left of its cold start), sd_rounding (what a
    rounding does to all seeds) and sd_residual (the rest: the cold start that a rounding makes of a seed, and chance).
    Empty with one rounding.
    """
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for name, one in roundings.items():
        for arm, seeds in values_by_seed(one.runs[one.runs["finished"].astype(bool)], "final").items():
            values.setdefault(("arm", arm), {})[name] = seeds
        for pair in (pair for pair in one.pairs if pair.result.n):
            seeds = dict(zip(pair.result.seeds, pair.result.differences, strict=True))
            values.setdefault(("difference", f"{pair.arm} - {pair.other}"), {})[name] = seeds
    columns = ["what", "name", "mean", "seeds", "roundings", "sd_seed", "sd_rounding", "sd_residual"]
    rows = []
    for (what, name), by_rounding in values.items() if len(roundings) > 1 else ():
        table = pd.DataFrame(by_rounding).dropna()
        if min(table.shape) >= 2:
            found = components(table.to_numpy(float))
            sds = np.sqrt([found.seed, found.rounding, found.residual])
            rows.append([what, name, found.mean, found.seeds, found.roundings, *sds])
    return pd.DataFrame(rows, columns=columns)


def conclusions_of(roundings: Mapping[str, Rounding]) -> pd.DataFrame:
    """Return a table with every comparison of `native` under every rounding, and what became of its verdict.

    Columns: arm, other, rounding, n, difference, low, high, interval, verdict, and `survival` of the native verdict.
    The rounding "pooled" has each seed's mean difference over the roundings, for the seeds that all roundings have.
    Each rounding is a family of its own. Empty with one rounding.
    """
    columns = ["arm", "other", "rounding", "n", "difference", "low", "high", "interval", "verdict", "survival"]
    results = {name: {(p.arm, p.other): p.result for p in one.pairs if p.result.n} for name, one in roundings.items()}
    rows = []
    for pair in roundings[NATIVE].pairs if len(roundings) > 1 else ():
        there = {name: of[pair.arm, pair.other] for name, of in results.items() if (pair.arm, pair.other) in of}
        fate = survival(pair.result, [one for name, one in there.items() if name != NATIVE])
        told = [(name, one.difference, str(one.verdict)) for name, one in there.items()]
        by_seed = [dict(zip(one.seeds, one.differences, strict=True)) for one in there.values()]
        pooled = seed_interval(pd.DataFrame(by_seed).T.dropna().mean(axis=1).to_numpy(float))
        if pooled.n and len(there) > 1:
            told.append(("pooled", pooled, ""))
        rows += [
            [pair.arm, pair.other, name, one.n, one.estimate, one.low, one.high, one.method, verdict, str(fate)]
            for name, one, verdict in told
        ]
    return pd.DataFrame(rows, columns=columns)


def survival(native: Comparison, others: list[Comparison]) -> Survival:
    """Return what became of a comparison's verdict in its repetitions under other roundings, by `SURVIVAL_RULES`."""
    if not native.claims:
        return Survival.NO_CLAIM
    if not others:
        return Survival.UNTESTED
    if all(other.verdict == native.verdict for other in others):
        return Survival.SURVIVES
    kept = all(on_its_side(native.verdict, other.difference.estimate, native.interest) for other in others)
    return Survival.DIRECTION if kept else Survival.FALLS


def on_its_side(claim: Verdict, mean: float, interest: float) -> bool:
    """Return whether a mean difference is on the side of the difference of interest that the verdict `claim` states."""
    least = interest * (1 - TIE)
    if claim == Verdict.EQUIVALENT:
        return bool(abs(mean) < least)
    return bool(mean >= least if claim == Verdict.HIGHER else mean <= -least)
