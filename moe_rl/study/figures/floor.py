"""The noise floor in figures of change rates: dashed lines, black for own arithmetic, grey for a bf16 copy, and
captions."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_rl.study.figures.style import GREY

FLOOR_LINES: dict[str, dict[str, Any]] = {
    "own": {"color": "#1a1a1a", "lw": 1.0, "ls": (0, (4, 2)), "label": "equal weights: own arithmetic", "zorder": 1},
    "bf16": {"color": GREY, "lw": 1.0, "ls": (0, (4, 2)), "label": "equal weights: bf16 copy", "zorder": 1},
}
"""Styles of the noise floor's two lines."""

OWN = {"repeat": "repeated", "batch": "other batch shapes", "experts": "other experts implementation"}
"""Variant of own arithmetic -> words."""
WORDS = {"own": f"own arithmetic ({', '.join(OWN.values())})", "bf16": "a bf16 copy"}
WHEN = "equal weights and tokens before the first update"


def floor_note(floor: pd.DataFrame, start: str = "Dashed: noise floor") -> str:
    """Return the sentence of a caption on the change rates of `summary.noise_floor`; empty if the floor was not
    measured."""
    if floor.empty:
        return ""
    values = [
        f"{WORDS[str(variant)]} {100 * row['slot']:.2g} % of slots, {100 * row['site']:.2g} % of sites, "
        f"{100 * row['token']:.2g} % of tokens"
        for variant, row in floor.iterrows()
    ]
    return f"{start}, {WHEN}: {'; '.join(values)}. "


def gap_note(floor: pd.DataFrame, columns: dict[str, str]) -> str:
    """Return the sentence of a caption on the variances of a noise floor (`columns`: name -> word); empty if not
    measured."""
    known = {name: word for name, word in columns.items() if floor[name].notna().any()}
    if not known:
        return ""
    values = [
        f"{WORDS[str(variant)]} " + ", ".join(f"{row[name]:.1g} {word}".strip() for name, word in known.items())
        for variant, row in floor.iterrows()
    ]
    return f"Noise floor of the variance, {WHEN}, nats²: {'; '.join(values)}. "


def draw_across(ax: Axes, rates: pd.Series, vertical: bool = False) -> None:
    """Draw one line per floor across an axes, without moving its limits: a floor outside them is left to the
    caption."""
    limits = ax.get_xlim() if vertical else ax.get_ylim()
    for variant, rate in rates.items():
        if limits[0] <= rate <= limits[1]:
            (ax.axvline if vertical else ax.axhline)(rate, **FLOOR_LINES[str(variant)])
    (ax.set_xlim if vertical else ax.set_ylim)(limits)


def draw_along(ax: Axes, table: pd.DataFrame, **look: Any) -> None:
    """Draw one line per floor along the index of `table` (columns: floors), with gaps where values are missing."""
    for floor in table.columns:
        x, y = table.index.to_numpy(dtype=float), table[floor].to_numpy(dtype=float)
        ax.plot(x, y, **{"marker": "", **FLOOR_LINES[str(floor)], **look})


def draw_levels(ax: Axes, table: pd.DataFrame) -> None:
    """Draw a short mark per floor and value into a histogram with bars at 0, 1, ..; zeros have no place on a log
    axis."""
    for variant in table.columns:
        shown = table[variant][table[variant] > 0]
        if len(shown):
            x = shown.index.to_numpy(dtype=float)
            ax.hlines(shown, x - 0.42, x + 0.42, color="white", lw=3, zorder=3)  # a white rim: bars are dark too
            ax.hlines(shown, x - 0.42, x + 0.42, **{**FLOOR_LINES[variant], "lw": 1.2, "zorder": 3})


def draw_columns(ax: Axes, table: pd.DataFrame, **image: Any) -> np.ndarray:
    """Draw `table` (rows: sites, columns: floors) as a heat map with a dashed frame, which tells it from the other
    maps; return the values drawn."""
    values = table.to_numpy(dtype=float)
    ax.imshow(values, aspect="auto", interpolation="nearest", **image)
    ax.set_xticks(range(values.shape[1]), [str(floor) for floor in table.columns], fontsize=6.5)
    ax.grid(False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set(visible=True, linestyle=(0, (4, 2)), color=GREY, linewidth=0.8)
    return values
