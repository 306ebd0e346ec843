"""What all figures share: one look per method, panels by condition, mean and interval over seeds, saving."""

import base64
import io
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from moe_rl.study.data import StudyData
from moe_rl.study.statistics import interval_note, seed_band
from moe_rl.study.summary import full_label, replay_identity

STYLE = Path(__file__).parent.parent / "moe_rl.mplstyle"
WIDTH = 7.0  # inches: the text width of a two-column paper
GREY = "#6b6b6b"
THIN_LINES = 5  # with more seeds than this, single seeds are left to the CSV


class NothingToDraw(ValueError):
    """The runs hold no data for this figure; the message says which and what would record it."""


@dataclass(frozen=True)
class Look:
    """How a method appears everywhere; colours differ in lightness too, for print in grey."""

    colour: str
    dash: Any
    marker: str


# Okabe-Ito hues, shifted in lightness (L* 53, 30, 66): tell apart by colour, by grey value, by dash, by marker.
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
}
_SPARE = ("#B8860B", "#5F9EA0", "#A0522D", "#708090", "#C71585", "#6B8E23")
_DASHES = ("-", (0, (5, 1.6)), (0, (5, 1.4, 1.2, 1.4)), (0, (1.2, 1.2)), (0, (3, 1, 1, 1, 1, 1)))


def look_of(method: str) -> Look:
    """The look of a method; an unknown one gets a colour from its name, the same in every study and session."""
    if method in LOOKS:
        return LOOKS[method]
    number = zlib.crc32(method.encode())
    return Look(_SPARE[number % len(_SPARE)], _DASHES[number % len(_DASHES)], "ovs^D"[number % 5])


@dataclass(frozen=True)
class StudyFigure:
    """A drawn figure with what was drawn (`frame`) and what it says (`title`, `caption`)."""

    name: str
    title: str
    caption: str
    figure: Figure
    frame: pd.DataFrame

    def render(self, kind: str) -> bytes:
        """The picture as `pdf`, `svg` or `png`; the same data give the same bytes."""
        buffer = io.BytesIO()
        if isinstance(self.figure.get_layout_engine(), ConstrainedLayoutEngine):  # once, not for each format
            with house_style():
                self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")
        no_dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}[kind]
        with house_style():
            self.figure.savefig(buffer, format=kind, metadata=no_dates)
        return _number_clips(buffer.getvalue()) if kind == "svg" else buffer.getvalue()

    def _repr_html_(self) -> str:
        """In a notebook: the picture with its caption."""
        picture = base64.b64encode(self.render("png")).decode()
        title, caption = escape(self.title), escape(self.caption)
        image = f'<img src="data:image/png;base64,{picture}" alt="{title}" style="width:100%">'
        return f'<figure style="max-width:48rem">{image}<figcaption><b>{title}</b> {caption}</figcaption></figure>'


def _number_clips(svg: bytes) -> bytes:
    """Clip paths named by their order: matplotlib's hash also covers the last bit of a rounding error."""
    names = dict.fromkeys(re.findall(rb'<clipPath id="(p[0-9a-f]{10})"', svg))
    number = {name: b"clip%d" % i for i, name in enumerate(names)}
    return re.sub(rb"(?<=[\"#])p[0-9a-f]{10}(?=[\")])", lambda match: number.get(match[0], match[0]), svg)


@contextmanager
def house_style() -> Iterator[None]:
    """The house style, for the block only."""
    with mpl.rc_context():
        mpl.rcdefaults()
        matplotlib.style.use(STYLE)
        yield


def save_figure(figure: StudyFigure, folder: str | Path, name: str | None = None) -> list[Path]:
    """Write NAME.pdf, .svg, .png, .csv (what was plotted) and .md (the caption), each whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = name or figure.name
    contents = {kind: figure.render(kind) for kind in ("pdf", "svg", "png")}
    contents["csv"] = figure.frame.to_csv(index=False, float_format="%.8g", lineterminator="\n").encode()
    contents["md"] = f"**{figure.title}** {figure.caption}\n".encode()
    return [write_atomic(folder / f"{name}.{kind}", content) for kind, content in contents.items()]


def write_atomic(path: Path, content: bytes) -> Path:
    """A temporary name beside it, flushed, renamed: readers never see half a file."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@dataclass(frozen=True)
class Condition:
    """Arms that share a noise scale: one panel."""

    noise: float
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        return "natural" if self.noise == 0 else f"noise σ = {self.noise:g}"

    def title(self, lines: int = 1) -> str:
        """Heading of its panel; in two lines where panels are narrow."""
        if self.noise == 0:
            return "Natural routing"
        return f"Selection noise σ = {self.noise:g}" + ("\n" if lines > 1 else " ") + "(stress test)"


