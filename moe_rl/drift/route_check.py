"""The comparison of captured routes with a model's: what agrees, and which known fault explains what does not.

Everything is counted as overlap of sets: slot agreement is abs(captured ∩ model) / K of a token at a site.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from moe_rl.drift.captured import (
    PREFIXES,
    UNROUTED,
    Captured,
    Finding,
    OwnRoutes,
    TokenRows,
    padded_rows,
    routed,
    twice,
)
from moe_rl.drift.route_search import PENALTY, SEARCHED, Explanation, explanations, pairs_of, slots_of
from moe_rl.study.words import count

PREFIX = 4
"""Fewest tokens of a prefix of other routes, and of the rest of its sequence, that are told apart."""


@dataclass(frozen=True)
class SiteRow:
    """The agreement of one site.

    layer: the captured layer that is compared with it, -1 for none. tokens: how many were compared. slots, sets: shares
    of slots and of whole sets of experts that agree. floor_slots: the share of slots that the model and its copy in
    other arithmetic agree in. limit: the share of slots below which it is a fault."""

    site: str
    layer: int
    tokens: int
    slots: float
    sets: float
    floor_slots: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the share of slots that agree reaches the limit."""
        return self.slots >= self.limit


CLEAR = 0.2
"""How much the share of slots that agree must exceed the share by chance to be clearly no chance; `clearly` asks for
less if the share by chance is above 0.6."""
UNTOLD = "not told apart"
"""Name of the fault of routes that agree no better than routes of other tokens do."""


Gaps = dict[str, float | int | None]
"""Numbers by their names in `moe_rl.measure.arithmetic.gap_split`; None for one that is not finite."""


@dataclass(frozen=True)
class EngineGap:
    """The gaps of a model's log-probabilities to the engine's and to those of its own copy in other arithmetic.

    d = log p(model) - log p(other), nats, over `tokens` tokens of `sequences` sequences at `temperature`. engine, copy:
    the gaps to each. copy_dtype: of the copy. impossible: how many tokens the engine gave -inf; they are left out.
    not_replayed: why `engine` has no entries of a replay; empty if it has."""

    tokens: int
    sequences: int
    impossible: int
    temperature: float
    engine: Gaps
    copy: Gaps
    copy_dtype: str
    not_replayed: str = ""


@dataclass(frozen=True)
class RouteCheck:
    """The result of a check of captured routes.

    findings: faults and notes. rows: the agreement of each site, under the explanation that was found (its shift,
    layers and ids). sequences: of the capture. tokens: how many were compared. as_captured, explained: shares of slots
    that agree as captured, and under the explanation. floor: the share that the model and its copy in other
    arithmetic agree in. chance: the share with routes of other tokens. unseen: the share of slots that may disagree at
    the mean site without being called a fault. shift: of the explanation, in tokens. logprobs: gaps, if the file has
    log-probabilities."""

    findings: tuple[Finding, ...]
    rows: tuple[SiteRow, ...]
    sequences: int
    tokens: int
    as_captured: float
    explained: float
    floor: float
    chance: float
    unseen: float = 0.0
    shift: int = 0
    logprobs: EngineGap | None = None

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.fault)

    @property
    def verdict(self) -> str:
        """The result in one sentence or two."""
        floor = f"a copy in other arithmetic agrees by {_percent(self.floor)}"
        if not self.faults:
            return (
                f"These agree with the model's routes: {_percent(self.as_captured)} of slots over {len(self.rows)} "
                f"sites and {self.tokens} tokens; {floor}. Weights that change less than {_percent(self.unseen)} of "
                "slots (a policy of one update ago, say) would not be told from these."
            )
        if all(fault.name == UNTOLD for fault in self.faults):
            return f"Nothing tells whose routes these are: those of other tokens agree as well ({floor})."
        names = ", ".join(dict.fromkeys(finding.name for finding in self.faults))
        seen = f"{_percent(self.as_captured)} of slots agree as they are"
        if self.explained > self.as_captured + PENALTY:
            seen += f", {_percent(self.explained)} once that is undone"
        return f"These are not the model's routes as they stand: {names}; {seen} ({floor})."


