"""Rows of two captures of the same tokens: where they belong, and which of them are no routes of these tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from moe_rl.drift.captured import PREFIXES, UNROUTED, Finding, laid, twice
from moe_rl.drift.errors import DriftError
from moe_rl.drift.route_check import clearly
from moe_rl.drift.route_search import SEARCHED, slots_of
from moe_rl.drift.words import percent
from moe_rl.study.words import count

RUN = 8
"""Fewest tokens of a site or a sequence that are looked at by themselves."""
PARTS = "parts not told apart"
"""The fault of a site or a run of tokens that agrees as routes of other tokens do, while the rest does not."""


def placed(
    ids: Sequence[np.ndarray], other: Sequence[np.ndarray], lengths: Sequence[int], name: str
) -> tuple[Int[np.ndarray, "B T L K"], Bool[np.ndarray, "B T"], list[Finding]]:
    """The rows of a file at their tokens. Where sequences have fewer than tokens less one, these are of the first
    tokens, the last or the last but one, in all of them alike: where they agree best with `other`.

    Raises DriftError where no place is clearly best."""
    start, said = np.zeros(len(ids), int), []
    if short := [b for b, n in enumerate(lengths) if len(ids[b]) < n - 1]:
        first = f"first sequence {short[0]} ({len(ids[short[0]])} rows for {count(lengths[short[0]], 'token')})"
        many = f"{count(len(short), 'sequence')} with fewer rows than tokens, {first}"
        start[short], where = _best_place(
            [ids[b] for b in short], [other[b] for b in short], lengths, short, many, name
        )
        said.append(Finding(PREFIXES if start[short].any() else UNROUTED, f"{many}{where}"))
    found, rows, more = laid(ids, start, lengths)
    return found, rows, said + more


def _best_place(
    ids: list[np.ndarray], other: list[np.ndarray], lengths: Sequence[int], short: list[int], many: str, name: str
) -> tuple[np.ndarray, str]:
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
    if best - second <= 3 * (0.5 / mine.size) ** 0.5:  # what two rates of so many slots differ by, at most, by chance
        raise DriftError(
            f"{name}: {many}, which fit no tokens clearly (the best place agrees in {percent(best)} of slots, the next "
            f"in {percent(second)}). Give every token a row, of -1 where it has no route"
        )
    return start, f": taken for the {tokens} tokens ({percent(best)} of slots agree; {percent(second)} elsewhere)"


def hash_routed(both: Sequence[Int[np.ndarray, "B T L K"]], tokens: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, " L"]:
    """Sites whose experts are a table over token ids: an expert twice in a row, and of each token id the same row
    everywhere in both files."""
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
    """A fault where groups of layers never name an expert twice, which groups of rows of different tokens do at least
    20 times: each layer is then a part of a set of more than K experts."""
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
    """Sites, and runs of RUN or more tokens of a sequence, that do not agree clearly better than routes of other tokens
    do while all together does. agree: slots of each token at each site; chance: the same with other tokens."""
    tokens = np.mean(list(agree.values()), axis=0)
    mean, usual = float(tokens.mean()), float(np.mean(list(chance.values())))
    said = []

    def odd(values: np.ndarray, by_chance: float, slots: int) -> bool:
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
