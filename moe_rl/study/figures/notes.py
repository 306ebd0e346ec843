"""Sentences that several captions share. The report prints them once; a figure's own caption ends with them."""

from moe_rl.study.arms import full_label, replay_identity
from moe_rl.study.data import StudyData
from moe_rl.study.figures.style import THIN_LINES
from moe_rl.study.statistics import FEWEST, interval_note

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


def noise_note(data: StudyData) -> str:
    """What selection noise is, where an arm has some."""
    return NOISE if (data.arms["noise"] > 0).any() else ""


def seeds_note(data: StudyData, interval: bool) -> str:
    """How many seeds, what the interval is, and which runs are unfinished."""
    usual, others = _counts(data)
    n = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    n += f" ({', '.join(f'{k} for {label}' for label, k in others.items())})" if others else ""
    parts = [n, interval_note(usual)] if interval else [n]
    if data.unfinished:
        runs = ", ".join(run.name for run in data.unfinished)
        parts.append(f"unfinished runs included as far as they got: {runs}")
    return "; ".join(parts) + "."


def seeds_words(data: StudyData, mark: str) -> str:
    """The line under a figure: n, and what its bars or bands are."""
    usual, others = _counts(data)
    words = f"n = {usual} seed{'s' if usual > 1 else ''} per arm" + (" (fewer or more in some)" if others else "")
    if not mark or usual < 2:
        return words
    return f"{words}; {mark}: " + ("95 % Student interval over seeds" if usual >= FEWEST else "their range")


def lines_note(data: StudyData) -> str:
    """What the lines of curves are."""
    most = int(data.arms["seeds"].map(len).max())
    if most == 1:
        return "One line per run."
    return LINES if most > THIN_LINES else "Thin lines: seeds; thick: their mean."


def repeats(data: StudyData) -> set[str]:
    """Replay arms under noise that repeat their natural run, as they must: their runs are not drawn twice."""
    same = replay_identity(data)
    return set(same.loc[same["difference"] == 0, "arm"])


def _counts(data: StudyData) -> tuple[int, dict[str, int]]:
    counts = data.arms["seeds"].map(len)
    counts = counts[~counts.index.isin(repeats(data))]
    usual = int(counts.mode().iloc[0])
    return usual, {full_label(data, str(arm)): int(k) for arm, k in counts.items() if k != usual}