def check_routes(captured: Captured, own: OwnRoutes) -> RouteCheck:
    """Compare captured routes with the model's, search for an explanation of differences, and return the result.

    Raises ValueError: ids of a sequence are no integers `[rows, layers, K]`, or sequences differ in layers or K.
    """
    K = own.ids.shape[3]
    layers, slots = captured.shape()
    if slots != K:
        more = "fused shared experts add columns" if slots > K else "was another num_experts_per_tok configured?"
        return _nothing_compared(
            captured, own, Finding("wrong shape", f"{slots} experts for a token, the model has {K}; {more}")
        )
    expected, said = _expected_layers(captured, own, layers)
    work = _comparable(captured, own, expected)
    work.findings[:0] = said
    if not len(work.ids):
        return _nothing_compared(captured, own, *work.findings)
    simple, best = search(work, own, expected)
    compared, chance = _other_requests(work, own, best)
    rows = _table(work, own, best)
    odd = [row for row in rows if row.layer >= 0 and row.layer not in work.empty_layers and not row.fits]
    if odd:
        worst = min(odd, key=lambda row: row.slots)
        work.found(
            "other choices",
            f"{len(odd)} of {len(rows)} sites agree less than arithmetic explains, {worst.site} least "
            f"({_percent(worst.slots)}, limit {_percent(worst.limit)}): other weights (an older version?), "
            "quantised ones, or another selection rule",
        )
    judged = [row for row in rows if row.layer >= 0]
    explained = float(np.mean([row.slots for row in judged] or [0.0]))
    limit = float(np.mean([row.limit for row in judged] or [1.0]))
    if not odd and chance >= limit and explained <= chance + CLEAR:
        work.found(
            UNTOLD,
            f"the model's routes of other tokens agree by {_percent(chance)}, which is within its arithmetic "
            f"({_percent(limit)}): it chooses nearly the same experts for all of these tokens. Take "
            "other tokens, or more of them",
        )
    return RouteCheck(
        tuple(work.findings), tuple(rows), len(captured.ids), compared, simple.agreement, explained,
        float(np.mean([row.floor_slots for row in rows])), chance, 1 - limit, best.shift,
    )  # fmt: skip


def _expected_layers(captured: Captured, own: OwnRoutes, layers: int) -> tuple[tuple[int, ...], list[Finding]]:
    """Return the captured layer of each site (by name, index or order; -1: none), and findings on missing layers."""
    L = len(own.sites)
    if captured.sites is not None and set(captured.sites) & set(own.sites):
        expected = tuple(captured.sites.index(site) if site in captured.sites else -1 for site in own.sites)
        missing = [site for site in own.sites if site not in captured.sites]
        text = f"{len(missing)} sites are not in the file: {missing[0]}, ..." if missing else ""
        return expected, [Finding("layers left out", text)] if missing else []
    if layers == own.num_layers:
        return own.layers, []
    if layers == L:
        text = f"{L} layers were captured of {own.num_layers}: layer 0 of the capture is {own.sites[0]}"
        return tuple(range(L)), [Finding("dense layers left out", text, fault=False)]
    text = f"{layers} layers were captured; the model has {own.num_layers}, of which {L} route"
    return tuple(layer if layer < layers else -1 for layer in own.layers), [Finding("wrong shape", text)]


def _starts(captured: Captured, own: OwnRoutes, lengths: Sequence[int]) -> tuple[list[int], list[Finding]]:
    """Return the token that each sequence's first row belongs to, and a fault if sequences have too few rows.

    This token is 0 or, if a sequence has fewer rows than its tokens less one, the first token of the place where the
    rows agree best with the model."""
    starts, short = [0] * len(lengths), [b for b, n in enumerate(lengths) if len(captured.ids[b]) < n - 1]
    for b in short:
        rows = captured.ids[b]
        if many := len(rows):
            places = (0, lengths[b] - 1 - many, lengths[b] - many)
            starts[b] = max(places, key=lambda start: _overlap_anywhere(rows, own.ids[b, start : start + many]))
    if not short:
        return starts, []
    b = short[0]
    left_out = f"the first {starts[b]} tokens have none (cache hits, or the prompt was left out)"
    text = f"{len(short)} sequences, first {b}: {len(captured.ids[b])} rows for {lengths[b]} tokens; "
    return starts, [Finding(PREFIXES, text + left_out) if starts[b] else Finding("wrong shape", f"{text}cut off")]


def _overlap_anywhere(rows: np.ndarray, model: np.ndarray) -> float:
    """Return the slot agreement of the best pair of layers, to place rows whose layers are not known yet."""
    return max(
        float(slots_of(rows[:, c], model[:, m]).mean())
        for c in range(min(rows.shape[1], 8))
        for m in range(model.shape[1])
    )


