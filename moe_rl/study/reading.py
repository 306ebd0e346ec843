"""Sentences in plain words on the results of a study, made from its numbers by fixed rules.

No expected result is written into this module. The rules are printed with the sentences (`rules`), so that a reader can
check every sentence against a table.
"""

from collections.abc import Iterator

import pandas as pd

from moe_rl.study.arms import condition_label, full_label, replay_identity
from moe_rl.study.comparing import Pair, comparisons, declared, interest
from moe_rl.study.curves import BELOW_START_RULE, COLLAPSE_RULE, FAILED_RULE, FINAL_STEPS, GAIN
from moe_rl.study.data import StudyData
from moe_rl.study.outcomes import final_rewards, reward_names, run_outcomes, start_name
from moe_rl.study.power import fewest_pairs
from moe_rl.study.reading_routing import routing_statements
from moe_rl.study.roundings import SURVIVAL_RULES, Survival, component_table, conclusion_table, same_kernels
from moe_rl.study.statistics import ALPHA, FEWEST, INTEREST, VERDICT_RULES, Verdict
from moe_rl.study.words import Statement, count, listed, minus, probability, span

MANY = 6
"""With more comparisons of one condition than this, only verdicts "higher" and "lower" are told one by one; the others
are counted."""


def rules(interest: float = INTEREST) -> list[str]:
    """Return the rules in words, one sentence or list item each, as the report and docs/statistics.md print them."""
    numbers = {"alpha": ALPHA, "interest": f"{interest:g}", "fewest": FEWEST}
    verdicts = [f"“{verdict}”: {rule.format(**numbers)}." for verdict, rule in VERDICT_RULES.items()]
    return [
        f"Final reward is the mean over a run's last {FINAL_STEPS} steps. Where the responses are not the policy's own "
        "(SFT, RFT, DPO), or where the study file declares it (`outcome: held_out`), it is the held-out reward of the "
        "last policy, and a comparison with such an arm is of held-out rewards.",
        "Two arms are compared seed by seed, over their finished runs, with the seeds they share. The comparisons are "
        "those that the study file declares, before it is run; where it declares none, each arm of a condition is "
        "compared with the first if they differ in the method alone or in something else alone, and the report says "
        "that they are undeclared.",
        f"From {FEWEST} pairs on: Student's 95 % interval of the paired differences, the sign-flip test of no "
        "difference (exact up to 16 pairs, above that over 2^15 drawn sign patterns) and the two one-sided t tests of "
        "equivalence; both p are adjusted by Holm over the comparisons of the study that have "
        f"{FEWEST} pairs, each kind by itself.",
        *verdicts,
        "That all seeds have one sign is no verdict: without any effect it happens in 2^(1−n) of the comparisons, "
        f"25 % at n = 3. Holm over m comparisons needs m · 2^(1−n) ≤ {ALPHA}: "
        + ", ".join(f"{fewest_pairs(m)} pairs for {m}" for m in (1, 3, 6, 12))
        + " comparisons.",
        f"Failing runs stay in every mean, and are counted: {FAILED_RULE}; {BELOW_START_RULE}; {COLLAPSE_RULE}.",
    ]


def read(data: StudyData) -> list[Statement]:
    """Return all statements that the data of a study allow, in the order of the report."""
    parts = (_runs, _reward, _short_runs, _replay_check, _outcomes, routing_statements, _power, _roundings)
    return [Statement(topic, minus(text)) for part in parts for topic, text in part(data)]


def _runs(data: StudyData) -> Iterator[Statement]:
    done, total = sum(run.finished for run in data.runs), len(data.runs) + len(data.not_started)
    text = f"{done} of {total} runs are finished: {count(len(data.arms), 'arm')}, seeds {listed(map(str, data.seeds))}."
    if len(data.rollouts):
        text += f" The longest has {int(data.rollouts.groupby(['arm', 'seed']).size().max())} RL steps."
    if len(data.timings):
        seconds = data.timings.groupby(["arm", "seed"])["seconds"].sum()
        text += f" A run's steps took {span(seconds)} seconds."
    if done < total:
        text += " The others are drawn as far as they got and not compared, so everything below is provisional."
    yield Statement("Runs", text)


