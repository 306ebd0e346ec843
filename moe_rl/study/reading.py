"""A plain-words reading of a study, from its numbers by fixed rules; nothing expected is written in here.

The rules are printed with the reading (`RULES`), so that a reader can check every sentence against a table.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.statistics import COLLAPSE_RULE, FINAL_STEPS, resolvable_difference
from moe_rl.study.summary import (
    Pair,
    comparisons,
    final_rewards,
    full_label,
    in_run_variance,
    last_updates,
    noise_floor,
    probe_factors,
    replay_identity,
    routing_noise_ratios,
)

MANY = 6
"""With more comparisons than this, those that are not separated are counted and not told one by one."""

RULES = (
    f"Final reward is the mean of a run's last {FINAL_STEPS} steps; two arms are compared seed by seed.",
    "“Separated”: at least three seeds, all with the same sign, and both the paired bootstrap interval and the paired "
    "Student interval (95 %) exclude 0.",
    "“Same sign in every seed”: as above, but the Student interval includes 0. This is weak: with n seeds and no "
    "effect at all the signs agree with probability 2^(1−n), 25 % for n = 3.",
    "“No separation” otherwise. It means that these runs cannot tell the arms apart, not that the arms are equal.",
    "No correction is made for the number of comparisons, which is stated.",
    f"Collapse: {COLLAPSE_RULE}.",
)


@dataclass(frozen=True)
class Statement:
    """One finding: what it is about, and the sentence."""

    topic: str
    text: str


def read(data: StudyData) -> list[Statement]:
    """All statements that this study's data allow, in the order of the report."""
    parts = (
        _runs,
        _reward,
        _replay_check,
        _collapse,
        _change,
        _floor,
        _averaging,
        _replay_variance,
        _decomposition,
        _clipping,
        _power,
    )
    found = [statement for part in parts for statement in part(data)]
    return [replace(s, text=re.sub(r"(?<![\w^])-(?=\d)", "−", s.text)) for s in found]  # a true minus sign


def _runs(data: StudyData) -> list[Statement]:
    done, total = sum(run.finished for run in data.runs), len(data.runs) + len(data.not_started)
    text = f"{done} of {total} runs are finished: {len(data.arms)} arms, seeds {_list(map(str, data.seeds))}."
    if len(data.rollouts):
        text += f" The longest has {int(data.rollouts.groupby(['arm', 'seed']).size().max())} RL steps."
    if len(data.timings):
        seconds = data.timings.groupby(["arm", "seed"])["seconds"].sum()
        text += f" A run's steps took {_span(seconds)} seconds."
    if done < total:
        text += " The others are read as far as they got, so everything below is provisional."
    return [Statement("Runs", text)]


def _reward(data: StudyData) -> list[Statement]:
    final = final_rewards(data).set_index("arm")["final"]
    pairs = comparisons(data)
    found = []
    for noise in sorted({pair.noise for pair in pairs}):
        here = [pair for pair in pairs if pair.noise == noise]
        arms = dict.fromkeys([pair.other for pair in here] + [pair.arm for pair in here])
        ends = []
        for arm in arms:
            stands = "" if data.arms["noise"][arm] == noise else " (its natural run)"
            ends.append(f"{data.arms['label'][arm]}{stands}: {final[arm]:.2f}")
        where = "Natural routing" if noise == 0 else f"Under selection noise σ = {noise:g} (a stress test)"
        n = "n = " + " or ".join(map(str, sorted({pair.result.n for pair in here})))
        verdicts = {pair.result.verdict for pair in here}
        if verdicts == {"no separation"}:
            texts = [f"No separation between any two of them ({n})."]
        elif verdicts == {"too few seeds"}:
            texts = [f"Too few seeds to compare ({n}); the numbers describe these runs only."]
        else:
            told = here if len(here) <= MANY else [p for p in here if p.result.verdict == "separated"]
            rest = [pair.result.verdict for pair in here if pair not in told]
            texts = [_compare(data, pair) for pair in told]
            texts += [f"{verdict.capitalize()}: {rest.count(verdict)} more." for verdict in dict.fromkeys(rest)]
        found.append(Statement("Reward", " ".join([f"{where}, final reward. {'; '.join(ends)}.", *texts])))
    if pairs:
        text = f"Comparisons made: {len(pairs)}, without correction for their number."
        found.append(Statement("Reward", f"{text} Arms that differ in more than one thing are not compared."))
    return found


