"""Final rewards that support or contradict statements of papers (question 8):  python analysis/claims.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/claims as .pdf, .svg and .png and writes
what is drawn beside them as CSV.
"""

from pathlib import Path

from moe_rl.study.figures.over_studies import claims_figure, draw_from_results
from moe_rl.study.published import Declared, published_differences

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"

CLAIMS: dict[str, dict[str, Declared]] = {
    "GSPO is stable without Routing Replay": {
        "GSPO − GRPO + R2": ("replay_vs_gspo", "gspo", "grpo_replay"),
        "GSPO − GRPO": ("replay_vs_gspo", "gspo", "grpo"),
        "GSPO − GRPO, 24 other seeds": ("natural_routing", "gspo_tenth", "grpo_tenth"),
        "GSPO − GRPO, 155 steps": ("longer_training", "gspo", "grpo"),
        "GSPO − GRPO, fast routers": ("fast_routers", "gspo", "grpo"),
        "GSPO − GRPO, other size": ("other_size", "gspo", "grpo"),
        "GSPO − GRPO, noise 0.02": ("replay_vs_gspo", "gspo_noise02", "grpo_noise02"),
        "GSPO − GRPO, noise 0.05": ("replay_vs_gspo", "gspo_noise05", "grpo_noise05"),
    },
    "GRPO needs Routing Replay": {
        "GRPO + R2 − GRPO": ("replay_vs_gspo", "grpo_replay", "grpo"),
        "GRPO + R2 − GRPO, 24 other seeds": ("natural_routing", "replay_tenth", "grpo_tenth"),
        "GRPO + R2 − GRPO, 155 steps": ("longer_training", "grpo_replay", "grpo"),
        "GRPO + R2 − GRPO, fast routers": ("fast_routers", "replay", "grpo"),
        "GRPO + R2 − GRPO, other size": ("other_size", "grpo_replay", "grpo"),
        "GRPO + R2 − GRPO, noise 0.02": ("replay_vs_gspo", "grpo_replay", "grpo_noise02"),
        "GRPO + R2 − GRPO, noise 0.05": ("replay_vs_gspo", "grpo_replay", "grpo_noise05"),
    },
    "Off-policy, replay and a clip are essential": {
        "GRPO + R2 − GRPO, 16 updates a batch*": ("updates_per_batch", "replay_n16", "grpo_n16"),
        "GRPO + R2 − GRPO, 16 updates a batch, thirty seeds*": ("replay_n16", "replay", "grpo"),
        "GRPO + R2 − GRPO, 64 updates a batch*": ("updates_per_batch", "replay_n64", "grpo_n64"),
        "GRPO + R2 − GRPO, 64 updates, fp8 engine*": ("updates_per_batch_engine", "r2_n64", "grpo_n64"),
        "GRPO + R2 − GRPO, waited two steps": ("lag", "replay_lag2", "grpo_lag2"),
        "No clip − GRPO, 64 updates a batch*": ("updates_per_batch", "unclipped_n64", "grpo_n64"),
    },
    "GSPO tolerates the engine's log-probs": {
        "GSPO, ratio to a bf16 engine − to the old policy": ("engine_mismatch", "gspo_rollout", "gspo_old"),
        "GSPO, ratio to an int4 engine − to the old policy": ("anchor_int4", "gspo", "gspo_old"),
    },
    "R3 is needed where engines differ": {
        "GRPO + R3 − GRPO, bf16 engine": ("engine_mismatch", "grpo_r3", "grpo_rollout"),
        "GRPO + R3 − GRPO, 64 updates, fp8 engine*": ("updates_per_batch_engine", "r3_n64", "grpo_n64"),
        "GSPO + R3 − GSPO, bf16 engine": ("engine_mismatch", "gspo_r3", "gspo_rollout"),
        "GRPO + R3 − GRPO, int4 engine": ("dppo_mismatch", "grpo_r3_int4", "grpo_int4"),
    },
    "DPPO is stable without R3": {
        "DPPO + R3 − DPPO, int4 engine": ("dppo_mismatch", "dppo_r3_int4", "dppo_int4"),
        "DPPO − GRPO, int4 engine": ("dppo_mismatch", "dppo_int4", "grpo_int4"),
    },
    "The decoupled objective bears old tokens": {
        "Decoupled − ratio to the sampler, waited": ("decoupled", "decoupled_lag", "grpo_lag"),
        "Decoupled − ratio to the sampler, reversing": ("decoupled_reverse", "decoupled_lag", "grpo_lag"),
        "Decoupled − ratio to the writer, mixed": ("decoupled", "decoupled_partial", "writer_partial"),
        "Decoupled − ratio to the writer, reversing": ("decoupled_reverse", "decoupled_partial", "writer_partial"),
    },
}
"""Statement -> comparison (`*`: by held-out reward) -> the study and the two arms that declare this comparison."""
MEASURED = "difference of final reward (*: held-out reward)"


if __name__ == "__main__":
    draw_from_results(__doc__, lambda: [claims_figure(published_differences(RESULTS, CLAIMS), measured=MEASURED)])