def conditions(data: StudyData) -> list[Condition]:
    """Natural first, then growing noise."""
    arms = data.arms
    return [
        Condition(float(noise), tuple(str(arm) for arm in arms.index[arms["noise"] == noise]))
        for noise in sorted(arms["noise"].unique())
    ]


def arm_looks(data: StudyData, arms: Sequence[str]) -> dict[str, tuple[Look, str]]:
    """Look and legend label of arms in one panel; arms of one method share its colour and differ in dash."""
    found: dict[str, tuple[Look, str]] = {}
    methods = data.arms.loc[list(arms), "method"]
    for arm in arms:
        method = methods[arm]
        twins = [a for a in arms if methods[a] == method]
        look = look_of(method)
        label = str(data.arms.loc[arm, "label"])
        i = twins.index(arm)
        if i:
            look = Look(look.colour, _DASHES[i % len(_DASHES)], "osv^D"[i % 5])
        found[arm] = (look, label)
    return found


def arm_title(data: StudyData, arm: str) -> str:
    """Title of a panel that shows one arm: its label, and its noise if any."""
    return full_label(data, arm).replace(" + ", "\n+ ").replace(", noise", "\nnoise")


def panel_arms(data: StudyData) -> list[str]:
    """Arms that get a panel of their own; a replay run that repeats its natural run under noise is shown once."""
    same = replay_identity(data)
    repeats = set(same.loc[same["difference"] == 0, "arm"])
    return [arm for condition in conditions(data) for arm in condition.arms if arm not in repeats]


