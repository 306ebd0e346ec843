"""Captured routes against those of the model, as numbers: what fits, and which known fault explains what does not.

Everything is counted as overlap of sets: slot agreement is abs(captured ∩ model) / K of a token at a site.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from moe_rl.drift.captured import PREFIXES, UNROUTED, Captured, Finding, OwnRoutes, Work, laid, routed, twice
from moe_rl.drift.route_search import PENALTY, SEARCHED, Explanation, explanations, pairs_of, slots_of

PREFIX = 4
"""Fewest tokens at the start of a sequence that are called a prefix without routes."""


@dataclass(frozen=True)
class SiteRow:
    """One site: the captured layer that is compared with it (-1: none), shares of slots and of whole sets that agree,
    and the same of the model's own floor."""

    site: str
    layer: int
    tokens: int
    slots: float
    sets: float
    floor_slots: float
    limit: float

    @property
    def fits(self) -> bool:
        return self.slots >= self.limit


CLEAR = 0.2
"""By how much more than by chance slots agree that clearly do not agree by chance."""
UNTOLD = "not told apart"
"""The fault of tokens for which a model chooses alike."""


Gaps = dict[str, float | int | None]
"""As `moe_rl.measure.arithmetic.gap_split` names them; None for what is not finite."""


@dataclass(frozen=True)
class EngineGap:
    """How far the model is from the engine's log-probabilities, over `tokens` of `sequences` at this temperature, and
    from its own copy in `copy_dtype`; d = log p(model) - log p(other), nats. `impossible`: tokens to which the engine
    gave -inf, left out. `not_replayed`: why `engine` has nothing of a replay; empty where it has."""

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
    """The result. `rows` are under the explanation that was found: its shift, layers and ids. `unseen`: the share of
    slots that may disagree at the mean site without being called a fault. `logprobs`: where the file has any."""

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
        return tuple(finding for finding in self.findings if finding.fault)

    @property
    def verdict(self) -> str:
        """One sentence."""
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
    """Compare, search for the explanation, and say what was found.

    Raises ValueError: ids of a sequence are no integers `[rows, layers, K]`, or sequences differ in layers or K.
    """
    K = own.ids.shape[3]
    layers, slots = captured.shape()
    if slots != K:
        more = "fused shared experts add columns" if slots > K else "was another num_experts_per_tok configured?"
        return _nothing(
            captured, own, Finding("wrong shape", f"{slots} experts for a token, the model has {K}; {more}")
        )
    expected, said = _expected_layers(captured, own, layers)
    work = _comparable(captured, own, expected)
    work.findings[:0] = said
    if not len(work.ids):
        return _nothing(captured, own, *work.findings)
    simple, best = search(work, own, expected)
    compared, chance = _other_requests(work, own, best)
    rows = _table(work, own, best)
    odd = [row for row in rows if row.layer >= 0 and row.layer not in work.dark and not row.fits]
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
    """The captured layer of each site, by names, by order, or by number; -1 where none is."""
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
    """The first token of each sequence that has a row: 0 or, where there are fewer rows than tokens, where they fit
    best."""
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
    """Slots that agree at the best pair of layers: enough to place rows whose layers are not known yet."""
    return max(
        float(slots_of(rows[:, c], model[:, m]).mean())
        for c in range(min(rows.shape[1], 8))
        for m in range(model.shape[1])
    )


def _comparable(captured: Captured, own: OwnRoutes, expected: tuple[int, ...]) -> Work:
    """Rows with a route at every layer that holds any; notes what is wrong with the others."""
    lengths, K = [len(words) for words in captured.tokens], own.ids.shape[3]
    starts, said = _starts(captured, own, lengths)
    ids, rows, more = laid(captured.ids, starts, lengths)
    site_of = {layer: site for site, layer in enumerate(expected) if layer >= 0}
    layers = range(ids.shape[2])
    holds: Any = (ids > 0).any((0, 1, 3))
    # Zeros of one slot may be expert 0, but of a dense layer.
    held = [c for c in layers if holds[c] or (K == 1 and c in site_of and (ids[:, :, c] == 0).any())] or list(layers)
    hashed: Any = twice(own.ids).any((0, 1))
    tables = np.array([c in site_of and bool(hashed[site_of[c]]) for c in held])
    names, experts = [f"layer {c}" for c in held], [max(own.experts)] * len(held)  # layers may be in another order
    there, wrong = routed(ids[:, :, held], rows, lengths, tables, names, experts)
    work = Work.of(ids, there, captured.tokens)
    work.findings = said + more + wrong
    dark = [c for c, site in site_of.items() if not holds[c] and (K > 1 or (own.ids[:, :, site] > 0).any())]
    if there.any() and dark and sum(holds[c] for c in layers if c not in site_of) < len(dark):
        work.dark = dark
        work.found("all zeros", f"{len(dark)} routed layers hold nothing, first {own.sites[site_of[dark[0]]]}")
    if not there.any() and not any(finding.fault for finding in work.findings):
        work.found(UNROUTED, "no token has a route at every layer")
    return work


