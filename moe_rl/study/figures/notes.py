"""Sentences that several captions share. The report prints them once; a figure's own caption ends with them."""

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from moe_rl.study.arms import full_label, replay_identity
from moe_rl.study.data import StudyData
from moe_rl.study.figures.style import THIN_LINES
from moe_rl.study.statistics import FEWEST, interval_note, several_kinds

PROBE = (
    "Probe: a fixed subset of each step's responses, routed live and without noise in every arm, old policy of the "
    "step against the weights after the update; changes are counted at the response tokens' own positions."
)
PAIR = (
    "log r: new minus old log-probability of the same token, nats; natural: live routing; replayed: the old policy's "
    "routes forced on the same weights."
)
NOISE = (
    "Selection noise (scale σ, on the router logits, for the choice of experts only, in the update forward only) is a "
    "stress test."
)
LINES = "Line: mean over seeds."
GEOMETRIC = "On a log axis: geometric mean over seeds, and the interval of the logarithms."

Runs = set[tuple[str, int]]
"""Arm and seed of the runs that have what a figure needs: n counts these."""


def noise_note(data: StudyData) -> str:
    """What selection noise is, where an arm has some."""
    return NOISE if (data.arms["noise"] > 0).any() else ""


def seeds_note(data: StudyData, runs: Runs, interval: bool, counts: Sequence[int] = ()) -> str:
    """How many seeds, what the interval is, and which runs are unfinished. `counts`: values of further intervals."""
    usual, others = _counts(data, runs)
    n = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    n += f" ({', '.join(f'{k} for {label}' for label, k in others.items())})" if others else ""
    parts = [n, interval_note(usual, [*others.values(), *counts])] if interval else [n]
    if data.unfinished:
        names = ", ".join(run.name for run in data.unfinished)
        parts.append(f"unfinished runs included as far as they got: {names}")
    return "; ".join(parts) + "."


def seeds_words(data: StudyData, runs: Runs, mark: str, counts: Sequence[int] = ()) -> str:
    """The line under a figure: n, and what its bars or bands are; `counts` as in `seeds_note`."""
    usual, others = _counts(data, runs)
    words = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    if mark and several_kinds(usual, [*others.values(), *counts]):
        words = f"n = {usual} in most arms" if others else words
        return f"{words}; {mark}: 95 % Student from {FEWEST} seeds on, else their range"
    words += " (fewer or more in some)" if others else ""
    if not mark or usual < 2:
        return words
    return f"{words}; {mark}: " + ("95 % Student interval over seeds" if usual >= FEWEST else "their range")


def lines_note(data: StudyData, thin: bool = True) -> str:
    """What the lines of curves are; `thin`: whether those of few seeds are drawn."""
    most = int(data.arms["seeds"].map(len).max())
    if most == 1:
        return "One line per run."
    return "Thin lines: seeds; thick: their mean." if thin and most <= THIN_LINES else LINES


def repeats(data: StudyData) -> set[str]:
    """Replay arms under noise that repeat their natural run, as they must: their runs are not drawn twice."""
    same = replay_identity(data)
    return set(same.loc[same["difference"] == 0, "arm"])


def _counts(data: StudyData, runs: Runs) -> tuple[int, dict[str, int]]:
    """Seeds of most arms, and of the arms that have another number; arms without any are not in the figure."""
    repeated, seeds = repeats(data), Counter(arm for arm, _ in runs)
    counts = {str(arm): seeds[arm] for arm in data.arms.index if seeds[arm] and arm not in repeated}
    usual = int(min(pd.Series(counts, dtype=int).mode(), default=0))
    return usual, {full_label(data, arm): k for arm, k in counts.items() if k != usual}
