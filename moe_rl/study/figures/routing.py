"""Figures of routing change: how much of the selection moves, where, and how it clusters on tokens."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import FLOOR_LINES, draw_columns, draw_levels, floor_note
from moe_rl.study.figures.style import (
    GREY,
    StudyFigure,
    arm_looks,
    arm_panels,
    arm_title,
    conditions,
    draw_seeds,
    legend_above,
    lines_note,
    log_y,
    look_of,
    need,
    noise_note,
    panel_arms,
    panels,
    panels_note,
    seeds_note,
    share_axes,
    styled,
    summarise,
)
from moe_rl.study.floors import MISSING, floor_by_site, floor_histogram
from moe_rl.study.summary import last_updates, noise_floor

GSPO_CHANGE = 0.10
"""GSPO (2507.18071) §5.3: "roughly 10% of the experts activated" per update; the denominator is not defined."""

PROBE = (
    "Probe: a fixed subset of each step's responses, routed live and without noise, old policy of the step "
    "against the weights after the update"
)
DEFINITIONS = {
    "slot": ("slots_changed", "slots", "slot: expert slots replaced / K·L·tokens"),
    "site": ("sites_changed", "sites", "site: (token, router) pairs whose set differs"),
    "token": ("tokens_changed", "tokens", "token: tokens with any site changed"),
}


@styled
def expert_change(data: StudyData) -> StudyFigure:
    """Change rate by update index within a step, under the three definitions."""
    rows = need(data.probes, ["slots_changed", "sites_changed", "tokens_changed"], "expert_change")
    shown = conditions(data)
    figure, axes = panels(len(shown), 3, 0.55 + 1.95 * len(shown), sharex=True, sharey="col")
    floor = noise_floor(data)
    parts = []
    for i, (row, condition) in enumerate(zip(axes, shown, strict=True)):
        for ax, (name, (changed, total, _)) in zip(row, DEFINITIONS.items(), strict=True):
            for arm, (look, label) in arm_looks(data, condition.arms).items():
                table = pooled_rate(rows[rows["arm"] == arm], changed, total, ["update"])
                if not table.empty:
                    draw_seeds(ax, 100 * table, look, label)
                    parts.append(summarise(table, definition=name, condition=condition.name, arm=arm))
            for variant, rate in floor[name].items():
                ax.axhline(100 * rate, **FLOOR_LINES[str(variant)])
                entry = {"definition": name, "condition": f"floor, {variant}", "mean": rate, "n": len(data.runs)}
                parts += [] if i else [pd.DataFrame([entry])]
            ax.set_title("" if i else f"per {name}")
            ax.set_ylim(0, None)
        row[0].set_ylabel(f"{condition.name}\nchanged, %")
    _draw_reference(axes[:, 0])
    for ax in axes[-1]:
        ax.set_xlabel("update within the step")
        ax.set_xticks(sorted(rows["update"].unique())[:: max(1, rows["update"].nunique() // 8)])
    legend_above(figure, axes)
    definitions = "; ".join(text for _, _, text in DEFINITIONS.values())
    caption = (
        f"{PROBE}; changes and totals pooled over all steps of a seed. Rates by definition – {definitions}. "
        "The three differ by up to a factor of K·L and must not be compared with one another. Reference: "
        "the GSPO paper (§5.3), given with the slot definition only, per update, as the most plausible "
        f"reading of “experts activated”. {floor_note(floor)}{lines_note(data)}{noise_note(data)} "
        f"{seeds_note(data)}"
    )
    title = "Expert change by update index."
    return StudyFigure("expert_change", title, caption, figure, pd.concat(parts))


@styled
def expert_change_by_site(data: StudyData) -> StudyFigure:
    """Heat map routing site x update index, slot definition, one panel per arm."""
    rows = need(data.probes, ["site_slots_changed", "site_slots", "site_names"], "expert_change_by_site")
    names = list(rows["site_names"].iloc[0])
    long = rows[["arm", "seed", "update", "site_slots_changed", "site_slots"]].copy()
    long["site"] = [range(len(names))] * len(long)
    long = long.explode(["site", "site_slots_changed", "site_slots"])
    pooled = long.groupby(["arm", "site", "update"], as_index=False)[["site_slots_changed", "site_slots"]].sum()
    pooled["rate"] = pooled["site_slots_changed"].astype(float) / pooled["site_slots"].astype(float)
    floor = floor_by_site(data, names)
    arms = [arm for arm in panel_arms(data) if (pooled["arm"] == arm).any()]
    lines = -(-len(arms) // 5)
    columns = -(-len(arms) // lines)
    height = 0.7 + lines * float(np.clip(0.28 * len(names) + 0.45, 1.2, 5 / lines))
    # the floor's panel has cells of the size of the others, within reason
    beside = [float(np.clip(len(floor.columns) / pooled["update"].nunique(), 0.25, 0.6))] if len(floor) else []
    figure, axes = panels(lines, columns + len(beside), height, sharey=True, width_ratios=[1.0] * columns + beside)
    top = 100 * max(pooled["rate"].max(), floor.max(axis=None) if len(floor) else 0.0) or 1.0
    image = {"cmap": "Blues", "vmin": 0, "vmax": top}
    for ax in (*axes[:, :columns].flat[len(arms) :], *(axes[1:, -1] if beside else ())):
        ax.axis("off")
    for ax, arm in zip(axes[:, :columns].flat, arms, strict=False):
        grid = 100 * pooled[pooled["arm"] == arm].pivot(index="site", columns="update", values="rate")
        drawn = ax.imshow(grid.to_numpy(dtype=float), aspect="auto", interpolation="nearest", **image)
        _write_cells(ax, grid.to_numpy(dtype=float), top)
        ax.set_title(arm_title(data, arm), fontsize=7.5)
        ax.set_xticks(range(len(grid.columns)), [str(u) for u in grid.columns])
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    if beside:
        ax = axes[0, -1]
        _write_cells(ax, draw_columns(ax, 100 * floor, **image), top)
        ax.set_title("Noise floor:\nequal weights", fontsize=7.5)
    short, common = short_sites(names)
    step = max(1, len(names) // 12)
    for ax in axes[:, 0]:
        ax.set_yticks(range(0, len(names), step), short[::step])
        ax.set_ylabel("routing site")
    for i in range(len(arms)):
        axes[i // columns, i % columns].set_xlabel("update" if i + columns >= len(arms) else "")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.9, aspect=18, pad=0.02, label="slots changed, %")
    bar.outline.set_visible(False)
    pooled["site_name"] = [names[i] for i in pooled["site"]]
    parts = [
        pd.DataFrame({"arm": f"floor, {name}", "site": floor.index, "rate": floor[name]}).assign(
            site_name=[names[int(i)] for i in floor.index]
        )
        for name in floor
    ]
    beside_note = (
        "Dashed: noise floor, what the same routers change with equal weights before the first update, in their own "
        "arithmetic (the largest of repeated, other batch shapes, other experts implementation) and in a bf16 copy. "
    )
    caption = (
        f"{PROBE}. Slots replaced, in %, by routing site ({common}, shallow to deep from the top) and by "
        f"update index, pooled over all steps and seeds. {beside_note if len(floor) else MISSING.format('by site')}"
        f"{panels_note(data).lstrip()} {seeds_note(data, interval=False)}"
    )
    title = "Expert change by routing site and update."
    return StudyFigure("expert_change_by_site", title, caption, figure, pd.concat([pooled, *parts]))


@styled
def flips_per_token(data: StudyData) -> StudyFigure:
    """How many sites change on one token, and how many slots at one site, against independence."""
    rows = need(data.probes, ["flips_histogram", "deviation_histogram"], "flips_per_token")
    rows = last_updates(rows)
    arms = [arm for arm in panel_arms(data) if (rows["arm"] == arm).any()]
    figure, axes = arm_panels(len(arms), 2, 1.65)
    floors = {name: floor_histogram(data, name) for name in ("flips_histogram", "deviation_histogram")}
    parts = [
        pd.DataFrame({"histogram": name, "arm": f"floor, {variant}", "value": table.index, "share": table[variant]})
        for name, table in floors.items()
        for variant in table
    ]
    for column, arm in zip(axes.T, arms, strict=True):
        of_arm = rows[rows["arm"] == arm]
        look = look_of(str(data.arms["method"][arm]))
        for ax, name in zip(column, ("flips_histogram", "deviation_histogram"), strict=True):
            counts = np.sum(of_arm[name].tolist(), axis=0).astype(float)
            expected = binomial_of(counts)
            x = np.arange(len(counts))
            observed = counts / counts.sum()
            ax.bar(x, observed, color=look.colour, width=0.72)
            ax.plot(x, expected, "o--", color="#1a1a1a", mfc="white", lw=0.9, ms=3.5, label="if independent")
            draw_levels(ax, floors[name][floors[name].index > 0])
            parts.append(
                pd.DataFrame({"histogram": name, "arm": arm, "value": x, "count": counts, "share": observed,
                              "binomial": expected})
            )  # fmt: skip
            ax.set_xticks(x[:: max(1, len(x) // 5)])
        spread = float(of_arm["overdispersion"].mean()) if "overdispersion" in of_arm else np.nan
        column[0].set_title(arm_title(data, arm), fontsize=7.5)
        where = {"transform": column[0].transAxes, "ha": "right", "va": "top", "fontsize": 7}
        if np.isfinite(spread):
            column[0].text(0.96, 0.96, f"variance ×{spread:.2g}", **where)
    frame = pd.concat(parts)
    words = (("routing sites changed on a token", "share of tokens"), ("slots changed at a site", "share of sites"))
    for row, name, (below, beside) in zip(axes, ("flips_histogram", "deviation_histogram"), words, strict=True):
        seen = frame[(frame["histogram"] == name) & (frame["count"] > 0)]["share"]
        for ax in row:
            ax.set_ylim(float(seen.min()) / 3, 1.5)
            log_y(ax)
        share_axes(row, below, beside)
    legend_above(figure, axes, [Patch(color=GREY, label="observed")])
    floor = floor_note(noise_floor(data), "Dashes: noise floor" if len(floors["flips_histogram"]) else "Noise floor")
    caption = (
        f"{PROBE}, last update of each step, pooled over steps and seeds; log axis. Top: routing sites that "
        "changed on one token; bottom: slots replaced at one site. Circles: the binomial with the same "
        "mean, which independent flips would follow. “variance ×”: variance of flips per token over that "
        "of the binomial, mean over probes; above 1, flips cluster on tokens. "
        f"{floor or MISSING.format('of flips')}{panels_note(data).lstrip()} {seeds_note(data, interval=False)}"
    )
    title = "Flips per token and slots per site."
    return StudyFigure("flips_per_token", title, caption, figure, frame)


def _write_cells(ax: Axes, values: np.ndarray, top: float) -> None:
    """The numbers, where cells are large enough to hold them."""
    if values.size <= 48:
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if value > 0.6 * top else "#1a1a1a"
                ax.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=6.5, color=ink)


def _draw_reference(column: np.ndarray) -> None:
    """The GSPO paper's value, where the axis can show it without flattening the data."""
    ax, text = column[0], "GSPO paper: “roughly 10 %”,\ndenominator not defined"
    look = {"fontsize": 6.5, "color": GREY}
    top = ax.get_ylim()[1]
    head = {"transform": ax.transAxes, "ha": "left", "va": "top", **look}
    if top < 30 * GSPO_CHANGE:
        ax.set_ylim(0, 1.25 * top)  # headroom: the corners below belong to the data and to the noise floor
        ax.text(0.03, 0.98, f"{text} (above this axis)", **head)
        return
    ax.set_ylim(0, max(top, 115 * GSPO_CHANGE))
    for each in column:
        each.axhline(100 * GSPO_CHANGE, color=GREY, lw=1, ls=(0, (1, 2)))
    if top < 75 * GSPO_CHANGE:  # room under the dotted line; else the data rise through it: headroom
        ax.text(0.03, 98 * GSPO_CHANGE, text, transform=ax.get_yaxis_transform(), ha="left", va="top", **look)
    else:
        ax.set_ylim(0, 1.25 * ax.get_ylim()[1])
        ax.text(0.03, 0.98, f"dotted: {text}", **head)


