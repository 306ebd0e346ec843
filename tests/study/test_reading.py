"""The reading of a report follows the numbers, whichever way they fall."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from read_studies import at_start, reward_texts, study_of, text_on, texts_of

from moe_rl.study.answer import answer
from moe_rl.study.comparing import comparisons, interest
from moe_rl.study.data import Run
from moe_rl.study.outcomes import final_rewards, run_outcomes
from moe_rl.study.reading import read, rules

EIGHT = (0.80, 0.81, 0.83, 0.79, 0.82, 0.80, 0.84, 0.81)
LOW = (0.40, 0.42, 0.42, 0.41, 0.40, 0.43, 0.41, 0.39)


def test_reading_reports_a_difference_in_the_direction_it_came():
    # differences .40 .39 .41 .38 .42 .37 .43 .42: mean .4025, sd .0212, half-width 2.365 · .0212/√8 = .0177
    texts = reward_texts({"grpo": LOW, "gspo": EIGHT})
    assert "GSPO minus GRPO: +0.403 [0.385, 0.420], 8 pairs, p 0.008: higher." in texts
    reverse = reward_texts({"grpo": EIGHT, "gspo": LOW})
    assert "GSPO minus GRPO: −0.403 [−0.420, −0.385], 8 pairs, p 0.008: lower." in reverse


def test_reading_has_the_held_out_difference_beside_that_of_training():
    study = study_of({"grpo": LOW, "gspo": EIGHT})
    ends = at_start(study, 0.5).assign(step=5)
    ends.loc[ends["arm"] == "gspo", "reward"] += 0.25
    text = text_on(replace(study, evals=pd.concat([at_start(study, 0.1), ends])), "Reward")
    assert "8 pairs, p 0.008; held out +0.250: higher." in text


def test_reading_claims_equality_only_by_equivalence():
    near = tuple(np.add(EIGHT, (0.01, -0.01, 0.0, 0.02, -0.02, 0.0, 0.01, -0.01)))
    texts = reward_texts({"grpo": EIGHT, "gspo": near})
    assert "p of equivalence < 0.001: no difference of interest." in texts
    far = tuple(np.add(EIGHT, (0.1, -0.1, 0.0, 0.12, -0.12, 0.05, 0.1, -0.1)))
    texts = reward_texts({"grpo": EIGHT, "gspo": far})
    assert "not resolved." in texts and "no difference" not in texts


def test_agreeing_signs_of_three_seeds_are_a_range_and_no_verdict():
    texts = reward_texts({"grpo": (0.5, 0.5, 0.5), "gspo": (0.51, 0.60, 0.70)})
    assert "GSPO minus GRPO: +0.103, range [0.010, 0.200], 3 pairs: too few pairs." in texts
    assert "none has 6 pairs, so there is no verdict" in texts


def test_reading_checks_that_replay_under_noise_repeats_the_natural_run():
    arms = {"grpo": (0.5, 0.5, 0.5), "grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.4, 0.4)}
    same = texts_of({**arms, "grpo_replay_noise": (0.8,)}, "Stress test")
    assert "rewards are identical, as they must be" in same
    other = texts_of({**arms, "grpo_replay_noise": (0.7,)}, "Stress test")
    assert "rewards differ by up to 0.1, which must not be" in other
    study = study_of({**arms, "grpo_replay_noise": (0.8,)})
    begun = tuple(run for run in study.runs if (run.arm, run.seed) != ("grpo_replay", 0))
    rows = study.rollouts.query("arm != 'grpo_replay' or seed != 0")
    assert "Checked" not in text_on(replace(study, runs=begun, rollouts=rows), "Stress test")


def test_replay_stands_in_under_noise_only_if_nothing_else_differs():
    arms = {"grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.41, 0.4)}
    assert "GRPO + Routing Replay (natural): 0.80" in reward_texts(arms)
    assert "(natural)" not in reward_texts(arms, grpo_noise={"optim": {"learning_rate": 5e-4}})
    assert "(natural): 0.80" in reward_texts(arms, grpo_noise={"keep_policy_every": 5})


def test_only_arms_that_differ_in_one_thing_are_compared():
    finals = dict.fromkeys(("grpo", "grpo_replay", "gspo"), (0.5, 0.6, 0.7))
    more = {"gspo": {"optim": {"learning_rate": 5e-4}}}
    pairs = {(pair.arm, pair.other) for pair in comparisons(study_of(finals, more))}
    assert pairs == {("grpo_replay", "grpo")}, "gspo differs in method and learning rate from both"
    kept = {arm: {"keep_policy_every": int(arm == "gspo")} for arm in finals}
    assert len(comparisons(study_of(finals, kept))) == 2, "what one keeps besides is no difference"
    same = {arm: {"optim": {"learning_rate": rate}} for arm, rate in (("grpo", 1e-3), ("gspo", 5e-4))}
    study = study_of({"grpo": (0.5, 0.6, 0.7), "gspo": (0.5, 0.6, 0.7)}, same)
    runs = [replace(run, config={**run.config, "method": {"objective": "grpo"}}) for run in study.runs]
    assert len(comparisons(replace(study, runs=tuple(runs)))) == 1, "one method at two learning rates"


def _many(**config):
    study = study_of({"grpo": (0.40, 0.41, 0.42)})
    runs, rows = [], []
    finals = {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.8, "e": 0.41, "f": 0.4, "g": 0.42, "h": 0.4}
    for arm, value in finals.items():
        for seed in range(10):
            runs.append(replace(study.runs[0], arm=arm, seed=seed, config={"method": {"objective": "grpo", "x": arm}}))
            noise = ((seed * 7 + ord(arm)) % 5 - 2) / 30
            rows += [{"arm": arm, "seed": seed, "step": step, "reward": value + noise} for step in range(5)]
    labels = {"arms": {arm: {"label": arm} for arm in finals}, **config}
    return replace(study, runs=tuple(runs), rollouts=pd.DataFrame(rows), config=labels)


def test_of_many_comparisons_only_resolved_ones_are_told():
    found = [s.text for s in read(_many()) if s.topic == "Reward"]
    assert "d minus a: +0.400" in found[0] and found[0].count(" minus ") == 1
    assert "Not resolved: 5 more. No difference of interest: 1 more." in found[0]
    assert found[1].startswith("7 comparisons, not declared in the study file; p adjusted by Holm over 7.")
    six = [s.text for s in read(_many(comparisons=[[arm, "a"] for arm in "bcdefg"])) if s.topic == "Reward"]
    assert six[0].count(" minus ") == 6 and "more." not in six[0], "of six all are"


def test_declared_comparisons_are_the_family():
    study = _many(comparisons=[["d", "b"], ["c", "e"]], interest=0.45)
    pairs = comparisons(study)
    assert [(pair.arm, pair.other, pair.result.family) for pair in pairs] == [("d", "b", 2), ("c", "e", 2)]
    assert pairs[0].result.verdict == "no difference of interest"  # .4 is not of interest here
    text = " ".join(s.text for s in read(study) if s.topic == "Reward")
    assert "2 comparisons, declared in the study file; p adjusted by Holm over 2." in text
    assert "at least 0.45" in " ".join(rules(interest(study)))
    assert comparisons(_many(comparisons=[["d", "not run yet"]])) == []


def test_unfinished_runs_are_not_compared():
    study = study_of({"grpo": LOW, "gspo": EIGHT})
    half = tuple(replace(run, finished=run.seed < 6) for run in study.runs)
    assert comparisons(replace(study, runs=half))[0].result.seeds == (0, 1, 2, 3, 4, 5)


def test_failed_below_start_and_collapsed_runs_are_counted():
    # curves of ten steps; start .40 (held out): ends at .80, .45, .30, and .80 falling to .10
    curves = [[0.4] * 5 + [end] * 5 for end in (0.8, 0.45, 0.3)] + [[0.8] * 5 + [0.1] * 5]
    study = study_of({"grpo": (0.0,) * 4})
    rows = [
        {"arm": "grpo", "seed": seed, "step": step, "reward": value}
        for seed, curve in enumerate(curves)
        for step, value in enumerate(curve)
    ]
    study = replace(study, rollouts=pd.DataFrame(rows), evals=at_start(study, 0.4))
    runs = run_outcomes(study).set_index("seed")
    assert runs["failed"].tolist() == [False, True, True, True]  # gains .4 .05 -.1 -.3
    assert runs["below_start"].tolist() == [False, False, True, True]
    assert runs["collapsed"].tolist() == [False, False, False, True]
    row = final_rewards(study).iloc[0]
    assert (row["failed"], row["below_start"], row["collapsed"], row["start"]) == (3, 2, 1, 0.4)
    text = next(s.text for s in read(study) if s.topic == "Runs that failed")
    assert "Runs that did not gain more than 0.1 over the held-out reward at step 0: 3 of 4 (GRPO: 3 of 4)" in text
    assert "that ended below it: 2 of 4 (GRPO: 2 of 4); that collapsed: 1 of 4 (GRPO: 1 of 4)" in text
    first = next(s.text for s in read(replace(study, evals=study.evals.iloc[:0])) if s.topic == "Runs that failed")
    assert (
        "Runs that did not gain more than 0.1 over the mean reward of the first batch: 3 of 4" in first
    )  # .4 .4 .4 .8
    some = next(s.text for s in read(replace(study, evals=study.evals.iloc[:1])) if s.topic == "Runs that failed")
    assert "the held-out reward at step 0 (of the first batch, where none was held out): 3 of 4" in some
    going = replace(study, runs=tuple(replace(run, finished=False) for run in study.runs))
    assert not run_outcomes(going)[["failed", "below_start"]].any(axis=None)  # not yet
    three = replace(study, runs=tuple(replace(run, finished=run.seed != 0) for run in study.runs))
    text = next(s.text for s in read(three) if s.topic == "Runs that failed")
    assert "at step 0: 3 of 3 (GRPO: 3 of 3)" in text and "collapsed: 1 of 4 (GRPO: 1 of 4)" in text
    assert answer(three).lines[-2].text == "Failed (gained at most 0.1): GRPO: 3 of 3."


@pytest.mark.parametrize("start", [0.2, 0.3, 0.4, 0.5, 0.7])
def test_a_gain_of_exactly_a_tenth_is_one_outcome(start):
    """Whichever way the difference rounds: 0.6 - 0.5 is less than 0.1 in floats, 0.8 - 0.7 is more."""
    study = study_of({"grpo": (start + 0.1, start + 0.101)})
    assert run_outcomes(replace(study, evals=at_start(study, start)))["failed"].tolist() == [True, False]


@pytest.mark.parametrize("start", [0.47, 0.83, 0.94])
def test_a_run_that_ends_where_it_began_is_not_below_its_start(start):
    """The mean of five equal rewards may round to less than the reward."""
    study = study_of({"grpo": (start, start - 0.001)})
    assert run_outcomes(replace(study, evals=at_start(study, start)))["below_start"].tolist() == [False, True]


def test_runs_without_a_reward_to_begin_with_are_not_counted_as_well_ended():
    study = study_of({"grpo": (0.2,) * 3, "gspo": (0.2,) * 3})
    later = study.rollouts.assign(step=study.rollouts["step"] + 1)
    study = replace(study, rollouts=later, evals=at_start(study, 0.15).query("arm == 'grpo'"))
    assert final_rewards(study)["judged"].tolist() == [3, 0]
    text = text_on(study, "Runs that failed")
    assert "at step 0: 3 of 3 (GRPO: 3 of 3)" in text and "Of 3 finished runs it cannot be told" in text
    assert (
        answer(study)
        .lines[0]
        .text.endswith("GRPO: 3 of 3. Of 3 finished runs it cannot be told: no reward at step 0, or none at the end.")
    )


def test_an_arm_without_rewards_is_said_to_have_none():
    texts = reward_texts({"grpo": (0.5,) * 6, "gspo": (np.nan,) * 6})
    assert "GRPO: 0.50; GSPO: no reward." in texts and "no seed of both has finished with a reward" in texts


def test_which_methods_answer_themselves_agrees_with_training():
    from moe_rl.objectives import OBJECTIVES
    from moe_rl.training import RunConfig
    from moe_rl.training.method import resolve_method

    for objective in [*OBJECTIVES, "dpo"]:
        config = RunConfig()
        config = replace(config, method=replace(config.method, objective=objective))
        run = Run("a", 0, Path(), True, {"method": {"objective": objective}}, {})
        assert run.responses == resolve_method(config, 8).source, objective
    assert Run("a", 0, Path(), True, {"method": {"objective": "sft", "source": "policy"}}, {}).responses == "policy"


def test_the_first_answer_follows_the_verdicts():
    better = tuple(value + 0.1 for value in LOW)
    study = study_of({"grpo": LOW, "grpo_replay": better, "gspo": LOW})
    study = replace(study, evals=at_start(study, 0.2))
    first, second, third = answer(study).lines
    assert (first.question, first.answer) == ("Did GRPO need replay?", "Yes")
    assert second.answer == "Yes, ended as high as GRPO"
    assert third.answer == "n = 8"
    assert [(row.comparison, row.pair.result.verdict, row.pair.result.claims) for row in answer(study).rows] == [
        ("GRPO + Routing Replay − GRPO", "higher", True),
        ("GSPO − GRPO", "no difference of interest", True),
    ]
    assert "not declared" in answer(study).note
    few = answer(study_of({"grpo": (0.8, 0.8), "grpo_replay": (0.9, 0.9), "gspo": (0.1, 0.1)}))
    assert [(line.question, line.answer) for line in few.lines[:2]] == [
        ("Did GRPO need replay?", "Too few seeds"),
        ("Did GSPO do without replay?", "Too few seeds"),
    ]
    other = answer(_many()).lines[0]
    assert (other.question, other.answer) == ("Do the arms differ?", "1 of 7 comparisons told apart, 1 told equal")


def test_an_answer_that_holds_under_noise_alone_says_so():
    pairs, natural = [["grpo_replay_noise", "grpo_noise"]], {"grpo": LOW, "grpo_replay": LOW}
    noisy = {"grpo_noise": LOW, "grpo_replay_noise": tuple(value + 0.1 for value in LOW)}
    for arms, declared, told in (
        (noisy, pairs, "Yes, with noise σ = 1"),
        ({**natural, **noisy}, [["grpo_replay", "grpo"], *pairs], "Naturally: no; with noise σ = 1: yes"),
    ):
        study = study_of(arms)
        config = {**study.config, "comparisons": declared}
        assert answer(replace(study, evals=at_start(study, 0.2), config=config)).lines[0].answer == told


def test_few_comparisons_are_named_though_they_are_not_resolved():
    arms = {name: {"objective": name} for name in ("grpo", "gmpo")}
    scattered = tuple(reward + (0.3 if seed % 2 else -0.3) for seed, reward in enumerate(EIGHT))
    study = study_of(
        {"grpo": EIGHT, "grpo_replay": scattered},
        {n: {"method": m} for n, m in zip(("grpo", "grpo_replay"), arms.values(), strict=True)},
    )
    line = answer(study).lines[0]
    assert (line.question, line.answer) == ("Do the arms differ?", "0 of 1 comparison told apart")
    assert line.text.endswith(" − GRPO: +0.000, not resolved.")


def test_a_study_that_compares_no_arms_says_so():
    study = study_of({"grpo": LOW, "gspo": LOW})
    first, _, last = answer(replace(study, config={**study.config, "comparisons": []})).lines
    assert (first.answer, first.text) == (
        "Not compared",
        "The study file compares none: its question is not of rewards.",
    )
    assert (last.answer, last.text) == ("n = 8", "No rewards are compared; intervals are over the seeds of an arm.")


def _at_two_rates(slow, fast, comparisons, updates=None):
    """Two sets of arms in one condition, of which the second, named fast_, learns at twice the rate."""
    a, b = study_of(slow), study_of(fast, {arm: {"optim": {"learning_rate": 2e-3}} for arm in fast})
    runs = (*a.runs, *(replace(run, arm=f"fast_{run.arm}") for run in b.runs))
    rollouts = pd.concat([a.rollouts, b.rollouts.assign(arm="fast_" + b.rollouts["arm"])], ignore_index=True)
    labels = {f"fast_{arm}": {"label": f"{about['label']}, fast"} for arm, about in b.config["arms"].items()}
    config = {"arms": {**a.config["arms"], **labels}, "comparisons": comparisons, "seeds": list(range(8))}
    return replace(a, runs=runs, rollouts=rollouts, config=config, updates=a.updates if updates is None else updates)


def test_arms_are_set_beside_those_of_their_own_settings():
    better, worse = (tuple(value + by for value in LOW) for by in (0.2, -0.2))
    pairs = [["grpo_replay", "grpo"], ["fast_grpo_replay", "fast_grpo"]]
    updates = pd.DataFrame(
        [{"arm": arm, "seed": seed, "step": 0, "update": 2, "clipped_tokens": clipped, "tokens": 1000,
          "var_token_log_ratio": variance, "var_sequence_log_ratio": variance}
         for arm, clipped, variance in (("grpo", 5, 8.0), ("grpo_replay", 5, 2.0), ("gspo", 50, 1.0),
                                        ("fast_grpo", 10, 90.0), ("fast_grpo_replay", 5, 30.0), ("fast_gspo", 400, 1.0))
         for seed in range(8)]
    )  # fmt: skip
    arms = {"grpo": LOW, "grpo_replay": better, "gspo": LOW}
    study = _at_two_rates(arms, {**arms, "grpo_replay": worse}, pairs, updates)
    first = answer(replace(study, evals=at_start(study, 0.2))).lines[0]
    assert first.question == "Did GRPO need replay?"
    assert first.answer == "Against GRPO: yes; against GRPO, fast: no, replay ended lower"
    clipping = text_on(study, "Clipping")
    assert "GSPO over GRPO: ×10" in clipping and "GSPO, fast over GRPO, fast: ×40" in clipping
    removed = text_on(study, "What replay removes")
    assert "GRPO without replay has 4," in removed and "GRPO, fast without replay has 3," in removed


def test_two_arms_that_failed_are_not_an_answer():
    worse = tuple(value - 0.1 for value in LOW)
    study = study_of({"grpo": worse, "grpo_replay": LOW})
    evals = at_start(study, 0.4)
    first = answer(replace(study, evals=evals)).lines[0]
    assert first.answer == "Most runs of both failed (higher)"
    assert first.text == "Runs that failed (gained at most 0.1): GRPO: 8 of 8, GRPO + Routing Replay: 8 of 8."


def test_most_runs_are_most_of_an_arms_own():
    """Twenty seeds of the one arm, eight of the other: eight failed runs are most of eight, not of twenty."""
    study = study_of({"grpo": (0.8,) * 12 + (0.1,) * 8, "gspo": (0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1)})
    first = answer(replace(study, evals=at_start(study, 0.1))).lines[0]
    assert first.answer == "No, ended lower than GRPO"
    assert first.text == "Runs that failed (gained at most 0.1): GRPO: 8 of 20, GSPO: 5 of 8."
    half = study_of({"grpo": (0.8,) * 4 + (0.1,) * 4, "gspo": (0.1,) * 4 + (0.5,) * 4})
    assert answer(replace(half, evals=at_start(half, 0.1))).lines[0].answer == "Not resolved", "half are not most"


def test_arms_of_one_label_that_failed_are_told_apart():
    study = study_of({"grpo": (0.2,) * 8, "grpo_noise": (0.2,) * 8, "gspo_noise": (0.8,) * 8})
    declared = {**study.config, "comparisons": [["gspo_noise", "grpo_noise"]]}
    lines = answer(replace(study, evals=at_start(study, 0.15), config=declared)).lines
    assert lines[0].text == "Runs that failed (gained at most 0.1): GRPO, noise σ = 1: 8 of 8."
    assert lines[1].answer == "16 of 24 finished runs"
    assert lines[1].text == "Runs of the other arms that failed (gained at most 0.1): GRPO: 8 of 8.", (
        "nothing is said twice"
    )


def test_runs_that_failed_are_named_in_one_line_of_the_first_answer():
    study = study_of({"grpo": (0.2,) * 8, "grpo_replay": EIGHT, "gspo": (0.2,) * 8})
    need, without, _ = answer(replace(study, evals=at_start(study, 0.15))).lines
    assert need.text == "Runs that failed (gained at most 0.1): GRPO: 8 of 8."
    assert without.text == "Runs of the other arms that failed (gained at most 0.1): GSPO: 8 of 8."
    later = replace(study, rollouts=study.rollouts.assign(step=study.rollouts["step"] + 1))
    said = [line.text for line in answer(later).lines[:2]]
    assert said == ["No run recorded its reward at step 0, so it cannot be told which failed.", ""]


def test_a_family_too_large_for_n_is_said():
    study = _many()
    six = replace(study, runs=tuple(run for run in study.runs if run.seed < 6))
    text = text_on(six, "What n can show")
    assert text.startswith("6 pairs and 7 comparisons: none can be called higher or lower, for Holm over 7 needs")


def test_what_n_can_show_is_of_the_comparisons_that_have_it():
    """With 8 and 3 pairs one is tested: neither has the 5 that lie between."""
    study = study_of({"grpo": LOW, "grpo_replay": EIGHT, "gspo": EIGHT})

    def text(seeds):
        runs = tuple(run for run in study.runs if run.seed < seeds.get(run.arm, 8))
        return text_on(replace(study, runs=runs), "What n can show")

    assert ": 8 pairs tell a true difference" in text({}) and "only" not in text({})
    mixed = text({"gspo": 3})
    assert ": 8 pairs tell a true difference" in mixed and mixed.endswith(" 1 comparison of 3 pairs: ranges only.")
    assert ": 6 to 8 pairs tell a true difference" in text({"gspo": 6})
    few = text({"gspo": 3, "grpo_replay": 5})
    assert few.startswith("3 to 5 pairs per comparison: ranges only.") and "over 2 comparisons needs 7 pairs" in few


def test_predicted_routes_do_not_answer_whether_grpo_needs_replay():
    """They did: "Against GRPO: not resolved; against GRPO: no", of two arms of one question."""
    study = study_of(
        {"grpo": EIGHT, "grpo_replay": EIGHT}, {"grpo_replay": {"method": {"objective": "grpo", "replay": "PR2"}}}
    )
    assert study.arms.loc["grpo_replay", "method"] == "grpo_pr2"
    lines = answer(study).lines
    assert lines[0].question.startswith("Do the arms differ?")
    assert not any("need replay" in line.question for line in lines)


def test_two_arms_against_one_control_are_told_apart_in_the_first_answer():
    higher, same = tuple(np.add(LOW, 0.3)), tuple(np.add(LOW, (0.01, -0.01) * 4))
    study = study_of({"grpo": LOW, "gspo": higher, "gspo_noise": same}, {"gspo_noise": {"noise": 0.0}})
    arms = {"grpo": {"label": "GRPO"}, "gspo": {"label": "GSPO"}, "gspo_noise": {"label": "GSPO, paper's range"}}
    method = {"objective": "gspo", "replay": "none", "clip_low": 0.0003}
    runs = tuple(replace(r, config={**r.config, "method": method}) if r.arm == "gspo_noise" else r for r in study.runs)
    study = replace(study, runs=runs, config={"arms": arms}, evals=at_start(study, 0.2))
    (line, *_) = answer(study).lines
    assert line.question == "Did GSPO do without replay?"
    assert line.answer == "GSPO against GRPO: yes, ended higher; GSPO, paper's range against GRPO: yes, ended as high"


def test_a_study_without_a_finished_run_is_not_said_to_have_none_that_failed():
    study = study_of({"grpo": LOW, "gspo": EIGHT})
    begun = replace(study, runs=tuple(replace(run, finished=False) for run in study.runs))
    texts = {line.question: line.text for line in answer(begun).lines}
    assert texts["Did GSPO do without replay?"] == "No run of these arms has finished."
    assert texts["Did runs fail?"] == "No run has finished."
    part = replace(study, evals=at_start(study, 0.3).query("arm == 'gspo'"))
    part = replace(part, rollouts=part.rollouts.assign(step=part.rollouts["step"] + 1))
    assert all("other finished run" in line.text for line in answer(part).lines[:2])


def test_one_arm_compares_nothing_and_has_its_seeds():
    study = study_of({"grpo": EIGHT})
    last = answer(study).lines[-1]
    assert (last.answer, last.text) == ("n = 8", "No rewards are compared; intervals are over the seeds of an arm.")
    assert text_on(study, "Runs").startswith("8 of 8 runs are finished: 1 arm, ")


def test_runs_that_have_not_ended_or_not_begun_are_counted_among_all():
    study = study_of({"grpo": LOW, "gspo": EIGHT})
    runs = tuple(replace(run, finished=run.seed > 0) for run in study.runs if run.seed < 7)
    rows = study.rollouts.query("seed < 7 and (seed > 0 or step < 2)")
    study = replace(study, runs=runs, rollouts=rows, not_started=("grpo/seed7", "gspo/seed7"))
    text = text_on(study, "Runs")
    assert text.startswith("12 of 16 runs are finished: 2 arms, ") and "The longest has 5 RL steps." in text
    assert answer(study).lines[-1].text.endswith(" 4 of 16 runs not finished, and in no comparison.")
