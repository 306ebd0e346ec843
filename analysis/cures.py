"""Reward that each method wins back where a cause costs GRPO reward (question 4):  python analysis/cures.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/cures.pdf, .svg, .png and writes what is
drawn beside them as CSV.
"""

from pathlib import Path

import pandas as pd

from moe_rl.study.figures.over_studies import by_cause, cures_figure, draw_from_results
from moe_rl.study.published import Declared, published_differences

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
GONE = "the cause taken away"
METHODS = {
    "gone": GONE,
    "rate": "half the learning rate",
    "dual": "GRPO, dual clip",
    "small": "gradients clipped to 0.1",
    "replay": "GRPO + R2",
    "live": "GRPO + R2, live loads",
    "r3": "GRPO + R3",
    "old": "GRPO, old-policy ratio",
    "writer": "GRPO, ratio to writer",
    "decoupled": "GRPO, decoupled",
    "gspo": "GSPO",
    "gspo_replay": "GSPO + R2",
    "gmpo": "GMPO",
    "rspo": "RSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "dppo": "DPPO",
}
MEASURED = "final reward less that of GRPO under the same cause (*: held-out reward)"
OTHERS = ("gspo", "gmpo", "rspo", "cispo", "sapo")

CAUSES: dict[str, dict[str, Declared]] = {
    "Selection noise,\n36 % of the slots": {
        "rate": ("half_rate", "half_noise", "grpo_noise"),
        "dual": ("dual_clip_noise", "dual_noise02", "grpo_noise02"),
        "replay": ("replay_vs_gspo", "grpo_replay", "grpo_noise02"),
        **{method: ("methods_noise", method, "grpo") for method in OTHERS},
        "dppo": ("methods_noise", "dppo_tv", "grpo"),
    },
    "Near-tied routers\nat the full rate": {
        "gone": ("methods_router", "grpo_tenth", "grpo"),
        "rate": ("half_rate", "half_fast", "grpo_fast"),
        "dual": ("dual_clip_causes", "dual_fast", "grpo_fast"),
        **{method: ("fast_routers", method, "grpo") for method in ("replay", "gspo")},  # 60 seeds, not nine
        **{method: ("fast_routers_averages", method, "grpo") for method in ("gmpo", "rspo")},
        **{method: ("methods_router", method, "grpo") for method in ("cispo", "sapo", "gspo_replay")},
        "dppo": ("methods_router", "dppo_tv", "grpo"),
    },
    "Balancing bias,\n0.001 a step": {
        "gone": ("levers_balance_replay", "grpo", "grpo_bias1e3"),
        "rate": ("half_rate", "half_bias", "grpo_bias"),
        "dual": ("dual_clip_causes", "dual_bias", "grpo_bias"),
        "replay": ("levers_balance_replay", "grpo_replay_bias1e3", "grpo_bias1e3"),
        "live": ("levers_balance_live", "grpo_replay_live", "grpo_bias"),
        "gspo": ("levers_balance_replay", "gspo_bias1e3", "grpo_bias1e3"),
        **{method: ("methods_bias", method, "grpo") for method in OTHERS if method != "gspo"},
        "dppo": ("methods_bias", "dppo_tv", "grpo"),
    },
    "64 updates\non a batch*": {
        "gone": ("updates_per_batch", "grpo_n4", "grpo_n64"),
        "rate": ("updates_per_batch_why", "half_n64", "grpo_n64"),
        "dual": ("dual_clip", "dual", "grpo"),
        "small": ("small_norm", "small_64", "grpo_64"),
        **{method: ("updates_per_batch", f"{method}_n64", "grpo_n64") for method in ("replay", "gspo")},
    },
    "Responses of\nseveral versions": {
        "gone": ("methods_stale", "grpo", "grpo_partial"),
        "rate": ("half_rate", "half_partial", "grpo_partial"),
        "dual": ("dual_clip_causes", "dual_partial", "grpo_partial"),
        "replay": ("partial_rollouts", "grpo_partial_r2", "grpo_partial"),
        "writer": ("partial_rollouts_anchor", "grpo_partial_rollout", "grpo_partial"),
        "decoupled": ("decoupled", "decoupled_partial", "grpo_partial"),
        **{method: ("methods_stale", f"{method}_partial", "grpo_partial") for method in (*OTHERS, "dppo")},
    },
    "Batches that\nwaited 4 steps": {
        "gone": ("lag", "grpo", "grpo_lag4"),
        "rate": ("half_rate", "half_lag", "grpo_lag"),
        "dual": ("dual_clip_causes", "dual_lag", "grpo_lag"),
        "decoupled": ("decoupled", "decoupled_lag", "grpo_lag"),
        "gspo": ("lag", "gspo_lag4", "grpo_lag4"),
    },
    "Rollout engine,\nint4 weights": {
        "gone": ("dppo_mismatch", "grpo_fp32", "grpo_int4"),
        "rate": ("half_rate", "half_int4", "grpo_int4"),
        "dual": ("dual_clip_causes", "dual_int4", "grpo_int4"),
        "r3": ("dppo_mismatch", "grpo_r3_int4", "grpo_int4"),
        "old": ("anchor_int4", "grpo_old", "grpo"),
        **{method: ("methods_int4", f"{method}_int4", "grpo_int4") for method in OTHERS},
        "dppo": ("dppo_mismatch", "dppo_int4", "grpo_int4"),
    },
}
"""Cause -> method -> the declared comparison with GRPO: study, the method's arm, GRPO's arm."""


def cures_table() -> pd.DataFrame:
    """Return the table for `cures_figure` from the committed comparisons: one row per cause, method and rounding."""
    declared = {
        cause: {label: cells[name] for name, label in METHODS.items() if name in cells}
        for cause, cells in CAUSES.items()
    }
    return by_cause(published_differences(RESULTS, declared), CAUSES, METHODS.values())


if __name__ == "__main__":
    draw_from_results(__doc__, lambda: [cures_figure(cures_table(), measured=MEASURED)])
