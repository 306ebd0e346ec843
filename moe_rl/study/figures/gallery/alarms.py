"""The steps at which signals crossed their thresholds: heat maps of arm and step, one panel per signal."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl.study.alarm_table import study_alarms
from moe_rl.study.alarms import Alarm, RunAlarms, alarms_of
from moe_rl.study.data import StudyData
from moe_rl.study.figures.layout import drawn_arms, short_label
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import in_two_lines
from moe_rl.study.figures.style import INK, PAGE, NothingToDraw, bare, label_bar, panels, step_axis


@figure(
    title="Alarms.",
    caption=(
        "Share of an arm's runs in which a monitored signal was beyond its threshold at a step, of those that recorded "
        "it at this step (grey: none); a cross is a step at which the reward of a run collapsed. The thresholds "
        "are rules of thumb from the sources that the report's table names, mostly for large models; none was "
        "calibrated against collapses."
    ),
    needs={},
    rank=195,
)
def alarms(data: StudyData) -> Drawing:
    runs = study_alarms(data)
    table = alarms_of(data.config.get("alarms"))
    rows = [
        {"arm": arm, "seed": seed, "alarm": alarm.name, "step": step, "value": value, "threshold": alarm.threshold}
        for (arm, seed), seen in runs.items()
        for alarm in table
        for step, value in seen.crossed[alarm.name]
    ]
    falls = [(arm, seen.collapse) for (arm, _), seen in runs.items() if seen.collapse is not None]
    heard = [alarm for alarm in table if any(seen.seen[alarm.name] for seen in runs.values())]
    crossed = [alarm for alarm in table if any(row["alarm"] == alarm.name for row in rows)]
    notes = {
        "Never crossed": [alarm.title for alarm in heard if alarm not in crossed],
        "Never recorded": [alarm.title for alarm in table if alarm.declared and alarm not in heard],
    }
    said = " ".join(f"{what}: {', '.join(titles)}." for what, titles in notes.items() if titles)
    if not rows and not falls:
        raise NothingToDraw(
            f"alarms: no signal crossed its threshold, and no run collapsed. {said or 'None was recorded.'}"
        )
    frame = pd.DataFrame(rows, columns=["arm", "seed", "alarm", "step", "value", "threshold"])
    return Drawing(_maps(data, runs, frame, crossed, falls), frame, said)


def _maps(
    data: StudyData,
    runs: Mapping[tuple[str, int], RunAlarms],
    frame: pd.DataFrame,
    crossed: list[Alarm],
    falls: list[tuple[str, int]],
) -> Figure:
    """Return a figure with a heat map for each alarm that crossed: share of an arm's runs beyond the threshold, by
    step."""
    arms = drawn_arms(data)
    shown: list[Alarm | None] = [*crossed] or [None]  # None: a panel of collapses alone
    labels = [in_two_lines(short_label(data, arm, 999)) for arm in arms]
    each = 0.2 if any("\n" in label for label in labels) else 0.125
    drawn, axes = panels(len(shown), 1, 0.6 + len(shown) * (0.3 + each * len(arms)), PAGE, sharex=True)
    axes = axes[:, 0]
    tables = [
        part[["arm", "seed", "step"]].astype({"arm": str}) for part in (data.rollouts, data.updates, frame) if len(part)
    ]
    last = pd.concat(tables).groupby(["arm", "seed"], as_index=False)["step"].max()
    for ax, alarm in zip(axes, shown, strict=True):
        beyond, there = np.zeros((2, len(arms), 1 + int(last["step"].max())))
        if alarm:
            recorded = [(arm, step) for (arm, _), run in runs.items() for step in run.steps[alarm.name]]
        else:  # collapses alone: all steps of the rewards
            ends = zip(last["arm"], last["step"], strict=True)
            recorded = [(arm, step) for arm, end in ends for step in range(end + 1)]
        own = frame[frame["alarm"] == alarm.name] if alarm else frame
        for arm, step in zip(own["arm"], own["step"], strict=True):  # at most one row per run and step
            if arm in arms:
                beyond[arms.index(arm), step] += 1
        for arm, step in recorded:
            if arm in arms and step < there.shape[1]:
                there[arms.index(arm), step] += 1
        share = np.divide(beyond, there, out=np.full_like(there, np.nan), where=there > 0)
        ax.set_facecolor(rcParams["grid.color"])
        mesh = ax.imshow(share, aspect="auto", interpolation="nearest", cmap="Oranges", vmin=0, vmax=1)
        for arm, step in falls:
            if arm in arms:
                ax.plot(step, arms.index(arm), "x", color=INK, ms=4, mew=1.2)
        ax.set_title(alarm.title if alarm else "", fontsize=7, loc="left", pad=2)
        ax.set_yticks(range(len(arms)), labels, fontsize=6, linespacing=0.95)
        bare(ax)
    step_axis(axes[-1])
    bar = drawn.colorbar(mesh, ax=axes.tolist(), shrink=min(1.0, 1.5 / drawn.get_figheight()))
    label_bar(bar, "share of runs", drawn.get_figheight() - 0.6)
    if falls:
        mark = Line2D([], [], ls="", marker="x", color=INK, ms=4, label="collapse of the reward of a run")
        drawn.legend(handles=[mark], loc="outside upper left", fontsize=6.5, frameon=False)
    return drawn
