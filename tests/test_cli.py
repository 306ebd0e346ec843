"""The command line as a newcomer drives it: mistakes are one message, and a study resumes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml

from moe_rl import __version__
from moe_rl.cli import VERBS, main
from moe_rl.study import draw_study
from moe_rl.study.config import ConfigError, load_study
from moe_rl.study.figures import FIGURES
from moe_rl.study.grid import StudyFailed
from moe_rl.study.launchers import workers_of
from moe_rl.study.shipped import find_study
from moe_rl.usage import CONFIGURATION, RUN_OPTIONS, STUDY_OPTIONS

ROOT = Path(__file__).parents[1]

MICRO = {
    "name": "micro",
    "question": "does it run?",
    "seeds": [0],
    "base": {
        "model": {
            "tiny": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_experts": 6, "moe_intermediate_size": 8},
            "cold_start": {"steps": 3, "batch_size": 4, "warmup_steps": 1},
        },
        "task": {"options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 2, "num_minibatches": 2, "warmup_updates": 1},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 1},
        "checkpoint_every": 1,
    },
    "arms": {"grpo": {"label": "GRPO"}, "gspo": {"label": "GSPO", "method": {"objective": "gspo"}}},
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "micro.yaml").write_text(yaml.safe_dump(MICRO))
    return tmp_path


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.setattr("moe_rl.study.launchers.Worker", forked.Worker)


def refused(capsys, *arguments, status=1):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert stop.value.code == status
    error = capsys.readouterr()
    assert "Traceback" not in error.err
    return error.err + error.out


def test_help_lists_the_verbs_and_an_unknown_one_names_the_nearest(capsys):
    assert all(verb in refused(capsys, "--help", status=0) for verb in ("study", "run", "figures"))
    assert "did you mean 'study'" in refused(capsys, "stdy", status=2)
    assert "needs a study" in refused(capsys, "run", status=2)
    assert "usage: moe-rl run" in refused(capsys, "help", "run", status=0)
    main(["--version", "please"])
    assert capsys.readouterr().out == f"moe_rl {__version__}\n"


def test_every_configuration_field_is_an_option_and_unknown_ones_name_the_nearest(study, capsys):
    assert "--probe.decompose-every" in refused(capsys, "run", "micro.yaml", "--help-all", status=0)
    for verb, options in (("study", STUDY_OPTIONS), ("run", RUN_OPTIONS)):
        every = refused(capsys, verb, "--help-all", status=0)
        assert {option.split()[0] for option in {**options, **CONFIGURATION}} <= set(re.findall(r"--[a-z.-]+", every))
        assert "--probe.decompose-every" in every
    misspelt = refused(capsys, "run", "micro.yaml", "--arm", "grpo", "--optim.learning-rat", "1", status=2)
    assert "unknown option --optim.learning-rat; did you mean '--optim.learning-rate'?" in misspelt
    guessed = refused(capsys, "run", "micro.yaml", "--arm", "grpo", "--optim.lr", "1", status=2)
    assert "unknown option --optim.lr; did you mean '--optim.learning-rate'?" in guessed
    listed = refused(capsys, "run", "micro.yaml", "--arm", "grpo", "--optim.xyz", "1", status=2)
    assert "unknown option --optim.xyz; known: --optim." in listed and ", --optim.learning-rate, " in listed
    assert "did you mean '--prompts'" in refused(capsys, "drift", "a", "b", "--promts", "x", status=2)
    bare = refused(capsys, "run", "micro.yaml", "--arm", "grpo", "--learning-rate", "1", status=2)
    assert "did you mean --optim.learning-rate?" in bare
    section = refused(capsys, "study", "micro.yaml", "--model.cold-start", "None", status=2)
    assert "it is a section, with the options --model.cold-start.steps, " in section and "in a study file" in section
    for words in (("--task.options.length", "3"), ("--model.lora", "None"), ("--model.lora.rank=8",)):
        said = refused(capsys, "study", "quick", *words, status=2)
        assert f"{words[0].partition('=')[0]}: " in said and " is set in a study file; then it has options" in said
    assert not (study / "runs").exists()


def test_the_first_page_has_the_arms_and_the_options_that_people_use(study, capsys):
    page = refused(capsys, "study", "micro.yaml", "--help", status=0)
    assert "does it run?" in page and "gspo  GSPO" in page and "--optim.steps" in page and "--help-all" in page
    assert "--probe.decompose-every" not in page
    assert page.splitlines()[0] == "usage: moe-rl study micro.yaml [options]"
    assert "NAME|FILE" in refused(capsys, "study", "--help", status=0)
    assert re.search(r"usage: moe-rl drift .* OLD NEW \[\.\.\.\]\n", refused(capsys, "drift", "--help", status=0))


def test_the_first_page_names_the_dose_of_an_arm_without_a_label(study, capsys):
    (study / "bare.yaml").write_text("arms: {noisy: {method: {noise: 0.1}}}")
    assert re.search(r"  noisy +selection noise 0\.1\n", refused(capsys, "study", "bare.yaml", "--help", status=0))


def test_the_help_is_readable_in_a_narrow_window(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    assert "--launcher slurm" in refused(capsys, "study", "--help", status=0)


def test_the_help_breaks_no_line_where_the_source_does(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    assert "then ratios and k3 are those of RL" in refused(capsys, "drift", "--help", status=0)


def test_help_and_mistakes_answer_without_importing_torch(study):
    """So that each takes well below a second of CPU."""
    words = [[], ["--help"], ["study"], ["study", "--help"], ["study", "micro.yaml", "--help"], ["run", "--help"]]
    words += [[verb, "--help"] for verb in VERBS]
    words += [["run", "micro.yaml"], ["study", "non.yaml"], ["watch", "--prot", "3"], ["stdy"]]
    code = f"""
