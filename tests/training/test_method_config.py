"""An arm's method: any field of `Objective` over the preset's, from a study file and from a command line, and what it
resolves to as data."""

import dataclasses
import re
import types
import typing
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from moe_rl.arguments import parse
from moe_rl.objectives import OBJECTIVES, Correction, Objective
from moe_rl.objectives.presets import PRESETS
from moe_rl.rollout import TaskConfig, make_task
from moe_rl.study.config import ConfigError, build, dump_run, parse_study
from moe_rl.training import MethodConfig, RolloutConfig, RunConfig
from moe_rl.training.method import overrides, resolve_method, resolved_objective
from moe_rl.training.validation import validate

OTHER = {
    "ratio": "sequence",
    "gate": "cap",
    "clip_low": 0.11,
    "clip_high": 0.12,
    "dual_clip": 3.5,
    "ratio_cap": 7.0,
    "temperature_pos": 2.0,
    "temperature_neg": 3.0,
    "power_pos": 1.5,
    "decay_pos": 1.25,
    "power_neg": 0.5,
    "decay_neg": 0.25,
    "anchor": "rollout",
    "corrections": (Correction("token_mask", 0.5, 5.0),),
    "route_weight": "after_clip",
    "route_floor": 0.4,
    "aggregate": "constant",
    "length_constant": 9.0,
    "local_normalizer": True,
    "advantage": "leave_one_out",
    "advantage_scale": "none",
    "kl_coef": 0.04,
    "kl_estimator": "k2",
    "kl_importance_weighted": True,
}
WITH = {"local_normalizer": {"aggregate": "token_mean"}}  # what else a value needs


def parts(hint):
    """The types in a union, None left out, an int that stands for a float left out."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found = set(typing.get_args(hint) if union else (hint,)) - {type(None)}
    return found - {int} if float in found else found


def test_a_method_can_set_every_field_of_an_objective_and_nothing_else_of_it():
    objective, method = typing.get_type_hints(Objective), typing.get_type_hints(MethodConfig)
    for name, hint in objective.items():
        assert parts(method[name]) == parts(hint), name
        assert type(None) in typing.get_args(method[name])
    assert set(OTHER) == set(objective)
    assert overrides(MethodConfig(objective="gspo", replay="R2", noise=0.5)) == {}


def test_a_gate_of_ones_own_that_is_none_is_said(tmp_path):
    (tmp_path / "own.py").write_text("def steep(x):\n    return x\n")
    for name, said in (("steep", "is no gate; one has @gate"), ("step", "no function 'step'; did you mean 'steep'")):
        with pytest.raises(ValueError, match=rf"^method.gate: .*own.py.* {said}"):
            validate(RunConfig(method=MethodConfig(gate=f"{tmp_path}/own.py:{name}")))


@pytest.mark.parametrize("name", OTHER)
def test_each_field_replaces_that_of_the_preset_and_no_other(name):
    own = {name: OTHER[name], **WITH.get(name, {})}
    config = RunConfig(method=MethodConfig(objective="grpo", **own))
    assert resolve_method(config, 5).objective == dataclasses.replace(
        OBJECTIVES["grpo"], **({"length_constant": 5} if name == "aggregate" else {}), **own
    )
    assert resolved_objective(config)[name] == (
        [asdict(c) for c in OTHER[name]] if name == "corrections" else OTHER[name]
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_resolved_objective_is_the_whole_preset_as_plain_data(name):
    data = resolved_objective(RunConfig(method=MethodConfig(objective=name), rollout=RolloutConfig(max_new_tokens=11)))
    assert yaml.safe_load(yaml.safe_dump(data)) == data
    preset = asdict(OBJECTIVES[name])
    if OBJECTIVES[name].aggregate == "constant":
        preset["length_constant"] = 11
    source = {"sft": "demonstrations", "rft": "initial"}.get(name, "policy")
    assert data == {"source": source, **preset, "corrections": list(preset["corrections"])}
    assert None not in (data["clip_low"], data["clip_high"], data["advantage"])
    assert set(data) == {"source"} | {field.name for field in fields(Objective)}


def test_of_dpo_and_of_the_tasks_budget():
    assert resolved_objective(RunConfig(method=MethodConfig(objective="dpo"))) == {"source": "initial", "beta": 0.1}
    budget = make_task(TaskConfig()).max_new_tokens
    assert resolved_objective(RunConfig(method=MethodConfig(objective="dr_grpo")))["length_constant"] == budget > 1
    own = MethodConfig(objective="dr_grpo", length_constant=3.0)
    assert resolved_objective(RunConfig(method=own))["length_constant"] == 3.0
    assert "a run divides by the generation budget" in PRESETS["dr_grpo"].differs, "as the page of methods says"


def stored(config):
    """The configuration in a run's config.yaml, without what the file says of its consequences."""
    data = yaml.safe_load(dump_run(config))
    assert data.pop("objective") == yaml.safe_load(yaml.safe_dump(resolved_objective(config)))
    return data


