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
    assert texts_of(arms, "Clipping", updates=lacks).endswith("natural routing: GRPO 0.5 %.")
    ranges = {arm: {"objective": {"clip_high": high}} for arm, high in (("grpo", 0.27), ("gspo", 0.004))}
    told = texts_of(arms, "Clipping", ranges, lacks)
    assert told.endswith("natural routing: GRPO 0.5 %. Clip ranges differ by arm (see Arms).")
    assert texts_of(arms, "Clipping", updates=updates.assign(clipped_tokens=None)) == ""
    none = updates.assign(clipped_tokens=[0, 200])
    assert "GRPO clipped no token, so there is no ratio" in texts_of(arms, "Clipping", updates=none)


def test_what_is_said_of_the_last_update_is_of_every_arm():
    """GRPO makes four updates of a step, GSPO two."""
    rows = [("grpo", 1, 10), ("grpo", 2, 20), ("grpo", 4, 40), ("gspo", 1, 10), ("gspo", 2, 60)]
    probes = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": update, "slots_changed": changed, "slots": 1000,
          "var_token_natural": float(changed), "var_token_replayed": 1.0, "var_sequence_natural": 1.0}
         for arm, update, changed in rows]
    )  # fmt: skip
    study = replace(study_of({"grpo": (0.5,), "gspo": (0.5,)}), probes=probes)
    assert "1 % of slots change after update 1 of a step and 4 to 6 % after the last update" in text_on(
        study, "Expert change"
    )
    text = text_on(study, "Token against sequence")
    assert "is 10 (10) after update 1 and 40 to 60 (40 to 60) after the last update; independent tokens" in text
    one = replace(study, probes=probes[probes["update"] == 1])
    assert "1 % of slots change after update 1 (range" in text_on(one, "Expert change")


def test_expert_change_is_of_the_probes_that_counted_it():
    """Probes without counts, as another trainer may write, gave "nan % of slots", or an end that nothing counted."""
    probes = pd.DataFrame(
        [{"arm": "grpo", "seed": 0, "step": 0, "update": update, "slots_changed": changed, "slots": 1000,
          "tokens_changed": None, "tokens": 500}
         for update, changed in ((1, 10), (4, None))]
    )  # fmt: skip
    study = replace(study_of({"grpo": (0.5,)}), probes=probes)
    text = text_on(study, "Expert change")
    assert "1 % of slots change after update 1 (range" in text and "nan" not in text
    assert text_on(replace(study, probes=probes.assign(slots_changed=None)), "Expert change") == ""


def test_a_dose_below_ten_per_cent_has_two_digits():
    updates = pd.DataFrame(
        [{"arm": "grpo_noise", "seed": 0, "step": 0, "update": 1, "slots_changed": 4, "slots": 1000}]
    )
    study = study_of({"grpo": (0.5,), "grpo_noise": (0.5,)}, updates=updates)
    assert condition_label(study, 1.0) == "0.4 % of slots re-routed (noise σ = 1)"
    more = replace(study, updates=updates.assign(slots_changed=352))
    assert condition_label(more, 1.0) == "35 % of slots re-routed (noise σ = 1)"
