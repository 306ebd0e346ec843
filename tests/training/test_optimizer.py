"""Updates too small for bf16 add up in fp32 master weights, and in fp32 nothing differs from torch's AdamW."""

import pytest
import torch

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
