"""What volatility costs: score against the measured dose of routing change, and against the updates per batch."""

import pandas as pd
from matplotlib.axes import Axes

from moe_rl.study.data import StudyData
from moe_rl.study.figures.floor import draw_across, floor_note
from moe_rl.study.figures.style import (
    NOISE_NOTE,
    Look,
    NothingToDraw,
    StudyFigure,
    legend_above,
    log_y,
    look_of,
    need,
    panel_arms,
    panels,
    seeds_note,
    styled,
)
from moe_rl.study.statistics import FINAL_STEPS, final_value, seed_interval
from moe_rl.study.summary import in_run_variance, noise_floor


@styled
def dose_response(data: StudyData) -> StudyFigure:
    """Final reward and in-run ratio variance against the share of slots that the update forward routed otherwise than
    the old policy; drawn where a method has arms of several doses."""
    need(data.updates, ["slots_changed", "slots", "var_token_log_ratio"], "dose_response")
    seeds = dose_table(data)
    seeds = seeds[seeds["arm"].isin(panel_arms(data))]  # a replay run under noise repeats its natural one
    spans = seeds.groupby("method")["noise"].nunique()
    if not (spans > 1).any():
        raise NothingToDraw("dose_response: no method of this study has arms with different selection noise")
    figure, axes = panels(1, 2, 2.9, sharex=True)
    floor = noise_floor(data)
    parts = [
        pd.DataFrame([{"quantity": "floor", "method": name, "dose": 100 * rate}])
        for name, rate in floor["slot"].items()
    ]
    for method, rows in seeds.groupby("method", sort=False):
        label = _method_label(data, str(method))
        for ax, y in zip(axes[0], ("final", "variance"), strict=True):
            table = interval_table(rows, "arm", "dose", y).sort_values("dose")
            table = table[table["mean"] > 0] if y == "variance" else table  # 0 has no place on a log axis
            if table.empty:
                continue
            _draw(ax, table, rows, "dose", y, look_of(str(method)), label)
            parts.append(table.assign(quantity=y, method=method))
    for ax in axes[0]:
        ax.set_xlabel("slots routed otherwise in the update forward, %")
        ax.set_xlim(left=-0.02 * ax.get_xlim()[1])
        draw_across(ax, 100 * floor["slot"], vertical=True)
    axes[0, 0].set_ylabel("final reward")
    axes[0, 0].set_ylim(0, 1.08 * float(seeds["final"].max()) or None)
    log_y(axes[0, 1])
    axes[0, 1].set_ylabel("variance of token log r, nats²")
    legend_above(figure, axes)
    caption = (
        "Dose: measured share of expert slots of the response that the update forward routed otherwise than the old "
        "policy did, pooled over all updates of a run (weights and selection noise together; 0 under replay, which "
        "ignores noise, so that a replay run without noise stands for every dose: dotted). Left: mean of the last "
        f"{FINAL_STEPS} steps. Right: variance of the token log-ratio over training minibatches, mean of the updates "
        "from the second on of each step, log axis. Large markers: mean over seeds with its interval; small: seeds. "
        f"{floor_note(floor)}{NOISE_NOTE} {seeds_note(data)}"
    )
    return StudyFigure("dose_response", "Dose-response to routing change.", caption, figure, pd.concat(parts))


def dose_table(data: StudyData) -> pd.DataFrame:
    """One row per arm and seed: method, noise, `dose` (slots changed in the update forward, %), `final` reward,
    `variance` of the token log-ratio in training (mean over steps, nats²)."""
    keys = ["arm", "seed"]
    sums = data.updates.groupby(keys)[["slots_changed", "slots"]].sum()
    found = (100 * sums["slots_changed"] / sums["slots"]).rename("dose").to_frame()
    found["final"] = data.rollouts.groupby(keys)["reward"].apply(lambda rewards: final_value(rewards.to_numpy()))
    found["variance"] = in_run_variance(data).groupby(keys)["token"].mean()
    found = found.reset_index()
    about = data.arms[["method", "noise"]]
    return found.join(about, on="arm").sort_values(["noise", "arm", "seed"]).reset_index(drop=True)


