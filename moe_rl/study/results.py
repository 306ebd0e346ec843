"""Committed results: a study's summary tables as CSV, and the tables of Markdown pages made from them.

    python -m moe_rl.study.results write runs/replay_vs_gspo      # docs/results/replay_vs_gspo/*.csv and env.json
    python -m moe_rl.study.results fill PAGE.md [...]             # the tables between the markers of these pages
    python -m moe_rl.study.results check PAGE.md [...]            # exit status 1 where a page is not what fill makes
    python -m moe_rl.study.results against runs/replay_vs_gspo    # your runs beside the committed ones: what survives

A run folder that is called after its study and more (`replay_vs_gspo_intel`) is the study run again on another machine:
its tables `roundings` and `variance_components` hold the committed runs of the study, too.

A page asks for a table with a pair of markers, between which nothing is written by hand:

    <!-- table: replay_vs_gspo/final_reward -->
    <!-- end -->

With `, folded` after its name the table is a line that opens when it is clicked.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.files import write_atomic
from moe_rl.processes import ends_with_its_reader
from moe_rl.study.data import StudyData, load
from moe_rl.study.figures.gallery.depth_width import AXES, QUANTITIES
from moe_rl.study.published import RESULTS, ResultsError, against_published, read_table, tables_of_repetition
from moe_rl.study.result_tables import environment_of, result_tables
from moe_rl.study.statistics import Verdict
from moe_rl.study.words import csv_text, markdown_table, minus, probability


def write_results(path: str | Path, to: str | Path = RESULTS) -> list[Path]:
    """Write the tables of the study folder `path` and its `env.json` into `to`/STUDY; return the files written.

    Earlier tables for which the runs have no data any more are removed. Raises ResultsError for a study with unfinished
    runs, also in its repetitions, since published numbers are of whole studies; and for a study run again, STUDY_NAME,
    if there is no folder `to`/STUDY.
    """
    data = load(path)
    left = _left_to_run(data)
    left += [f"{name}: {run}" for name, again in data.roundings.items() for run in _left_to_run(again)]
    if left:
        raise ResultsError(
            f"{path}: {len(left)} runs are not finished ({', '.join(left[:5])}). Finish the study first."
        )
    folder = Path(to) / Path(os.path.abspath(path)).name  # the name as given, also of a link
    name = folder.name.removeprefix(f"{data.name}_")
    beside = {} if name == folder.name else tables_of_repetition(data, Path(to) / data.name, name)
    tables = result_tables(data) | beside
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        if old.stem not in tables and old.stem not in OF_SCRIPTS:
            old.unlink()
    contents = {f"{name}.csv": csv_text(table, DIGITS.get(name, "%.6g")) for name, table in tables.items()}
    contents["env.json"] = json.dumps(environment_of(data), indent=1, default=str, ensure_ascii=False) + "\n"
    return [write_atomic(folder / name, content.encode()) for name, content in contents.items()]


def _left_to_run(data: StudyData) -> list[str]:
    return [*(run.name for run in data.unfinished), *data.not_started]


DIGITS = {"runs": "%.10g"}  # tests compare sums of rewards: ties must stay ties
OF_SCRIPTS = ("both_engines", "engine_rewards", "rounding_costs", "windows")
"""Tables that scripts make and `write_results` keeps: analysis/both_engines.py (last policies), analysis/windows.py."""

Column = Callable[[dict[str, Any]], str]


def _column(name: str, text: Callable[[Any], str] = str) -> Column:
    return lambda row: text(row[name])


def _texts(*headings: str) -> dict[str, Column]:
    """Return columns that show values unchanged, under the names of the table with spaces for underscores."""
    return {heading: _column(heading.replace(" ", "_")) for heading in headings}


def _interval(form: str, name: str, low: str = "", high: str = "", factor: int = 1) -> Column:
    """Return a column that shows `name` with the interval `low` to `high`, by default `name`_low to `name`_high."""

    def cell(row: dict[str, Any]) -> str:
        value, *ends = (factor * row[column] for column in (name, low or f"{name}_low", high or f"{name}_high"))
        if pd.isna(value):
            return "–"
        interval = "" if pd.isna(ends[0]) else f" [{ends[0]:{form}}, {ends[1]:{form}}]"
        return minus(f"{value:{form}}{interval}".replace("[+", "[").replace(", +", ", "))

    return cell


def _percent(name: str, digits: int = 1) -> Column:
    return _interval(f".{digits}f", name, factor=100)


def _probability_of_verdict(row: dict[str, Any]) -> str:
    """Return the Holm-adjusted p behind the verdict: of equivalence for that verdict, else of the sign-flip test."""
    p = row["p_equivalent_adjusted" if row["verdict"] == Verdict.EQUIVALENT else "p_adjusted"]
    return _probability(p)


def _probability(p: Any) -> str:
    return "–" if pd.isna(p) else probability(float(p))


PAGES: dict[str, dict[str, Column]] = {
    "final_reward": {
        "arm": lambda row: row["label"] + (", held out" if row["measured"] == "held out" else ""),
        **_texts("condition", "n"),
        "final reward": _interval(".2f", "final", "low", "high"),
        "held out": _interval(".2f", "evaluation"),
        "failed": lambda of: "–" if pd.isna(of["start"]) else f"{of['failed']} of {of.get('judged', of['finished'])}",
        "below start": lambda row: "–" if pd.isna(row["start"]) else str(row["below_start"]),
        **_texts("collapsed"),
    },
    "comparisons": {
        **_texts("condition"),
        "difference": lambda row: f"{row['label']} − {row['other_label']}",
        **_texts("n"),
        "Δ final reward": _interval("+.3f", "difference", "low", "high"),
        "p": _probability_of_verdict,
        "Δ held out": _interval("+.3f", "held_out_difference", "held_out_low", "held_out_high"),
        **_texts("verdict"),
    },
    "change_rates": {
        **_texts("arm", "update"),
        "slots, %": _percent("slot"),
        "sites, %": _percent("site"),
        "tokens, %": _percent("token"),
    },
    "change_by_load": {
        **_texts("arm"),
        "load over the even load": lambda row: row["load"],
        **_texts("n"),
        "of the experts, %": _percent("experts", 0),
        "of the slots, %": _percent("slots", 0),
        "changed, %": _percent("slot_change"),
    },
    "predictions": {
        "arm": lambda row: row["arm"] + (f", {row['rounding']}" if "rounding" in row else ""),
        **_texts("n"),
        "KL, predicted / unmoved": _interval(".2f", "all"),
        "first ten steps": _interval(".2f", "early"),
        "later": _interval(".2f", "later"),
    },
    "gradients": {
        **_texts("arm", "update", "n"),
        "cosine, replayed": _interval(".3f", "gradient_cosine"),
        "of the routers": _interval(".3f", "router_gradient_cosine"),
        "norm, replayed / natural": _interval(".3f", "gradient_norm_ratio"),
        "cosine, two halves": _interval(".3f", "gradient_halves_cosine"),
    },
    "routing_noise": {
        "difference": lambda row: f"{row['arm']} / {row['other']}",
        **_texts("n"),
        "ratio of Var(routing)": _interval(".2f", "ratio", "low", "high"),
    },
    "engines": {
        **_texts("arm", "routing", "n"),
        "slots changed, %": _percent("slots_changed_share", 2),
        "Var(token), nats²": _interval(".1e", "var_token"),
        "Var(sequence), nats²": _interval(".1e", "var_sequence"),
        "clipped at the first update, %": _percent("clipped_first", 2),
    },
    "balance": {
        **_texts("arm", "n"),
        "MaxVio, last probe": _interval(".2f", "max_vio"),
        "MaxVio of what was trained on": _interval(".2f", "trained_max_vio"),
    },
    "effective_routes": {
        **_texts("arm", "n"),
        "effective number of sets": _interval(".1f", "effective_sets"),
        "effective number of experts": _interval(".2f", "effective_experts"),
    },
    "precision": {
        **_texts("arm", "n"),
        "slots changed, %": _percent("slot_change", 2),
        "k3, nats per token": _interval(".1e", "k3"),
        "routing share of the mean gap, %": _percent("routing_share", 0),
        "k3, last five steps over first five": _interval(".2f", "k3_growth"),
        "routing share, last five minus first five, %": _percent("share_growth", 0),
    },
    "sizes": {
        **{words: _column(axis, lambda size: str(int(size))) for axis, words in AXES.items()},
        **_texts("n"),
        "slots, %": _percent("slot_change"),
        "sites, %": _percent("site_change"),
        "tokens, %": _percent("token_change"),
        "independent sites": _interval(".1f", "independent_sites"),
        "variance that replay removes, nats²": _interval(".1e", "removed"),
    },
    "power_laws": {
        "along": lambda row: AXES[row["axis"]],
        "of": lambda row: QUANTITIES.get(row["quantity"], [row["quantity"].replace("_", " ")])[0],
        **_texts("seeds"),
        "exponent": _interval("+.2f", "exponent", "low", "high"),
    },
    "slopes": {
        **_texts("rounding", "of", "n"),
        "slope": _interval("+.3f", "slope", "low", "high"),
        "p": _column("p_adjusted", _probability),
    },
    "rate_exponents": {**_texts("of", "update", "seeds"), "exponent": _interval("+.2f", "exponent", "low", "high")},
}
"""Table -> its columns on a page: heading -> text from a row of the CSV. Tables not listed show all their columns."""
IF_HELD_OUT: dict[str, tuple[str, Column]] = {
    "arm": ("arm", _column("label")),
    "final reward": ("held-out reward", _interval(".2f", "final", "low", "high")),
    "held out": ("as sampled in training", _interval(".2f", "sampled")),
    "Δ final reward": ("Δ held-out reward", _interval("+.3f", "difference", "low", "high")),
    "Δ held out": ("Δ as sampled in training", _interval("+.3f", "sampled_difference", "sampled_low", "sampled_high")),
}
"""Heading of `PAGES` -> heading and column in its place where the study declares `outcome: held_out`."""

_MARKER = re.compile(
    r"(?P<marker><!-- table: (?P<study>[^/\s]+)/(?P<name>\w+)(?P<folded>, folded)? -->\n)(?P<body>.*?)<!-- end -->",
    re.DOTALL,
)


def _plain(value: Any) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _beside(table: pd.DataFrame, keys: list[str], by: str, cells: dict[str, Column]) -> pd.DataFrame:
    """Return a table with one row for each combination of `keys`, and the cells of all values of `by` side by side.
    A heading has the value of `by` in its braces."""
    wide = table[keys].drop_duplicates().set_index(keys)
    for heading, cell in cells.items():
        for value, part in table.groupby(by, sort=False):
            texts = [cell(row) for row in _records(part)]
            wide[heading.format(value)] = pd.Series(texts, index=part.set_index(keys).index)
    return wide.fillna("–").reset_index()


_difference = _interval("+.3f", "difference", "low", "high")
_window = _interval(".2f", "reward")


def _judged(row: dict[str, Any], between: str = ", ") -> str:
    """Return a difference as text, with its verdict where it has one."""
    verdict = row["verdict"]
    return _difference(row) + (f"{between}{verdict}" if pd.notna(verdict) and verdict else "")


def _by_rounding(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `roundings` as pages show it: one row for each comparison, with its roundings side by side."""
    pairs = table["arm"] + " − " + table["other"]
    n = table.groupby(pairs)["n"].agg(lambda n: ", ".join(map(str, n.unique())))
    table = table.assign(difference_of=pairs, n=pairs.map(n))
    wide = _beside(table, ["difference_of", "n", "survival"], "rounding", {"{}": _judged})
    wide.insert(len(wide.columns) - 1, "conclusion", wide.pop("survival"))
    return wide.rename(columns={"difference_of": "difference"})


