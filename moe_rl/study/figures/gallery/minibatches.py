"""Final and peak score against the number of updates that a batch is split into; drawn where a study varies it."""

import pandas as pd

from moe_rl.settings import at
from moe_rl.study.curves import FINAL_STEPS, final_value
from moe_rl.study.data import StudyData
from moe_rl.study.figures.gallery.dose_response import draw_marks, interval_table, method_label
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.style import PAGE, NothingToDraw, legend_above, look_of, panels


@figure(
    title="Score by minibatches per batch.",
    caption=(
        "Score against the number of minibatches that a sampled batch is split into, which is the number of updates "
        f"between two samplings: the more, the further off-policy the last. Left: mean of the last {FINAL_STEPS} "
        f"steps; right: highest mean of {FINAL_STEPS} successive steps, which is biased upwards by noise in every arm. "
        "Large: mean over seeds with its interval; small: seeds; arms of one N stand side by side."
    ),
    needs={"rollouts": ["reward"]},
    rank=21,
    special=True,
)
def minibatches(data: StudyData) -> Drawing:
    seeds = minibatch_table(data)
    if seeds["updates"].nunique() < 2:
        raise NothingToDraw("minibatches: all arms of this study make the same number of updates per batch")
    drawn, (axes,) = panels(1, 2, 2.9, PAGE, sharex=True, sharey=True)
    parts = []
    methods = seeds["method"].nunique()
    for i, (method, rows) in enumerate(seeds.groupby("method", sort=False)):
        beside = 1.09 ** (i - (methods - 1) / 2)  # arms of one N stand side by side, not on one another
        for ax, y in zip(axes, ("final", "peak"), strict=True):
            table = interval_table(rows, "updates", y).sort_values("updates")
            means, values = (part.assign(updates=beside * part["updates"]) for part in (table, rows))
            draw_marks(ax, means, values, "updates", y, look_of(str(method)), method_label(data, str(method)))
            parts.append(table.assign(quantity=y, method=method))
    counts = sorted(seeds["updates"].unique())
    for ax, title in zip(axes, (f"final (last {FINAL_STEPS} steps)", f"peak (best {FINAL_STEPS} steps)"), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(n) for n in counts])
        ax.minorticks_off()
        ax.set_title(title)
        ax.set_xlabel("minibatches (updates) per batch, N")
    axes[0].set_ylabel("reward")
    if seeds["final"].min() >= 0:
        axes[0].set_ylim(0, 1.08 * float(seeds["peak"].max()) or None)
    legend_above(drawn, axes)
    said = "Every run samples equally often, so more minibatches are also more updates."
    if seeds["steps"].nunique() > 1:
        said = f"Runs sample {seeds['steps'].min()} to {seeds['steps'].max()} batches."
    return Drawing(drawn, pd.concat(parts, ignore_index=True), said, interval="bar")


def minibatch_table(data: StudyData) -> pd.DataFrame:
    """One row per arm and seed without noise: method, `updates` per batch, `steps`, `final` and `peak`
    reward."""
    rewards = {key: part["reward"] for key, part in data.rollouts.groupby(["arm", "seed"], observed=True)}
    rows = []
    for run in data.runs:
        of = rewards.get((run.arm, run.seed))
        count = at(run.config, "optim", "num_minibatches")
        if not isinstance(count, int) or of is None or run.noise:
            continue
        row = {"arm": run.arm, "seed": run.seed, "method": run.method, "updates": count, "steps": len(of)}
        peak = float(of.rolling(min(FINAL_STEPS, len(of))).mean().max())
        rows.append(row | {"final": final_value(of.to_numpy()), "peak": peak})
    return pd.DataFrame(rows, columns=["arm", "seed", "method", "updates", "steps", "final", "peak"])
