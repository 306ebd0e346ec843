"""Numbers in sentences, and labels that figures can draw."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd


class Statement(NamedTuple):
    """One finding: what it is about, and the sentence."""

    topic: str
    text: str


def minus(text: str) -> str:
    """Hyphens before numbers as minus signs.

    >>> minus("differs by -0.2 (pre-2019)")
    'differs by −0.2 (pre-2019)'
    """
    return re.sub(r"(?<![\w^])-(?=\d)", "−", text)


def not_mathematics(label: str) -> str | None:
    """Why figures cannot draw a label: between two `$` matplotlib reads mathematics. None where they can."""
    if "$" not in label:
        return None
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(label)
    except ValueError as error:
        return str(error).strip().splitlines()[-1]
    return None


def cut(label: str, letters: int) -> str:
    """The label in at most so many letters, without its middle: labels of one study differ at their ends.

    >>> cut("GRPO with a long story, number 2", 21)
    'GRPO with … number 2'
    """
    if len(label) <= letters:
        return label
    half = (letters - 3) // 2
    head, tail = label[:half], label[-half:]
    if " " in head and label[half] != " ":  # whole words, where there are
        head = head[: head.rindex(" ")]
    if " " in tail and label[-half - 1] != " ":
        tail = tail[tail.index(" ") + 1 :]
    short = f"{head.rstrip()} … {tail.lstrip()}"
    return short.replace(r"\$", "$").replace("$", r"\$")  # half of a formula is none


def by_topic(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(topic, text) as each topic with its texts."""
    topics: dict[str, list[str]] = {}
    for topic, text in pairs:
        topics.setdefault(topic, []).append(text)
    return list(topics.items())


def markdown_table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, one line a row.

    >>> print(markdown_table(["n", "|Δp|"], [["8", "0.1"]]))
    | n | \\|Δp\\| |
    | --- | --- |
    | 8 | 0.1 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def csv_text(table: pd.DataFrame, digits: str = "%.6g") -> str:
    """A table as our CSV files hold it: without its index, the same bytes on every system."""
    return table.to_csv(index=False, float_format=digits, lineterminator="\n")


def listed(items: Iterable[str]) -> str:
    return ", ".join(items)


def probability(p: float) -> str:
    """`0.031`, `< 0.001`."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def count(n: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def two(value: float) -> str:
    """Two significant digits, without an exponent: 357.1 -> 360."""
    return f"{float(f'{value:.2g}'):g}"


def span(values: "pd.Series[float] | np.ndarray") -> str:
    """`low to high` in two digits, or the one number."""
    low, high = two(values.min()), two(values.max())
    return low if low == high else f"{low} to {high}"
