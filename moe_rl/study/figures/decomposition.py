"""Where the log-ratio comes from: weights, routes and their interaction, by update, by level, by routing site."""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.routing import short_sites
from moe_rl.study.figures.style import (
    GREY,
    StudyFigure,
    arm_title,
    log_y,
    need,
    panel_arms,
    panels,
    panels_note,
    seeds_note,
    styled,
)
from moe_rl.study.summary import last_updates, routing_noise

PARTS = {"weight": "#3B3B3B", "routing": "#B2478F", "interaction": "#C9C9C9"}
LEVELS = ("token", "sequence")
WHAT = (
    "The log-ratio of a step's old policy (weights at its start) and the policy after an update splits into weight "
    "(new weights, old routes), routing (old weights, new routes) and interaction (the rest)"
)


@styled
def decomposition(data: StudyData) -> StudyFigure:
    """Share of the variance of the log-ratio that each part has, by update, for tokens and for sequences; and how
    large the routing part is."""
    shares, noise = share_table(data), routing_noise(data)
    arms = [arm for arm in panel_arms(data) if (shares["arm"] == arm).any()][:6]
    figure, axes = panels(3, len(arms), 5.4, sharex=True, sharey="row")
    for column, arm in zip(axes.T, arms, strict=True):
        of_arm = shares[shares["arm"] == arm]
        for ax, level in zip(column, LEVELS, strict=False):
            means = of_arm[of_arm["level"] == level].groupby(["update", "part"])["share"].mean().unstack()
            for i, (part, colour) in enumerate(PARTS.items()):
                ax.bar(means.index + 0.27 * (i - 1), 100 * means[part], 0.25, color=colour)
            ax.axhline(0, color=GREY, lw=0.6)
        for level, face in (("token", PARTS["routing"]), ("sequence", "white")):
            rows = noise[(noise["arm"] == arm) & (noise["level"] == level)]
            seeds = rows.pivot(index="update", columns="seed", values="variance")
            column[2].plot(seeds.index, seeds, color=PARTS["routing"], lw=0.6, alpha=0.45)
            means = np.exp(np.log(seeds).mean(axis=1))
            column[2].plot(means.index, means, "o-", color=PARTS["routing"], mfc=face, ms=3.5, lw=1)
        column[0].set_title(arm_title(data, arm), fontsize=7.5)
        column[2].set_xlabel("update within the step")
        column[2].set_xticks(sorted(of_arm["update"].unique())[:: max(1, of_arm["update"].nunique() // 8)])
    low, high = (f(ax.get_ylim()[i] for ax in axes[:2, 0]) for i, f in enumerate((min, max)))
    for ax in axes[:2, 0]:
        ax.set_ylim(low, high)
    for ax in axes[2]:
        log_y(ax)
    for ax, label in zip(axes[:, 0], ("token\nshare, %", "sequence\nshare, %", "Var(routing), nats²"), strict=True):
        ax.set_ylabel(label)
    marks = [
        Line2D([], [], color=PARTS["routing"], marker="o", lw=1, label="token"),
        Line2D([], [], color=PARTS["routing"], marker="o", mfc="white", lw=1, label="sequence"),
    ]
    handles = [Patch(color=colour, label=part) for part, colour in PARTS.items()] + marks
    figure.legend(handles=handles, loc="outside upper left", ncols=5, borderaxespad=0.3)
    caption = (
        f"{WHAT}. Share: Cov(part, log r) / Var(log r), with variances and covariances summed over the steps of a "
        "seed; the three sum to 100 %, and one that works against the others is negative. Top: tokens (GRPO's "
        "ratio); middle: means over sequences (GSPO's); mean over seeds. Bottom: variance of the routing part by "
        "itself, log axis, geometric mean over steps; thin: seeds. Its distance between filled and open is what "
        "averaging over a sequence removes; its height between arms is what training changes. Probe, no noise."
        f"{panels_note(data)} "
        f"{seeds_note(data, interval=False)}"
    )
    title = "Decomposition of the log-ratio."
    noise = noise.rename(columns={"variance": "geometric_mean_variance"}).assign(part="routing")
    table = shares.merge(noise, how="left", on=["arm", "seed", "update", "level", "part"])
    return StudyFigure("decomposition", title, caption, figure, table)


def share_table(data: StudyData) -> pd.DataFrame:
    """By arm, seed, update, level and part: `share` of Var(log r), `variance` of the part (nats², mean over steps)."""
    pairs = (("weight", "routing"), ("weight", "interaction"), ("routing", "interaction"))
    names = [f"{lv}_{n}" for lv in LEVELS for n in ("variance", *(f"var_{p}" for p in PARTS))]
    names += [f"{level}_cov_{a}_{b}" for level in LEVELS for a, b in pairs]
    rows = need(data.decompositions, names, "decomposition")
    means = rows.groupby(["arm", "seed", "update"])[names].mean().reset_index()
    parts = []
    for level in LEVELS:
        for part in PARTS:
            covariances = [f"{level}_cov_{a}_{b}" for a, b in pairs if part in (a, b)]
            whole = means[f"{level}_var_{part}"] + means[covariances].sum(axis=1)
            total = means[f"{level}_variance"]
            found = means[["arm", "seed", "update"]].assign(
                level=level,
                part=part,
                share=(whole / total.where(total > 0)).astype(float),
                variance=means[f"{level}_var_{part}"],
            )
            parts.append(found)
    return pd.concat(parts, ignore_index=True)


@styled
def decomposition_by_site(data: StudyData) -> StudyFigure:
    """What each routing site has of the whole effect of replay, alone and last, after the last update."""
    table = site_table(data)
    arms = [arm for arm in panel_arms(data) if (table["arm"] == arm).any()][:6]
    names = list(dict.fromkeys(table["site"]))
    short, common = short_sites(names)
    figure, axes = panels(1, len(arms), 1.0 + min(5.5, 0.42 * len(names)), sharex=True, sharey=True)
    for ax, arm in zip(axes[0], arms, strict=True):
        means = table[table["arm"] == arm].groupby(["site", "kind"])["share"].mean().unstack().loc[names]
        y = np.arange(len(names))
        ax.barh(y - 0.2, 100 * means["alone"], 0.36, color=PARTS["routing"])
        ax.barh(y + 0.2, 100 * means["last"], 0.36, facecolor="white", edgecolor=PARTS["routing"], lw=1)
        ax.axvline(0, color=GREY, lw=0.6)
        ax.set_title(arm_title(data, arm), fontsize=7.5)
        ax.set_xlabel("share of the replay effect, %")
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(0, len(names), max(1, len(names) // 12)), short[:: max(1, len(names) // 12)])
    axes[0, 0].set_ylim(len(names) - 0.4, -0.6)
    axes[0, 0].set_ylabel("routing site")
    handles = [
        Patch(color=PARTS["routing"], label="this site alone changes"),
        Patch(facecolor="white", edgecolor=PARTS["routing"], label="this site changes last"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2, borderaxespad=0.3)
    caption = (
        f"Effect of replay on a token's log-probability under the new weights, by routing site ({common}, shallow to "
        "deep from the top), after the last update of a step: Cov(site, whole) / Var(whole), over tokens and pooled "
        "over steps. Alone: new routes at this site, old ones elsewhere; last: old routes at this site, new ones "
        "elsewhere. Where sites add up, the bars of either kind sum to 100 %. Mean over seeds."
        f"{panels_note(data)} {seeds_note(data, interval=False)}"
    )
    title = "Replay effect by routing site."
    return StudyFigure("decomposition_by_site", title, caption, figure, table)


def site_table(data: StudyData) -> pd.DataFrame:
    """By arm, seed, site and kind (alone, last): `share` of the replay effect's token variance, last update."""
    columns = ["replay_effect_var", "site_token_share_alone", "site_token_share_last", "site_names"]
    rows = need(data.decompositions, columns, "decomposition_by_site")
    rows = last_updates(rows[rows["replay_effect_var"] > 0])
    found = []
    for (arm, seed), part in rows.groupby(["arm", "seed"]):
        weights = part["replay_effect_var"].to_numpy(dtype=float)
        for kind in ("alone", "last"):
            shares = np.array(part[f"site_token_share_{kind}"].tolist(), dtype=float)
            for site, share in zip(part["site_names"].iloc[0], weights @ shares / weights.sum(), strict=True):
                found.append({"arm": arm, "seed": seed, "site": site, "kind": kind, "share": share})
    return need(
        pd.DataFrame(found, columns=["arm", "seed", "site", "kind", "share"]), ["share"], "decomposition_by_site"
    )


__all__ = ["decomposition", "decomposition_by_site", "share_table", "site_table"]