import contextlib, io, sys, time
from moe_rl.cli import main
for words in {words!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main(words)
slow = {{"torch", "transformers", "pandas", "matplotlib", "scipy"}} & set(sys.modules)
assert not slow, slow
print(time.process_time())
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    used = float(done.stdout)
    assert used < 0.2 * len(words), f"{len(words)} commands took {used} CPU seconds"


def test_studies_are_listed_and_found_by_name(study, capsys):
    main(["study"])
    page = capsys.readouterr().out
    names = [path.stem for path in (ROOT / "experiments").glob("*.yaml")]
    assert "replay_vs_gspo" in names and all(f"  {name} " in page for name in names)
    assert "does GRPO need Routing" in " ".join(page.split())
    assert all(page.count(f"  {name} ") == 1 for name in names), "each under one heading"
    heads = [page.index(f"\nq{number}  ") for number in range(1, 9)]
    assert heads == sorted(heads) and page.index("  quick ") < heads[0] < page.index("  selection_noise ") < heads[1]
    assert find_study("replay_vs_gspo") == ROOT / "experiments" / "replay_vs_gspo.yaml"
    assert "GRPO + Routing Replay" in refused(capsys, "run", "quick", "--help", status=0)
    assert "did you mean 'quick'" in refused(capsys, "study", "quik")
    (study / "quick").mkdir()
    assert find_study("quick").parent == ROOT / "experiments", "a folder of that name is no study"
    (study / "quick").rmdir()
    shutil.copy("micro.yaml", "quick")
    assert find_study("quick") == Path("quick"), "a file of that path wins"


def test_a_list_of_studies_runs_each_and_says_what_reads_them(study, capsys, forks):
    """Beside the list, or shipped; options go to each, and what is done is not run again."""
    second = Path("micro.yaml").read_text().replace("name: micro", "name: other")
    assert "name: other" in second
    Path("other.yaml").write_text(second)
    Path("all.yaml").write_text("question: Which?\nstudies: [micro.yaml, other.yaml]\nthen: [look at them]\n")
    options = ["--seeds", "1", "--workers", "1", "--no-figures", "--optim.steps", "1"]
    main(["study", "all.yaml", *options])
    said = capsys.readouterr().out
    assert said.index("study 1 of 2: micro") < said.index("study 2 of 2: other") < said.index("then: look at them")
    done = {"/".join(path.parts[1:3]) for path in Path("runs").glob("*/*/seed1/DONE")}
    assert done == {"micro/grpo", "micro/gspo", "other/grpo", "other/gspo"}
    main(["study", "all.yaml", *options])
    assert capsys.readouterr().out.count("2 already done") == 2


def test_a_study_that_fails_keeps_none_of_the_list_from_being_made(study, capsys, monkeypatch):
    made = []

    def run_study(config, *_):
        made.append(config.name)
        if config.name == "micro":
            raise StudyFailed("1 of 2 runs did not finish")

    monkeypatch.setattr("moe_rl.study.grid.run_study", run_study)
    Path("other.yaml").write_text(Path("micro.yaml").read_text().replace("name: micro", "name: other"))
    Path("all.yaml").write_text("studies: [micro.yaml, other.yaml]\nthen: [look at them]")
    said = refused(capsys, "study", "all.yaml", "--no-figures")
    assert made == ["micro", "other"] and "micro: 1 of 2 runs did not finish" in said and "then:" not in said


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        (("study",), "studies: [micro.yaml, nowhere]", "studies: nowhere: no such study"),
        (("study",), "studies: [micro.yaml, micro.yaml]", "micro.yaml is listed twice"),
        (("study",), "studies: [all.yaml]", "all.yaml lists several studies"),
        (("study",), "studies: micro.yaml", "studies: expected a list of text, got 'micro.yaml'"),
        (("study",), "studies: [micro.yaml]\narms: {a: {}}", "only one of the two is possible"),
        (("run",), "studies: [micro.yaml]", "here one of them is wanted: micro.yaml"),
        (("doctor",), "studies: [micro.yaml]", "here one of them is wanted: micro.yaml"),
    ],
)
def test_a_list_of_studies_that_cannot_run_is_refused(study, capsys, words, text, says):
    Path("all.yaml").write_text(text)
    assert says in refused(capsys, *words, "all.yaml")
    assert not Path("runs").exists()