def _reward(data: StudyData) -> Iterator[Statement]:
    table = final_rewards(data).set_index("arm")
    reward, _ = reward_names(table)
    pairs = comparisons(data)
    for noise in sorted({pair.noise for pair in pairs}):
        here = [pair for pair in pairs if pair.noise == noise]
        arms = dict.fromkeys([pair.other for pair in here] + [pair.arm for pair in here])
        ends = []
        for arm in arms:
            held_out = ", held out" if table["measured"][arm] == "held out" and reward == "final reward" else ""
            final = f"{table['final'][arm]:.2f}{held_out}" if table["n"][arm] else "no reward"
            ends.append(f"{name_of(data, arm, noise)}: {final}")
        where = "Natural routing" if noise == 0 else f"Stress test, {condition_label(data, noise)}"
        told = here if len(here) <= MANY else [p for p in here if p.result.apart]
        rest = [pair.result.verdict for pair in here if pair not in told]
        texts = [compare(data, pair) for pair in told]
        texts += [
            f"{verdict.capitalize()}: {rest.count(verdict)} {'more' if told else f'of {len(here)}'}."
            for verdict in dict.fromkeys(rest)
        ]
        yield Statement("Reward", " ".join([f"{where}, {reward}. {'; '.join(ends)}.", *texts]))
    if pairs:
        tested = max((pair.result.family for pair in pairs if pair.result.tested), default=0)
        kind = "declared in the study file" if declared(data) is not None else "not declared in the study file"
        text = f"{count(len(pairs), 'comparison')}, {kind}; "
        text += f"p adjusted by Holm over {tested}." if tested else f"none has {FEWEST} pairs, so there is no verdict."
        if declared(data) is None:
            text += " What was not declared beforehand is a hint for another study, not a finding."
        yield Statement("Reward", text)


def _short_runs(data: StudyData) -> Iterator[Statement]:
    """Yield a statement on the arms with finished runs that have fewer steps than the final reward is a mean of."""
    runs, sizes = run_outcomes(data), data.rollouts.groupby(["arm", "seed"], observed=True).size()
    ended = runs[runs["finished"].astype(bool) & (runs["measured"] != "held out")].set_index(["arm", "seed"]).index
    arms = dict.fromkeys(run[0] for run in ended if sizes.get(run, FINAL_STEPS) < FINAL_STEPS)
    if arms:
        which = "every arm" if len(arms) == len(data.arms) else listed(full_label(data, arm) for arm in arms)
        text = f"the final reward of {which} is the mean of all steps, the first of which comes before any update."
        yield Statement("Reward", f"Fewer than {FINAL_STEPS} steps: {text}")


def compare(data: StudyData, pair: Pair) -> str:
    """Return a comparison as a sentence: difference, interval, verdict, and p where there is one."""
    a, b = name_of(data, pair.arm, pair.noise), name_of(data, pair.other, pair.noise)
    one, gap = pair.result, pair.result.difference
    if not one.n:
        return f"{a} against {b}: no seed of both has finished with a reward."
    if not one.tested:
        reach = f", range [{gap.low:.3f}, {gap.high:.3f}]" if gap.known else ""
        return f"{a} minus {b}: {gap.estimate:+.3f}{reach}, {count(one.n, 'pair')}: {one.verdict}."
    p = one.adjusted_equivalent if one.verdict == Verdict.EQUIVALENT else one.adjusted
    what = "p of equivalence" if one.verdict == Verdict.EQUIVALENT else "p"
    other = reward_names(run_outcomes(data))[1]
    beside = f"; {other} {pair.beside.difference.estimate:+.3f}" if pair.beside else ""
    return (
        f"{a} minus {b}: {gap.estimate:+.3f} [{gap.low:.3f}, {gap.high:.3f}], {count(one.n, 'pair')}, "
        f"{what} {probability(p)}{beside}: {one.verdict}."
    )


def name_of(data: StudyData, arm: str, noise: float) -> str:
    """Return an arm's label for a text on one noise condition; `(natural)` is added under noise if the arm has none."""
    label = str(data.arms["label"][arm])
    return f"{label} (natural)" if noise > 0 and data.arms["noise"][arm] == 0 else label


def _replay_check(data: StudyData) -> Iterator[Statement]:
    if (data.arms["noise"] > 0).any():
        yield Statement(
            "Stress test",
            "Selection noise is a controlled dose of routing volatility: noise on the router logits, for the choice of "
            "experts only and in the update forward only. It shows what volatile routing does to an update rule; it is "
            "no evidence that training causes such volatility by itself. A dose is named by the share of response "
            "slots that the update forward routed otherwise than the old policy.",
        )
    for row in replay_identity(data).to_dict("records"):
        gap = row["difference"]
        same = (
            "rewards are identical, as they must be"
            if gap == 0
            else f"rewards differ by up to {gap:.2g}, which must not be: look into it"
        )
        yield Statement(
            "Stress test",
            "Replay of all rows forces the choice of experts, so its run under noise is its natural run by "
            f"construction. Checked over {row['steps']} steps of {count(row['seeds'], 'seed')}: {same}.",
        )


def _outcomes(data: StudyData) -> Iterator[Statement]:
    topic = "Runs that failed"
    runs, table = run_outcomes(data), final_rewards(data)
    table["runs"] = table["by_seed"].map(len)
    if not runs["start"].notna().any():
        yield Statement(topic, "No run recorded its reward at step 0, so it cannot be told which failed.")
        return
    found = []
    for column, what in (
        ("failed", f"did not gain more than {GAIN} over {start_name(data)}"),
        ("below_start", "ended below it"),
        ("collapsed", "collapsed"),
    ):
        counted = "runs" if column == "collapsed" else "judged"
        counts = by_arm(data, table, column, counted)
        of = len(runs) if column == "collapsed" else int(table["judged"].sum())
        number = f"{int(runs[column].sum())} of {of}"
        found.append(f"{what}: {number} ({listed(counts)})" if counts else f"{what}: none of {of}")
    rule = f"({COLLAPSE_RULE[0].upper()}{COLLAPSE_RULE[1:]}.)"
    yield Statement(topic, f"Runs that {'; that '.join(found)}.{untold(table)} {rule}")


