"""Captured routes as they are, nothing trusted: rows that fit their tokens, and ids that no capture can have."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from moe_rl.routing.arrays import FEW_SITES

PREFIXES, UNROUTED = "prefix-cache hits without routes", "tokens without routes"
LAYERS = "layers without routes"
"""Faults of tokens, or of layers of one file, that have none: those of the others may be right."""


@dataclass(frozen=True)
class Captured:
    """Sequences as another program captured them, nothing checked: token ids `[n]`, expert ids `[rows, layers, K]`.
    `sites`, `experts`: names of the layers and their numbers of experts, where the file has them. `logps`: what the
    engine gave each token, nats `[n]`, NaN for nothing. `prompts`: alike in responses to one prompt, where the
    file says which that is. `notes`: how it was read."""

    tokens: Sequence[np.ndarray]
    ids: Sequence[np.ndarray]
    sites: tuple[str, ...] | None = None
    logps: Sequence[np.ndarray] | None = None
    experts: tuple[int, ...] | None = None
    prompts: Sequence[str] | None = None
    notes: tuple[str, ...] = ()

    def shape(self) -> tuple[int, int]:
        """Layers and experts per token. Raises ValueError: ids of a sequence are no integers `[rows, layers, K]`, or
        sequences differ in layers or K."""
        shapes = {ids.shape[1:] for ids in self.ids}
        if any(ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) for ids in self.ids) or len(shapes) > 1:
            kinds = sorted({f"{ids.dtype} {list(ids.shape)}" for ids in self.ids})[:4]
            raise ValueError(
                f"expected integer ids [rows, layers, K], layers and K alike in all sequences; got {kinds}"
            )
        layers, slots = next(iter(shapes))
        if not layers or not slots:
            raise ValueError(f"routes of {layers} layers and {slots} experts for a token: there are none")
        return layers, slots


@dataclass(frozen=True)
class OwnRoutes:
    """What the model chooses for the same tokens: ids `[n, L, K]` of each sequence, and in other arithmetic (`floor`).

    experts: of each site. layers: number of each site among `num_layers` hidden layers.
    """

    ids: Sequence[np.ndarray]
    floor: Sequence[np.ndarray]
    sites: tuple[str, ...]
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    num_layers: int


@dataclass(frozen=True)
class Finding:
    """`name` of a fault, or of something to know (`fault` False), and what was seen."""

    name: str
    text: str
    fault: bool = True


@dataclass
class Work:
    """Rows of all sequences, one below the other; where each is from and of which token, whether it can be compared;
    `dark`: layers that hold nothing."""

    ids: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    usable: np.ndarray
    findings: list[Finding] = field(default_factory=list)
    dark: list[int] = field(default_factory=list)

    def found(self, name: str, text: str, fault: bool = True) -> None:
        self.findings.append(Finding(name, text, fault))


def rows_of(captured: Captured, own: OwnRoutes) -> Work:
    """All rows; of a sequence with fewer rows than tokens, where they fit best."""
    ids, sequence, position, tokens, short, long = [], [], [], [], [], []
    for b, (rows, model, words) in enumerate(zip(captured.ids, own.ids, captured.tokens, strict=True)):
        n, start = len(model), 0
        if len(rows) > n:
            long.append(b)
            rows = rows[:n]
        elif len(rows) < n - 1:
            short.append(b)
            starts = [0, n - 1 - len(rows), n - len(rows)]
            if len(rows):
                start = max(starts, key=lambda s: _overlap_anywhere(rows, model[s : s + len(rows)]))
        ids.append(rows)
        sequence.append(np.full(len(rows), b))
        position.append(start + np.arange(len(rows)))
        tokens.append(words[position[-1]])
    every, b_of, t_of, word = (np.concatenate(part) for part in (ids, sequence, position, tokens))
    work = Work(every, b_of, t_of, word, np.ones(len(every), bool))
    if long:
        b = long[0]
        work.found("wrong shape", f"sequence {b} has {len(captured.ids[b])} rows for {len(own.ids[b])} tokens")
    if short:
        b = short[0]
        first = int(position[b][0]) if len(position[b]) else 0
        name = PREFIXES if first else "wrong shape"
        why = f"the first {first} tokens have none (cache hits, or the prompt was left out)" if first else "cut off"
        work.found(
            name, f"{len(short)} sequences, first {b}: {len(captured.ids[b])} rows for {len(own.ids[b])} tokens; {why}"
        )
    return work


def _overlap_anywhere(rows: np.ndarray, model: np.ndarray) -> float:
    """Slots that agree at the best pair of layers: enough to place rows whose layers are not known yet."""
    return max(
        float((rows[:, c, :, None] == model[:, m, None, :]).any(-1).mean())
        for c in range(min(rows.shape[1], 8))
        for m in range(model.shape[1])
    )


def expected_layers(captured: Captured, own: OwnRoutes, layers: int, work: Work) -> tuple[int, ...]:
    """The captured layer of each site, by names, by order, or by number; -1 where none is."""
    L = len(own.sites)
    if captured.sites is not None and set(captured.sites) & set(own.sites):
        missing = [site for site in own.sites if site not in captured.sites]
        if missing:
            work.found("layers left out", f"{len(missing)} sites are not in the file: {missing[0]}, ...")
        return tuple(captured.sites.index(site) if site in captured.sites else -1 for site in own.sites)
    if layers == own.num_layers:
        return own.layers
    if layers == L:
        text = f"{L} layers were captured of {own.num_layers}: layer 0 of the capture is {own.sites[0]}"
        work.found("dense layers left out", text, fault=False)
        return tuple(range(L))
    work.found("wrong shape", f"{layers} layers were captured; the model has {own.num_layers}, of which {L} route")
    return tuple(layer if layer < layers else -1 for layer in own.layers)


def find_invalid(work: Work, own: OwnRoutes, expected: tuple[int, ...]) -> None:
    """Zeros, duplicates and ids that no expert has; tokens that lack a route at a layer which holds any are taken
    out."""
    ids, K = work.ids, work.ids.shape[2]
    zero, live = (ids == 0).all(-1), (ids == -1).any(-1)
    used = [layer for layer in expected if layer >= 0]
    lost = zero.all(1) if K > 1 or len(used) >= FEW_SITES else np.zeros(len(ids), bool)
    nowhere = live.all(1)
    work.usable = ~lost & ~nowhere
    if not len(ids):
        work.found(UNROUTED, "no token has a row")
        return
    if lost.all():
        work.found("all zeros", "no layer of any token was captured (a kernel that bypasses the router?)")
        return
    last = np.array([len(own.ids[b]) - 1 for b in work.sequence]) == work.position
    inside = lost & ~last
    leading = pd.Series(inside.astype(int)).groupby(work.sequence).cummin()  # until the first row that has routes
    start = leading.to_numpy(bool)
    if start.any():
        many = len(np.unique(work.sequence[start]))
        text = f"{start.sum()} tokens at the start of {many} sequences are zeros at every layer"
        work.found(PREFIXES, text)
    _tell(work, UNROUTED, inside & ~start, "tokens are zeros at every layer")
    if nowhere.any():
        work.found("live rows", f"{nowhere.sum()} tokens are -1: their routers decide for themselves", fault=False)
    empty = (zero | live)[work.usable].all(0)
    dark = [
        layer
        for site, layer in enumerate(expected)
        if layer >= 0 and empty[layer] and (K > 1 or any(own_ids[:, site].any() for own_ids in own.ids))
    ]
    elsewhere = [c for c in range(ids.shape[1]) if c not in used and not empty[c]]
    if dark and len(elsewhere) < len(dark):
        work.dark = dark
        first = own.sites[expected.index(dark[0])]
        work.found("all zeros", f"{len(dark)} routed layers hold nothing, first {first}")
    tables = _tables(own, expected)
    if K > 1:  # of one expert a zero may be expert 0
        hollow = zero & ~empty
        hollow[:, tables] = False
        _tell(work, UNROUTED, hollow.any(1) & work.usable & ~last, "tokens are zeros at some layers only")
        work.usable &= ~hollow.any(1)
    some = (live & ~empty).any(1) & work.usable
    _tell(work, "live rows", some, "tokens are -1 at some layers only, and left out", fault=False)
    work.usable &= ~some
    if not work.usable.any() and not any(finding.fault for finding in work.findings):
        work.found(UNROUTED, "no token has a route at every layer")
    ordered = np.sort(ids, -1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1) & ~zero & work.usable[:, None]
    twice[:, tables] = False
    if twice.any():
        at, layer = (int(i) for i in np.argwhere(twice)[0])
        text = (
            f"{twice.sum()} rows name an expert twice, first {_at(work, at)}, layer {layer}: {ids[at, layer].tolist()}"
        )
        work.found("duplicates", text)
    outside = ((ids < -1) | (ids >= max(own.experts))) & work.usable[:, None, None]
    if outside.any():
        at, layer, slot = (int(i) for i in np.argwhere(outside)[0])
        text = (
            f"{outside.sum()} ids are not 0..{max(own.experts) - 1}, first {_at(work, at)}, layer {layer}: "
            f"{ids[at, layer, slot]}"
        )
        work.found("ids out of range", text)


def _tell(work: Work, name: str, which: np.ndarray, text: str, fault: bool = True) -> None:
    if which.any():
        work.found(name, f"{which.sum()} {text}, first {_at(work, int(np.flatnonzero(which)[0]))}", fault)


def _tables(own: OwnRoutes, expected: tuple[int, ...]) -> list[int]:
    """Captured layers of hash-routed sites, whose table may name an expert twice."""
    ids = np.sort(np.concatenate(own.ids), -1)
    twice = ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any(-1)  # no route is -1, or zeros
    repeats = (twice & ids.any(-1)).any(0)
    return [layer for layer, twice in zip(expected, repeats, strict=True) if twice and layer >= 0]


def _at(work: Work, row: int) -> str:
    return f"sequence {work.sequence[row]}, token {work.position[row]}"
