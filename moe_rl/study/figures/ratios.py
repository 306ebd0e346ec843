"""Figures of importance ratios: their variance by level and routing, tails and quantiles."""

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from moe_rl.study.data import StudyData
from moe_rl.study.figures.style import (
    GREY,
    NothingToDraw,
    StudyFigure,
    arm_looks,
    arm_panels,
    arm_title,
    conditions,
    draw_seeds,
    legend_above,
    log_y,
    look_of,
    need,
    noise_note,
    panel_arms,
    panels,
    panels_note,
    plain,
    seed_table,
    seeds_note,
    share_axes,
    step_axis,
    styled,
    summarise,
)
from moe_rl.study.summary import in_run_variance, last_updates, probe_factors

PAIR = (
    "log r = new − old log-probability of the same token (nats); natural: live routing; replayed: the old "
    "policy's routes forced on the same weights"
)
TAUS = np.round(np.geomspace(1.01, 10, 60), 6)
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@styled
def ratio_variance(data: StudyData) -> StudyFigure:
    """Variance of log-ratios in training; what replay and averaging remove of it."""
    need(data.updates, ["var_token_log_ratio", "var_sequence_log_ratio"], "ratio_variance")
    need(data.probes, ["var_token_natural", "var_token_replayed", "var_sequence_natural"], "ratio_variance")
    steps, factors = in_run_variance(data), probe_factors(data)
    shown = conditions(data)
    figure, axes = panels(len(shown), 3, 0.6 + 2.05 * len(shown), sharex="col", sharey="col", width_ratios=[1.45, 1, 1])
    parts = []
    for i, (row, condition) in enumerate(zip(axes, shown, strict=True)):
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            for level, weight in (("token", 1.5), ("sequence", 0.9)):
                table = seed_table(steps[steps["arm"] == arm], "step", level).replace(0.0, np.nan)
                if not table.dropna(how="all").empty:
                    style = {} if level == "token" else {"lw": weight, "ms": 2.5, "mfc": "white"}
                    draw_seeds(row[0], table, look, label if level == "token" else "_", thin=False, **style)
                    parts.append(summarise(table, quantity=f"in-run {level}", condition=condition.name, arm=arm))
            for ax, factor in ((row[1], "replay"), (row[2], "averaging")):
                table = seed_table(factors[factors["arm"] == arm], "update", factor)
                if not table.dropna(how="all").empty:
                    draw_seeds(ax, table, look, label)
                    parts.append(summarise(table, quantity=factor, condition=condition.name, arm=arm))
        row[0].set_ylabel(f"{condition.name}\nvariance of log r")
        if not i:
            row[0].set_title("In training: token (filled), sequence (open)")
            row[1].set_title("natural / replayed, token")
            row[2].set_title("token / sequence")
    if not parts:
        raise NothingToDraw("ratio_variance: every log-ratio is 0, the policies did not move")
    length = float(data.rollouts["response_length"].mean()) if "response_length" in data.rollouts else np.nan
    log_y(axes[0, 0])
    for row in axes:
        row[1].axhline(1, color=GREY, lw=1, ls=(0, (1, 2)))
        row[2].axhline(length, color=GREY, lw=1, ls=(0, (1, 2)))
        row[2].set_ylim(0, None)
    log_y(axes[0, 1])
    text = f"dotted: mean response length {length:.0f}"
    axes[0, 2].text(0.97, 0.04, text, transform=axes[0, 2].transAxes, fontsize=6.5, color=GREY, ha="right")
    step_axis(axes[-1, 0])
    for ax in axes[-1, 1:]:
        ax.set_xlabel("update within the step")
        ax.set_xticks(sorted(factors["update"].unique())[:: max(1, factors["update"].nunique() // 8)])
    legend_above(figure, axes[:, 0])
    caption = (
        f"{PAIR}. Left: variance over the training minibatches of a step, mean of the updates from the "
        "second on, under the arm's own routing (noise and replay included); filled: tokens; open: "
        "length-normalised sequences. These compare different trajectories. Middle: token variance natural "
        "over replayed on the same weights and tokens (probe, median over steps, log axis); 1: replay "
        "removes nothing. Right: token over sequence variance (probe, natural, median over steps); "
        f"independent tokens would give the response length (dotted).{noise_note(data)} {seeds_note(data)}"
    )
    title = "Variance of log-ratios."
    return StudyFigure("ratio_variance", title, caption, figure, pd.concat(parts))


@styled
def log_ratio_bands(data: StudyData) -> StudyFigure:
    """Quantiles of the token log-ratio against the step, natural filled, replayed outlined."""
    tokens = token_ratios(data, "log_ratio_bands")
    tokens = last_updates(tokens)
    arms = _drawn_arms(data, tokens)
    figure, axes = arm_panels(len(arms), 1, 2.0)
    parts = []
    for ax, arm in zip(axes[0], arms, strict=True):
        look = look_of(str(data.arms["method"][arm]))
        of_arm = tokens[tokens["arm"] == arm]
        for kind in ("natural", "replayed"):
            table = of_arm.groupby("step")[kind].quantile(np.array(QUANTILES)).unstack()
            named = table.rename(columns=lambda q: f"quantile_{q:g}")
            parts.append(named.assign(n=of_arm.groupby("step").size(), arm=arm, routing=kind).reset_index())
            if len(table) == 1:  # one stored step: a band needs a width
                table = pd.concat([table.set_index(table.index - 0.4), table.set_index(table.index + 0.4)])
            marker = "o" if 2 < len(table) < 12 else None
            if kind == "natural":
                for low, high, alpha in ((0.01, 0.99, 0.15), (0.05, 0.95, 0.2), (0.25, 0.75, 0.35)):
                    ax.fill_between(table.index, table[low], table[high], color=look.colour, alpha=alpha, lw=0)
                ax.plot(table.index, table[0.5], color=look.colour, lw=1.3)
            else:
                for q in (0.01, 0.99):
                    ax.plot(table.index, table[q], color="#1a1a1a", lw=0.9, ls=(0, (3, 1.5)), marker=marker, ms=2)
        ax.set_title(arm_title(data, arm), fontsize=7.5)
    for ax in axes[0]:
        ax.set_xticks(sorted(tokens["step"].unique())[:: -(-tokens["step"].nunique() // 4)])
    share_axes(axes[0], "RL step", "log r, nats")
    caption = (
        f"{PAIR}. Quantiles over the stored response tokens of all seeds after the last update of a step: "
        "bands 1–99 %, 5–95 %, 25–75 % and the median, natural; dashed: the 1 % and 99 % quantiles "
        f"replayed.{panels_note(data)} {seeds_note(data, interval=False)}"
    )
    return StudyFigure("log_ratio_bands", "Quantiles of the token log-ratio.", caption, figure, pd.concat(parts))


@styled
def probability_scatter(data: StudyData) -> StudyFigure:
    """Old against new token probability as a density, natural above, replayed below."""
    tokens = token_ratios(data, "probability_scatter")
    tokens = last_updates(tokens)
    arms = _drawn_arms(data, tokens)
    figure, axes = arm_panels(len(arms), 2, 0.2 + 5.1 / min(5, max(len(arms), 3)))
    edges = np.linspace(0, 1, 61)
    grids = {}
    for arm in arms:
        of_arm = tokens[tokens["arm"] == arm]
        old = np.exp(of_arm["old_logp"])
        for kind in ("natural", "replayed"):
            grids[arm, kind] = np.histogram2d(old, np.exp(of_arm[f"logp_{kind}"]), bins=[edges, edges])[0]
    norm = LogNorm(1, max(2.0, max(grid.max() for grid in grids.values())))
    parts = []
    for (arm, kind), grid in grids.items():
        ax = axes[("natural", "replayed").index(kind), arms.index(arm)]
        mesh = ax.pcolormesh(
            edges, edges, np.where(grid.T > 0, grid.T, np.nan), cmap="viridis_r", norm=norm, rasterized=True
        )
        ax.plot([0, 1], [0, 1], color="#1a1a1a", lw=0.5)
        of_arm = tokens[tokens["arm"] == arm]
        gap = np.abs(np.exp(of_arm["old_logp"]) - np.exp(of_arm[f"logp_{kind}"])).mean()
        ax.text(0.04, 0.96, f"|Δp| {gap:.3f}", transform=ax.transAxes, va="top", fontsize=6.5)
        ax.set_aspect("equal")
        ax.set_xticks([0, 0.5, 1])
        ax.set_yticks([0, 0.5, 1])
        x, y = np.nonzero(grid)
        cells = {"old_from": edges[x], "new_from": edges[y], "tokens": grid[x, y]}
        parts.append(pd.DataFrame({"arm": arm, "routing": kind, **cells}))
    for ax, arm in zip(axes[0], arms, strict=True):
        ax.set_title(arm_title(data, arm), fontsize=7.5)
    share_axes(axes[0], "", "natural\nnew probability")
    share_axes(axes[1], "old probability", "replayed\nnew probability")
    figure.colorbar(mesh, ax=axes, shrink=0.8, aspect=25, pad=0.02, label="tokens per cell").outline.set_visible(False)
    caption = (
        "Probability of each stored response token under the old policy and after the last update of its "
        "step, live routing (top) and the old routes forced on the same weights (bottom); all stored steps "
        f"and seeds; log colour. |Δp|: mean absolute difference.{panels_note(data)} "
        f"{seeds_note(data, interval=False)}"
    )
    title = "Token probability, old against new."
    return StudyFigure("probability_scatter", title, caption, figure, pd.concat(parts))


@styled
def tail_fraction(data: StudyData) -> StudyFigure:
    """F(τ): share of tokens whose ratio or its inverse exceeds τ, log-log."""
    tokens = token_ratios(data, "tail_fraction")
    tokens = last_updates(tokens)
    shown = conditions(data)
    figure, axes = panels(1, len(shown), 2.8, sharey=True, sharex=True)
    parts = []
    for ax, condition in zip(axes[0], shown, strict=True):
        for arm, (look, label) in arm_looks(data, condition.arms).items():
            of_arm = tokens[tokens["arm"] == arm]
            if of_arm.empty:
                continue
            for kind in ("natural", "replayed"):
                size = np.sort(np.abs(of_arm[kind].to_numpy(dtype=float)))
                share = (size.size - np.searchsorted(size, np.log(TAUS), side="right")) / size.size
                parts.append(
                    pd.DataFrame({"arm": arm, "routing": kind, "tau": TAUS, "fraction": share, "tokens": size.size})
                )
                seen = share > 0
                if kind == "natural":
                    line = {"ls": look.dash, "marker": look.marker, "markevery": 8, "label": label}
                else:
                    line = {"ls": (0, (1, 1.5)), "lw": 1.1}
                ax.plot(TAUS[seen], share[seen], color=look.colour, **line)
        ax.set(title=condition.title(len(shown) - 1), xlabel="τ", xscale="log", yscale="log")
    log_y(axes[0, 0])
    frame = pd.concat(parts)
    if not (frame["fraction"] > 0).any():
        raise NothingToDraw(f"tail_fraction: no ratio leaves {TAUS[0]:g}, the policies hardly moved")
    last = float(frame.loc[frame["fraction"] > 0, "tau"].max())
    axes[0, 0].set_xlim(TAUS[0], min(TAUS[-1], max(1.1, last * 1.1)))
    for ax in axes[0]:
        top = ax.get_xlim()[1]
        ticks = (1.1, 1.5, 2, 3, 5, 10) if top > 3.5 else (1.1, 1.2, 1.5, 2, 3) if top > 1.5 else (1.02, 1.05, 1.1, 1.2)
        ax.set_xticks([t for t in ticks if t <= top])
        ax.xaxis.set_major_formatter(FuncFormatter(plain))
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("share of tokens with max(r, 1/r) > τ")
    replayed = Line2D([], [], color=GREY, ls=(0, (1, 1.5)), lw=1.1, label="replayed, same weights")
    legend_above(figure, axes, [replayed])
    caption = (
        "F(τ): share of stored response tokens whose ratio r = new/old, or its inverse, exceeds τ, after "
        "the last update of a step; log-log; a line ends where no token is left. Pair: two policies, one "
        "engine, so published values for two engines are not drawn. All stored steps and "
        f"seeds.{noise_note(data)} {seeds_note(data, interval=False)}"
    )
    return StudyFigure("tail_fraction", "Tail of the ratio, F(τ).", caption, figure, frame)


def token_ratios(data: StudyData, figure: str) -> pd.DataFrame:
    """The stored tokens with their log-ratios `natural` and `replayed`, nats; NothingToDraw where there are none."""
    rows = need(data.tokens, ["old_logp", "logp_natural", "logp_replayed", "update"], figure)
    return rows.assign(
        natural=rows["logp_natural"] - rows["old_logp"], replayed=rows["logp_replayed"] - rows["old_logp"]
    )


def _drawn_arms(data: StudyData, rows: pd.DataFrame) -> list[str]:
    present = set(rows["arm"].unique())
    return [arm for arm in panel_arms(data) if arm in present]


__all__ = ["log_ratio_bands", "probability_scatter", "ratio_variance", "tail_fraction", "token_ratios"]
