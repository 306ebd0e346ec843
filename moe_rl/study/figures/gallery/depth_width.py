"""Changes of routes, and the variance that replay removes, against the number of layers, of experts and of experts per
token, with power laws; drawn where a study has three sizes along one of these axes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from moe_rl.settings import at
from moe_rl.study.data import StudyData, pooled_rate
from moe_rl.study.figures.register import Drawing, figure, runs_in
from moe_rl.study.figures.style import PAGE, NothingToDraw, legend_above, log_y, panels, plain
from moe_rl.study.folders import section
from moe_rl.study.statistics import seed_interval
from moe_rl.study.summary import last_updates

AXES = {"num_layers": "layers", "num_experts": "experts", "num_experts_per_tok": "experts per token, k"}
"""Field of `model.tiny` -> its name in the figure."""
QUANTITIES = {
    "slot_change": ("slots", "#D55E00", "o"),
    "site_change": ("sites", "#0B4A8F", "s"),
    "token_change": ("tokens", "#27B08B", "^"),
    "removed": ("variance that replay removes", "#7B3F98", "D"),
}
EQUAL_REWARD = (0.4, 0.6)
"""Range of the mean reward of the batches that count, so that sizes are compared at equal reward, not at equal
steps."""
FEWEST = 3
"""Fewest sizes that make a curve."""


@figure(
    title="Depth and width.",
    caption=(
        "Upper: share of slots, sites and tokens that changed after the last update of a step; lower: variance of the "
        "token log-ratio that replay of the old routes removes (natural - replayed), nats²; log axes, where 0 and "
        "values below it have no place: they are in neither means nor fits. "
        f"Only steps whose batch has a mean reward from {EQUAL_REWARD[0]} to {EQUAL_REWARD[1]}, the same for "
        "all sizes. Lines: power laws, fitted on logarithms by seed; exponents with their interval over seeds. What is "
        "not on the axis is held at the value that most arms have. Large: geometric mean over seeds; small: seeds."
    ),
    needs={"probes": ["slots_changed", "slots", "var_token_natural", "var_token_replayed"], "rollouts": ["reward"]},
    rank=26,
    special=True,
)
def depth_width(data: StudyData) -> Drawing:
    rows, left_out = size_rows(data)
    axes_there = varied(rows)
    if not axes_there:
        why = f"; without a step at rewards from {EQUAL_REWARD[0]} to {EQUAL_REWARD[1]}: {', '.join(left_out)}"
        raise NothingToDraw(
            f"depth_width: no {FEWEST} sizes along layers, experts or experts per token{why if left_out else ''}"
        )
    drawn, axes = panels(2, len(axes_there), 4.4, PAGE, sharex="col", sharey="row")
    parts, fits = [], power_laws(rows)
    for fit in fits:
        axis, name = fit["axis"], fit["quantity"]
        part, row = axes_there[axis], 0 if name.endswith("change") else 1
        shown = part[part[name] > 0]
        _draw(axes[row, list(axes_there).index(axis)], shown, fit, scale=1 if row else 100)
        means = shown.groupby(axis)[name].agg([_geometric, "mean", "count"]).reset_index()
        means = means.rename(columns={_geometric.__name__: "geometric_mean"})
        parts.append(means.rename(columns={axis: "size"}).assign(axis=axis, quantity=name))
    for column, (axis, part) in enumerate(axes_there.items()):
        axes[1, column].set_xlabel(AXES[axis])
        sizes = sorted(part[axis].unique())
        axes[1, column].set_xscale("log")
        axes[1, column].set_xticks(sizes)
        axes[1, column].xaxis.set_major_formatter(FuncFormatter(plain))
        axes[1, column].xaxis.set_minor_locator(NullLocator())
    for row, text in enumerate(("changed, %", "variance removed, nats²")):
        axes[row, 0].set_ylabel(text)
        log_y(axes[row, 0])
    legend_above(drawn, axes)
    said = [f"Exponents: {'; '.join(_words(fit) for fit in fits)}."] if fits else []
    said += [f"Left out, without a step at that reward: {', '.join(left_out)}."] if left_out else []
    frame = pd.concat(parts, ignore_index=True) if parts else rows
    tables, runs = {"fits": pd.DataFrame(fits), "by_seed": rows}, runs_in(pd.concat(axes_there.values()))
    return Drawing(drawn, frame, " ".join(said), tables=tables, runs=runs)


def size_rows(data: StudyData) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one row per run at equal reward, and the runs, as ARM/seedN, that have no step at that
    reward.

    Columns: the run's sizes (the fields of AXES), rates pooled over steps, `independent_sites` (how many independent
    sites with this site rate would give the token rate), `removed` (mean over steps, nats²)."""
    sizes = {run.arm: {axis: _tiny(run.config).get(axis) for axis in AXES} for run in data.runs}
    low, high = EQUAL_REWARD
    rewards = data.rollouts.groupby(["arm", "seed", "step"])["reward"].mean()
    equal = rewards[(rewards >= low) & (rewards <= high)].index
    probes = last_updates(data.probes).set_index(["arm", "seed", "step"])
    kept = probes[probes.index.isin(equal)].reset_index()
    rates = {
        f"{unit}_change": pooled_rate(kept, f"{unit}s_changed", f"{unit}s", ["arm", "seed"])
        for unit in ("slot", "site", "token")
        if {f"{unit}s_changed", f"{unit}s"} <= set(kept)
    }
    found = []
    for (arm, seed), part in kept.groupby(["arm", "seed"], sort=False):
        row: dict[str, Any] = {"arm": arm, "seed": seed, **sizes.get(str(arm), {}), "steps": part["step"].nunique()}
        row |= {name: rate.get((arm, seed)) for name, rate in rates.items()}
        if row.get("site_change", 0) > 0 and row.get("token_change", 1) < 1:
            # 1 - token change = (1 - site change) ^ independent sites
            row["independent_sites"] = np.log1p(-row["token_change"]) / np.log1p(-row["site_change"])
        row["removed"] = float((part["var_token_natural"] - part["var_token_replayed"]).mean())
        found.append(row)
    there = {(row["arm"], row["seed"]) for row in found}
    every = probes.reset_index()[["arm", "seed"]].drop_duplicates().itertuples(index=False)
    missing = [f"{arm}/seed{seed}" for arm, seed in every if (arm, seed) not in there]
    columns = ["arm", "seed", *AXES, "steps", *QUANTITIES, "independent_sites"]
    return pd.DataFrame(found, columns=columns).dropna(subset=list(AXES)), missing


