"""Figures, summary and one-page report of a comparison of two checkpoints."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.drift import figures as figures_of
from moe_rl.drift.output import page_of
from moe_rl.drift.sums import Sums
from moe_rl.drift.words import (
    adapters_sentence,
    floor_text,
    interval,
    measured_sentence,
    number,
    own_samples,
    pair_verdict,
    percent,
    settings_sentence,
    swap_sentence,
)
from moe_rl.measure.moments import PARTS
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.figures.saving import StudyFigure, save_figure
from moe_rl.study.words import by_topic, count

ROUNDING = 1e-11
"""Variance of log-ratios that float32 makes of equal ones (differences of some 1e-6 nats), nats²."""


def draw(
    sums: Sums,
    tables: dict[str, pd.DataFrame],
    floor: dict[str, pd.DataFrame],
    results: dict[str, Any],
    folder: Path,
) -> list[StudyFigure]:
    """Draw all figures, and save each as PDF, SVG, PNG, CSV and caption."""
    counts = sums.counts
    note = (
        f"Pair: two policies, {results['old_name']} (old) and {results['new_name']} (new), on the same tokens; n = "
        f"{results['measured_tokens']:,} tokens of {results['measured_sequences']:,} sequences."
    )
    sites = tables["sites"]
    noted = f"Noise floor: {floor_text(results['old_name'], results['floor'], reasons=False) or 'not measured.'} {note}"
    drawn = [
        figures_of.change_by_site(sites, tables["floor_sites"], noted),
        figures_of.change_by_position(tables["positions"], tables["floor_positions"], noted),
        figures_of.flips(counts.flips.numpy(), counts.deviation.numpy(), counts.overdispersion, floor, noted),
        figures_of.margins(sums.by_margin(), note),
        figures_of.load_by_expert(tables["experts"], note),
    ]
    rows = {name: np.nan if value is None else value for name, value in results["decomposition"].items()}
    if rows["token_variance"] > ROUNDING:  # without variance there is nothing to take apart
        drawn.append(figures_of.log_ratios(sums.tails(), sums.variance_by_flips(), note))
        drawn.append(figures_of.decomposition(rows, note))
        if "token_var_alone" in sites:
            drawn.append(figures_of.decomposition_by_site(sites, note))
    for figure in drawn:
        save_figure(figure, folder)
    return drawn


def summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the results in sentences, as (topic, text) pairs, for the terminal and the page."""
    change, parts, kl = results["change"], results["decomposition"], results["kl"]
    prompts, sequences = results["measured_prompts"], results["measured_sequences"]
    of_prompts = f" ({count(prompts, 'prompt')})" if prompts < sequences else ""
    tokens = f"{results['measured_tokens']:,} tokens of {sequences:,} sequences{of_prompts}"
    sites, experts = count(results["routing_sites"], "routing site"), count(results["experts_per_token"], "expert")
    rates = "; ".join(f"{percent(row['rate'])} of {level}s{interval(row)}" for level, row in change.items())
    clustering = ""
    if results["overdispersion"] is not None:
        clustering = f", with {number(results['overdispersion'])} times the variance of independent sites"
    found = [
        ("Text", f"{measured_sentence(results, tokens, results['old_name'])}. {sites}, {experts} per token."),
        ("Expert change", f"{rates}. {number(results['flips_per_token'])} sites change per token{clustering}."),
    ]
    if differ := results.get("other_settings"):
        found.append(("Other settings", settings_sentence(differ)))
    if results["adapters"]:
        found.append(("Adapters", adapters_sentence(results)))
    if floor := floor_text(results["old_name"], results["floor"]):
        found.append(("Noise floor", floor))
    if swap := swap_sentence(results["gate_swap"]):
        found.append(("Routers or body", swap))
    natural, replayed = parts["token_variance"], parts["token_var_weight"]
    if natural is None:
        return [*found, ("Log-ratio", "One token alone has no variance: nothing can be said of it.")]
    if natural <= ROUNDING:
        text = "Natural log-ratios do not vary beyond rounding: the two checkpoints say the same of this text."
        if replayed > ROUNDING:
            text += " Under replay they do: are experts numbered otherwise in one of the two?"
        return [*found, ("Log-ratio", text)]
    sequence, weight_mean = parts["sequence_variance"], parts["sequence_var_weight"]
    found.append(
        (
            "Log-ratio",
            f"Variance by token {number(natural)} nats² natural, {number(replayed)} under replay of the old routes; "
            f"by sequence mean {number(sequence)} and {number(weight_mean)}. k3 {number(kl['k3_natural'])} and "
            f"{number(kl['k3_replayed'])} nats per token, "
            + ("the first an estimate" if own_samples(results["text"]) else "averages over this text and no estimate")
            + f" of KL({results['old_name']} || {results['new_name']}).",
        )
    )
    for level, name in (("token", "Token (GRPO's ratio)"), ("sequence", "Sequence mean (GSPO's ratio)")):
        of = [f"{percent(parts[f'{level}_share_{part}'])} {part}" for part in PARTS]
        found.append(("Where it comes from", f"{name}: {', '.join(of)}."))
    averaging, effect = parts["averaging_routing"], parts["design_effect_routing"]
    text = "The routing part does not vary: there is nothing to remove."
    if parts["sequences"] == 1:
        text = "One sequence alone has no variance between sequences: nothing can be said of averaging."
    elif averaging is not None:
        text = (
            f"The mean over a sequence divides the variance of the routing part by {number(averaging)}; independent "
            f"tokens would give {number(parts['harmonic_length'])} (harmonic mean length). What is left is "
            f"{number(effect)} times what independent tokens would leave; for the weight part, "
            f"{number(parts['design_effect_weight'])} times."
        )
    return [*found, ("Does averaging remove it?", text)]


def render(results: dict[str, Any], sites: pd.DataFrame, figures: list[StudyFigure]) -> str:
    """Return the page as HTML, self-contained and without scripts. sites: the table by routing site."""
    short, pattern = short_sites(list(sites["site"]))
    columns = [(head, column, form) for head, column, form in COLUMNS if column in sites]
    rows = [
        [name, *(form(row[column]) for _, column, form in columns)]
        for name, row in zip(short, sites.to_dict("records"), strict=True)
    ]
    parts, levels = results["decomposition"], ("token", "sequence")
    table = []
    for part in PARTS:
        cells = [(number(parts[f"{level}_var_{part}"]), percent(parts[f"{level}_share_{part}"])) for level in levels]
        table.append((part, [*cells[0], *cells[1]]))
    for a, b in combinations(PARTS, 2):
        covariances = (parts[f"{level}_cov_{a}_{b}"] for level in levels)
        token, sequence = (number(None if one is None else 2 * one) for one in covariances)
        table.append((f"2 Cov({a}, {b})", [token, "", sequence, ""]))
    return page_of(
        "drift",
        results,
        figures,
        verdict=pair_verdict(results),
        topics=by_topic(summary(results)),
        pattern=pattern,
        heads=["Site", *(head for head, _, _ in columns)],
        rows=rows,
        parts=table,
        totals=[number(parts[f"{level}_variance"]) for level in levels],
    )


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("Slots changed", "slot_change", percent),
    ("Tokens changed", "site_change", percent),
    ("Load moved", "load_moved", percent),
    ("Load cv, old", "load_cv_old", number),
    ("new", "load_cv_new", number),
    ("Median margin", "margin_median", number),
    ("Var, alone", "token_var_alone", number),
    ("Var, last", "token_var_last", number),
]
