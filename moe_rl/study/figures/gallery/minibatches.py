"""Final and peak score against the number of updates that a batch is split into; drawn where a study varies that
number."""

import pandas as pd

from moe_rl.settings import at
from moe_rl.study.curves import FINAL_STEPS
from moe_rl.study.data import StudyData
from moe_rl.study.figures.gallery.dose_response import draw_marks, interval_table
from moe_rl.study.figures.layout import headroom
from moe_rl.study.figures.register import Drawing, figure, runs_in
from moe_rl.study.figures.style import PAGE, NothingToDraw, legend_above, look_of, panels, twin
from moe_rl.study.outcomes import reward_names, run_outcomes


@figure(
    title="Score by minibatches per batch.",
    caption=(
        "Score against the number of minibatches that a sampled batch is split into, which is the number of updates "
        f"between two samplings: the more, the further off-policy the last. Left: mean of the last {FINAL_STEPS} "
        f"steps; right: highest mean of {FINAL_STEPS} successive steps, which is biased upwards by noise in every arm; "
        "or, where the study declares it, the held-out reward alone. Large: mean over seeds with its interval; small: "
        "seeds; arms of one N stand side by side."
    ),
    needs={"rollouts": ["reward"]},
    rank=21,
    special=True,
)
def minibatches(data: StudyData) -> Drawing:
    seeds = minibatch_table(data)
    if seeds["updates"].nunique() < 2:
        raise NothingToDraw("minibatches: all arms of this study make the same number of updates per batch")
    name = reward_names(seeds)[0]
    titles = {"final": name}
    if name == "final reward":
        titles = {"final": f"final (last {FINAL_STEPS} steps)", "peak": f"peak (best {FINAL_STEPS} steps)"}
    drawn, (axes,) = panels(1, len(titles), 2.9, PAGE, sharex=True, sharey=True)
    parts: list[pd.DataFrame] = []
    drawn_methods: list[str] = []
    labels_of = seeds.groupby("updates")["label"].unique().map(list)
    for label, rows in seeds.groupby("label", sort=False):
        method = str(rows["method"].iloc[0])
        look = twin(look_of(method), drawn_methods.count(method))
        drawn_methods.append(method)
        # arms of one N stand side by side around N, so that they do not overlap
        beside = {
            n: 1.09 ** (names.index(label) - (len(names) - 1) / 2) for n, names in labels_of.items() if label in names
        }
        for ax, y in zip(axes, titles, strict=True):
            table = interval_table(rows, "updates", y).sort_values("updates")
            means, values = (
                part.assign(updates=part["updates"] * part["updates"].map(beside)) for part in (table, rows)
            )
            draw_marks(ax, means, values, "updates", y, look, str(label))
            parts.append(table.assign(quantity=y, method=method))
    counts = sorted(seeds["updates"].unique())
    for ax, title in zip(axes, titles.values(), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(n) for n in counts])
        ax.minorticks_off()
        if len(titles) > 1:
            ax.set_title(title)
        ax.set_xlabel("minibatches (updates) per batch, N")
    axes[0].set_ylabel(name if len(titles) == 1 else "reward")
    if seeds["final"].min() >= 0:
        axes[0].set_ylim(0, headroom(axes, 0, 1.08 * float(seeds[list(titles)].max().max())) or None)
    legend_above(drawn, axes)
    said = "Every run samples equally often, so more minibatches are also more updates."
    if seeds["steps"].nunique() > 1:
        said = f"Runs sample {seeds['steps'].min()} to {seeds['steps'].max()} batches."
    return Drawing(drawn, pd.concat(parts, ignore_index=True), said, interval="bar", runs=runs_in(seeds))


def minibatch_table(data: StudyData) -> pd.DataFrame:
    """Return one row per arm and seed without noise: method, label, `updates` per batch, `steps`, `final` reward as
    `measured`, and `peak`: the highest mean of `FINAL_STEPS` successive steps. Labels end before their first comma, but
    not where an earlier arm of as many updates has that label."""
    rewards = {key: part["reward"] for key, part in data.rollouts.groupby(["arm", "seed"], observed=True)}
    outcomes = run_outcomes(data).set_index(["arm", "seed"])
    rows = []
    for run in data.runs:
        key = (run.arm, run.seed)
        count = at(run.config, "optim", "num_minibatches")
        if not isinstance(count, int) or key not in rewards or run.noise:
            continue
        of = rewards[key]
        label = str(data.arms["label"][run.arm])
        row = {"arm": run.arm, "seed": run.seed, "method": run.method, "label": label, "updates": count}
        peak = float(of.rolling(min(FINAL_STEPS, len(of))).mean().max())
        rows.append(row | dict(outcomes.loc[key, ["measured", "final"]]) | {"steps": len(of), "peak": peak})
    columns = ["arm", "seed", "method", "label", "updates", "steps", "measured", "final", "peak"]
    table = pd.DataFrame(rows, columns=columns)
    arms = table.groupby("arm")[["label", "updates"]].first().reindex(data.arms.index).dropna()
    short = arms["label"].str.split(",").str[0]
    taken = pd.concat([short, arms["updates"]], axis=1).duplicated()
    return table.assign(label=table["arm"].map(short.where(~taken, arms["label"])))
