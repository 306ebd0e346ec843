"""Figures of a study, from its run folder alone.

Each function takes a `StudyData` and returns a `StudyFigure` (matplotlib figure, plotted table, caption).
`draw_all` draws what the runs hold and writes PDF, SVG, PNG, CSV and caption of each.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from moe_rl.study.data import StudyData, load
from moe_rl.study.figures.engines import engine_mismatch
from moe_rl.study.figures.ratios import (
    log_ratio_bands,
    probability_scatter,
    ratio_variance,
    tail_fraction,
    variance_by_flips,
)
from moe_rl.study.figures.routing import expert_change, expert_change_by_site, flips_per_token
from moe_rl.study.figures.style import LOOKS, NothingToDraw, StudyFigure, look_of, save_figure
from moe_rl.study.figures.training import clipped_tokens, dynamics, final_reward, gradient_norm, reward

FIGURES: dict[str, Callable[[StudyData], StudyFigure]] = {
    "reward": reward,
    "final_reward": final_reward,
    "expert_change": expert_change,
    "expert_change_by_site": expert_change_by_site,
    "flips_per_token": flips_per_token,
    "ratio_variance": ratio_variance,
    "variance_by_flips": variance_by_flips,
    "log_ratio_bands": log_ratio_bands,
    "tail_fraction": tail_fraction,
    "probability_scatter": probability_scatter,
    "clipped_tokens": clipped_tokens,
    "gradient_norm": gradient_norm,
    "dynamics": dynamics,
}
"""Name -> function, in the order of the report."""

ENGINE_FIGURES: dict[str, Callable[[StudyData], StudyFigure]] = {"engine_mismatch": engine_mismatch}
"""The same, only of studies in which another engine than the training model samples."""


def each_figure(data: StudyData, skipped: list[str] | None = None) -> Iterator[StudyFigure]:
    """All figures that the runs have data for; reasons for the others are appended to `skipped`."""
    for draw in [*FIGURES.values(), *(ENGINE_FIGURES.values() if len(data.engines) else ())]:
        try:
            yield draw(data)
        except NothingToDraw as error:
            if skipped is not None:
                skipped.append(str(error))


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


__all__ = [
    "ENGINE_FIGURES",
    "FIGURES",
    "LOOKS",
    "NothingToDraw",
    "StudyFigure",
    "clipped_tokens",
    "draw_all",
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
    "probability_scatter",
    "ratio_variance",
    "reward",
    "save_figure",
    "tail_fraction",
    "variance_by_flips",
]
