"""Data classes of captured routes, placement of their rows at tokens, and faults that the ids alone show.

Everywhere: ids `[B,T,L,K]` of the compared layers, -1 where a token has no row; `rows` `[B,T]`: True where it has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from moe_rl.routing.arrays import FEW_SITES
from moe_rl.study.words import count

PREFIXES, UNROUTED = "prefix-cache hits without routes", "tokens without routes"
LAYERS = "layers without routes"
"""Names of faults of tokens, or of layers of one file, without routes: the routes of all others may be right."""


@dataclass(frozen=True)
class Captured:
    """Sequences with routes as another program captured them; the expert ids are not checked.

    tokens, ids: of each sequence the token ids `[n]` and the expert ids `[rows, layers, K]`. sites, experts: names of
    the layers and their numbers of experts, if the file has them. logps: the engine's log-probability of each token,
    nats `[n]`, NaN where it gave none. prompts: a key of each sequence's prompt, equal for responses to one prompt, if
    the file has prompts. notes: how the file was read. path: of the file."""

    tokens: Sequence[np.ndarray]
    ids: Sequence[np.ndarray]
    sites: tuple[str, ...] | None = None
    logps: Sequence[np.ndarray] | None = None
    experts: tuple[int, ...] | None = None
    prompts: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    path: Path = Path()

    def shape(self) -> tuple[int, int]:
        """Return the numbers of layers and of experts per token.

        Raises ValueError: ids of a sequence are no integers `[rows, layers, K]`, or sequences differ in layers or K."""
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
    """The routes that a model chooses itself for the captured tokens.

    ids: expert ids `[B,T,L,K]`, -1 behind a sequence's end. floor: the same of a copy in other arithmetic. experts:
    the number of experts of each site. layers: the index of each site's layer among `num_layers` hidden layers.
    """

    ids: Int[np.ndarray, "B T L K"]
    floor: Int[np.ndarray, "B T L K"]
    sites: tuple[str, ...]
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    num_layers: int


@dataclass(frozen=True)
class Finding:
    """What a comparison found: a fault or, with `fault` False, a note; its `name`, and `text` on what was seen."""

    name: str
    text: str
    fault: bool = True


@dataclass
class TokenRows:
    """The captured rows that can be compared, and what was found about them so far.

    ids: the rows, one below the other. sequence, position: the sequence and the token that each row belongs to. tokens:
    the token id of each. findings: faults and notes. empty_layers: captured layers that hold no routes."""

    ids: Int[np.ndarray, "n layers K"]
    sequence: Int[np.ndarray, " n"]
    position: Int[np.ndarray, " n"]
    tokens: Int[np.ndarray, " n"]
    findings: list[Finding] = field(default_factory=list)
    empty_layers: Sequence[int] = ()

    @staticmethod
    def of(
        ids: Int[np.ndarray, "B T layers K"], there: Bool[np.ndarray, "B T"], words: Sequence[np.ndarray]
    ) -> "TokenRows":
        """Return the rows where `there` is True. words: the token ids of each sequence."""
        tokens = np.concatenate([some[held[: len(some)]] for some, held in zip(words, there, strict=True)])
        sequence, position = np.nonzero(there)
        return TokenRows(ids[there], sequence, position, tokens)

    def drop(self, which: Bool[np.ndarray, " n"]) -> None:
        """Remove the rows where `which` is True."""
        parts = (self.ids, self.sequence, self.position, self.tokens)
        self.ids, self.sequence, self.position, self.tokens = (part[~which] for part in parts)

    def found(self, name: str, text: str, fault: bool = True) -> None:
        """Add a finding."""
        self.findings.append(Finding(name, text, fault))


def padded_rows(
    ids: Sequence[np.ndarray], starts: Sequence[int] | np.ndarray, lengths: Sequence[int]
) -> tuple[Int[np.ndarray, "B T L K"], Bool[np.ndarray, "B T"], list[Finding]]:
    """Place the rows of each sequence at its tokens.

    ids: the rows `[rows, L, K]` of each sequence. starts: the token that each sequence's first row belongs to. lengths:
    the numbers of tokens. Returns the ids, -1 where there is no row; True where there is a row; and a fault if a
    sequence has more rows than tokens.
    """
    reach = max(max(-int(part.min(initial=0)), int(part.max(initial=0))) for part in ids)
    kind = np.int32 if reach < 2**31 else np.int64
    found = np.full((len(ids), max(lengths), *ids[0].shape[1:]), -1, kind)
    rows = np.zeros(found.shape[:2], bool)
    for b, n in enumerate(lengths):
        part = slice(starts[b], starts[b] + min(len(ids[b]), n))
        found[b, part], rows[b, part] = ids[b][:n], True
    long = [b for b, n in enumerate(lengths) if len(ids[b]) > n][:1]
    said = [f"sequence {b} has {len(ids[b])} rows for {count(lengths[b], 'token')}" for b in long]
    return found, rows, [Finding("wrong shape", text) for text in said]


def twice(ids: Int[np.ndarray, "B T L K"]) -> Bool[np.ndarray, "B T L"]:
    """Return a bool mask of the rows that name an expert twice; rows of zeros do not count."""
    ordered = np.sort(ids, -1)
    found: np.ndarray = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1) & ids.any(-1)
    return found


def routed(
    ids: Int[np.ndarray, "B T L K"],
    rows: Bool[np.ndarray, "B T"],
    lengths: Sequence[int],
    tables: Bool[np.ndarray, " L"],
    sites: Sequence[str],
    experts: Sequence[int],
) -> tuple[Bool[np.ndarray, "B T"], list[Finding]]:
    """Return a bool mask of the tokens that have a route at every site, and findings on the others and on odd ids.

    The findings say which tokens have no route and why, but for the last token of a sequence, and which ids no router
    gives. A row of several zeros is no route, because a router chooses K different experts. A single zero (K = 1) may
    be expert 0: it counts as no route only if a token has 0 at all of at least FEW_SITES sites. lengths: tokens of each
    sequence. tables: True for hash-routed sites, whose rows may be zeros and may repeat an expert. sites, experts: name
    and number of experts of each site."""
    L, K = ids.shape[2:]
    zero: Any = (ids == 0).all(-1)
    live: Any = (ids == -1).any(-1) & rows[..., None]
    lost: Any = (zero | tables).all(-1) & ~tables.all()
    zero &= ~tables
    said: list[Finding] = []

    def tell(name: str, which: np.ndarray, what: str, text: str, fault: bool = True) -> None:
        """Add a finding on the entries of `which`, `[B,T]` or `[B,T,L]`, with their number and the first of them."""
        if which.any():
            b, t, *site = (int(i) for i in np.argwhere(which)[0])
            where = f"first sequence {b}, token {t}{''.join(f', {sites[i]}: {ids[b, t, i].tolist()}' for i in site)}"
            many = which.any(-1).sum() if what == "token" and site else which.sum()
            said.append(Finding(name, f"{count(int(many), what)} {text}, {where}", fault))

    if K == 1:
        if L < FEW_SITES:
            text = f"of expert 0 at all of {count(L, 'site')}, or without a route: it counts as routes"
            tell("zeros of one slot", lost, "token", text, fault=False)
            lost &= False
        zero &= lost[..., None]
    if not rows.any():
        said.append(Finding(UNROUTED, "no token has a row"))
    elif lost[rows].all():
        said.append(Finding("all zeros", "no layer of any token was captured (a kernel that bypasses the router?)"))
    else:
        inside: Any = lost & (np.arange(ids.shape[1]) != np.array(lengths)[:, None] - 1)
        start = np.logical_and.accumulate(inside | ~rows, axis=1) & inside  # until the first row that has routes
        many = count(int(start.any(1).sum()), "sequence")
        tell(PREFIXES, start, "token", f"of zeros at every layer at the start of {many}")
        tell(UNROUTED, inside & ~start, "token", "of zeros at every layer")
        tell(UNROUTED, zero & ~lost[..., None], "token", "of zeros at some layers only")
    whole: Any = live.all(-1)
    tell("live rows", whole, "token", "of -1: the routers decide for themselves", fault=False)
    tell("live rows", live & ~whole[..., None], "token", "of -1 at some layers only, in no rate", fault=False)
    tell("duplicates", twice(ids) & ~tables, "row", "with an expert twice")
    outside: Any = ((ids < -1) | (ids >= np.array(experts)[:, None])).any(-1)
    if outside.any():
        site = int(np.argwhere(outside)[0][2])
        tell("ids out of range", outside, "row", f"with ids that are not 0..{experts[site] - 1}")
    return rows & ~live.any(-1) & ~zero.any(-1), said
