"""A study file is checked whole before anything runs; every mistake is named with its field and a way out."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moe_rl.cli import main
from moe_rl.settings import FREE, differences, flatten, plain
from moe_rl.study.config import ConfigError, changed_settings, dump_run, dump_study, load_study, parse_study
from moe_rl.training import RunConfig
from moe_rl.training.config import DistributedConfig
from moe_rl.yaml_files import parse_yaml

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))

STUDY = {
    "name": "s",
    "question": "?",
    "seeds": [0, 1],
    "base": {"optim": {"steps": 2, "learning_rate": 1e-3}},
    "arms": {
        "grpo": {"label": "GRPO"},
        "gspo": {"method": {"objective": "gspo", "clip_low": 3e-4}, "seeds": [1]},
    },
}


def changed(**changes):
    return {**STUDY, **changes}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_shipped_study_resolves_and_survives_a_round_trip(path, tmp_path):
    study = load_study(path)
    copy = tmp_path / "study.yaml"
    copy.write_text(dump_study(study))
    assert load_study(copy) == study
    of_each_seed = {seed: (arm, seed) for arm, seed in study.runs()}
    assert all(study.resolve(arm, seed).seed == seed for arm, seed in of_each_seed.values())
    for arm, seed in dict(reversed(study.runs())).items():  # one of each arm: YAML is slow
        config = study.resolve(arm, seed)
        assert changed_settings(parse_yaml(dump_run(config)), config) == {}


def test_what_changes_no_number_may_be_another_when_a_run_goes_on_and_another_strategy_may_not():
    config = parse_study(changed(base={"distributed": {"strategy": "ddp"}})).resolve("grpo", 0)
    stored = parse_yaml(dump_run(config))
    now = replace(config, keep_policy_every=3, checkpoint_every=7, tracker="wandb")
    assert changed_settings(stored, replace(now, distributed=DistributedConfig("ddp", processes=1))) == {}
    assert {name for name, _ in flatten(plain(config)).items() if name in FREE} == set(FREE), "all are settings"
    assert "distributed.processes" not in FREE, "ranks draw noise of their own: arms that differ in it differ"
    other = replace(now, distributed=DistributedConfig("fsdp2", processes=1))
    assert changed_settings(stored, other) == {"distributed.strategy": ("ddp", "fsdp2")}


def test_the_example_of_the_page_of_studies_can_run():
    page = (Path(__file__).parents[2] / "experiments" / "README.md").read_text()
    study = parse_study(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert study.base.model.cold_start.until_reward == 0.35, "what the page says of cold starts"
    assert study.resolve("grpo_replay", 5).method.replay == "R2" and study.comparisons == (("grpo_replay", "grpo"),)


def test_trying_the_example_leaves_its_folder_to_the_study(tmp_path, monkeypatch):
    """Where a trial with other settings has run, the study itself would be refused."""
    page = (Path(__file__).parents[2] / "experiments" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("my_study.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    tried = [shlex.split(line)[1:] for line in re.findall(r"moe-rl study my_study.yaml [^`\n]+", page)]
    called = []
    monkeypatch.setattr("moe_rl.study.grid.run_study", lambda study, folder, *_: called.append((study, folder)))
    for words in (*tried, ["study", "my_study.yaml"]):
        main([*words, "--no-figures"])
    *trials, (_, folder) = called
    assert [(study.base.optim.steps, study.seeds) for study, _ in trials] == [(3, (0,))]
    assert folder == Path("runs/my_study") and folder not in [where for _, where in trials]


def test_a_label_is_one_line():
    study = parse_study({"name": "x", "arms": {"a": {"label": "GRPO with a\n folded label\n"}}})
    assert study.arms["a"].label == "GRPO with a folded label"


def test_arms_whose_folders_a_mac_would_not_tell_apart_are_refused():
    data = {"name": "x", "arms": {"grpo": {}, "GRPO": {"label": "other", "optim": {"steps": 3}}}}
    with pytest.raises(ConfigError, match=r"arms\.GRPO: on a Mac its folder would be that of arm 'grpo'"):
        parse_study(data)
    assert set(parse_study(data, merged=True).arms) == {"grpo", "GRPO"}, "runs that are there can be gone on with"
    with pytest.raises(ConfigError, match=r"arms\.Logs: in a study's folder that name is something else's"):
        parse_study({"name": "x", "arms": {"Logs": {}}})


def test_a_base_that_no_arm_takes_is_refused():
    """One that some arm takes is not: the others keep what they set."""
    study = parse_study(STUDY)
    other = replace(study.base, method=replace(study.base.method, objective="gspo", clip_low=0.1), seed=0)
    assert study.with_base(other).resolve("grpo", 0).method.clip_low == 0.1
    with pytest.raises(ConfigError, match=r"method.objective: 'gspo' would change nothing.*\(gspo\)"):
        study.with_arms(["gspo"]).with_base(other)
    with pytest.raises(ConfigError, match="given by --seeds"):
        study.with_base(replace(study.base, seed=3))


def test_arms_lie_over_the_base_and_name_their_own_seeds():
    study = parse_study(STUDY)
    assert study.runs() == [("grpo", 0), ("grpo", 1), ("gspo", 1)]
    grpo, gspo = study.resolve("grpo", 1), study.resolve("gspo", 1)
    assert grpo.optim == gspo.optim and grpo.optim.steps == 2
    assert gspo.method.objective == "gspo" and gspo.method.clip_low == 3e-4
    assert set(differences(yaml.safe_load(dump_run(grpo)), yaml.safe_load(dump_run(gspo)))) == {
        "method.objective",
        "method.clip_low",
        "objective.ratio",  # what is minimised, presets filled in
        "objective.clip_low",
        "objective.clip_high",
    }


def test_yaml_writes_small_numbers_as_text_and_we_read_them_as_numbers():
    study = parse_study(
        yaml.safe_load("{name: s, question: q, seeds: [0], base: {optim: {learning_rate: 1e-3}}, arms: {a: {}}}")
    )
    assert study.base.optim.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected a mapping"),
        (changed(seeds=[]), "seeds: expected a list of at least one"),
        (changed(seeds=["x"]), r"seeds\[0\]: expected int, got 'x'"),
        (changed(arms={}), "arms: expected a mapping of at least one arm"),
        (changed(arms={"a": 5}), "arms.a: expected a mapping of what the arm changes, got 5"),
        (changed(arms={"a": "gspo"}), "arms.a: expected a mapping of what the arm changes, got 'gspo'"),
        (changed(arms={"a/b": {}}), "an arm's name becomes a folder's: .* got 'a/b'"),
        (changed(name="../s"), "a study's name becomes a folder's: .* got '../s'"),
        (changed(sedes=[1]), "sedes: unknown field; did you mean 'seeds'"),
        (
            changed(base={"optim": {"learning_rat": 1}}),
            "base.optim.learning_rat: unknown field; did you mean 'learning_rate'",
        ),
        (changed(base={"optim": {"steps": "many"}}), "base.optim.steps: expected int, got 'many'"),
        (changed(base={"optim": {"steps": True}}), "base.optim.steps: expected int, got True"),
        (
            changed(arms={"a": {"method": {"objective": "gsop"}}}),
            "method.objective: expected one of .*; got 'gsop'. Did you mean 'gspo'",
        ),
        (
            changed(arms={"a": {"method": {"replay": "R9"}}}),
            "a.method.replay: expected one of none, R2, R3, PR2; got 'R9'",
        ),
        (changed(arms={"a": {"value": {"model": "heads"}}}), "arms.a.value.model: .*Did you mean 'head'"),
        (changed(arms={"a": {"method": {"ratio": "sequense"}}}), "a.method.ratio: .*Did you mean 'sequence'"),
        (changed(arms={"a": {"method": {"gate": "clipp"}}}), "method: Objective.gate: .*Did you mean 'clip'"),
        (
            changed(arms={"a": {"method": {"corrections": [{"kind": "token_mask", "low": 3, "high": 1}]}}}),
            r"arms.a.method.corrections\[0\]: .*low 3.0 is above high 1.0",
        ),
        (
            changed(arms={"a": {"method": {"ratio": "sequence", "gate": "geometric"}}}),
            "'geometric' is defined for 'token' ratios",
        ),
        (changed(seeds=[0, -1]), r"seeds\[1\]: expected a whole number of at least 0 .*got -1"),
        (changed(seeds=[0, 1, 0]), r"seeds\[2\]: seed 0 is given twice; an arm runs once with each seed"),
        (changed(arms={"a": {"seeds": [1, 1]}}), r"arms.a.seeds\[1\]: seed 1 is given twice"),
        (changed(arms={"a": {"seeds": []}}), r"arms.a.seeds: expected a list of at least one whole number, got \[\]"),
        (changed(base={"seed": 3}), "base.seed: 3 would change nothing; the seeds of a study are a list, seeds"),
        (changed(arms={"a": {"seed": 3}}), "arms.a.seed: would change nothing; the seeds of an arm are a list"),
        (changed(arms={"a": {"seeds": [2**64]}}), r"arms.a.seeds\[0\]: expected a whole number"),
        (changed(arms={"a": {"metod": {}}}), "arms.a.metod: unknown field; did you mean 'method'"),
        (changed(arms={"a": {"lable": "A"}}), "arms.a.lable: unknown field; did you mean 'label'"),
        (changed(arms={"a": {"replay": "R2"}}), "arms.a.replay: unknown field; did you mean method: {replay: ...}?"),
        (changed(base={"temperature": 1.0}), "base.temperature: unknown field; did you mean rollout: {temp"),
        (changed(optim={"steps": 3}), "optim: unknown field; did you mean base: {optim: ...}?"),
        (
            changed(arms={"a": {"optim": {"num_minibatches": 5}}}),
            "optim.num_minibatches: .*must divide rollout.prompts",
        ),
        (changed(arms={"a": {"method": {"noise": -1}}}), "method.noise: .*of at least 0, got -1"),
        (changed(arms={"a": {"rollout": {"group_size": 1}}}), "rollout.group_size: a group baseline needs 2"),
        (changed(arms={"a": {"rollout": {"prompts": 4, "group_size": 4}}}), "16 responses, got 32, its default"),
    ],
)
def test_a_mistake_is_named_with_its_field(data, message):
    with pytest.raises(ConfigError, match=message):
        parse_study(data)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "quick.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"no such study file; did you mean 'quick.yaml'"):
        load_study(tmp_path / "quik.yaml")


def test_broken_yaml_names_the_file(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1,\nb: 2")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        load_study(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: s\narms:\n  a: {}\n  b: {}\n  a: {}\n", r"'a' is there twice in the mapping of line 3"),
        (b"name: s\narms: {a: {optim: {steps: 1, steps: 2}}}\n", r"'steps' is there twice in the mapping of line 2"),
        (b"name: s\narms: {1: {label: a}, 1: {label: b}}\n", r"'1' is there twice in the mapping of line 2"),
        (b"name: s\narms: {0.10: {}, 0.1: {}}\n", r"'0.1' is there twice in the mapping of line 2"),
        (b"name: s\narms: {on: {}}\n", "arms: YAML reads an unquoted on, .* as True: quote the name"),
        (b"name: \x96\narms: {a: {}}\n", "not valid YAML: 'utf-8' codec"),
    ],
)
def test_what_would_be_lost_in_reading_is_refused(tmp_path, content, message):
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"study.yaml: {message}"):
        load_study(path)
    with pytest.raises(ConfigError, match="is a folder; a study file is YAML"):
        load_study(tmp_path)


def test_unknown_arm_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown arm 'gspoo' in study 's'; did you mean 'gspo'"):
        parse_study(STUDY).resolve("gspoo", 0)


def test_defaults_are_a_run_that_can_start():
    from moe_rl.training import validate

    validate(RunConfig())


def test_comparisons_are_declared_with_the_study(tmp_path):
    study = parse_study(changed(comparisons=[["gspo", "grpo"]], interest=0.1, outcome="held_out"))
    assert study.comparisons == (("gspo", "grpo"),) and study.interest == 0.1 and study.outcome == "held_out"
    copy = tmp_path / "study.yaml"
    copy.write_text(dump_study(study))
    assert load_study(copy) == study
    assert parse_study(STUDY).comparisons is None and parse_study(STUDY).interest == 0.05
    numbers = changed(arms={1: {}, 0.5: {"method": {"noise": 0.5}}}, comparisons=[[0.5, 1]])  # unquoted names in YAML
    assert parse_study(numbers).comparisons == (("0.5", "1"),)
    assert parse_study(changed(comparisons=[])).comparisons == ()  # nothing is compared, by choice


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"comparisons": [["gspo", "grpoo"]]}, r"comparisons\[0\]: no arm is called 'grpoo'.*grpo"),
        ({"comparisons": [["gspo", "gspo"]]}, r"comparisons\[0\]: 'gspo' is compared with itself"),
        (
            {"comparisons": [["gspo", "grpo"], ["grpo", "gspo"]]},
            r"comparisons\[1\]: 'grpo' and 'gspo' are compared twice",
        ),
        ({"comparisons": [["gspo"]]}, r"comparisons\[0\]: expected 2 values, got 1"),
        ({"comparisons": "gspo, grpo"}, "comparisons: expected a list, got 'gspo, grpo'"),
        (
            {"seeds": [0], "comparisons": [["gspo", "grpo"]]},
            r"comparisons\[0\]: 'gspo' and 'grpo' have no seed in common",
        ),
        ({"outcome": "heldout"}, "outcome: .*sampled.*held_out.*heldout"),
        ({"interest": 0}, "interest: expected a difference of reward above 0, got 0.0"),
        ({"interest": float("nan")}, "interest: expected a difference of reward above 0, got nan"),
    ],
)
def test_comparisons_that_cannot_be_made_are_refused(field, words):
    with pytest.raises(ConfigError, match=words):
        parse_study(changed(**field))


def test_some_arms_keep_the_comparisons_among_them():
    study = parse_study(
        changed(
            arms={**STUDY["arms"], "third": {"seeds": [1], "optim": {"steps": 3}}},
            comparisons=[["gspo", "grpo"], ["third", "grpo"]],
        )
    )
    assert study.with_arms(["grpo", "third"]).comparisons == (("third", "grpo"),)
    assert list(study.with_arms(["third", "grpo"]).arms) == ["grpo", "third"], "in the study's own order"
    assert parse_study(STUDY).with_arms(["grpo"]).comparisons is None
