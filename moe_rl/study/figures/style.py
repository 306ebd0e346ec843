"""The style that all figures share: one look per method, conditions, axes, legends, tick labels."""

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cbook import is_math_text
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from moe_rl.study.data import StudyData

WIDTH = 7.0  # inches: the text width of a two-column paper
PAGE = 5.0  # inches: a study's figures, so that they can be read on a phone and stand in a column
GREY = "#6b6b6b"
INK = "#1a1a1a"
PALE = "#8f8f8f"  # lines behind others, half transparent
LETTER = 0.061  # inches: a letter of a legend
THIN_LINES = 5  # with more seeds than this, single seeds are left to the CSV

_WARNED_LETTERS: set[str] = set()  # letters that the font lacks, about which a warning was given


class NothingToDraw(ValueError):
    """An error: the runs hold no data for a figure; the message says which data are missing."""


@dataclass(frozen=True)
class Look:
    """The colour, dash and marker of a method in all figures; colours differ in lightness too, for print in grey."""

    colour: str
    dash: Any
    marker: str


# Okabe-Ito hues, shifted in lightness (L* 53, 30, 66): methods differ in colour, in grey value, in dash and in marker.
LOOKS: dict[str, Look] = {
    "grpo": Look("#D55E00", "-", "o"),
    "grpo_replay": Look("#0B4A8F", (0, (5, 1.6)), "s"),
    "gspo": Look("#27B08B", (0, (5, 1.4, 1.2, 1.4)), "^"),
    "gspo_replay": Look("#0F6B54", (0, (2.4, 1.2)), "v"),
    "gspo_token": Look("#8CC63E", (0, (1.2, 1.2)), "<"),
    "dapo": Look("#CC79A7", (0, (6, 2, 1, 2, 1, 2)), "D"),
    "dr_grpo": Look("#E69F00", (0, (3, 1)), "P"),
    "cispo": Look("#56B4E9", (0, (1, 1)), "X"),
    "gmpo": Look("#7B3F98", (0, (4, 1, 1, 1)), ">"),
    "sapo": Look("#8C564B", (0, (7, 2)), "h"),
    "minirl": Look("#4D4D4D", (0, (2, 2)), "*"),
    "ppo": Look("#9A9A9A", "-", "p"),
    # Methods with corrections for the rollout engine, which figures show beside each other.
    "grpo_tis": Look("#B8860B", (0, (3, 1, 1, 1, 1, 1)), "D"),
    "grpo_icepop": Look("#5F9EA0", (0, (1.2, 1.2)), "^"),
    "grpo_seq_mis": Look("#C71585", (0, (5, 1.4, 1.2, 1.4)), "s"),
    "grpo_kpop": Look("#6B8E23", (0, (1.2, 1.2)), "v"),
}
_SPARE = ("#B8860B", "#5F9EA0", "#A0522D", "#708090", "#C71585", "#6B8E23")
_MARKERS = "ovs^D"
_DASHES = ("-", (0, (5, 1.6)), (0, (5, 1.4, 1.2, 1.4)), (0, (1.2, 1.2)), (0, (3, 1, 1, 1, 1, 1)))


def look_of(method: str) -> Look:
    """Return the look of a method; an unknown method gets a look from its name, the same in every study and session."""
    if method in LOOKS:
        return LOOKS[method]
    number = zlib.crc32(method.encode())
    return Look(_SPARE[number % len(_SPARE)], _DASHES[number % len(_DASHES)], _MARKERS[number % 5])


def twin(look: Look, number: int) -> Look:
    """Return the look of the arm `number`, from 0 on, of a method: the same colour with another dash and another
    marker."""
    dashes = [look.dash, *(dash for dash in _DASHES if dash != look.dash)]
    markers = [look.marker, *(marker for marker in _MARKERS if marker != look.marker)]
    lap, place = divmod(number, len(dashes))
    return Look(look.colour, dashes[place], markers[(place + lap) % len(markers)])


