"""The cosine of the gradients under replay and under live routing, beside that of two halves of the responses."""

from typing import Any

import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curve_frame, curves, over_seeds, seed_tables
from moe_rl.study.figures.register import LINES, PROBE, Drawing, figure
from moe_rl.study.figures.style import PALE

BESIDE = {
    "router_gradient_cosine": ("routers alone", (0, (5, 2))),
    "gradient_halves_cosine": ("two halves of the responses", (0, (1, 2))),
}
"""Cosines drawn beside that of the gradients: words of the legend, and dash."""
COSINES = ("gradient_cosine", *BESIDE)


@figure(
    title="Gradient bias of replay.",
    caption=(
        "Cosine of the gradients of the arm's loss under live and under the old policy's routes, same weights and "
        "responses, after each update; median over the probes of a seed. Dashed: of the routers' parameters alone. "
        "Dotted: cosine of the live gradients of two halves of the same responses, which is what sampling alone does."
    ),
    needs={"probes": ["gradient_cosine", "gradient_halves_cosine", "update"]},
    rank=27,
    notes=(PROBE, LINES),
    special=True,
)
def gradient_bias(data: StudyData) -> Drawing:
    medians = gradient_table(data)
    tables = {name: seed_tables(medians, "update", name) for name in COSINES}
    low = min(0.0, float(medians[list(COSINES)].min().min()))
    drawn = curves(data, tables["gradient_cosine"], "cosine", "update", thin=False, ylim=(1.1 * low, 1.05), above=0.2)
    for ax, arms in drawn.panels:
        for arm in arms:
            for name, (said, dash) in BESIDE.items():
                if arm in tables[name]:
                    style: dict[str, Any] = {"color": PALE, "lw": 1.0, "ls": dash, "zorder": 1, "label": said}
                    ax.plot(tables[name][arm].index, over_seeds(tables[name][arm])[0], **style)
    drawn.legend()
    frames = [curve_frame(data, tables[name], name) for name in COSINES if tables[name]]
    return Drawing(drawn.figure, pd.concat(frames, ignore_index=True), interval="band")


def gradient_table(data: StudyData) -> pd.DataFrame:
    """Return medians over probes by arm, seed and update: cosines and norm ratios of gradients, and `layer_<name>`, the
    cosine of each layer."""
    rows = data.probes.dropna(subset=["gradient_cosine"])
    names = [*COSINES, "gradient_norm_ratio", "router_gradient_norm_ratio"]
    found = rows.reindex(columns=["arm", "seed", "update", *names])  # other trainers may write some of them
    found = found.reset_index(drop=True).astype(dict.fromkeys(names, float))
    if {"layer_names", "layer_gradient_cosine"} <= set(rows):  # not in runs of earlier versions
        pairs = zip(rows["layer_names"], rows["layer_gradient_cosine"], strict=True)
        layers = [
            {f"layer_{name}": x for name, x in zip(names, cosines, strict=True)}
            if isinstance(names, list) and isinstance(cosines, list)
            else {}
            for names, cosines in pairs
        ]
        found = found.join(pd.DataFrame(layers, dtype=float))
    return found.groupby(["arm", "seed", "update"], observed=True, sort=False).median().reset_index()