@styled
def minibatches(data: StudyData) -> StudyFigure:
    """Final and peak score against the number of updates per batch, by replay kind; drawn where a study varies it."""
    need(data.rollouts, ["reward"], "minibatches")
    seeds = minibatch_table(data)
    if seeds["updates"].nunique() < 2:
        raise NothingToDraw("minibatches: all arms of this study make the same number of updates per batch")
    figure, axes = panels(1, 2, 2.75, sharex=True, sharey=True)
    parts = []
    methods = seeds["method"].nunique()
    for i, (method, rows) in enumerate(seeds.groupby("method", sort=False)):
        beside = 1.07 ** (i - (methods - 1) / 2)  # arms of one N stand side by side, not on one another
        for ax, y in zip(axes[0], ("final", "peak"), strict=True):
            table = interval_table(rows, "arm", "updates", y).sort_values("updates")
            means, values = (part.assign(updates=beside * part["updates"]) for part in (table, rows))
            _draw(ax, means, values, "updates", y, look_of(str(method)), _method_label(data, str(method)))
            parts.append(table.assign(quantity=y, method=method))
    counts = sorted(seeds["updates"].unique())
    for ax, title in zip(
        axes[0], (f"Final (last {FINAL_STEPS} steps)", f"Peak (best {FINAL_STEPS} steps)"), strict=True
    ):
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(n) for n in counts])
        ax.minorticks_off()
        ax.set_title(title)
        ax.set_xlabel("minibatches (updates) per batch, N")
    axes[0, 0].set_ylabel("reward")
    axes[0, 0].set_ylim(0, 1.08 * float(seeds["peak"].max()) or None)
    legend_above(figure, axes)
    caption = (
        "Score against the number of minibatches that a sampled batch is split into, which is the number of updates "
        "between two samplings: the more, the further off-policy the last. Every run samples equally often, so more "
        f"minibatches are also more updates. Left: mean of the last {FINAL_STEPS} steps; right: highest mean of "
        f"{FINAL_STEPS} successive steps, which is biased upwards by noise in every arm. Arms of one N are drawn side "
        f"by side. {seeds_note(data)}"
    )
    return StudyFigure("minibatches", "Score by minibatches per batch.", caption, figure, pd.concat(parts))


def minibatch_table(data: StudyData) -> pd.DataFrame:
    """One row per arm and seed without noise: method, `updates` per batch, `final` and `peak` reward."""
    rows = []
    for run in data.runs:
        rewards = data.rollouts[(data.rollouts["arm"] == run.arm) & (data.rollouts["seed"] == run.seed)]["reward"]
        count = (run.config.get("optim") or {}).get("num_minibatches")
        if count is None or rewards.empty or run.noise:
            continue
        window = min(FINAL_STEPS, len(rewards))
        row = {"arm": run.arm, "seed": run.seed, "method": run.method, "updates": int(count)}
        row |= {"final": final_value(rewards.to_numpy()), "peak": float(rewards.rolling(window).mean().max())}
        rows.append(row)
    return pd.DataFrame(rows, columns=["arm", "seed", "method", "updates", "final", "peak"])


def interval_table(rows: pd.DataFrame, by: str, x: str, y: str) -> pd.DataFrame:
    """Per `by`: mean of x over seeds; n, mean, low and high of y."""
    found = []
    for key, part in rows.groupby(by, sort=False):
        interval = seed_interval(part[y].tolist())
        found.append({by: key, x: part[x].mean(), "n": len(part), "mean": interval.estimate,
                      "low": interval.low, "high": interval.high})  # fmt: skip
    return pd.DataFrame(found)


def _draw(ax: Axes, table: pd.DataFrame, seeds: pd.DataFrame, x: str, y: str, look: Look, label: str) -> None:
    ax.plot(seeds[x], seeds[y], look.marker, ls="", color=look.colour, ms=2.2, alpha=0.5)
    drawn = table.dropna(subset=["low"])
    ax.vlines(drawn[x], drawn["low"], drawn["high"], color=look.colour, lw=2.2, alpha=0.4)
    joined = look.dash if len(table) > 2 else ""  # two doses are no curve
    ax.plot(table[x], table["mean"], color=look.colour, ls=joined, marker=look.marker, ms=5, label=label)
    if len(table) == 1 and x == "dose":
        ax.axhline(table["mean"].iloc[0], color=look.colour, lw=0.9, ls=(0, (1, 2)))


def _method_label(data: StudyData, method: str) -> str:
    """The label that a method's first arm has, without what tells its arms apart."""
    label = str(data.arms.loc[data.arms["method"] == method, "label"].iloc[0])
    return label.split(",")[0]


__all__ = ["dose_response", "dose_table", "minibatch_table", "minibatches"]
