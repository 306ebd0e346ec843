"""Numbers on routing and ratios that figures, tables and sentences share, so that these cannot disagree.

Rates are counted at the response tokens' own positions (`POSITIONS`). Final rewards are in `moe_rl.study.outcomes`,
comparisons in `moe_rl.study.comparing`.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from moe_rl.study.arms import per_study
from moe_rl.study.comparing import Pair, comparisons, values_by_seed
from moe_rl.study.data import StudyData
from moe_rl.study.floors import FLOORS
from moe_rl.study.shown import counted
from moe_rl.study.statistics import compare_paired, judge, seed_interval

POSITIONS = "at the response tokens' own positions, not at those that predict them"
"""Where slot, site and token changes are counted."""

RATIO_INTEREST = float(np.log(1.25))
"""Logarithm of the smallest ratio of two variances that is of interest: 0.8 to 1.25 are usual bounds of equivalence."""


def routing_noise(data: StudyData) -> pd.DataFrame:
    """Return the variance of the routing part of the log-ratio by arm, seed, update and level (token, sequence).

    `variance` is in nats²: the geometric mean over the steps whose log-ratio was split, without steps of variance 0.
    Single steps scatter by orders of magnitude, so that the largest would dominate an arithmetic mean. Empty where
    nothing was split.
    """
    columns = ["arm", "seed", "update", "level", "variance"]
    rows, names = data.decompositions, {f"{level}_var_routing": level for level in ("token", "sequence")}
    if rows.empty or not set(names) <= set(rows):
        return pd.DataFrame(columns=columns)
    long = rows.melt(["arm", "seed", "update"], list(names), "level", "variance")
    long = long[long["variance"] > 0].assign(variance=np.log(long["variance"].where(long["variance"] > 0)))
    means = long.groupby(["arm", "seed", "update", "level"], observed=True)["variance"].mean().reset_index()
    return means.assign(level=means["level"].map(names), variance=np.exp(means["variance"]))[columns]


def routing_noise_ratios(data: StudyData) -> list[Pair]:
    """Return the pairs of `comparisons`, compared in the logarithm of their token-level `routing_noise`.

    Over finished runs, after the last update of a step. The result says whether training with one method leaves less
    routing noise than with another; what averaging over a sequence removes is not part of it.
    """
    rows = routing_noise(data)
    done = {(run.arm, run.seed) for run in data.runs if run.finished}
    finished = np.array([run in done for run in zip(rows["arm"], rows["seed"], strict=True)], dtype=bool)
    rows = last_updates(rows[finished])
    by_arm = values_by_seed(rows[rows["level"] == "token"].assign(log=np.log(rows["variance"])), "log")
    found = [pair for pair in comparisons(data) if by_arm.get(pair.arm, {}).keys() & by_arm.get(pair.other, {}).keys()]
    judged = judge([compare_paired(by_arm[pair.arm], by_arm[pair.other], RATIO_INTEREST) for pair in found])
    return [replace(pair, result=result, beside=None) for pair, result in zip(found, judged, strict=True)]


def in_run_variance(data: StudyData) -> pd.DataFrame:
    """Return per arm, seed and step the mean variance of token and sequence log-ratios over all updates but the first.

    Of a variance that no run recorded there is no column.

    In the first update of a step the old and the new policy are equal, so that the variance is zero without noise. The
    first update is left out, unless it is the arm's only one.
    """
    rows = data.updates
    rows = rows[(rows["update"] > 1) | (rows.groupby("arm", observed=True)["update"].transform("max") == 1)]
    both = {"var_token_log_ratio": "token", "var_sequence_log_ratio": "sequence"}
    names = {name: level for name, level in both.items() if name in rows}  # other trainers may write one of them
    return rows.groupby(["arm", "seed", "step"], as_index=False)[list(names)].mean().rename(columns=names)


def last_updates(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each arm's last update of a step; arms may differ in the number of their updates."""
    return rows[rows["update"] == rows.groupby("arm", observed=True)["update"].transform("max")]


def noise_floor(data: StudyData) -> pd.DataFrame:
    """Return the noise floor, that is, what changes with equal weights: one row for each of `FLOORS` that was measured.

    Pooled over runs. Columns: slot, site, token (share changed); gap_mean (nats, mean over runs), gap_max (nats,
    largest). A floor that has several variants gets the largest value of each column. Empty where no run measured all
    of this.
    """
    names = ("slots", "sites", "tokens")
    columns = ["slot", "site", "token", "gap_mean", "gap_max"]
    counts = [*names, *(f"{name}_changed" for name in names)]
    if data.floors.empty or not {"variant", *counts, "gap_mean", "gap_max"} <= set(data.floors):
        return pd.DataFrame(columns=columns)
    rows = data.floors
    for name in names:
        rows = counted(rows, f"{name}_changed", name)
    grouped = rows.groupby("variant")
    sums = grouped[counts].sum()
    table = pd.DataFrame({name[:-1]: sums[f"{name}_changed"] / sums[name] for name in names})
    table["gap_mean"], table["gap_max"] = grouped["gap_mean"].mean(), grouped["gap_max"].max()
    table = table.dropna()  # nothing was counted, or no gap was finite
    parts = {floor: table[table.index.isin(variants)] for floor, variants in FLOORS.items()}
    return pd.DataFrame({floor: part.max() for floor, part in parts.items() if len(part)}, index=columns).T


