"""What every script here does: read run folders, draw, save."""

import argparse
from collections.abc import Callable
from pathlib import Path

from moe_rl.study import StudyData, load
from moe_rl.study.figures import StudyFigure, save_figure


def run(draw: Callable[[StudyData], StudyFigure]) -> None:
    """Draw one figure of the study named on the command line."""
    parser = argparse.ArgumentParser(description=(draw.__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a study or run folder, e.g. runs/replay_vs_gspo")
    parser.add_argument("--out", type=Path, help="where to write (default: FOLDER/figures)")
    options = parser.parse_args()
    try:
        figure = draw(load(options.folder))
    except ValueError as error:  # no such folder, damaged files, nothing recorded to draw
        parser.exit(1, f"{error}\n")
    for path in save_figure(figure, options.out or options.folder / "figures"):
        print(path)