def test_options_of_one_study_are_not_for_a_list(study, capsys):
    Path("all.yaml").write_text("studies: [micro.yaml]")
    for option in ("--output=x", "--arms"):
        assert "is for one study" in refused(capsys, "study", "all.yaml", option, status=2)
    with pytest.raises(ConfigError, match=r"lists studies and has no arms; load one of them: \['micro.yaml'\]"):
        load_study("all.yaml")


def test_run_without_an_arm_says_which_there_are(study, capsys):
    said = refused(capsys, "run", "micro.yaml", "--seed", "0", status=2)
    assert "run needs --arm" in said and "grpo  GRPO" in said and "gspo  GSPO" in said and "seeds: 0" in said
    assert "run needs --arm, not --arms: which" in refused(capsys, "run", "micro.yaml", "--arms", "grpo", status=2)
    assert not (study / "runs").exists()


def test_an_arm_may_be_called_None(study, capsys):
    Path("none.yaml").write_text(Path("micro.yaml").read_text().replace("  gspo:", "  None:"))
    assert "needs --arm" not in refused(capsys, "run", "none.yaml", "--arm", "None", "--seed", "-1")


TASK = """
import pathlib
from moe_rl.rollout.character_tasks import ModChain

pathlib.Path("was_here").touch()

class Mine(ModChain):
    pass
"""


@pytest.mark.parametrize("part", ["base", "arm"])
def test_code_that_a_study_file_names_runs_only_if_it_is_trusted(study, capsys, part, forks):
    base, arm = MICRO["base"], {}
    if part == "base":
        base = {**base, "task": {**base["task"], "name": "mine.py:Mine"}}
    else:
        arm = {"task": {"name": "mine.py:Mine"}}
    (study / "mine.py").write_text(TASK)
    (study / "own.yaml").write_text(yaml.safe_dump({**MICRO, "base": base, "arms": {"grpo": arm}}))
    for verb in ("study", "run", "doctor"):
        said = refused(capsys, verb, "own.yaml")
        assert f"task.name: mine.py:Mine ({study / 'mine.py'})" in said and "--trust" in said
    assert not (study / "was_here").exists() and not (study / "runs").exists()
    main(["study", "own.yaml", "--trust", "--no-figures", "--optim.steps", "1"])
    assert (study / "was_here").exists() and (study / "runs" / "micro" / "grpo" / "seed0" / "DONE").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout": {"engine": {"kind": "my.engine:Remote"}}}, "rollout.engine.kind: my.engine:Remote"),
        ({"method": {"gate": "my.gates:steep"}}, "method.gate: my.gates:steep"),
        ({"rollout": {"engine": {"kind": "vllm", "python": "/my/python"}}}, "rollout.engine.python: /my/python"),
        ({"rollout": {"engine": {"kind": "vllm", "url": "http://evil:1"}}}, "engine.url: http://evil:1 (gets weights"),
        ({"model": {"path": "some/model", "trust_remote_code": True}}, "the Python files that come with some/model"),
    ],
)
def test_engines_and_code_of_models_are_foreign_too(study, capsys, changes, line):
    (study / "own.yaml").write_text(yaml.safe_dump({"name": "own", "arms": {"one": changes}}))
    assert line in refused(capsys, "run", "own.yaml", "--arm", "one")


