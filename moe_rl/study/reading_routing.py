"""Sentences on routing: change, noise floor, where the log-ratio comes from, averaging, replay, clipping."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from moe_rl.study.arms import clip_ranges_differ, condition_label, full_label, same_but_for_method
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.shown import counted
from moe_rl.study.summary import (
    POSITIONS,
    factor_table,
    in_run_variance,
    independent_averaging,
    last_updates,
    noise_floor,
    routing_noise_ratios,
)
from moe_rl.study.words import Statement, count, listed, span, two


def routing_statements(data: StudyData) -> Iterator[Statement]:
    """Yield all statements on routing and ratios that the data allow, in the order of the report."""
    for part in (_change, _floor, _averaging, _replay_variance, _decomposition, _clipping):
        yield from part(data)


def _change(data: StudyData) -> Iterator[Statement]:
    rows = data.probes
    if rows.empty or not {"slots_changed", "slots"} <= set(rows):
        return
    rows = counted(rows, "slots_changed", "slots")
    rows = rows[rows["arm"].isin(data.arms.index[data.arms["noise"] == 0]) & (rows["slots"] > 0)]
    if rows.empty:
        return

    def rate(part: pd.DataFrame, name: str) -> str:
        return f"{span(100 * pooled_rate(part, f'{name}s_changed', f'{name}s', 'arm'))} %"

    ends = _ends(rows)
    (first, start), (last, end) = ends[0], ends[-1]
    text = f"Between old and new policy, {POSITIONS}, {rate(start, 'slot')} of slots change after {first}"
    if len(ends) > 1:
        text += f" of a step and {rate(end, 'slot')} after {last}"
    others = [name for name in ("site", "token") if {f"{name}s_changed", f"{name}s"} <= set(rows)]
    others = [name for name in others if counted(end, f"{name}s_changed", f"{name}s")[f"{name}s"].sum() > 0]
    if others:
        text += f"; after {last} that is {' and '.join(f'{rate(end, n)} of {n}s' for n in others)}"
    text += (
        " (range over the natural arms). The GSPO paper's “roughly 10 %” per update does not define its denominator; "
        "only the slot rate is set beside it."
    )
    yield Statement("Expert change", text)


def _floor(data: StudyData) -> Iterator[Statement]:
    table = noise_floor(data)
    if table.empty:
        return
    words = {
        "own": "in the run's own arithmetic (repeated, other batch shapes, other experts implementation)",
        "bf16": "in a bf16 copy",
    }
    parts = [
        f"{words[str(variant)]} {two(100 * row['slot'])} % of slots, {two(100 * row['site'])} % of sites and "
        f"{two(100 * row['token'])} % of tokens change, and a log-probability moves by up to {two(row['gap_max'])} "
        "nats"
        for variant, row in table.iterrows()
    ]
    text = f"Noise floor: with equal weights and tokens, {'; '.join(parts)}."
    if "own" in table.index and table["slot"]["own"] == 0:
        text += " Change rates above are therefore of the updates, not of arithmetic."
    yield Statement("Expert change", text)


def _decomposition(data: StudyData) -> Iterator[Statement]:
    rows = data.decompositions
    split = [f"{lv}_{name}" for lv in ("token", "sequence") for name in _SPLIT]
    if rows.empty or not {*split, "design_effect_routing"} <= set(rows):
        return
    rows = last_updates(rows)
    found = []
    for arm in (a for a in data.arms.index if (rows["arm"] == a).any()):
        own = rows[rows["arm"] == arm]
        seeds = own.groupby("seed")[split].mean()
        shares = [
            (seeds[f"{lv}_var_routing"] + seeds[f"{lv}_cov_weight_routing"] + seeds[f"{lv}_cov_routing_interaction"])
            / seeds[f"{lv}_variance"].where(seeds[f"{lv}_variance"] > 0)
            for lv in ("token", "sequence")
        ]
        token, sequence = own["token_var_routing"], own["sequence_var_routing"]
        text = f"{full_label(data, str(arm))}: "
        if not token.mean() > 0:
            found.append(f"{text}no route changed")
            continue
        if not sequence.mean() > 0:  # one response, or contributions that cancel
            found.append(f"{text}the variance over sequences is not known, or 0")
            continue
        typical = (token / sequence.where(sequence > 0)).median()
        found.append(
            f"{text}routing has {100 * shares[0].mean():.0f} % of the variance of the token log-ratio and "
            f"{100 * shares[1].mean():.0f} % of that of the sequence, mean over seeds; its token variance is "
            f"{two(token.mean())} nats², which the mean over a sequence divides by "
            f"{two(token.mean() / sequence.mean())}, and by {two(typical)} in the median probe (design effect there "
            f"{two(own['design_effect_routing'].median())}; 1 if tokens were independent)"
        )
    topic = "Where the log-ratio comes from"
    yield Statement(topic, f"After the last update of a step. {'; '.join(found)}.")
    yield from _compared_routing_noise(data, topic)


def _compared_routing_noise(data: StudyData, topic: str) -> Iterator[Statement]:
    """Yield a statement that compares the routing noise in token log-ratios that training with each method leaves."""
    found = []
    for pair in routing_noise_ratios(data):
        ratio = pair.result.difference.exp()
        interval = f"{ratio.method} [{two(ratio.low)}, {two(ratio.high)}], " if ratio.known else ""
        found.append(
            f"{full_label(data, pair.arm)} over {full_label(data, pair.other)} ×{two(ratio.estimate)} ({interval}"
            f"{count(pair.result.n, 'seed')}): {pair.result.verdict}"
        )
    if found:
        yield Statement(
            topic,
            "Does training with one method leave less routing noise than with another? Token variance of the routing "
            f"part, geometric mean over steps, paired by seed: {'; '.join(found)}.",
        )


_SPLIT = ("variance", "var_routing", "cov_weight_routing", "cov_routing_interaction")


def _averaging(data: StudyData) -> Iterator[Statement]:
    factors = factor_table(data)
    if factors.empty:
        return
    yield Statement(
        "Token against sequence",
        "In natural arms the variance of the token log-ratio over that of the sequence log-ratio is "
        f"{_by_update(factors, 'averaging')}; independent tokens would give "
        f"{independent_averaging(data)[1]}. {_FACTOR_NOTE}",
    )


def _by_update(factors: pd.DataFrame, name: str) -> str:
    """Return a factor after the first and last update in words: ranges over arms of medians and of ratios of means."""
    return " and ".join(
        f"{span(rows[f'{name}_median'])} ({span(rows[f'{name}_of_means'])}) after {when}"
        for when, rows in _ends(factors)
    )


def _ends(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (name, rows) of the first update of a step and of every arm's last; one pair if both are the same."""
    first, last = int(rows["update"].min()), last_updates(rows)
    numbers = last["update"].astype(int).unique()
    name = f"update {numbers[0]}" if len(numbers) == 1 else "the last update"
    return list({f"update {first}": rows[rows["update"] == first], name: last}.items())


