"""What a replay that leaves rows live may not stand for, and what a data set's runs begin with."""

import warnings
from dataclasses import replace

import pandas as pd
import pytest
from read_studies import at_start, study_of, text_on

from moe_rl.study.alarms import AlarmError, alarms_of
from moe_rl.study.answer import answer
from moe_rl.study.arms import replay_identity
from moe_rl.study.comparing import pairs_to_compare
from moe_rl.study.config import ConfigError, parse_study
from moe_rl.study.figures import each_figure
from moe_rl.study.outcomes import run_outcomes

PART = {"keep": {"keep": 0.5}, "sites": {"keep_sites": [0]}}


@pytest.mark.parametrize("part", PART)
def test_replay_of_a_part_of_the_rows_is_its_own_arm_under_noise(part):
    """Its live rows see the noise: its natural run is another experiment."""
    method = {"objective": "grpo", "replay": "R2", **PART[part]}
    changes = {"grpo_replay": {"method": method}, "grpo_replay_noise": {"method": {**method, "noise": 1.0}}}
    study = study_of(dict.fromkeys(("grpo", "grpo_noise", *changes), (0.5, 0.6)), changes)
    assert ("grpo_replay_noise", "grpo_noise") in pairs_to_compare(study)
    assert ("grpo_replay", "grpo_noise") not in pairs_to_compare(study)
    assert replay_identity(study).empty
    assert "must" not in text_on(study, "Stress test")


def test_before_the_first_rollout_row_nothing_is_compared():
    study = study_of(dict.fromkeys(("grpo", "grpo_noise", "grpo_replay", "grpo_replay_noise"), (0.5, 0.6)))
    assert replay_identity(replace(study, rollouts=pd.DataFrame())).empty


def test_whole_replay_stands_in_beside_a_replay_of_a_part():
    part = {"objective": "grpo", "replay": "R2", "keep": 0.5, "noise": 1.0}
    study = study_of(
        dict.fromkeys(("grpo_noise", "grpo_replay", "grpo_replay_noise"), (0.5, 0.6)),
        {"grpo_replay_noise": {"method": part}},
    )
    pairs = pairs_to_compare(study)
    assert ("grpo_replay", "grpo_noise") in pairs and ("grpo_replay_noise", "grpo_noise") in pairs


def test_a_run_on_a_data_set_begins_with_its_first_batch():
    """Held-out lines of a data set may be harder or easier than those that are trained on."""
    generated = study_of({"grpo": (0.9,)})
    generated = replace(generated, evals=at_start(generated, 0.0))
    assert not run_outcomes(generated)["failed"].any()
    lines = tuple(replace(run, config={**run.config, "task": {"name": "jsonl"}}) for run in generated.runs)
    of_lines = replace(generated, runs=lines)
    assert run_outcomes(of_lines)["start"].tolist() == [0.9] and run_outcomes(of_lines)["failed"].all()
    assert "over the mean reward of the first batch: 1 of 1" in text_on(of_lines, "Runs that failed")
    assert answer(generated).lines[-2].text.endswith("gained more than 0.1 over the held-out reward at step 0.")


def test_arms_of_several_doses_are_told_why_they_are_not_compared():
    first = answer(study_of({"grpo": (0.5, 0.6), "grpo_noise": (0.5, 0.6)})).lines[0]
    assert first.answer == "Not compared" and "declares `comparisons`" in first.text


def test_the_threshold_of_a_spike_is_above_zero():
    with pytest.raises(AlarmError, match=r"alarms\.grad_norm: standard deviations .* above 0; got -1"):
        alarms_of({"grad_norm": -1})


def test_labels_with_the_word_noise_tell_no_doses_apart():
    arms = {arm: {"label": "GRPO with noise", "method": {"noise": dose}} for arm, dose in (("a", 0.2), ("b", 0.5))}
    with pytest.raises(ConfigError, match=r"arms\.b\.label: 'GRPO with noise' is the label of arm 'a' too"):
        parse_study({"name": "s", "question": "q", "seeds": [0], "arms": arms})


def test_letters_that_the_font_lacks_are_told_once():
    study = study_of({"grpo": (0.5, 0.6), "gspo": (0.5, 0.6)})
    study = replace(study, config={"arms": {"grpo": {"label": "GRPO リ"}, "gspo": {"label": "GSPO"}}})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for figure in each_figure(study):
            figure.render("png")
    assert len(told) == 1 and "the font of the figures lacks リ" in str(told[0].message)