def _compare(data: StudyData, pair: Pair) -> str:
    a, b = str(data.arms["label"][pair.arm]), str(data.arms["label"][pair.other])
    result, gap = pair.result, pair.result.difference
    if result.verdict in ("no separation", "too few seeds"):
        return f"{a} against {b}: {result.verdict} (difference {gap.estimate:+.3f}, {_n(result.n)})."
    side = "above" if gap.estimate > 0 else "below"
    verdict = result.verdict if result.verdict == "separated" else f"{result.verdict}, which is weak evidence"
    return (
        f"{a} ends {side} {b} by {abs(gap.estimate):.3f} in {result.n} of {result.n} seeds (paired bootstrap "
        f"[{gap.low:.3f}, {gap.high:.3f}], Student [{result.student.low:.3f}, {result.student.high:.3f}]): {verdict}."
    )


def _replay_check(data: StudyData) -> list[Statement]:
    found = []
    if (data.arms["noise"] > 0).any():
        found.append(
            Statement(
                "Stress test",
                "Selection noise is a controlled dose of routing volatility: noise on the router logits, for the "
                "choice of experts only and in the update forward only. It shows what volatile routing does to an "
                "update rule; it is no evidence that training causes such volatility by itself.",
            )
        )
    for row in replay_identity(data).to_dict("records"):
        gap = row["difference"]
        same = (
            "rewards are identical, as they must be"
            if gap == 0
            else f"rewards differ by up to {gap:.2g}, which must not be: look into it"
        )
        found.append(
            Statement(
                "Stress test",
                "Replay forces the choice of experts, so its run under noise is its natural run by construction. "
                f"Checked over {row['steps']} steps of {_n(row['seeds'])}: {same}.",
            )
        )
    return found


def _collapse(data: StudyData) -> list[Statement]:
    table = final_rewards(data)
    fell = table[table["collapsed"] > 0]
    if fell.empty:
        return [Statement("Collapse", "No run collapsed.")]
    runs = _list(f"{full_label(data, r['arm'])} {r['collapsed']} of {r['n']}" for r in fell.to_dict("records"))
    return [Statement("Collapse", f"Collapsed runs: {runs}.")]


def _change(data: StudyData) -> list[Statement]:
    rows = data.probes
    if rows.empty or "slots_changed" not in rows:
        return []
    rows = rows[rows["arm"].isin(data.arms.index[data.arms["noise"] == 0])]
    if rows.empty:
        return []

    def rate(part: pd.DataFrame, name: str) -> str:
        by_arm = part.groupby("arm")[[f"{name}s_changed", f"{name}s"]].sum()
        values = 100 * by_arm[f"{name}s_changed"] / by_arm[f"{name}s"]
        return f"{_span(values)} %"

    ends = [rows[rows["update"] == rows["update"].agg(which)] for which in ("min", "max")]
    when = [int(part["update"].iloc[0]) for part in ends]
    text = f"Between old and new policy, on the same tokens, {rate(ends[0], 'slot')} of slots change after update "
    text += str(when[0])
    if when[0] != when[1]:
        text += f" of a step and {rate(ends[1], 'slot')} after update {when[1]}"
    text += (
        f"; after update {when[1]} that is {rate(ends[1], 'site')} of sites and {rate(ends[1], 'token')} of tokens "
        "(range over the natural arms). The GSPO paper's “roughly 10 %” per update does not define its denominator; "
        "only the slot rate is set beside it."
    )
    return [Statement("Expert change", text)]


