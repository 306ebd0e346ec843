"""`moe-rl compare-routes OLD NEW`: the comparison of two captures of routes of the same tokens, without a model.

The comparison counts what changed, by the definitions of `moe_rl.routing.change`, and names faults that are no change
of routing.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moe_rl.drift.capture_files import likely_padding, read_capture
from moe_rl.drift.captured import LAYERS, PREFIXES, UNROUTED, Captured, Finding, OwnRoutes, TokenRows, routed
from moe_rl.drift.change_tables import SITE_COLUMNS, by_cluster, changed_in, intervals_of, site_table
from moe_rl.drift.compare_rows import PARTS, cut_sets, hash_routed, parts_apart, placed
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CompareOptions, check_least
from moe_rl.drift.output import finite, output_folder, unfinished
from moe_rl.drift.route_check import UNTOLD, by_chance, clearly, mean_of, search
from moe_rl.drift.route_search import pairs_of
from moe_rl.drift.words import interval, number, percent
from moe_rl.files import write_atomic, write_json
from moe_rl.measure.metrics import balance_metrics, ratio_metrics, ratio_range_metrics
from moe_rl.routing import RoutedExperts, RoutingError, change_counts, expert_load, flips_per_token, slot_change
from moe_rl.routing.arrays import pad_left_aligned
from moe_rl.study.words import count

LARGEST = 65534
"""Largest expert id that `moe_rl.routing` can pack."""
WRITTEN = "compare.json", "sites.csv"
MEASURED = (
    "change", "clusters", "clusters_are_prompts", "loads", "loads_left_out", "slot_change_of_other_tokens",
    "slot_change_once_undone",
)  # fmt: skip
"""Entries of compare.json about the compared tokens, besides `by_site`; null if no token is compared."""


def run_compare(options: CompareOptions) -> int:
    """Print the comparison, and write it to `options.output` if given.

    Returns 0, or 1 if there is a fault or no token to compare. Raises DriftError.
    """
    output = None if options.output is None else output_folder(options.output, options.output, WRITTEN)
    results = compared(options)
    if output is not None:
        table = pd.DataFrame(results["by_site"], columns=None if results["by_site"] else SITE_COLUMNS)
        with unfinished(output) as folder:
            write_json(folder / WRITTEN[0], results)
            write_atomic(folder / WRITTEN[1], table.to_csv(index=False))
    print(json.dumps(results, indent=1) if options.json else "\n".join(page(results)))
    return 0 if results["ok"] else 1


def compared(options: CompareOptions) -> dict[str, Any]:
    """Compare two files, and return all that compare.json holds, with null for a number that does not exist.

    A token is compared if it has a route at every site in both files.

    Raises DriftError: a file that cannot be read, or files of other sequences, tokens, layers, top-k or experts.
    """
    check_least(options, experts=1, top_k=1, pad_token_id=0)
    old, new = files = [read_capture(path, options.top_k, options.pad_token_id) for path in (options.old, options.new)]
    K = _check_alike(old, new, options.top_k)
    layers, sites, findings = _paired(old, new)
    known = _experts(options, files, layers)
    lengths = [len(tokens) for tokens in old.tokens]
    words = pad_left_aligned([torch.from_numpy(tokens.astype(np.int64)) for tokens in old.tokens], -1).numpy()
    cut = [[ids[:, chosen] for ids in file.ids] for file, chosen in zip(files, layers, strict=True)]
    padded_rows = [placed(cut[0], cut[1], lengths, str(old.path)), placed(cut[1], cut[0], lengths, str(new.path))]
    tables = hash_routed([ids for ids, _, _ in padded_rows], words)
    experts = known or (LARGEST + 1,) * len(sites)
    ids, held_by = [], []
    for side, (one, rows, said) in zip(("OLD", "NEW"), padded_rows, strict=True):
        there, more = routed(one, rows, lengths, tables, sites, experts)
        findings += _of(side, said + more)
        held_by.append(there)
        ids.append(np.where(there[..., None, None], one, -1))
    held = np.logical_and(*held_by)
    found: dict[str, Any] = {**dict.fromkeys(MEASURED), "by_site": []}
    if held.any():
        work = TokenRows.of(ids[1], held_by[1], old.tokens)
        own = OwnRoutes(ids[0], ids[0], sites, experts, tuple(range(len(sites))), len(sites))
        chance, undone = _explained(work, own)
        findings += _of("NEW against OLD", work.findings)
        findings += _of("OLD", cut_sets(ids[0], held))
        keys = old.prompts or new.prompts or [str(tokens.tolist()) for tokens in old.tokens]
        clusters = torch.from_numpy(np.unique(np.array(keys), return_inverse=True)[1])
        fixed = [site for site, is_table in zip(sites, tables, strict=True) if is_table]
        before, after, counted = (torch.from_numpy(part) for part in (*ids, held))
        found = _counted(before, after, counted, clusters, sites, known, fixed)
        found |= {"clusters_are_prompts": bool(old.prompts or new.prompts)}
        found |= {"slot_change_of_other_tokens": 1 - chance, "slot_change_once_undone": undone}
    faults = list(dict.fromkeys(finding.name for finding in findings if finding.fault))
    findings = _notes(old, new, told=bool(faults)) + findings
    results = {
        "verdict": verdict(found, faults),
        "ok": bool(held.any()) and not faults,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "old": str(options.old),
        "new": str(options.new),
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "compared": int(held.sum()),
        "without_route": {side: sum(lengths) - int(x.sum()) for side, x in zip(("old", "new"), held_by, strict=True)},
        "experts_per_token": K,
        "experts": known,
        **found,
        "logprobs": _gaps(old, new),
    }
    return finite(results)


def _of(side: str, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with the name of their side (OLD or NEW) before their text."""
    return [dataclasses.replace(finding, text=f"{side}: {finding.text}") for finding in findings]


