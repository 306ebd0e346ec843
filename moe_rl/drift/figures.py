"""Figures of `moe-rl drift`: routing changes between two checkpoints on one text, and the parts of their log-ratio.

Changes are drawn beside the noise floor at equal weights; log-ratios by part and level, by site, and by their tails.
Each function takes tables and a note that ends the caption."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from moe_rl.study.figures.floor import draw_along, draw_levels
from moe_rl.study.figures.routing import binomial_of, short_sites, site_ticks
from moe_rl.study.figures.saving import StudyFigure, styled
from moe_rl.study.figures.style import GREY, label_bar, legend_above, log_y, panels, plain
from moe_rl.study.floors import floor_rates

# Lightness (L* 53, 30, 66) and markers differ, so that the lines can be told apart in grey.
LOOKS: dict[str, dict[str, Any]] = {
    "natural": {"color": "#D55E00", "ls": "-", "marker": "o", "label": "natural: what the ratio sees"},
    "replayed": {"color": "#0B4A8F", "ls": (0, (5, 1.6)), "marker": "s", "label": "replayed: weights alone"},
    "routing": {"color": "#27B08B", "ls": (0, (5, 1.4, 1.2, 1.4)), "marker": "^", "label": "routes alone"},
}
PARTS = {"weight": "#0B4A8F", "routing": "#27B08B", "interaction": "#B0B0B0"}
FEWEST = 30
"""Fewest tokens or choices of a bin that is drawn."""


@styled
def change_by_site(sites: pd.DataFrame, floor: pd.DataFrame, note: str) -> StudyFigure:
    """Draw slot and site change with their noise floor, moved load, and margins along the depth of the model."""
    figure, axes = panels(1, 3, 2.5, sharex=True)
    x, common = range(len(sites)), _depth_axis(axes[0], sites)
    left, middle, right = axes[0]
    left.plot(
        x, 100 * sites["site_change"], color="#0B4A8F", marker="s", ls=(0, (5, 1.6)), label="site: the set differs"
    )
    left.plot(x, 100 * sites["slot_change"], color="#D55E00", marker="o", label="slot: experts replaced")
    for of, marker in (("token", "s"), ("slot", "o")):
        rates = 100 * floor_rates(floor, "site", f"{of}s_changed", f"{of}s").reindex(sites["site"])
        draw_along(left, rates.set_axis(x), marker=marker, ms=2.2, mfc="white")
    left.set(ylabel="changed, %", title="Expert change")
    middle.plot(x, 100 * sites["load_moved"], color="#1a1a1a", marker="D", lw=1.2)
    middle.set(ylabel="moved to other experts, %", title="Expert load")
    if sites["margin_median"].notna().any():
        right.plot(x, sites["margin_median"], color="#1a1a1a", marker="v", lw=1.2)
        if sites["margin_median"].max() > 5 * sites["margin_median"].min() > 0:
            log_y(right)
        else:
            _from_zero(right)
    right.set(ylabel="median margin (score units)", title="Margin of the old choice")
    for ax in (left, middle):
        _from_zero(ax)
    legend_above(figure, axes[:, 0])
    dashed = "Dashed, small markers: the noise floor of each (squares: site, circles: slot). "
    caption = (
        f"By routing site ({common}, shallow to deep). Left: tokens whose set of experts differs (site), and share of "
        f"the K slots replaced (slot); the two differ by a factor of up to K. "
        f"{dashed if len(floor) else ''}Middle: half the sum of absolute changes "
        "of the experts' shares of the load. Right: gap between the last expert chosen and the first that was not, "
        f"under the old weights, in the units of the scores that the router ranks. {note}"
    )
    columns = ["site", "tokens", "site_change", "slot_change", "load_moved", "margin_median"]
    frame = pd.concat([sites[columns], floor.assign(slot_change=floor["slots_changed"] / floor["slots"])])
    return StudyFigure("change_by_site", "Routing change by site.", caption, figure, frame)


@styled
def change_by_position(positions: pd.DataFrame, floor: pd.DataFrame, note: str) -> StudyFigure:
    """Draw change rates and their noise floor by position in the measured text, in bins that widen."""
    binned = _widening(positions)
    equal = [_widening(part).assign(variant=variant) for variant, part in floor.groupby("variant", sort=False)]
    for name, total in (("slot", "slots"), ("site", "sites"), ("token", "tokens")):
        binned[f"{name}_change"] = binned[f"{name}s_changed"] / binned[total]
    figure, axes = panels(1, 3, 2.3, sharex=True)
    middle = (binned["first"] + binned["last"]) / 2 + 1
    decades = binned["last"].max() >= 10 * middle.min()
    for ax, name in zip(axes[0], ("slot", "site", "token"), strict=True):
        ax.plot(middle, 100 * binned[f"{name}_change"], color="#D55E00", marker="o", ms=3, label="between the two")
        if equal:
            rows = pd.concat(equal)
            rows["middle"] = (rows["first"] + rows["last"]) / 2 + 1
            draw_along(ax, 100 * floor_rates(rows, "middle", f"{name}s_changed", f"{name}s"))
        ax.set(title=f"per {name}", xlabel="position in the measured text")
        if decades:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(plain))
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_xlim(0, binned["last"].max() + 2)
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _from_zero(ax)
    axes[0, 0].set_ylabel("changed, %")
    if equal:
        legend_above(figure, axes[:, 0])
    caption = (
        "Change by position, counted from the first measured token (1), in bins that widen with the position, none of "
        f"fewer than {FEWEST} tokens unless the text has fewer. Slot: experts replaced; site: (token, router) pairs "
        f"whose set differs; token: tokens with any site changed. "
        f"{'Dashed: the noise floor at these positions. ' if equal else ''}{note}"
    )
    frame = pd.concat([binned, *equal])
    return StudyFigure("change_by_position", "Routing change by position.", caption, figure, frame)


def _widening(positions: pd.DataFrame) -> pd.DataFrame:
    """Sum a table over bins of positions, with the `first` and `last` position of each bin.

    The first 8 positions are bins of their own, later bins are wider and wider; each is joined with the next ones until
    it holds `FEWEST` tokens."""
    edges = np.unique(np.concatenate([np.arange(0, 8), np.geomspace(8, 1e7, 60).astype(int)]))
    place = np.searchsorted(edges, positions["position"], side="right")
    totals = np.bincount(place, positions["tokens"])
    bins, number, filled = np.zeros(len(totals), int), 0, 0
    for edge, tokens in enumerate(totals):
        bins[edge] = number
        filled += tokens
        if filled >= FEWEST:
            number, filled = number + 1, 0
    bins = np.minimum(bins, max(number - 1, 0))  # a last bin with too few tokens joins the one before
    binned = positions.groupby(bins[place]).agg(
        first=("position", "min"),
        last=("position", "max"),
        **{name: (name, "sum") for name in positions.columns if name not in ("position", "variant")},
    )
    return binned[binned["tokens"] > 0].reset_index(drop=True)


@styled
def flips(
    counts: np.ndarray, deviation: np.ndarray, overdispersion: float, floor: Mapping[str, pd.DataFrame], note: str
) -> StudyFigure:
    """Draw histograms of sites changed per token and of slots changed per site, with the binomial and the noise floor.

    counts, deviation: how many tokens have 0..L sites changed, and how many (token, site) pairs 0..K slots. floor: the
    tables `flips` and `deviation`, one column per floor."""
    figure, axes = panels(1, 2, 2.5)
    parts = []
    for ax, kind, values, x_label, unit in (
        (axes[0, 0], "flips", counts, "routing sites changed on a token", "tokens"),
        (axes[0, 1], "deviation", deviation, "slots changed at a site", "(token, site) pairs"),
    ):
        x, observed = np.arange(len(values)), values / values.sum()
        expected = binomial_of(values.astype(float)) if values[1:].sum() else np.eye(len(values))[0]
        ax.bar(x, observed, color="#D55E00", width=0.72, label="observed")
        ax.plot(x, expected, "o--", color="#1a1a1a", mfc="white", lw=0.9, ms=3.5, label="if independent")
        equal = floor[kind]
        draw_levels(ax, equal[equal.index > 0])
        log_y(ax)
        ax.set_ylim(observed[observed > 0].min() / 3, 1.5)
        ax.set(xlabel=x_label, ylabel=f"share of {unit}")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        parts.append(
            pd.DataFrame({"histogram": x_label, "value": x, "count": values, "share": observed, "binomial": expected})
        )
        parts += [
            pd.DataFrame({"histogram": x_label, "floor": name, "value": x, "share": equal[name]}) for name in equal
        ]
    legend_above(figure, axes)
    marked = any((table[table.index > 0] > 0).to_numpy().any() for table in floor.values())
    clustering = (
        f"The variance of sites changed per token is {overdispersion:.3g} times that of independent sites"
        if np.isfinite(overdispersion)
        else "Nothing changed, or sites are incomplete, so that clustering cannot be told"
    )
    caption = (
        "Left: at how many routing sites a token changed; right: how many of its K slots a site changed; log axes. "
        f"Circles: the binomial with the same mean, which independent changes would follow. "
        f"{'Dashes: the same at equal weights; 0 has no place here. ' if marked else ''}{clustering}. {note}"
    )
    return StudyFigure("flips", "Changes per token and per site.", caption, figure, pd.concat(parts))


@styled
def margins(table: pd.DataFrame, note: str) -> StudyFigure:
    """Draw the share of choices that changed by the margin of the old choice, and a histogram of the margins."""
    figure, axes = panels(1, 2, 2.4, sharex=True)
    shown = table[np.isfinite(table["high"]) & (table["low"] > 0)]
    middle = np.sqrt(shown["low"] * shown["high"])
    often = shown["choices"] >= FEWEST
    ties = table[table["low"] == 0].sum()
    tied = (
        f"{int(ties['choices']):,} closer choices, ties most of them, are left of the axes; " if ties["choices"] else ""
    )
    tied += f"{100 * ties['changed'] / ties['choices']:.3g} % of these changed. " if tied else ""
    axes[0, 0].plot(
        middle[often], 100 * shown["changed"][often] / shown["choices"][often], color="#D55E00", marker="o", ms=3
    )
    axes[0, 0].set(ylabel="choices that changed, %", title="Change by margin")
    _from_zero(axes[0, 0])
    if len(shown) and not often.any():
        axes[0, 0].set_yticks([])
        axes[0, 0].text(0.5, 0.5, f"no bin has {FEWEST} choices", ha="center", transform=axes[0, 0].transAxes)
    axes[0, 1].step(middle, shown["choices"], where="mid", color="#1a1a1a", lw=1, label="all choices")
    axes[0, 1].fill_between(middle, shown["changed"], step="mid", color="#D55E00", lw=0, label="that changed")
    axes[0, 1].set(ylabel="(token, site) pairs", title="How close choices were")
    axes[0, 1].legend(loc="upper left")
    for ax in axes[0]:
        ax.set(xlabel="margin of the old choice (score units)")
        if len(shown):
            ax.set_xscale("log")
        else:
            ax.text(0.5, 0.5, "no margins", ha="center", transform=ax.transAxes)
    caption = (
        "Margin: gap between the last expert chosen and the first that was not, under the old weights, in the units of "
        "the scores that the router ranks; a change of scores below half of it changes nothing (of a router that first "
        "chooses groups of experts: while the same groups are open). All sites together; "
        f"left, bins of fewer than {FEWEST} choices are left out. {tied}{note}"
    )
    return StudyFigure("margins", "Margins, and which choices changed.", caption, figure, table)


@styled
def load_by_expert(experts: pd.DataFrame, note: str) -> StudyFigure:
    """Draw a heat map of the share of the load that each expert gained or lost, site by expert."""
    sites = list(dict.fromkeys(experts["site"]))
    table = experts.copy()
    for name in ("old", "new"):
        table[f"{name}_share"] = table[name] / table.groupby("site")[name].transform("sum")
    table["gain"] = table["new_share"] - table["old_share"]
    grid = 100 * table.pivot(index="site", columns="expert", values="gain").loc[sites].to_numpy()
    top = float(np.nanmax(np.abs(grid), initial=0)) or 1.0  # NaN marks experts that a site does not have
    figure, axes = panels(1, 1, float(np.clip(0.9 + 0.2 * len(sites), 1.8, 5)))
    ax = axes[0, 0]
    image = ax.imshow(grid, aspect="auto", cmap="PuOr", vmin=-top, vmax=top, interpolation="nearest")
    short, common = short_sites(sites)
    site_ticks(ax.yaxis, short)
    ax.set(xlabel="expert", ylabel="routing site")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=ax, shrink=0.9, aspect=18, pad=0.02)
    label_bar(bar, "share gained, points", 0.9 * (figure.get_figheight() - 0.6))
    even = f"An even load is {100 / grid.shape[1]:.3g} % per expert."
    if table["site"].value_counts().nunique() > 1:
        even = "Cells of experts that a site lacks are blank."
    caption = (
        f"Share of a site's load that each expert gained (purple) or lost (orange), in percentage points, by site "
        f"({common}, shallow to deep from the top). {even} {note}"
    )
    columns = ["site", "expert", "old", "new", "old_share", "new_share", "gain"]
    return StudyFigure("load_by_expert", "Change of expert load.", caption, figure, table[columns])


@styled
def decomposition(rows: Mapping[str, float | int], note: str) -> StudyFigure:
    """Draw each part's share of Var(log r), by token and by sequence mean, and its design effect.

    rows: the entries of `Shares.rows`, NaN for a number that does not exist.
    """
    figure, axes = panels(1, 2, 2.5, width_ratios=[1.6, 1])
    left, right = axes[0]
    table = []
    width = 0.26
    for i, (part, colour) in enumerate(PARTS.items()):
        values = [rows[f"{level}_share_{part}"] for level in ("token", "sequence")]
        bars = left.bar(
            np.arange(2) + (i - 1) * width, 100 * np.nan_to_num(values), width * 0.92, color=colour, label=part
        )
        left.bar_label(bars, [_whole(100 * value) for value in values], fontsize=6.5, padding=1.5)
        effect = rows[f"design_effect_{part}"]
        right.bar(i, np.nan_to_num(effect), 0.6, color=colour)
        right.text(
            i, np.nan_to_num(effect), f"{effect:.2g}".replace("nan", "–"), fontsize=6.5, ha="center", va="bottom"
        )
        for level in ("token", "sequence"):
            numbers = {name: rows[f"{level}_{name}_{part}"] for name in ("var", "share")}
            table.append({"level": level, "part": part, **numbers, "design_effect": effect})
    left.axhline(0, color="#6b6b6b", lw=0.7)
    left.margins(y=0.12)
    left.set_xticks([0, 1], ["token\n(GRPO's ratio)", "sequence mean\n(GSPO's ratio)"])
    left.set(ylabel="share of Var(log r), %", title="Where the variance comes from")
    right.axhline(1, color=GREY, lw=1, ls=(0, (1, 2)))
    right.margins(y=0.15)
    right.set_xticks(range(3), list(PARTS))
    right.set(ylabel="variance of the mean /\nthat of independent tokens", title="What averaging leaves")
    legend_above(figure, axes[:, 0])
    caption = (
        "log r = weight + routing + interaction, from the same tokens under {old, new weights} x {old, new routes}. "
        "Left: Cov(part, log r) / Var(log r), which sums to 100 %; a negative share works against the others. Right: "
        "variance of sequence means over the variance that independent tokens would leave, Var(token) / harmonic "
        f"length ({rows['harmonic_length']:.3g}); 1 (dotted): averaging removes 1/|y| of the noise, above 1: "
        f"tokens move together and less is removed. {note}"
    )
    return StudyFigure("decomposition", "Weights, routes, or both together.", caption, figure, pd.DataFrame(table))


@styled
def decomposition_by_site(sites: pd.DataFrame, note: str) -> StudyFigure:
    """Draw the effect of each site's routes on the log-ratio if it alone is not replayed, and if it alone is."""
    figure, axes = panels(1, 2, 2.5, sharex=True)
    x, common = range(len(sites)), _depth_axis(axes[0], sites)
    for kind, look in (("alone", LOOKS["natural"]), ("last", LOOKS["replayed"])):
        label = {"alone": "all sites replayed but this one", "last": "this site alone replayed"}[kind]
        style = {**look, "label": label}
        axes[0, 0].plot(x, sites[f"token_var_{kind}"].replace(0.0, np.nan), **style)
        axes[0, 1].plot(x, 100 * sites[f"token_share_{kind}"], **style)
    if (sites[["token_var_alone", "token_var_last"]] > 0).any().any():
        log_y(axes[0, 0])
    axes[0, 0].set(ylabel="variance, nats²", title="Effect of one site")
    axes[0, 1].axhline(0, color="#6b6b6b", lw=0.7)
    axes[0, 1].set(ylabel="share of the whole effect, %", title="Cov(site, whole) / Var(whole)")
    legend_above(figure, axes[:, 0])
    caption = (
        f"Token log-probability under the new weights, by routing site ({common}, shallow to deep): what changes if "
        "the old routes are forced everywhere but here, against everywhere; and if they are forced here alone, against "
        "nowhere. All other sites keep the routes that were recorded. The whole effect is what replaying all sites "
        f"removes; sites add up to it only as far as they do not interact. {note}"
    )
    columns = ["site", *(c for c in sites.columns if c.endswith(("_alone", "_last")))]
    return StudyFigure("decomposition_by_site", "Which sites move the log-ratio.", caption, figure, sites[columns])


