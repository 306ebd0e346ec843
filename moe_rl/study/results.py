"""Committed results: a study's summary tables as CSV, and the tables of Markdown pages made from them.

    python -m moe_rl.study.results write runs/replay_vs_gspo      # docs/results/replay_vs_gspo/*.csv and env.json
    python -m moe_rl.study.results fill README.md docs/*.md       # the tables between the markers of these pages
    python -m moe_rl.study.results check README.md docs/*.md      # exit status 1 where a page is not what fill makes

A page asks for a table with a pair of markers, between which nothing is written by hand:

    <!-- table: replay_vs_gspo/final_reward -->
    <!-- end -->
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.study.data import load
from moe_rl.study.figures.gallery.depth_width import AXES, QUANTITIES
from moe_rl.study.result_tables import environment_of, result_tables
from moe_rl.study.words import minus, probability

RESULTS = Path("docs") / "results"


class ResultsError(ValueError):
    """A table that a page names and that is not there, or a marker that cannot be read; says where and what to do."""


def write_results(path: str | Path, to: str | Path = RESULTS) -> list[Path]:
    """Write the tables of the study folder `path` and its `env.json` into `to`/STUDY; returns the files written.

    Tables of an earlier version that the runs have no data for any more are removed. Raises ResultsError for a study
    with unfinished runs: published numbers are of whole studies.
    """
    data = load(path)
    if data.unfinished or data.not_started:
        left = [f"{run.arm}/seed{run.seed}" for run in data.unfinished] + list(data.not_started)
        raise ResultsError(
            f"{path}: {len(left)} runs are not finished ({', '.join(left[:5])}). Finish the study first."
        )
    folder = Path(to) / Path(path).resolve().name
    folder.mkdir(parents=True, exist_ok=True)
    tables = result_tables(data)
    for old in folder.glob("*.csv"):
        if old.stem not in tables:
            old.unlink()
    written = []
    for name, table in tables.items():
        written.append(folder / f"{name}.csv")
        write_atomic(written[-1], table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    written.append(folder / "env.json")
    write_atomic(
        written[-1], json.dumps(environment_of(data), indent=1, default=str, ensure_ascii=False).encode() + b"\n"
    )
    return written


def _interval(row: dict[str, Any], name: str, low: str, high: str, form: str) -> str:
    if pd.isna(row[name]):
        return "–"
    ends = "" if pd.isna(row[low]) else f" [{row[low]:{form}}, {row[high]:{form}}]"
    return minus(f"{row[name]:{form}}{ends}".replace("[+", "[").replace(", +", ", "))


def _percent(row: dict[str, Any], name: str, digits: int = 1) -> str:
    shares = {f"{name}{end}": 100 * row[f"{name}{end}"] for end in ("", "_low", "_high")}
    return _interval(shares, name, f"{name}_low", f"{name}_high", f".{digits}f")


def _of(row: dict[str, Any], name: str) -> str:
    return _interval(row, name, f"{name}_low", f"{name}_high", ".3f")


Column = Callable[[dict[str, Any]], str]


def _whole(name: str) -> Column:
    return lambda row: str(int(row[name]))


PAGES: dict[str, dict[str, Column]] = {
    "final_reward": {
        "arm": lambda row: row["label"] + (", held out" if row["measured"] == "held out" else ""),
        "condition": lambda row: row["condition"],
        "n": lambda row: str(row["n"]),
        "final reward": lambda row: _interval(row, "final", "low", "high", ".2f"),
        "held out": lambda row: _interval(row, "evaluation", "evaluation_low", "evaluation_high", ".2f"),
        "failed": lambda row: f"{row['failed']} of {row['finished']}",
        "below start": lambda row: str(row["below_start"]),
        "collapsed": lambda row: str(row["collapsed"]),
    },
    "comparisons": {
        "condition": lambda row: row["condition"],
        "difference": lambda row: f"{row['label']} − {row['other_label']}",
        "n": lambda row: str(row["n"]),
        "final reward": lambda row: _interval(row, "difference", "low", "high", "+.3f"),
        "p": lambda row: "–" if pd.isna(row["p_adjusted"]) else probability(float(row["p_adjusted"])),
        "held out": lambda row: _interval(row, "held_out_difference", "held_out_low", "held_out_high", "+.3f"),
        "verdict": lambda row: row["verdict"],
    },
    "change_rates": {
        "arm": lambda row: row["arm"],
        "update": lambda row: str(row["update"]),
        "slots, %": lambda row: _percent(row, "slot"),
        "sites, %": lambda row: _percent(row, "site"),
        "tokens, %": lambda row: _percent(row, "token"),
    },
    "change_by_load": {
        "arm": lambda row: row["arm"],
        "load over the even load": lambda row: row["load"],
        "n": lambda row: str(row["n"]),
        "of the experts, %": lambda row: _percent(row, "experts", 0),
        "of the slots, %": lambda row: _percent(row, "slots", 0),
        "changed, %": lambda row: _percent(row, "slot_change"),
    },
    "gradients": {
        "arm": lambda row: row["arm"],
        "update": lambda row: str(row["update"]),
        "n": lambda row: str(row["n"]),
        "cosine, replayed": lambda row: _of(row, "gradient_cosine"),
        "of the routers": lambda row: _of(row, "router_gradient_cosine"),
        "norm, replayed / natural": lambda row: _of(row, "gradient_norm_ratio"),
        "cosine, two halves": lambda row: _of(row, "gradient_halves_cosine"),
    },
    "decomposition": {
        "arm": lambda row: row["arm"],
        "level": lambda row: row["level"],
        "update": lambda row: str(row["update"]),
        "n": lambda row: str(row["n"]),
        "weights, %": lambda row: _percent(row, "weight", 0),
        "routing, %": lambda row: _percent(row, "routing", 0),
        "interaction, %": lambda row: _percent(row, "interaction", 0),
    },
    "routing_noise": {
        "difference": lambda row: f"{row['arm']} / {row['other']}",
        "n": lambda row: str(row["n"]),
        "ratio of Var(routing)": lambda row: _interval(row, "ratio", "low", "high", ".2f"),
    },
    "engines": {
        "arm": lambda row: row["arm"],
        "routing": lambda row: row["routing"],
        "n": lambda row: str(row["n"]),
        "slots changed, %": lambda row: _percent(row, "slots_changed_share", 2),
        "Var(token), nats²": lambda row: _interval(row, "var_token", "var_token_low", "var_token_high", ".1e"),
        "Var(sequence), nats²": lambda row: _interval(
            row, "var_sequence", "var_sequence_low", "var_sequence_high", ".1e"
        ),
        "clipped at the first update, %": lambda row: _percent(row, "clipped_first", 2),
    },
    "balance": {
        "arm": lambda row: row["arm"],
        "n": lambda row: str(row["n"]),
        "MaxVio, last probe": lambda row: _interval(row, "max_vio", "max_vio_low", "max_vio_high", ".2f"),
        "MaxVio of what was trained on": lambda row: _interval(
            row, "trained_max_vio", "trained_max_vio_low", "trained_max_vio_high", ".2f"
        ),
    },
    "effective_routes": {
        "arm": lambda row: row["arm"],
        "n": lambda row: str(row["n"]),
        "effective number of sets": lambda row: _interval(
            row, "effective_sets", "effective_sets_low", "effective_sets_high", ".1f"
        ),
        "effective number of experts": lambda row: _interval(
            row, "effective_experts", "effective_experts_low", "effective_experts_high", ".2f"
        ),
    },
    "precision": {
        "arm": lambda row: row["arm"],
        "n": lambda row: str(row["n"]),
        "slots changed, %": lambda row: _percent(row, "slot_change", 2),
        "k3, nats per token": lambda row: _interval(row, "k3", "k3_low", "k3_high", ".1e"),
        "routing share of the mean gap, %": lambda row: _percent(row, "routing_share", 0),
        "k3, last five steps over first five": lambda row: _interval(
            row, "k3_growth", "k3_growth_low", "k3_growth_high", ".2f"
        ),
        "routing share, last five minus first five, %": lambda row: _percent(row, "share_growth", 0),
    },
    "sizes": {
        **{words: _whole(axis) for axis, words in AXES.items()},
        "n": lambda row: str(row["n"]),
        "slots, %": lambda row: _percent(row, "slot_change"),
        "sites, %": lambda row: _percent(row, "site_change"),
        "tokens, %": lambda row: _percent(row, "token_change"),
        "independent sites": lambda row: _interval(
            row, "independent_sites", "independent_sites_low", "independent_sites_high", ".1f"
        ),
        "variance that replay removes, nats²": lambda row: _interval(
            row, "removed", "removed_low", "removed_high", ".1e"
        ),
    },
    "power_laws": {
        "along": lambda row: AXES[row["axis"]],
        "of": lambda row: QUANTITIES[row["quantity"]][0],
        "seeds": lambda row: str(row["seeds"]),
        "exponent": lambda row: _interval(row, "exponent", "low", "high", "+.2f"),
    },
    "early_warning": {
        "signal": lambda row: row["signal"],
        "after steps": lambda row: str(row["steps"]),
        "runs": lambda row: str(row["runs"]),
        "ended badly": lambda row: str(row["bad"]),
        "area under ROC": lambda row: _interval(row, "auc", "auc_low", "auc_high", ".2f"),
        "rank correlation with final reward": lambda row: _interval(
            row, "correlation", "correlation_low", "correlation_high", ".2f"
        ),
    },
    "roundings": {
        "difference": lambda row: f"{row['arm']} − {row['other']}",
        "rounding": lambda row: row["rounding"],
        "n": lambda row: str(row["n"]),
        "final reward": lambda row: _interval(row, "difference", "low", "high", "+.3f"),
        "verdict": lambda row: "" if pd.isna(row["verdict"]) else row["verdict"],
        "conclusion": lambda row: row["survival"],
    },
}
"""Columns of a page's table: heading -> text of a row of the CSV. A table that is not here shows all its columns."""

