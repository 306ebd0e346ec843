"""The first answer of a study where a difference is resolved, and smaller than what is of interest."""

from dataclasses import replace

import pytest
from read_studies import at_start, study_of

from moe_rl.study.answer import answer

LOW = (0.40, 0.42, 0.42, 0.41, 0.40, 0.43, 0.41, 0.39)


@pytest.mark.parametrize(("by", "word"), [(0.045, "higher"), (-0.045, "lower")])
def test_a_small_difference_is_said_with_its_direction(by, word):
    other = tuple(value + by + (0.02 if seed % 2 else -0.02) for seed, value in enumerate(LOW))
    study = study_of({"grpo": LOW, "grpo_replay": other, "gspo": other})
    study.config["comparisons"] = [["grpo_replay", "grpo"], ["gspo", "grpo"]]
    need, without, _ = answer(replace(study, evals=at_start(study, 0.2))).lines
    assert need.answer == f"Replay ended a little {word}"
    assert without.answer == f"Ended a little {word} than GRPO"
