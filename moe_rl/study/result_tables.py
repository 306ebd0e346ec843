"""The summary tables of a study and the environment of its runs, as `moe_rl.study.results` commits them."""

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.settings import flatten
from moe_rl.study.arms import condition_label, slots_rerouted
from moe_rl.study.comparing import comparison_table
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.early_warning import run_signals
from moe_rl.study.figures.gallery.decomposition import PARTS, share_table
from moe_rl.study.figures.gallery.depth_width import AXES, FEWEST, QUANTITIES, power_law, power_laws, size_rows
from moe_rl.study.figures.gallery.design_effect import design_effects
from moe_rl.study.figures.gallery.engine_mismatch import engine_table
from moe_rl.study.figures.gallery.gradient_bias import gradient_table
from moe_rl.study.figures.gallery.precision import engine_format, precision_table
from moe_rl.study.figures.style import NothingToDraw
from moe_rl.study.folders import section
from moe_rl.study.outcomes import final_rewards, run_outcomes
from moe_rl.study.roundings import component_table, conclusion_table, of_each_rounding
from moe_rl.study.statistics import Interval, Numbers, geometric_interval, seed_interval
from moe_rl.study.summary import change_rates, factor_table, routing_noise_ratios
from moe_rl.study.token_view import TokenStep, slots_left, stored_steps

DECOMPOSED = ["token_var_weight", "token_var_routing", "token_share_routing", "averaging_routing"]
"""Columns of the table `decomposed_probes`: parts of the log-ratio of a probe, after each update."""
PLACES = ("--output", "--cold-starts", "--cold_starts")
"""Command-line options that say where files lie, and change no number."""
LOADS = {"below 0.5": 0.0, "0.5 to 1": 0.5, "1 to 2": 1.0, "2 and more": 2.0}
"""Class of load -> where the class begins. Load is an expert's tokens over the even load of its routing site."""