def _explained(work: TokenRows, own: OwnRoutes) -> tuple[float, float | None]:
    """Search for a fault that explains the differences, and add what is found to `work.findings`.

    Returns two fractions of slots: those that agree with routes of other tokens, and those that change once the found
    shift or order of layers is undone, over all tokens that then have a partner. The second is None if nothing was
    found to undo, if ids are renamed (the renaming was fitted on some tokens only), or if a part of the rows belongs to
    other tokens."""
    simple, best = search(work, own, tuple(range(len(own.sites))))
    a, b, rows = pairs_of(work, own, best.shift)
    agree, chance = best.slots(a, b), by_chance(work, own, best)
    usual, parts = mean_of(chance), []
    if not clearly(best.agreement, usual):
        text = f"routes of other tokens agree by {percent(usual)}, those of the same by {percent(best.agreement)}"
        work.found(UNTOLD, f"{text}: nothing shows that these are of the same tokens and layers")
    elif best.maps is None:
        where = work.sequence[rows], work.position[rows]
        parts = parts_apart(agree, chance, *where, own.sites, work.ids.shape[2])
    work.findings += parts
    if len(rows) < 32:
        work.found("few tokens", f"{count(len(rows), 'token')} can be compared: too few to be sure", fault=False)
    known = best is not simple and best.maps is None and not parts
    return usual, 1 - float(np.mean([each.mean() for each in agree.values()])) if known else None


def _notes(old: Captured, new: Captured, told: bool) -> list[Finding]:
    """Return notes on how the files were read, on missing log-probabilities, one file twice, and probable padding.

    told: whether a fault was found, which may come from padding; then padding of a single sequence is noted, too."""
    sides = {"OLD": old, "NEW": new}
    said = [Finding("as read", f"{side}: {text}", False) for side, file in sides.items() for text in file.notes]
    if old.path.resolve() == new.path.resolve():
        said.append(Finding("one file", "OLD and NEW are the same file", False))
    if len(lacking := [side for side, file in sides.items() if file.logps is None]) == 1:
        said.append(Finding("log-probabilities", f"{lacking[0]} has none: they are not compared", False))
    token, many, remedy = likely_padding(old, new) or (0, 0, "")
    if many > 1 or (many and told):
        which = "1 sequence begins or ends" if many == 1 else f"{many} sequences begin or end"
        text = f"{which} with a run of token {token}, and these tokens count: if it is padding, {remedy}"
        said.append(Finding("padding?", text, False))
    return said


