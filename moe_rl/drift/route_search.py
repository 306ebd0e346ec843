"""Which explanation of captured routes agrees best: as they are, shifted, layers in another order, ids renamed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy.optimize import linear_sum_assignment

from moe_rl.drift.captured import OwnRoutes, Work

SHIFTS = range(-3, 4)
SEARCHED = 2048
"""Tokens that shifts, layers and ids are searched on; the table counts all."""
PENALTY = 0.03
"""What a more complicated explanation must gain in agreement."""


@dataclass(frozen=True)
class Explanation:
    shift: int
    layers: tuple[int, ...]
    maps: tuple[np.ndarray, ...] | None
    agreement: float
    steps: int

    @property
    def score(self) -> float:
        return self.agreement - PENALTY * self.steps

    def slots(self, a: np.ndarray, b: np.ndarray) -> dict[int, Float[np.ndarray, " n"]]:
        """Slot agreement of each pair of `pairs_of`, at every site that has a captured layer."""
        there = [(site, a[:, c]) for site, c in enumerate(self.layers) if c >= 0]
        if self.maps is not None:
            there = [(site, mapped(ids, self.maps[site])) for site, ids in there]
        return {site: slots_of(ids, b[:, site]) for site, ids in there}


def explanations(work: Work, own: OwnRoutes, layers: tuple[int, ...]) -> list[Explanation]:
    """As it is, `layers` being the expected ones (-1 for a site that has none); shifted; layers in another order; ids
    renamed; the last two shifted, too."""
    a, b, _ = pairs_of(work, own, 0, SEARCHED)
    found = [Explanation(0, layers, None, agreement(a, b, layers), 0)]
    width = _width(work, own)
    for shift in SHIFTS:
        moved = 1 if shift else 0
        a, b, rows = pairs_of(work, own, shift, SEARCHED)
        if len(a) < 2:
            continue
        overlaps = _overlaps(a, b, width)
        if shift and min(layers) >= 0:
            rate = float(np.mean([overlaps[c, site] for site, c in enumerate(layers)]))
            found.append(Explanation(shift, layers, None, rate, 1))
        captured, sites = linear_sum_assignment(-overlaps)
        order = dict(zip(sites.tolist(), captured.tolist(), strict=True))
        best = tuple(order.get(site, -1) for site in range(len(own.sites)))
        if best != layers:
            rate = float(overlaps[captured, sites].mean())
            found.append(Explanation(shift, best, None, rate, moved + 1))
        # Fitted on every other word of the text and judged on the rest, for what is said twice is routed alike.
        odd = np.unique(work.tokens[rows], return_inverse=True)[1] % 2 == 1
        even = ~odd
        if min(layers) >= 0 and min(odd.sum(), even.sum()) >= 8:
            maps = [_renamed(a[:, c], b[:, site], odd, width) for site, c in enumerate(layers)]
            rates = [slots_of(mapped(a[even, c], maps[site]), b[even, site]).mean() for site, c in enumerate(layers)]
            found.append(Explanation(shift, layers, tuple(maps), float(np.mean(rates)), moved + 2))
    return found


def agreement(a: np.ndarray, b: np.ndarray, layers: tuple[int, ...]) -> float:
    """Mean slot agreement over the sites that have a captured layer; 0 where nothing can be compared."""
    rates = [slots_of(a[:, c], b[:, site]).mean() for site, c in enumerate(layers) if c >= 0 and len(a)]
    return float(np.mean(rates)) if rates else 0.0


def pairs_of(
    work: Work, own: OwnRoutes, shift: int, most: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Usable rows of the capture, the model's rows `shift` tokens later where these are routes, and which rows these
    are."""
    lengths = np.array([len(ids) for ids in own.ids])
    offset = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    target = work.position + shift
    rows = np.flatnonzero(work.usable & (target >= 0) & (target < lengths[work.sequence]))
    every, at = np.concatenate(own.ids), offset[work.sequence] + target
    rows = rows[(every[at[rows]] >= 0).all((1, 2))]
    if most is not None and len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(int)]
    return work.ids[rows], every[at[rows]], rows


def _overlaps(a: np.ndarray, b: np.ndarray, width: int) -> Float[np.ndarray, "layers L"]:
    """Mean slot agreement of every captured layer with every site."""
    x, y = (_hot(ids, width).reshape(ids.shape[1], -1) for ids in (a, b))
    found: np.ndarray = x @ y.T / max(1, len(a) * a.shape[2])
    return found


def _hot(ids: Integer[np.ndarray, "n layers K"], width: int) -> Float[np.ndarray, "layers n E"]:
    """1 where an expert is in the set; ids outside are in none."""
    hot = np.zeros((ids.shape[1], len(ids), width + 1), np.float32)
    inside = np.where((ids >= 0) & (ids < width), ids, width)
    np.put_along_axis(hot, inside.transpose(1, 0, 2), 1, axis=2)
    return hot[..., :-1]


def _renamed(captured: np.ndarray, model: np.ndarray, fit: Bool[np.ndarray, " n"], width: int) -> np.ndarray:
    """For each captured id the expert that comes with it most often on the rows `fit`; -1 for one not there."""
    x, y = _hot(captured[:, None], width)[0, fit], _hot(model[:, None], width)[0, fit]
    together = x.T @ y
    return np.where(together.sum(1) > 0, together.argmax(1), -1)


def mapped(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    inside = (ids >= 0) & (ids < len(table))
    return np.where(inside, table[np.where(inside, ids, 0)], -2)


def slots_of(a: Integer[np.ndarray, "n K"], b: Integer[np.ndarray, "n K"]) -> Float[np.ndarray, " n"]:
    found: np.ndarray = (a[:, :, None] == b[:, None, :]).any(1).mean(-1)
    return found


def _width(work: Work, own: OwnRoutes) -> int:
    return int(min(max(max(own.experts), int(work.ids.max()) + 1), 4096))
