"""Rows of two captures of the same tokens: placing them at tokens, and finding rows that belong to other tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_rl.drift.captured import PREFIXES, UNROUTED, Finding, padded_rows, twice
from moe_rl.drift.errors import DriftError
from moe_rl.drift.route_check import clearly
from moe_rl.drift.route_search import SEARCHED, slots_of
from moe_rl.drift.words import percent
from moe_rl.study.words import count

RUN = 8
"""Fewest tokens of a site or of a part of a sequence that are judged by themselves."""
PARTS = "parts not told apart"
"""Name of the fault of a site or a run of tokens that agrees no better than routes of other tokens do."""


def placed(
    ids: Sequence[np.ndarray], other: Sequence[np.ndarray], lengths: Sequence[int], name: str
) -> tuple[Int[np.ndarray, "B T L K"], Bool[np.ndarray, "B T"], list[Finding]]:
    """Place the rows of a file at their tokens; returns ids, a mask of the tokens with a row, and findings.

    If sequences have fewer rows than their tokens less one, the rows are taken for those of the first tokens, of the
    last ones, or of the last ones but one, alike in all these sequences: the place that agrees best with `other`, the
    rows of the other file. lengths: tokens of each sequence. name: of the file, in messages.

    Raises DriftError: no place is clearly best."""
    start, said = np.zeros(len(ids), int), []
    if short := [b for b, n in enumerate(lengths) if len(ids[b]) < n - 1]:
        first = f"first sequence {short[0]} ({len(ids[short[0]])} rows for {count(lengths[short[0]], 'token')})"
        many = f"{count(len(short), 'sequence')} with fewer rows than tokens, {first}"
        start[short], where = _best_place(
            [ids[b] for b in short], [other[b] for b in short], lengths, short, many, name
        )
        said.append(Finding(PREFIXES if start[short].any() else UNROUTED, f"{many}{where}"))
    found, rows, more = padded_rows(ids, start, lengths)
    return found, rows, said + more


def _best_place(
    ids: list[np.ndarray], other: list[np.ndarray], lengths: Sequence[int], short: list[int], many: str, name: str
) -> tuple[np.ndarray, str]:
    """Return the first token that each short sequence's rows belong to, and in words why. Raises DriftError."""
    mine = np.concatenate(ids)
    if not len(mine):
        return np.zeros(len(short), int), ": no row at all"
    free = np.array([lengths[b] - len(rows) for b, rows in zip(short, ids, strict=True)])
    found = []
    for start, tokens in ((0 * free, "first"), (free - 1, "last but one"), (free, "last")):
        theirs = np.full(mine.shape, -1, np.int64)
        at = 0
        for s, rows, whole in zip(start, ids, other, strict=True):
            there = whole[s : s + len(rows)]
            theirs[at : at + len(there)] = there
            at += len(rows)
        held = np.all([(x >= 0).all((1, 2)) & x.any((1, 2)) for x in (mine, theirs)], axis=0)
        K = mine.shape[2]
        agree = slots_of(mine[held].reshape(-1, K), theirs[held].reshape(-1, K))
        rate = float(agree.mean()) if held.any() else 0.0
        found.append((rate, tokens, start))
    (best, tokens, start), (second, *_), _ = sorted(found, key=lambda each: -each[0])
    if best - second <= 3 * (0.5 / mine.size) ** 0.5:  # the most by which two rates of so many slots differ by chance
        raise DriftError(
            f"{name}: {many}, which fit no tokens clearly (the best place agrees in {percent(best)} of slots, the next "
            f"in {percent(second)}). Give every token a row, of -1 where it has no route"
        )
    return start, f": taken for the {tokens} tokens ({percent(best)} of slots agree; {percent(second)} elsewhere)"


def hash_routed(both: Sequence[Int[np.ndarray, "B T L K"]], tokens: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, " L"]:
    """Return a bool mask of the sites whose experts are a table over token ids (hash routing).

    Such a site names an expert twice in some row, and has the same row for a token id everywhere in both files."""
    words = np.concatenate([tokens, tokens])
    captured: Any = np.concatenate([ids.any((2, 3)) for ids in both])
    repeats: Any = np.any([twice(ids).any((0, 1)) for ids in both], axis=0)
    found = np.zeros(len(repeats), bool)
    for site in np.flatnonzero(repeats):
        rows = np.sort(np.concatenate([ids[:, :, site] for ids in both]), -1)
        there = (rows >= 0).all(-1) & captured
        pairs = np.unique(np.column_stack([words[there], rows[there]]), axis=0)
        found[site] = len(pairs) == len(np.unique(words[there]))
    return found


def cut_sets(ids: Int[np.ndarray, "B T L K"], held: Bool[np.ndarray, "B T"]) -> list[Finding]:
    """Return a fault if the captured layers seem to be parts of one layer with more than K experts per token.

    The sign: m layers in a row never name an expert twice between them, while rows of different tokens, put together in
    the same way, do so at least 20 times."""
    found = ids[held][:SEARCHED]
    n, L, K = found.shape
    generator = np.random.default_rng(0)
    mixed = np.stack([generator.permutation(found[:, site]) for site in range(L)], axis=1)
    for m in (m for m in range(L, 1, -1) if L % m == 0):
        repeats = [int(twice(rows.reshape(n, 1, L // m, m * K)).sum()) for rows in (found, mixed)]
        if repeats[0] == 0 and repeats[1] >= 20:
            text = f"{m} layers in a row never name an expert twice, rows of different tokens do {repeats[1]} times"
            return [Finding("sets cut in parts", f"{text}: are they one layer of {m * K} experts (--top-k {m * K})?")]
    return []


def parts_apart(
    agree: Mapping[int, Float[np.ndarray, " n"]],
    chance: Mapping[int, float],
    sequence: Int[np.ndarray, " n"],
    position: Int[np.ndarray, " n"],
    sites: Sequence[str],
    K: int,
) -> list[Finding]:
    """Return a fault if some sites or runs of tokens agree no better than routes of other tokens do.

    Each site and each run of RUN or more tokens of a sequence is judged: it must agree less than the mean of all by
    more than chance, and not clearly better than by chance. agree: the share of slots that agree, of each token at each
    site. chance: the mean at each site with the routes of other tokens. K: experts per token."""
    tokens = np.mean(list(agree.values()), axis=0)
    mean, usual = float(tokens.mean()), float(np.mean(list(chance.values())))
    said = []

    def odd(values: np.ndarray, by_chance: float, slots: int) -> bool:
        """Return whether these tokens, of so many slots each, agree too little."""
        rate, spread = float(values.mean()), 4 * (mean * (1 - mean) / (len(values) * slots)) ** 0.5
        return rate < mean - spread and not clearly(rate, by_chance)

    if len(tokens) >= RUN:
        for site, values in agree.items():
            if odd(values, chance[site], K):
                said.append((sites[site], values))
    for b in np.unique(sequence):
        rows = np.flatnonzero(sequence == b)
        for run in np.array_split(rows, len(rows) // RUN) if len(rows) >= RUN else ():
            if odd(tokens[run], usual, K * len(agree)):
                said.append((f"sequence {b}, tokens {position[run[0]]} to {position[run[-1]]}", tokens[run]))
    if not said:
        return []
    first = "; ".join(f"{where}: {percent(float(values.mean()))}" for where, values in said[:3])
    text = f"agree no better than routes of other tokens ({percent(usual)}; all together: {percent(mean)})"
    text = f"{count(len(said), 'part')} {text}: {first}{', ...' if len(said) > 3 else ''}"
    return [Finding(PARTS, text)]