def seed_table(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Rows x, one column per seed, mean over repeated rows."""
    return frame.pivot_table(index=x, columns="seed", values=y, aggfunc="mean")


def summarise(table: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """Seeds as columns -> tidy rows: labels, x, n, mean, low, high and each seed's value."""
    values = table.to_numpy(dtype=float).T
    low, high = seed_band(values)
    out = pd.DataFrame({**labels, str(table.index.name): table.index})
    out["n"] = np.isfinite(values).sum(0)
    out["mean"], out["low"], out["high"] = table.mean(axis=1).to_numpy(), low, high
    for seed in table.columns:
        out[f"seed{seed}"] = table[seed].to_numpy()
    return out


def draw_seeds(ax: Axes, table: pd.DataFrame, look: Look, label: str, *, thin: bool = True, **line: Any) -> Line2D:
    """Thin line per seed, mean, band of the interval (`seed_interval`; where at least two seeds are there)."""
    low, high = seed_band(table.to_numpy(dtype=float).T)
    x = table.index.to_numpy()
    every = max(1, len(x) // 8)
    start = (sum(map(ord, look.marker)) % every) if len(x) > 8 else 0  # stagger, so that markers do not hide each other
    if table.shape[1] > 1:
        if thin and table.shape[1] <= THIN_LINES:
            ax.plot(x, table, color=look.colour, lw=0.6, alpha=0.45)
        ax.fill_between(x, low, high, color=look.colour, alpha=0.16, lw=0)
    style = {
        "color": look.colour,
        "ls": look.dash,
        "marker": look.marker,
        "markevery": (start, every),
        **line,
    }
    return ax.plot(x, table.mean(axis=1), label=label, **style)[0]


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure with a grid of axes [rows, columns], of the house width unless it is one panel; in `house_style`."""
    figure = Figure(figsize=(WIDTH if columns > 1 else 0.65 * WIDTH, height))
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def arm_panels(count: int, each: int, height: float, most: int = 5) -> tuple[Figure, np.ndarray]:
    """Panels for arms side by side, at most five in a line, `each` below one another: axes [each, count]."""
    lines = -(-count // most)
    columns = -(-count // lines)
    figure, grid = panels(lines * each, columns, 0.6 + lines * each * height)
    for ax in grid[-each:, count - (lines - 1) * columns :].flat:
        ax.axis("off")
    index = range(count)
    return figure, np.array([[grid[i // columns * each + k, i % columns] for i in index] for k in range(each)])


def share_axes(axes: np.ndarray, xlabel: str, ylabel: str) -> None:
    """Common limits; the y label and y numbers only in the first column, the x label once per line."""
    x, y = np.array([ax.get_xlim() for ax in axes]), np.array([ax.get_ylim() for ax in axes])
    for ax in axes:
        ax.set_xlim(x.min(), x.max())
        ax.set_ylim(y.min(), y.max())
        place = ax.get_subplotspec()
        if place.is_first_col():
            ax.set_ylabel(ylabel)
        else:
            ax.tick_params(labelleft=False)
        if place.colspan.start == place.get_gridspec().ncols // 2 or len(axes) == 1:
            ax.set_xlabel(xlabel)


def lines_note(data: StudyData) -> str:
    """What the lines of `draw_seeds` are, for a caption."""
    most = int(data.arms["seeds"].map(len).max())
    if most == 1:
        return "One line per run."
    return (
        "Thin lines: seeds; thick: their mean; " if most <= THIN_LINES else "Line: mean over seeds; "
    ) + "band: interval."


def legend_above(figure: Figure, axes: np.ndarray | Sequence[Axes], extra: Sequence[Artist] = ()) -> None:
    """One legend for all panels, above them; entries of the same label appear once."""
    entries: dict[str, Any] = {}
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    for handle in extra:
        entries.setdefault(str(handle.get_label()), handle)
    if entries:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside upper left",
            ncols=legend_columns(list(entries), float(figure.get_figwidth())),
            borderaxespad=0.3,
        )


def legend_columns(labels: Sequence[str], width: float, most: int = 4) -> int:
    """Columns, at most `most`, of a legend that fits `width` inches; entries fill one column after the other.

    >>> legend_columns(["GRPO", "GSPO"], 7.0), legend_columns(["GRPO + Routing Replay"] * 4, 4.5)
    (2, 2)
    """
    for columns in range(min(most, len(labels)), 1, -1):
        longest = [max(len(label) for label in part) for part in np.array_split(np.array(labels), columns)]
        if sum(0.6 + 0.061 * n for n in longest) - 0.18 <= width - 0.05:  # handle and gaps, and a letter, in inches
            return columns
    return 1


def log_y(ax: Axes) -> None:
    """Log y axis with plain numbers (0.2, 0.5) where the range is short and powers of ten where it is long; a linear
    one where nothing is positive."""
    if not np.isfinite(ax.dataLim.minposy):
        return
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(_power))  # matplotlib's own goes through mathtext, which is slow
    if high / low < 50:
        subs = (1, 2, 3, 5) if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        ax.yaxis.set_major_locator(LogLocator(subs=subs))
        ax.yaxis.set_major_formatter(FuncFormatter(plain))


def step_axis(ax: Axes, label: str = "RL step") -> None:
    """Whole numbers only."""
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def plain(value: float, _: int) -> str:
    """A tick label without powers or trailing zeros."""
    return f"{value:g}"


def _power(value: float, _: int) -> str:
    exponent = round(np.log10(value))
    return "10" + str(exponent).translate(_SUPERSCRIPT) if exponent else "1"


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def seeds_note(data: StudyData, interval: bool = True) -> str:
    """How many seeds, what the interval is and is worth, and which runs are unfinished: the end of a caption."""
    counts = data.arms["seeds"].map(len)
    usual = int(counts.mode().iloc[0])
    n = f"n = {usual} seed{'s' if usual > 1 else ''} per arm"
    others = [f"{k} for {full_label(data, str(arm))}" for arm, k in counts.items() if k != usual]
    n += f" ({', '.join(others)})" if others else ""
    parts = [n]
    if interval and counts.max() > 1:
        parts.append(interval_note(usual))
    elif interval:
        parts.append("one seed: no interval")
    if data.unfinished:
        runs = ", ".join(f"{run.arm}/seed{run.seed}" for run in data.unfinished)
        parts.append(f"unfinished runs included as far as they got: {runs}")
    return "; ".join(parts) + "."


NOISE_NOTE = (
    "Selection noise (scale σ, on the router logits, for the choice of experts only, in the update forward only) is a "
    "stress test."
)


def noise_note(data: StudyData) -> str:
    """The stress-test sentence, where a noise arm is shown."""
    return f" {NOISE_NOTE}" if (data.arms["noise"] > 0).any() else ""


def panels_note(data: StudyData) -> str:
    """`noise_note`, and which arms `panel_arms` left out."""
    left = [full_label(data, str(arm)) for arm in data.arms.index if arm not in panel_arms(data)]
    return noise_note(data) + (f" Not repeated: {', '.join(left)} (equals its natural run)." if left else "")


def need(frame: pd.DataFrame, columns: Sequence[str], figure: str) -> pd.DataFrame:
    """The rows in which all these columns are present; NothingToDraw naming them if there is none."""
    missing = [name for name in columns if name not in frame.columns]
    rows = frame.dropna(subset=list(columns)) if not missing and len(frame) else frame.iloc[:0]
    if missing or rows.empty:
        what = ", ".join(missing or columns)
        raise NothingToDraw(f"{figure}: the runs recorded no {what} (too early, or switched off in the study)")
    return rows


def styled(draw: Callable[..., StudyFigure]) -> Callable[..., StudyFigure]:
    """Draw inside the house style."""

    @wraps(draw)
    def inside(*args: Any, **options: Any) -> StudyFigure:
        with house_style():
            return draw(*args, **options)

    return inside
