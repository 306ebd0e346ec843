"""Decomposition of the log-ratio into weights, routes and their interaction, by update and level (token, sequence)."""

from itertools import combinations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import drawn_arms, short_label
from moe_rl.study.figures.register import Drawing, figure, need
from moe_rl.study.figures.style import GREY, PAGE, log_y, panels
from moe_rl.study.summary import routing_noise
from moe_rl.study.words import count

PARTS = {"weight": "#3B3B3B", "routing": "#B2478F", "interaction": "#C9C9C9"}
LEVELS = ("token", "sequence")
MOST = 6


@figure(
    title="Decomposition of the log-ratio.",
    caption=(
        "The log-ratio of a step's old policy (weights at its start) and the policy after an update splits into "
        "weight (new weights, old routes), routing (old weights, new routes) and interaction (the rest). Share: "
        "Cov(part, log r) / Var(log r), with variances and covariances summed over the steps of a seed; the three sum "
        "to 100 %, and one that works against the others is negative. Top: tokens (GRPO's ratio); middle: means over "
        "sequences (GSPO's); mean over seeds. Bottom: variance of the routing part by itself, log axis, geometric "
        "mean over steps; thin: seeds. Its distance between filled and open is what averaging over a sequence "
        "removes; its height between arms is what training changes. Probe, no noise."
    ),
    needs={"decompositions": ["token_variance", "sequence_variance"]},
    rank=23,
    special=True,
)
def decomposition(data: StudyData) -> Drawing:
    shares, noise = share_table(data), routing_noise(data)
    arms = drawn_arms(data, list(shares["arm"].unique()))[:MOST]
    drawn, axes = panels(3, len(arms), 5.0, PAGE, sharex=True, sharey="row")
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
        column[0].set_title(short_label(data, arm, min(15, 60 // len(arms))), fontsize=7 if len(arms) < 5 else 6)
        column[2].set_xticks(sorted(of_arm["update"].unique())[:: max(1, of_arm["update"].nunique() // 4)])
    middle = {} if len(arms) % 2 else {"x": 1.1}  # place the label between the two middle panels
    axes[2, (len(arms) - 1) // 2].set_xlabel("update within the step", **middle)
    low, high = (f(ax.get_ylim()[i] for ax in axes[:2, 0]) for i, f in enumerate((min, max)))
    for ax in axes[:2, 0]:
        ax.set_ylim(low, high)
    log_y(axes[2, 0])
    for ax, label in zip(axes[:, 0], ("tokens\nshare, %", "sequences\nshare, %", "Var(routing), nats²"), strict=True):
        ax.set_ylabel(label)
    marks = [
        Line2D([], [], color=PARTS["routing"], marker="o", lw=1, label="token"),
        Line2D([], [], color=PARTS["routing"], marker="o", mfc="white", lw=1, label="sequence"),
    ]
    handles = [Patch(color=colour, label=part) for part, colour in PARTS.items()] + marks
    drawn.legend(
        handles=handles, loc="outside upper left", ncols=5, borderaxespad=0.3, columnspacing=1.0, handlelength=1.8
    )
    noise = noise.rename(columns={"variance": "geometric_mean_variance"}).assign(part="routing")
    table = shares.merge(noise, how="left", on=["arm", "seed", "update", "level", "part"])
    left = shares["arm"].nunique() - len(arms)
    return Drawing(drawn, table, left_out(left))


def left_out(arms: int) -> str:
    """Return the sentence of a caption on the number of arms that are not drawn; empty if all are."""
    return f"{count(arms, 'more arm')} {'is' if arms == 1 else 'are'} in the table." if arms else ""


def share_table(data: StudyData) -> pd.DataFrame:
    """Return by arm, seed, update, level and part: `share` of Var(log r), `variance` of the part (nats², mean over
    steps)."""
    pairs = list(combinations(PARTS, 2))
    names = [f"{lv}_{n}" for lv in LEVELS for n in ("variance", *(f"var_{p}" for p in PARTS))]
    names += [f"{level}_cov_{a}_{b}" for level in LEVELS for a, b in pairs]
    rows = need(data.decompositions, names, "decomposition")
    means = rows.groupby(["arm", "seed", "update"])[names].mean().reset_index()
    parts = []
    for level in LEVELS:
        for part in PARTS:
            covariances = [f"{level}_cov_{a}_{b}" for a, b in pairs if part in (a, b)]
            own, total = means[f"{level}_var_{part}"], means[f"{level}_variance"]
            share = ((own + means[covariances].sum(axis=1)) / total.where(total > 0)).astype(float)
            parts.append(means[["arm", "seed", "update"]].assign(level=level, part=part, share=share, variance=own))
    return pd.concat(parts, ignore_index=True)
