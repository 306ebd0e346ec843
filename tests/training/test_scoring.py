"""Old log-probabilities and routes from decoding, one pass less: the same to rounding; refused where a pass is due.

Scoring in micro-batches."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.policy.models import ModelConfig
from moe_rl.rollout import seeded_random
from moe_rl.routing import change_counts
from moe_rl.training import MethodConfig, ProbeConfig, RolloutConfig, run, validate
from moe_rl.training.loop import collect_batch, responses
from moe_rl.training.score import score_rollout
from moe_rl.training.scorers import Margins, RouterScores

QUIET = replace(MICRO, probe=ProbeConfig(every=0), method=MethodConfig(replay="R2"))


def decoding(config=QUIET, **rollout):
    return replace(config, rollout=replace(config.rollout, scoring="decoding", **rollout))


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
def test_decoding_says_what_a_pass_says(state_of, tmp_path, monkeypatch, objective):
    config = replace(QUIET, method=MethodConfig(objective=objective, replay="R2", kl_coef=0.1))
    scored = collect_batch(state_of(config, tmp_path / "pass"))
    state = state_of(decoding(config), tmp_path / "decoding")
    forwards = []
    state.policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    monkeypatch.setattr("moe_rl.training.score.record_routes", None)  # no pass of the policy's
    decoded = collect_batch(state)
    assert torch.equal(decoded.input_ids, scored.input_ids) and torch.equal(decoded.ref_logps, scored.ref_logps)
    assert torch.allclose(decoded.old_logps, scored.old_logps, atol=1e-5) and bool((decoded.old_logps < 0).any())
    assert torch.equal(decoded.old_logps, decoded.rollout_logps) and decoded.rollout_routes is None
    inner = scored.completion_mask[:, 1:].clone()  # all but the last tokens, which decoding does not route
    assert change_counts(scored.routes, decoded.routes, scored.completion_mask).slots_changed == 0
    assert bool((decoded.routes.ids[:, :-1][inner] >= 0).all())
    row = rows(tmp_path / "decoding", "rollout")[0]
    assert row["rollout_logp_gap"] is None and rows(tmp_path / "decoding", "engine") == []


def test_every_token_that_matters_is_replayed(state_of, tmp_path):
    run(state_of(decoding(), tmp_path / "decoding"))
    run(state_of(QUIET, tmp_path / "pass"))
    a, b = (rows(tmp_path / name, "update") for name in ("decoding", "pass"))
    assert all(0 < row["replayed_rows"] < row["routed_rows"] and row["slots_changed"] == 0 for row in a)
    for name in ("loss", "grad_norm", "k3", "entropy"):
        assert [row[name] for row in a] == pytest.approx([row[name] for row in b], rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("lag", [0, 1])
def test_probed_steps_make_the_pass_and_compare(state_of, tmp_path, lag):
    """Under a lag those that train on the batch, not those that sample it."""
    config = replace(decoding(lag=lag), probe=ProbeConfig(every=2, sequences=4, floor=False))
    config = replace(config, optim=replace(config.optim, steps=3))
    run(state_of(config, tmp_path))
    gaps = [row["rollout_logp_gap"] for row in rows(tmp_path, "rollout")]
    assert [gap is None for gap in gaps] == [False, True, False, True][: 3 + lag] and max(gaps[0], gaps[2]) < 1e-5
    compared = rows(tmp_path, "engine", pair="engines")
    assert [row["step"] for row in compared] == [0, 2 - lag] and compared[0]["slots_changed"] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (decoding(replace(QUIET, method=MethodConfig(replay="R3"))), "method.replay: R3 replays the sampler's"),
        (decoding(replace(QUIET, method=MethodConfig(replay="R2", keep=0.5))), "method.keep"),
        (decoding(replace(QUIET, method=MethodConfig(objective="rspo"))), "method.objective: it weighs tokens"),
        (decoding(replace(QUIET, method=MethodConfig(objective="ppo"))), "method.advantage: the value model"),
        (decoding(replace(QUIET, method=MethodConfig(source="initial"))), "method.source"),
        (decoding(segment=2), "rollout.segment"),
        (decoding(replace(QUIET, model=ModelConfig(dtype="bfloat16"))), "model.dtype"),
        (decoding(engine=replace(RolloutConfig().engine, kind="hf")), "rollout.engine.kind"),
    ],
)
def test_what_needs_a_pass_is_refused(config, message):
    with pytest.raises(ValueError, match=f"rollout.scoring: decoding does not go with this {message}"):
        validate(config)


def test_scoring_in_micro_batches_says_what_scoring_at_once_does(state_of, tmp_path, monkeypatch):
    """Of tokens; what stands on padding is nobody's, and routes of padding that was left out are -1."""
    long = replace(MICRO.rollout, max_new_tokens=20)
    state = state_of(replace(MICRO, rollout=long), tmp_path)
    rollout = responses(state, seeded_random(0, "prompts"), state.generator("sample"))
    options = {"temperature": 1.0, "scorers": (RouterScores(), Margins())}
    whole, parts = (score_rollout(rollout, state.policy, state.ranks, **options, batch_size=n) for n in (None, 3))
    mask = rollout.attention_mask.bool()
    torch.testing.assert_close(parts.logps, whole.logps, rtol=1e-4, atol=1e-5)
    for name in ("margins", "route_scores"):
        torch.testing.assert_close(getattr(parts, name)[mask], getattr(whole, name)[mask], rtol=1e-4, atol=1e-5)
    assert torch.equal(parts.routes.ids[mask], whole.routes.ids[mask]) and bool((parts.routes.ids[mask] >= 0).all())
    assert bool((parts.routes.ids[~mask] == -1).any()) and not bool((whole.routes.ids == -1).any())
    assert torch.equal(parts.routes.tokens, whole.routes.tokens)
    sizes = []
    state.policy.register_forward_pre_hook(lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    monkeypatch.setattr("moe_rl.training.score.SCORING_BATCH", 5)
    score_rollout(rollout, state.policy, state.ranks, temperature=1.0)
    assert sizes == [5, 5, 5, 1], "of more than a pass holds, unless a setting says otherwise"