_MARKER = re.compile(r"<!-- table: (?P<study>[^/\s]+)/(?P<name>\w+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def _plain(column: str) -> Column:
    def cell(row: dict[str, Any]) -> str:
        value = row[column]
        if pd.isna(value):
            return "–"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return cell


def markdown(name: str, table: pd.DataFrame) -> str:
    """A summary table as a Markdown table, with the columns that pages show."""
    columns = PAGES.get(name) or {str(column): _plain(str(column)) for column in table}
    lines = [list(columns), ["---"] * len(columns)]
    for record in table.to_dict("records"):
        row = {str(key): value for key, value in record.items()}
        lines.append([cell(row) for cell in columns.values()])
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def fill(text: str, results: str | Path = RESULTS) -> str:
    """A page with the tables between its markers made anew from the CSV files in `results`.

    Raises ResultsError for a marker without an end or of another form, and for one that names a missing table.
    """
    results = Path(results)

    def made(match: re.Match[str]) -> str:
        file = results / match["study"] / f"{match['name']}.csv"
        if not file.is_file():
            raise ResultsError(
                f"table {match['study']}/{match['name']}: no {file}. Run the study, then "
                f"python -m moe_rl.study.results write runs/{match['study']}"
            )
        if "<!-- table:" in match["body"]:
            raise ResultsError(f"table {match['study']}/{match['name']}: its marker has no <!-- end --> of its own")
        table = markdown(match["name"], pd.read_csv(file))
        return f"<!-- table: {match['study']}/{match['name']} -->\n{table}<!-- end -->"

    filled, count = _MARKER.subn(made, text)
    asked = text.count("<!-- table:")
    if asked != count:
        raise ResultsError(
            f"{asked - count} of {asked} table markers cannot be read; expected <!-- table: STUDY/TABLE --> on a line, "
            "later <!-- end -->"
        )
    return filled


def fill_page(page: Path, results: str | Path = RESULTS) -> bool:
    """Fill a page on disk; whether that changed it."""
    text = page.read_text(encoding="utf-8")
    try:
        filled = fill(text, results)
    except ResultsError as error:
        raise ResultsError(f"{page}: {error}") from error
    if filled != text:
        write_atomic(page, filled.encode())
    return filled != text


def main(arguments: Sequence[str]) -> int:
    """`write DIR...`, `fill PAGE...` or `check PAGE...`; returns the exit status."""
    verb, names = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if verb not in ("write", "fill", "check") or not names:
        print(__doc__, file=sys.stderr)
        return 2
    for name in names:
        if verb == "write":
            print("\n".join(map(str, write_results(name))))
        elif verb == "fill":
            print(f"{name}: {'filled' if fill_page(Path(name)) else 'as it was'}")
        elif fill(Path(name).read_text(encoding="utf-8")) != Path(name).read_text(encoding="utf-8"):
            print(f"{name}: its tables are not those of {RESULTS}; run: python -m moe_rl.study.results fill {name}")
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
