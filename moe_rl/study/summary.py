"""One row per arm: the numbers that figures, report and reading share, so that they cannot disagree."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.statistics import (
    Comparison,
    area_under_curve,
    bootstrap_interval,
    compare_paired,
    detect_collapse,
    final_value,
    interquartile_mean,
)

METHOD_FIELDS = ("method", "seed", "arm", "label", "note")
"""Parts of a configuration in which arms of one condition may differ and still be the same experiment."""


def final_rewards(data: StudyData) -> pd.DataFrame:
    """Per arm: final reward with intervals, spread, area under the curve, collapses, held-out reward.

    Columns: arm, label, noise, n, finished, final, low, high, interval, sd, iqm, area, best, fall, collapsed,
    evaluation (held-out reward at the last evaluation), `by_seed` (seed -> final reward), `collapse_steps`.
    """
    rows = []
    for arm, about in data.arms.iterrows():
        final: dict[int, float] = {}
        areas, falls, bests, steps = [], [], [], []
        for seed, run in data.rollouts[data.rollouts["arm"] == arm].groupby("seed"):
            values = run["reward"].to_numpy()
            final[int(str(seed))] = final_value(values)
            areas.append(area_under_curve(run["step"].to_numpy(), values))
            collapse = detect_collapse(run["step"].to_numpy(), values)
            bests.append(collapse.best)
            falls.append(collapse.fall)
            steps += [collapse.step] if collapse.collapsed else []
        interval = bootstrap_interval(list(final.values()))
        values = np.array(list(final.values()))
        rows.append(
            {
                "arm": arm,
                "label": about["label"],
                "noise": about["noise"],
                "n": len(final),
                "finished": about["finished"],
                "final": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "interval": interval.method,
                "sd": values.std(ddof=1) if len(values) > 1 else np.nan,
                "iqm": float(interquartile_mean(values)) if len(values) else np.nan,
                "area": _mean(areas),
                "best": _mean(bests),
                "fall": _mean(falls),
                "collapsed": len(steps),
                "evaluation": _last_evaluation(data, str(arm)),
                "by_seed": final,
                "collapse_steps": steps,
            }
        )
    return pd.DataFrame(rows)


def compare_arms(data: StudyData, a: str, b: str) -> Comparison:
    """Final reward of arm a minus arm b, paired by seed."""
    seeds = {str(row["arm"]): row["by_seed"] for row in final_rewards(data).to_dict("records")}
    return compare_paired(seeds[a], seeds[b])


@dataclass(frozen=True)
class Pair:
    """Two arms of one condition, and the comparison of their final rewards, `arm` minus `other`."""

    noise: float
    arm: str
    other: str
    result: Comparison


def comparisons(data: StudyData) -> list[Pair]:
    """Every pair of arms within a condition that differ in the method alone, or in something else alone: a difference
    between arms that differ in both says nothing of either.

    Under noise the natural replay run stands for replay where it is the same by construction.
    """
    rows = []
    differ = arm_settings(data)[0]
    of_method = [name.split(".")[0] in METHOD_FIELDS for name in differ.index]
    inside, outside = differ[of_method].astype(str), differ[[not m for m in of_method]].astype(str)
    for noise in sorted(data.arms["noise"].unique()):
        arms = [str(arm) for arm in data.arms.index[data.arms["noise"] == noise]]
        natural = replay_stands_for_noise(data, float(noise))
        if natural is not None:
            arms = [arm for arm in arms if data.arms["method"][arm] != data.arms["method"][natural]] + [natural]
        for i, other in enumerate(arms):
            for arm in arms[i + 1 :]:
                if not inside[arm].equals(inside[other]) and not outside[arm].equals(outside[other]):
                    continue
                rows.append(Pair(float(noise), arm, other, compare_arms(data, arm, other)))
    return rows


def routing_noise(data: StudyData) -> pd.DataFrame:
    """Variance of the routing part of the log-ratio by arm, seed, update and level (token, sequence): `variance` in
    nats², the geometric mean over the steps that were split. Single steps scatter by orders of magnitude, so an
    arithmetic mean would be that of the largest of them. Empty where nothing was split."""
    columns = ["arm", "seed", "update", "level", "variance"]
    rows = data.decompositions
    if rows.empty or "token_var_routing" not in rows:
        return pd.DataFrame(columns=columns)
    names = {f"{level}_var_routing": level for level in ("token", "sequence")}
    long = rows.melt(["arm", "seed", "update"], list(names), "level", "variance")
    long = long[long["variance"] > 0].assign(variance=np.log(long["variance"].where(long["variance"] > 0)))
    means = long.groupby(["arm", "seed", "update", "level"], observed=True)["variance"].mean().reset_index()
    return means.assign(level=means["level"].map(names), variance=np.exp(means["variance"]))[columns]


def routing_noise_ratios(data: StudyData) -> list[Pair]:
    """The pairs of `comparisons`, compared in the logarithm of their token-level `routing_noise` after the last update:
    whether one method's training leaves less of it than another's. What averaging does is another question."""
    rows = last_updates(routing_noise(data))
    rows = rows[rows["level"] == "token"]
    by_arm = {arm: dict(zip(part["seed"], np.log(part["variance"]), strict=True)) for arm, part in rows.groupby("arm")}
    return [
        replace(pair, result=compare_paired(by_arm[pair.arm], by_arm[pair.other]))
        for pair in comparisons(data)
        if pair.arm in by_arm and pair.other in by_arm
    ]


def arm_settings(data: StudyData) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(settings in which arms differ: rows dotted setting, columns arm; settings that all arms share)."""
    by_arm = {str(arm): flatten(data.runs_of(str(arm))[0].config) for arm in data.arms.index}
    names = list(dict.fromkeys(name for settings in by_arm.values() for name in settings if name != "seed"))
    table = pd.DataFrame({arm: [settings.get(name) for name in names] for arm, settings in by_arm.items()}, index=names)
    differ = [len({str(value) for value in row}) > 1 for row in table.to_numpy()]
    shared = {name: table.loc[name].iloc[0] for name, d in zip(names, differ, strict=True) if not d}
    return table[differ], shared


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names.

    >>> flatten({"optim": {"steps": 31}, "seed": 0})
    {'optim.steps': 31, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def full_label(data: StudyData, arm: str) -> str:
    """Label of an arm, with its noise where it has some."""
    noise = float(data.arms["noise"][arm])
    label = str(data.arms["label"][arm])
    return f"{label}, noise σ = {noise:g}" if noise and "noise" not in label.lower() else label


def replay_stands_for_noise(data: StudyData, noise: float) -> str | None:
    """The natural replay arm that is, by construction, also the replay arm under this noise; None if there is none.

    Replay forces the choice of experts, so noise on the choice changes nothing. The two runs are equal only if
    nothing else differs: every setting outside the method must be that of the noise arms.
    """
    arms = data.arms
    if noise == 0:
        return None
    base = [outside_method(data.runs_of(str(arm))[0].config) for arm in arms.index[arms["noise"] == noise]]
    for arm in arms.index[(arms["noise"] == 0) & (arms["replay"].str.lower() != "none")]:
        if all(outside_method(data.runs_of(str(arm))[0].config) == other for other in base):
            return str(arm)
    return None


def replay_identity(data: StudyData) -> pd.DataFrame:
    """For each replay arm under noise that was run: does it repeat the natural replay run, as it must?

    Columns: arm, natural, seeds compared, steps compared, difference (largest absolute difference of reward).
    """
    rows = []
    for arm, about in data.arms.iterrows():
        natural = replay_stands_for_noise(data, float(about["noise"])) if about["noise"] else None
        if natural is None or about["method"] != data.arms["method"][natural]:
            continue
        pair = [data.rollouts.loc[data.rollouts["arm"] == a, ["seed", "step", "reward"]] for a in (arm, natural)]
        both = pair[0].merge(pair[1], on=["seed", "step"])
        gap = float((both["reward_x"] - both["reward_y"]).abs().max()) if len(both) else np.nan
        seeds = both["seed"].nunique()
        rows.append({"arm": arm, "natural": natural, "seeds": seeds, "steps": len(both), "difference": gap})
    return pd.DataFrame(rows, columns=["arm", "natural", "seeds", "steps", "difference"])


def outside_method(config: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without its method, seed and names."""
    return {key: value for key, value in config.items() if key not in METHOD_FIELDS}


def _last_evaluation(data: StudyData, arm: str) -> float:
    rows = data.evals[data.evals["arm"] == arm]
    if rows.empty or "reward" not in rows:
        return float("nan")
    return float(rows.sort_values("step").groupby("seed")["reward"].last().mean())


def _mean(values: list[float]) -> float:
    array = np.array(values, dtype=float)
    array = array[np.isfinite(array)]
    return float(array.mean()) if array.size else float("nan")


def in_run_variance(data: StudyData) -> pd.DataFrame:
    """Per arm, seed, step: mean variance of token and sequence log-ratios over the updates from the second on.

    In the first update of a step old and new policy are one, so its variance is zero without noise; it is left
    out in every arm (unless it is the only one).
    """
    rows = data.updates
    if (rows["update"] > 1).any():
        rows = rows[rows["update"] > 1]
    names = {"var_token_log_ratio": "token", "var_sequence_log_ratio": "sequence"}
    return rows.groupby(["arm", "seed", "step"], as_index=False)[list(names)].mean().rename(columns=names)


def last_updates(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each arm's last update of a step; arms may differ in the number of their updates."""
    return rows[rows["update"] == rows.groupby("arm", observed=True)["update"].transform("max")]


OWN_ARITHMETIC = ("repeat", "batch", "experts")
"""Variants of the noise floor that a run meets in its own arithmetic; "bf16" is what another precision would add."""


def noise_floor(data: StudyData) -> pd.DataFrame:
    """What changes with equal weights: rows `own` (the largest of repeat, batch and experts) and `bf16`, as far as
    they were measured; pooled over runs. Columns slot, site, token: share changed; gap_mean (nats, mean over runs),
    gap_max (nats, largest). Empty where no run measured it."""
    names = ("slots", "sites", "tokens")
    columns = ["slot", "site", "token", "gap_mean", "gap_max"]
    if data.floors.empty or "variant" not in data.floors:
        return pd.DataFrame(columns=columns)
    grouped = data.floors.groupby("variant")
    sums = grouped[[*names, *(f"{name}_changed" for name in names)]].sum()
    table = pd.DataFrame({name[:-1]: sums[f"{name}_changed"] / sums[name] for name in names})
    table["gap_mean"], table["gap_max"] = grouped["gap_mean"].mean(), grouped["gap_max"].max()
    own = table[table.index.isin(OWN_ARITHMETIC)]
    parts = [own.max().to_frame("own").T] if len(own) else []
    parts += [table.loc[["bf16"]]] if "bf16" in table.index else []
    return pd.concat(parts)


def probe_factors(data: StudyData) -> pd.DataFrame:
    """Per arm, seed and update index, medians over steps of two paired ratios of variances (same tokens).

    `replay`: token variance natural / replayed on the same weights; `averaging`: token / sequence, natural.
    Medians, because single probes are heavy-tailed.
    """
    rows = data.probes[["arm", "seed", "update"]].copy()
    rows["replay"] = _ratio(data.probes["var_token_natural"], data.probes["var_token_replayed"])
    rows["averaging"] = _ratio(data.probes["var_token_natural"], data.probes["var_sequence_natural"])
    return rows.groupby(["arm", "seed", "update"], as_index=False).median()


def _ratio(a: pd.Series, b: pd.Series) -> pd.Series:
    return (a / b.where(b > 0)).astype(float)
