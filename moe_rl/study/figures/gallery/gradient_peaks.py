"""Gradient norm of a run before clipping: its median and its largest update, a row per arm."""

from moe_rl.study.data import StudyData
from moe_rl.study.figures.register import Drawing, figure
from moe_rl.study.figures.rows import Column, Dots, arm_rows
from moe_rl.study.figures.style import NothingToDraw

UPDATES = {"median": "gradient norm,\nmedian update", "max": "gradient norm,\nlargest update"}


@figure(
    title="Gradient norm: median and peak.",
    caption="Global L2 norm of the gradient before it is clipped: the median and the largest of all updates of a run; "
    "log axes. Dots below: runs; above: their geometric mean. Updates without a gradient are left out.",
    needs={"updates": ["grad_norm"]},
    rank=192,
)
def gradient_peaks(data: StudyData) -> Drawing:
    rows = data.updates[data.updates["grad_norm"] > 0]
    if rows.empty:
        raise NothingToDraw("gradient_peaks: every norm is 0, no update had a gradient")
    runs = rows.groupby(["arm", "seed"], observed=True)["grad_norm"].agg(list(UPDATES))
    columns = [Column(title, [Dots(runs[name].unstack("seed"))], log=True) for name, title in UPDATES.items()]
    drawn = arm_rows(data, columns)
    return Drawing(drawn.figure, drawn.frame, interval="bar")