_FACTOR_NOTE = (
    "Medians over the probes of all seeds (figures have a median of each seed), in brackets the ratio of the mean "
    "variances; range over arms."
)


def _replay_variance(data: StudyData) -> Iterator[Statement]:
    topic = "What replay removes"
    factors = factor_table(data)
    if len(factors):
        yield Statement(
            topic,
            "In natural arms, on the same weights and tokens, the token variance with live routing over that with "
            f"replayed routing is {_by_update(factors, 'replay')}; 1 would mean that routing adds nothing. "
            f"{_FACTOR_NOTE}",
        )
    natural = data.arms[data.arms["noise"] == 0]
    for arm in natural.index[natural["replay"].str.lower() != "none"]:
        same = natural["objective"] == natural["objective"][arm]
        plain = [
            str(other)
            for other in natural.index[same & (natural["replay"].str.lower() == "none")]
            if same_but_for_method(data, str(arm), str(other))
        ]
        if not plain or "var_token_log_ratio" not in data.updates:
            continue
        by_seed = in_run_variance(data).groupby(["arm", "seed"])["token"].mean().unstack("seed")
        if not {arm, plain[0]} <= set(by_seed.index):
            continue
        factor = (by_seed.loc[plain[0]] / by_seed.loc[arm]).replace([np.inf, -np.inf], np.nan).dropna()
        if len(factor):
            label = str(data.arms["label"][plain[0]])
            yield Statement(
                topic,
                f"In training, {label} without replay has {listed(map(two, factor))} times the token variance "
                f"of {data.arms['label'][arm]} (one number per seed; different trajectories, so not all of it is "
                "routing).",
            )


def _clipping(data: StudyData) -> Iterator[Statement]:
    if data.updates.empty or not {"clipped_tokens", "tokens"} <= set(data.updates):
        return
    share = pooled_rate(data.updates, "clipped_tokens", "tokens", "arm").dropna()
    ranges = " Clip ranges differ by arm (see Arms)." if clip_ranges_differ(data) else ""
    for noise in sorted(data.arms["noise"].unique()):
        arms = [str(a) for a in data.arms.index[data.arms["noise"] == noise] if a in share.index]
        if not arms:
            continue
        text = listed(f"{data.arms['label'][arm]} {two(100 * share[arm])} %" for arm in arms)
        where = "natural routing" if noise == 0 else condition_label(data, float(noise))
        grpo, gspo = ([a for a in arms if data.arms["method"][a] == method] for method in ("grpo", "gspo"))
        pairs = [(a, b) for a in gspo for b in grpo if same_but_for_method(data, a, b)]
        for a, b in pairs:
            names = f"{data.arms['label'][a]} over {data.arms['label'][b]}" if len(pairs) > 1 else "GSPO over GRPO"
            if share[b] > 0:
                ratio = share[a] / share[b]
                orders = f", {np.log10(ratio):.1f} orders of magnitude" if ratio > 0 else ""
                text += f"; {names}: ×{two(ratio)}{orders}"
            else:
                text += f"; {data.arms['label'][b]} clipped no token, so there is no ratio"
        yield Statement("Clipping", f"Clipped tokens, {where}: {text}.{ranges}")
