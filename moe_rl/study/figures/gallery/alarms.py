"""At which steps signals crossed their thresholds, run by run."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moe_rl.study.alarm_table import study_alarms
from moe_rl.study.alarms import alarms_of
from moe_rl.study.data import StudyData
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.style import INK, PAGE, NothingToDraw, look_of, step_axis
from moe_rl.study.summary import full_label

COLOURS = ("#D55E00", "#0B4A8F", "#27B08B", "#CC79A7", "#E69F00", "#56B4E9", "#7B3F98", "#8C564B", "#4D4D4D", "#8CC63E")
MARKERS = "ov^sD<>PX*"


@figure(
    title="Alarms.",
    caption=(
        "One line per run: each mark is a step at which a monitored signal crossed its threshold; a bar is the step at "
        "which the run's reward collapsed. The thresholds are rules of thumb from the sources that the report's table "
        "names, mostly for large models; none was calibrated against collapses."
    ),
    needs={"updates": ["grad_norm"]},
    rank=195,
)
def alarms(data: StudyData) -> Drawing:
    """Crossings of thresholds by step and run, with collapses."""
    runs = study_alarms(data)
    table = alarms_of(data.config.get("alarms"))
    rows = [
        {"arm": arm, "seed": seed, "alarm": alarm.name, "step": step, "value": value, "threshold": alarm.threshold}
        for (arm, seed), seen in runs.items()
        for alarm in table
        for step, value in seen.crossed[alarm.name]
    ]
    falls = {key: seen.collapse for key, seen in runs.items() if seen.collapse is not None}
    if not rows and not falls:
        raise NothingToDraw("alarms: no signal crossed its threshold, and no run collapsed")
    frame = pd.DataFrame(rows, columns=["arm", "seed", "alarm", "step", "value", "threshold"])
    crossed = [alarm for alarm in table if (frame["alarm"] == alarm.name).any()]
    picture = Figure(figsize=(PAGE, 0.9 + 0.13 * len(runs) + 0.14 * len(crossed)))
    ax = picture.subplots()
    for number, (arm, seed) in enumerate(runs):
        ax.axhline(number, color=look_of(str(data.arms["method"][arm])).colour, lw=0.5, alpha=0.5)
        if (arm, seed) in falls:
            ax.plot([falls[arm, seed]] * 2, [number - 0.4, number + 0.4], color=INK, lw=2)
    places = {key: number for number, key in enumerate(runs)}
    for i, alarm in enumerate(table):
        own = frame[frame["alarm"] == alarm.name]
        at = [places[arm, seed] for arm, seed in zip(own["arm"], own["seed"], strict=True)]
        ax.plot(own["step"], at, MARKERS[i % len(MARKERS)], ms=2.6, color=COLOURS[i % len(COLOURS)], mew=0, alpha=0.8)
    middle: dict[str, list[int]] = {}
    for (arm, _), number in places.items():
        middle.setdefault(arm, []).append(number)
    ax.set_yticks([sum(n) / len(n) for n in middle.values()], [full_label(data, arm) for arm in middle], fontsize=6.5)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    step_axis(ax)
    marks = [
        Line2D(
            [],
            [],
            ls="",
            marker=MARKERS[table.index(a) % len(MARKERS)],
            ms=4,
            color=COLOURS[table.index(a) % len(COLOURS)],
            label=a.title,
        )
        for a in crossed
    ]
    if falls:
        marks.append(Line2D([], [], color=INK, lw=2, label="collapse of the reward"))
    picture.legend(handles=marks, loc="outside upper left", fontsize=6.5, frameon=False, ncols=2)
    silent = [
        alarm.title for alarm in table if alarm not in crossed and any(seen.seen[alarm.name] for seen in runs.values())
    ]
    return Drawing(picture, frame, f"Never crossed: {', '.join(silent)}." if silent else "")
