"""The sites of the model at which experts change: heat maps of routing site and update or, of many arms, of arm and
site."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_columns
from moe_rl.study.figures.layout import MANY, drawn_arms, fixed_figure, many, short_label, shown, wrapped_panels
from moe_rl.study.figures.register import PROBE, Drawing, figure
from moe_rl.study.figures.routing import short_sites, site_ticks, stacked
from moe_rl.study.figures.rows import in_two_lines
from moe_rl.study.figures.screen import ON_DARK_CELL, ON_LIGHT_CELL
from moe_rl.study.figures.style import GREY, PAGE, NothingToDraw, bare, label_bar
from moe_rl.study.floors import MISSING, floor_by_site
from moe_rl.study.summary import last_updates

DASHED = (
    "Framed: noise floor, what the same routers change with equal weights before the first update, in their own "
    "arithmetic (the largest of repeated, other batch shapes, other experts implementation) and in a bf16 copy. "
)


@figure(
    title="Expert change by routing site and update.",
    caption="Expert slots replaced, in %, by routing site and by update index, pooled over all steps and seeds.",
    needs={"probes": ["site_slots_changed", "site_slots", "site_names"]},
    rank=70,
    notes=(PROBE,),
)
def expert_change_by_site(data: StudyData) -> Drawing:
    rows = data.probes.dropna(subset=["site_slots_changed", "site_slots", "site_names"])
    rows = rows[rows["site_names"].map(len) > 0]
    if rows.empty:
        raise NothingToDraw("expert_change_by_site: the runs name no routing site (site_names is empty)")
    names = max((list(each) for each in rows["site_names"]), key=len)  # an arm of fewer layers has only some of these
    pooled = _pooled(rows)
    if not pooled["site_slots"].any():
        raise NothingToDraw("expert_change_by_site: site_slots is 0 at every site")
    floor = floor_by_site(data, names)
    arms = drawn_arms(data, list(pooled["arm"].unique()))
    by_arm = many(data) or len(arms) > 2 * MANY
    short, common = short_sites(names)
    drawn = (_by_arm if by_arm else _by_update)(data, pooled, floor, arms, short)
    parts = [
        pd.DataFrame({"arm": f"floor, {name}", "site": floor.index, "rate": floor[name]}).assign(
            site_name=[names[int(i)] for i in floor.index]
        )
        for name in floor
    ]
    missing = DASHED if len(floor) else MISSING.format("by site")
    last = "After the last update of a step; every update is in the table. " if by_arm else ""
    said = f"Sites: {common}, from shallow to deep. {last}{missing}".strip()
    return Drawing(drawn, pd.concat([pooled, *parts]), said)


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sums of changes and slots by arm, site and update, and their rate; an entry with a null in either counts
    as 0 of 0."""
    found = []
    for (arm, update), part in rows.groupby(["arm", "update"], observed=True, sort=False):
        lists = [stacked(part[name], "expert_change_by_site") for name in ("site_slots_changed", "site_slots")]
        known = np.isfinite(lists).all(axis=0)
        changed, total = (np.where(known, counts, 0).sum(axis=0) for counts in lists)
        rate = np.divide(changed, total, out=np.full(len(total), np.nan), where=total > 0)
        found.append(
            pd.DataFrame({"arm": arm, "site": range(len(total)), "update": update, "site_slots_changed": changed,
                          "site_slots": total, "rate": rate, "site_name": part["site_names"].iloc[0]})
        )  # fmt: skip
    return pd.concat(found, ignore_index=True)


