"""What the row of an update says of trust regions, of the range of ratios and of loads, against what else is known."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.measure.metrics import load_violation
from moe_rl.routing import expert_load
from moe_rl.training import MethodConfig, ProbeConfig, run
from moe_rl.training.batch import totals_of
from moe_rl.training.loop import collect_batch, update_on

QUIET = replace(MICRO, probe=ProbeConfig(every=0))


def test_ranges_and_masks_agree_with_the_other_names_for_them(state_of, tmp_path):
    tight = MethodConfig(objective="grpo", clip_low=1e-3, clip_high=1e-3)
    run(state_of(replace(QUIET, method=tight), tmp_path))
    updates = rows(tmp_path, "update")
    for row in updates:
        widest = max(row["probs_ratio_max"], 1 / row["probs_ratio_min"])
        assert math.log(widest) == pytest.approx(row["gap_max"], rel=1e-9, abs=1e-12)
        assert row["extreme_2"] / row["tokens"] <= row["outside_fraction"] <= 1
        assert row["is_masked"] == pytest.approx(row["clipped_tokens"] / row["tokens"])
        assert row["is_masked_low"] + row["is_masked_high"] == pytest.approx(row["is_masked"])
    first = updates[0]
    assert first["is_masked"] == 0 and first["masked_mismatch_kl"] is None, "theta = theta_old: nothing to mask"
    assert first["unmasked_mismatch_kl"] == pytest.approx(0, abs=1e-9), "and one engine samples and scores"
    last = updates[-1]
    share = last["is_masked"]
    joined = share * last["masked_mismatch_kl"] + (1 - share) * last["unmasked_mismatch_kl"]
    assert 0 < share < 1 and joined == pytest.approx(last["k3"], rel=1e-3), "both parts together: KL(mu || pi)"


def test_a_token_beyond_the_ceiling_of_dual_clip_is_masked_above(state_of, tmp_path):
    method = MethodConfig(objective="grpo", clip_low=1e-3, clip_high=1e-3, dual_clip=1.002)
    run(state_of(replace(QUIET, method=method), tmp_path))
    beyond = 0
    for row in rows(tmp_path, "update"):
        low, high = row["clipped_low_tokens"], row["clipped_tokens"] - row["clipped_low_tokens"]
        assert row["is_masked_low"] == pytest.approx(low / row["tokens"])
        assert row["is_masked_high"] == pytest.approx(high / row["tokens"])
        beyond += high - row["clipped_high_tokens"]
    assert beyond > 0, "some have A < 0"


def test_max_vio_is_of_the_routes_that_were_trained_on(state_of, tmp_path):
    state = state_of(replace(QUIET, method=MethodConfig(replay="R2")), tmp_path)
    batch = collect_batch(state)
    update_on(state, batch, 1)
    load = expert_load(batch.routes, batch.attention_mask.bool())
    assert rows(tmp_path, "update")[0]["max_vio"] == pytest.approx(float(load_violation(load)["max_vio"].mean()))


def test_what_a_loss_is_divided_by_is_what_counts_in_it():
    """Tokens, responses that have any, pairs with a preference."""
    mask = torch.tensor([[True, True], [False, False], [True, False], [True, True]])
    assert totals_of(SimpleNamespace(completion_mask=mask, advantages=torch.tensor([1.0, -1.0, 0.0, 0.0]))) == (5, 3, 1)


def test_pairs_are_split_pair_by_pair(state_of, tmp_path):
    """Two prompts are two pairs, one for each of two minibatches."""
    config = replace(QUIET, method=MethodConfig(objective="dpo"), rollout=replace(MICRO.rollout, prompts=2))
    run(state_of(replace(config, optim=replace(MICRO.optim, steps=1)), tmp_path))
    assert [row["update"] for row in rows(tmp_path, "update")] == [1, 2]