def _conclusions(table: pd.DataFrame) -> Iterator[str]:
    """Yield the table `roundings` as lines for a terminal."""
    width = table["rounding"].str.len().max()
    for (arm, other), part in table.groupby(["arm", "other"], sort=False):
        yield f"{arm} − {other}: {part['survival'].iloc[0]}"
        yield from (f"  {row['rounding']:{width}}  n = {row['n']:<2}  {_judged(row, '  ')}" for row in _records(part))


def _by_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `early_warning` as pages show it: the steps after which a signal was read are side by side."""
    cells = {
        "area under ROC, {} steps": _interval(".2f", "auc"),
        **({"the same within an arm, {} steps": _interval(".2f", "within")} if "within" in table else {}),
        "rank correlation with final reward, {} steps": _interval(".2f", "correlation"),
    }
    return _beside(table.rename(columns={"bad": "ended badly"}), ["signal", "runs", "ended badly"], "steps", cells)


def _costs_by_rounding(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `rounding_costs` as pages show it: only the rows of costs, with the roundings side by side."""
    table = table[table["of"].str.startswith("lost_by_")]
    rounded, pairs = table["of"].str.removeprefix("lost_by_"), table["arm"] + " − " + table["other"]
    table = table.assign(**{"rounded to": rounded, "difference of": pairs})
    return _beside(table, ["rounded to", "difference of", "n"], "rounding", {"{}": _judged})


