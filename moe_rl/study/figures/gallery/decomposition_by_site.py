"""The share of each routing site in the whole effect of replay, alone and last, after the last update."""

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from moe_rl.study.data import StudyData
from moe_rl.study.figures.gallery.decomposition import PARTS, left_out
from moe_rl.study.figures.layout import drawn_arms, short_label, wrapped_panels
from moe_rl.study.figures.register import Drawing, figure, need
from moe_rl.study.figures.routing import short_sites, site_ticks
from moe_rl.study.figures.style import GREY
from moe_rl.study.summary import last_updates

MOST = 6
COLUMNS = ["replay_effect_var", "site_token_share_alone", "site_token_share_last", "site_names"]


@figure(
    title="Replay effect by routing site.",
    caption=(
        "Effect of replay on a token's log-probability under the new weights, by routing site, shallow to deep from "
        "the top, after the last update of a step: Cov(site, whole) / Var(whole), over tokens and pooled over steps. "
        "Alone: new routes at this site, old ones elsewhere; last: old routes at this site, new ones elsewhere. Where "
        "sites add up, the bars of either kind sum to 100 %. Mean over seeds."
    ),
    needs={"decompositions": COLUMNS},
    rank=24,
    special=True,
)
def decomposition_by_site(data: StudyData) -> Drawing:
    table = site_table(data)
    arms = drawn_arms(data, list(table["arm"].unique()))[:MOST]
    names = list(dict.fromkeys(table["site"]))
    short, common = short_sites(names)
    drawn, axes = wrapped_panels(len(arms), 3, 0.7, 0.45 + min(4.5, 0.3 * len(names)), sharex=True, sharey=True)
    for ax, arm in zip(axes.flat, arms, strict=False):
        means = table[table["arm"] == arm].groupby(["site", "kind"])["share"].mean().unstack().reindex(names)
        y = np.arange(len(names))
        ax.barh(y - 0.2, 100 * means["alone"], 0.36, color=PARTS["routing"])
        ax.barh(y + 0.2, 100 * means["last"], 0.36, facecolor="white", edgecolor=PARTS["routing"], lw=1)
        ax.axvline(0, color=GREY, lw=0.6)
        ax.set_title(short_label(data, arm), fontsize=7)
        ax.set_xlabel("share of the effect, %")
        ax.grid(axis="y", visible=False)
    site_ticks(axes[0, 0].yaxis, short)
    axes[0, 0].set_ylim(len(names) - 0.4, -0.6)
    for ax in axes[:, 0]:
        ax.set_ylabel("routing site")
    handles = [
        Patch(color=PARTS["routing"], label="this site alone changes"),
        Patch(facecolor="white", edgecolor=PARTS["routing"], label="this site changes last"),
    ]
    drawn.legend(handles=handles, loc="outside upper left", ncols=2, borderaxespad=0.3)
    left = table["arm"].nunique() - len(arms)
    return Drawing(drawn, table, f"Sites: {common}. {left_out(left)}".strip())


def site_table(data: StudyData) -> pd.DataFrame:
    """Return by arm, seed, site and kind (alone, last): `share` of the replay effect's token variance, last update."""
    rows = need(data.decompositions, COLUMNS, "decomposition_by_site")
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
