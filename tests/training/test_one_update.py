"""One update by itself: its rate, its entropy, its masks, and what scoring leaves out."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.measure import token_logps
from moe_rl.training import MethodConfig, ProbeConfig, run
from moe_rl.training.loop import collect_batch, update_on

QUIET = replace(MICRO, probe=ProbeConfig(every=0))


def test_at_another_temperature_the_first_update_is_on_policy_too(state_of, tmp_path):
    """Sampler, old policy, reference, and the policy in training score one distribution."""
    config = replace(MICRO, rollout=replace(MICRO.rollout, temperature=0.5), method=MethodConfig(kl_coef=0.1))
    run(state_of(config, tmp_path))
    first = rows(tmp_path, "update")[0]
    assert first["var_token_log_ratio"] < 1e-12 and abs(first["k3"]) < 1e-9 and abs(first["ref_kl"]) < 1e-9
    assert all(row["rollout_logp_gap"] < 1e-4 for row in rows(tmp_path, "rollout"))


def test_the_rate_of_a_warmup_is_that_of_the_step(state_of, tmp_path):
    state = state_of(replace(QUIET, optim=replace(MICRO.optim, router_lr_multiplier=3.0)), tmp_path)
    update_on(state, collect_batch(state), 1)  # of two in the warmup
    rates = [group["lr"] for group in state.optimizer.param_groups]
    assert rates == pytest.approx([5e-3, 1.5e-2]) and rows(tmp_path, "update")[0]["lr"] == rates[0]


def test_entropy_is_of_the_response_tokens(state_of, tmp_path):
    state = state_of(QUIET, tmp_path)
    batch = collect_batch(state)
    with torch.no_grad():
        entropy = token_logps(state.policy, *batch.tokens, entropy=True).entropy
    update_on(state, batch, 1)
    mean = float(entropy[batch.completion_mask].mean())
    assert rows(tmp_path, "update")[0]["entropy"] == pytest.approx(mean, rel=1e-5)


def test_a_clip_of_sequences_is_masked_by_their_ratio(state_of, tmp_path):
    method = MethodConfig(objective="gspo", clip_low=1e-4, clip_high=1e-4)
    run(state_of(replace(QUIET, method=method), tmp_path))
    updates = rows(tmp_path, "update")
    for row in updates:
        assert row["is_masked_low"] == pytest.approx(row["clipped_low_tokens"] / row["tokens"])
        assert row["is_masked_high"] == pytest.approx(row["clipped_high_tokens"] / row["tokens"])
    assert updates[-1]["is_masked"] > 0


def test_the_trust_region_is_measured_from_the_sampler(state_of, tmp_path):
    state = state_of(QUIET, tmp_path)
    batch = collect_batch(state)
    update_on(state, replace(batch, rollout_logps=batch.rollout_logps - 0.1 * batch.completion_mask), 1)
    row = rows(tmp_path, "update")[0]
    assert row["k3"] == pytest.approx(0, abs=1e-9)
    assert row["unmasked_mismatch_kl"] == pytest.approx(1.1051709 - 1.1, rel=1e-3)  # e^0.1 - 1 - 0.1


def test_dropout_has_no_part_in_scoring(state_of, tmp_path):
    state = state_of(QUIET, tmp_path)
    for module in state.policy.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    state.policy.train()
    batch = collect_batch(state)
    assert torch.allclose(batch.old_logps, batch.rollout_logps, atol=1e-4)


def test_the_load_balancing_loss_is_added_with_its_coefficient_and_balances(state_of, tmp_path):
    """Without advantages it alone has a gradient."""
    found = []
    for coef in (0.5, 1.0):
        optim = replace(MICRO.optim, aux_loss_coef=coef, max_grad_norm=1e9)
        state = state_of(replace(MICRO, optim=optim, probe=ProbeConfig(every=0)), tmp_path / str(coef))
        state.task.reward = lambda *_: 0.5
        batch = collect_batch(state)
        for update in range(1, 7):
            update_on(state, batch, update)
        found.append(rows(tmp_path / str(coef), "update"))
    (half, *_), (whole, *_, last) = found
    assert whole["grad_norm"] == pytest.approx(2 * half["grad_norm"], rel=1e-3)
    assert last["aux_loss"] < whole["aux_loss"]
