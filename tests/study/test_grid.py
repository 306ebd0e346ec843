"""Which runs a study starts, in which order and with which kernels."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from moe_rl.cli import main
from moe_rl.done import write_done
from moe_rl.files import InUseError, sole_writer
from moe_rl.study.config import ConfigError, dump_run, dump_study, load_study, parse_study
from moe_rl.study.grid import (
    Run,
    StudyFailed,
    _arguments,
    _next,
    _runs,
    check_other_seeds,
    check_place,
    run_study,
    with_earlier,
)
from moe_rl.study.launchers import Processes, check_roundings
from moe_rl.study.run import check_folder
from moe_rl.study.shipped import find_study, listed_studies, outline
from moe_rl.study.worker import Worker
from moe_rl.training import RunConfig

MICRO = {
    "name": "micro",
    "question": "which runs?",
    "seeds": [0],
    "base": {
        "model": {
            "tiny": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_experts": 6, "moe_intermediate_size": 8},
            "cold_start": {"steps": 3, "batch_size": 4, "warmup_steps": 1, "check_problems": 16},
        },
        "task": {"options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 2, "num_minibatches": 2, "warmup_updates": 1},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4},
    },
    "arms": {"grpo": {}, "gspo": {"method": {"objective": "gspo"}}},
}
EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
NATIVE = torch.backends.cpu.get_cpu_capability()


def runs_of(tmp_path, **changes):
    return _runs(parse_study({**MICRO, **changes}), tmp_path, "native", Processes().check)


def test_each_seed_has_a_cold_start_that_its_arms_share(tmp_path):
    runs = runs_of(tmp_path, seeds=[3, 4])
    model = {(run.arm, run.seed): run.config.model for run in runs}
    assert model["grpo", 3] == model["gspo", 3] != model["grpo", 4]
    assert (model["grpo", 3].tiny.seed, model["grpo", 3].cold_start.seed) == (3, 3)
    base = {**MICRO["base"], "model": {"tiny": {"seed": 9}}}
    assert {run.config.model.tiny.seed for run in runs_of(tmp_path, base=base, seeds=[3, 4])} == {9}


def test_no_run_waits_for_a_cold_start_while_another_could_begin(tmp_path):
    waiting = runs_of(tmp_path, seeds=[0, 1])
    names = [run.name for run in waiting]
    assert names == ["grpo seed 0", "gspo seed 0", "grpo seed 1", "gspo seed 1"]
    first = _next(waiting, [])
    first.state = "running"
    waiting.remove(first)
    assert first.name == "grpo seed 0" and _next(waiting, [first]).name == "grpo seed 1"
    first.reward = 0.3  # it has begun, so its cold start is there
    assert _next(waiting, [first]).name == "gspo seed 0"
    first.reward = None
    assert _next(waiting[:1], [first]).name == "gspo seed 0", "nothing else to do: it waits"
    other = dataclasses.replace(first, rounding="avx2", state="waiting")
    assert not first.begins_like(other), "other kernels, another cold start"


@pytest.mark.parametrize(
    ("names", "native", "refused"),
    [
        (("native", "avx2", "default"), "AVX512", None),
        (("native", "default"), "AVX2", None),
        (("native",), "DEFAULT", None),
        (("avx512",), "AVX512", "avx512"),
        (("native", "avx512"), "AVX2", "avx512"),
        (("avx2",), "AVX2", "avx2"),
        (("default",), "SVE256", "default"),
    ],
)
def test_roundings_that_are_none_are_refused(names, native, refused):
    if refused is None:
        check_roundings(names, native)
    else:
        with pytest.raises(ConfigError, match=f"rounding {refused!r}: torch uses {native} kernels here"):
            check_roundings(names, native)


@pytest.mark.skipif(NATIVE not in ("AVX2", "AVX512"), reason="this processor has one set of kernels")
@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="the environment has chosen the kernels")
def test_a_study_is_repeated_with_other_kernels_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("micro.yaml").write_text(yaml.safe_dump({**MICRO, "arms": {"grpo": {}}}))
    command = ["study", "micro.yaml", "--rounding", "native", "default", "--no-figures", "--workers", "2"]
    main(command)
    assert "grpo seed 0 default: done" in capsys.readouterr().out
    native, other = (json.loads((Path(p) / "grpo/seed0/env.json").read_text()) for p in PLACES)
    assert (native["rounding"], native["kernels"]) == ("native", NATIVE)
    assert (other["rounding"], other["kernels"]) == ("default", "DEFAULT")
    assert native["cold_start"]["kernels"] == NATIVE and other["cold_start"]["kernels"] == "DEFAULT"
    assert native["weights_sha256"] != other["weights_sha256"] and native["cpu"] == other["cpu"]
    assert any("BLAS" in line or "Math Kernel" in line for line in native["math_libraries"])
    before = {path: path.read_bytes() for path in Path("runs").rglob("metrics.jsonl")}
    main(command)
    assert "2 runs, 2 already done" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in Path("runs").rglob("metrics.jsonl")} and len(before) == 2


PLACES = ("runs/micro", "runs/micro/rounding_default")


def test_a_study_that_another_process_runs_is_refused(tmp_path):
    study = parse_study(MICRO)
    with (
        sole_writer(tmp_path / "out", "moe-rl study micro.yaml"),
        pytest.raises(InUseError, match=rf"process {os.getpid()} on .*: moe-rl study micro\.yaml"),
    ):
        run_study(study, tmp_path / "out", tmp_path / "cold", 1, "moe-rl study")
    assert not (tmp_path / "out" / "study.yaml").exists()


def test_a_damaged_run_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    study, begun = parse_study(MICRO), []
    folder = tmp_path / "out" / "gspo" / "seed0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_run(study.resolve("gspo", 0)))
    (folder / "metrics.jsonl").write_text('{"kind":"rollout","st\n')
    write_done(folder, seconds=1)
    (folder / "metrics.jsonl").write_text("")
    monkeypatch.setattr(Worker, "__init__", lambda self, rounding, log: None)
    monkeypatch.setattr(Worker, "alive", lambda self: True)

    def begin(self, arguments, log):
        begun.append(arguments[3])
        (tmp_path / "out" / arguments[3] / "seed0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / arguments[3] / "seed0" / "DONE").touch()

    monkeypatch.setattr(Worker, "begin", begin)
    monkeypatch.setattr(Worker, "ended", lambda self, log: 0)
    monkeypatch.setattr(Worker, "stop", lambda self: None)
    with pytest.raises(StudyFailed, match=r"1 of 2 runs did not finish:\n  gspo seed 0: .*metrics\.jsonl is not what"):
        run_study(study, tmp_path / "out", tmp_path / "cold", 1, "moe-rl study")
    assert begun == ["grpo"] and (folder / "DONE").exists()
    assert "gspo seed 0: " in capsys.readouterr().out


def test_seeds_that_ran_under_other_settings_are_not_pooled(tmp_path):
    first = parse_study(MICRO)
    (tmp_path / "grpo" / "seed0").mkdir(parents=True)
    (tmp_path / "grpo" / "seed0" / "config.yaml").write_text(dump_run(first.resolve("grpo", 0)))
    faster = parse_study({**MICRO, "seeds": [1], "base": {**MICRO["base"], "optim": {"learning_rate": 0.01}}})
    check_other_seeds(faster, tmp_path)  # a run that never began has no rows to be pooled
    (tmp_path / "grpo" / "seed0" / "metrics.jsonl").touch()
    check_other_seeds(parse_study({**MICRO, "seeds": [1]}), tmp_path)
    with pytest.raises(ConfigError, match=r"seed0 was run under other settings \(.*optim\.learning_rate: .*are pooled"):
        check_other_seeds(faster, tmp_path)
    check_other_seeds(faster.with_arms(["gspo"]), tmp_path)


def test_a_run_is_named_with_its_rounding(tmp_path):
    run = runs_of(tmp_path)[0]
    assert isinstance(run, Run) and run.name == "grpo seed 0"
    assert dataclasses.replace(run, rounding="avx2").name == "grpo seed 0 avx2"


def test_a_folder_keeps_what_a_command_for_some_of_its_arms_leaves_out(tmp_path):
    """Labels, seeds and declared comparisons of arms that ran before; not those that never ran or have another name."""
    data = {**MICRO, "seeds": [0, 1], "comparisons": [["gspo", "grpo"], ["sapo", "grpo"]]}
    data["arms"] = {
        **{name: {"label": f"the {name}", "method": {"objective": name}} for name in ("gspo", "sapo", "gmpo")},
        "grpo": {"label": "the grpo"},
    }
    whole = parse_study(data)
    assert with_earlier(whole, tmp_path, whole) == whole
    (tmp_path / "study.yaml").write_text(dump_study(whole))
    for run in ("grpo/seed0", "grpo/seed1", "gspo/seed0", "sapo/seed0"):
        (tmp_path / run).mkdir(parents=True)
    some = dataclasses.replace(whole.with_arms(["grpo", "sapo"]), seeds=(2,))
    kept = with_earlier(some, tmp_path, whole)
    assert {name: (arm.label, arm.seeds) for name, arm in kept.arms.items()} == {
        "grpo": ("the grpo", None),
        "sapo": ("the sapo", (0, 2)),
        "gspo": ("the gspo", (0,)),
    }
    assert kept.seeds == (0, 1, 2) and kept.comparisons == whole.comparisons
    assert list(kept.arms) == ["gspo", "sapo", "grpo"], "as the file has them: the first is the control"
    (tmp_path / "study.yaml").write_text(dump_study(kept))
    again = load_study(tmp_path / "study.yaml")
    assert again.arms.keys() == kept.arms.keys() and again.comparisons == kept.comparisons
    renamed = dataclasses.replace(some, arms={**some.arms, "better": whole.arms["gspo"]})
    assert "gspo" not in with_earlier(renamed, tmp_path, renamed).arms
    keeps = dataclasses.replace(some, base=dataclasses.replace(some.base, keep_policy_every=5))
    assert with_earlier(keeps, tmp_path, whole).arms == kept.arms, "the same study, of which more is kept"
    other = dataclasses.replace(some, base=dataclasses.replace(some.base, seed=9))
    assert with_earlier(other, tmp_path, whole) == other, "of another base"


@pytest.mark.parametrize(
    "commands", [["grpo gspo sapo"], ["grpo", "gspo sapo"], ["gspo", "sapo", "grpo"], ["sapo gspo grpo", "gspo"]]
)
@pytest.mark.parametrize("declared", [[["gspo", "grpo"], ["sapo", "grpo"]], [], None])
def test_a_study_that_is_run_in_parts_is_the_one_of_its_file(tmp_path, commands, declared):
    """The family of comparisons and the control are the file's, whichever command ran which arm."""
    arms = {"grpo": {}, **{name: {"method": {"objective": name}} for name in ("gspo", "sapo")}}
    whole = parse_study({**MICRO, "arms": arms, "comparisons": declared})
    for names in map(str.split, commands):
        for name in names:
            (tmp_path / name / "seed0").mkdir(parents=True, exist_ok=True)
        found = with_earlier(whole.with_arms(names), tmp_path, whole)
        (tmp_path / "study.yaml").write_text(dump_study(found))
    assert load_study(tmp_path / "study.yaml") == whole and list(found.arms) == list(whole.arms)


