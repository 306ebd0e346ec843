"""Slots that engines of several precisions re-route at equal weights, by step, and the share of routing in their
gap."""

import numpy as np
import pandas as pd

from moe_rl.settings import at
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.figures.curves import draw_seeds, seed_tables, summarise
from moe_rl.study.figures.register import Drawing, figure, runs_in
from moe_rl.study.figures.style import PAGE, Look, NothingToDraw, legend_above, legend_label, log_y, panels, step_axis
from moe_rl.study.folders import section
from moe_rl.study.statistics import seed_interval

FORMATS: dict[str, Look] = {
    "float32": Look("#4D4D4D", (0, (2, 2)), "*"),
    "float16": Look("#27B08B", (0, (5, 1.4, 1.2, 1.4)), "^"),
    "bfloat16": Look("#D55E00", "-", "o"),
    "fp8": Look("#0B4A8F", (0, (5, 1.6)), "s"),
    "int4": Look("#CC79A7", (0, (6, 2, 1, 2, 1, 2)), "D"),
    "mxfp4": Look("#7A5195", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "v"),
}
"""One look per format of the engine; lines are dotted if training too uses a dtype other than float32 or rounded
weights."""
PANELS = {
    "slot_change": ("slots changed, %", 100),
    "k3": ("k3, nats per token", 1),
    "routing_share": ("routing share of\nthe mean gap, %", 100),
}
"""Quantities that are drawn: label, and factor."""


@figure(
    title="Engine precision.",
    caption=(
        "The engine that sampled against the training engine's old policy at equal weights, before the first update of "
        "each step. Upper: share of expert slots that differ; middle: k3 of their log-probabilities (geometric mean); "
        "log axes, where 0 has no place. Lower: what forcing the engine's routes on the training engine removes of the "
        "mean |d log p|; below 0, forcing widens it. fp8, int4 and mxfp4 weights are emulated, products in bf16. "
        "Dotted: training, too, computes in 16 bits or through rounded weights."
    ),
    needs={"engines": ["slots_changed", "slots", "k3", "gap_mean", "pair"]},
    rank=28,
    special=True,
)
def precision(data: StudyData) -> Drawing:
    formats = {run.arm: engine_format(run.config) for run in data.runs}
    if len({name for name, _ in formats.values() if name}) < 3:
        raise NothingToDraw("precision: fewer than three formats of a rollout engine among the arms")
    rows = precision_rows(data)
    drawn, axes = panels(len(PANELS), 1, 5.6, PAGE, sharex=True, squeeze=True)
    parts = []
    arms = [str(arm) for arm in data.arms.index if formats.get(str(arm), ("", False))[0]]
    for arm in arms:
        name, both = formats[arm]
        look = FORMATS.get(name, Look("#6b6b6b", "-", "o"))
        look = Look(look.colour, (0, (1, 1.2)), look.marker) if both else look
        for ax, (column, (_, scale)) in zip(axes, PANELS.items(), strict=True):
            shown = rows[rows["arm"] == arm].dropna(subset=[column])
            geometric = column == "k3"
            shown = shown[shown[column] > 0] if geometric else shown
            if shown.empty:
                continue
            (table,) = seed_tables(shown, "step", column).values()
            label = legend_label(str(data.arms.loc[arm, "label"]))
            draw_seeds(ax, table, look, label, thin=False, scale=scale, geometric=geometric)
            parts.append(summarise(table, geometric=geometric, arm=arm, quantity=column))
    for ax, (label, _) in zip(axes, PANELS.values(), strict=True):
        ax.set_ylabel(label)
    for ax in axes[:2]:
        log_y(ax)
    step_axis(axes[-1])
    legend_above(drawn, axes)
    ratio = flip_ratio(data, formats)
    said = "" if ratio is None else f"fp16 changes {ratio} of the slots that bf16 changes, mean over seeds."
    frame = pd.concat(parts, ignore_index=True) if parts else rows
    runs = runs_in(rows[rows["arm"].isin(arms)])
    return Drawing(drawn, frame, said, interval="band", tables={"by_seed": rows}, runs=runs)


def precision_rows(data: StudyData) -> pd.DataFrame:
    """Return by arm, seed and step: `slot_change` with `slots_changed` and `slots`, `k3`, `gap_mean` (nats) of live
    routing, and `routing_share` = 1 - gap_mean under the engine's routes / gap_mean; NaN where there is no gap."""
    keys = ["arm", "seed", "step"]
    live = data.engines[data.engines["pair"] == "engines"].set_index(keys)
    forced = data.engines[data.engines["pair"] == "engines_replayed"].set_index(keys)["gap_mean"]
    table = live[["slots_changed", "slots", "k3", "gap_mean"]].astype(float)
    table["slot_change"] = table["slots_changed"] / table["slots"].where(table["slots"] > 0)
    gap = table["gap_mean"].where(table["gap_mean"] > 0)
    table["routing_share"] = 1 - forced.reindex(table.index).astype(float) / gap
    return table.reset_index()


def precision_table(data: StudyData) -> pd.DataFrame:
    """Return by arm and seed, over all steps: `slot_change` (pooled), `k3` (geometric mean), `routing_share` (mean);
    and from the first five steps to the last: `k3_growth`, ratio of geometric means, `share_growth`, difference of
    means."""
    found = []
    for (arm, seed), part in precision_rows(data).groupby(["arm", "seed"], sort=False):
        steps = part.sort_values("step")
        log_k3, share = np.log(steps["k3"].where(steps["k3"] > 0)), steps["routing_share"]
        found.append(
            {
                "arm": arm,
                "seed": seed,
                "slot_change": part["slots_changed"].sum() / part["slots"].sum(),
                "k3": np.exp(log_k3.mean()),
                "routing_share": share.mean(),
                "k3_growth": np.exp(log_k3.tail(5).mean() - log_k3.head(5).mean()),
                "share_growth": share.tail(5).mean() - share.head(5).mean(),
            }
        )
    return pd.DataFrame(found)


def flip_ratio(data: StudyData, formats: dict[str, tuple[str, bool]]) -> str | None:
    """Return the slots that fp16 changes over those that bf16 changes, by seed over all steps: mean and interval in
    words; None if one of the two engines is missing."""
    rows = precision_rows(data)
    rates = {}
    for name in ("float16", "bfloat16"):
        arms = [arm for arm, (own, both) in formats.items() if own == name and not both]
        rates[name] = pooled_rate(rows[rows["arm"].isin(arms)], "slots_changed", "slots", "seed")
    ratios = (rates["float16"] / rates["bfloat16"]).replace([np.inf, -np.inf], np.nan).dropna()
    if ratios.empty:
        return None
    return seed_interval(ratios.to_numpy(dtype=float)).text(".2g")


def engine_format(config: dict) -> tuple[str, bool]:
    """Return the format of a run's rollout engine (that of its weights if these are rounded), and whether training too
    uses a dtype other than float32 or rounded weights. The format is empty unless a copy of the model samples (`hf`)
    whose routers are not rounded."""
    engine = section(config, "rollout", "engine")
    if engine.get("kind") != "hf" or engine.get("router_format"):
        return "", False
    both = section(config, "model").get("dtype", "float32") != "float32" or bool(at(config, "optim", "weight_format"))
    return str(engine.get("weight_format") or engine.get("dtype") or ""), both