def pooled_rate(rows: pd.DataFrame, changed: str, total: str, by: list[str]) -> pd.DataFrame:
    """Rate = summed changes / summed totals, index `by`, one column per seed."""
    sums = rows.groupby([*by, "seed"])[[changed, total]].sum()
    return (sums[changed] / sums[total]).unstack("seed")


def binomial_of(counts: np.ndarray) -> np.ndarray:
    """Binomial(N, p) with N = len(counts) - 1 trials and the mean of the counted values."""
    from scipy import stats

    trials = len(counts) - 1
    mean = float(np.average(np.arange(trials + 1), weights=counts))
    return np.asarray(stats.binom.pmf(np.arange(trials + 1), trials, mean / trials))


def short_sites(names: list[str]) -> tuple[list[str], str]:
    """Site names without what they share, and the shared pattern: layers.0.gate, layers.1.gate -> 0, 1.

    >>> short_sites(["layers.0.gate", "layers.1.gate"])
    (['0', '1'], 'layers.·.gate')
    """
    if len(names) < 2:
        return names, names[0] if names else ""
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    front = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    back = next((i for i in range(shortest - front) if len({p[-1 - i] for p in parts}) > 1), 0)
    short = [".".join(p[front : len(p) - back]) for p in parts]
    return short, ".".join([*parts[0][:front], "·", *parts[0][len(parts[0]) - back :]])


__all__ = ["GSPO_CHANGE", "expert_change", "expert_change_by_site", "flips_per_token"]
