"""Early warning: how well signals of the first steps tell, over all runs of some studies, that a run will end badly."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.outcomes import OUTCOMES, run_outcomes

REWARD = "reward"
"""The training reward itself, over every response: the signal that others have to improve on."""
UPDATE_SIGNALS = (
    "grad_norm",
    "k3",
    "chi2_token",
    "ess_token",
    "var_token_log_ratio",
    "var_within",
    "max_token_kl_max",
    "entropy",
)
PROBE_SIGNALS = ("router_kl", "margin_p10", "shift_over_margin", "k3_natural", "ess_token_natural", "load_cv_max")
SHARES = {
    "slot_change": ("slots_changed", "slots"),
    "site_change": ("sites_changed", "sites"),
    "f2": ("extreme_2_natural", "tokens"),
}
"""Shares of probes, pooled over rows: name -> (numerator, denominator).

f2: tokens with max(r, 1/r) > 2, by live routing.
"""
PREFIXES = (5, 10, 20)
"""Numbers of first steps over which a signal is averaged."""
FEWEST = 5
"""Fewest different runs of an arm for a correlation among them."""
FEWEST_IN_RESAMPLE = 3
"""Fewest different runs of such an arm in a resample, which repeats runs; of two the correlation is always 1 or -1."""


def signals(data: StudyData, steps: int) -> pd.DataFrame:
    """Return one row per (arm, seed): the mean of each signal over the first `steps` steps.

    `REWARD` is taken from rollouts, other signals from updates as they were made (with the arm's replay and noise) and
    from probes, which route live; `SHARES` are pooled.
    """
    key = ["arm", "seed"]
    rollouts, updates, probes = (t[t["step"] < steps] for t in (data.rollouts, data.updates, data.probes))
    found = updates.groupby(key)[[s for s in UPDATE_SIGNALS if s in updates]].mean()
    found = found.join(rollouts.groupby(key)[REWARD].mean(), how="outer")  # other trainers may write no updates
    found = found.join(probes.groupby(key)[[s for s in PROBE_SIGNALS if s in probes]].mean())
    for name, (part, whole) in SHARES.items():
        if {part, whole} <= set(probes):
            found = found.join(pooled_rate(probes, part, whole, key).rename(name))
    return found


def origins(data: StudyData, study: str) -> pd.DataFrame:
    """Return what tells runs apart, by (arm, seed): `cold_start` and `rewards`.

    `cold_start` is the SHA-256 of the weights that the run began with (study and seed, if the sum was not kept),
    `rewards` the training reward of every step. Runs that have both in common are one run, if their rewards are of
    their own policies' responses.
    """
    curves = data.rollouts.sort_values("step").groupby(["arm", "seed"])["reward"].agg(tuple)
    starts = {(r.arm, r.seed): r.environment.get("weights_sha256") or f"{study}/{r.seed}" for r in data.runs}
    return curves.rename("rewards").to_frame().assign(cold_start=[starts[key] for key in curves.index])


def run_signals(data: StudyData, prefixes: Sequence[int] = PREFIXES) -> pd.DataFrame:
    """Return one row per finished run and prefix of its steps: the `signals` of the prefix, and how the run ended.

    Runs are those with a final reward that collapsed, or of which it can be told whether they failed (`judged` in
    `final_rewards`). Prefixes are those that the run is longer than (a run that is over by then has no later end that
    signals could tell). Columns: arm, seed, steps (of the prefix), `final`, `bad` (failed, ended below its start or
    collapsed, see `run_outcomes`), the `signals`; `cold_start` and `run`, by which the same initial weights and the
    same run are known in other studies (first 16 digits of SHA-256).
    """
    if REWARD not in data.rollouts:
        return pd.DataFrame(columns=["arm", "seed", "cold_start", "run", "final", "bad", "steps"])
    runs = run_outcomes(data).set_index(["arm", "seed"]).join(origins(data, data.name), how="inner")
    known = runs["gain"].notna() | runs["collapsed"].astype(bool)
    runs = runs[runs["finished"].astype(bool) & runs["final"].notna() & known]
    # rewards of responses that are not the policy's are the same in every run that learns from them
    told = runs["final"].astype(str).where(runs["measured"] == "held out", "")
    runs["run"] = [
        _digest(f"{one.cold_start} {one.rewards}{end}") for one, end in zip(runs.itertuples(), told, strict=True)
    ]
    runs["cold_start"] = runs["cold_start"].map(_digest)
    runs["bad"] = runs[list(OUTCOMES)].any(axis=1)
    kept = runs[["cold_start", "run", "final", "bad"]]
    last = data.rollouts.groupby(["arm", "seed"])["step"].max().reindex(kept.index)
    tables = [
        kept[last >= steps].assign(steps=steps).join(signals(data, steps), how="inner").reset_index()
        for steps in prefixes
    ]
    return pd.concat(tables, ignore_index=True)


def _digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256 sum."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def auc(values: np.ndarray, bad: np.ndarray) -> float:
    """Return the area under the ROC curve of a signal, by which it tells apart the runs that ended badly.

    The area is the chance that the signal of a run that ended badly is above that of a run that did not (ties half).
    NaN if all runs ended alike.
    """
    known = np.isfinite(values)
    values, bad = values[known], bad[known]
    n = int(bad.sum())
    if n in (0, len(bad)):
        return float("nan")
    return float((rankdata(values)[bad].sum() - n * (n + 1) / 2) / (n * (len(bad) - n)))


def arms_of(table: pd.DataFrame) -> np.ndarray:
    """Return a number for each run: that of its arm in its study, under its rounding if the table has that column."""
    keys = [name for name in ("study", "arm", "rounding") if name in table]
    return table.groupby(keys, observed=True, dropna=False).ngroup().to_numpy()


def pairs_within(bad: np.ndarray, arm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions (of the bad run, of the other) of all pairs of runs of one arm that ended differently."""
    of_bad, of_good = np.flatnonzero(bad), np.flatnonzero(~bad)
    i, j = np.nonzero(arm[of_bad][:, None] == arm[of_good])
    return of_bad[i], of_good[j]


def auc_within(values: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], times: np.ndarray) -> float:
    """Return `auc` over the given pairs alone, a run counted as often as `times` says; NaN without a pair."""
    bad, good = values[pairs[0]], values[pairs[1]]
    weight = times[pairs[0]] * times[pairs[1]] * (np.isfinite(bad) & np.isfinite(good))
    won = (bad > good) + 0.5 * (bad == good)
    return float((weight * won).sum() / weight.sum()) if weight.any() else float("nan")


