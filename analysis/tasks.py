"""Reward that causes cost GRPO, and that methods win back, on four tasks (question 4):  python analysis/tasks.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/costs_by_task (what every cause costs),
DIR/tasks (the main study, also with another router), DIR/fast_router_tasks, DIR/bias_tasks, DIR/old_token_tasks,
DIR/many_update_tasks, DIR/ceiling_tasks, DIR/int4_tasks, DIR/int4_corrections and DIR/int4_corrections_held_out as
.pdf, .svg and .png and writes what is drawn beside them as CSV.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from moe_rl.study.figures.over_studies import by_cause, claims_figure, cures_figure, draw_from_results
from moe_rl.study.figures.saving import StudyFigure
from moe_rl.study.published import Declared, published_differences

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

Comparisons = dict[str, dict[str, Declared]]
"""Comparison -> task -> the study and the two arms that declare this comparison."""
EQUATIONS, AGAIN = "equations", "equations, other seeds"
OTHERS = {"reverse 24 letters": "reverse", "sort 8 letters": "sort", "add 3 digits": "add"}


def everywhere(others: str, *equations: str) -> dict[str, Declared]:
    """Return where one comparison was declared on each of the four tasks.

    others: CAUSE:ARM:OTHER; the studies CAUSE_TASK declare it on the other tasks.
    equations: STUDY:ARM:OTHER on equations, and possibly a second one with other seeds; if absent, `others` itself.
    """
    cause, arm, other = others.split(":")
    declared = [tuple(name.split(":")) for name in equations or (others,)]
    first = dict(zip((EQUATIONS, AGAIN), declared, strict=False))
    return first | {task: (f"{cause}_{study}", arm, other) for task, study in OTHERS.items()}


def as_in_the_main_study(arm: str, other: str) -> dict[str, Declared]:
    """Return where a comparison of the main study was declared: there, with another router, and on other tasks."""
    studies = {EQUATIONS: "replay_vs_gspo", "equations, sigmoid routers": "other_router"}
    studies |= {task: f"other_task_{study}" for task, study in OTHERS.items()}
    return {task: (study, arm, other) for task, study in studies.items()}


MAIN: Comparisons = {
    "Replay − GRPO": as_in_the_main_study("grpo_replay", "grpo"),
    "GSPO − GRPO": as_in_the_main_study("gspo", "grpo"),
    "Replay − GRPO, noise 0.02": as_in_the_main_study("grpo_replay", "grpo_noise02"),
    "GSPO − GRPO, noise 0.02": as_in_the_main_study("gspo_noise02", "grpo_noise02"),
    "Replay − GRPO, noise 0.05": as_in_the_main_study("grpo_replay", "grpo_noise05"),
    "GSPO − GRPO, noise 0.05": as_in_the_main_study("gspo_noise05", "grpo_noise05"),
}
FAST_ROUTERS: Comparisons = {
    "GRPO, full rate − a tenth": everywhere(
        "fast_routers:grpo:tenth", "levers_router:grpo_full:grpo_tenth", "methods_router:grpo:grpo_tenth"
    ),
    "Replay − GRPO, full rate": everywhere("fast_routers:replay:grpo"),
    "GSPO − GRPO, full rate": everywhere("fast_routers:gspo:grpo"),
}
BIAS: Comparisons = {
    "GRPO, bias − none": everywhere(
        "bias:grpo_bias1e3:grpo", "levers_balance:grpo_bias1e3:grpo", "levers_balance_replay:grpo_bias1e3:grpo"
    ),
    "Replay, used loads − GRPO": everywhere(
        "bias:replay_used_bias1e3:grpo_bias1e3", "levers_balance_live:grpo_replay_used:grpo_bias"
    ),
    "Replay, live loads − GRPO": everywhere(
        "bias:replay_live_bias1e3:grpo_bias1e3", "levers_balance_live:grpo_replay_live:grpo_bias"
    ),
}
LAG: Comparisons = {
    "GRPO, waited 4 steps − fresh": everywhere("lag:grpo_lag4:grpo"),
    "Replay − GRPO, waited": {
        "equations, 2 steps": ("lag", "replay_lag2", "grpo_lag2"),
        **{task: (f"lag_{study}", "replay_lag4", "grpo_lag4") for task, study in OTHERS.items()},
    },
    "GSPO − GRPO, waited": everywhere("lag:gspo_lag4:grpo_lag4"),
}
PARTIAL: Comparisons = {
    "GRPO, several versions − one": everywhere(
        "partial:grpo_partial:grpo", "methods_stale:grpo_partial:grpo", "partial_rollouts:grpo_partial:grpo"
    ),
    "R2 − GRPO, several versions": everywhere(
        "partial:replay_partial:grpo_partial", "partial_rollouts:grpo_partial_r2:grpo_partial"
    ),
    "GSPO − GRPO, several versions": everywhere(
        "partial:gspo_partial:grpo_partial", "methods_stale:gspo_partial:grpo_partial"
    ),
}
MANY_UPDATES: Comparisons = {
    "GRPO, 64 updates − 4": everywhere("updates_per_batch:grpo_n64:grpo_n4"),
    "Replay − GRPO, 64 updates": everywhere("updates_per_batch:replay_n64:grpo_n64"),
    "GSPO − GRPO, 64 updates": everywhere("updates_per_batch:gspo_n64:grpo_n64"),
    "Half the rate − GRPO, 64 updates": everywhere(
        "updates_per_batch:half_n64:grpo_n64", "updates_per_batch_why:half_n64:grpo_n64"
    ),
    "Gradients clipped to 0.1 − GRPO, 64 updates": {EQUATIONS: ("small_norm", "small_64", "grpo_64")}
    | {task: ("small_norm_tasks", f"small_{short}", f"grpo_{short}") for task, short in OTHERS.items()},
}
CEILING: Comparisons = {
    name: {EQUATIONS: ("dual_clip_noise", f"{arm}_noise05", f"{other}_noise05")}
    | {task: ("dual_clip_tasks", f"{arm}_{short}", f"{other}_{short}") for task, short in OTHERS.items()}
    for name, arm, other in (
        ("Dual clip − GRPO, noise 0.05", "dual", "grpo"),
        ("GSPO − dual clip, noise 0.05", "gspo", "dual"),
    )
}
INT4: Comparisons = {
    "GRPO, int4 − fp32 engine": everywhere("int4:grpo_int4:grpo_fp32", "dppo_mismatch:grpo_int4:grpo_fp32"),
    "Ratio to the old policy − to the engine": everywhere("int4:old_int4:grpo_int4", "anchor_int4:grpo_old:grpo"),
    "R3 − GRPO": everywhere("int4:r3_int4:grpo_int4", "dppo_mismatch:grpo_r3_int4:grpo_int4"),
    "SAPO − GRPO": everywhere("int4:sapo_int4:grpo_int4", "methods_int4:sapo_int4:grpo_int4"),
    "GSPO − GRPO": everywhere("int4:gspo_int4:grpo_int4", "methods_int4:gspo_int4:grpo_int4"),
}
CORRECTED = {
    "GRPO, int4 − fp32 engine": ("grpo_int4", "grpo_fp32"),
    "TIS − none": ("tis_int4", "grpo_int4"),
    "IcePop − none": ("icepop_int4", "grpo_int4"),
    "Sequence MIS − none": ("sequence_mis_int4", "grpo_int4"),
}
CORRECTIONS: Comparisons = {
    name: {EQUATIONS: ("corrections_int4", *arms), "reverse 24 letters": ("corrections_reverse", *arms)}
    for name, arms in CORRECTED.items()
}
HELD_OUT: Comparisons = {
    "GRPO, int4 − fp32 engine": {"reverse 24 letters": ("corrections_held_out", "grpo_int4", "grpo_fp32")},
    "TIS − none": {
        "reverse 24 letters": ("corrections_held_out", "tis_int4", "grpo_int4"),
        "reverse, other seeds": ("corrections_compared", "tis_int4", "grpo_int4"),
        EQUATIONS: ("corrections_equations", "tis_int4", "grpo_int4"),
    },
    "Sequence MIS − none": {"reverse, other seeds": ("corrections_compared", "sequence_mis_int4", "grpo_int4")},
    "IcePop − none": {"reverse, other seeds": ("corrections_compared", "icepop_int4", "grpo_int4")},
    "KPop − none": {"reverse 24 letters": ("corrections_held_out", "kpop_int4", "grpo_int4")},
    "Sequence MIS − TIS": {"reverse, other seeds": ("corrections_compared", "sequence_mis_int4", "tis_int4")},
    "IcePop − TIS": {"reverse, other seeds": ("corrections_compared", "icepop_int4", "tis_int4")},
    "KPop − TIS": {"reverse 24 letters": ("corrections_held_out", "kpop_int4", "tis_int4")},
}
COSTS: Comparisons = {
    "Selection noise,\n36 % of the slots": everywhere(
        "other_task:grpo_noise02:grpo_replay", "replay_vs_gspo:grpo_noise02:grpo_replay"
    ),  # the arm without the cause: replay does not see selection noise
    "Near-tied routers\nat the full rate": FAST_ROUTERS["GRPO, full rate − a tenth"],
    "Balancing bias,\n0.001 a step": BIAS["GRPO, bias − none"],
    "64 updates\non a batch*": MANY_UPDATES["GRPO, 64 updates − 4"],
    "Responses of\nseveral versions": PARTIAL["GRPO, several versions − one"],
    "Batches that\nwaited 4 steps": LAG["GRPO, waited 4 steps − fresh"],
    "Rollout engine,\nint4 weights": INT4["GRPO, int4 − fp32 engine"],
}
"""Cause -> task -> the declared comparison of GRPO with the cause minus GRPO without it."""
CORRECTED_TITLE = "Corrections for a rollout engine with int4 weights, the ratio to the old policy throughout"
FIGURES = {
    "tasks": ("The main study's comparisons with another router and on other tasks.", MAIN),
    "fast_router_tasks": ("Near-tied routers that learn at the full rate, on four tasks.", FAST_ROUTERS),
    "bias_tasks": ("A bias that balances the experts, on four tasks.", BIAS),
    "old_token_tasks": (
        "Old tokens, of batches that waited and of responses of several versions, on four tasks.",
        LAG | PARTIAL,
    ),
    "many_update_tasks": ("64 updates on a batch, on four tasks.", MANY_UPDATES),
    "ceiling_tasks": ("A ceiling on the ratio (dual clip) under selection noise, on four tasks.", CEILING),
    "int4_tasks": ("A rollout engine with int4 weights, on four tasks.", INT4),
    "int4_corrections": (f"{CORRECTED_TITLE}, on two tasks.", CORRECTIONS),
    "int4_corrections_held_out": (f"{CORRECTED_TITLE}: reward of the policy that is trained, held out.", HELD_OUT),
}


def costs_table() -> pd.DataFrame:
    """Return the table for `cures_figure` from the committed comparisons: one row per cause, task and rounding."""
    return by_cause(published_differences(RESULTS, COSTS), COSTS, [EQUATIONS, AGAIN, *OTHERS])


def figures() -> Iterator[StudyFigure]:
    yield cures_figure(
        costs_table(),
        "costs_by_task",
        "What each cause costs GRPO, on four tasks.",
        "final reward of GRPO with the cause − without (*: held-out reward)",
    )
    for name, (title, declared) in FIGURES.items():
        measured = (
            "difference of held-out reward" if declared in (HELD_OUT, MANY_UPDATES) else "difference of final reward"
        )
        yield claims_figure(published_differences(RESULTS, declared), name, title, measured)


if __name__ == "__main__":
    draw_from_results(__doc__, figures)