@dataclass(frozen=True)
class Condition:
    """A noise scale and the arms that share it, which are drawn in one panel."""

    noise: float
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        return "natural" if self.noise == 0 else f"noise σ = {self.noise:g}"

    @property
    def title(self) -> str:
        return f"Selection noise σ = {self.noise:g} (stress test)" if self.noise else "Natural routing"


def conditions(data: StudyData) -> list[Condition]:
    """Return the conditions of a study: natural routing first, then growing noise."""
    arms = data.arms
    return [
        Condition(float(noise), tuple(str(arm) for arm in arms.index[arms["noise"] == noise]))
        for noise in sorted(arms["noise"].unique())
    ]


def arm_looks(data: StudyData, arms: Sequence[str]) -> dict[str, tuple[Look, str]]:
    """Return the look and the legend label of every arm in one panel; arms of one method share a colour and differ in
    dash and marker."""
    found: dict[str, tuple[Look, str]] = {}
    methods = data.arms.loc[list(arms), "method"]
    for arm in arms:
        method = methods[arm]
        twins = [a for a in arms if methods[a] == method]
        look = twin(look_of(method), twins.index(arm))
        found[arm] = (look, legend_label(str(data.arms.loc[arm, "label"])))
    return found


def legend_label(label: str) -> str:
    """Return a label as a legend needs it: matplotlib leaves out labels that begin with _."""
    return f" {label}" if label.startswith("_") else label


def arm_colour(data: StudyData, arm: str) -> str:
    """Return the colour of an arm, which is that of its method."""
    return look_of(str(data.arms["method"][arm])).colour