def result_tables(data: StudyData) -> dict[str, pd.DataFrame]:
    """Return the summary tables of a study by name; tables for which its runs have no data are left out.

    - of all studies: final_reward, comparisons, runs (how every run ended), updates (what every run clipped, and its
      gradient norms), change_rates, factors, volatility (share of the slots that the update forward routed to another
      expert than the old policy, over all updates; 0 under R2), signals (of the first steps of every run, and how the
      run ended)
    - with other roundings: roundings, variance_components; runs, signals and updates have the runs of each
    - where the log-ratio was split: decomposition, routing_noise, decomposed_probes (each probe's parts)
    - with a rollout engine: engines; with engines of several formats: precision
    - where arms are of several sizes: sizes, power_laws; of several learning rates: rate_exponents
    - where routes were predicted: predictions, of each rounding
    - where gradients were compared: gradients; where tokens were kept: design_effect (both medians over probes)
    - where routes were kept: effective_routes, and with tokens change_by_load; where loads were kept: balance
    - with responses of several versions of the weights: versions

    The columns are those of the functions that make the tables, with labels and conditions beside the names of arms.
    `final_reward` has `judged` only where it differs from `finished`.
    """
    finals = final_rewards(data)
    all_judged = bool((finals["judged"] == finals["finished"]).all())
    inner = ("by_seed", "collapse_steps", *["judged"] * all_judged)
    finals = finals.drop(columns=[name for name in finals if str(name).endswith(inner)])
    finals.insert(2, "condition", [condition_label(data, noise) for noise in finals["noise"]])
    pairs = comparison_table(data)
    if len(pairs):
        pairs.insert(2, "label", [str(data.arms["label"][arm]) for arm in pairs["arm"]])
        pairs.insert(3, "other_label", [str(data.arms["label"][arm]) for arm in pairs["other"]])
        pairs.insert(4, "condition", [condition_label(data, noise) for noise in pairs["noise"]])
    found = {
        "final_reward": finals,
        "comparisons": pairs,
        "runs": of_each_rounding(data, run_outcomes),
        "signals": of_each_rounding(data, run_signals),
        "change_rates": change_rates(data),
        "factors": factor_table(data),
        "roundings": conclusion_table(data),
        "variance_components": component_table(data),
    }
    if "grad_norm" in data.updates:
        found["updates"] = of_each_rounding(data, update_outcomes)
    if {"slots", "slots_changed"} <= set(data.updates):
        found["volatility"] = seed_means(slots_rerouted(data, ["arm", "seed"]).reset_index(), ["arm"])
    if {"logp_natural", "logp_replayed", "flips"} <= set(data.tokens):
        effects = design_effects(data.tokens).groupby(["arm", "seed", "length"], observed=True)
        if len(effects):
            medians = effects[["design_effect", "tokens_flipped"]].median().reset_index()
            found["design_effect"] = seed_means(medians, ["arm", "length"])
    if {"predictor_kl", "predictor_kl_unmoved"} <= set(data.updates):
        shares = of_each_rounding(data, predicted_shares)
        keys = ["arm", *(name for name in shares if name == "rounding")]
        found["predictions"] = seed_means(shares, keys, ("all", "early", "later"), ("all", "early", "later"))
    if "gradient_cosine" in data.probes:
        found["gradients"] = seed_means(gradient_table(data), ["arm", "update"])
    if len(data.decompositions):
        with suppress(NothingToDraw):  # other trainers may write some of the parts
            shares = share_table(data).pivot(index=["arm", "seed", "level", "update"], columns="part", values="share")
            found["decomposition"] = seed_means(shares.reset_index(), ["arm", "level", "update"], list(PARTS))
        ratios = [(pair, pair.result.difference.exp()) for pair in routing_noise_ratios(data)]
        found["routing_noise"] = pd.DataFrame(
            {"arm": pair.arm, "other": pair.other, "n": ratio.n, **ratio.columns("ratio")} for pair, ratio in ratios
        )
        if set(DECOMPOSED) <= set(data.decompositions):
            found["decomposed_probes"] = data.decompositions[["arm", "seed", "step", "update", *DECOMPOSED]]
    if len(data.engines):
        found["engines"] = seed_means(engine_table(data).drop(columns="clip_low"), ["arm", "routing"])
        if len({name for name, _ in map(engine_format, (run.config for run in data.runs)) if name}) >= 3:
            found["precision"] = seed_means(precision_table(data), ["arm"], geometric=("k3", "k3_growth"))
    if {"var_token_natural", "var_token_replayed"} <= set(data.probes) and "reward" in data.rollouts:
        sizes, _ = size_rows(data)
        if laws := power_laws(sizes, (*QUANTITIES, "independent_sites")):
            found["sizes"] = seed_means(sizes, ["arm", *AXES], [*QUANTITIES, "steps", "independent_sites"])
            found["power_laws"] = pd.DataFrame(laws)
    found["rate_exponents"] = rate_exponents(data)
    if "site_max_vio" in data.probes and "max_vio" in data.updates:
        found["balance"] = seed_means(_balance(data), ["arm"])
    names = ["old_tokens", "version_age", "version_age_max"]  # the share that earlier weights wrote; steps
    if set(names) <= set(data.rollouts):
        ages = data.rollouts.dropna(subset=["old_tokens"]).groupby(["arm", "seed"])[names].mean()
        found["versions"] = seed_means(ages.reset_index(), ["arm"])
    if len(data.route_files):
        if len(by_load := change_by_load(data)):
            found["change_by_load"] = seed_means(by_load, ["arm", "load"])
        found["effective_routes"] = seed_means(effective_routes(data), ["arm", "step", "tokens"])
    return {name: table for name, table in found.items() if len(table)}


