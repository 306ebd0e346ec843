"""The steps at which runs collapsed, where a figure shows them."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from moe_rl.study.curves import COLLAPSE_RULE
from moe_rl.study.data import StudyData
from moe_rl.study.figures.style import arm_colour
from moe_rl.study.outcomes import final_rewards


def mark_collapses(ax: Axes, data: StudyData, arms: Sequence[str]) -> None:
    """A cross at the foot of the axes for every run of these arms that collapsed."""
    table = final_rewards(data).set_index("arm")
    for arm in arms:
        steps = table["collapse_steps"][arm]
        if steps:
            colour, across = arm_colour(data, arm), ax.get_xaxis_transform()
            ax.plot(steps, [0.02] * len(steps), "x", color=colour, transform=across, mew=1.4, clip_on=False)


def collapse_note(data: StudyData) -> str:
    """What the crosses are, where there are some."""
    fell = bool(final_rewards(data)["collapsed"].any())
    return f" ×: step at which a run collapsed ({COLLAPSE_RULE})." if fell else ""
