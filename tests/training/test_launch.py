"""accelerate's launcher: what it starts gives the numbers of one process, and what it degrades is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from micro import rows
from sweeps import mostly_swept, sweep

from moe_rl.cli import main
from moe_rl.training.config import DistributedConfig, RunConfig
from moe_rl.training.launch import DistributedError, check_launch
from moe_rl.training.validation import validate

STUDY = {
    "name": "launched",
    "question": "Is it the same?",
    "seeds": [0],
    "base": {
        "model": {
            "device": "cpu",
            "tiny": {
                "hidden_size": 16,
                "num_layers": 2,
                "num_heads": 2,
                "num_experts": 6,
                "moe_intermediate_size": 8,
            },
            "cold_start": None,
        },
        "task": {"name": "mod_chain", "options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 1, "num_minibatches": 2, "learning_rate": 0.01, "warmup_updates": 2},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 0, "floor": False},
    },
    "arms": {"sft": {"method": {"objective": "sft", "replay": "R2"}}},
}
ACCELERATE = ("-m", "accelerate.commands.launch")
TWO_GPUS = {  # what `accelerate config` writes; on a machine without GPUs it starts two processes all the same
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": False,
}


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))

    def run(name, *options, launcher=(), status=0):
        command = [sys.executable, *launcher, "-m", "moe_rl", "run", "study.yaml", "--output", name, *options]
        environ = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK")}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, env=environ)
        assert done.returncode == status, done.stderr
        return done.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        sweep("ddp", ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")),
        ("fsdp2", ("--config_file", "two.yaml")),
    ],
)
def test_accelerate_launch_gives_the_losses_of_one_process(launch, tmp_path, monkeypatch, strategy, words):
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(TWO_GPUS))
    monkeypatch.chdir(tmp_path)
    main(["run", "study.yaml", "--output", "alone"])
    options = "--distributed.strategy", strategy, "--distributed.processes", "2"
    launch("launched", *options, launcher=(*ACCELERATE, *words))
    found, wanted = rows(tmp_path / "launched"), rows(tmp_path / "alone")
    assert all(r["replayed_rows"] > 0 for r in wanted if r["kind"] == "update")
    assert json.loads((tmp_path / "launched" / "env.json").read_text())["processes"] == 2
    assert [r["kind"] for r in found] == [r["kind"] for r in wanted]
    for mine, alone in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm", "var_token_natural", "var_token_replayed", "reward", "response_length"):
            if key in alone:
                assert mine[key] == pytest.approx(alone[key], rel=2e-4, abs=2e-6), (alone["kind"], key)
        for key in ("slots_changed", "slots", "replayed_rows"):
            assert mine.get(key) == alone.get(key), (alone["kind"], key)


def test_a_study_of_runs_over_several_processes_says_how_each_is_started(launch, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["study", "study.yaml", "--distributed.strategy", "fsdp2", "--distributed.processes", "2"])
    run = "-m moe_rl run FILE --arm sft --seed 0 --distributed.strategy fsdp2 --output runs/launched/sft/seed0"
    assert f"torchrun --nproc_per_node 2 {run}" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "launched" / "sft").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", mostly_swept(["none", "ddp", "fsdp2"], ["fsdp2"]))
def test_a_launched_process_does_not_wait_for_the_end_of_the_interpreter(strategy, launch, tmp_path):
    """A single one neither: its group, freed there, has been seen to abort a run that was written ("terminate called
    without an active exception")."""
    (tmp_path / "main.py").write_text(
        "import atexit, sys\nfrom moe_rl.cli import main\n"
        "atexit.register(print, 'the interpreter ended', file=sys.stderr)\nmain(sys.argv[3:])\n"
    )
    one = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "main.py")
    said = launch(strategy, f"--distributed.strategy={strategy}", "--distributed.processes=1", launcher=one)
    assert (tmp_path / strategy / "DONE").exists() and "the interpreter ended" not in said


@pytest.mark.slow
def test_accelerate_launch_on_a_cpu_starts_one_process_and_is_refused(launch, tmp_path):
    """It would train in one process without a word, whatever the study says."""
    said = launch("none", launcher=(*ACCELERATE, "--cpu", "--num_processes", "2"), status=1)
    assert "accelerate launch was asked for several processes and started one" in said
    assert not (tmp_path / "none").exists()


BY_ACCELERATE = {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}


@pytest.mark.parametrize(
    "config, processes, environ, message",
    [
        (("none",), 2, {}, "2 processes were started, and distributed.strategy is none"),
        (("ddp",), 1, {}, "there is one process"),
        (("ddp", 2), 1, {}, "distributed.processes: 2, and 1 was started"),
        (("none", 2), 1, {}, "distributed.processes: 2, and 1 was started"),
        (("fsdp2", 1), 1, {}, "needs a launcher"),
        (("none",), 1, BY_ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, "asked for several processes and started one"),
        (("fsdp2",), 2, {"LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}, "asks for FSDP"),
        (("ddp",), 2, {"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP"),
        (("ddp",), 2, {"ACCELERATE_USE_DEEPSPEED": "true"}, "asks for DEEPSPEED"),
        (("none",), 1, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed precision bf16"),
        (("none",), 1, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "micro_batch"),
        (("none",), 1, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "asks for torch.compile"),
    ],
)
def test_what_was_not_asked_for_is_refused(config, processes, environ, message):
    with pytest.raises(DistributedError, match=message):
        check_launch(DistributedConfig(*config), processes, environ)


def test_a_cpu_where_the_study_says_cuda_is_refused():
    with pytest.raises(DistributedError, match=r"asks for the CPU, and model\.device is cuda"):
        check_launch(DistributedConfig(), 1, {"ACCELERATE_USE_CPU": "true"}, "cuda")
    for device in ("auto", "cpu"):
        check_launch(DistributedConfig(), 1, {"ACCELERATE_USE_CPU": "true"}, device)


def test_what_was_asked_for_passes():
    check_launch(DistributedConfig(), 1, BY_ACCELERATE)
    check_launch(DistributedConfig("ddp", processes=1), 1, BY_ACCELERATE | {"MASTER_ADDR": "127.0.0.1"})
    check_launch(DistributedConfig("fsdp2", processes=2), 2, {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"})


def test_a_dtype_of_computing_without_shards_is_refused_before_any_run():
    with pytest.raises(ValueError, match=r"distributed\.compute_dtype: only fsdp2"):
        validate(RunConfig(distributed=DistributedConfig("ddp", compute_dtype="bfloat16")))
