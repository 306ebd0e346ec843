"""Output of `moe-rl floor`: the verdict, a table for the terminal, a figure and a page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from moe_rl.drift.output import page_of
from moe_rl.drift.words import measured_sentence, number, percent, text_sentence
from moe_rl.study.figures.saving import StudyFigure, save_figure, styled
from moe_rl.study.figures.style import GREY, legend_above, panels

LABELS = {
    "repeat": "repeated",
    "batch_1": "batch 1",
    "batch_1_unpadded": "batch 1, unpadded",
    "padding_left": "padding left",
    "padding_right": "padding right",
    "decode": "decoding (KV cache)",
    "merged": "merged adapters",
}
COLOURS = {"float32": ("#0B4A8F", "s"), "bfloat16": ("#D55E00", "o"), "float16": ("#27B08B", "^")}


def label(row: Mapping[str, Any]) -> str:
    """Return a short name of a row's variant."""
    variant = str(row["variant"])
    if variant == "dtype":
        return f"against {str(row['detail']).partition(' and ')[0]}"
    if variant.startswith("experts_"):
        return f"experts {variant.removeprefix('experts_')}"
    return LABELS.get(variant, variant)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one sentence: how far arithmetic takes the ratio at equal weights in each dtype, and routing's share.

    For each dtype the sentence names the variant that takes most ratios outside [0.9, 1.1] or, if none does, the one
    with the largest mean gap. The comparison with another dtype is not among these variants; the table has it.
    """
    clauses = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype and row["variant"] != "dtype"]
        worst = max(own, key=lambda row: (row["outside_fraction"], row["gap_mean"]), default=None)
        if worst is not None:
            clauses.append(f"{percent(worst['outside_fraction'])} in {dtype} ({_why(worst)})")
    if not clauses:
        return "Nothing was measured yet."
    listed = clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return f"At equal weights, arithmetic alone takes the ratio outside [0.9, 1.1] for this share of tokens: {listed}."


def _why(row: Mapping[str, Any]) -> str:
    """Return in words which variant a row is of, and how much of its change is routing."""
    if not row["gap_max"]:
        return "every variant bit-exact"
    if not row["tokens_changed"]:
        return f"{label(row)}; no route changed"
    changed = f"{percent(row['slot_change'])} of slots and {percent(row['token_change'])} of tokens re-routed"
    return f"{label(row)}; {changed}; routing makes {percent(row['routing_share_gap_mean'])} of the mean gap"


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("slots changed", "slot_change", percent),
    ("tokens changed", "token_change", percent),
    ("outside [0.9, 1.1]", "outside_fraction", percent),
    ("replayed", "outside_fraction_replayed", percent),
    ("mean |Δ log p|", "gap_mean", number),
    ("replayed", "gap_mean_replayed", number),
    ("routing share", "routing_share_gap_mean", percent),
    ("largest", "gap_max", number),
)
HEADS = ("dtype", "other arithmetic", *(head for head, _, _ in COLUMNS))


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a table row, one for each of `HEADS`."""
    return [str(row["dtype"]), label(row), *(form(row[column]) for _, column, form in COLUMNS)]


