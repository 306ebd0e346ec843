"""Final reward against measured routing volatility, in the studies of question 4:  python analysis/volatility.py DIR

Reads the committed tables of docs/results, so that it needs no runs; draws DIR/volatility.pdf, .svg, .png and writes
what is drawn beside them as CSV.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from moe_rl.study.figures.over_studies import draw_from_results, volatility_figure

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
LABELS = {
    "grpo": "GRPO",
    "grpo_replay": "GRPO + R2",
    "gspo": "GSPO",
    "grpo_r3": "GRPO + R3",
    "gmpo": "GMPO",
    "rspo": "RSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "dppo": "DPPO",
    "live": "GRPO + R2, bias on live loads",
}
METHOD_OF = {"live": "grpo_replay"}
"""Variant of a method -> the method, in whose colour it is drawn, with another dash and marker."""
OTHERS = {method: method for method in ("gmpo", "rspo", "cispo", "sapo")}


@dataclass(frozen=True)
class Condition:
    """One condition of a source of volatility: a position on the axis of re-routed slots, and the arms drawn there.

    study: the study whose committed tables hold the numbers.
    measured: the arm whose share of re-routed slots is the position.
    arms: method -> its arm. A method that does not see a condition (replay under noise) has its natural arm here.
    engine: whether re-routed slots are those in which the rollout engine differs from the training model; else those
        in which the update forward differs from the old policy.
    """

    study: str
    measured: str
    arms: dict[str, str]
    engine: bool = False


def _noise(study: str, *doses: str) -> list[Condition]:
    natural = {"grpo": "grpo", "grpo_replay": "grpo_replay", "gspo": "gspo"}
    noisy = [{"grpo": f"grpo_{dose}", "grpo_replay": "grpo_replay", "gspo": f"gspo_{dose}"} for dose in doses]
    return [Condition(study, arms["grpo"], arms) for arms in (natural, *noisy)]


def _suffixed(study: str, *suffixes: str) -> list[Condition]:
    methods = ("grpo", "grpo_replay", "gspo")
    return [Condition(study, f"grpo_{end}", {method: f"{method}_{end}" for method in methods}) for end in suffixes]


def _alone(study: str, *arms: str) -> list[Condition]:
    return [Condition(study, arm, {"grpo": arm}) for arm in arms]


def _engine(study: str, **arms: str) -> Condition:
    return Condition(study, arms["grpo"], arms, engine=True)


SOURCES: dict[str, list[Condition]] = {
    "Selection noise,\nnear-tied routers": [
        *_noise("replay_vs_gspo", "noise02", "noise05"),
        Condition("methods_noise", "grpo", {**OTHERS, "dppo": "dppo_tv"}),
    ],
    "Selection noise,\nordinary routers": _noise("selection_noise", "noise05", "noise10", "noise20"),
    "Near-tied routers:\nfrozen, rate × 0.1, × 1": [
        *_alone("levers_router", "grpo_frozen", "grpo_tenth"),
        *_suffixed("levers_router", "full"),
        Condition("methods_router", "grpo", {**OTHERS, "dppo": "dppo_tv"}),
    ],
    "Balancing bias:\n0, 0.0001, 0.001": [
        *_alone("levers_balance_replay", "grpo"),
        *_suffixed("levers_balance_replay", "bias1e4", "bias1e3"),
        Condition("levers_balance_live", "grpo_bias", {"live": "grpo_replay_live"}),
        Condition("methods_bias", "grpo", {**OTHERS, "dppo": "dppo_tv"}),
    ],
    "Updates per batch:\n1, 4, 8, 16, ordinary": [
        *_alone("minibatches", "grpo_n1"),
        *_suffixed("minibatches", "n4", "n8", "n16"),
    ],
    "Updates per batch*:\n4, 16, 64, near-tied": [
        *_alone("updates_per_batch", "grpo_n4"),
        *(
            Condition(
                "updates_per_batch",
                f"grpo_{n}",
                {"grpo": f"grpo_{n}", "grpo_replay": f"replay_{n}", "gspo": f"gspo_{n}"},
            )
            for n in ("n16", "n64")
        ),
    ],
    "Responses whole,\nor of four versions": [
        *_alone("methods_stale", "grpo"),
        Condition(
            "methods_stale",
            "grpo_partial",
            {method: f"{method}_partial" for method in ("grpo", "gspo", *OTHERS, "dppo")},
        ),
        Condition("partial_rollouts", "grpo_partial", {"grpo_replay": "grpo_partial_r2", "grpo_r3": "grpo_partial_r3"}),
    ],
    "Batches that waited:\n0, 2, 4 RL steps": [
        *_alone("lag", "grpo"),
        Condition("lag", "grpo_lag2", {"grpo": "grpo_lag2", "grpo_replay": "replay_lag2", "gspo": "gspo_lag2"}),
        Condition("lag", "grpo_lag4", {"grpo": "grpo_lag4", "gspo": "gspo_lag4"}),
    ],
    "Rollout engine:\nfp32, bf16, int4 routers": [
        _engine("engine_mismatch", grpo="grpo_fp32", gspo="gspo_fp32"),
        _engine("engine_mismatch", grpo="grpo_rollout", gspo="gspo_rollout", grpo_r3="grpo_r3"),
        _engine("engine_mismatch", grpo="grpo_int4", gspo="gspo_int4"),
    ],
    "Rollout engine:\nfp32, int4 weights": [
        _engine("dppo_mismatch", grpo="grpo_fp32"),
        _engine("dppo_mismatch", grpo="grpo_int4", grpo_r3="grpo_r3_int4", dppo="dppo_int4"),
        Condition("methods_int4", "grpo_int4", {method: f"{method}_int4" for method in ("gspo", *OTHERS)}, engine=True),
    ],
}


def volatility_table() -> pd.DataFrame:
    """Return the table for `volatility_figure` from the committed tables: one row per source, condition and method."""
    rows = []
    for source, conditions in SOURCES.items():
        for condition in conditions:
            folder = RESULTS / condition.study
            finals = pd.read_csv(folder / "final_reward.csv").set_index("arm")
            if condition.engine:
                share = pd.read_csv(folder / "engines.csv").query("routing == 'live'").set_index("arm")
                share = share["slots_changed_share"]
            else:
                share = pd.read_csv(folder / "volatility.csv").set_index("arm")["slots_rerouted"]
            for method, arm in condition.arms.items():
                about = {"source": source, "study": condition.study, "arm": arm}
                ends = finals.loc[arm, ["n", "final", "low", "high"]].to_dict()
                about |= {"method": METHOD_OF.get(method, method), "label": LABELS[method]}
                rows.append({**about, "slots_rerouted": share[condition.measured], **ends})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    draw_from_results(__doc__, lambda: [volatility_figure(volatility_table(), "final reward (*: held-out reward)")])
