"""A folder that an earlier version wrote can be gone on with: a setting that it did not know counts as its default."""

from dataclasses import replace
from functools import reduce

import pytest
import yaml

from moe_rl.run_folder import RunFolderError, RunWriter
from moe_rl.settings import differences, laid_over, listed
from moe_rl.study.config import ConfigError, dump_run
from moe_rl.study.run import DamagedRunError, check_folder
from moe_rl.training import MethodConfig, RunConfig
from moe_rl.yaml_files import parse_yaml

GSPO = MethodConfig(objective="gspo", replay="R2")
LEARNED = replace(RunConfig().reward, model="learned")


def written(folder, config, without):
    """Write a run folder as by a version that did not know the field `without`; return the folder."""
    settings = parse_yaml(dump_run(config))
    *path, last = without.split(".")
    place = settings
    for name in path:
        place = place[name]
    del place[last]
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").touch()
    return folder


@pytest.mark.parametrize("without", ["rollout.lag", "reward", "model.tiny.norm_topk_prob", "objective.kl_coef"])
def test_a_field_that_the_earlier_version_did_not_know_is_its_default(tmp_path, without):
    config = replace(RunConfig(), method=GSPO)
    assert check_folder(config, written(tmp_path / "run", config, without))


def test_dpo_which_has_no_objective_too(tmp_path):
    config = replace(RunConfig(), method=MethodConfig(objective="dpo"))
    assert check_folder(config, written(tmp_path / "run", config, "value.gamma"))


@pytest.mark.parametrize(
    ("config", "without", "said"),
    [
        (replace(RunConfig(), seed=3), "seed", "seed: 0 there, 3 now"),
        (replace(RunConfig(), reward=LEARNED), "reward", "reward.model: 'verifier' there, 'learned' now"),
        (replace(RunConfig(), method=GSPO), "objective.ratio", "objective.ratio: 'token' there, 'sequence' now"),
    ],
)
def test_but_no_other_value(tmp_path, config, without, said):
    with pytest.raises(ConfigError, match=f"another configuration \\({said}\\)"):
        check_folder(config, written(tmp_path / "run", config, without))


def test_settings_of_a_run_that_never_began_may_be_corrected(tmp_path):
    """A wrong model path fails before the first row; the file put right, the same command must go on."""
    folder = written(tmp_path / "run", replace(RunConfig(), seed=3), "rollout.lag")
    (folder / "metrics.jsonl").unlink()
    (folder / "env.json").write_text("{}")
    assert check_folder(RunConfig(), folder)


def test_what_is_there_is_compared_as_it_is(tmp_path):
    folder = written(tmp_path / "run", replace(RunConfig(), seed=3), "rollout.lag")
    with pytest.raises(ConfigError, match="seed: 3 there, 0 now"):
        check_folder(RunConfig(), folder)


def test_settings_that_cannot_be_read_are_not_called_damaged(tmp_path):
    folder = tmp_path / "a" / "seed0"
    (folder / "config.yaml").mkdir(parents=True)
    said = r"config\.yaml cannot be read \(Is a directory\)\. Nothing was changed"
    with pytest.raises(DamagedRunError, match=said):
        check_folder(RunConfig(), folder)
    with pytest.raises(RunFolderError, match=said):
        RunWriter(tmp_path, arm="a", config={})


@pytest.mark.parametrize("content", ["", "- grpo", "grpo"])
def test_settings_that_are_no_mapping_are_damaged_not_another_configuration(tmp_path, content):
    folder = tmp_path / "a" / "seed0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(content)
    (folder / "metrics.jsonl").write_text("")
    said = r"config\.yaml is damaged: it holds no mapping of settings\. Move .* away to run again"
    with pytest.raises(DamagedRunError, match=said):
        check_folder(RunConfig(), folder)
    with pytest.raises(RunFolderError, match=said):
        RunWriter(tmp_path, arm="a", config={})


def test_other_programs_say_what_was_before_their_settings(tmp_path):
    old = {"arguments": {"beta": 0.0}, "replay": "R2"}
    RunWriter(tmp_path, arm="a", config=old).close()
    new, before = laid_over(old, {"arguments": {"top_p": 1.0}}), {"arguments": {"top_p": 1.0}}
    with pytest.raises(RunFolderError, match=r"\(arguments\.top_p: None there, 1\.0 now\)"):
        RunWriter(tmp_path, arm="a", config=new)
    other = laid_over(old, {"arguments": {"top_p": 0.9}})
    with pytest.raises(RunFolderError, match=r"\(arguments\.top_p: 1\.0 there, 0\.9 now\)"):
        RunWriter(tmp_path, arm="a", config=other, defaults=before)
    RunWriter(tmp_path, arm="a", config=new, defaults=before).close()
    kept = yaml.safe_load((tmp_path / "a" / "seed0" / "config.yaml").read_text())
    assert kept["arguments"] == {"beta": 0.0, "top_p": 1.0}


def test_a_key_beside_an_inherited_one_overrides_it():
    text = "b: &b {a: 1, c: 3}\nd: {q: &x {<<: *b, a: 2}}\ne: {<<: *x}\n"
    assert parse_yaml(text) == {"b": {"a": 1, "c": 3}, "d": {"q": {"a": 2, "c": 3}}, "e": {"a": 2, "c": 3}}


def test_a_setting_that_is_not_a_number_is_equal_to_itself(tmp_path):
    config = {"limit": float("nan"), "limits": [float("nan"), float("inf")]}
    RunWriter(tmp_path, arm="a", config=config).close()
    RunWriter(tmp_path, arm="a", config=config).close()
    with pytest.raises(RunFolderError, match=r"\(limit: nan there, 1\.0 now\)"):
        RunWriter(tmp_path, arm="a", config={**config, "limit": 1.0})


def test_differences_are_named_and_not_all_listed():
    changed = differences({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "d": [2], "e": None})
    assert changed == {"a.c": (2, 3), "d": ([1], [2])}
    assert listed(changed, most=1) == "a.c: 2 there, 3 now and 1 more"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (reduce(lambda inner, _: [inner], range(100), 0), "deeper than 100"),
        ("\ud800", "character escape"),
        (object(), "is not JSON"),
    ],
)
def test_settings_that_could_not_be_read_again_are_refused_before_a_run_begins(tmp_path, value, said):
    """Such a run could not go on: its config.yaml was called damaged."""
    with pytest.raises(RunFolderError, match=f"(?s)config cannot be kept in config.yaml; .* plain values .*{said}"):
        RunWriter(tmp_path, arm="a", config={"data": value})
    assert not (tmp_path / "a" / "seed0" / "config.yaml").exists()