GSPO = {"gspo": {"method": {"objective": "gspo"}}}


@pytest.mark.parametrize(
    ("first", "second", "seed", "kept"),
    [
        ({"grpo": {}}, GSPO, 2, ["grpo", "gspo"]),  # compared, and no seed in common
        ({"grpo": {"label": "same"}}, {"new": {"label": "same", "method": {"replay": "R2"}}}, 0, ["new", "grpo"]),
        ({"grpo": {}}, {"new": {"method": {"replay": "none"}}}, 0, ["new"]),  # renamed, and a default spelled out
    ],
)
def test_runs_of_a_folder_in_which_two_commands_ran_begin(tmp_path, monkeypatch, first, second, seed, kept):
    """Each reads what the second command wrote of the arms of both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moe_rl.study.grid._schedule", lambda *_: iter(()))
    for arms, number in ((first, 0), (second, seed)):
        data = {**MICRO, "arms": {**first, **arms}, "comparisons": [["gspo", "grpo"]]}
        data = data if arms == GSPO else {**MICRO, "arms": arms}
        Path("micro.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        main(["study", "micro.yaml", "--no-figures", "--arms", *arms, "--seeds", str(number)])
        Path("runs", "micro", *arms, f"seed{number}").mkdir(parents=True)
    begun = []
    monkeypatch.setattr("moe_rl.study.run.run_one", lambda config, *_: begun.append((config.seed, config.method)))
    run = Run(*second, seed, Path("out"), Path("runs/micro/logs/x.log"), RunConfig())
    main([str(word) for word in _arguments(run, Path("cold"))])
    folder = load_study("runs/micro/study.yaml", merged=True)
    assert list(folder.arms) == kept
    assert begun == [(seed, folder.resolve(*second, seed).method)]


def test_a_folder_whose_runs_could_not_read_it_is_refused_before_one_starts(tmp_path, monkeypatch):
    study = parse_study(MICRO)
    twins = dataclasses.replace(study, arms={**study.arms, "twin": study.arms["grpo"]})
    monkeypatch.setattr("moe_rl.study.grid.with_earlier", lambda *_: twins)
    with pytest.raises(ConfigError, match=r"earlier commands ran there: arms\.twin: the same configuration"):
        run_study(study, tmp_path / "out", tmp_path / "cold", 1, "moe-rl study")
    assert not (tmp_path / "out" / "study.yaml").exists() and not (tmp_path / "out" / "logs").exists()


def test_pairs_of_arms_that_the_file_has_no_more_stay_declared(tmp_path):
    """Those of arms that it has are the file's to say: it may turn one round."""
    arms = {"grpo": {}, **{name: {"method": {"objective": name}} for name in ("gspo", "sapo")}}
    old = parse_study({**MICRO, "arms": arms, "comparisons": [["gspo", "grpo"], ["sapo", "grpo"]]})
    (tmp_path / "study.yaml").write_text(dump_study(old))
    for name in arms:
        (tmp_path / name / "seed0").mkdir(parents=True)
    new = parse_study({**MICRO, "comparisons": [["grpo", "gspo"]]})
    found = with_earlier(new.with_arms(["gspo"]), tmp_path, new)
    assert found.comparisons == (("grpo", "gspo"), ("sapo", "grpo")) and list(found.arms) == ["grpo", "gspo", "sapo"]


