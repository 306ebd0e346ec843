"""What final rewards say of the GSPO, R3 and DPPO papers' statements (question 8), and the comparisons of three causes
on other tasks:  python analysis/claims.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/claims, DIR/tasks (the main study, also
with another router), DIR/fast_router_tasks, DIR/int4_tasks and DIR/int4_corrections as .pdf, .svg and .png and writes
what is drawn beside them as CSV.
"""

import argparse
from pathlib import Path

import pandas as pd

from moe_rl.processes import ends_with_its_reader
from moe_rl.study.figures.over_studies import claims_figure
from moe_rl.study.figures.saving import save_figure
from moe_rl.study.published import published_repetitions

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

CLAIMS: dict[str, dict[str, tuple[str, str, str]]] = {
    "GSPO is stable without Routing Replay": {
        "GSPO − GRPO + R2": ("replay_vs_gspo", "gspo", "grpo_replay"),
        "GSPO − GRPO": ("replay_vs_gspo", "gspo", "grpo"),
        "GSPO − GRPO, 24 other seeds": ("natural_routing", "gspo_tenth", "grpo_tenth"),
        "GSPO − GRPO, fast routers": ("fast_routers", "gspo", "grpo"),
        "GSPO − GRPO, other size": ("other_size", "gspo", "grpo"),
        "GSPO − GRPO, noise 0.02": ("replay_vs_gspo", "gspo_noise02", "grpo_noise02"),
        "GSPO − GRPO, noise 0.05": ("replay_vs_gspo", "gspo_noise05", "grpo_noise05"),
    },
    "GRPO needs Routing Replay": {
        "GRPO + R2 − GRPO": ("replay_vs_gspo", "grpo_replay", "grpo"),
        "GRPO + R2 − GRPO, 24 other seeds": ("natural_routing", "replay_tenth", "grpo_tenth"),
        "GRPO + R2 − GRPO, fast routers": ("fast_routers", "replay", "grpo"),
        "GRPO + R2 − GRPO, other size": ("other_size", "grpo_replay", "grpo"),
        "GRPO + R2 − GRPO, noise 0.02": ("replay_vs_gspo", "grpo_replay", "grpo_noise02"),
        "GRPO + R2 − GRPO, noise 0.05": ("replay_vs_gspo", "grpo_replay", "grpo_noise05"),
    },
    "GSPO tolerates the engine's log-probs": {
        "GSPO, ratio to a bf16 engine − to the old policy": ("engine_mismatch", "gspo_rollout", "gspo_old"),
        "GSPO, ratio to an int4 engine − to the old policy": ("anchor_int4", "gspo", "gspo_old"),
    },
    "R3 is needed where engines differ": {
        "GRPO + R3 − GRPO, bf16 engine": ("engine_mismatch", "grpo_r3", "grpo_rollout"),
        "GSPO + R3 − GSPO, bf16 engine": ("engine_mismatch", "gspo_r3", "gspo_rollout"),
        "GRPO + R3 − GRPO, int4 engine": ("dppo_mismatch", "grpo_r3_int4", "grpo_int4"),
    },
    "DPPO is stable without R3": {
        "DPPO + R3 − DPPO, int4 engine": ("dppo_mismatch", "dppo_r3_int4", "dppo_int4"),
        "DPPO − GRPO, int4 engine": ("dppo_mismatch", "dppo_int4", "grpo_int4"),
    },
}
"""Statement -> comparison -> where it was declared: study, arm, the arm that is taken from it."""
STUDIES = {
    "equations (main study)": "replay_vs_gspo",
    "equations, sigmoid routers": "other_router",
    "reverse 24 letters": "other_task_reverse",
    "sort 8 letters": "other_task_sort",
    "add 3 digits": "other_task_add",
}
COMPARED = {
    "Replay − GRPO": ("grpo_replay", "grpo"),
    "GSPO − GRPO": ("gspo", "grpo"),
    "Replay − GRPO, noise 0.02": ("grpo_replay", "grpo_noise02"),
    "GSPO − GRPO, noise 0.02": ("gspo_noise02", "grpo_noise02"),
    "Replay − GRPO, noise 0.05": ("grpo_replay", "grpo_noise05"),
    "GSPO − GRPO, noise 0.05": ("gspo_noise05", "grpo_noise05"),
}
TASKS = {name: {task: (study, *arms) for task, study in STUDIES.items()} for name, arms in COMPARED.items()}
"""The same of the main study: comparison -> router and task -> where."""
OTHERS = {"reverse 24 letters": "reverse", "sort 8 letters": "sort", "add 3 digits": "add"}