def seed_means(
    table: pd.DataFrame,
    keys: list[str],
    names: Sequence[str] = (),
    geometric: Sequence[str] = (),
    interval: Callable[[Numbers], Interval] = seed_interval,
) -> pd.DataFrame:
    """Return the means over seeds of the columns `names`, for each group of rows with equal `keys`.

    By default, `names` are all columns but the keys and `seed`. The interval of a mean is in `_low` and `_high`;
    columns of `geometric` get the geometric mean. `n` is the number of seeds; `_n` is the number of seeds that have a
    value in the column, if smaller.
    """
    names = names or [str(name) for name in table if name not in (*keys, "seed")]
    rows = []
    for key, part in table.groupby(keys, sort=False):
        row: dict[str, Any] = {**dict(zip(keys, key, strict=True)), "n": part["seed"].nunique()}
        for name in names:
            found = (geometric_interval if name in geometric else interval)(part[name].to_numpy(dtype=float))
            row |= found.columns(name, f"{name}_")
            if found.n != row["n"]:  # some seeds have no value in this column
                row[f"{name}_n"] = found.n
        rows.append(row)
    return pd.DataFrame(rows)


def effective_routes(data: StudyData) -> pd.DataFrame:
    """Return how much of their routing capacity runs use: one row per arm and seed.

    Columns: arm, seed, `step`, `tokens`, `effective_sets` (of K experts) and `effective_experts`: exp of the entropy of
    their use, mean over sites. Measured on the last policy whose routes were kept, with live routing, on the tokens of
    its probe, prompts included. Every arm's probe has equally many responses; sets and experts are counted on the first
    tokens, as many as the shortest probe has.
    """
    from moe_rl.routing import effective_sets, expert_load, load_entropy  # torch, which most of a study does without
    from moe_rl.training.route_tables import read_route_table

    last = list(data.route_files.groupby(["arm", "seed"], sort=False).last().reset_index().itertuples())

    def routed(path: object) -> tuple[Any, int]:
        routes = read_route_table(str(path))
        ids = routes.ids.flatten(0, 1)
        return ids[(ids >= 0).all(-1).all(-1)], int(np.max(routes.num_experts))  # one number, or one per site

    most = min((len(routed(row.path)[0]) for row in last), default=0)  # read twice: only one run's routes in memory
    rows = []
    for row in last:
        ids, number = routed(row.path)
        load = expert_load(ids[:most], num_experts=number)
        rows.append(
            {
                "arm": row.arm,
                "seed": row.seed,
                "step": row.step,
                "tokens": most,
                "effective_sets": float(effective_sets(ids[:most], num_experts=number).nanmean()),
                "effective_experts": float(load_entropy(load).exp().nanmean()),
            }
        )
    return pd.DataFrame(rows)


def change_by_load(data: StudyData) -> pd.DataFrame:
    """Return the share of slots whose expert changes, by arm, seed and class of load (`load`).

    The old policy is compared with the policy after the last update, both routed live, over the stored responses of all
    steps. Columns:

    - `experts`: share of the experts that are in the class
    - `slots`: share of the slots that these experts had under the old policy
    - `slot_change`: share of those slots that another expert has after the last update; 0 to 1, NaN for a class without
      slots

    Load is counted on the same response tokens under the old policy, by routing site and step. Empty where no routes
    were stored.
    """
    rows = []
    for run in data.runs:
        counts = np.zeros((3, len(LOADS)))
        for step in stored_steps(run.folder):
            stored = TokenStep(run.folder, step)
            if stored.routed:
                counts += _counted_by_load(stored)
        experts, slots, left = counts
        if slots.any():
            with np.errstate(invalid="ignore"):
                shares = {"experts": experts / experts.sum(), "slots": slots / slots.sum(), "slot_change": left / slots}
            rows.append(pd.DataFrame({"arm": run.arm, "seed": run.seed, "load": list(LOADS), **shares}))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def _counted_by_load(stored: TokenStep) -> np.ndarray:
    """Return the counts [3, classes of load] of one step: experts, slots, and slots that were left."""
    old, new = (stored.all_experts(update) for update in (0, stored.updates[-1]))
    routed = np.broadcast_to(((old >= 0) & (new >= 0)).all(-1, keepdims=True), old.shape)
    left = slots_left(old, new)
    numbers = np.broadcast_to(stored.routes(0).num_experts, old.shape[1])
    found = np.zeros((3, len(LOADS)))
    for site, number in enumerate(numbers):
        ids = old[:, site]
        load = np.bincount(ids[routed[:, site]], minlength=number)
        lost = np.bincount(ids[left[:, site]], minlength=number)
        group = np.digitize(load * number / max(1, load.sum()), list(LOADS.values())) - 1
        found += [np.bincount(group, weights, minlength=len(LOADS)) for weights in (None, load, lost)]
    return found