def search(work: Work, own: OwnRoutes, expected: tuple[int, ...]) -> tuple[Explanation, Explanation]:
    """The capture as it stands, and its best explanation, whose faults are noted."""
    simple, *others = explanations(work, own, expected)
    best = _best(work, own, simple, others)
    _explain(work, own, simple, best)
    return simple, best


def _other_requests(work: Work, own: OwnRoutes, best: Explanation) -> tuple[int, float]:
    """How many rows can be compared, and how much agrees with the routes of other tokens. Takes out prefixes of other
    requests, and notes them."""
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
    compared = int(kept.sum())
    if compared < 32:
        work.found("few tokens", f"{compared} tokens can be compared: too few to be sure", fault=False)
    return compared, chance


def clearly(agreement: float, chance: float) -> bool:
    """Whether so much agrees clearly better than with the routes of other tokens."""
    return agreement > chance + min(CLEAR, (1 - chance) / 2)


def _best(work: Work, own: OwnRoutes, simple: Explanation, others: list[Explanation]) -> Explanation:
    """The one of the highest score that agrees clearly better with these tokens than with others: layers in the best
    of many orders, and ids renamed to what is most frequent, agree somewhat with any model's routes."""
    for other in sorted(others, key=lambda e: e.score, reverse=True):
        if other.score <= simple.score:
            break
        chance = mean_of(by_chance(work, own, other))
        if clearly(other.agreement, chance):
            return other
    return simple


def _explain(work: Work, own: OwnRoutes, simple: Explanation, best: Explanation) -> None:
    """The findings that an explanation stands for."""
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


def _by_token(work: Work, own: OwnRoutes, best: Explanation) -> Float[np.ndarray, " n"]:
    """Mean slot agreement of each row over sites; -1 where it cannot be compared."""
    a, b, rows = pairs_of(work, own, best.shift)
    slots = best.slots(a, b)
    found = np.full(len(work.ids), -1.0)
    found[rows] = sum(slots.values(), np.zeros(len(rows))) / max(1, len(slots))
    return found


def by_chance(work: Work, own: OwnRoutes, best: Explanation) -> dict[int, float]:
    """Mean agreement at each site with the routes of another token, in random order: files hold some sequences twice.
    Of a single token, which has no other, with its own."""
    a, b, _ = pairs_of(work, own, best.shift, SEARCHED)
    order = np.random.default_rng(0).permutation(len(a))
    slots = best.slots(a[order], b[np.roll(order, 1)])  # one cycle: a mere permutation leaves some where they are
    return {site: float(each.mean()) for site, each in slots.items()} if len(a) else {}


def mean_of(rates: dict[int, float]) -> float:
    """0 of none."""
    return float(np.mean(list(rates.values()))) if rates else 0.0


def _prefixes(work: Work, agree: Float[np.ndarray, " n"], middle: float) -> Bool[np.ndarray, " n"]:
    """Rows at the start of sequences that agree by chance while the rest agrees."""
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


def _table(work: Work, own: OwnRoutes, best: Explanation) -> list[SiteRow]:
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


def _nothing(captured: Captured, own: OwnRoutes, *findings: Finding) -> RouteCheck:
    return RouteCheck(findings, (), len(captured.ids), 0, 0.0, 0.0, float(np.mean(_floors(own))), 0.0)


def _floors(own: OwnRoutes) -> list[float]:
    """Slots that the model and its copy in other arithmetic share, by site."""
    tokens = (own.ids >= 0).all((2, 3))
    ours, copy = own.ids[tokens], own.floor[tokens]
    return [float(slots_of(ours[:, site], copy[:, site]).mean()) for site in range(len(own.sites))]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
