"""Registration of figures: `@figure(...)` over a figure's function, in a file of its own under `gallery/`.

    @figure(
        title="Gradient norm.",
        caption="Global L2 norm of the gradient before it is clipped, mean over the updates of a step.",
        needs={"updates": ["grad_norm"]},
        rank=190,
    )
    def gradient_norm(data: StudyData) -> Drawing:
        ...

The function draws in the house style and returns a `Drawing`. Figure, function and file have the same name. The texts
below are sentences that several captions share: the report prints them once, a single figure's caption ends with them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import pandas as pd
from matplotlib.figure import Figure

from moe_rl.names import nearest
from moe_rl.study.arms import full_label, replay_identity
from moe_rl.study.data import StudyData
from moe_rl.study.figures.saving import StudyFigure, house_style
from moe_rl.study.figures.style import GREY, THIN_LINES, NothingToDraw
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
"""Arm and seed of the runs that have what a figure needs; n in a caption is their number."""


@dataclass(frozen=True)
class Drawing:
    """What a figure's function returns: the picture (`figure`), the table of what is in it (`frame`), and their
    description.

    said: sentences that depend on the data; they stand after the caption.
    interval: how the interval over seeds is drawn: "band", "bar", or empty if it is not.
    notes: shared sentences besides the registered ones. tables: further tables by name.
    runs: the runs that are drawn, where they are not all that have what the figure `needs`.
    counts: of how many values those intervals are that are not over an arm's runs. Of bands, the column `n` of `frame`
        says it.
    """

    figure: Figure
    frame: pd.DataFrame
    said: str = ""
    interval: str = ""
    notes: tuple[str, ...] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    runs: Runs | None = None
    counts: Sequence[int] = ()

    def numbers(self) -> Sequence[int]:
        """Return of how many values the intervals are: `counts` and, for bands, along which runs may end, the n of
        every point."""
        if self.interval != "band" or not {"arm", "n"} <= set(self.frame):
            return self.counts
        return [*self.counts, *self.frame.loc[self.frame["arm"].notna(), "n"].dropna().astype(int).unique()]


@dataclass(frozen=True)
class Registered:
    """A registered figure. Called with a StudyData it draws the figure, or raises NothingToDraw saying what is
    missing."""

    name: str
    title: str
    caption: str = field(repr=False)
    needs: Mapping[str, Sequence[str]] = field(repr=False)
    rank: int = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)
    special: bool = field(repr=False)
    draw: Callable[[StudyData], Drawing] = field(repr=False)

    def __call__(self, data: StudyData) -> StudyFigure:
        if not isinstance(data, StudyData):
            raise TypeError(f"figure {self.name!r} draws what study.load(...) returns, got {type(data).__name__}")
        runs = self.runs(data)
        with house_style():
            drawn = self.draw(data)
            if not isinstance(drawn, Drawing):
                raise TypeError(f"figure {self.name!r} must return a Drawing, got {type(drawn).__name__}")
            runs, counts = runs if drawn.runs is None else runs & drawn.runs, drawn.numbers()
            words = seeds_words(data, runs, drawn.interval, counts)
            placed = drawn.figure.supxlabel(words, x=0.008, ha="left", fontsize=6.5, color=GREY)
            placed.set_y(min(0.01, 0.05 / drawn.figure.get_figheight()))  # in a tall figure, 0.01 would reach a label
        own = " ".join(part for part in (self.caption, drawn.said) if part)
        noise = NOISE if (data.arms["noise"] > 0).any() else ""
        notes = [*self.notes, *drawn.notes, noise, seeds_note(data, runs, bool(drawn.interval), counts)]
        shared = tuple(dict.fromkeys(note for note in notes if note))
        return StudyFigure(self.name, self.title, own, drawn.figure, drawn.frame, shared, drawn.tables)

    def runs(self, data: StudyData) -> Runs:
        """Return the runs that recorded all that the figure needs. Raises NothingToDraw if no run recorded one of its
        tables."""
        found = {(run.arm, run.seed) for run in data.runs}
        for table, columns in self.needs.items():
            rows = need(getattr(data, table), columns, self.name)
            if "seed" in rows:  # the table of arms has no seeds
                found &= runs_in(rows)
        return found


TABLES = (*(f.name for f in fields(StudyData) if f.type is pd.DataFrame), "arms", "tokens")
"""Names of the tables that `needs` may name."""
REGISTRY: dict[str, Registered] = {}
"""Name -> figure; filled while the files of the gallery are imported."""


def figure(
    *,
    title: str,
    caption: str,
    needs: Mapping[str, Sequence[str]],
    rank: int = 500,
    notes: Sequence[str] = (),
    special: bool = False,
) -> Callable[[Callable[[StudyData], Drawing]], Registered]:
    """Return a decorator that registers the decorated function as the figure of the function's name.

    `title` and `caption` end with a full stop. `needs`: table of StudyData -> columns that must hold a value in some
    row; n counts the runs in which they do. `rank`: place in the report, whose first six figures are its main ones.
    `notes`: sentences that other figures have too (those above); sentences on selection noise, n and the intervals are
    added automatically. `special`: only some studies ask the figure's question, so that in others it is not reported as
    missing."""

    def register(draw: Callable[[StudyData], Drawing]) -> Registered:
        name = draw.__name__
        for table, columns in needs.items():
            if table not in TABLES:
                raise ValueError(f"figure {name!r}, needs: no table {table!r}{nearest(table, TABLES)}")
            if isinstance(columns, str):
                raise ValueError(f"figure {name!r}, needs: the columns of {table!r} are a list, got {columns!r}")
        if name in REGISTRY and REGISTRY[name].draw.__module__ != draw.__module__:
            raise ValueError(
                f"figure {name!r} is registered twice: {REGISTRY[name].draw.__module__}, {draw.__module__}"
            )
        REGISTRY[name] = Registered(name, title, caption, needs, rank, tuple(notes), special, draw)
        return REGISTRY[name]

    return register


def runs_in(rows: pd.DataFrame) -> Runs:
    """Return the runs of a table: its combinations of arm and seed."""
    return set(rows[["arm", "seed"]].drop_duplicates().itertuples(index=False, name=None))


def need(frame: pd.DataFrame, columns: Sequence[str], figure: str) -> pd.DataFrame:
    """Return the rows in which all these columns have a value. Raises NothingToDraw, naming columns, if there are
    none."""
    missing = [name for name in columns if name not in frame.columns]
    rows = frame.dropna(subset=list(columns)) if not missing and len(frame) else frame.iloc[:0]
    if missing or rows.empty:
        what = ", ".join(missing or [name for name in columns if frame[name].isna().all()] or columns)
        why = "their rows of this kind lack it" if len(frame) else "no such rows yet, or switched off"
        raise NothingToDraw(f"{figure}: the runs recorded no {what} ({why})")
    return rows


def seeds_note(data: StudyData, runs: Runs, interval: bool, counts: Sequence[int] = ()) -> str:
    """Return the sentence on how many seeds there are, what the interval is, and which runs are unfinished. `counts`:
    of how many values further intervals are."""
    usual, others = _counts(data, runs)
    n = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    n += f" ({', '.join(f'{k} for {label}' for label, k in others)})" if others else ""
    parts = [n, interval_note(usual, [*(k for _, k in others), *counts])] if interval else [n]
    if data.unfinished:
        names = ", ".join(run.name for run in data.unfinished)
        parts.append(f"unfinished runs included as far as they got: {names}")
    return "; ".join(parts) + "."


def seeds_words(data: StudyData, runs: Runs, mark: str, counts: Sequence[int] = ()) -> str:
    """Return the line under a figure: n, and what its bars or bands (`mark`) are; `counts` as in `seeds_note`."""
    usual, others = _counts(data, runs)
    words = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    if mark and several_kinds(usual, [*(k for _, k in others), *counts]):
        numbers = [usual, *(k for _, k in others)]
        words = f"n = {min(numbers)} to {max(numbers)} seeds" if others else words
        return f"{words}; {mark}: 95 % Student from {FEWEST} seeds on, else their range"
    words += " (fewer or more in some)" if others else ""
    if not mark or usual < 2:
        return words
    return f"{words}; {mark}: " + ("95 % Student interval over seeds" if usual >= FEWEST else "their range")


def lines_note(data: StudyData, thin: bool = True) -> str:
    """Return the sentence on what the lines of curves are; `thin`: whether single seeds are drawn where there are
    few."""
    most = int(data.arms["seeds"].map(len).max())
    if most == 1:
        return "One line per run."
    return "Thin lines: seeds; thick: their mean." if thin and most <= THIN_LINES else LINES


def repeats(data: StudyData) -> set[str]:
    """Return the replay arms under noise whose rewards equal those of their natural run, as they must; figures do not
    draw these arms twice."""
    same = replay_identity(data)
    return set(same.loc[same["difference"] == 0, "arm"])


def _counts(data: StudyData, runs: Runs) -> tuple[int, list[tuple[str, int]]]:
    """Return the number of seeds of most arms, and (label, number) of each arm that has another one. Arms without runs
    are left out."""
    repeated, seeds = repeats(data), Counter(arm for arm, _ in runs)
    counts = {str(arm): seeds[arm] for arm in data.arms.index if seeds[arm] and arm not in repeated}
    usual = int(min(pd.Series(counts, dtype=int).mode(), default=0))
    return usual, [(full_label(data, arm), k) for arm, k in counts.items() if k != usual]