_FACTORS = {
    "replay": ("var_token_natural", "var_token_replayed"),
    "averaging": ("var_token_natural", "var_sequence_natural"),
}


def probe_factors(data: StudyData) -> pd.DataFrame:
    """Return two paired ratios of variances (same tokens): medians over steps per arm, seed and update index.

    `replay`: token variance natural / replayed on the same weights; `averaging`: token / sequence, natural.
    They are medians, because the ratios of single probes are heavy-tailed.
    """
    rows = data.probes[["arm", "seed", "update"]].copy()
    for name, (a, b) in _FACTORS.items():
        rows[name] = (data.probes[a] / data.probes[b].where(data.probes[b] > 0)).astype(float)
    return rows.groupby(["arm", "seed", "update"], as_index=False, observed=True).median()


@per_study
def factor_table(data: StudyData) -> pd.DataFrame:
    """Return the factors by which replay and averaging divide the variance in natural arms, by update.

    Columns: arm, update, probes (with all three variances above 0), and for `replay` (token variance with live over
    that with replayed routes, same weights and tokens) and `averaging` (token over sequence variance, live): `_median`
    over probes, and `_of_means`, the ratio of the mean variances. The median shows the typical probe; in the ratio of
    means, large variances weigh most. Empty where nothing was probed.
    """
    needed = {name for pair in _FACTORS.values() for name in pair}
    columns = ["arm", "update", "probes", *(f"{f}_{kind}" for f in _FACTORS for kind in ("median", "of_means"))]
    if data.probes.empty or not needed <= set(data.probes):
        return pd.DataFrame(columns=columns)
    rows = data.probes[data.probes["arm"].isin(data.arms.index[data.arms["noise"] == 0])]
    rows = rows[(rows[sorted(needed)] > 0).all(axis=1)]
    ratios = rows.assign(**{name: rows[a] / rows[b] for name, (a, b) in _FACTORS.items()})
    grouped = ratios.groupby(["arm", "update"], sort=False, observed=True)
    table = grouped.size().rename("probes").to_frame()
    for name, (a, b) in _FACTORS.items():
        table[f"{name}_median"] = grouped[name].median()
        table[f"{name}_of_means"] = grouped[a].mean() / grouped[b].mean()
    return table.reset_index()


def independent_averaging(data: StudyData) -> tuple[float, str]:
    """Return, as a number and in words, the factor by which averaging would divide the variance of independent tokens.

    In natural arms, it is the harmonic mean length of the responses whose log-ratio was split. The number is NaN where
    none was split; the words then say that the factor is at most the mean length, if lengths were recorded.
    """
    natural, rows, rollouts = data.arms.index[data.arms["noise"] == 0], data.decompositions, data.rollouts
    if {"harmonic_length", "sequences"} <= set(rows):
        rows = rows.loc[rows["arm"].isin(natural), ["harmonic_length", "sequences"]].astype(float).dropna()
        if (count := rows["sequences"].sum()) > 0:
            length = float(count / (rows["sequences"] / rows["harmonic_length"]).sum())
            return length, f"the harmonic mean length of the responses, {length:.1f}"
    if "response_length" not in rollouts or not np.isfinite(
        mean := rollouts.loc[rollouts["arm"].isin(natural), "response_length"].mean()
    ):
        return np.nan, "the harmonic mean length of the responses"
    return np.nan, f"at most the mean length of the responses, {mean:.1f}"


@per_study
def change_rates(data: StudyData) -> pd.DataFrame:
    """Return the rates of expert change after each update, as they are published: one row per arm and update.

    Columns: arm, noise, update, runs, and for slot, site and token: the rate pooled over steps and runs, the interval
    of the runs' own rates (`_low`, `_high`; the range below six), numerator and denominator. The probes have
    live routing in every arm, without noise; changes are counted at `POSITIONS`. Empty where nothing was probed.
    """
    names = ("slot", "site", "token")
    counts = [f"{name}s{part}" for name in names for part in ("_changed", "")]
    columns = ["arm", "noise", "update", "runs", *(f"{n}{part}" for n in names for part in ("", "_low", "_high"))]
    if data.probes.empty or not set(counts) <= set(data.probes):
        return pd.DataFrame(columns=[*columns, *counts])
    probes = data.probes
    for name in names:
        probes = counted(probes, f"{name}s_changed", f"{name}s")
    sums = probes.groupby(["arm", "update", "seed"], sort=False, observed=True)[counts].sum()
    rows = []
    for (arm, update), part in sums.groupby(level=["arm", "update"], sort=False, observed=True):
        total = part.sum()
        row = {"arm": arm, "noise": data.arms["noise"][str(arm)], "update": update, "runs": len(part)}
        for name in names:
            own = seed_interval((part[f"{name}s_changed"] / part[f"{name}s"]).to_numpy())
            rate = total[f"{name}s_changed"] / total[f"{name}s"] if total[f"{name}s"] else np.nan
            row |= own.columns(name, f"{name}_") | {name: rate}
        rows.append(row | {name: int(total[name]) for name in counts})
    return pd.DataFrame(rows)[[*columns, *counts]]
