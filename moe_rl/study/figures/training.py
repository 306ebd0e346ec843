"""Figures of training itself: reward, clipping, gradient norm, KL, entropy, length, and the final table."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from moe_rl.study.data import StudyData
from moe_rl.study.figures.style import (
    GREY,
    Condition,
    NothingToDraw,
    StudyFigure,
    arm_looks,
    conditions,
    draw_seeds,
    legend_above,
    lines_note,
    log_y,
    need,
    noise_note,
    panels,
    seed_table,
    seeds_note,
    step_axis,
    styled,
    summarise,
)
from moe_rl.study.statistics import COLLAPSE_RULE
from moe_rl.study.summary import final_rewards, full_label, replay_stands_for_noise


@styled
def reward(data: StudyData) -> StudyFigure:
    """Mean reward of the sampled batch against the RL step, one panel per condition."""
    rows = need(data.rollouts, ["reward"], "reward")
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.75, sharey=True)
    parts = []
    for ax, condition in zip(axes[0], shown, strict=True):
        parts += _curves(ax, data, condition, rows, "reward")
        mark_collapse(ax, data, condition)
        ax.set_title(condition.title(len(shown) - 1))
        step_axis(ax)
    axes[0, 0].set_ylabel("reward, mean over responses")
    best = float(rows["reward"].max())
    axes[0, 0].set_ylim(0, None if best > 1 else min(1.0, best * 1.08) or 1.0)  # a task may never be solved
    legend_above(figure, axes)
    many = f"{int(rows['reward_n'].median())} " if "reward_n" in rows else ""
    caption = (
        f"Mean reward of the {many}responses sampled at each RL step, before the updates of that step. "
        f"{lines_note(data)}{collapse_note(data)}{noise_note(data)}{_replay_note(data)} {seeds_note(data)}"
    )
    return StudyFigure("reward", "Reward against RL step.", caption, figure, pd.concat(parts))


@styled
def clipped_tokens(data: StudyData) -> StudyFigure:
    """Share of response tokens that the clip takes out of the gradient, log axis with a place for zero."""
    rows = need(data.updates, ["clipped_tokens", "tokens"], "clipped_tokens")
    steps = rows.groupby(["arm", "seed", "step"], as_index=False)[["clipped_tokens", "tokens"]].sum()
    steps["fraction"] = steps["clipped_tokens"] / steps["tokens"]
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.75, sharey=True)
    positive = steps.loc[steps["fraction"] > 0, "fraction"]
    decade = 10.0 ** np.floor(np.log10(positive.min())) if len(positive) else 1e-3
    floor = decade / 4  # the place of zero, between two powers of ten
    parts, zeros = [], False
    for ax, condition in zip(axes[0], shown, strict=True):
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            table = seed_table(steps[steps["arm"] == arm], "step", "fraction")
            if table.empty:
                continue
            parts.append(summarise(table, condition=condition.name, arm=arm))
            draw_seeds(ax, table.clip(lower=floor), look, label, thin=False)
            none = table.index[table.mean(axis=1) == 0]
            zeros |= len(none) > 0
            ax.plot(none, np.full(len(none), floor), look.marker, mfc="white", mec=look.colour, zorder=4)
        ax.set_title(condition.title(len(shown) - 1))
        step_axis(ax)
    log_y(axes[0, 0])
    if zeros:
        for ax in axes[0]:
            ax.axhline(decade / 2, color=GREY, lw=0.6, ls=(0, (1, 2)))
        axes[0, 0].annotate(
            "0", (0, floor), xycoords=("axes fraction", "data"), xytext=(-4, 0), textcoords="offset points",
            ha="right", va="center", fontsize=7.5,
        )  # fmt: skip
    axes[0, 0].set_ylabel("clipped tokens / response tokens")
    axes[0, 0].set_ylim(floor * 0.7, 1)
    legend_above(figure, axes)
    caption = (
        "Fraction of response tokens that the clip takes out of the gradient (A > 0 and ratio above the "
        "range, or A < 0 and below; with a sequence ratio every token of a clipped sequence), pooled over "
        "all updates of a step; log axis. Line: mean over seeds. Steps in which no seed clipped a token "
        "are drawn as open markers below the dotted line, at 0. Clip ranges differ by method and are "
        f"listed in the configuration.{noise_note(data)} {seeds_note(data)}"
    )
    return StudyFigure("clipped_tokens", "Clipped tokens.", caption, figure, pd.concat(parts))


@styled
def gradient_norm(data: StudyData) -> StudyFigure:
    """Gradient norm before clipping, mean over the updates of a step."""
    rows = need(data.updates, ["grad_norm"], "gradient_norm")
    steps = rows.groupby(["arm", "seed", "step"], as_index=False)[["grad_norm"]].mean()
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.6, sharey=True)
    parts = []
    for ax, condition in zip(axes[0], shown, strict=True):
        parts += _curves(ax, data, condition, steps, "grad_norm")
        ax.set_title(condition.title(len(shown) - 1))
        step_axis(ax)
    log_y(axes[0, 0])
    axes[0, 0].set_ylabel("gradient norm, before clipping")
    legend_above(figure, axes)
    caption = (
        "Global L2 norm of the gradient before it is clipped, mean over the updates of a step; log axis. "
        f"{lines_note(data)}{noise_note(data)} {seeds_note(data)}"
    )
    return StudyFigure("gradient_norm", "Gradient norm.", caption, figure, pd.concat(parts))


_DYNAMICS = (
    ("k3", "KL (k3), nats/token", "log"),
    ("k1", "KL (k1), nats/token", "linear"),
    ("entropy", "entropy, nats/token", "linear"),
    ("response_length", "length, tokens", "linear"),
)


@styled
def dynamics(data: StudyData) -> StudyFigure:
    """KL of the update (k1, k3), entropy and response length against the step; a row per condition."""
    need(data.rollouts, ["response_length"], "dynamics")
    present = [c for c in ("k1", "k3", "entropy") if c in data.updates]
    frame = data.updates.groupby(["arm", "seed", "step"], as_index=False)[present].mean()
    frame = frame.merge(data.rollouts[["arm", "seed", "step", "response_length"]], how="outer")
    shown = conditions(data)
    figure, axes = panels(len(shown), 4, 0.45 + 1.7 * len(shown), sharex=True)
    parts = []
    for i, (row, condition) in enumerate(zip(axes, shown, strict=True)):
        for ax, (name, label, scale) in zip(row, _DYNAMICS, strict=True):
            if name in frame:
                parts += _curves(ax, data, condition, frame.dropna(subset=[name]), name)
            ax.set_title("" if i else label)
            if name not in frame or (frame[name] > 0).any():  # else there is nothing to put on a log axis
                ax.set_yscale(scale)
            mark_collapse(ax, data, condition)
        row[0].set_ylabel(condition.name)
    for column, (name, _, _) in zip(axes.T, _DYNAMICS, strict=True):
        step_axis(column[-1])
        if name != "k1":  # k1 under noise is so much larger that its own axis says more
            limits = np.array([ax.get_ylim() for ax in column])
            for ax in column:
                ax.set_ylim(limits.min(), limits.max())
        if name == "k3":
            for ax in column:
                log_y(ax)
    legend_above(figure, axes)
    caption = (
        "In-run quantities on the training minibatches, under each arm's own routing, mean over the "
        "updates of a step. k1 = mean(−log r) and k3 = mean(r − 1 − log r) with r = new/old on the old "
        "policy's tokens both estimate KL(old‖new); the axis of k1 differs between rows. Entropy of the "
        f"sampled distribution; mean response length. {lines_note(data)}{collapse_note(data)}{noise_note(data)} "
        f"{seeds_note(data)}"
    )
    title = "KL, entropy and response length."
    return StudyFigure("dynamics", title, caption, figure, pd.concat(parts))


@styled
def final_reward(data: StudyData) -> StudyFigure:
    """Final reward of every arm with its seeds and interval, and the numbers beside it."""
    table = final_rewards(data)
    if table["final"].isna().all():
        raise NothingToDraw("final_reward: no rollout has been recorded yet")
    shown = conditions(data)
    rows = len(table) + len(shown)
    figure, axes = panels(1, 2, 0.75 + 0.24 * rows, width_ratios=[1, 1.05], sharey=True)
    ax, text = axes[0]
    text.axis("off")
    heads = ("mean [95 % interval]", "IQM", "area", "collapsed")
    places = (0.36, 0.58, 0.76, 0.98)
    cell: dict[str, Any] = {"transform": text.get_yaxis_transform(), "ha": "right", "va": "center"}
    for head, place in zip(heads, places, strict=True):
        text.text(place, -0.9, head, color=GREY, fontsize=7, **cell)
    rows_of = {str(row["arm"]): row for row in table.to_dict("records")}
    y, ticks = 0, list[tuple[int, str, bool]]()
    for condition in shown:
        ticks.append((y, condition.title(), True))
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            y += 1
            ticks.append((y, label, False))
            row = rows_of[arm]
            bar = [row["low"], row["high"]]
            seeds = list(row["by_seed"].values())
            ax.plot(bar, [y, y], color=look.colour, lw=2.4, alpha=0.55)
            ax.plot(seeds, np.full(len(seeds), y + 0.3), "o", mfc="none", mec=look.colour, ms=2.6, mew=0.7)
            ax.plot(row["final"], y, look.marker, color=look.colour, mec="white", ms=6, zorder=4)
            mean = f"{row['final']:.3f}" + (f" [{bar[0]:.3f}, {bar[1]:.3f}]" if np.isfinite(bar[0]) else "")
            values = (mean, f"{row['iqm']:.3f}", f"{row['area']:.3f}", f"{row['collapsed']}/{row['n']}")
            for value, place in zip(values, places, strict=True):
                text.text(place, y, value, fontsize=7.5, **cell)
        y += 1
    ax.set_yticks([t[0] for t in ticks], [t[1] for t in ticks])
    for tick, (_, _, bold) in zip(ax.get_yticklabels(), ticks, strict=True):
        tick.set(fontweight="bold" if bold else "normal", fontsize=7 if bold else 8)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="y", visible=False)
    ax.set_ylim(y - 0.4, -1.3)
    ends = [v for seeds in table["by_seed"] for v in seeds.values()]
    ax.set_xlim(np.floor(10 * min(ends) - 0.2) / 10, np.ceil(10 * max(ends) + 0.2) / 10)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel("final reward (mean of the last 5 steps)")
    figure.draw_without_rendering()  # bold tick labels are only measured at the second layout
    caption = (
        "Final reward: mean of the last 5 steps of a run. Marker: mean over seeds; bar: its interval; open "
        "circles below: seeds. IQM: interquartile mean (equals the mean below four seeds). Area: mean "
        f"reward over all steps. Collapsed: {COLLAPSE_RULE}.{noise_note(data)}{_replay_note(data)} {seeds_note(data)}"
    )
    return StudyFigure(
        "final_reward", "Final reward.", caption, figure, table.drop(columns=["by_seed", "evaluation_by_seed"])
    )


def _curves(ax: Axes, data: StudyData, condition: Condition, rows: pd.DataFrame, y: str) -> list[pd.DataFrame]:
    """Every arm of a condition against the step; returns what was drawn."""
    parts = []
    for arm, (look, label) in arm_looks(data, condition.arms).items():
        table = seed_table(rows[rows["arm"] == arm], "step", y)
        if not table.empty:
            draw_seeds(ax, table, look, label)
            parts.append(summarise(table, quantity=y, condition=condition.name, arm=arm))
    return parts


def collapse_note(data: StudyData) -> str:
    fell = bool(final_rewards(data)["collapsed"].any())
    return f" ×: step at which a run collapsed ({COLLAPSE_RULE})." if fell else ""


def mark_collapse(ax: Axes, data: StudyData, condition: Condition) -> None:
    table = final_rewards(data).set_index("arm")
    for arm, (look, _) in arm_looks(data, condition.arms).items():
        for step in table["collapse_steps"][arm]:
            ax.plot(step, 0.02, "x", color=look.colour, transform=ax.get_xaxis_transform(), mew=1.4, clip_on=False)


def _replay_note(data: StudyData) -> str:
    """Replay never sees selection noise: its run under noise is its natural run, which is drawn; said here."""
    for condition in conditions(data):
        natural = replay_stands_for_noise(data, condition.noise)
        if natural is not None:
            return (
                f" {full_label(data, natural)} never sees the noise: by construction its run there is its natural run."
            )
    return ""


__all__ = ["clipped_tokens", "dynamics", "final_reward", "gradient_norm", "reward"]