def along(rows: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Return the runs that differ along one axis: those that have, on the other axes, the value that most arms have."""
    arms = rows.drop_duplicates("arm")
    for other in AXES:
        if other != axis and len(arms):
            rows = rows[rows[other] == Counter(arms[other]).most_common(1)[0][0]]
    return rows


def varied(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the axes along which there are at least `FEWEST` sizes, with their runs."""
    return {axis: part for axis in AXES if len(part := along(rows, axis)) and part[axis].nunique() >= FEWEST}


def power_laws(rows: pd.DataFrame, quantities: Iterable[str] = tuple(QUANTITIES)) -> list[dict[str, Any]]:
    """Return `power_law` of every quantity along every axis with enough sizes: `axis`, `quantity` and its fields."""
    names = list(quantities)
    found = ((axis, name, power_law(part, axis, name)) for axis, part in varied(rows).items() for name in names)
    return [{"axis": axis, "quantity": name, **fit} for axis, name, fit in found if fit is not None]


def power_law(rows: pd.DataFrame, axis: str, quantity: str) -> dict[str, float | int] | None:
    """Return the fit of quantity = a size^b, by least squares on logarithms for each seed with two sizes or more:
    `exponent` (mean over seeds) with `low` and `high`, `level` (geometric mean of a), `seeds`. None if no seed has two
    sizes with a quantity above 0."""
    exponents, levels = [], []
    for _, part in rows[rows[quantity] > 0].groupby("seed"):
        if part[axis].nunique() >= 2:
            slope, level = np.polyfit(np.log(part[axis].to_numpy(float)), np.log(part[quantity].to_numpy(float)), 1)
            exponents.append(slope)
            levels.append(level)
    if not exponents:
        return None
    found = seed_interval(np.array(exponents)).columns("exponent")
    return {**found, "level": float(np.exp(np.mean(levels))), "seeds": len(exponents)}


def _draw(ax: Axes, shown: pd.DataFrame, fit: Mapping[str, Any], scale: int) -> None:
    """Draw one quantity along one axis: its runs, their geometric means and the fitted power law."""
    axis, name = fit["axis"], fit["quantity"]
    label, colour, marker = QUANTITIES[name]
    ax.plot(shown[axis], scale * shown[name], marker, color=colour, ms=2.4, alpha=0.45, mew=0, ls="")
    means = shown.groupby(axis)[name].agg(_geometric)  # geometric, because the fit is of logarithms
    ax.plot(means.index, scale * means, marker, color=colour, mec="white", ms=5.5, ls="", label=label)
    x = np.array([means.index.min(), means.index.max()], float)
    ax.plot(x, scale * fit["level"] * x ** fit["exponent"], color=colour, lw=0.9, ls=(0, (4, 2)))


def _geometric(values: "pd.Series[float]") -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(values).mean()))


def _words(fit: Mapping[str, Any]) -> str:
    """Return a fitted power law in words."""
    interval = f" [{fit['low']:.2g}, {fit['high']:.2g}]" if np.isfinite(fit["low"]) else ""
    return f"{QUANTITIES[fit['quantity']][0]} ~ {AXES[fit['axis']]}^{fit['exponent']:.2g}{interval}".replace("-", "−")


def _tiny(config: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny policy's sizes; empty for a model that was loaded."""
    return {} if at(config, "model", "path") else section(config, "model", "tiny")
