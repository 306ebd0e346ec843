"""Runs as jobs: what is asked of the cluster and watched, and that the run folders are those of local processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from moe_rl.cli import main
from moe_rl.study.config import ConfigError, parse_study
from moe_rl.study.grid import _runs, _schedule
from moe_rl.study.job import job_command, run_job
from moe_rl.study.jobs import Jobs, job_options
from moe_rl.study.launchers import NotTakenError
from moe_rl.study.runs import last_line

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
    check = partial(Jobs.check, SimpleNamespace(nodes=nodes))
    runs = _runs(parse_study({**STUDY, "arms": arms}), Path("runs/jobs"), "native", check)
    for run in runs:
        run.log.parent.mkdir(parents=True, exist_ok=True)
    return next(run for run in runs if run.arm == arm)


def test_options_are_those_of_submitit_and_sbatch():
    words = ["--gpus-per-node=8", "partition=gpu", "slurm_qos=1.10", "account=00123", "exclusive=true", "mem_gb=1.5"]
    assert job_options([*words, "signal_delay_s=30"]) == {
        "timeout_min": 720,
        "gpus_per_node": 8,
        "slurm_partition": "gpu",
        "slurm_qos": "1.10",
        "slurm_account": "00123",
        "slurm_exclusive": True,
        "mem_gb": 1.5,
        "slurm_signal_delay_s": 30,
    }
    wrong = {"gpu": "expected KEY=VALUE", "partition=": "expected KEY=VALUE", "tasks_per_node=8": "a job is one run"}
    wrong |= dict.fromkeys(("nodes=0", "nodes=1.5", "nodes=true"), "nodes=.*: expected a whole number of at least 1")
    for word, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            job_options([word])


def test_a_run_over_several_processes_is_started_by_torchrun_on_each_node():
    alone_here = SimpleNamespace(node=0, num_nodes=1, hostnames=["n"], job_id="1")
    alone = job_command(["run", "x"], None, alone_here)
    assert alone[:2] == [sys.executable, "-c"] and alone[-2:] == ["run", "x"]
    one = job_command(["run", "x"], 8, alone_here)
    assert one[1:] == ["-m", "torch.distributed.run", "--nproc_per_node=8", "--standalone", "-m", "moe_rl", "run", "x"]
    here = SimpleNamespace(node=1, num_nodes=2, hostnames=["node7", "node8"], job_id="41")
    second = job_command(["run", "x"], 16, here)
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


def test_a_job_of_which_sacct_says_nothing_is_not_submitted_a_second_time(slurm, folder):
    """Of this run alone: others go on. Its number and the file stay, for whoever asks squeue."""
    launcher().start(planned(), ["run", "study.yaml"])
    record = Path("runs/jobs/logs/one_seed0.job")
    run, again = planned(), launcher()
    assert list(_schedule([run], again, Path("cold"), 1)) == [None]
    assert run.state == "failed" and "left job 100 with this run" in run.problem and f"delete {record}" in run.problem
    assert json.loads(record.read_text())["job"] == "100" and len(list(folder.glob("*.sbatch"))) == 1
    result = Path("runs/jobs/logs/jobs/100_0_result.pkl")
    result.touch()  # where there is no accounting: it has ended
    again.start(run, ["run", "study.yaml"])
    assert run.note == "job 101 waits"


def test_a_job_that_slurm_holds_goes_on_and_is_asked_for_again(slurm, folder):
    """submitit asks no more of one that was suspended."""
    run, jobs = planned(), launcher()
    jobs.start(run, ["run", "study.yaml"])
    slurm("100|SUSPENDED|node1\n")
    assert jobs.ended(run) is None and run.note == "job 100 suspended"
    (folder / "states").write_text("100|RUNNING|node1\n")
    assert jobs.ended(run) is None and run.note == ""
    slurm("100|TIMEOUT|node1\n")
    assert jobs.ended(run) is False and "(TIMEOUT)" in run.problem


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_a_job_that_may_be_queued_again_is_waited_for_and_then_given_up(slurm, folder, monkeypatch, state):
    run, jobs, now = planned(), launcher(), [0.0]
    monkeypatch.setattr("moe_rl.study.jobs.time.monotonic", lambda: now[0])
    jobs.patience = 15.0
    jobs.start(run, ["run", "study.yaml"])

    def seen(after, says):
        now[0] += after
        slurm(f"100|{says}|node1\n")
        return jobs.ended(run)

    assert [seen(0, state), seen(100, state), seen(0, "PENDING")] == [None] * 3 and run.note == "job 100 pending"
    assert [seen(100, state), seen(100, state)] == [None, None], "counted anew"
    assert seen(21, state) is False and f"({state})" in run.problem


def test_the_state_that_is_told_is_not_an_old_one(slurm, folder):
    run, jobs = planned(), launcher()
    jobs.start(run, ["run", "study.yaml"])
    slurm("100|RUNNING|node1\n")
    assert jobs.ended(run) is None
    Path("runs/jobs/logs/jobs/100_0_result.pkl").touch()
    (folder / "states").write_text("100|OUT_OF_MEMORY|node1\n")
    assert jobs.ended(run) is False and "job 100 ended (OUT_OF_MEMORY) before" in run.problem


def test_a_job_that_is_not_taken_is_offered_again_while_others_go_on(slurm, folder, monkeypatch):
    """Only where none goes on the study ends."""
    sbatch = folder / "bin" / "sbatch"
    taken, full = sbatch.read_text(), "#!/bin/sh\necho 'QOSMaxSubmitJobPerUserLimit' >&2\nexit 1\n"
    monkeypatch.setattr("moe_rl.study.grid.POLL_SECONDS", 0.0)
    first, second = planned(), planned("two")
    polls = _schedule([first, second], launcher(), Path("cold"), 2)
    sbatch.write_text(full)
    with pytest.raises(NotTakenError, match=r"one seed 0: the job was not taken: .*QOSMaxSubmitJobPerUserLimit"):
        next(polls)
    jobs = launcher()
    polls = _schedule([first, second], jobs, Path("cold"), 2)
    submit = jobs.start
    monkeypatch.setattr(jobs, "start", lambda *given: (submit(*given), sbatch.write_text(full)))
    sbatch.write_text(taken)
    next(polls)
    assert (first.state, second.state) == ("running", "waiting") and "QOSMaxSubmit" in second.beginning()
    sbatch.write_text(taken)
    next(polls)
    assert second.state == "waiting", "not every second"
    first.folder.mkdir(parents=True)
    (first.folder / "DONE").write_text("{}")
    next(polls), next(polls)
    assert (first.state, second.state) == ("done", "running") and len(list(folder.glob("*.sbatch"))) == 2
    polls.close()


def test_a_job_whose_number_cannot_be_kept_is_cancelled_and_offered_again(slurm, folder, monkeypatch):
    """It would be submitted a second time by a study that is started again; those that go on are watched on."""
    (folder / "bin" / "scancel").write_text(f'#!/bin/sh\necho "$1" >>{folder}/cancelled\n')
    (folder / "bin" / "scancel").chmod(0o755)
    monkeypatch.setattr("moe_rl.study.grid.POLL_SECONDS", 0.0)
    first, second = planned(), planned("two")
    second.log.with_suffix(".job").mkdir()  # as a full disk would: what is written there fails
    polls = _schedule([first, second], launcher(), Path("cold"), 2)
    next(polls)
    assert (first.state, second.state) == ("running", "waiting") and (folder / "cancelled").read_text() == "101\n"
    assert (
        second.note == f"two seed 0: job 101 was cancelled, as {second.log.with_suffix('.job')} cannot be written "
        "(Is a directory)"
    )
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: os.mkdir("/"))  # nor removed
    first.folder.mkdir(parents=True)
    (first.folder / "DONE").write_text("{}")
    second.log.with_suffix(".job").rmdir()
    next(polls), next(polls)
    assert (first.state, second.state) == ("done", "running")
    polls.close()


@pytest.fixture
def node(folder, monkeypatch):
    """In a job, as submitit starts it."""
    monkeypatch.setattr(
        "submitit.JobEnvironment", lambda: SimpleNamespace(node=0, num_nodes=1, hostnames="n", job_id="1")
    )
    return folder / "log"


def test_a_job_that_waits_for_its_run_holds_no_torch(folder):
    """On every node it would take ten CPU seconds and 400 MB beside the run."""
    code = (
        "import subprocess, sys, types, submitit\n"
        "submitit.JobEnvironment = lambda: types.SimpleNamespace(node=0, num_nodes=1, hostnames=['n'], job_id='1')\n"
        "subprocess.run = lambda *_, **__: print('run')\n"
        "from moe_rl.study.job import run_job\n"
        "run_job(['run'], 'log', None, {})\n"
        "print({'torch', 'transformers', 'pandas'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == ["run", "set()"]


@pytest.mark.skipif(sys.platform != "linux", reason="has no real-time signals")
@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_a_run_that_was_killed_leaves_the_signal_in_its_log(node, monkeypatch, number, name):
    """For most real-time signals Python has no name."""
    killed = [sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {number})"]
    monkeypatch.setattr("moe_rl.study.job.job_command", lambda *_: killed)
    with pytest.raises(subprocess.CalledProcessError):
        run_job(["run"], str(node), None, {})
    assert last_line(node) == f"ended by {name}"


def test_a_node_whose_kernels_are_those_that_are_asked_for_is_no_other_rounding(node, monkeypatch):
    """Of a cluster's nodes the machine where the study is started knows nothing."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("moe_rl.study.job.job_command", lambda *_: [sys.executable, "-c", ""])
    with pytest.raises(ConfigError):
        run_job(["run"], str(node), None, {"ATEN_CPU_CAPABILITY": "avx2"})
    assert last_line(node).startswith("rounding 'avx2': torch uses AVX2 kernels here")
    run_job(["run"], str(node), None, {"ATEN_CPU_CAPABILITY": "default"})


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
