"""Gradient norm before clipping, mean over the updates of a step."""

from moe_rl.study.data import StudyData
from moe_rl.study.figures.curves import curves, seed_tables
from moe_rl.study.figures.layout import many
from moe_rl.study.figures.register import GEOMETRIC, Drawing, figure, lines_note
from moe_rl.study.figures.style import NothingToDraw


@figure(
    title="Gradient norm.",
    caption="Global L2 norm of the gradient before it is clipped, mean over the updates of a step; log axis. "
    "Steps without a gradient, all of whose groups earned the same, are left out.",
    needs={"updates": ["grad_norm"]},
    rank=190,
    notes=(GEOMETRIC,),
)
def gradient_norm(data: StudyData) -> Drawing:
    tables = seed_tables(data.updates.dropna(subset=["grad_norm"]), "step", "grad_norm")
    tables = {arm: table.where(table > 0).dropna(how="all") for arm, table in tables.items()}
    tables = {arm: table for arm, table in tables.items() if len(table)}
    if not tables:
        raise NothingToDraw("gradient_norm: every norm is 0, no update had a gradient")
    drawn = curves(data, tables, "gradient norm\nbefore clipping", quantity="grad_norm", log=True, geometric=True)
    drawn.legend()
    return Drawing(drawn.figure, drawn.frame, lines_note(data, thin=not many(data)), interval="band")