def test_a_vllm_that_another_machine_lends_serves_one_run_at_a_time(study, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(5), raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plain = load_study(study / "micro.yaml")
    assert workers_of(plain, "processes", 1) == 5 and workers_of(plain, "slurm", 3) == 6
    url = {"rollout": {"engine": {"kind": "vllm", "url": "http://127.0.0.1:1"}}}
    (study / "url.yaml").write_text(yaml.safe_dump({**MICRO, "arms": {**MICRO["arms"], "far": url}}))
    lent = load_study(study / "url.yaml")
    assert workers_of(lent, "processes", 1) == workers_of(lent, "slurm", 3) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "none.yaml"], "no such study file"),
        (
            ["study", "zzz"],
            "zzz: no such study file, and no study of that name comes with moe_rl; `moe-rl study` lists",
        ),
        (["study", "micro.yaml", "--arms", "gsp"], "did you mean 'gspo'"),
        (
            ["study", "micro.yaml", "--arms", "grpo,gspo"],
            "unknown arm 'grpo,gspo' in micro.yaml; arms are separated by spaces",
        ),
        (["study", "micro.yaml", "--seeds"], "--seeds: at least one is needed"),
        (["study", "micro.yaml", "--arms"], "--arms: at least one is needed"),
        (["study", "micro.yaml", "--rounding"], "--rounding: at least one is needed"),
        (
            ["study", "micro.yaml", "--method.objective", "gspo"],
            "error: the study with the options of this command: arms.gspo: the same configuration as arm 'grpo'",
        ),
        (["study", "micro.yaml", "--seeds", "0,1"], "seeds are separated by spaces, e.g. --seeds 0 1"),
        (["study", "micro.yaml", "--seeds=0,1"], "seeds are separated by spaces, e.g. --seeds 0 1"),
        (["study", "micro.yaml", "--seeds", "0", "0"], "--seeds[1]: seed 0 is given twice"),
        (["study", "early_signals", "--arms", "int4_engine", "--seeds", "0"], "--seeds: this arm names its own seeds"),
        (["study", "micro.yaml", "--seeds", "-1"], "--seeds[0]: expected a whole number of at least 0"),
        (["study", "QUICK"], "no study of that name comes with moe_rl; did you mean 'quick'"),
        (["study", "micro.yaml", "--output", "micro.yaml"], "micro.yaml: a folder is needed there, and it is a file"),
        (["run", "micro.yaml", "--seed", "one"], "moe-rl run micro.yaml --help"),
        (["run", "micro.yaml", "--arm", "grpo", "--seed", "-1"], "error: seed: expected a whole number of at least 0"),
        (["run", "micro.yaml", "--arm", "gsop"], "unknown arm 'gsop' in study 'micro'; did you mean 'gspo'"),
        (["run", "micro.yaml", "--arm", "grpo", "--optim.num-minibatches", "3"], "must divide rollout.prompts"),
        (["run", "micro.yaml", "--arm", "grpo", "--task.name", "mod_chian"], "did you mean 'mod_chain'"),
        (["run", "micro.yaml", "--arm", "grpo", "--model.path", "no/such/folder"], "no/such/folder"),
        (["run", "micro.yaml", "--arm", "grpo", "--output", ""], "'' is none"),
        (["study", "micro.yaml", "--cold-starts="], "'' is none"),
        (["figures", "nowhere"], "nowhere"),
        (["figures", "nowhere", "rewrd"], "unknown figure 'rewrd'; did you mean 'reward'? (figures: final_reward, "),
        (["study", "micro.yaml", "--seed", "1"], "the seeds of a study are given by --seeds"),
        (["study", "micro.yaml", "--arms", "gspo", "--method.objective", "sapo"], "every arm sets it itself (gspo)"),
    ],
)
def test_bad_input_is_one_message(study, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert stop.value.code in (1, 2) and message in said.err + said.out
    assert "Traceback" not in said.err


def test_a_path_begins_at_home_where_the_shell_leaves_that_to_us(study, monkeypatch, capsys, forks):
    home = Path.cwd() / "home"
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    main(["study", "micro.yaml", "--output=~/runs", "--arms", "grpo", "--workers", "1", "--no-figures"])
    main(["figures", "~/runs", "reward"])
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", {"reward": FIGURES["reward"]})
    draw_study("~/runs")
    for written in ("grpo/seed0/DONE", "figures/reward.csv", "report.html"):
        assert (home / "runs" / written).is_file()
    assert not Path("~").exists()


def test_a_run_resumes_and_a_folder_of_another_configuration_is_refused(study, capsys):
    run = ["run", "micro.yaml", "--arm", "gspo", "--output", "out"]
    main(run)
    said = capsys.readouterr().out
    assert "cold start: step 3/3" in said and "step 2/2: reward" in said and "slots changed" in said
    folder = study / "out"
    assert (folder / "DONE").exists()
    environment = json.loads((folder / "env.json").read_text())
    assert environment["versions"]["torch"] and "run micro.yaml" in environment["command"]
    before = (folder / "metrics.jsonl").read_bytes()
    main(run)
    assert (folder / "metrics.jsonl").read_bytes() == before, "a finished run is left alone"
    assert capsys.readouterr().out == "already done: out\n"
    message = refused(capsys, *run, "--optim.steps", "5")
    assert "optim.steps: 2 there, 5 now" in message and "Nothing was overwritten" in message
    table = next((folder / "tokens").iterdir())
    table.rename(folder / "elsewhere")
    assert f"{Path('out/tokens') / table.name} is missing. Without it the run is not" in refused(capsys, *run)
    (folder / "elsewhere").rename(table)
    (folder / "DONE").unlink()
    (folder / "checkpoint" / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors is damaged" in refused(capsys, *run)
    shutil.rmtree(folder / "checkpoint")
    main(run)
    kept = [json.loads(line) for line in before.splitlines()]
    again = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r for r in again if r["kind"] != "step"] == [r for r in kept if r["kind"] != "step"]
    stray = study / "stray"
    stray.mkdir()
    (stray / "thesis.txt").write_text("mine")
    assert "holds no run" in refused(capsys, "run", "micro.yaml", "--arm", "grpo", "--output", stray)
    assert (stray / "thesis.txt").read_text() == "mine"


def test_a_study_runs_in_processes_draws_its_report_and_resumes(study, capsys):
    assert "--workers -1: expected how many runs at a time" in refused(
        capsys, "study", "micro.yaml", "--workers", "-1", status=2
    )
    main(["study", "micro.yaml", "--workers", "2"])
    said = capsys.readouterr().out
    folder = study / "runs" / "micro"
    assert "2 runs, 0 already done" in said and "2/2 done" in said
    assert load_study(folder / "study.yaml") == load_study(study / "micro.yaml")
    assert (folder / "report.html").stat().st_size > 10_000
    assert len(list((folder / "figures").glob("*.png"))) >= 5
    (folder / "gspo" / "seed0" / "DONE").unlink()
    broken = folder / "gspo" / "seed0" / "checkpoint" / "state.json"
    broken.write_text("{")
    message = refused(capsys, "study", "micro.yaml", "--no-figures")
    assert "1 of 2 runs did not finish" in message and "state.json" in message
    assert (folder / "grpo" / "seed0" / "DONE").exists()