def _floor(data: StudyData) -> list[Statement]:
    table = noise_floor(data)
    if table.empty:
        return []
    words = {
        "own": "in the run's own arithmetic (repeated, other batch shapes, other experts implementation)",
        "bf16": "in a bf16 copy",
    }
    parts = [
        f"{words[str(variant)]} {_two(100 * row['slot'])} % of slots, {_two(100 * row['site'])} % of sites and "
        f"{_two(100 * row['token'])} % of tokens change, and a log-probability moves by up to {_two(row['gap_max'])} "
        "nats"
        for variant, row in table.iterrows()
    ]
    text = f"Noise floor: with equal weights and tokens, {'; '.join(parts)}."
    if "own" in table.index and table["slot"]["own"] == 0:
        text += " Change rates above are therefore of the updates, not of arithmetic."
    return [Statement("Expert change", text)]


def _decomposition(data: StudyData) -> list[Statement]:
    rows = data.decompositions
    if rows.empty or "token_var_routing" not in rows:
        return []
    rows = last_updates(rows)
    sums = rows.groupby("arm")[[f"{lv}_{name}" for lv in ("token", "sequence") for name in _SPLIT]].mean()
    found = []
    for arm in (a for a in data.arms.index if a in sums.index):
        row = sums.loc[arm]
        shares = [
            100 * (row[f"{lv}_var_routing"] + row[f"{lv}_cov_weight_routing"] + row[f"{lv}_cov_routing_interaction"])
            / row[f"{lv}_variance"]
            for lv in ("token", "sequence")
        ]  # fmt: skip
        effect = rows.loc[rows["arm"] == arm, "design_effect_routing"].median()
        found.append(
            f"{full_label(data, str(arm))}: routing has {shares[0]:.0f} % of the variance of the token log-ratio and "
            f"{shares[1]:.0f} % of that of the sequence; its token variance is {_two(row['token_var_routing'])} nats², "
            f"which the mean over a sequence divides by {_two(row['token_var_routing'] / row['sequence_var_routing'])} "
            f"(design effect {_two(effect)}; 1 if tokens were independent)"
        )
    topic = "Where the log-ratio comes from"
    return [Statement(topic, f"After the last update of a step. {'; '.join(found)}."), *_lowering(data, topic)]


def _lowering(data: StudyData, topic: str) -> list[Statement]:
    """Does a method's training leave less routing noise than another's, or does its ratio only average it?"""
    found = []
    for pair in routing_noise_ratios(data):
        ratio, low, high = np.exp([pair.result.difference.estimate, pair.result.student.low, pair.result.student.high])
        found.append(
            f"{full_label(data, pair.arm)} over {full_label(data, pair.other)} ×{_two(ratio)} (Student [{_two(low)}, "
            f"{_two(high)}], {_n(pair.result.n)}): {pair.result.verdict}"
        )
    if not found:
        return []
    text = "Does training with one method leave less routing noise than with another? Token variance of the routing "
    text += "part, geometric mean over steps, paired by seed: "
    return [Statement(topic, f"{text}{'; '.join(found)}.")]


_SPLIT = ("variance", "var_routing", "cov_weight_routing", "cov_routing_interaction")


def _averaging(data: StudyData) -> list[Statement]:
    if data.probes.empty or "var_sequence_natural" not in data.probes:
        return []
    factors = probe_factors(data).groupby("arm")["averaging"].median().dropna()
    if factors.empty:
        return []
    length = data.rollouts["response_length"].mean() if "response_length" in data.rollouts else np.nan
    text = (
        f"The sequence log-ratio has {_span(factors)} times less variance than the token log-ratio (median probe per "
        f"arm); independent tokens would give the mean response length, {length:.0f}."
    )
    return [Statement("Token against sequence", text)]