@styled
def log_ratios(tails: pd.DataFrame, by_flips: pd.DataFrame, note: str) -> StudyFigure:
    """Draw the tails of |log r|, and the variance of log r by the number of sites changed, natural and replayed."""
    figure, axes = panels(1, 2, 2.7)
    left, right = axes[0]
    for kind, look in LOOKS.items():
        part = tails[(tails["log_ratio"] == kind) & (tails["share"] > 0)]
        left.plot(part["size"], part["share"], markevery=8, **look)
    left.set(xlabel="x, nats", ylabel="share of tokens with |log r| ≥ x", title="Tails")
    left.set_xscale("log")
    log_y(left)
    seen = tails[(tails["share"] > 0) & (tails["share"] < 0.99)]
    if len(seen):
        left.set_xlim(float(seen["size"].min()) / 2, float(seen["size"].max()) * 2)
    shown = by_flips[by_flips["tokens"] >= FEWEST]
    for kind in ("natural", "replayed"):
        right.plot(shown["flips"], shown[kind].replace(0.0, np.nan), **LOOKS[kind])
    right.set(
        xlabel="sites changed where it was predicted",
        ylabel="variance of log r, nats²",
        title="By changes one position before",
    )
    if (shown[["natural", "replayed"]] > 0).any().any():
        log_y(right)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown.empty:
        right.set(xticks=[], yticks=[])
        right.text(0.5, 0.5, f"no bin has {FEWEST} tokens", ha="center", transform=right.transAxes)
    legend_above(figure, axes[:, 0])
    caption = (
        "log r = new − old log-probability of a token. Natural: each checkpoint with its own routes; replayed: the old "
        "routes forced on the new weights; routes alone: the new routes forced on the old weights. Left: share of "
        "tokens of a size or more, log-log; tokens whose past changed no route have exactly 0 for routes alone. Right: "
        "variance by the number of sites that changed at the position that predicts the token, bins of at least "
        f"{FEWEST} tokens. {note}"
    )
    frame = pd.concat([tails.assign(table="tails"), by_flips.assign(table="by_flips")])
    return StudyFigure("log_ratios", "Log-ratios, natural and under replay.", caption, figure, frame)


def _depth_axis(axes: Sequence[Axes], sites: pd.DataFrame) -> str:
    """Label the x axes with the sites, shallow to deep, and return the pattern that all names have in common."""
    short, common = short_sites(list(sites["site"]))
    step = max(1, -(-len(short) // 12))
    for ax in axes:
        ax.set_xticks(range(0, len(short), step), short[::step])
        ax.set_xlabel("routing site")
    return common


def _from_zero(ax: Axes) -> None:
    """Let the y axis begin at 0, and end so high that no marker is cut."""
    values = [np.nanmax(np.asarray(line.get_ydata(), dtype=float), initial=0) for line in ax.get_lines()]
    ax.set_ylim(0, 1.07 * max(values, default=0) or 1)


def _whole(value: float) -> str:
    """Return a number rounded to an integer, as text; a dash if it is not finite."""
    return f"{round(value)}".replace("-", "−") if np.isfinite(value) else "–"