def _comparable(captured: Captured, own: OwnRoutes, expected: tuple[int, ...]) -> TokenRows:
    """Return the rows that have a route at every layer that holds any, with findings on the others.

    expected: the captured layer of each site, -1 for none.
    """
    lengths, K = [len(words) for words in captured.tokens], own.ids.shape[3]
    starts, said = _starts(captured, own, lengths)
    ids, rows, more = padded_rows(captured.ids, starts, lengths)
    site_of = {layer: site for site, layer in enumerate(expected) if layer >= 0}
    layers = range(ids.shape[2])
    holds: Any = (ids > 0).any((0, 1, 3))
    # With one slot, zeros may be expert 0, unless the layer is dense.
    held = [c for c in layers if holds[c] or (K == 1 and c in site_of and (ids[:, :, c] == 0).any())] or list(layers)
    hashed: Any = twice(own.ids).any((0, 1))
    tables = np.array([c in site_of and bool(hashed[site_of[c]]) for c in held])
    names, experts = [f"layer {c}" for c in held], [max(own.experts)] * len(held)  # layers may be in another order
    there, wrong = routed(ids[:, :, held], rows, lengths, tables, names, experts)
    work = TokenRows.of(ids, there, captured.tokens)
    work.findings = said + more + wrong
    empty_layers = [c for c, site in site_of.items() if not holds[c] and (K > 1 or (own.ids[:, :, site] > 0).any())]
    if there.any() and empty_layers and sum(holds[c] for c in layers if c not in site_of) < len(empty_layers):
        work.empty_layers = empty_layers
        work.found(
            "all zeros", f"{len(empty_layers)} routed layers hold nothing, first {own.sites[site_of[empty_layers[0]]]}"
        )
    if not there.any() and not any(finding.fault for finding in work.findings):
        work.found(UNROUTED, "no token has a route at every layer")
    return work


def search(work: TokenRows, own: OwnRoutes, expected: tuple[int, ...]) -> tuple[Explanation, Explanation]:
    """Return the explanation "as captured" and the best one, and add the best one's faults to `work.findings`."""
    simple, *others = explanations(work, own, expected)
    best = _best(work, own, simple, others)
    _explain(work, own, simple, best)
    return simple, best


def _other_requests(work: TokenRows, own: OwnRoutes, best: Explanation) -> tuple[int, float]:
    """Take prefixes with routes of other requests out of `work`, with a fault.

    Returns the number of rows that are left and can be compared, and the share of slots that agree with routes of
    other tokens, measured before."""
    agree = _by_token(work, own, best)
    kept = agree >= 0
    good = float(np.median(agree[kept])) if kept.any() else 0.0
    chance = mean_of(by_chance(work, own, best))
    early = _prefixes(work, agree, (good + chance) / 2)
    if early.any() and good > chance + CLEAR:
        many = len(np.unique(work.sequence[early]))
        work.found(
            PREFIXES,
            f"{early.sum()} tokens at the start of {many} sequences agree by {_percent(agree[early].mean())} only, "
            f"the others by {_percent(agree[kept & ~early].mean())}: routes of other requests, from reused slots?",
        )
        work.drop(early)
        kept &= ~early
    compared = int(kept.sum())
    if compared < 32:
        work.found("few tokens", f"{count(compared, 'token')} can be compared: too few to be sure", fault=False)
    return compared, chance


def clearly(agreement: float, chance: float) -> bool:
    """Return whether an agreement is clearly better than `chance`, that with the routes of other tokens."""
    return agreement > chance + min(CLEAR, (1 - chance) / 2)


def _best(work: TokenRows, own: OwnRoutes, simple: Explanation, others: list[Explanation]) -> Explanation:
    """Return the explanation of the highest score that agrees clearly better with these tokens than with others.

    The second condition is needed because layers in the best of many orders, and ids renamed to the most frequent
    experts, agree somewhat with any model's routes. Without such an explanation, `simple` is returned."""
    for other in sorted(others, key=lambda e: e.score, reverse=True):
        if other.score <= simple.score:
            break
        chance = mean_of(by_chance(work, own, other))
        if clearly(other.agreement, chance):
            return other
    return simple