def _replay_variance(data: StudyData) -> list[Statement]:
    found = []
    if len(data.probes) and "var_token_replayed" in data.probes:
        factors = probe_factors(data).groupby("arm")["replay"].median().dropna()
        if len(factors):
            found.append(
                Statement(
                    "What replay removes",
                    f"On the same weights and tokens, live routing has {_span(factors)} times the token variance of "
                    "replayed routing (median probe per arm; 1 would mean that routing adds nothing).",
                )
            )
    natural = data.arms[data.arms["noise"] == 0]
    for arm in natural.index[natural["replay"].str.lower() != "none"]:
        same = natural["objective"] == natural["objective"][arm]
        plain = natural.index[same & (natural["replay"].str.lower() == "none")]
        if not len(plain) or "var_token_log_ratio" not in data.updates:
            continue
        by_seed = in_run_variance(data).groupby(["arm", "seed"])["token"].mean().unstack("seed")
        if not {arm, plain[0]} <= set(by_seed.index):
            continue
        factor = (by_seed.loc[plain[0]] / by_seed.loc[arm]).replace([np.inf, -np.inf], np.nan).dropna()
        if len(factor):
            label = str(data.arms["label"][plain[0]])
            found.append(
                Statement(
                    "What replay removes",
                    f"In training, {label} without replay has {_list(map(_two, factor))} times the token variance of "
                    f"{data.arms['label'][arm]} (one number per seed; different trajectories, so not all of it is "
                    "routing).",
                )
            )
    return found


def _clipping(data: StudyData) -> list[Statement]:
    if data.updates.empty or "clipped_tokens" not in data.updates:
        return []
    sums = data.updates.groupby("arm")[["clipped_tokens", "tokens"]].sum()
    share = sums["clipped_tokens"] / sums["tokens"]
    found = []
    for noise in sorted(data.arms["noise"].unique()):
        arms = [str(a) for a in data.arms.index[data.arms["noise"] == noise] if a in share.index]
        text = _list(f"{data.arms['label'][arm]} {_two(100 * share[arm])} %" for arm in arms)
        where = "natural routing" if noise == 0 else f"selection noise σ = {noise:g}"
        pair = {m: next((a for a in arms if data.arms["method"][a] == m), None) for m in ("grpo", "gspo")}
        if pair["grpo"] and pair["gspo"]:
            if share[pair["grpo"]] > 0:
                ratio = share[pair["gspo"]] / share[pair["grpo"]]
                orders = f", {np.log10(ratio):.1f} orders of magnitude" if ratio > 0 else ""
                text += f"; GSPO over GRPO: ×{_two(ratio)}{orders}"
            else:
                text += "; GRPO clipped no token, so there is no ratio"
        found.append(Statement("Clipping", f"Clipped tokens, {where}: {text}. Clip ranges differ by arm (see Arms)."))
    return found


def _power(data: StudyData) -> list[Statement]:
    results = [pair.result for pair in comparisons(data) if pair.result.n >= 2]
    if not results:
        return [Statement("What n can show", "Fewer than two seeds in common: no difference can be resolved.")]
    sd = float(np.median([np.std(r.differences, ddof=1) for r in results]))
    n = int(np.median([r.n for r in results]))
    text = (
        f"The paired differences scatter by {sd:.3f} (median standard deviation over {len(results)} comparisons). "
        f"With n = {n} a true difference of {resolvable_difference(sd, n):.3f} is found with 80 % power (paired t, 5 "
        f"%); n = 5 would find {resolvable_difference(sd, 5):.3f}, n = 10 {resolvable_difference(sd, 10):.3f}."
    )
    return [Statement("What n can show", text)]


def _list(items: Iterable[str]) -> str:
    return ", ".join(items)


def _n(n: int) -> str:
    return f"{n} seed" + ("" if n == 1 else "s")


def _two(value: float) -> str:
    """Two significant digits, without an exponent: 357.1 -> 360."""
    return f"{float(f'{value:.2g}'):g}"


def _span(values: pd.Series) -> str:
    low, high = _two(values.min()), _two(values.max())
    return low if low == high else f"{low} to {high}"
