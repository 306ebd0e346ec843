"""FSDP2 in one process: which modules are gathered together, and in which dtype they compute."""

import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from micro import MICRO, rows

from moe_rl.policy.lora import LoraConfig
from moe_rl.routing import find_sites
from moe_rl.training import EvalConfig, MethodConfig, ProbeConfig, run
from moe_rl.training.config import DistributedConfig, RewardConfig, ValueConfig
from moe_rl.training.distributed import _leave
from moe_rl.training.loop import collect_batch
from moe_rl.training.ranks import TIMEOUT

BASE = replace(
    MICRO,
    model=replace(MICRO.model, device="cpu"),
    rollout=replace(MICRO.rollout, prompts=2, max_new_tokens=4),
    optim=replace(MICRO.optim, steps=1),
    eval=EvalConfig(prompts=1),
    probe=ProbeConfig(every=0),
)
BF16 = DistributedConfig("fsdp2", processes=1, compute_dtype="bfloat16")
PPO = MethodConfig(objective="ppo")


@pytest.fixture
def launched(monkeypatch):
    """As torchrun starts one process."""
    _leave()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    yield
    _leave()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": PPO},
        {"method": PPO, "value": ValueConfig(model="head")},
        {"reward": RewardConfig(model="learned", initial_batches=1, epochs=1)},
    ],
    ids=["value model", "value head", "learned reward"],
)
def test_values_and_learned_rewards_are_in_fp32_whatever_the_layers_compute_in(launched, state_of, tmp_path, settings):
    state = state_of(replace(BASE, distributed=BF16, **settings), tmp_path)
    own, said, hidden = state.critic or state.reward_model, {}, []
    say = own.say
    own.say = lambda *of: said.update(say(*of)) or said
    head = getattr(own.model, "head", own.model)
    head.register_forward_pre_hook(lambda module, args: hidden.append(module.weight.dtype))
    trunk = own.model.trunk if hasattr(own.model, "trunk") else state.policy.model
    trunk.layers[0].register_forward_hook(lambda module, args, out: hidden.append(out.dtype))
    collect_batch(state)
    assert set(hidden) == {torch.bfloat16, torch.float32} and hidden[-1] == torch.float32
    assert {name: value.dtype for name, value in said.items()} == dict.fromkeys(said, torch.float32) != {}
    run(state)


def test_routers_that_peft_keeps_beside_their_copies_are_in_fp32_too(launched, state_of, tmp_path):
    """The reference is the policy with its adapters off, which routes by the originals."""
    lora = LoraConfig(2, target_modules=("q_proj",), train_router=True)
    settings = {"method": MethodConfig(kl_coef=0.1), "model": replace(BASE.model, lora=lora)}
    state = state_of(replace(BASE, distributed=replace(BF16, router_fp32=True), **settings), tmp_path)
    seen = {module: set() for site in find_sites(state.policy) for module in site.modules}
    for module in seen:
        module.register_forward_hook(lambda module, _, out: seen[module].update((module.weight.dtype, out[0].dtype)))
    run(state)
    assert len(seen) == 4 and set(map(frozenset, seen.values())) == {frozenset({torch.float32})}


@pytest.mark.parametrize(("weight", "fp32"), [("mlp.experts.down_proj", False), ("mlp.gate.weight", True)])
def test_adapters_of_experts_beside_16_bit_weights(launched, state_of, tmp_path, weight, fp32):
    """In fp32, and read without a call of their modules; shards of one process give its numbers."""
    lora = LoraConfig(2, target_modules=("q_proj",), target_parameters=(weight,))
    settings = {"method": MethodConfig(kl_coef=0.1), "model": replace(BASE.model, dtype="bfloat16", lora=lora)}
    sharded = DistributedConfig("fsdp2", processes=1, router_fp32=fp32)
    for distributed in (sharded, replace(sharded, strategy="none")):
        run(state_of(replace(BASE, distributed=distributed, **settings), tmp_path / distributed.strategy))
    assert rows(tmp_path / "fsdp2") == rows(tmp_path / "none")
    assert max(row["grad_norm"] for row in rows(tmp_path / "none", "update")) > 1e-3


def test_ranks_wait_for_a_checkpoint_of_hours(launched, state_of, tmp_path):
    state_of(replace(BASE, distributed=BF16), tmp_path)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
