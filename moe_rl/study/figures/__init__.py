"""Figures of a study, from its run folder alone.

Each function takes a `StudyData` and returns a `StudyFigure` (matplotlib figure, plotted table, caption).
`draw_all` draws what the runs hold and writes PDF, SVG, PNG, CSV and caption of each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from moe_rl.names import nearest
from moe_rl.study.data import StudyData, load
from moe_rl.study.figures.decomposition import decomposition, decomposition_by_site
from moe_rl.study.figures.divergence import change_by_position, divergence
from moe_rl.study.figures.dose import dose_response, minibatches
from moe_rl.study.figures.engines import engine_mismatch
from moe_rl.study.figures.flips import variance_by_flips
from moe_rl.study.figures.ratios import (
    log_ratio_bands,
    probability_scatter,
    ratio_variance,
    tail_fraction,
)
from moe_rl.study.figures.routing import expert_change, expert_change_by_site, flips_per_token
from moe_rl.study.figures.style import LOOKS, NothingToDraw, StudyFigure, look_of, save_figure
from moe_rl.study.figures.training import clipped_tokens, dynamics, final_reward, gradient_norm, reward

FIGURES: dict[str, Callable[[StudyData], StudyFigure]] = {
    "reward": reward,
    "final_reward": final_reward,
    "expert_change": expert_change,
    "expert_change_by_site": expert_change_by_site,
    "change_by_position": change_by_position,
    "flips_per_token": flips_per_token,
    "ratio_variance": ratio_variance,
    "variance_by_flips": variance_by_flips,
    "log_ratio_bands": log_ratio_bands,
    "tail_fraction": tail_fraction,
    "probability_scatter": probability_scatter,
    "clipped_tokens": clipped_tokens,
    "gradient_norm": gradient_norm,
    "dynamics": dynamics,
    "divergence": divergence,
}
"""Name -> function, in the order of the report."""

ENGINE_FIGURES: dict[str, Callable[[StudyData], StudyFigure]] = {"engine_mismatch": engine_mismatch}
"""The same, only of studies in which another engine than the training model samples."""

STUDY_FIGURES: dict[str, Callable[[StudyData], StudyFigure]] = {
    "dose_response": dose_response,
    "minibatches": minibatches,
    "decomposition": decomposition,
    "decomposition_by_site": decomposition_by_site,
}
"""The same, only of studies that vary what they show or asked for it: doses, updates per batch, the decomposition."""


def each_figure(data: StudyData, skipped: list[str] | None = None) -> Iterator[StudyFigure]:
    """All figures that the runs have data for; reasons for the others are appended to `skipped`."""
    for draw in [*FIGURES.values(), *(ENGINE_FIGURES.values() if len(data.engines) else ())]:
        try:
            yield draw(data)
        except NothingToDraw as error:
            if skipped is not None:
                skipped.append(str(error))
    for draw in STUDY_FIGURES.values():  # of another study's question: nothing is missing
        with suppress(NothingToDraw):
            yield draw(data)


def draw_all(path: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw every figure of the study (or run) at `path` into `out`, by default `path`/figures.

    Returns the files written. Raises NothingToDraw if the runs hold nothing that can be drawn yet.
    """
    data = load(path)
    folder = Path(out) if out is not None else Path(path) / "figures"
    written: list[Path] = []
    skipped: list[str] = []
    for figure in each_figure(data, skipped):
        written += save_figure(figure, folder)
    if not written:
        raise NothingToDraw(f"{path}: nothing to draw yet. " + "; ".join(skipped))
    return written


def draw_some(path: str | Path, names: Sequence[str], out: str | Path | None = None) -> list[Path]:
    """Draw these figures only; returns the files written.

    Raises ValueError for an unknown name, before anything is read, and NothingToDraw where the runs lack its data.
    """
    known = {**FIGURES, **ENGINE_FIGURES, **STUDY_FIGURES}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown figure {name!r}{nearest(name, known)}")
    data = load(path)
    folder = Path(out) if out is not None else Path(path) / "figures"
    return [file for figure in [known[name](data) for name in names] for file in save_figure(figure, folder)]


__all__ = [
    "ENGINE_FIGURES",
    "FIGURES",
    "LOOKS",
    "STUDY_FIGURES",
    "NothingToDraw",
    "StudyFigure",
    "change_by_position",
    "clipped_tokens",
    "decomposition",
    "decomposition_by_site",
    "divergence",
    "dose_response",
    "draw_all",
    "draw_some",
    "dynamics",
    "each_figure",
    "engine_mismatch",
    "expert_change",
    "expert_change_by_site",
    "final_reward",
    "flips_per_token",
    "gradient_norm",
    "log_ratio_bands",
    "look_of",
    "minibatches",
    "probability_scatter",
    "ratio_variance",
    "reward",
    "save_figure",
    "tail_fraction",
    "variance_by_flips",
]
