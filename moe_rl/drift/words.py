"""Sentences about a comparison (how much changed, and how many times the noise floor), and numbers as text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.study.figures.floor import OWN, WORDS
from moe_rl.study.floors import FLOORS
from moe_rl.study.words import count


def number(value: float | None) -> str:
    """Return a number with three significant digits as text; a dash for None or a number that is not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}".replace("-", "−")


def percent(value: float | None) -> str:
    """Return a fraction as a percentage with three significant digits; a dash as in `number`."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.3g} %".replace("-", "−")


def pair_verdict(results: Mapping[str, Any]) -> str:
    """Return the verdict on two checkpoints in one sentence, for the terminal and the top of the page."""
    change = results["change"]
    return f"{_changed(change, results['old_name'], results['new_name'])}{_times(change, results)}."


def settings_sentence(differ: Sequence[str]) -> str:
    """Return the sentence about configurations that differ."""
    return f"{'; '.join(differ)}. What that does is counted as weight, though no weight may have moved."


KINDS = {
    "completions": "completions as given",
    "texts": "whole texts",
    "prompts": "prompts without responses (what RL sees are responses: drift --sample)",
}
"""What is measured of an example (`kind_of`), in words; `text_sentence` has the words for samples."""


def text_sentence(text: Mapping[str, Any], old: str) -> str:
    """Return in words which text was measured. old: the name of the first checkpoint."""
    whom = old if text["of_old"] else text["sampled_from"] or "another program"
    unknown = text["of_old"] is None and text.get("sampler_sha256") is None
    if text["sampled_from"] and (unknown or text["of_old"] is False):
        unlike = "which weights is not known" if unknown else f"other weights, settings or dtype than {old}'s"
        whom += f", with {unlike},"
    heat = f"at temperature {text['temperature']:g}" if text["temperature"] else "greedily"
    words = KINDS | {"samples": f"responses sampled from {whom} {heat}"}
    if len(text["kinds"]) == 1:
        return words[next(iter(text["kinds"]))]
    return ", ".join(f"{words[kind]} ({number:,} examples)" for kind, number in text["kinds"].items())


def measured_sentence(results: Mapping[str, Any], tokens: str, old: str) -> str:
    """Return in words how much was measured, of which text, and what was left out. tokens: how much, in words."""
    said = f"{tokens}: {text_sentence(results['text'], old)}"
    if results["truncated"]:
        said += f"; {results['truncated']:,} examples cut to {results['settings']['max_tokens']} tokens"
    return said + (f"; {results['empty']:,} without a token to measure" if results["empty"] else "")


def model_sentence(results: Mapping[str, Any]) -> str:
    """Return in words the model's architecture, and its numbers of parameters and routing sites."""
    sites = count(results["routing_sites"], "routing site")
    return f"{results['architecture']}, {results['parameters']:,} parameters, {sites}"


def interval(row: Mapping[str, Any]) -> str:
    """Return a rate's 95 % interval in brackets, to stand behind the rate; empty if there is none."""
    low, high = row["low"], row["high"]
    return "" if None in (low, high) or not low < high else f" [{percent(low)[:-2]}, {percent(high)[:-2]}]"


def own_samples(text: Mapping[str, Any]) -> bool:
    """Return whether the old checkpoint sampled the whole text, so that averages over it estimate expectations.

    Greedy responses do not count.
    """
    return bool(text["of_old"] and text["temperature"])


def adapters_sentence(results: Mapping[str, Any]) -> str:
    """Return the sentence about checkpoints that are LoRA adapters."""
    found, dtype = results["adapters"], results["settings"]["dtype"]
    of = {base: ", ".join(name for name in found if found[name] == base) for base in found.values()}
    return f"{'; '.join(f'{names} merged into {base}' for base, names in of.items())}, in {dtype}."


def series_verdict(results: Mapping[str, Any]) -> str:
    """Return the verdict on a series: the last checkpoint against the first, the noise floor, and the largest step."""
    rows = results["rows"]
    last, names = rows[-1], [row["name"] for row in rows]
    text = f"{_changed(last['change'], names[0], names[-1])}{_times(last['change'], results)}"
    steps = [(row["name"], row["step"]["slot"]["rate"]) for row in rows[1:]]
    most = max(steps, key=lambda step: step[1])
    mean = sum(rate for _, rate in steps) / len(steps)
    between = f"from one of the {len(rows)} to the next {percent(mean)} on average"
    return f"{text}; {between}, at most {percent(most[1])} ({most[0]})."


def swap_sentence(swap: Mapping[str, Any] | None) -> str:
    """Return in words which of the two, routers or body, moves the selection; empty if not measured."""
    if not swap:
        return ""
    routers, body = (swap[name]["slot"]["rate"] for name in ("routers", "body"))
    smaller, larger = sorted((routers, body))
    old, new = percent(body), percent(routers)
    text = f"New routers on the old body change {new} of slots, old routers on the new body {old}"
    if not larger:
        return f"{text}: neither moves the selection."
    if larger < 1.2 * smaller:
        return f"{text}: both move the selection about equally."
    much = f"{number(larger / smaller)} times as much" if smaller else "alone"
    return f"{text}: the {'routers' if routers > body else 'hidden states'} move the selection {much}."


LEVELS = ("slot", "site", "token")


def floors_of(floor: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return, for each noise floor that was measured, the largest values over its variants.

    The values are the change of slots, sites and tokens, and `gap_max`, nats."""
    found = {}
    for name, members in FLOORS.items():
        if rows := [floor["variants"][variant] for variant in members if variant in floor["variants"]]:
            found[name] = {level: max(row[level]["rate"] or 0.0 for row in rows) for level in LEVELS}
            found[name]["gap_max"] = max(row["gap_max"] for row in rows)
    return found


def floor_text(old: str, floor: Mapping[str, Any], reasons: bool = True) -> str:
    """Return the noise floor in a sentence, empty if not measured. reasons: whether to say why variants are missing."""
    parts = []
    for name, largest in floors_of(floor).items():
        changed = ", ".join(f"{percent(largest[level])} of {level}s" for level in LEVELS)
        gap = number(largest["gap_max"])
        tried = ", ".join(words for variant, words in OWN.items() if variant in floor["variants"])
        what = f"own arithmetic ({tried})" if name == "own" else WORDS[name]
        parts.append(f"{what} changes {changed} and moves a log-probability by up to {gap} nats")
    if not parts:
        return ""
    for variant, why in floor["left_out"].items():
        parts.append(f"not measured: {variant}" + (f" ({why})" if reasons else ""))
    return f"{old} against itself on {floor['sequences']:,} sequences: {'; '.join(parts)}."


def _changed(change: Mapping[str, Any], old: str, new: str) -> str:
    """Return in words how many slots and tokens changed."""
    slots, tokens = (percent(change[level]["rate"]) for level in ("slot", "token"))
    return f"{slots} of slots and {tokens} of tokens changed from {old} to {new}"


def _times(change: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return in words the ratio of the slot change to each noise floor: own arithmetic, and a bf16 copy."""
    rate, parts = change["slot"]["rate"], []
    floors = {name: largest["slot"] for name, largest in floors_of(results["floor"]).items()}
    for name, words in (("own", "other arithmetic at equal weights"), ("bf16", "a bf16 copy")):
        if floors.get(name):
            parts.append(f"{number(rate / floors[name])} times what {words} changes ({percent(floors[name])})")
    if "own" in floors and not floors["own"]:
        parts.append("other arithmetic at equal weights changes none")
    return f", {' and '.join(parts)}" if parts else ""
