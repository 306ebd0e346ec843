"""Figures of one or more studies, drawn from run folders alone.

    python analysis/make_figures.py runs/replay_vs_gspo
    python analysis/make_figures.py runs/replay_vs_gspo runs/selection_noise --only reward expert_change

Each figure is written to FOLDER/figures as PDF, SVG and PNG, with a CSV of the plotted numbers and its caption.
`moe-rl figures FOLDER` does the same and writes the report.
"""

import argparse
from pathlib import Path

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures import FIGURES, draw_all, draw_some


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="study or run folders, e.g. runs/replay_vs_gspo")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"these figures only; known: {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, help="where to write (default: FOLDER/figures); with one folder only")
    options = parser.parse_args()
    if options.out and len(options.folders) > 1:
        parser.error("--out takes the figures of one folder; several would overwrite one another")
    for folder in options.folders:
        try:
            out = options.out or folder / "figures"
            written = draw_some(folder, options.only, out) if options.only else draw_all(folder, out)
        except ValueError as error:  # no such folder or figure, damaged files, nothing recorded to draw
            parser.exit(1, f"{error}\n")
        print(f"{out}: {len(written)} files")


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
