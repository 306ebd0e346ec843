"""The command line as a newcomer drives it: mistakes are one message, and a study resumes."""

import json
import shutil

import pytest
import yaml

from moe_rl.cli import main
from moe_rl.study.config import load_study

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
    assert "needs FILE" in refused(capsys, "study", status=2)


def test_every_configuration_field_is_an_option_and_unknown_ones_name_the_nearest(study, capsys):
    assert "--optim.learning-rate" in refused(capsys, "run", "micro.yaml", "--help", status=0)
    assert "--optim.learning-rate" in refused(capsys, "run", "micro.yaml", "--optim.learning-rat", "1", status=2)
    assert not (study / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "none.yaml"], "no such study file"),
        (["study", "micro.yaml", "--arms", "gsp"], "did you mean 'gspo'"),
        (["study", "micro.yaml", "--seeds"], "seeds"),
        (["study", "micro.yaml", "--output", "micro.yaml"], "micro.yaml: a folder is needed there, and it is a file"),
        (["run", "micro.yaml", "--seed", "one"], "moe-rl run micro.yaml --help"),
        (["run", "micro.yaml", "--arm", "gsop"], "unknown arm 'gsop' in study 'micro'; did you mean 'gspo'"),
        (["run", "micro.yaml", "--optim.num-minibatches", "3"], "must divide rollout.prompts"),
        (["run", "micro.yaml", "--task.name", "mod_chian"], "did you mean 'mod_chain'"),
        (["run", "micro.yaml", "--model.path", "no/such/folder"], "no/such/folder"),
        (["figures", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_message(study, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert stop.value.code in (1, 2) and message in said.err + said.out
    assert "Traceback" not in said.err


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
    assert "holds no run" in refused(capsys, "run", "micro.yaml", "--output", stray)
    assert (stray / "thesis.txt").read_text() == "mine"


def test_a_study_runs_in_processes_draws_its_report_and_resumes(study, capsys):
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