def correlations_within(
    signal: np.ndarray, final: np.ndarray, reward: np.ndarray, arm: np.ndarray, times: np.ndarray
) -> tuple[float, float]:
    """Return the correlation of a signal with the final reward among the runs of one arm, plain and partial.

    Args:
        signal, final, reward: one value per run; `reward` is over the same steps as `signal`.
        arm: the number of each run's arm.
        times: how often each run counts.

    Returns:
        Spearman's correlation of signal and final reward, and the partial one with `reward` held fixed: each the mean
        over arms, weighted by their runs. Arms of fewer than `FEWEST` runs, and arms in which one side is constant, are
        left out; NaN if no arm remains.
    """
    known = np.isfinite(signal + final)
    weight = times * known
    one, other = (ranks_within(values, arm, weight) for values in (signal, final))
    plain = _mean_over_arms(_correlations(one, other, arm, weight), arm, weight, known)
    known &= np.isfinite(reward)
    weight = times * known
    signal, final, reward = (ranks_within(values, arm, weight) for values in (signal, final, reward))
    pairs = ((signal, final), (signal, reward), (reward, final))
    with_final, with_reward, reward_final = (_correlations(a, b, arm, weight) for a, b in pairs)
    left = (1 - with_reward**2) * (1 - reward_final**2)
    beyond = (with_final - with_reward * reward_final) / np.sqrt(np.where(left > 1e-9, left, np.nan))
    return plain, _mean_over_arms(beyond, arm, weight, known)


