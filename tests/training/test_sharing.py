"""Updates and scoring in which responses share their prompt: the same as without, of fewer rows."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows
from sweeps import sweep

from moe_rl.measure import shared_prompts
from moe_rl.policy import LoraConfig
from moe_rl.rollout import TaskConfig
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.routing import change_counts
from moe_rl.training import MethodConfig, ProbeConfig, run, validate
from moe_rl.training.batch import micro_batches
from moe_rl.training.loop import collect_batch

LONG = replace(MICRO.rollout, max_new_tokens=20)
ENGINE = replace(LONG, engine=EngineConfig("hf", "bfloat16"))
QUIET = replace(MICRO, probe=ProbeConfig(every=0), rollout=LONG)


def sharing(config=QUIET, **optim):
    return replace(config, optim=replace(config.optim, share_prompts=True, **optim))


@pytest.mark.parametrize(
    ("arm", "changes"),
    [
        sweep({}, {}),
        ({"replay": "R2"}, {}),
        sweep({"objective": "gspo", "replay": "R2"}, {"optim": replace(MICRO.optim, micro_batch=3)}),
        sweep({"replay": "R2", "keep_sites": (1,), "kl_coef": 0.1}, {}),
        ({"replay": "R3"}, {"rollout": ENGINE}),
        sweep({"objective": "dpo"}, {"optim": replace(MICRO.optim, micro_batch=2)}),
        ({"replay": "R2"}, {"rollout": replace(LONG, scoring="decoding")}),
        sweep({"replay": "R2"}, {"model": replace(MICRO.model, lora=LoraConfig(2, target_modules=("q_proj",)))}),
        ({"replay": "R2"}, {"rollout": replace(LONG, segment=3)}),
        sweep({"replay": "R2"}, {"rollout": replace(LONG, lag=1)}),
        ({"objective": "grpo_decoupled", "replay": "R2"}, {"rollout": replace(LONG, lag=1, rescore=True)}),
        sweep({}, {"task": TaskConfig(name="calculator")}),
    ],
)
def test_a_run_is_the_same_but_for_rounding(state_of, tmp_path, arm, changes):
    plain = replace(QUIET, method=MethodConfig(**arm), **changes)
    ends = []
    for name, config in (("plain", plain), ("shared", sharing(plain))):
        state = state_of(config, tmp_path / name)
        run(state)
        ends.append(state.ranks.unwrap_model(state.policy).state_dict())
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=2e-4, atol=2e-5)
    apart, together = (rows(tmp_path / name, "update") for name in ("plain", "shared"))
    for one, other in zip(apart, together, strict=True):
        assert 0 < other["routed_rows"] < 0.8 * one["routed_rows"]
        assert other["slots"] <= one["slots"], "last tokens are not routed"
        for name in ("loss", "grad_norm", "entropy", "k3", "clipped_tokens", "ess_token"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-6), name
        if arm.get("replay") == "R2" and "keep_sites" not in arm and not changes.get("rollout"):
            assert other["replayed_rows"] == other["routed_rows"]


def test_scoring_shares_prompts_but_where_a_probe_compares(state_of, tmp_path):
    plain = collect_batch(state_of(QUIET, tmp_path / "plain"))
    shared = collect_batch(state_of(sharing(), tmp_path / "shared"))
    torch.testing.assert_close(shared.old_logps, plain.old_logps, rtol=1e-4, atol=1e-5)
    assert change_counts(plain.routes, shared.routes, plain.attention_mask.bool()).slots_changed == 0
    last = plain.attention_mask.bool() & (plain.attention_mask.flip(1).cumsum(1).flip(1) == 1)
    assert torch.equal(shared.routes.live[..., 0], last | ~plain.attention_mask.bool())
    probed = collect_batch(state_of(sharing(replace(MICRO, rollout=LONG)), tmp_path / "probed"))
    assert torch.equal(probed.old_logps, plain.old_logps) and probed.routes.equal(plain.routes)


@pytest.mark.parametrize("every", [0, 1])
def test_sequences_longer_than_a_window_are_an_error_in_every_step(state_of, tmp_path, monkeypatch, every):
    state = state_of(sharing(replace(QUIET, probe=replace(MICRO.probe, every=every, floor=False))), tmp_path)
    monkeypatch.setattr(shared_prompts, "too_long", lambda config, longest, width: f"{longest} tokens are too many")
    with pytest.raises(ValueError, match=r"in this batch: [0-9]+ tokens are too many"):
        run(state)


def test_micro_batches_of_shared_prompts_are_rows_as_they_stand():
    mask = torch.arange(8) < torch.tensor([2, 5, 1, 4])[:, None]
    found = [(rows.tolist(), columns.stop) for rows, columns in micro_batches(mask, 2, in_order=True)]
    assert found == [([0, 1], 5), ([2, 3], 4)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(QUIET, method=MethodConfig(noise=0.1)), "method.noise"),
        (replace(QUIET, method=MethodConfig(replay="R2", keep=0.5)), "method.keep"),
        (replace(QUIET, method=MethodConfig(objective="rspo")), "method.objective: it weighs tokens"),
        (replace(QUIET, method=MethodConfig(objective="ppo")), "method.advantage: the value model"),
        (replace(QUIET, optim=replace(QUIET.optim, aux_loss_coef=0.01)), "optim.aux_loss_coef"),
        (replace(QUIET, optim=replace(QUIET.optim, expert_bias_rate=0.01)), "optim.expert_bias_rate: last tokens"),
    ],
)
def test_what_is_of_each_response_is_refused(config, message):
    with pytest.raises(ValueError, match=f"optim.share_prompts does not go with this {message}"):
        validate(sharing(config))
