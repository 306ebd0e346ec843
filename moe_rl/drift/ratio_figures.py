"""Figures of `moe-rl drift` on log-ratios: their parts, by level and by site, and their tails."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from moe_rl.drift.figures import FEWEST, LOOKS, depth, depth_axis
from moe_rl.study.figures.saving import StudyFigure, styled
from moe_rl.study.figures.style import GREY, legend_above, log_y, panels

PARTS = {"weight": "#0B4A8F", "routing": "#27B08B", "interaction": "#B0B0B0"}


@styled
def decomposition(rows: Mapping[str, float | int], note: str) -> StudyFigure:
    """Shares of variance by level, and what averaging does to each part."""
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
            names = ("var", "share")
            table.append(
                {
                    "level": level,
                    "part": part,
                    **{n: rows[f"{level}_{n}_{part}"] for n in names},
                    "design_effect": effect,
                }
            )
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
    """What each site's routes do to the log-ratio: it alone, and it last."""
    figure, axes = panels(1, 2, 2.5, sharex=True)
    x, tick, common = depth(sites)
    for kind, look in (("alone", LOOKS["natural"]), ("last", LOOKS["replayed"])):
        style = {key: value for key, value in look.items() if key != "label"}
        label = {"alone": "all sites replayed but this one", "last": "this site alone replayed"}[kind]
        axes[0, 0].plot(x, sites[f"token_var_{kind}"].replace(0.0, np.nan), label=label, **style)
        axes[0, 1].plot(x, 100 * sites[f"token_share_{kind}"], label=label, **style)
    if (sites[["token_var_alone", "token_var_last"]] > 0).any().any():
        log_y(axes[0, 0])
    axes[0, 0].set(ylabel="variance, nats²", title="Effect of one site")
    axes[0, 1].axhline(0, color="#6b6b6b", lw=0.7)
    axes[0, 1].set(ylabel="share of the whole effect, %", title="Cov(site, whole) / Var(whole)")
    for ax in axes[0]:
        depth_axis(ax, tick)
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
    """Tail of |log r|, and its variance by flips, natural against replayed."""
    figure, axes = panels(1, 2, 2.7)
    left, right = axes[0]
    for kind, look in LOOKS.items():
        part = tails[(tails["log_ratio"] == kind) & (tails["share"] > 0)]
        style = {**look, "markevery": 8}
        left.plot(part["size"], part["share"], **style)
    left.set(xlabel="x, nats", ylabel="share of tokens with |log r| > x", title="Tails")
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
        "tokens beyond a size, log-log; tokens whose past changed no route have exactly 0 for routes alone. Right: "
        "variance by the number of sites that changed at the position that predicts the token, bins of at least "
        f"{FEWEST} tokens. {note}"
    )
    frame = pd.concat([tails.assign(table="tails"), by_flips.assign(table="by_flips")])
    return StudyFigure("log_ratios", "Log-ratios, natural and under replay.", caption, figure, frame)


def _whole(value: float) -> str:
    return f"{round(value)}".replace("-", "−") if np.isfinite(value) else "–"