def _check_alike(old: Captured, new: Captured, top_k: int | None) -> int:
    """Return K, the experts per token of both files. Raises DriftError: tokens or K differ, or ids are out of range."""
    slots, first, second = [], old.path, new.path
    for file in (old, new):
        slots.append(file.shape()[1])
        if top_k not in (None, slots[-1]):
            raise DriftError(f"--top-k {top_k}: {file.path} has {count(slots[-1], 'expert')} for a token")
        for b, ids in enumerate(file.ids):
            if len(odd := ids[(ids < -1) | (ids > LARGEST)]):
                raise DriftError(f"{file.path}: sequence {b} has id {odd[0]}; expected 0..{LARGEST}, or -1 (no route)")
    if len(old.tokens) != len(new.tokens):
        raise DriftError(f"{second} holds {count(len(new.tokens), 'sequence')}, {first} {len(old.tokens)}")
    for b, (words, others) in enumerate(zip(old.tokens, new.tokens, strict=True)):
        n, m = len(words), len(others)
        where = f"{second}: sequence {b}"
        if len(differ := np.flatnonzero(words[:m] != others[:n])):
            t = int(differ[0])
            raise DriftError(
                f"{where}, token {t} is {others[t]}, in {first} it is {words[t]}: are the sequences in another order, "
                "or padded (--pad-token-id)?"
            )
        if n != m:
            raise DriftError(f"{where} has {m} tokens, in {first} {n}; if it is padding: --pad-token-id")
        rows = len(old.ids[b]), len(new.ids[b])
        if max(rows) < n - 1:
            raise DriftError(
                f"{where} has {rows[1]} rows for {n} tokens, in {first} {rows[0]}: nothing says which tokens these are "
                "of. Give every token a row, of -1 where it has no route"
            )
    if slots[0] != slots[1]:
        more = "fused shared experts add columns; or was another num_experts_per_tok configured?"
        raise DriftError(f"{second} has {slots[1]} experts for a token, {first} {slots[0]}: {more}")
    return slots[0]


def _paired(old: Captured, new: Captured) -> tuple[list[tuple[int, ...]], tuple[str, ...], list[Finding]]:
    """Return the layers to compare of each file, the names of their sites, and findings on layers that are left out.

    Layers are paired by name if both files have names, else by index or, if the files differ in depth, by the order of
    the layers that hold routes. Layers without routes are left out, with a fault if the other file has routes there.
    Raises DriftError: the layers of the files cannot be paired."""
    files, columns = (old, new), [list(range(file.shape()[0])) for file in (old, new)]
    if old.sites is not None and new.sites is not None:
        if alone := sorted(set(old.sites) ^ set(new.sites)):
            where = old.path if alone[0] in old.sites else new.path
            raise DriftError(f"site {alone[0]} is only in {where} (one of {len(alone)}): routes of different models?")
        columns[1] = [new.sites.index(site) for site in old.sites]
    least = int(old.sites is None or new.sites is None)  # without names, zeros may mean no routes
    held = [
        [i for i, c in enumerate(chosen) if any((ids[:, c] >= least).any() for ids in file.ids)]
        for file, chosen in zip(files, columns, strict=True)
    ]
    said = [f"{len(i)} of {len(chosen)} layers" for i, chosen in zip(held, columns, strict=True)]
    text, notes, alike = f"OLD has routes in {said[0]}, NEW in {said[1]}", [], len(columns[0]) == len(columns[1])
    if alike:
        both, either = {*held[0]} & {*held[1]}, {*held[0]} | {*held[1]}
        names = old.sites or new.sites or columns[0]
        if both and both != either:
            only = [names[i] for i in sorted(either - both)]
            notes = [Finding(LAYERS, f"{text}: {only} in one file only, which are in no rate")]
        if either and (zeros := [names[i] for i in columns[0] if i not in either]):
            text = f"layers {zeros} are all zeros (or -1) in both files: dense, or not captured; they are in no rate"
            notes.append(Finding("layers of zeros", text, fault=False))
        held = [sorted(both or either or columns[0])] * 2  # all layers if none has routes: `routed` reports that
    if len(held[0]) != len(held[1]) or not held[0]:
        raise DriftError(f"{new.path} has routes in {said[1]}, {old.path} in {said[0]}: capture the same layers")
    if not alike:
        notes += [Finding("dense layers left out", f"{text}; these are compared in their order", fault=False)]
    layers = [tuple(chosen[i] for i in some) for chosen, some in zip(columns, held, strict=True)]
    named = [tuple(f.sites[c] for c in some) for f, some in zip(files, layers, strict=True) if f.sites is not None]
    return layers, named[0] if named else tuple(f"layer {c}" for c in layers[0]), notes


