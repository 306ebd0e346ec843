"""Package for studies of many runs: running them, loading their folders as tables, statistics, figures and reports.

    from moe_rl import study
    data = study.load("runs/replay_vs_gspo")      # tidy DataFrames: rollouts, updates, probes, evals, tokens
    study.figures.reward(data)                    # a figure with its table and caption
    study.statistics.seed_interval([...])         # intervals across seeds

Submodules are imported at their first use, so that reading tables needs no torch and statistics need no matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.run_folder import RunFolderError, RunWriter
    from moe_rl.study import figures, reading, report, statistics, summary
    from moe_rl.study.data import Run, StudyData, StudyDataError, join, load
    from moe_rl.study.report import draw_study

_NAMES = {
    **dict.fromkeys(("Run", "StudyData", "StudyDataError", "join", "load"), "moe_rl.study.data"),
    "draw_study": "moe_rl.study.report",
    **dict.fromkeys(("RunFolderError", "RunWriter"), "moe_rl.run_folder"),
}

__all__ = [
    "Run",
    "RunFolderError",
    "RunWriter",
    "StudyData",
    "StudyDataError",
    "draw_study",
    "figures",
    "join",
    "load",
    "reading",
    "report",
    "statistics",
    "summary",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    if name in __all__:
        return import_module(f"moe_rl.study.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
