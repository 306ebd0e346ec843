"""What a report reads off routes and clips."""

from dataclasses import replace

import pandas as pd
from read_studies import study_of, text_on, texts_of

from moe_rl.study.arms import condition_label
from moe_rl.study.summary import factor_table


def test_doses_are_named_by_what_they_re_routed():
    updates = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": 1, "slots_changed": changed, "slots": 1000}
         for arm, changed in (("grpo_noise", 380), ("gspo_noise", 412), ("grpo_replay_noise", 0), ("grpo", 30))]
    )  # fmt: skip
    arms = dict.fromkeys(("grpo", "grpo_noise", "gspo_noise", "grpo_replay_noise"), (0.5,))
    study = study_of(arms, updates=updates)
    assert condition_label(study, 1.0) == "38–41 % of slots re-routed (noise σ = 1)"  # replay takes no dose
    assert condition_label(study, 0.0) == "natural"
    assert condition_label(study_of(arms), 1.0) == "noise σ = 1"  # not measured


def test_factors_are_of_natural_arms_by_update():
    probes = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": step, "update": update, "var_token_natural": natural * scale,
          "var_token_replayed": 1.0, "var_sequence_natural": 0.5 * scale}
         for arm, scale in (("grpo", 1.0), ("grpo_noise", 100.0))
         for update, values in ((1, (8.0, 10.0, 60.0)), (4, (2.0, 4.0, 6.0)))
         for step, natural in enumerate(values)]
    )  # fmt: skip
    study = replace(study_of({"grpo": (0.5,), "grpo_noise": (0.4,)}), probes=probes)
    table = factor_table(study).set_index("update")
    assert set(table["arm"]) == {"grpo"}
    assert table["replay_median"].to_dict() == {1: 10.0, 4: 4.0}
    assert table["replay_of_means"].to_dict() == {1: 26.0, 4: 4.0}  # (8 + 10 + 60) / 3
    assert table["averaging_median"].to_dict() == {1: 20.0, 4: 8.0}
    text = text_on(study, "What replay removes")
    assert "that with replayed routing is 10 (26) after update 1 and 4 (4) after update 4" in text


def test_reading_compares_clipping_without_dividing_by_zero():
    arms = {"grpo": (0.8, 0.8, 0.8), "gspo": (0.8, 0.8, 0.8)}
    updates = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": 2, "clipped_tokens": clipped, "tokens": 1000}
         for arm, clipped in (("grpo", 5), ("gspo", 200))]
    )  # fmt: skip
    assert "GRPO 0.5 %, GSPO 20 %; GSPO over GRPO: ×40, 1.6 orders" in texts_of(arms, "Clipping", updates=updates)
    lacks = updates.assign(clipped_tokens=[5, None])
    assert texts_of(arms, "Clipping", updates=lacks).endswith(
        "natural routing: GRPO 0.5 %. Clip ranges differ by arm (see Arms)."
    )
    assert texts_of(arms, "Clipping", updates=updates.assign(clipped_tokens=None)) == ""
    none = updates.assign(clipped_tokens=[0, 200])
    assert "GRPO clipped no token, so there is no ratio" in texts_of(arms, "Clipping", updates=none)
