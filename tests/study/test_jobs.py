"""Runs as jobs: what is asked of the cluster and watched, and that the run folders are those of local processes."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from moe_rl.cli import main
from moe_rl.study.config import ConfigError, parse_study
from moe_rl.study.grid import _runs
from moe_rl.study.job import Node, job_command
from moe_rl.study.jobs import Jobs, job_options

pytest.importorskip("submitit")

STUDY = {
    "name": "jobs",
    "question": "Is it the same on a cluster?",
    "seeds": [0],
    "base": {
        "model": {
            "device": "cpu",
            "tiny": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_experts": 6, "moe_intermediate_size": 8},
            "cold_start": None,
        },
        "task": {"options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 12, "num_minibatches": 2, "warmup_updates": 1},
        "checkpoint_every": 2,
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 0, "floor": False},
    },
    "arms": {"one": {}, "two": {"optim": {"steps": 1}, "distributed": {"strategy": "ddp", "processes": 2}}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    Path("jobs.yaml").write_text(yaml.safe_dump(STUDY))
    return tmp_path


@pytest.fixture
def slurm(folder, monkeypatch):
    """Commands that answer as Slurm's do: sbatch keeps its script, and the file `states` is what sacct says."""
    import submitit

    (folder / "bin").mkdir()
    for name, script in {
        "sbatch": f'n=$(ls {folder}/*.sbatch 2>/dev/null | wc -l); cp "$1" {folder}/$((100 + n)).sbatch; '
        'echo "Submitted batch job $((100 + n))"',
        "sacct": f'echo "JobID|State|NodeList"; cat {folder}/states',
        "srun": "exit 1",
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def say(states):
        (folder / "states").write_text(states)
        submitit.SlurmJob.watcher.clear()  # it would ask at most every other second

    say("")
    return say


def launcher(*options):
    made = Jobs("slurm", "jobs", Path("runs/jobs"), job_options(options))
    made.patience = 0.0
    return made


def planned(arm="one", nodes=1):
    arms = {"two": STUDY["arms"]["two"]} if nodes > 1 else STUDY["arms"]
    runs = _runs(parse_study({**STUDY, "arms": arms}), Path("runs/jobs"), "native", nodes)
    for run in runs:
        run.log.parent.mkdir(parents=True, exist_ok=True)
    return next(run for run in runs if run.arm == arm)


def test_options_are_those_of_submitit_and_sbatch():
    assert job_options(["--gpus-per-node=8", "partition=gpu", "slurm_qos=high", "exclusive=true", "mem_gb=1.5"]) == {
        "timeout_min": 720,
        "gpus_per_node": 8,
        "slurm_partition": "gpu",
        "slurm_qos": "high",
        "slurm_exclusive": True,
        "mem_gb": 1.5,
    }
    wrong = {"gpu": "expected KEY=VALUE", "partition=": "expected KEY=VALUE", "tasks_per_node=8": "a job is one run"}
    for word, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            job_options([word])


def test_a_run_over_several_processes_is_started_by_torchrun_on_each_node():
    alone = job_command(["run", "x"], None, Node())
    assert alone[:2] == [sys.executable, "-c"] and alone[-2:] == ["run", "x"]
    one = job_command(["run", "x"], 8, Node())
    assert one[1:] == ["-m", "torch.distributed.run", "--nproc_per_node=8", "--standalone", "-m", "moe_rl", "run", "x"]
    second = job_command(["run", "x"], 16, Node(1, 2, "node7", "41"))
    assert second[3:8] == [
        "--nproc_per_node=8",
        "--nnodes=2",
        "--node_rank=1",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=node7:20041",
    ]


def test_what_is_missing_or_cannot_be_is_said_before_anything_is_written(folder, monkeypatch, capsys):
    def refused(*options):
        with pytest.raises(SystemExit):
            main(["study", "jobs.yaml", *options])
        return capsys.readouterr().err

    assert "no sbatch, srun, sacct on this machine" in refused("--launcher", "slurm")
    assert "say --launcher slurm too" in refused("--launcher-options", "partition=gpu")
    assert "--launcher slurm" in refused("--arms", "two"), "what a study over several processes needs"
    local = "--launcher", "submitit-local"
    assert "Unknown argument 'partitoin'" in refused(*local, "--launcher-options", "partitoin=gpu")
    with pytest.raises(ConfigError, match="2 cannot be shared by nodes=3"):
        planned(nodes=3)
    unknown = json.loads(json.dumps(STUDY))
    unknown["arms"]["two"]["distributed"].pop("processes")
    Path("jobs.yaml").write_text(yaml.safe_dump(unknown))
    assert "--distributed.processes N" in refused(*local)
    monkeypatch.setattr("moe_rl.study.jobs.find_spec", lambda name: None)
    assert "pip install '.[slurm]'" in refused(*local)
    assert not list(Path("runs").rglob("seed*")) if Path("runs").exists() else True


def test_a_job_that_ends_before_its_run_is_named_with_its_state_and_log(slurm, folder):
    run, jobs = planned(), launcher("partition=gpu", "timeout_min=90", "mem_gb=64")
    jobs.start(run, ["run", "study.yaml"])
    script = (folder / "100.sbatch").read_text()
    for line in ("partition=gpu", "time=90", "mem=64GB", "job-name=jobs_one_seed0", "nodes=1"):
        assert f"#SBATCH --{line}\n" in script
    assert run.note == "job 100 waits" and jobs.ended(run) is None
    slurm("100|PENDING|\n")
    assert jobs.ended(run) is None and run.note == "job 100 pending"
    slurm("100|RUNNING|node1\n")
    run.log.write_text("step 3/12: reward 0.5\n")
    assert jobs.ended(run) is None and run.note == ""
    slurm("100|NODE_FAIL|node1\n")
    assert jobs.ended(run) is False
    assert run.reason() == (
        "job 100 ended (NODE_FAIL) before the run was done: step 3/12: reward 0.5 (log: runs/jobs/logs/one_seed0.log)"
    )
    jobs.start(run, ["run", "study.yaml"])
    assert run.note == "job 101 waits", "the next start submits it again"
    slurm("101|CANCELLED by 7|\n")
    run.log.unlink()
    assert jobs.ended(run) is False and "(CANCELLED)" in run.problem
    assert "logs/jobs/101_0_log.err" in run.problem, "where the cluster's own words are, if the run printed none"


def test_a_study_that_is_started_again_finds_its_jobs(slurm, folder, capsys):
    run, jobs = planned(), launcher()
    jobs.start(run, ["run", "study.yaml"])
    slurm("100|RUNNING|node1\n")
    jobs.leave()
    assert "1 jobs go on" in capsys.readouterr().err
    again, run = launcher(), planned()
    again.start(run, ["run", "study.yaml"])
    assert len(list(folder.glob("*.sbatch"))) == 1 and again.ended(run) is None
    run.folder.mkdir(parents=True)
    (run.folder / "DONE").write_text("{}")
    assert again.ended(run) is True, "whatever the cluster says of the job yet"
    (run.folder / "DONE").unlink()
    last = launcher()
    last.start(run, ["run", "study.yaml"])
    assert len(list(folder.glob("*.sbatch"))) == 2, "its end was seen: another job"


def test_a_job_that_has_ended_meanwhile_is_submitted_again(slurm, folder):
    launcher().start(planned(), ["run", "study.yaml"])
    slurm("100|TIMEOUT|node1\n")
    launcher().start(planned(), ["run", "study.yaml"])
    assert len(list(folder.glob("*.sbatch"))) == 2


@pytest.mark.slow
def test_jobs_that_are_killed_and_resumed_make_the_rows_of_a_run_here(folder, capsys):
    """submitit's local executor; one arm over two processes, which only jobs can be."""
    local = ["study", "jobs.yaml", "--no-figures", "--launcher", "submitit-local", "--workers", "1"]

    def kill():
        """The run itself, once it has a checkpoint to go on from."""
        place = Path("runs/jobs/one/seed0")
        while not (place / "checkpoint").exists():
            time.sleep(0.02)
        os.kill(int(re.match(r"process (\d+) on", (place / ".lock").read_text())[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(SystemExit):
        main(local)
    said = capsys.readouterr().err
    assert re.search(r"1 of 2 runs did not finish:\n  one seed 0: job \d+ ended \(\w+\) before the run was done", said)
    assert "(log: runs/jobs/logs/one_seed0.log)" in said and not killer.is_alive()
    assert json.loads(Path("runs/jobs/two/seed0/env.json").read_text())["processes"] == 2
    assert Path("runs/jobs/two/seed0/DONE").exists() and not Path("runs/jobs/one/seed0/DONE").exists()
    main(local)
    assert "2 runs, 1 already done" in capsys.readouterr().out
    main(["run", "jobs.yaml", "--arm", "one", "--output", "runs/here"])

    def rows(place):
        lines = map(json.loads, (Path(place) / "metrics.jsonl").read_text().splitlines())
        return [row for row in lines if row["kind"] != "step"]  # which holds times

    assert rows("runs/jobs/one/seed0") == rows("runs/here") and len(rows("runs/here")) > 36
    assert not list(Path("runs/jobs/logs").glob("*.job"))
