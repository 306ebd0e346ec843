"""Updates too small for bf16 add up in fp32 master weights, and in fp32 nothing differs from torch's AdamW."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.policy.lora import LoraConfig
from moe_rl.training import MethodConfig, OptimConfig, ProbeConfig, run, validate
from moe_rl.training.optimizer import MasterAdamW, make_optimizer


def steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_master_weights_follow_torchs_adamw_in_fp32(weight_decay):
    torch.manual_seed(0)
    start = torch.randn(5, 3).bfloat16()
    gradients = [torch.randn(5, 3).bfloat16().float() for _ in range(6)]
    low, high = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    ours = MasterAdamW([low], lr=1e-3, weight_decay=weight_decay)
    theirs = torch.optim.AdamW([high], lr=1e-3, weight_decay=weight_decay)
    steps(ours, low, gradients)
    steps(theirs, high, gradients)
    assert torch.allclose(ours.state[low]["master"], high, rtol=0, atol=1e-7)
    assert torch.equal(low, ours.state[low]["master"].bfloat16())


def test_bf16_alone_learns_nothing_at_a_small_learning_rate():
    # AdamW's first steps under a constant gradient move a weight by lr each. Around 0.02 neighbours in bf16 are
    # 2^-13 = 1.2e-4 apart, so a move of 1e-6 is rounded away; 200 of them make 2e-4, more than one neighbour.
    start = torch.full((4,), 0.02).bfloat16()
    moved = {}
    for wanted in (True, False):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer([{"params": [parameter], "lr": 1e-6}], (0.9, 0.999), 0.0, wanted)
        steps(optimizer, parameter, [torch.ones(4)] * 200)
        moved[wanted] = float((parameter.detach() - start).abs().max())
    assert moved[False] == 0 and moved[True] >= 2**-13


def test_fp32_takes_torchs_own_optimizer_and_a_frozen_weight_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(make_optimizer([{"params": [parameter], "lr": 1.0}], (0.9, 0.999), 0.0)) is torch.optim.AdamW
    low = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = make_optimizer([{"params": [parameter, low], "lr": 1.0}], (0.9, 0.999), 0.0)
    assert isinstance(optimizer, MasterAdamW)
    steps(optimizer, parameter, [torch.ones(2)])
    assert low not in optimizer.state and torch.equal(low, torch.ones(2).bfloat16())  # no gradient, no update
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)


def test_float16_without_master_weights_is_refused():
    model, optim = replace(MICRO.model, dtype="float16"), replace(MICRO.optim, master_weights=False)
    with pytest.raises(ValueError, match="false does not go with model"):
        validate(replace(MICRO, model=model, optim=optim))
    validate(replace(MICRO, model=model))
    validate(replace(MICRO, model=replace(MICRO.model, dtype="bfloat16"), optim=optim))


ON_ROUTERS = [
    LoraConfig(rank=2, train_router=True),
    LoraConfig(rank=2, target_parameters=("mlp.gate.weight",)),
]


def of_lora(lora, **optim):
    return replace(
        MICRO,
        model=replace(MICRO.model, lora=lora),
        method=MethodConfig(kl_coef=0.1),
        optim=OptimConfig(steps=1, num_minibatches=2, **optim),
        probe=ProbeConfig(every=1, sequences=4, floor=False, gradients=True),
    )


def routers_of(state):
    found = {name: p for name, p in state.policy.named_parameters() if ".gate." in name}
    assert found
    return found


@pytest.mark.parametrize("lora", ON_ROUTERS)
def test_a_frozen_router_has_no_adapter_that_is_trained(lora, state_of, tmp_path):
    state = state_of(of_lora(lora, freeze_router=True), tmp_path)
    assert not any(p.requires_grad for p in routers_of(state).values())


@pytest.mark.parametrize("lora", ON_ROUTERS)
def test_adapters_on_routers_have_the_routers_learning_rate_and_gradient(lora, state_of, tmp_path):
    state = state_of(of_lora(lora, router_lr_multiplier=0.1), tmp_path)
    trained = {id(p) for p in routers_of(state).values() if p.requires_grad}
    slow = {id(p) for group in state.optimizer.param_groups if group["multiplier"] == 0.1 for p in group["params"]}
    assert slow == trained and trained
    run(state)
    assert rows(tmp_path, "probe")[-1]["router_gradient_cosine"] is not None


def test_a_rate_of_routers_that_are_not_trained_is_refused(state_of, tmp_path):
    with pytest.raises(ValueError, match=r"optim.router_lr_multiplier: 0.1 .* model.lora adapts none"):
        state_of(of_lora(LoraConfig(rank=2), router_lr_multiplier=0.1), tmp_path)


def test_a_reference_that_shares_the_policys_weights_weighs_nothing(state_of, tmp_path):
    run(state_of(of_lora(LoraConfig(rank=2)), tmp_path))
    (step,) = rows(tmp_path, "step", timed=True)
    assert step["model_bytes"] > 0 and step["reference_bytes"] == step["reference_parameters"] == 0
