"""Runs whose device is said to be cuda:0: no operation has tensors of two devices, and a resumed run has its own where
an uninterrupted one has them. What the device computes is not shown (`pretended_cuda`)."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from micro import MICRO, rows
from pretended_cuda import CPU, CUDA, pretended_cuda
from sweeps import mostly_swept

from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.training import loop, run, setup
from moe_rl.training.checkpoint import save_checkpoint
from moe_rl.training.config import DistributedConfig
from moe_rl.training.distributed import Group
from moe_rl.training.loop import collect_batch, start_probe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def micro(**sections):
    """MICRO with these fields of its sections; the noise floor is measured where it is asked for only."""
    sections["probe"] = {"floor": False, **sections.get("probe", {})}
    return replace(MICRO, **{name: replace(getattr(MICRO, name), **fields) for name, fields in sections.items()})


INT4 = EngineConfig(kind="hf", dtype="float32", weight_format="int4")
CASES = {
    "grpo, R2, all probes": micro(
        method={"replay": "R2"},
        optim={"micro_batch": 3},
        probe={"decompose_every": 1, "gradients": True, "floor": True},
    ),
    "gspo, noise, lag": micro(method={"objective": "gspo", "noise": 0.1}, rollout={"lag": 1}),
    "ppo, learned reward": micro(
        method={"objective": "ppo", "kl_coef": 0.1},
        reward={"model": "learned", "initial_batches": 1, "epochs": 1, "retrain_every": 1},
    ),
    "PR2": micro(method={"replay": "PR2"}),
    "R3, int4 engine": micro(method={"replay": "R3"}, rollout={"engine": INT4}),
    "bf16, R2, part of it, bias": micro(
        model={"dtype": "bfloat16"}, method={"replay": "R2", "keep": 0.5}, optim={"expert_bias_rate": 0.01}
    ),
}


def devices(state):
    """Where each model's optimizer keeps what: by its parameters, in order."""
    return {
        name: [{key: value.device for key, value in kept.items()} for kept in optimizer.state.values()]
        for name, (_, optimizer) in state.trained.items()
    }


def test_what_routers_say_is_kept_on_the_host(tmp_path, state_of):
    with pretended_cuda():
        state = state_of(micro(), tmp_path)
        probe = start_probe(state, collect_batch(state))
        list(probe.rows(1))
        kept = [*probe.old_logits, *probe.observations[0].routers.values()]
        assert {x.device for x in kept} == {CPU} and probe.observations[0].natural.device == CUDA


FEW = "grpo, R2, all probes", "ppo, learned reward"


@pytest.mark.parametrize("name", mostly_swept(CASES, FEW))
def test_no_step_mixes_devices(name, tmp_path, state_of, monkeypatch):
    """An uninterrupted run, and one that a new process goes on with after its first step."""

    def save(state):
        save_checkpoint(state)
        if state.step == 1:
            shutil.copytree(tmp_path / "whole", tmp_path / "resumed")

    config = CASES[name]
    with pretended_cuda():
        whole = state_of(config, tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(loop, "save_checkpoint", save)
            run(whole)
        resumed = state_of(config, tmp_path / "resumed")
        assert resumed.step == 1 and devices(resumed) == devices(whole)
        run(resumed)
    assert {p.device for module, _ in whole.trained.values() for p in module.parameters()} == {CUDA}
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert (tmp_path / "resumed" / "tokens" / "step_000000.parquet").exists()


def test_what_ranks_gather_is_on_their_device(tmp_path, state_of, monkeypatch):
    """NCCL takes nothing else; demonstrations, and so the rewards of them, are on the CPU."""
    gathered = []

    def all_gather(parts, own):
        gathered.append({tensor.device for tensor in (*parts, own)})
        parts[0].copy_(own)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(setup, "ranks_of", lambda *_: Group(DistributedConfig("ddp"), "auto", None, tmp_path, False))
    with pretended_cuda():
        run(state_of(micro(method={"objective": "sft", "source": "demonstrations"}), tmp_path))
        own = torch.tensor([1.5, 2.5]).bfloat16()
        assert torch.equal(setup.ranks_of().gather(own, 2), own), "and back where it was"
    assert len(gathered) > 10 and all(devices == {CUDA} for devices in gathered)