def test_the_command_hands_on_what_the_file_declares_of_other_arms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("micro.yaml").write_text(yaml.safe_dump({**MICRO, "comparisons": [["gspo", "grpo"]]}, sort_keys=False))
    monkeypatch.setattr("moe_rl.study.grid._schedule", lambda *_: iter(()))  # no run is made
    for arm in ("gspo", "grpo"):
        main(["study", "micro.yaml", "--arms", arm, "--no-figures"])
        Path("runs", "micro", arm, "seed0").mkdir(parents=True)
    found = load_study("runs/micro/study.yaml")
    assert list(found.arms) == ["grpo", "gspo"] and found.comparisons == (("gspo", "grpo"),)


@pytest.mark.parametrize(
    ("made", "drawn"),
    [
        (["rounding_default"], ["rounding_default"]),
        (["rounding_avx2", "rounding_default"], ["rounding_avx2", "rounding_default"]),
        ([".", "rounding_default"], ["."]),
    ],
)
def test_the_report_of_other_roundings_alone_is_their_own(tmp_path, monkeypatch, made, drawn):
    monkeypatch.chdir(tmp_path)
    Path("micro.yaml").write_text(yaml.safe_dump(MICRO))
    for name in made:
        Path("out", name, "grpo", "seed0").mkdir(parents=True)
    found = []
    monkeypatch.setattr("moe_rl.study.grid.run_study", lambda *_: None)
    monkeypatch.setattr("moe_rl.cli.draw_report", found.append)
    roundings = [name.removeprefix("rounding_") for name in made if name != "."]
    main(["study", "micro.yaml", "--output", "out", "--rounding", *roundings])
    assert found == [Path("out", name) for name in drawn]