def _experts(
    options: CompareOptions, files: Sequence[Captured], layers: Sequence[Sequence[int]]
) -> tuple[int, ...] | None:
    """Return the number of experts of each site if the files or `--experts` say it, else None.

    Raises DriftError: they do not agree, or nothing says it and an id is the largest of an unsigned dtype, which -1
    becomes in it."""
    pairs = zip(files, layers, strict=True)
    known = {tuple(file.experts[c] for c in chosen) for file, chosen in pairs if file.experts is not None}
    if options.experts is not None:
        known.add((options.experts,) * len(layers[0]))
    if len(known) > 1:
        each = " and ".join(", ".join(map(str, sorted(set(experts)))) for experts in sorted(known))
        raise DriftError(f"the files and --experts name different numbers of experts: {each}")
    for file in files if not known else ():
        for b, ids in enumerate(file.ids):
            if ids.dtype.kind == "u" and ids.size and ids.max() == np.iinfo(ids.dtype).max:
                raise DriftError(
                    f"{file.path}: sequence {b} has id {ids.max()}, the largest {ids.dtype}: a -1 that wrapped? If "
                    f"there are so many experts: --experts {int(ids.max()) + 1}"
                )
    return next(iter(known), None)


def _counted(
    old: Int[Tensor, "B T L K"],
    new: Int[Tensor, "B T L K"],
    mask: Bool[Tensor, "B T"],
    clusters: Int[Tensor, " B"],
    sites: tuple[str, ...],
    experts: tuple[int, ...] | None,
    fixed: Sequence[str],
) -> dict[str, Any]:
    """Return routing change and expert load over the tokens of `mask`, and a table by site.

    clusters: of each sequence the number of its cluster; intervals are over clusters. fixed: hash-routed sites, whose
    rows may name an expert twice."""
    old, new, mask, clusters = (part[mask.any(1)] for part in (old, new, mask, clusters))
    slots = (slot_change(old, new) * old.shape[-1]).round().long()
    counts = dataclasses.replace(change_counts(old, new, mask), sites=sites)
    of_clusters = by_cluster(changed_in(slots, flips_per_token(old, new), mask), clusters)
    table, loads, why = site_table(counts), {}, "neither file says how many experts there are (--experts)"
    whole: dict[str, RoutedExperts] = {}
    if experts is not None:
        try:
            for side, ids in (("old", old), ("new", new)):
                whole[side] = RoutedExperts(ids, sites, experts, meta={"hash_routed": fixed})
        except RoutingError as error:  # an id that no expert has, or one row that names an expert twice
            whole, why = {}, str(error)
    for side, routes in whole.items():
        balance = balance_metrics(expert_load(routes, mask))
        table[f"max_vio_{side}"] = vio = balance["site_max_vio"].numpy()
        loads[side] = {"max_vio_mean": vio.mean(), "max_vio_max": vio.max()}
        loads[side] |= {name: balance[name].item() for name in ("load_entropy_mean", "load_entropy_min")}
    return {
        "change": intervals_of(counts, of_clusters),
        "clusters": of_clusters.count,
        "loads": loads or None,
        "loads_left_out": "" if loads else why,
        "by_site": table.to_dict("records"),
    }


def _gaps(old: Captured, new: Captured) -> dict[str, Any] | None:
    """Return how far the files' log-probabilities are apart, d = NEW - OLD, over tokens that are finite in both.

    None if there is no such token. `left_out`: tokens with a log-probability that is not finite, or in one file
    only."""
    if old.logps is None or new.logps is None:
        return None
    a, b = (np.concatenate(logps) for logps in (old.logps, new.logps))
    both = np.isfinite(a) & np.isfinite(b)
    if not both.any():
        return None
    d, mask = torch.from_numpy(b[both] - a[both])[None], torch.ones(1, int(both.sum()), dtype=torch.bool)
    found = {**ratio_metrics(d, mask), **ratio_range_metrics(d, mask), "log_ratio_mean": d.mean()}
    names = ("log_ratio_mean", "gap_mean", "gap_p99", "gap_max", "k3", "outside_fraction")
    counts = {"tokens": d.numel(), "left_out": int((~np.isnan(a) | ~np.isnan(b)).sum()) - d.numel()}
    counts["zero_in_both"] = int(((a == 0) & (b == 0)).sum())
    return counts | {name: float(found[name]) for name in names}


def verdict(found: Mapping[str, Any], faults: Sequence[str]) -> str:
    """Return one sentence, or two: how much changed, and which faults were found."""
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
    """Return the lines to print: verdict, findings, what was compared, and a line per site."""
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
