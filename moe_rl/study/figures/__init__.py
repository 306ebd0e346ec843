"""Figures of a study, from its run folder alone.

    study.figures.reward(data)                        # a StudyFigure: matplotlib figure, plotted table, caption
    study.figures.draw_all("runs/replay_vs_gspo")     # PDF, SVG, PNG, CSV and caption of each

Every file of `gallery/` registers one figure; `FIGURES` has all figures by name, in the order of the report.
"""

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from moe_rl.names import load_object, nearest
from moe_rl.study.data import StudyData, load
from moe_rl.study.figures import gallery
from moe_rl.study.figures.register import REGISTRY, Registered
from moe_rl.study.figures.saving import StudyFigure, save_figure
from moe_rl.study.figures.style import LOOKS, NothingToDraw, look_of

for _module in iter_modules(gallery.__path__):
    import_module(f"{gallery.__name__}.{_module.name}")

FIGURES: dict[str, Registered] = dict(sorted(REGISTRY.items(), key=lambda item: (item[1].rank, item[0])))
"""Name -> figure, in the order of the report."""


def __getattr__(name: str) -> Registered:
    if name in FIGURES:
        return FIGURES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, FIGURES, listed=False)}")


def __dir__() -> list[str]:
    return sorted({*__all__, *FIGURES})


def each_figure(data: StudyData, skipped: list[str] | None = None) -> Iterator[StudyFigure]:
    """Yield all figures that the runs have data for, in the order of the report. The reasons why other figures are
    missing are appended to `skipped`, except those of special figures, which answer another study's question: nothing
    is missing there.

    A figure that fails does not stop the report: its exception becomes a warning, which the tests take for an error,
    and a reason in `skipped`."""
    for registered in FIGURES.values():
        try:
            yield registered(data)
        except NothingToDraw as error:
            if skipped is not None and not registered.special:
                skipped.append(str(error))
        except Exception as error:  # rows of other trainers may hold what no figure was drawn from before
            reason = f"{registered.name}: {type(error).__name__}: {error}"
            warnings.warn(f"a figure failed: {reason}", RuntimeWarning, stacklevel=2)
            if skipped is not None:
                skipped.append(reason)


def draw_all(path: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw every figure of the study (or run) at `path` into `out`, by default `path`/figures.

    Returns the files written. Raises NothingToDraw if the runs hold nothing that can be drawn yet.
    """
    data = load(path)
    figures, _ = drawn_figures(path, data)
    return _save(figures, data, out)


def drawn_figures(path: str | Path, data: StudyData) -> tuple[list[StudyFigure], list[str]]:
    """Return all figures of `each_figure`, and the reasons why others are missing. Raises NothingToDraw for a study
    without any figure; the message says what each figure lacks, or that no run has made a step."""
    skipped: list[str] = []
    figures = list(each_figure(data, skipped))
    if figures:
        return figures, skipped
    why = "; ".join(skipped)
    if all(table.empty for table in (data.rollouts, data.updates, data.probes, data.evals)):
        why = f"None of its runs ({len(data.runs)} begun) has made a step; where one ended, its file in logs/ says why."
    raise NothingToDraw(f"{path}: nothing to draw yet. {why}")


def draw_some(path: str | Path, names: Sequence[str], out: str | Path | None = None) -> list[Path]:
    """Draw these figures only; return the files written.

    Raises ValueError for an unknown name, before any run is read, and NothingToDraw if the runs lack a figure's
    data."""
    chosen = [named(name) for name in dict.fromkeys(names)]
    data = load(path)
    return _save([each(data) for each in chosen], data, out)


def _save(figures: Sequence[StudyFigure], data: StudyData, out: str | Path | None) -> list[Path]:
    """Write the files of figures into `out`, by default the study's folder `figures`; return the files written."""
    folder = Path(out).expanduser() if out is not None else data.folder / "figures"
    return [file for figure in figures for file in save_figure(figure, folder)]


def named(name: str) -> Registered:
    """Return the figure of this name, or that of a file of yours: `path/to/file.py:name`. Raises ValueError, with the
    nearest name, if there is none."""
    if ".py:" in name:
        return load_object(name, "figure", ValueError, Registered, "@figure")
    if name in FIGURES:
        return FIGURES[name]
    raise ValueError(f"unknown figure {name!r}{nearest(name, FIGURES, listed=False)} (figures: {', '.join(FIGURES)})")


__all__ = [
    "FIGURES",
    "LOOKS",
    "NothingToDraw",
    "StudyFigure",
    "draw_all",
    "draw_some",
    "each_figure",
    "look_of",
    "named",
    "save_figure",
]