def _explain(work: TokenRows, own: OwnRoutes, simple: Explanation, best: Explanation) -> None:
    """Add the faults that the best explanation stands for to `work.findings`: shift, layers, renamed ids."""
    if best.shift:
        tokens = "one token" if abs(best.shift) == 1 else f"{abs(best.shift)} tokens"
        work.found(f"shifted by {tokens}", f"row t holds the routes of token t{best.shift:+d}")
    if best.layers != simple.layers:
        pairs = zip(own.sites, simple.layers, best.layers, strict=True)
        moved = [(site, old, new) for site, old, new in pairs if old != new]
        first = "; ".join(f"{site} is captured layer {new}, not {old}" for site, old, new in moved[:3])
        compact = best.layers == tuple(range(len(own.sites))) and len(own.sites) < own.num_layers
        name = "dense layers left out" if compact else "layers permuted"
        work.found(name, f"{first}{', ...' if len(moved) > 3 else ''}")
    if best.maps is not None:
        named = [[f"{p} is expert {e}" for p, e in zip(*each, strict=True) if e != p] for each in best.maps]
        site = next((site for site, some in enumerate(named) if some), 0)
        some = ", ".join(named[site][:3])
        work.found("physical ids", f"ids are renamed one by one, at {own.sites[site]}: {some}, ... (load balancing?)")


def _by_token(work: TokenRows, own: OwnRoutes, best: Explanation) -> Float[np.ndarray, " n"]:
    """Return the mean slot agreement over sites of each row, -1 for a row that cannot be compared."""
    a, b, rows = pairs_of(work, own, best.shift)
    slots = best.slots(a, b)
    found = np.full(len(work.ids), -1.0)
    found[rows] = sum(slots.values(), np.zeros(len(rows))) / max(1, len(slots))
    return found


def by_chance(work: TokenRows, own: OwnRoutes, best: Explanation) -> dict[int, float]:
    """Return the mean slot agreement at each site with the routes of other tokens.

    The tokens are paired in random order, because files hold some sequences twice. A single token is paired with
    itself."""
    a, b, _ = pairs_of(work, own, best.shift, SEARCHED)
    order = np.random.default_rng(0).permutation(len(a))
    slots = best.slots(a[order], b[np.roll(order, 1)])  # one cycle: no token is paired with itself
    return {site: float(each.mean()) for site, each in slots.items()} if len(a) else {}


def mean_of(rates: dict[int, float]) -> float:
    """Return the mean of the rates, 0 if there are none."""
    return float(np.mean(list(rates.values()))) if rates else 0.0


def _prefixes(work: TokenRows, agree: Float[np.ndarray, " n"], middle: float) -> Bool[np.ndarray, " n"]:
    """Return a bool mask of the rows at the start of sequences that agree by chance only, while the rest agrees.

    agree: of each row, as in `_by_token`. middle: the agreement halfway between chance and that of most rows.
    """
    found = np.zeros(len(agree), bool)
    for b in np.unique(work.sequence):
        rows = np.flatnonzero((work.sequence == b) & (agree >= 0))
        if len(rows) < 2 * PREFIX:
            continue
        values = agree[rows]
        before = np.cumsum(values) / np.arange(1, len(values) + 1)
        low = np.flatnonzero((before < middle) & (values < middle))
        length = int(low[-1]) + 1 if len(low) else 0
        if PREFIX <= length <= len(rows) - PREFIX and values[length:].mean() > middle:
            found[rows[:length]] = True
    return found


def _table(work: TokenRows, own: OwnRoutes, best: Explanation) -> list[SiteRow]:
    """Return the agreement of each site under an explanation.

    The limit allows three times the floor's disagreement, 1 % of slots, and three standard errors of the sample."""
    a, b, _ = pairs_of(work, own, best.shift)
    agree, floors = best.slots(a, b), _floors(own)
    usual = float(np.mean(floors))
    rows = []
    for site, c in enumerate(best.layers):
        lost = 1 - min(floors[site], usual)
        limit = 1 - (3 * lost + 0.01 + 3 * float(np.sqrt(max(lost, 0.01) / max(1, len(a)))))
        slots = agree.get(site, np.zeros(0))
        rate, whole = (float(slots.mean()), float((slots == 1).mean())) if len(slots) else (0.0, 0.0)
        rows.append(SiteRow(own.sites[site], c, len(slots), rate, whole, floors[site], max(0.0, limit)))
    return rows


def _nothing_compared(captured: Captured, own: OwnRoutes, *findings: Finding) -> RouteCheck:
    """Return the result for a capture of which nothing can be compared."""
    return RouteCheck(findings, (), len(captured.ids), 0, 0.0, 0.0, float(np.mean(_floors(own))), 0.0)


def _floors(own: OwnRoutes) -> list[float]:
    """Return the share of slots that the model and its copy in other arithmetic agree in, by site."""
    tokens = (own.ids >= 0).all((2, 3))
    ours, copy = own.ids[tokens], own.floor[tokens]
    return [float(slots_of(ours[:, site], copy[:, site]).mean()) for site in range(len(own.sites))]


def _percent(share: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{100 * share:.1f} %"
