"""Settings of the optimizer, and what a resumed run knows of its waiting batches and its reference."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO

from moe_rl.policy.tiny import build_tiny, char_tokenizer
from moe_rl.training import MethodConfig, OptimConfig, ProbeConfig, run
from moe_rl.training.checkpoint import _optimizer_tensors, _restore_optimizer
from moe_rl.training.optimizer import make_optimizer, policy_optimizer
from moe_rl.training.other_methods import reset_reference

QUIET = replace(MICRO, probe=ProbeConfig(every=0))


def tiny(dtype=torch.float32):
    return build_tiny(MICRO.model.tiny, char_tokenizer("0123456789")).to(dtype)


@pytest.mark.parametrize(("dtype", "weight_format"), [("float32", None), ("bfloat16", None), ("float32", "int4")])
def test_betas_and_weight_decay_are_those_of_the_settings(dtype, weight_format):
    config = OptimConfig(betas=(0.8, 0.9), weight_decay=0.1, weight_format=weight_format)
    groups = policy_optimizer(tiny(getattr(torch, dtype)), config).param_groups
    assert [(group["betas"], group["weight_decay"]) for group in groups] == [((0.8, 0.9), 0.1)] * 2


def test_master_weights_may_be_left_out():
    optimizer = policy_optimizer(tiny(torch.bfloat16), OptimConfig(master_weights=False))
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_is_restored_bit_for_bit(dtype):
    def linear():
        module = torch.nn.Linear(2, 2, dtype=dtype)
        return module, make_optimizer([{"params": list(module.parameters()), "lr": 1e-3}], (0.9, 0.999), 0.0)

    (saved, trained), (module, own) = linear(), linear()
    saved(torch.ones(1, 2, dtype=dtype)).sum().backward()
    trained.step()
    _restore_optimizer(module, own, _optimizer_tensors(saved, trained).items())
    for state, restored in zip(trained.state.values(), own.state.values(), strict=True):
        for name, value in state.items():
            assert restored[name].dtype == value.dtype and torch.equal(restored[name], value), name


def test_a_waiting_batch_knows_the_step_that_sampled_it(state_of, tmp_path):
    config = replace(QUIET, rollout=replace(MICRO.rollout, lag=2))
    run(state := state_of(config, tmp_path))
    steps = [batch.step for batch in state.waiting]
    assert steps == [batch.step for batch in state_of(config, tmp_path).waiting] and min(steps) < state.step


def test_a_reference_that_was_reset_is_kept(state_of, tmp_path):
    """A run goes on between two resets."""
    optim = replace(MICRO.optim, steps=4, reference_reset_every=2)
    config = replace(QUIET, method=MethodConfig(kl_coef=0.1), optim=optim)
    run(whole := state_of(config, tmp_path / "whole"))
    run(state_of(replace(config, optim=replace(optim, steps=3)), tmp_path / "broken"))
    run(resumed := state_of(config, tmp_path / "broken"))
    for state, other in ((whole.reference, resumed.reference), (whole.policy, resumed.policy)):
        assert all(torch.equal(a, b) for a, b in zip(state.parameters(), other.parameters(), strict=True))


def test_the_reference_is_reset_at_multiples_of_its_steps(state_of, tmp_path):
    optim = replace(MICRO.optim, reference_reset_every=2)
    state = state_of(replace(QUIET, method=MethodConfig(kl_coef=0.1), optim=optim), tmp_path)
    own, other = next(state.policy.parameters()), next(state.reference.parameters())
    with torch.no_grad():
        own.add_(1.0)
    for step, reset in ((0, False), (1, False), (2, True)):
        state.step = step
        reset_reference(state)
        assert torch.equal(own, other) == reset
