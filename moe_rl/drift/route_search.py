"""The search for explanations of captured routes: as captured, shifted, layers in another order, ids renamed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy.optimize import linear_sum_assignment

from moe_rl.drift.captured import OwnRoutes, TokenRows

Renaming = tuple[np.ndarray, np.ndarray]
"""Captured ids in ascending order, and the expert that each one stands for."""
SHIFTS = range(-3, 4)
MOST_IDS = 1024
"""Most ids that are told apart at a layer."""
SEARCHED = 2048
"""Most tokens that shifts, layers and ids are searched on; the final table counts all tokens."""
PENALTY = 0.03
"""How much agreement an explanation must gain for each step by which it is more complicated."""


@dataclass(frozen=True)
class Explanation:
    """One way to read captured routes, and how well it agrees with the model.

    shift: row t holds the routes of token t + shift. layers: the captured layer of each site, -1 for none. maps: a
    renaming of ids for each site, or None. agreement: mean share of slots that agree. steps: how complicated it is."""

    shift: int
    layers: tuple[int, ...]
    maps: tuple[Renaming, ...] | None
    agreement: float
    steps: int

    @property
    def score(self) -> float:
        """The agreement, less PENALTY for each step."""
        return self.agreement - PENALTY * self.steps

    def slots(self, a: np.ndarray, b: np.ndarray) -> dict[int, Float[np.ndarray, " n"]]:
        """Return the slot agreement of each pair of rows (`pairs_of`), at every site that has a captured layer."""
        there = [(site, a[:, c]) for site, c in enumerate(self.layers) if c >= 0]
        if self.maps is not None:
            there = [(site, mapped(ids, self.maps[site])) for site, ids in there]
        return {site: slots_of(ids, b[:, site]) for site, ids in there}


def explanations(work: TokenRows, own: OwnRoutes, layers: tuple[int, ...]) -> list[Explanation]:
    """Return the possible explanations of a capture, "as captured" first.

    The others are shifted, have layers in another order, or have renamed ids; the last two also shifted. layers: the
    expected captured layer of each site, -1 for none."""
    a, b, _ = pairs_of(work, own, 0, SEARCHED)
    rates = [slots_of(a[:, c], b[:, site]).mean() for site, c in enumerate(layers) if c >= 0 and len(a)]
    found = [Explanation(0, layers, None, float(np.mean(rates or [0.0])), 0)]
    for shift in SHIFTS:
        moved = 1 if shift else 0
        a, b, rows = pairs_of(work, own, shift, SEARCHED)
        if len(a) < 2:
            continue
        overlaps = _overlaps(a, b)
        if shift and min(layers) >= 0:
            rate = float(np.mean([overlaps[c, site] for site, c in enumerate(layers)]))
            found.append(Explanation(shift, layers, None, rate, 1))
        captured, sites = linear_sum_assignment(-overlaps)
        order = dict(zip(sites.tolist(), captured.tolist(), strict=True))
        best = tuple(order.get(site, -1) for site in range(len(own.sites)))
        if best != layers:
            rate = float(overlaps[captured, sites].mean())
            found.append(Explanation(shift, best, None, rate, moved + 1))
        # Fitted on every other token id and judged on the rest, because equal tokens are routed alike.
        odd = np.unique(work.tokens[rows], return_inverse=True)[1] % 2 == 1
        even = ~odd
        if min(layers) >= 0 and min(odd.sum(), even.sum()) >= 8:
            maps = [_renamed(a[:, c], b[:, site], odd) for site, c in enumerate(layers)]
            rates = [slots_of(mapped(a[even, c], maps[site]), b[even, site]).mean() for site, c in enumerate(layers)]
            found.append(Explanation(shift, layers, tuple(maps), float(np.mean(rates)), moved + 2))
    return found


def pairs_of(
    work: TokenRows, own: OwnRoutes, shift: int, most: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return captured rows, the model's rows `shift` tokens later, and the indices of these captured rows.

    Rows for which the model has no such row are left out. most: the most pairs to return, evenly spaced; None: all.
    """
    target = work.position + shift
    rows = np.flatnonzero((target >= 0) & (target < own.ids.shape[1]))
    rows = rows[(own.ids[work.sequence[rows], target[rows]] >= 0).all((1, 2))]
    if most is not None and len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).astype(int)]
    return work.ids[rows], own.ids[work.sequence[rows], target[rows]], rows


def _named(ids: np.ndarray) -> Integer[np.ndarray, " E"]:
    """Return the ids that occur, in ascending order; of more than MOST_IDS, the most frequent ones."""
    named, often = np.unique(ids[ids >= 0], return_counts=True)
    return named if len(named) <= MOST_IDS else np.sort(named[np.argsort(-often, kind="stable")[:MOST_IDS]])


def _overlaps(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, "layers L"]:
    """Return the mean slot agreement of every captured layer with every site."""
    both = np.intersect1d(_named(a), _named(b))
    x, y = (_one_hot(ids, both).reshape(ids.shape[1], -1) for ids in (a, b))
    found: np.ndarray = x @ y.T / max(1, len(a) * a.shape[2])
    return found


def _one_hot(
    ids: Integer[np.ndarray, "n layers K"], named: Integer[np.ndarray, " E"]
) -> Float[np.ndarray, "layers n E"]:
    """Return an array that is 1 where an expert of `named` is in a row's set, else 0; other ids are ignored."""
    hot = np.zeros((ids.shape[1], len(ids), len(named) + 1), np.float32)
    np.put_along_axis(hot, _place(ids, named).transpose(1, 0, 2), 1, axis=2)
    return hot[..., :-1]


def _place(ids: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Return the index of each id in the ascending `named`, or their number for an id that is not among them."""
    place = np.searchsorted(named, ids)
    return np.where(np.append(named, -1)[place] == ids, place, len(named))


def _renamed(captured: np.ndarray, model: np.ndarray, fit: Bool[np.ndarray, " n"]) -> Renaming:
    """Return for each captured id the expert that comes with it most often on the rows `fit`."""
    theirs, ours = _named(captured[fit]), _named(model[fit])
    together = _one_hot(captured[fit, None], theirs)[0].T @ _one_hot(model[fit, None], ours)[0]
    return theirs, ours[together.argmax(1)]


def mapped(ids: np.ndarray, renaming: Renaming) -> np.ndarray:
    """Return the expert that each id stands for, -1 for an id that is not in the renaming."""
    named, experts = renaming
    return np.append(experts, -1)[_place(ids, named)]


def slots_of(a: Integer[np.ndarray, "n K"], b: Integer[np.ndarray, "n K"]) -> Float[np.ndarray, " n"]:
    """Return the share of the K experts of each row of `b` that are in the same row of `a`."""
    found: np.ndarray = (a[:, :, None] == b[:, None, :]).any(1).mean(-1)
    return found