def by_arm(data: StudyData, table: pd.DataFrame, column: str = "failed", counted: str = "judged") -> list[str]:
    """Return texts such as `GRPO: 3 of 8`: the runs in `column` of those in `counted`, for each arm that has any."""
    return [
        f"{full_label(data, row['arm'])}: {row[column]} of {row[counted]}"
        for row in table.to_dict("records")
        if row[column]
    ]


def untold(table: pd.DataFrame) -> str:
    """Return a sentence on how many finished runs of `final_rewards` lack a first or last reward; empty if none."""
    left = int(table["finished"].sum() - table["judged"].sum())
    return (
        f" Of {count(left, 'finished run')} it cannot be told: no reward at step 0, or none at the end." if left else ""
    )


def power_sentence(data: StudyData) -> str:
    """Return a sentence on the differences that this n resolves, and the n that would resolve the least of interest."""
    pairs = [pair for pair in comparisons(data) if pair.result.n >= 2]
    least = interest(data)
    if not comparisons(data):
        return "No rewards are compared; intervals are over the seeds of an arm."
    if not pairs:
        return "Fewer than two seeds in common: no difference can be resolved."
    tested = [pair for pair in pairs if pair.result.tested]
    family = len(tested) or len(pairs)
    spread = f"Paired differences scatter by {_ends([pair.result.sd for pair in pairs])} (sd)"
    if not tested:
        return (
            f"{_pairs(pairs)} per comparison: ranges only. {spread}; a verdict over {count(family, 'comparison')} "
            f"needs {fewest_pairs(family)} pairs."
        )
    few = [pair for pair in pairs if not pair.result.tested]
    rest = f" {count(len(few), 'comparison')} of {_pairs(few)}: ranges only." if few else ""
    if max(pair.result.n for pair in tested) < fewest_pairs(family):
        return (
            f"{_pairs(tested)} and {count(family, 'comparison')}: none can be called higher or lower, for Holm over "
            f"{family} needs {fewest_pairs(family)} pairs. {spread}.{rest}"
        )
    resolved = [pair.resolves for pair in tested]
    needed = [pair.needed for pair in tested]
    most = "over 1000" if None in needed else str(max(k for k in needed if k is not None))
    fewest = min((k for k in needed if k is not None), default=None)
    to_do = most if fewest is None or str(fewest) == most else f"{fewest} to {most}"
    return (
        f"{spread}: {_pairs(tested)} tell a true difference of {_ends(resolved)} from 0 (80 % power, Holm over "
        f"{family}); to tell {least:g} from 0 would need {to_do} pairs.{rest}"
    )


def _pairs(of: list[Pair]) -> str:
    """Return the number of pairs of each comparison as text: `8 pairs`, `3 to 8 pairs`."""
    fewest, most = min(pair.result.n for pair in of), max(pair.result.n for pair in of)
    return count(most, "pair") if fewest == most else f"{fewest} to {most} pairs"


def _ends(values: list[float]) -> str:
    """Return the smallest and the largest value as text: `0.010 to 0.020`, or one number if both are equal."""
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def _power(data: StudyData) -> Iterator[Statement]:
    yield Statement("What n can show", power_sentence(data))


def _roundings(data: StudyData) -> Iterator[Statement]:
    topic = "Other roundings"
    table, parts = conclusion_table(data), component_table(data)
    if not data.roundings:
        return
    yield Statement(topic, f"The study was run again under {listed(data.roundings)}.")
    for name, runs in same_kernels(data).items():
        yield Statement(
            topic,
            f"{name} is left out: {count(len(runs), 'run')} of it had the kernels of the native ones (`kernels` of "
            f"env.json), and repeat them: {listed(runs)}.",
        )
    for (arm, other), rows in table.groupby(["arm", "other"], sort=False):
        a, b = full_label(data, str(arm)), full_label(data, str(other))
        means = listed(f"{row['rounding']} {row['difference']:+.3f}" for row in rows.to_dict("records"))
        fate = Survival(rows["survival"].iloc[0])
        yield Statement(topic, f"{a} minus {b}: {means}. {fate.capitalize()}: {SURVIVAL_RULES[fate]}.")
    for what, heading in (("arm", "Final rewards"), ("difference", "Paired differences")):
        rows = parts[parts["what"] == what]
        if len(rows):
            sds = [f"{word} {_ends(rows[f'sd_{word}'].tolist())}" for word in ("seed", "rounding", "residual")]
            yield Statement(
                topic,
                f"{heading}, components of variance as standard deviations: {listed(sds)} (range over "
                f"{count(len(rows), what)}). Seed: what a seed has in common in all roundings; rounding: what one does "
                "to all seeds; residual: the rest, with the cold start that a rounding makes of a seed.",
            )
