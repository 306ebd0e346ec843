"""Signals that tell early that a run will end badly:  python analysis/early_warning.py runs/STUDY docs/results/lag

Reads study folders, or folders of committed tables that contain `signals.csv`. Prints a table; --csv writes the table,
--figures draws it: areas under the ROC curve, and what signals tell beyond the reward, where the studies recorded it.
Definitions: `moe_rl.study.early_warning`.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study import load
from moe_rl.study.early_warning import PREFIXES, UPDATE_SIGNALS, early_warning, run_signals
from moe_rl.study.figures.over_studies import beyond_reward_figure, early_warning_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.roundings import NATIVE, of_each_rounding
from moe_rl.study.words import csv_text


def signals_of(folder: Path, steps: Sequence[int], rounding: str | None = None) -> pd.DataFrame:
    """Return `run_signals` of a study under each rounding or under one, from `signals.csv` or else from the runs."""
    if (folder / "signals.csv").is_file():
        table = _committed(folder, steps)
    else:
        table = of_each_rounding(load(folder), partial(run_signals, prefixes=steps))
    if rounding is None:
        return table
    return table[table.get("rounding", pd.Series(NATIVE, table.index)) == rounding]


def _committed(folder: Path, steps: Sequence[int]) -> pd.DataFrame:
    table = pd.read_csv(folder / "signals.csv")
    missing = set(steps) - set(table["steps"])
    if missing:
        raise ValueError(
            f"{folder}: signals.csv has the first {sorted(set(table['steps']))} steps, not {sorted(missing)}"
        )
    return table[table["steps"].isin(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="study folders, e.g. runs/replay_vs_gspo or docs/results/lag"
    )
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="also draw it: DIR/early_warning, .pdf, .svg and .png, and DIR/beyond_reward",
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=PREFIXES, help="after so many steps (default and committed: 5 10 20)"
    )
    parser.add_argument("--rounding", help="only the runs under these CPU kernels, e.g. native or avx2 (default: all)")
    parser.add_argument("--level", type=float, default=0.95, help="of the intervals, e.g. 0.99 (default: 0.95)")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap (default: 1000)")
    options = parser.parse_args()
    if not 0 < options.level < 1:
        parser.error(f"--level {options.level:g}: expected a share between 0 and 1, e.g. 0.95")
    if options.resamples < 1:
        parser.error(f"--resamples {options.resamples}: expected at least 1; the intervals come from them")
    try:
        studies = [signals_of(folder, options.steps, options.rounding) for folder in options.folders]
        table = early_warning(studies, options.resamples, options.level)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(table.to_string(index=False, float_format="%.2f"))
    if options.csv:
        write_atomic(options.csv, csv_text(table))
    if options.figures:
        save_figure(early_warning_figure(table, UPDATE_SIGNALS, options.level), options.figures)
        if table["beyond_reward"].notna().any():
            save_figure(beyond_reward_figure(table, UPDATE_SIGNALS, options.level), options.figures)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
