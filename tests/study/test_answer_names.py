"""Which comparisons the first answer of a report names, and against what GSPO is held."""

from dataclasses import replace

from read_studies import at_start, study_of

from moe_rl.study.answer import answer

LOW = (0.40, 0.42, 0.42, 0.41, 0.40, 0.43, 0.41, 0.39)
HIGH = tuple(value + 0.1 for value in LOW)
SCATTERED = tuple(value + (0.3 if seed % 2 else -0.3) for seed, value in enumerate(LOW))
NAMES = ("grpo_replay", "gspo", "grpo_noise", "grpo_replay_noise", "gspo_noise")


def lines_of(finals, comparisons, changes=None):
    study = study_of(finals, changes)
    study.config["comparisons"] = comparisons
    return answer(replace(study, evals=at_start(study, 0.2))).lines


def others(values):
    """The line on comparisons with GRPO of as many arms of another method."""
    names = NAMES[: len(values)]
    changes = {name: {"method": {"objective": "gmpo"}} for name in names}
    return lines_of({"grpo": LOW, **dict(zip(names, values, strict=True))}, [[n, "grpo"] for n in names], changes)[0]


def test_gspo_is_held_against_replay_where_that_was_compared():
    finals = {"grpo": LOW, "grpo_replay": HIGH, "gspo": LOW}
    need, without, _ = lines_of(finals, [["grpo_replay", "grpo"], ["gspo", "grpo"], ["gspo", "grpo_replay"]])
    assert (need.answer, without.answer) == ("Yes", "No, ended lower than GRPO + Routing Replay")


def test_four_comparisons_are_all_named():
    line = others([SCATTERED] * 4)
    assert line.answer == "0 of 4 comparisons told apart" and line.text.count("not resolved") == 4


def test_of_five_the_four_that_are_resolved_are_named():
    line = others([HIGH, LOW, HIGH, LOW, SCATTERED])
    assert line.answer == "2 of 5 comparisons told apart, 2 told equal"
    assert line.text.count(" higher") == line.text.count("no difference of interest") == 2
    assert line.text.endswith("; 1 not resolved.")


def test_n_is_of_the_pairs():
    assert lines_of({"grpo": LOW, "gspo": LOW[:7]}, [["gspo", "grpo"]])[-1].answer == "n = 7"
