"""Which signal tells early that a run will end badly:  python analysis/early_warning.py runs/q4 runs/selection_noise

Prints the table; --csv writes it, --figures draws it. Definitions: `moe_rl.study.early_warning`.
"""

import argparse
from pathlib import Path

from moe_rl.study import load
from moe_rl.study.early_warning import PREFIXES, UPDATE_SIGNALS, early_warning
from moe_rl.study.figures.early_warning import early_warning_figure
from moe_rl.study.figures.saving import save_figure


def main() -> None:
    parser = argparse.ArgumentParser(description="How well signals of the first steps tell how runs end.")
    parser.add_argument("folders", type=Path, nargs="+", help="study folders, e.g. runs/q4")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also draw it: DIR/early_warning.pdf, .svg, .png")
    parser.add_argument("--steps", type=int, nargs="+", default=PREFIXES, help="after so many steps (default 5 10 20)")
    options = parser.parse_args()
    try:
        table = early_warning([load(folder) for folder in options.folders], options.steps)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(table.to_string(index=False, float_format="%.2f"))
    if options.csv:
        table.to_csv(options.csv, index=False, float_format="%.6g", lineterminator="\n")
    if options.figures:
        save_figure(early_warning_figure(table, UPDATE_SIGNALS), options.figures)


if __name__ == "__main__":
    main()
