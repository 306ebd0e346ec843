"""Variance of log-ratios by the number of routing sites that changed at the position that predicts the token."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import Panels, draw_seeds, over_seeds, summarise
from moe_rl.study.figures.floor import draw_across, floor_note, gap_note
from moe_rl.study.figures.layout import arm_grid, condition_panels, drawn_arms, label_grid, many
from moe_rl.study.figures.register import PAIR, Drawing, figure
from moe_rl.study.figures.style import GREY, NothingToDraw, arm_looks, legend_above, log_y
from moe_rl.study.floors import floor_variance
from moe_rl.study.summary import noise_floor

FEWEST_TOKENS = 50
"""Fewest distinct tokens (each is stored once per update) of a bin that is drawn: log-ratios are heavy-tailed."""
FEWEST_OF_SEED = 30
"""Fewest distinct tokens of one seed in a bin, for its variance to count into mean and interval."""
STYLES: dict[str, dict[str, Any]] = {"natural": {}, "replayed": {"mfc": "white", "ls": (0, (1, 1.5)), "lw": 1.0}}
NEEDED = ["old_logp", "logp_natural", "logp_replayed", "flips"]
KEYS = ["arm", "seed", "step", "update", "seq"]


@figure(
    title="Ratio variance against flips per token.",
    caption=(
        "Variance of the token log-ratio within a seed (stored steps, all updates) by the number of routing sites that "
        "changed at the position that predicts the token, one to the left of its own (so the first token of a response "
        "is left out); geometric mean over seeds with its interval, log axis. "
        f"Bins of fewer than {FEWEST_TOKENS} tokens of an arm are left out, and of a seed those of fewer than "
        f"{FEWEST_OF_SEED}, a token of several updates counted once. "
        "Tokens that flip also drift more: the rise of the filled line is a correlation, and only its distance to the "
        "open markers, where the same tokens are replayed, is due to routing."
    ),
    needs={"tokens": [*NEEDED, "update", "pos"]},
    rank=120,
    notes=(PAIR,),
)
def variance_by_flips(data: StudyData) -> Drawing:
    tokens = predictor_flips(data.tokens[[*KEYS, "pos", *NEEDED]])
    if tokens.empty:
        raise NothingToDraw("variance_by_flips: no stored response has a second token, and the first is left out")
    by_seed = variance_table(tokens)
    by_seed["drawn"] = by_seed["of_arm"] >= FEWEST_TOKENS
    used = by_seed[by_seed["drawn"] & (by_seed["tokens"] >= FEWEST_OF_SEED)]
    if used.empty:
        raise NothingToDraw(f"variance_by_flips: no number of flips has {FEWEST_TOKENS} stored tokens")
    tables = {kind: _tables(used, kind) for kind in ("natural", "replayed")}
    if not tables["natural"]:
        raise NothingToDraw("variance_by_flips: every log-ratio is 0, the policies did not move")
    arms = [arm for arm in drawn_arms(data, list(used["arm"].unique())) if arm in tables["natural"]]
    if many(data):
        drawn, axes = arm_grid(data, arms)
        panels: Panels = [(ax, (arm,)) for ax, arm in zip(axes, arms, strict=True)]
    else:
        drawn, grid, each = condition_panels(data, 1.75)
        panels = [(ax, one.arms) for ax, one in zip(grid[0], each, strict=True)]
    for ax, group in panels:
        for arm, (look, label) in arm_looks(data, group).items():
            for kind, style in STYLES.items():
                if arm in tables[kind]:
                    shown = label if kind == "natural" else "_"
                    draw_seeds(ax, tables[kind][arm], look, shown, thin=False, geometric=True, **style)
    axes = [ax for ax, _ in panels]
    top = int(used["flips"].max())
    for ax in axes:
        ax.set_xticks(range(0, top + 1, max(1, -(-top // 4))))
    means = [over_seeds(table, True)[0] for of in tables.values() for table in of.values()]
    low, high = min(float(np.nanmin(each)) for each in means), max(float(np.nanmax(each)) for each in means)
    for ax in axes:
        ax.set_ylim(low / 2, high * 2)  # an interval of few seeds may span decades
        log_y(ax)
    floor = floor_variance(data)
    for ax in axes:
        draw_across(ax, floor["var_token"])
    names = ("sites changed where the token is predicted", "variance of log r, nats²")
    if many(data):
        label_grid(drawn, axes, *names, "open: replayed")
    else:
        hollow = Line2D(
            [], [], color=GREY, ls=(0, (1, 1.5)), marker="o", mfc="white", lw=1, label="replayed, same weights"
        )
        for i, ax in enumerate(axes):
            ax.set_xlabel("sites changed where\nthe token is predicted")
            ax.set_ylabel("" if i % 3 else names[1])
        legend_above(drawn, axes, [hollow])
    parts = [summarise(table, True, arm=arm, routing=kind) for kind, of in tables.items() for arm, table in of.items()]
    frame = pd.concat(parts, ignore_index=True)
    said = f"{gap_note(floor, {'var_token': ''})}{floor_note(noise_floor(data), 'Noise floor of the flips')}".strip()
    return Drawing(drawn, frame, said, interval="band", tables={"bins": by_seed})


def _tables(rows: pd.DataFrame, kind: str) -> dict[str, pd.DataFrame]:
    """Return for each arm the variances above 0 of one kind: index flips, columns seeds."""
    positive = rows[rows[kind] > 0]
    return {
        str(arm): part.pivot(index="flips", columns="seed", values=kind)
        for arm, part in positive.groupby("arm", observed=True)
    }


def variance_table(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return by arm, seed and flips: rows, distinct tokens (`tokens`; `of_arm` over all seeds), variance of the
    log-ratio `natural` and `replayed`, nats²."""
    rows = pd.DataFrame(
        {
            "arm": tokens["arm"], "seed": tokens["seed"], "flips": tokens["flips"],
            "natural": tokens["logp_natural"] - tokens["old_logp"],
            "replayed": tokens["logp_replayed"] - tokens["old_logp"],
        }
    )  # fmt: skip
    keys = ["arm", "seed", "flips"]
    table = rows.groupby(keys, observed=True).agg(
        rows=("natural", "size"), natural=("natural", "var"), replayed=("replayed", "var")
    )
    distinct = tokens.drop_duplicates([*keys, "step", "seq", "pos"])  # counts a token of several updates once
    table["tokens"] = distinct.groupby(keys, observed=True).size()
    table = table.reset_index()
    table["of_arm"] = table.groupby(["arm", "flips"], observed=True)["tokens"].transform("sum")
    return table


def predictor_flips(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return tokens with the flips of the position that predicts them, one to the left of their own.

    A router's choice at position t shapes the prediction of token t + 1, so its flips belong to that token's log-ratio.
    The first response token is predicted at the end of the prompt, and a token behind a tool's text at the end of that
    text. The table does not hold these positions, so both tokens are left out."""
    responses = tokens.groupby(KEYS, observed=True, sort=False)
    if (responses["pos"].diff() <= 0).any():  # rows are written in order, but a table may be in another one
        tokens = tokens.sort_values([*KEYS, "pos"])
        responses = tokens.groupby(KEYS, observed=True, sort=False)
    before = responses["flips"].shift(1).where(responses["pos"].diff() == 1)
    return tokens.assign(flips=before).dropna(subset=["flips"]).astype({"flips": int})