def test_a_study_file_sets_them_beside_the_old_spelling():
    old = "{objective: grpo, clip_low: 0.1, clip_high: 0.3, kl_coef: 0.01, advantage_scale: none, anchor: rollout}"
    new = "{objective: grpo, ratio: sequence, aggregate: token_mean, corrections: [{kind: token_mask, high: 3}]}"
    arms = {name: {"method": yaml.safe_load(method)} for name, method in (("a", old), ("b", new))}
    study = parse_study({"name": "s", "question": "q", "seeds": [0], "arms": arms})
    a, b = (resolve_method(study.resolve(arm, 0), 5).objective for arm in "ab")
    assert (a.clip_low, a.clip_high, a.kl_coef, a.advantage_scale, a.anchor) == (0.1, 0.3, 0.01, "none", "rollout")
    assert (b.ratio, b.aggregate, b.corrections) == ("sequence", "token_mean", (Correction("token_mask", high=3.0),))
    assert build(RunConfig, stored(study.resolve("b", 0)), "") == study.resolve("b", 0)


def test_a_study_file_sets_corrections_as_the_command_line_does():
    method = {"corrections": ["token_mask:0.5:5"]}
    study = {"name": "s", "question": "q", "seeds": [0], "arms": {"a": {"method": method}}}
    assert parse_study(study).resolve("a", 0).method.corrections == (Correction("token_mask", 0.5, 5.0),)
    method["corrections"] = ["token_mask"]
    with pytest.raises(ConfigError, match=r"arms\.a\.method\.corrections\[0\]: .*expected KIND:HIGH"):
        parse_study(study)


def test_a_configuration_from_before_these_fields_loads_to_the_same_method():
    data = stored(RunConfig(method=MethodConfig(objective="gspo", clip_low=0.003)))
    new = {"ratio", "gate", "dual_clip", "ratio_cap", "corrections", "aggregate", "length_constant", "kl_estimator"}
    data["method"] = {name: value for name, value in data["method"].items() if name not in new}
    config = build(RunConfig, data, "")
    assert resolve_method(config, 1).objective == dataclasses.replace(OBJECTIVES["gspo"], clip_low=0.003)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method.clip-low", "0.1"], {"clip_low": 0.1}),
        (["--method.ratio", "sequence", "--method.gate", "mask"], {"ratio": "sequence", "gate": "mask"}),
        (["--method.kl-importance-weighted", "True"], {"kl_importance_weighted": True}),
        (
            ["--method.corrections", "token_mask:0.5:5", "off_policy_mask:0.1:current"],
            {"corrections": (Correction("token_mask", 0.5, 5.0), Correction("off_policy_mask", 0.0, 0.1, "current"))},
        ),
    ],
)
def test_the_command_line_sets_them(words, expected):
    assert overrides(parse(RunConfig, words, "moe-rl run", RunConfig()).method) == expected


@pytest.mark.parametrize("words", [["--method.ratio", "sequense"], ["--method.corrections", "token_mask:3:1"]])
def test_the_command_line_refuses_what_is_none_of_them(words, capsys):
    with pytest.raises(SystemExit):
        parse(RunConfig, words, "moe-rl run", RunConfig())
    said = capsys.readouterr()
    assert words[1] in said.err + said.out


def test_the_methods_page_says_which_of_them_do_not_go_with_every_replay():
    refused = set()
    for objective in PRESETS:
        for replay in ("none", "R2", "R3", "PR2"):
            try:
                validate(build(RunConfig, {"method": {"objective": objective, "replay": replay}}, ""))
            except ValueError as error:
                assert "replay" in str(error), (objective, replay)
                refused.add((objective, replay))
    page = " ".join((Path(__file__).parents[2] / "docs/methods.md").read_text(encoding="utf-8").split())
    methods, kinds = re.search(r"defines them\. But for (.*?), whose responses .*?: (.*?) alone", page).groups()
    left = {"none", "R2", "R3", "PR2"} - set(re.findall(r"`(\w+)`", kinds))
    assert refused == {(objective, replay) for objective in re.findall(r"`(\w+)`", methods) for replay in left}


def test_what_is_set_to_zero_or_to_nothing_is_set():
    own = MethodConfig(objective="minirl", clip_low=0.0, corrections=())
    assert overrides(own) == {"clip_low": 0.0, "corrections": ()}
    assert resolve_method(RunConfig(method=own), 5).objective.corrections == ()