def _by_update(data: StudyData, pooled: pd.DataFrame, floor: pd.DataFrame, arms: list[str], short: list[str]) -> Figure:
    """Draw a panel per arm: sites down, updates across."""
    top = 100 * max(pooled["rate"].max(), floor.max(axis=None) if len(floor) else 0.0) or 1.0
    image = {"cmap": "Blues", "vmin": 0, "vmax": top}
    count = len(arms) + bool(len(floor))
    drawn, lines = wrapped_panels(count, 4, 0.6, float(np.clip(0.2 * len(short) + 0.5, 1.2, 3.5)), sharey=True)
    axes = lines.flatten()
    for ax, arm in zip(axes, arms, strict=False):
        grid = 100 * pooled[pooled["arm"] == arm].pivot(index="site", columns="update", values="rate")
        grid = grid.reindex(range(len(short)))
        mesh = ax.imshow(grid.to_numpy(dtype=float), aspect="auto", interpolation="nearest", **image)
        _write_cells(ax, grid.to_numpy(dtype=float), top)
        ax.set_title(short_label(data, arm, 16), fontsize=7)
        ax.set_xticks(range(len(grid.columns)), [str(u) for u in grid.columns])
        ax.set_xlabel("update")
        bare(ax)
    if len(floor):
        _write_cells(axes[count - 1], draw_columns(axes[count - 1], 100 * floor, **image), top)
        axes[count - 1].set_title("Noise floor:\nequal weights", fontsize=7)
    for ax in lines[:, 0]:
        site_ticks(ax.yaxis, short)
        ax.set_ylabel("routing site")
    bar = drawn.colorbar(mesh, ax=axes[:count].tolist(), shrink=0.9, aspect=22)
    label_bar(bar, "slots changed, %", 0.9 * (drawn.get_figheight() - 0.8))
    return drawn


def _by_arm(data: StudyData, pooled: pd.DataFrame, floor: pd.DataFrame, arms: list[str], short: list[str]) -> Figure:
    """Draw one map of all arms: arms down, sites across, after the last update."""
    last = last_updates(pooled)
    grid = 100 * last.pivot(index="arm", columns="site", values="rate").loc[arms]
    labels = [*(in_two_lines(short_label(data, arm, 999)) for arm in arms), *(f"noise floor, {name}" for name in floor)]
    two = any("\n" in label for label in labels)
    high = (0.23 if two else 0.17) * (len(arms) + len(floor.columns))
    longest = max(len(line) for label in labels for line in label.split("\n"))
    left, foot, head = min(2.2, 0.2 + 0.053 * longest), 0.55, 0.12
    total = high + foot + head
    drawn = fixed_figure(total)
    ax = drawn.add_axes((left / PAGE, foot / total, (PAGE - left - 0.75) / PAGE, high / total))
    values = grid.to_numpy(dtype=float)
    values = np.vstack([values, *(100 * floor[name].reindex(grid.columns).to_numpy()[None] for name in floor)])
    top = float(np.nanmax(values)) or 1.0
    mesh = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=top)
    _write_cells(ax, values, top, most=12 * len(values))
    ax.set_yticks(range(len(values)), labels, fontsize=6 if two else 7, linespacing=0.95)
    site_ticks(ax.xaxis, short)
    ax.set_xlabel("routing site, after the last update", labelpad=1)
    bare(ax)
    ends = np.cumsum([len([a for a in one.arms if a in set(arms)]) for one in shown(data)])[:-1]
    for end in ends:
        ax.axhline(end - 0.5, color=GREY, lw=1)
    beside = drawn.add_axes(((PAGE - 0.62) / PAGE, foot / total, 0.09 / PAGE, min(2.5, high) / total))
    label_bar(drawn.colorbar(mesh, cax=beside), "slots changed, %", min(2.5, high))
    beside.tick_params(labelsize=6.5)
    return drawn


def _write_cells(ax: Axes, values: np.ndarray, top: float, most: int = 48) -> None:
    """Write the numbers into the cells of a heat map, if it has at most `most` cells."""
    if values.size <= most:
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = ON_DARK_CELL if value > 0.6 * top else ON_LIGHT_CELL
                ax.text(j, i, cell_number(value), ha="center", va="center", fontsize=6.5, color=ink)


def cell_number(value: float) -> str:
    """Return a rate, in %, in at most four letters, so that neighbours do not touch.

    >>> [cell_number(value) for value in (0.0, 0.001, 0.0623, 0.5, 8.24, 41.6, 100.0)]
    ['0', '<.01', '0.06', '0.5', '8.2', '42', '100']
    """
    if 0 < value < 0.005:
        return "<.01"
    return f"{value:.0f}" if value >= 10 else f"{round(value, 2):.2g}"