def _on_other_tasks(cause: str, arm: str, other: str) -> dict[str, tuple[str, str, str]]:
    return {task: (f"{cause}_{study}", arm, other) for task, study in OTHERS.items()}


FAST_ROUTERS: dict[str, dict[str, tuple[str, str, str]]] = {
    "A tenth of the rate − full rate": {
        "equations": ("levers_router", "grpo_tenth", "grpo_full"),
        "equations, other seeds": ("methods_router", "grpo_tenth", "grpo"),
        **_on_other_tasks("fast_routers", "tenth", "grpo"),
    },
    "Replay − GRPO, full rate": {
        "equations": ("fast_routers", "replay", "grpo"),
        **_on_other_tasks("fast_routers", "replay", "grpo"),
    },
    "GSPO − GRPO, full rate": {
        "equations": ("fast_routers", "gspo", "grpo"),
        **_on_other_tasks("fast_routers", "gspo", "grpo"),
    },
}
"""The same of near-tied routers that learn at the full rate: comparison -> task -> where."""
INT4: dict[str, dict[str, tuple[str, str, str]]] = {
    "GRPO, int4 − fp32 engine": {
        "equations": ("dppo_mismatch", "grpo_int4", "grpo_fp32"),
        **_on_other_tasks("int4", "grpo_int4", "grpo_fp32"),
    },
    "Ratio to the old policy − to the engine": {
        "equations": ("anchor_int4", "grpo_old", "grpo"),
        **_on_other_tasks("int4", "old_int4", "grpo_int4"),
    },
    "R3 − GRPO": {
        "equations": ("dppo_mismatch", "grpo_r3_int4", "grpo_int4"),
        **_on_other_tasks("int4", "r3_int4", "grpo_int4"),
    },
    "SAPO − GRPO": {
        "equations": ("methods_int4", "sapo_int4", "grpo_int4"),
        **_on_other_tasks("int4", "sapo_int4", "grpo_int4"),
    },
    "GSPO − GRPO": {
        "equations": ("methods_int4", "gspo_int4", "grpo_int4"),
        **_on_other_tasks("int4", "gspo_int4", "grpo_int4"),
    },
}
"""The same of a rollout engine with int4 weights."""
CORRECTED = {
    "GRPO, int4 − fp32 engine": ("grpo_int4", "grpo_fp32"),
    "TIS − none": ("tis_int4", "grpo_int4"),
    "IcePop − none": ("icepop_int4", "grpo_int4"),
    "Sequence MIS − none": ("sequence_mis_int4", "grpo_int4"),
}
CORRECTIONS = {
    claim: {"equations": ("corrections_int4", *arms), "reverse 24 letters": ("corrections_reverse", *arms)}
    for claim, arms in CORRECTED.items()
}
"""Of corrections for that engine, the ratio to the old policy throughout."""
FIGURES = {
    "tasks": ("The main study's comparisons with another router and on other tasks.", TASKS),
    "fast_router_tasks": ("Near-tied routers that learn at the full rate, on four tasks.", FAST_ROUTERS),
    "int4_tasks": ("A rollout engine with int4 weights, on four tasks.", INT4),
    "int4_corrections": ("Corrections for a rollout engine with int4 weights, on two tasks.", CORRECTIONS),
}


def claims_table(claims: dict[str, dict[str, tuple[str, str, str]]] = CLAIMS) -> pd.DataFrame:
    """One row per statement, comparison and rounding: what `claims_figure` takes."""
    return pd.DataFrame(
        {"claim": claim, "comparison": comparison, "study": study, "arm": arm, "other": other, **found}
        for claim, comparisons in claims.items()
        for comparison, (study, arm, other) in comparisons.items()
        for found in published_repetitions(RESULTS, study, arm, other)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw, from docs/results, the differences of final reward that the papers' statements are about, "
        "and the main study's and those of fast routers and of an int4 engine on other tasks."
    )
    parser.add_argument("folder", type=Path, help="where to write the five figures as .pdf, .svg, .png and .csv")
    folder = parser.parse_args().folder
    of_tasks = [claims_figure(claims_table(claims), name, title) for name, (title, claims) in FIGURES.items()]
    for figure in (claims_figure(claims_table()), *of_tasks):
        for file in save_figure(figure, folder):
            print(file)


if __name__ == "__main__":
    with ends_with_its_reader():
        main()
