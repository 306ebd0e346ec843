"""What a run's final reward is: of its last steps, or held out."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from read_studies import study_of, text_on

from moe_rl.study.comparing import comparisons
from moe_rl.study.outcomes import final_rewards

EIGHT = (0.80, 0.81, 0.83, 0.79, 0.82, 0.80, 0.84, 0.81)


def test_the_reward_of_demonstrations_is_nobodys_final_reward():
    """SFT scores 1.000 on its demonstrations; what counts is its policy on held-out prompts, in every table."""
    study = study_of({"grpo": EIGHT, "gspo": (1.0,) * 8}, {"gspo": {"method": {"objective": "sft"}}})
    rows = [{"arm": "gspo", "seed": s, "step": step, "reward": 0.4 + step / 10} for s in range(8) for step in (0, 4)]
    rows += [{"arm": "grpo", "seed": s, "step": step, "reward": 0.4 + step / 20} for s in range(8) for step in (0, 4)]
    study = replace(study, evals=pd.DataFrame(rows))
    table = final_rewards(study).set_index("arm")
    assert table["final"].to_dict() == pytest.approx({"grpo": sum(EIGHT) / 8, "gspo": 0.8})
    assert table["measured"].to_dict() == {"grpo": "last 5 steps", "gspo": "held out"}
    pair = comparisons(study)[0]
    assert pair.result.difference.estimate == pytest.approx(0.2)  # held out on both sides: .8 - .6
    assert "1.00" not in text_on(study, "Reward")
    without = replace(study, evals=study.evals.iloc[:0])
    assert np.isnan(final_rewards(without).set_index("arm")["final"]["gspo"])


def test_a_study_may_declare_held_out_reward_as_what_it_compares():
    study = study_of({"grpo": EIGHT, "gspo": EIGHT})
    rows = [
        {"arm": arm, "seed": seed, "step": step, "reward": reward}
        for arm, at_end in (("grpo", 0.6), ("gspo", 0.8))
        for seed in range(8)
        for step, reward in ((0, 0.4), (4, at_end))
    ]
    study = replace(study, evals=pd.DataFrame(rows))
    (sampled,) = comparisons(study)
    assert sampled.result.difference.estimate == 0 and sampled.held_out.difference.estimate == pytest.approx(0.2)
    declared = replace(study, config={**study.config, "outcome": "held_out"})
    assert comparisons(declared)[0].result.difference.estimate == pytest.approx(0.2)
    table = final_rewards(declared).set_index("arm")
    assert table["final"].to_dict() == pytest.approx({"grpo": 0.6, "gspo": 0.8})
    assert set(table["measured"]) == {"held out"} and (table["failed"] == 0).all()