def panels(
    rows: int, columns: int, height: float, width: float | None = None, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure with a grid of axes [rows, columns]. Without a width the figure has `WIDTH`, or less for one
    column. `options` are those of `Figure.subplots`. Call this in `house_style`."""
    figure = Figure(figsize=(width or (WIDTH if columns > 1 else 0.65 * WIDTH), height))
    axes: np.ndarray = figure.subplots(rows, columns, **{"squeeze": False, **options})
    return figure, axes


def legend_above(figure: Figure, axes: np.ndarray | Sequence[Axes], extra: Sequence[Artist] = ()) -> None:
    """Draw one legend for all panels, above the panels; entries of the same label appear once. `extra`: further
    entries."""
    entries: dict[str, Any] = {}
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for handle in extra:
        entries.setdefault(str(handle.get_label()), handle)
    if entries:
        wide = float(figure.get_figwidth())
        letters = int((wide - 0.5) / LETTER)
        # labels are wrapped, except those with mathematics, which must stay on one line
        labels = [label if "$" in label else fill(label, letters) for label in entries]
        figure.set_figheight(figure.get_figheight() + 0.15 * sum(label.count("\n") for label in labels))
        figure.legend(
            list(entries.values()),
            labels,
            loc="outside upper left",
            ncols=legend_columns(labels, wide),
            borderaxespad=0.3,
        )


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns, at most four, a legend of `width` inches has room for; entries fill one column after the
    other.

    >>> legend_columns(["GRPO", "GSPO"], 7.0), legend_columns(["GRPO + Routing Replay"] * 4, 4.5)
    (2, 2)
    """
    for columns in range(min(4, len(labels)), 1, -1):
        longest = [max(inches(label) for label in part) for part in np.array_split(np.array(labels), columns)]
        if sum(0.6 + n for n in longest) - 0.18 <= width - 0.05:  # handle and gaps, in inches
            return columns
    return 1


def inches(label: str, points: float | int = 8) -> float:
    """Return the width in inches of a label in letters of so many points (those of a legend), as computed: capitals are
    wide, formulas are short. On whole pixels it is drawn a little wider (`moe_rl.study.figures.rows.DRAWN`)."""
    font = FontProperties(size=points)
    _warn_of_lacking_letters(label)
    lines = [(line, bool(is_math_text(line))) for line in label.split("\n")]
    return max(float(text_to_path.get_text_width_height_descent(line, font, math)[0]) for line, math in lines) / 72


def _warn_of_lacking_letters(label: str) -> None:
    """Warn about letters of a label that the font lacks, once for each letter."""
    known = get_font(findfont(FontProperties())).get_charmap()
    lacking = {letter for letter in label if letter.isprintable() and ord(letter) not in known} - _WARNED_LETTERS
    if lacking:
        _WARNED_LETTERS.update(lacking)
        letters = "".join(sorted(lacking))
        warnings.warn(f"the font of the figures lacks {letters}; boxes stand there in PNG and PDF", stacklevel=3)


def log_y(ax: Axes, low: float | int | None = None, high: float | int | None = None) -> None:
    """Make the y axis logarithmic, from `low` to `high` (None: as the data have it), with plain numbers (0.2, 0.5) if
    the range is short and powers of ten if it is long. The axis stays linear if no value is positive, on none of the
    axes that share it."""
    positive = any(np.isfinite(one.dataLim.minposy) for one in ax.get_shared_y_axes().get_siblings(ax))
    if positive:
        ax.set_yscale("log")
    if (low, high) != (None, None):  # before the ticks, which depend on the range
        ax.set_ylim(low, high)
    if positive:
        _log_ticks(ax.yaxis, (1, 2, 3, 5), 5)


def log_x(ax: Axes) -> None:
    """Make the x axis logarithmic as `log_y` does the y axis, with fewer ticks, because their labels need more room."""
    if np.isfinite(ax.dataLim.minposx):
        ax.set_xscale("log")
        _log_ticks(ax.xaxis, (1, 2, 5), 3)


def _log_ticks(axis: Axis, subs: Sequence[int], few: int) -> None:
    """Set the ticks of a log axis. `subs`: ticks of a decade, where several are shown; `few`: most intervals where the
    range is less than a factor of two."""
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())  # minor ticks have no length here, and finding them is slow
    axis.set_major_formatter(FuncFormatter(_power))  # matplotlib's own goes through mathtext, which is slow
    if high / low < 100:  # there may be one power of ten only
        fine = LogLocator(subs=(1, 3) if high / low >= 50 else subs if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 6, 8))
        axis.set_major_locator(fine if high / low > 2 else MaxNLocator(few))
        axis.set_major_formatter(FuncFormatter(plain))


def label_bar(bar: Colorbar, label: str, inches: float) -> None:
    """Write the label of a vertical colour bar `inches` high: beside its middle, or hanging from its top if the label
    is longer."""
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(int(np.clip(4 * inches, 1, 4)))  # before the layout, which makes room for the numbers
    if inches > 0.075 * len(label):
        bar.set_label(label)
    else:
        bar.set_label(label, loc="top", fontsize=6.5)


def reward_limits(rewards: "pd.Series[float]") -> tuple[float | int | None, float | int | None]:
    """Return the limits of an axis of rewards, None where the data decide: from 0 to a little above the best, and at
    most 1. The upper limit is None if the best is above 1; both are None if rewards are below 0 (penalties, rewards of
    -1 and 1)."""
    low, best = float(rewards.min()), float(rewards.max())
    if low < 0:
        return None, None
    return 0, None if best > 1 else min(1.0, best * 1.08) or 1.0  # 1 if no task was ever solved


def step_axis(ax: Axes, label: str = "RL step") -> None:
    """Label an x axis of steps and set its ticks at whole numbers only."""
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))


def bare(ax: Axes) -> None:
    """Remove grid, frame and tick marks from the axes of a heat map."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def plain(value: float, _: int) -> str:
    """Return a tick label without powers or trailing zeros."""
    return f"{value:g}"


def _power(value: float, _: int) -> str:
    """Return a tick label as a power of ten."""
    exponent = round(np.log10(value))
    return f"{10**exponent}" if exponent in (0, 1) else "10" + str(exponent).translate(_SUPERSCRIPT)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