def update_outcomes(data: StudyData) -> pd.DataFrame:
    """Return one row per run with the share of clipped tokens and the gradient norms of its updates.

    `clipped`: share of the tokens of all updates that the clip took out of the gradient; `clipped_low`: share of these
    at the lower end of the clip range (NaN without any), `clipped_high`: at the upper end, the rest is above the
    ceiling of dual clip; `above_ceiling`: share of the tokens of all updates with A < 0 and a ratio above 3, clipped or
    not; `grad_norm` (median), `grad_norm_largest`; `ratio_at_peak`, the largest ratio of a token in the update of the
    largest norm. With predicted routes: `predictor_kl` and `predictor_kl_unmoved` (means). With engine corrections:
    `correction_weight`, the mean weight of a token over updates, and `correction_dropped` and `correction_truncated`,
    shares of all updates' tokens. Empty if there are no gradient norms.
    """
    rows, keys = data.updates, ["arm", "seed"]
    if "grad_norm" not in rows:  # of a rounding whose runs have no updates yet
        return pd.DataFrame(columns=keys)
    of_run = rows.groupby(keys, sort=False, observed=True)
    found = of_run["grad_norm"].agg(grad_norm="median", grad_norm_largest="max")
    if {"tokens", "clipped_tokens", "clipped_low_tokens"} <= set(rows):
        found.insert(0, "clipped", pooled_rate(rows, "clipped_tokens", "tokens", keys))
        found.insert(1, "clipped_low", pooled_rate(rows, "clipped_low_tokens", "clipped_tokens", keys))
    if {"clipped_tokens", "clipped_high_tokens"} <= set(rows):
        found["clipped_high"] = pooled_rate(rows, "clipped_high_tokens", "clipped_tokens", keys)
    if {"tokens", "ceiling_tokens"} <= set(rows):
        found["above_ceiling"] = pooled_rate(rows, "ceiling_tokens", "tokens", keys)
    if "probs_ratio_max" in rows:
        peaks = rows.sort_values("grad_norm", na_position="first").drop_duplicates(keys, keep="last").set_index(keys)
        found["ratio_at_peak"] = peaks["probs_ratio_max"]
    if {"predictor_kl", "predictor_kl_unmoved"} <= set(rows):
        found = found.join(of_run[["predictor_kl", "predictor_kl_unmoved"]].mean())
    if "correction_weight_mean" in rows:
        found["correction_weight"] = of_run["correction_weight_mean"].mean()
        for what in ("dropped", "truncated"):
            if {"tokens", f"correction_{what}_tokens"} <= set(rows):
                found[f"correction_{what}"] = pooled_rate(rows, f"correction_{what}_tokens", "tokens", keys)
    return found.reset_index()


def predicted_shares(data: StudyData) -> pd.DataFrame:
    """Return how well routes were predicted: one row per run with `predictor_kl` over `predictor_kl_unmoved`.

    Both are summed over updates: of all RL steps (`all`), of the first ten (`early`) and of the later ones (`later`).
    Below 1, the prediction is nearer to the router outputs in an update than the router outputs at the time when the
    batch was scored. NaN without such steps. Empty if no run predicts routes.
    """
    if not {"predictor_kl", "predictor_kl_unmoved"} <= set(data.updates):  # of a rounding that has some of the arms
        return pd.DataFrame(columns=["arm", "seed", "all", "early", "later"])
    rows = data.updates[data.updates["predictor_kl"].notna()]
    early = rows["step"] < 10
    found = {}
    for name, part in {"all": rows, "early": rows[early], "later": rows[~early]}.items():
        sums = part.groupby(["arm", "seed"], sort=False, observed=True)[["predictor_kl", "predictor_kl_unmoved"]].sum()
        found[name] = sums["predictor_kl"] / sums["predictor_kl_unmoved"]
    return pd.DataFrame(found).reset_index()


