"""What would be found out late, or lose something, is refused before the first run."""

from dataclasses import replace

import pytest
import yaml

from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import ModelError, TinyConfig
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.study.config import ConfigError, load_study, parse_study
from moe_rl.study.folders import read_yaml
from moe_rl.study.grid import check_labels
from moe_rl.study.run import check_here
from moe_rl.study.shipped import outline
from moe_rl.training import MethodConfig, RolloutConfig, RunConfig, validate


def study(arms, **more):
    return parse_study({"name": "s", "arms": arms, **more})


NAMES = ["logs", "figures", "report.html", "rounding_avx2", "a\x00b", "a" * 101, "../up"]
NAMES += ["config.yaml", "metrics.jsonl", "\u65e5" * 67]  # the last is of 201 bytes


@pytest.mark.parametrize("name", NAMES)
def test_names_that_a_folder_cannot_have(name):
    with pytest.raises(ConfigError, match=r"arms\."):
        study({name: {}})


def test_two_arms_of_one_configuration():
    with pytest.raises(ConfigError, match=r"arms\.b: the same configuration as arm 'a'"):
        study({"a": {"label": "one"}, "b": {"label": "two"}})


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("same", r"arms\.b\.label: 'same' is the label of arm 'a' too"),
        (" same ", r"arms\.b\.label: 'same' is the label of arm 'a' too"),
        ("", r"arms\.b\.label: is empty"),
        (" \n", r"arms\.b\.label: is empty"),
    ],
)
def test_labels_that_tell_no_arms_apart(label, message):
    a, b = {"label": "same"}, {"label": label, "method": {"objective": "gspo"}}
    with pytest.raises(ConfigError, match=message):
        study({"a": a, "b": b})
    study({"a": a, "b": {"label": "same", "method": {"noise": 0.02}}})


def test_a_folder_in_which_several_commands_ran_is_read_all_the_same(tmp_path):
    arms = {"a": {"label": "same", "seeds": [0]}, "b": {"label": "same", "seeds": [1], "optim": {"steps": 3}}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "arms": arms, "seeds": [0, 1], "comparisons": [["b", "a"]]}))
    assert load_study(path, merged=True).comparisons == (("b", "a"),)
    with pytest.raises(ConfigError, match="the label of arm 'a' too"):
        load_study(path)


def test_a_label_that_is_no_mathematics():
    check_labels(study({"a": {"label": r"$\sigma$ = 1"}}))
    with pytest.raises(ConfigError, match=r"arms\.a\.label"):
        check_labels(study({"a": {"label": r"$\notacommand{$"}}))


def test_a_few_lines_that_stand_for_millions(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_study(path)


@pytest.mark.parametrize("content", ["[" * 100_000, "a: 2001-99-99", "a: " + "9" * 5000, "\x00", "{a: {b: 1, b: 2}}"])
def test_yaml_that_is_none_is_one_message_for_every_reader(tmp_path, content):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    for read in (load_study, outline, read_yaml):
        with pytest.raises(ValueError, match=r"study\.yaml: "):
            read(path)


def test_a_task_that_gives_no_reward_is_found_before_the_first_step(monkeypatch):
    from moe_rl.rollout.character_tasks import ModChain
    from moe_rl.rollout.task import TaskError

    monkeypatch.setattr(ModChain, "reward", lambda self, problem, completion: float("nan"))
    with pytest.raises(TaskError, match=r"task mod_chain, reward: expected a finite reward.*prompt '\^"):
        check_here(RunConfig())


def test_on_windows_a_run_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ModelError, match=r"Windows .*WSL"):
        check_here(RunConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": MethodConfig(replay="R2", keep_sites=(0, 7))},
            r"method.keep_sites: no site \[7\]; this model has 4",
        ),
        ({"model": ModelConfig(lora=LoraConfig(target_modules=("w1",)))}, r"model.lora.target_modules: .* has no 'w1'"),
        ({"model": ModelConfig(tiny=TinyConfig(num_experts_per_tok=99))}, "model.tiny.num_experts_per_tok: between 1"),
        ({"model": ModelConfig(attn_implementation="none_such")}, "none_such"),
        ({"rollout": RolloutConfig(engine=EngineConfig(kind="none_such.py:Own"))}, "rollout.engine.kind: there is no"),
    ],
)
def test_what_a_tiny_model_or_an_engine_lacks_is_found_before_a_cold_start(changes, message):
    config = replace(RunConfig(), **changes)
    validate(config)
    with pytest.raises((ValueError, RuntimeError), match=message):
        check_here(config)
