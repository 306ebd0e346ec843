"""Several studies read as one."""

import shutil
from dataclasses import replace

import pytest
from jaxtyping import config
from synthetic import write_study

from moe_rl.study import StudyDataError, join, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=6, sequences=4, tokens_every=3)


def test_joined_studies_keep_their_comparisons(folder):
    data = load(folder)
    one = replace(data, config={**data.config, "comparisons": [["gspo", "grpo"]]})
    assert join({"a": one, "b": data}).config["comparisons"] == [["a/gspo", "a/grpo"]]
    none = replace(data, config={**data.config, "comparisons": []})
    assert join({"a": none, "b": none}).config["comparisons"] == [], "declared: none"
    assert "comparisons" not in join({"a": none, "b": data}).config


def test_a_path_is_no_study_to_join():
    config.update("jaxtyping_disable", True)  # which would say it before
    try:
        with pytest.raises(StudyDataError, match=r"join: 'mine' is 'runs/mine', and loaded studies are joined"):
            join({"mine": "runs/mine"})
        with pytest.raises(StudyDataError, match=r"join: expected studies by name, .*, got list"):
            join([])
        with pytest.raises(StudyDataError, match=r"join: expected studies by name, .*, got none"):
            join({})
    finally:
        config.update("jaxtyping_disable", False)


def test_joined_studies_keep_the_thresholds_that_all_of_them_have(folder):
    data = load(folder)
    own = [replace(data, config={**data.config, "interest": x, "alarms": {"entropy_low": 0.1}}) for x in (0.2, 0.3)]
    both = join({"a": own[0], "b": own[0]})
    assert (both.config["interest"], both.config["alarms"]) == (0.2, {"entropy_low": 0.1})
    apart = join(dict(zip("ab", own, strict=True))).config
    assert "interest" not in apart and "alarms" in apart
    assert not {"interest", "alarms"} & join({"a": own[0], "b": data}).config.keys()


def test_joined_studies_of_two_outcomes_are_of_sampled_rewards_and_say_so(folder):
    data = load(folder)
    held_out = replace(data, config={**data.config, "outcome": "held_out"})
    both = join({"a": held_out, "b": held_out})
    assert both.config["outcome"] == "held_out" and not both.notes
    mixed = join({"a": held_out, "b": data})
    assert "outcome" not in mixed.config and mixed.notes == (
        "the studies do not all declare one outcome; here that of all is of their last steps, as sampled",
    )


def test_joined_studies_have_nothing_of_the_folder_where_one_stands(folder, tmp_path, monkeypatch):
    shutil.copytree(folder / "grpo", tmp_path / "grpo")
    shutil.copytree(folder / "grpo", tmp_path / "rounding_avx2" / "grpo")
    (tmp_path / "env.json").write_text('{"command": "moe-rl study here"}')
    monkeypatch.chdir(tmp_path)
    here = load(".")
    assert here.folder == tmp_path and list(here.roundings) == ["avx2"] and here.environment
    (tmp_path / "study.yaml").write_text("name: here")
    both = join({"a": here, "b": here})
    assert not both.roundings and not both.environment


def test_two_studies_are_compared_as_one(folder):
    both = join({"a": load(folder), "b": load(folder)})
    assert len(both.rollouts) == 2 * 16 * 6
    assert both.arms.loc["b/gspo", "label"] == "GSPO (b)"
    means = both.rollouts.groupby("arm")["reward"].mean()
    assert means["a/gspo"] == means["b/gspo"]
    assert len(both.tokens) == 2 * len(load(folder).tokens)
