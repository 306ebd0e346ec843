"""Score and ratio variance against the measured dose of routing change; drawn where a method has arms of at least four
doses."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from moe_rl.study.arms import replays_all, slots_rerouted
from moe_rl.study.curves import FINAL_STEPS
from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_across, floor_note
from moe_rl.study.figures.layout import drawn_arms, headroom
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.style import PAGE, Look, NothingToDraw, legend_above, legend_label, log_y, look_of, panels
from moe_rl.study.outcomes import reward_names, run_outcomes
from moe_rl.study.statistics import seed_interval
from moe_rl.study.summary import in_run_variance, noise_floor

FEWEST_DOSES = 4
"""Fewest doses that make a curve; the figure of final rewards shows fewer."""


@figure(
    title="Dose-response to routing change.",
    caption=(
        "Dose: measured share of expert slots of the response tokens' own positions that the update forward routed "
        "otherwise than the old policy, pooled over all updates of a run (weights and selection noise together; 0 "
        "under replay, which ignores noise, so that a replay run without noise stands for every dose: dotted). Upper: "
        f"mean of the last {FINAL_STEPS} steps, or the held-out reward where the study declares it. Lower: variance of "
        "the token log-ratio over training minibatches, mean of the updates from the second on of each step, log axis. "
        "Large: mean over seeds with its interval; small: seeds."
    ),
    needs={"updates": ["slots_changed", "slots", "var_token_log_ratio"]},
    rank=20,
    special=True,
)
def dose_response(data: StudyData) -> Drawing:
    seeds = dose_table(data)
    seeds = seeds[seeds["arm"].isin(drawn_arms(data))]  # without replay runs under noise, which repeat natural runs
    most = int(seeds.groupby("method")["noise"].nunique().max()) if len(seeds) else 0
    if most < FEWEST_DOSES:
        raise NothingToDraw(
            f"dose_response: no method of this study has arms with {FEWEST_DOSES} doses of selection noise (most: "
            f"{most})"
        )
    drawn, axes = panels(2, 1, 4.6, PAGE, sharex=True, squeeze=True)
    floor = noise_floor(data)
    parts = [
        pd.DataFrame([{"quantity": "floor", "method": name, "dose": 100 * rate}])
        for name, rate in floor["slot"].items()
    ]
    for method, rows in seeds.groupby("method", sort=False):
        label = method_label(data, str(method))
        for ax, y in zip(axes, ("final", "variance"), strict=True):
            shown = rows[rows["variance"] > 0] if y == "variance" else rows  # 0 has no place on a log axis
            if shown.empty:
                continue
            table = interval_table(shown, "dose", y).sort_values("dose")
            draw_marks(ax, table, shown, "dose", y, look_of(str(method)), label)
            if len(table) == 1 and _ignores_noise(data, str(table["arm"].iloc[0])):
                ax.axhline(table["mean"].iloc[0], color=look_of(str(method)).colour, lw=0.9, ls=(0, (1, 2)))
            parts.append(table.assign(quantity=y, method=method))
    axes[1].set_xlabel("slots routed otherwise in the update forward, %")
    axes[0].set_xlim(left=-0.02 * axes[0].get_xlim()[1])
    axes[0].set_ylabel(reward_names(run_outcomes(data))[0])
    if seeds["final"].min() >= 0:
        axes[0].set_ylim(0, headroom([axes[0]], 0, 1.08 * float(seeds["final"].max())) or None)
    log_y(axes[1])
    axes[1].set_ylabel("variance of token log r, nats²")
    for ax in axes:
        draw_across(ax, 100 * floor["slot"], vertical=True)
    legend_above(drawn, axes)
    return Drawing(drawn, pd.concat(parts, ignore_index=True), floor_note(floor).strip(), interval="bar")


def _ignores_noise(data: StudyData, arm: str) -> bool:
    """Return whether selection noise changes nothing in an arm, because replay forces every row."""
    return str(data.arms["replay"][arm]).lower() != "none" and replays_all(data, arm)


def dose_table(data: StudyData) -> pd.DataFrame:
    """Return one row per arm and seed: method, noise, `dose` (slots changed in the update forward, %), `final` reward,
    `variance` of the token log-ratio in training (mean over steps, nats²)."""
    keys = ["arm", "seed"]
    found = (100 * slots_rerouted(data, keys)).rename("dose").to_frame()
    found["final"] = run_outcomes(data).set_index(keys)["final"]
    found["variance"] = in_run_variance(data).groupby(keys)["token"].mean()
    found = found.reset_index()
    about = data.arms[["method", "noise"]]
    return found.join(about, on="arm").sort_values(["noise", "arm", "seed"]).reset_index(drop=True)


def interval_table(rows: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Return one row per arm: mean of x over seeds; n, mean, low and high of y."""
    found = []
    for arm, part in rows.groupby("arm", sort=False):
        one = seed_interval(part[y].to_numpy(dtype=float))
        found.append({"arm": arm, x: part[x].mean(), "n": one.n, **one.columns("mean")})
    return pd.DataFrame(found)


def draw_marks(ax: Axes, table: pd.DataFrame, seeds: pd.DataFrame, x: str, y: str, look: Look, label: str) -> None:
    """Draw means with their intervals, and the seeds beside them: marks alone, with no line that joins them."""
    ax.plot(seeds[x], seeds[y], look.marker, ls="", color=look.colour, ms=2.4, alpha=0.45, mew=0)
    known = table[np.isfinite(table["low"])]
    ax.vlines(known[x], known["low"], known["high"], colors=look.colour, linewidths=2.4, alpha=0.35)
    ax.plot(
        table[x],
        table["mean"],
        look.marker,
        ls="",
        color=look.colour,
        mec="white",
        ms=6,
        label=legend_label(label),
        zorder=3,
    )


def method_label(data: StudyData, method: str) -> str:
    """Return what the labels of all arms of a method have in common, up to a comma: without what tells the arms
    apart."""
    labels = [str(label).split(",")[0].split() for label in data.arms.loc[data.arms["method"] == method, "label"]]
    return " ".join(words[0] for words in zip(*labels, strict=False) if len(set(words)) == 1) or " ".join(labels[0])
