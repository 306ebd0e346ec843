"""Every figure of one or more studies, from run folders alone:  python analysis/make_figures.py runs/replay_vs_gspo

Each becomes PDF, SVG, PNG, a CSV of what was plotted, and its caption, in FOLDER/figures. `moe-rl figures FOLDER`
does the same and writes the report.
"""

import argparse
from pathlib import Path

from moe_rl.study.figures import draw_all


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw every figure of a study from its run folders.")
    parser.add_argument("folders", type=Path, nargs="+", help="study or run folders, e.g. runs/replay_vs_gspo")
    for folder in parser.parse_args().folders:
        try:
            written = draw_all(folder)
        except ValueError as error:
            parser.exit(1, f"{error}\n")
        print(f"{folder / 'figures'}: {len(written)} files")


if __name__ == "__main__":
    main()