def say(results: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the text that was measured, the table, and the variants that were not measured."""
    console.print(results["verdict"], highlight=False, markup=False)
    console.print(f"Text: {text_sentence(results['text'], results['model'])}.", highlight=False, markup=False)
    table = Table(*HEADS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    last = None
    for row in results["rows"]:
        if last not in (None, row["dtype"]):
            table.add_section()
        table.add_row(*cells(row))
        last = row["dtype"]
    console.print(table)
    for row in results["left_out"]:
        line = f"not measured: {row['dtype']} {row['variant']}: {row['reason']}"
        console.print(line, style="dim", highlight=False, markup=False)


@styled
def floor_figure(rows: Sequence[Mapping[str, Any]], note: str) -> StudyFigure:
    """Draw slots changed, ratios outside [0.9, 1.1] and mean gap, by variant and dtype, natural and replayed."""
    names = list(dict.fromkeys(label(row) for row in rows))
    dtypes = list(dict.fromkeys(str(row["dtype"]) for row in rows))
    figure, axes = panels(1, 3, 1.3 + 0.24 * len(names), sharey=True)
    step = 0.6 / max(1, len(dtypes))
    kinds = {"outside_fraction": 100.0, "gap_mean": 1.0}
    for row in rows:
        colour, marker = COLOURS.get(str(row["dtype"]), (GREY, "o"))
        y = names.index(label(row)) + step * (dtypes.index(str(row["dtype"])) - (len(dtypes) - 1) / 2)
        look: dict[str, Any] = {"color": colour, "marker": marker, "ls": "", "ms": 4}
        axes[0, 0].plot(100 * row["slot_change"], y, **look, label=row["dtype"])
        for ax, (name, factor) in zip(axes[0, 1:], kinds.items(), strict=True):
            whole, left = factor * row[name], factor * row[f"{name}_replayed"]
            if name == "gap_mean":  # a log axis has no 0
                whole, left = whole or np.nan, left or np.nan
            ax.plot([whole, left], [y, y], color=colour, lw=0.8, alpha=0.6)
            ax.plot(left, y, **{**look, "mfc": "white"})
            ax.plot(whole, y, **look)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.4, -0.6)
    for ax, text in zip(
        axes[0], ("slots changed, %", "ratio outside [0.9, 1.1],\n% of tokens", "mean |Δ log p|, nats"), strict=True
    ):
        ax.set_xlabel(text)
    for ax in axes[0, :2]:
        ax.set_xlim(left=-0.03 * max(ax.get_xlim()[1], 1e-6))
    if any(row["gap_mean"] for row in rows):
        axes[0, 2].set_xscale("log")
    replayed = Line2D([], [], color=GREY, marker="o", mfc="white", ls="", label="reference's routes replayed")
    legend_above(figure, axes[:, :1], [replayed])
    caption = (
        "Equal weights and tokens, other arithmetic. Filled: as the model routes for itself; open: with the routes of "
        "the reference forced, so that the distance between the two is routing. Slots changed: share of the K experts "
        f"of a (token, site) pair that the reference did not choose. A mean gap of exactly 0 has no mark. {note}"
    )
    frame = pd.DataFrame(rows)
    return StudyFigure("arithmetic_floor", "What arithmetic alone changes.", caption, figure, frame)


def draw(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any], folder: Path) -> StudyFigure:
    """Draw the figure, save it in every format, and return it."""
    size = results["settings"]["batch_size"]
    note = (
        f"Reference: one forward over batches of {size} (prompts padded on the left, completions on the right) in each "
        f"dtype. {results['model']}, {results['measured_tokens']:,} tokens of {results['sequences']:,} sequences."
    )
    figure = floor_figure(rows, note)
    save_figure(figure, folder)
    return figure


def render(results: Mapping[str, Any], figure: StudyFigure) -> str:
    """Return the page as HTML, self-contained and without scripts."""
    counts = [
        [row["dtype"], label(row), *(f"{row[f'{of}_changed']:,} / {row[of]:,}" for of in ("slots", "sites", "tokens"))]
        + [f"{row['outside']:,} → {row['outside_replayed']:,} / {row['measured']:,}"]
        + [number(row[name]) for name in ("k3", "k3_replayed", "chi2_token", "ess_token", "gap_p99")]
        for row in results["rows"]
    ]
    rows, details = [cells(row) for row in results["rows"]], {label(row): row["detail"] for row in results["rows"]}
    tokens = f"{results['measured_tokens']:,} tokens of {results['sequences']} sequences"
    text = measured_sentence(results, tokens, results["model"])
    return page_of("floor", results, [figure], heads=HEADS, rows=rows, counts=counts, details=details, text=text)
