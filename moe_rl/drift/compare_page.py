"""What `moe-rl compare-routes` found: the sentence, and the page on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.drift.captured import LAYERS, PREFIXES, UNROUTED
from moe_rl.drift.compare_rows import PARTS
from moe_rl.drift.route_check import UNTOLD
from moe_rl.drift.words import interval, number, percent
from moe_rl.study.words import count


def verdict(found: Mapping[str, Any], faults: Sequence[str]) -> str:
    """One sentence."""
    if not found["change"]:
        return f"Nothing can be compared: no token has routes in both files{': ' * bool(faults)}{', '.join(faults)}."
    parts = []
    for level, row in found["change"].items():
        parts.append(f"{percent(row['rate'])} of {level}s{interval(row)}")
    said = f"{', '.join(parts[:-1])} and {parts[-1]} changed from OLD to NEW"
    wrong = [name for name in faults if name not in (PREFIXES, UNROUTED, LAYERS)]
    if not wrong:
        return f"{said}{'. Left out: ' * bool(faults)}{', '.join(faults)}."
    if not (other := [name for name in wrong if name not in (UNTOLD, PARTS)]):
        these = "these are" if UNTOLD in wrong else "all of these are"
        return f"Nothing shows that {these} of the same tokens and layers. As they stand, {said}."
    undone = found["slot_change_once_undone"]
    more = "" if undone is None else f"; {percent(undone)} of slots once that is undone"
    return f"This is no change of routing: {', '.join(other)}. As they stand, {said}{more}."


def page(results: Mapping[str, Any]) -> list[str]:
    """Verdict, findings, what was compared, and a line per site, as text."""
    without, loads, gaps, rows = (results[name] for name in ("without_route", "loads", "logprobs", "by_site"))
    lines = [results["verdict"], ""]
    lines += [f"  {'fault' if f['fault'] else 'note'}: {f['name']}: {f['text']}" for f in results["findings"]]
    lines.append(
        f"Compared: {results['compared']} of {count(results['tokens'], 'token')} of "
        f"{count(results['sequences'], 'sequence')}, {count(len(rows), 'site')}, top-{results['experts_per_token']}. "
        f"Tokens without a route at every site, in no rate: {without['old']} in OLD, {without['new']} in NEW."
    )
    if gaps:
        lines.append(
            f"Log-probabilities, d = NEW - OLD over {count(gaps['tokens'], 'token')}: mean |d| "
            f"{number(gaps['gap_mean'])} nats, k3 {number(gaps['k3'])}, ratio e^d outside [0.9, 1.1] for "
            f"{percent(gaps['outside_fraction'])}; {gaps['left_out']} left out (in one file only, or not finite)."
        )
        if gaps["zero_in_both"]:
            lines.append(f"  {gaps['zero_in_both']} of these are exactly 0 in both files: filled in, of a prompt?")
    if not rows:
        return lines
    lines.append(
        f"With routes of other tokens {percent(results['slot_change_of_other_tokens'])} of slots would differ."
    )
    whose = "prompt" if results["clusters_are_prompts"] else "sequence of other tokens"
    alone = "" if results["clusters_are_prompts"] else "; responses to one prompt are taken as independent"
    lines.append(f"Intervals are over {results['clusters']} clusters, one for each {whose}{alone}.")
    for side, load in (loads or {}).items():
        vio, most, entropy = (number(load[name]) for name in ("max_vio_mean", "max_vio_max", "load_entropy_mean"))
        lines.append(f"Load of experts, {side.upper()}: MaxVio {vio} (largest {most}), entropy {entropy} nats.")
    if not loads:
        lines.append(f"Load of experts: not said; {results['loads_left_out']}")
    width = max(len(row["site"]) for row in rows)
    lines += ["", f"  {'site':{width}}  tokens   slots    sets{'  MaxVio OLD     NEW' if loads else ''}"]
    for row in rows:
        cells = f"{percent(row['slots_changed'] / row['slots']):>8}{percent(row['tokens_changed'] / row['tokens']):>8}"
        more = f"{number(row['max_vio_old']):>12}{number(row['max_vio_new']):>8}" if loads else ""
        lines.append(f"  {row['site']:{width}}  {row['tokens']:6}{cells}{more}")
    return [
        *lines,
        "",
        "  slots: share of experts that changed; sets: of tokens whose set of experts did, in any order",
    ]
