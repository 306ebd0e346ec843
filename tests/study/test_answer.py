"""The first answer of a study: small differences, and comparisons beside those of replay and GSPO."""

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


def test_comparisons_of_other_methods_are_counted_besides_those_of_replay():
    better = tuple(value + 0.1 for value in LOW)
    study = study_of({"grpo": LOW, "grpo_replay": LOW, "gspo": better}, {"gspo": {"method": {"objective": "gmpo"}}})
    study.config["comparisons"] = [["gspo", "grpo"], ["grpo_replay", "grpo"]]
    others, need, _ = answer(replace(study, evals=at_start(study, 0.2))).lines
    assert others.answer == "1 of 1 comparison told apart besides those below"
    assert (need.question, need.answer) == ("Did GRPO need replay?", "No")


def test_comparisons_that_are_not_named_are_counted_by_their_verdicts():
    """Of five, two are told apart; a small difference is resolved from 0, and is not said to be "not told apart"."""
    small = tuple(value + 0.045 + (0.02 if seed % 2 else -0.02) for seed, value in enumerate(LOW))
    better = tuple(value + 0.1 for value in LOW)
    scattered = tuple(value + (0.3 if seed % 2 else -0.3) for seed, value in enumerate(LOW))
    names = ("grpo_replay", "gspo", "grpo_noise", "grpo_replay_noise", "gspo_noise")
    values = dict(zip(names, (small, better, scattered, better, scattered), strict=True))
    study = study_of({"grpo": LOW} | values, {name: {"method": {"objective": "gmpo"}} for name in names})
    study.config["comparisons"] = [[name, "grpo"] for name in names]
    text = answer(replace(study, evals=at_start(study, 0.2))).lines[0].text
    assert text.endswith("; 1 small difference, 2 not resolved.") and text.count("higher") == 2


def test_arms_that_differ_in_another_setting_answer_no_question_about_the_method():
    better = tuple(value + 0.3 for value in LOW)
    slow = {"grpo": {"optim": {"learning_rate": 1e-6}}}
    study = study_of({"grpo": LOW, "grpo_replay": better, "gspo": better}, slow)
    study.config["comparisons"] = [["grpo_replay", "grpo"], ["gspo", "grpo"]]
    lines = answer(replace(study, evals=at_start(study, 0.2))).lines
    assert lines[0].answer == "2 of 2 comparisons told apart" and not any("replay" in line.question for line in lines)