def ranks_within(values: np.ndarray, arm: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the ranks of runs among those of their arm, up to a constant of the arm.

    Each run counts as often as its weight says; ties share the middle rank. Values without weight may be missing.
    """
    order = np.lexsort((values, arm))
    values, arm = values[order], arm[order]
    tie = np.cumsum(np.concatenate([[False], (values[1:] != values[:-1]) | (arm[1:] != arm[:-1])]))
    runs = np.bincount(tie, weight[order])
    ranks = np.empty(len(order))
    ranks[order] = (np.cumsum(runs) - runs / 2)[tie]
    return ranks


def _correlations(a: np.ndarray, b: np.ndarray, arm: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation in each arm, a run counted by its weight; NaN if one side is constant."""
    runs = np.maximum(np.bincount(arm, weight), 1)
    a, b = (x - (np.bincount(arm, weight * x) / runs)[arm] for x in (a, b))
    ab, aa, bb = (np.bincount(arm, weight * x * y) for x, y in ((a, b), (a, a), (b, b)))
    return ab / np.sqrt(np.where(np.minimum(aa, bb) > 1e-9, aa * bb, np.nan))


def _mean_over_arms(values: np.ndarray, arm: np.ndarray, weight: np.ndarray, known: np.ndarray) -> float:
    """Return the mean over arms, weighted by their runs, without arms of fewer than `FEWEST` known runs or with NaN."""
    enough = (np.bincount(arm, known) >= FEWEST) & (np.bincount(arm, weight > 0) >= FEWEST_IN_RESAMPLE)
    runs = np.bincount(arm, weight) * (enough & np.isfinite(values))
    return float((runs * np.nan_to_num(values)).sum() / runs.sum()) if runs.any() else float("nan")


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation; NaN below three pairs or if one of the two is constant."""
    known = np.isfinite(a) & np.isfinite(b)
    if known.sum() < 3:
        return float("nan")
    ranks = np.stack([rankdata(a[known]), rankdata(b[known])])
    return float(np.corrcoef(ranks)[0, 1]) if (ranks.std(axis=1) > 0).all() else float("nan")


def early_warning(studies: Sequence[pd.DataFrame], resamples: int = 1000, level: float = 0.95) -> pd.DataFrame:
    """Return how well each signal of the first steps tells how a run will end: one row per number of steps and signal.

    Args:
        studies: `run_signals` of each study.
        resamples: number of resamples of the bootstrap.
        level: confidence level of the intervals.

    Columns: signal, steps, runs, bad, `auc` of telling bad ends apart; `within`, the same among the runs of one arm of
    one study (`auc_within`), so that telling arms apart is no part of it, over so many `pairs`; `correlation`
    (Spearman's, with the final reward); `correlation_within`, the same among the runs of one arm, and `beyond_reward`,
    what remains of that correlation if the reward of the same steps is held fixed (`correlations_within`; NaN if no
    table has a reward). Each has an interval by bootstrap over cold starts, which the arms of a seed share, and also
    studies with each other. A run that several studies hold counts once, in the first of them. A signal that falls
    before a bad end has areas below 0.5.

    Raises:
        ValueError: no run at all.
    """
    numbered = [table.assign(study=place) for place, table in enumerate(studies)]
    everything = pd.concat(numbered, ignore_index=True).drop_duplicates(["run", "steps"])
    if everything.empty:
        raise ValueError(
            "no finished run has more steps than its signals would be read from; see --steps and --rounding"
        )
    rows = []
    for steps, table in everything.groupby("steps"):
        bad, final = table["bad"].to_numpy(bool), table["final"].to_numpy(float)
        clusters = [np.flatnonzero(table["cold_start"] == c) for c in sorted(table["cold_start"].unique())]
        generator = np.random.default_rng(0)
        draws = [np.arange(len(table))]  # first all runs once, then the resamples
        draws += [
            np.concatenate([clusters[i] for i in generator.integers(len(clusters), size=len(clusters))])
            for _ in range(resamples)
        ]
        counts = [np.bincount(d, minlength=len(table)) for d in draws]
        arm = arms_of(table)
        pairs = pairs_within(bad, arm)
        reward = table.get(REWARD, pd.Series(np.nan, table.index)).to_numpy(float)
        for name in (REWARD, *SHARES, *PROBE_SIGNALS, *UPDATE_SIGNALS):
            if name not in table:
                continue
            values = table[name].to_numpy(float)
            among = np.array([correlations_within(values, final, reward, arm, times) for times in counts])
            known = np.isfinite(values)
            rows.append(
                {
                    "signal": name,
                    "steps": steps,
                    "runs": int(known.sum()),
                    "bad": int(bad[known].sum()),
                    **_with_interval("auc", [auc(values[d], bad[d]) for d in draws], level),
                    **_with_interval("within", [auc_within(values, pairs, times) for times in counts], level),
                    "pairs": int((known[pairs[0]] & known[pairs[1]]).sum()),
                    **_with_interval("correlation", [rank_correlation(values[d], final[d]) for d in draws], level),
                    **_with_interval("correlation_within", among[:, 0], level),
                    **_with_interval("beyond_reward", among[:, 1], level),
                }
            )
    return pd.DataFrame(rows)


def _with_interval(name: str, values: Sequence[float] | np.ndarray, level: float) -> dict[str, float]:
    """Return a number with its interval: the first of `values` is of all runs, the others are of resamples."""
    first, *draws = map(float, values)
    known = [d for d in draws if np.isfinite(d)]
    enough = len(known) > len(draws) / 2
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2]) if enough else (np.nan, np.nan)
    return {name: first, f"{name}_low": float(low), f"{name}_high": float(high)}
