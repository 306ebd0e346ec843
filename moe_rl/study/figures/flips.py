"""The variance of log-ratios by how much routing changed where a token is predicted."""

import pandas as pd
from matplotlib.lines import Line2D

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_across, floor_note, gap_note
from moe_rl.study.figures.ratios import PAIR, token_ratios
from moe_rl.study.figures.style import (
    GREY,
    NothingToDraw,
    StudyFigure,
    arm_looks,
    conditions,
    legend_above,
    log_y,
    need,
    noise_note,
    panels,
    seeds_note,
    styled,
)
from moe_rl.study.floors import floor_variance
from moe_rl.study.summary import noise_floor

FEWEST_TOKENS = 50
"""Distinct tokens (each is stored once per update) of a bin whose variance is drawn: log-ratios are heavy-tailed."""


@styled
def variance_by_flips(data: StudyData) -> StudyFigure:
    """Variance of the token log-ratio by how many sites changed on that token."""
    tokens = predictor_flips(need(token_ratios(data, "variance_by_flips"), ["flips", "pos"], "variance_by_flips"))
    tokens["distinct"] = tokens.groupby(["seed", "step", "seq", "pos"], observed=True).ngroup()
    rows = tokens.groupby(["arm", "flips"], observed=True).agg(
        rows=("natural", "size"),
        tokens=("distinct", "nunique"),
        natural=("natural", "var"),
        replayed=("replayed", "var"),
    )
    rows = rows.reset_index()
    rows["drawn"] = rows["tokens"] >= FEWEST_TOKENS
    if not rows["drawn"].any():
        raise NothingToDraw(f"variance_by_flips: no number of flips has {FEWEST_TOKENS} stored tokens")
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.7, sharey=True, sharex=True)
    for ax, condition in zip(axes[0], shown, strict=True):
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            part = rows[(rows["arm"] == arm) & rows["drawn"]]
            ax.plot(
                part["flips"],
                part["natural"],
                color=look.colour,
                ls=look.dash,
                marker=look.marker,
                label=label,
            )
            ax.plot(
                part["flips"],
                part["replayed"],
                color=look.colour,
                ls=(0, (1, 1.5)),
                lw=1,
                marker=look.marker,
                mfc="white",
            )
        ax.set(title=condition.title(len(shown) - 1), xlabel="sites changed where the token is predicted")
        log_y(ax)
        flips = rows.loc[rows["drawn"], "flips"]
        ax.set_xticks(range(0, int(flips.max()) + 1, max(1, int(flips.max()) // 8)))
    axes[0, 0].set_ylabel("variance of log r, nats²")
    floor = floor_variance(data)
    for ax in axes[0] if len(floor) else ():
        draw_across(ax, floor["var_token"])
    outlined = Line2D(
        [], [], color=GREY, ls=(0, (1, 1.5)), marker="o", mfc="white", lw=1, label="replayed, same weights"
    )
    legend_above(figure, axes, [outlined])
    caption = (
        f"{PAIR}. Variance over the stored response tokens (all steps, updates, seeds) by the number of routing "
        "sites that changed at the position that predicts the token (so the first token of a response is left out); "
        f"bins of fewer than {FEWEST_TOKENS} tokens of an arm are left out, a token of several updates counted once. "
        "Tokens that flip also drift more: the rise of the "
        "filled line is a correlation, and only its distance to the open markers, where the same tokens are "
        f"replayed, is due to routing. {gap_note(floor, {'var_token': ''})}"
        f"{floor_note(noise_floor(data), 'Noise floor of the flips')}"
        f"{noise_note(data).lstrip()} {seeds_note(data, interval=False)}"
    )
    title = "Ratio variance against flips per token."
    return StudyFigure("variance_by_flips", title, caption, figure, rows)


def predictor_flips(tokens: pd.DataFrame) -> pd.DataFrame:
    """Tokens with the flips of the position that predicts them, one to the left of their own.

    A router's choice at position t shapes the prediction of token t + 1, so its flips belong to that token's
    log-ratio. The first response token is predicted at the prompt, which the table does not hold: left out.
    """
    runs = ["arm", "seed", "step", "update", "seq"]
    ordered = tokens.sort_values([*runs, "pos"])
    before = ordered.groupby(runs, observed=True)["flips"].shift(1)
    return ordered.assign(flips=before).dropna(subset=["flips"]).astype({"flips": int})


__all__ = ["predictor_flips", "variance_by_flips"]
