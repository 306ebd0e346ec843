"""Text helpers: numbers in sentences, labels that figures can draw, Markdown and CSV tables."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd


class Statement(NamedTuple):
    """One finding: its topic, and its sentence."""

    topic: str
    text: str


def minus(text: str) -> str:
    """Return the text with minus signs in place of hyphens before numbers.

    >>> minus("differs by -0.2 (pre-2019)")
    'differs by −0.2 (pre-2019)'
    """
    return re.sub(r"(?<![\w^])-(?=\d)", "−", text)


def not_mathematics(label: str) -> str | None:
    """Return why figures cannot draw a label (matplotlib reads mathematics between two `$`), None if they can."""
    if "$" not in label:
        return None
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(label)
    except ValueError as error:
        return str(error).strip().splitlines()[-1]
    return None


def cut(label: str, letters: int) -> str:
    """Return the label in at most so many letters, without its middle: labels of one study differ at their ends.

    >>> cut("GRPO with a long story, number 2", 21)
    'GRPO with … number 2'
    """
    if len(label) <= letters:
        return label
    half = (letters - 3) // 2
    head, tail = label[:half], label[-half:]
    if " " in head and label[half] != " ":  # without a word that was cut, where another is left
        head = head[: head.rindex(" ")]
    if " " in tail and label[-half - 1] != " ":
        tail = tail[tail.index(" ") + 1 :]
    short = f"{head.rstrip()} … {tail.lstrip()}"
    return short.replace(r"\$", "$").replace("$", r"\$")  # half of a formula is no formula


def by_topic(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Group (topic, text) pairs: return each topic with its texts, in order of first appearance."""
    topics: dict[str, list[str]] = {}
    for topic, text in pairs:
        topics.setdefault(topic, []).append(text)
    return list(topics.items())


def markdown_table(heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with one line per row.

    >>> print(markdown_table(["n", "|Δp|"], [["8", "0.1"]]))
    | n | \\|Δp\\| |
    | --- | --- |
    | 8 | 0.1 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def csv_text(table: pd.DataFrame, digits: str = "%.6g") -> str:
    """Return a table as the text of a CSV file, without the index, with the same bytes on every system."""
    return table.to_csv(index=False, float_format=digits, lineterminator="\n")


def listed(items: Iterable[str]) -> str:
    return ", ".join(items)


def probability(p: float) -> str:
    """Return a probability as text: `0.031`, `< 0.001`."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def count(n: int, what: str) -> str:
    """Return a number with its noun: `1 seed`, `3 seeds`."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def two(value: float) -> str:
    """Return a number as text with two significant digits, without an exponent: 357.1 -> 360."""
    return f"{float(f'{value:.2g}'):g}"


def span(values: "pd.Series[float] | np.ndarray") -> str:
    """Return the range of values as text in two digits, `low to high`, or the one number if both are equal."""
    low, high = two(values.min()), two(values.max())
    return low if low == high else f"{low} to {high}"