def _engine_rewards(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `engine_rewards` as pages show it: every reward with its interval."""
    names = [name for name in table if f"{name}_low" in table]
    for name in names:
        column = _interval(".3f", str(name))
        table[name] = [column(row) for row in _records(table)]
    heads = {name: "reward by " + str(name) if "_" not in str(name) else str(name).replace("_", " ") for name in names}
    return table[["arm", "n", *names]].rename(columns=heads)


WIDE: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "rounding_costs": _costs_by_rounding,
    "engine_rewards": _engine_rewards,
    "roundings": _by_rounding,
    "windows": lambda table: _beside(
        table[table["rounding"].eq(table["rounding"].iloc[-1])], ["of", "n"], "steps", {"steps {}": _window}
    ),
    "early_warning": _by_steps,
    "decomposition": lambda table: _beside(
        table, ["arm", "level", "n"], "update", {"routing, %, update {}": _percent("routing", 0)}
    ),
}
"""Table -> function that gives it the shape on pages, for tables that have another shape there than in the CSV."""


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def markdown(name: str, table: pd.DataFrame) -> str:
    """Return a summary table as a Markdown table, with the columns that pages show."""
    if name in WIDE:
        table = WIDE[name](table)
    columns = PAGES.get(name) or {str(column): _column(str(column), _plain) for column in table}
    if name in ("final_reward", "comparisons") and "sampled_low" in table:
        columns = dict(IF_HELD_OUT.get(heading, (heading, cell)) for heading, cell in columns.items())
    return markdown_table(list(columns), ([cell(row) for cell in columns.values()] for row in _records(table))) + "\n"


def fill(text: str, results: str | Path = RESULTS) -> str:
    """Return the text of a page with the tables between its markers made anew from the CSV files in `results`.

    Raises ResultsError for a marker without an end or of another form, and for one that names a missing table.
    """

    def made(match: re.Match[str]) -> str:
        file = Path(results) / match["study"] / f"{match['name']}.csv"
        if not file.is_file():
            raise ResultsError(
                f"table {match['study']}/{match['name']}: no {file}. Run the study, then "
                f"python -m moe_rl.study.results write runs/{match['study']}"
            )
        if "<!-- table:" in match["body"]:
            raise ResultsError(f"table {match['study']}/{match['name']}: its marker has no <!-- end --> of its own")
        table = markdown(match["name"], read_table(file))
        if match["folded"]:
            head = f"{match['study']}: {match['name'].replace('_', ' ')}"
            table = f"<details><summary>{head}</summary>\n\n{table}\n</details>\n"
        return f"{match['marker']}{table}<!-- end -->"

    filled, count = _MARKER.subn(made, text)
    asked = text.count("<!-- table:")
    if asked != count:
        raise ResultsError(
            f"{asked - count} of {asked} table markers cannot be read; expected <!-- table: STUDY/TABLE --> or "
            "<!-- table: STUDY/TABLE, folded --> on a line, later <!-- end -->"
        )
    return filled


def main(arguments: Sequence[str]) -> int:
    """Run `write DIR...`, `against DIR...`, `fill PAGE...` or `check PAGE...`; return the exit status."""
    verb, names = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    asked, known = not {"-h", "--help"}.isdisjoint(arguments), verb in ("write", "against", "fill", "check")
    if asked or not known or not names or any(name.startswith("-") for name in names):
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    for name in names:
        if verb == "write":
            print("\n".join(map(str, write_results(name))))
        elif verb == "against":
            data = load(name)
            tables = against_published(data, RESULTS / data.name, "here")
            print(f"{data.name}: native as committed, here {len(data.runs)} runs of {name}\n")
            print("\n".join(_conclusions(tables["roundings"])))
        else:
            text = Path(name).read_text(encoding="utf-8")
            try:
                filled = fill(text)
            except ResultsError as error:
                raise ResultsError(f"{name}: {error}") from error
            if verb == "check" and filled != text:
                print(f"{name}: its tables are not those of {RESULTS}; run: python -m moe_rl.study.results fill {name}")
                return 1
            if verb == "fill":
                if filled != text:
                    write_atomic(Path(name), filled.encode())
                print(f"{name}: {'as it was' if filled == text else 'filled'}")
    return 0


if __name__ == "__main__":
    with ends_with_its_reader():
        try:
            status = main(sys.argv[1:])
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")
    sys.exit(status)