def rate_exponents(data: StudyData) -> pd.DataFrame:
    """Return the exponents b of the power law change rate = a (learning rate)^b, by update and unit.

    `exponent` is b, with its interval over seeds (`power_law`); rates are pooled over the probes of a run. Empty unless
    every arm has a learning rate of its own and there are at least three.
    """
    learning = {run.arm: _learning_rate(run.config) for run in data.runs}
    known = np.isfinite([*learning.values()]).all()
    if not known or len(set(learning.values())) < max(FEWEST, len(learning)) or data.probes.empty:
        return pd.DataFrame()
    rows = []
    for unit in ("slot", "site", "token"):
        if not {f"{unit}s_changed", f"{unit}s"} <= set(data.probes):
            continue
        rates = data.rates(unit, by=["arm", "seed", "update"])
        rates["learning_rate"] = rates["arm"].astype(str).map(learning)
        for update, part in rates.groupby("update"):
            fit = power_law(part, "learning_rate", "rate")
            rows += [] if fit is None else [{"update": update, "of": f"{unit}s", **fit}]
    return pd.DataFrame(rows)


def _learning_rate(config: dict[str, Any]) -> float:
    """Return the learning rate of a run; NaN where it has none, or another trainer's that is no number."""
    try:
        return float(section(config, "optim").get("learning_rate", np.nan))
    except (TypeError, ValueError):
        return np.nan


def _balance(data: StudyData) -> pd.DataFrame:
    """Return `max_vio` and `trained_max_vio` by arm and seed.

    `max_vio` is that of the last probe, with live routing, mean over sites; `trained_max_vio` is that of the forwards
    that were trained on (replayed routes under replay), mean over sites and updates.
    """
    keys = ["arm", "seed"]
    last = data.probes.sort_values(["step", "update"]).groupby(keys, sort=False).last()
    live = last["site_max_vio"].explode().astype(float).groupby(level=keys, sort=False).mean()
    trained = data.updates.groupby(keys)["max_vio"].mean().rename("trained_max_vio")
    return pd.concat([live.rename("max_vio"), trained], axis=1).reset_index()


def environment_of(data: StudyData) -> dict[str, Any]:
    """Return the environment of the runs: what all runs share and, under `by_run`, the facts in which runs differ."""
    environments = {run.name: flatten(run.environment) for run in data.runs}
    names = dict.fromkeys(
        name for values in environments.values() for name in values if name not in ("started", "command")
    )
    shared: dict[str, Any] = {"study": data.name, "runs": len(environments)}
    if data.environment.get("command"):
        shared["command"] = _published(data.environment["command"])
    by_run: dict[str, dict[str, Any]] = {}
    for name in names:
        values = {run: own.get(name) for run, own in environments.items()}
        if len({json.dumps(value, default=str) for value in values.values()}) == 1:
            shared[name] = next(iter(values.values()))
        else:
            by_run[name] = values
    return {**shared, **({"by_run": by_run} if by_run else {})}


def _published(command: str) -> str:
    """Return a command without the places of one machine.

    Of an absolute path, only the name of the file is left. If the path is the value of an option of `PLACES` (where
    results and cold starts lie, which changes no number), it is left out together with the option.

    >>> _published("/opt/bin/moe-rl study /home/me/own.yaml --output /data/runs --seeds 0 1")
    'moe-rl study own.yaml --seeds 0 1'
    >>> _published("moe-rl run --trust /home/me/own.yaml --output=/data/runs --model.path=/data/qwen")
    'moe-rl run --trust own.yaml --model.path=qwen'
    """
    words: list[str] = []
    for word in shlex.split(command):
        option, equals, value = ("", "", word) if Path(word).is_absolute() else word.partition("=")
        if not Path(value).is_absolute():
            words.append(word)
        elif not equals and words and words[-1] in PLACES:
            words.pop()
        elif option not in PLACES:
            words.append(f"{option}{equals}{Path(value).name}")
    return shlex.join(words)