@pytest.mark.parametrize("number", range(1, 9))
def test_every_question_of_the_findings_has_a_file_that_runs(number):
    """A study of its own or a list of them, named on the question's page."""
    files = EXPERIMENTS.parent.glob(f"docs/findings/q{number}_*.md")
    pages = {page.name: page.read_text(encoding="utf-8") for page in files}
    (section,) = (text for text in pages.values() if text.startswith(f"# {number}. "))
    assert all(f"]({name})" in section or text == section for name, text in pages.items())
    path = find_study(f"q{number}")
    found = outline(path)
    assert f"`moe-rl study q{number}`" in section
    assert found.arms or listed_studies(path, found)
    assert all(" ".join(command.split()[:2]) in section for command in found.then)


SECONDARY = {"decomposition"}
"""Studies whose question is not about rewards: their head says that six seeds cannot tell those apart by a test."""


STUDIES = [path for path in sorted(EXPERIMENTS.glob("**/*.yaml")) if not outline(path).studies]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_shipped_studies_can_reach_what_they_declare(path):
    """Enough pairs for Holm's first step over the declared family: the least p of a sign-flip test is 2 / 2^n. And
    seeds that begin from models of their own."""
    study = load_study(path)
    for pair in () if path.stem in SECONDARY else study.comparisons or ():
        pairs = set.intersection(*(set(study.arms[arm].seeds or study.seeds) for arm in pair))
        assert len(study.comparisons) * 2 / 2 ** len(pairs) <= 0.05
    starts = {study.resolve(arm, seed).model.tiny.seed for arm, seed in study.runs() if arm == next(iter(study.arms))}
    assert len(starts) == len(study.seeds)


