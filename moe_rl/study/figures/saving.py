"""A drawn figure and its files: the house style, the picture in three formats, the table and the caption."""

import base64
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.style
import pandas as pd
from matplotlib.figure import Figure

from moe_rl.files import write_atomic
from moe_rl.study.words import csv_text

STYLE = Path(__file__).parent.parent / "moe_rl.mplstyle"
DIGITS = "%.8g"  # format of the numbers in a figure's tables


@dataclass(frozen=True)
class StudyFigure:
    """A drawn figure with its table (`frame`), title and caption. `figure` is matplotlib's: it may be changed,
    shown again and saved.

    The caption is the figure's `own` sentences and then those of `notes`, which several figures share: a page of many
    figures prints the notes once. `tables` are further tables of the same figure, by name."""

    name: str
    title: str
    own: str
    figure: Figure
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        """The whole caption: the figure's own sentences and its notes."""
        return " ".join((self.own, *self.notes))

    def render(self, kind: str) -> bytes:
        """Return the picture as `pdf`, `svg` or `png`; the same data give the same bytes. The picture is drawn once for
        each kind, and anew where `figure` was changed since."""
        kept: dict[str, bytes] = vars(self).setdefault("_rendered", {})
        if self.figure.stale:
            kept.clear()
        if kind in kept:
            return kept[kind]
        buffer = io.BytesIO()
        no_dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}[kind]
        # the layout is computed once, not for each format; and a figure with a layout engine, even one that does
        # nothing, is drawn twice when it is saved
        with house_style({"figure.constrained_layout.use": False}):
            layout = self.figure.get_layout_engine() or vars(self).get("_layout")
            if layout is not None and not kept:
                vars(self)["_layout"] = layout
                self.figure.set_layout_engine(layout)
                self.figure.draw_without_rendering()
                self.figure.set_layout_engine(None)
            self.figure.savefig(buffer, format=kind, metadata=no_dates)
        self.figure.stale = False  # saving changes the resolution and sets it back
        kept[kind] = _number_clips(buffer.getvalue()) if kind == "svg" else buffer.getvalue()
        return kept[kind]

    def __repr__(self) -> str:
        rows = len(self.frame)
        return f"StudyFigure({self.name}: {self.title} .figure, .caption, .frame of {rows} rows, .save(folder))"

    def save(self, folder: str | Path) -> list[Path]:
        """Write picture, table and caption into a folder, as `save_figure` does; return the files written."""
        return save_figure(self, folder)

    def _repr_html_(self) -> str:
        """Return the picture with its caption as HTML, for notebooks."""
        picture = base64.b64encode(self.render("png")).decode()
        title, caption = escape(self.title), escape(self.caption)
        image = f'<img src="data:image/png;base64,{picture}" alt="{title}" style="width:100%">'
        return f'<figure style="max-width:40rem">{image}<figcaption><b>{title}</b> {caption}</figcaption></figure>'


def _number_clips(svg: bytes) -> bytes:
    """Return the SVG with its clip paths named by their order, because matplotlib's hash depends on rounding errors."""
    names = dict.fromkeys(re.findall(rb'<clipPath id="(p[0-9a-f]{10})"', svg))
    number = {name: b"clip%d" % i for i, name in enumerate(names)}
    return re.sub(rb"(?<=[\"#])p[0-9a-f]{10}(?=[\")])", lambda match: number.get(match[0], match[0]), svg)


@contextmanager
def house_style(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Context manager and decorator: apply the house style, and the settings `more`, inside the block only. Warnings of
    letters that the font lacks are left to `inches`.

    The first figure of pyplot loads a notebook's backend, which switches interactive mode on. That mode stays on after
    the block, because without it a notebook shows no figure any more."""
    with ExitStack() as after, mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        settings: Any = {**_settings(), **(more or {})}
        mpl.rcParams.update(settings)
        try:
            yield
        finally:
            after.callback(mpl.interactive, mpl.is_interactive())


@cache
def _settings() -> dict[str, Any]:
    """Return matplotlib's defaults with the house style over them, but without the backend and interactive mode."""
    with mpl.rc_context():
        mpl.rcdefaults()
        matplotlib.style.use(STYLE)
        return {name: mpl.rcParams[name] for name in mpl.rcParams if "backend" not in name and name != "interactive"}


styled = house_style()
"""Decorator: run a function that draws inside the house style."""


def save_figure(figure: StudyFigure, folder: str | Path) -> list[Path]:
    """Write NAME.pdf, .svg, .png, .csv (what was plotted) and .md (the caption) of a figure, each whole or not at all,
    and its further tables as NAME.TABLE.csv; return the files written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, str | bytes] = {kind: figure.render(kind) for kind in ("pdf", "svg", "png")}
    contents |= {"csv": csv_text(figure.frame, DIGITS), "md": f"**{figure.title}** {figure.caption}\n"}
    contents |= {f"{key}.csv": csv_text(table, DIGITS) for key, table in figure.tables.items()}
    return [write_atomic(folder / f"{figure.name}.{kind}", content) for kind, content in contents.items()]