def test_a_study_writes_into_its_own_folder_alone(tmp_path):
    study = parse_study(MICRO)
    check_place(study, tmp_path / "new")
    (tmp_path / "grpo" / "seed0").mkdir(parents=True)  # moe-rl run
    for name in ("logs", "rounding_avx2", ".lock"):
        (tmp_path / name).mkdir()
    check_place(study, tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    said = r"holds no study \(no study.yaml\) but thesis.tex. Nothing was overwritten: choose another"
    with pytest.raises(ConfigError, match=said):
        check_place(study, tmp_path)
    (tmp_path / "study.yaml").write_text(dump_study(study))
    check_place(study, tmp_path)
    other = dataclasses.replace(study, name="other")
    with pytest.raises(ConfigError, match=r"holds the study 'micro', and this one is 'other'. Nothing was overwritten"):
        run_study(other, tmp_path, tmp_path / "cold", 1, "moe-rl study")
    assert load_study(tmp_path / "study.yaml") == study


def test_a_run_is_not_written_as_another_seed(tmp_path):
    with pytest.raises(ConfigError, match=r"seed1 is named for seed 1, and this run has seed 0: say --seed 1, or"):
        check_folder(parse_study(MICRO).resolve("grpo", 0), tmp_path / "seed1")


@pytest.mark.parametrize(("output", "cold"), [("-x", "cold"), ("out", "-x/cold")])
def test_a_path_that_later_commands_would_take_for_an_option_is_refused(output, cold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"-x.* would be taken for an option later; say {tmp_path}/-x"):
        run_study(parse_study(MICRO), Path(output), Path(cold), 1, "moe-rl study")
    assert not list(tmp_path.iterdir())
