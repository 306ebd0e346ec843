"""Partial rollouts and several turns in the loop: what the old policy is, what is replayed, resumption, refusals."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, logps, rows

from moe_rl.rollout import Problem, TaskConfig, TaskError
from moe_rl.rollout.engine_config import Engine
from moe_rl.rollout.engines import EngineConfig
from moe_rl.training import MethodConfig, ProbeConfig, RewardConfig, run, validate
from moe_rl.training.checkpoint import load_checkpoint, save_checkpoint
from moe_rl.training.config import DistributedConfig
from moe_rl.training.loop import collect_batch, update_on

QUIET = replace(MICRO, probe=ProbeConfig(every=0), optim=replace(MICRO.optim, steps=4))
SEGMENTED = replace(QUIET, rollout=replace(MICRO.rollout, segment=3))
RESCORED = replace(QUIET, rollout=replace(MICRO.rollout, lag=1, rescore=True))
TURNS = replace(QUIET, task=TaskConfig("calculator", {"steps": 1}))


def test_several_versions_write_one_response_and_the_old_policy_is_the_present_one(state_of, tmp_path):
    state = state_of(SEGMENTED, tmp_path)
    assert state.max_new_tokens == 7, "three segments"
    first = collect_batch(state)
    assert len(state.drafts) == 2 and first.versions[first.completion_mask].unique().tolist() == [0]
    torch.testing.assert_close(first.old_logps, first.rollout_logps, atol=1e-5, rtol=1e-5)
    update_on(state, first, 1)
    state.step = 1
    second = collect_batch(state)
    assert second.versions[second.completion_mask].unique().tolist() == [0, 1]
    own = second.versions == 1
    torch.testing.assert_close(second.old_logps, logps(state, state.policy, second).logps.detach())
    torch.testing.assert_close(second.old_logps[own], second.rollout_logps[own], atol=1e-5, rtol=1e-5)
    others = second.completion_mask & ~own
    assert float((second.old_logps - second.rollout_logps)[others].abs().max()) > 1e-3, "another version wrote these"
    row = rows(tmp_path, "rollout")[-1]
    assert row["old_tokens"] == pytest.approx(float(others.sum() / second.completion_mask.sum()))
    assert 0 < row["mixed_responses"] <= 1 and row["version_age_max"] == 1


def test_a_segment_longer_than_the_limit_does_not_lift_it(state_of, tmp_path):
    longer = replace(QUIET, rollout=replace(MICRO.rollout, segment=50, max_new_tokens=3))
    whole = replace(longer, rollout=replace(longer.rollout, segment=None))
    batch, other = (collect_batch(state_of(c, tmp_path / str(i))) for i, c in enumerate((longer, whole)))
    assert batch.completion_mask.sum(1).max() == other.completion_mask.sum(1).max() == 3


@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
def test_an_interrupted_partial_run_ends_as_an_uninterrupted_one(state_of, tmp_path, replay):
    config = replace(SEGMENTED, method=MethodConfig(replay=replay))
    run(whole := state_of(config, tmp_path / "whole"))
    run(state_of(replace(config, optim=replace(config.optim, steps=2)), tmp_path / "broken"))
    run(resumed := state_of(config, tmp_path / "broken"))
    weights, again = (dict(state.policy.state_dict()) for state in (whole, resumed))
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    assert rows(tmp_path / "whole", "update") == rows(tmp_path / "broken", "update")


def test_routes_of_a_draft_say_the_same_of_themselves_after_a_resumption(state_of, tmp_path):
    state = state_of(replace(SEGMENTED, method=MethodConfig(replay="R3")), tmp_path)
    collect_batch(state)
    draft = state.drafts[0]
    save_checkpoint(state)
    load_checkpoint(state)
    read = state.drafts[0]
    assert read is not draft
    assert read.routes.equal(draft.routes) and read.routes.meta == draft.routes.meta


def test_problems_that_a_checkpoint_would_not_give_back_are_refused_when_they_are_drawn(state_of, tmp_path):
    class Mine(Problem):
        pass

    state = state_of(SEGMENTED, tmp_path)
    drawn = state.task.problem
    state.task.problem = lambda *given, **options: Mine(**vars(drawn(*given, **options)))
    with pytest.raises(TaskError, match=r"rollout\.segment: checkpoints keep .*Mine.* would not come back"):
        collect_batch(state)
    state.task.problem = lambda *given, **options: replace(drawn(*given, **options), fields={"tests": (1, 2)})
    with pytest.raises(TaskError, match="index and fields that JSON has"):
        collect_batch(state)
    state.task.problem = lambda *given, **options: replace(drawn(*given, **options), index=1, fields={"tests": [1, 2]})
    assert collect_batch(state)
    problems = state.drafts[0].problems
    save_checkpoint(state)
    load_checkpoint(state)
    assert state.drafts[0].problems == problems and problems[0].fields == {"tests": [1, 2]}


def test_r3_replays_the_route_by_which_the_next_token_was_written(state_of, tmp_path):
    state = state_of(replace(SEGMENTED, method=MethodConfig(replay="R3")), tmp_path)
    batch = collect_batch(state)
    update_on(state, batch, 1)
    state.step = 1
    batch = collect_batch(state)
    tokens = batch.attention_mask.sum()
    assert int((~batch.rollout_routes.live[..., 0]).sum()) == int(tokens) - len(batch), "all but each row's last token"
    update_on(state, batch, 2)
    row = rows(tmp_path, "update")[-1]
    assert row["replayed_rows"] == (int(tokens) - len(batch)) * batch.routes.shape[2]


def test_engines_are_compared_on_the_tokens_of_the_present_weights(state_of, tmp_path):
    engine = EngineConfig(kind="hf", dtype="float32")
    config = replace(SEGMENTED, rollout=replace(SEGMENTED.rollout, engine=engine))
    state = state_of(config, tmp_path)
    update_on(state, collect_batch(state), 1)
    state.step = 1
    batch = collect_batch(state)
    row = rows(tmp_path, "engine", pair="engines")[-1]
    assert row["gap_max"] < 1e-4, "equal weights, equal arithmetic"
    assert float((batch.old_logps - batch.rollout_logps).abs().max()) > 1e-3


def test_tool_text_is_in_no_loss_and_both_turns_are_scored(state_of, tmp_path):
    state = state_of(TURNS, tmp_path)
    batch = collect_batch(state)
    first = batch.completion_mask.int().argmax(1)
    after = torch.arange(batch.input_ids.shape[1]) >= first[:, None]
    tool = batch.attention_mask & after & ~batch.completion_mask
    assert bool(tool.any()), "a random policy asks, and is answered"
    torch.testing.assert_close(batch.old_logps, batch.rollout_logps, atol=1e-5, rtol=1e-5)
    assert float(batch.old_logps[tool].abs().max()) == 0
    update_on(state, batch, 1)
    row = rows(tmp_path, "update")[-1]
    assert row["tokens"] == int(batch.completion_mask.sum())
    assert row["gap_max"] < 1e-4


def test_an_engine_that_converses_is_an_engine(state_of, tmp_path):
    assert isinstance(state_of(TURNS, tmp_path).engine, Engine)


def test_a_conversation_trains_and_is_evaluated(state_of, tmp_path):
    config = replace(TURNS, optim=replace(TURNS.optim, steps=1), method=MethodConfig(replay="R3"), probe=MICRO.probe)
    run(state_of(config, tmp_path))
    assert len(rows(tmp_path, "eval")) == 2 and rows(tmp_path, "probe")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SEGMENTED, method=MethodConfig(objective="gspo_rollout", replay="R2")), "anchored at the rollout"),
        (replace(SEGMENTED, rollout=replace(SEGMENTED.rollout, lag=1)), r"rollout\.lag"),
        (replace(QUIET, rollout=replace(QUIET.rollout, rescore=True)), r"rollout\.rescore .* rollout\.lag of 0"),
        (replace(RESCORED, method=MethodConfig(replay="R3")), r"rollout\.rescore .* use none or R2"),
        (replace(RESCORED, method=MethodConfig(replay="R2", keep=0.5)), r"rollout\.rescore .* margins"),
        (replace(RESCORED, method=MethodConfig(objective="dpo", source="policy")), r"rollout\.rescore .* pairs"),
        (replace(SEGMENTED, method=MethodConfig(objective="sft")), "'demonstrations' responses .* use policy"),
        (replace(SEGMENTED, reward=RewardConfig(model="learned")), "this reward.model: learned .* use verifier"),
        (replace(TURNS, reward=RewardConfig(model="learned")), "this reward.model: learned .* use verifier"),
        (
            replace(SEGMENTED, rollout=replace(SEGMENTED.rollout, engine=EngineConfig("mine:Engine"))),
            "kind: it cannot go on .* use self or hf",
        ),
        (replace(TURNS, rollout=replace(TURNS.rollout, segment=2)), "one version"),
        (replace(TURNS, method=MethodConfig(objective="ppo")), "one turn"),
        (
            replace(SEGMENTED, rollout=replace(SEGMENTED.rollout, dynamic_sampling=1)),
            "segment .* this rollout.dynamic_sampling",
        ),
        (replace(SEGMENTED, distributed=DistributedConfig("ddp")), "segment .* this distributed.strategy"),
        (replace(SEGMENTED, method=MethodConfig(objective="dpo", source="policy")), "segment .* this method.objective"),
        (replace(TURNS, distributed=DistributedConfig("ddp")), "turns, .* this distributed.strategy"),
        (
            replace(TURNS, rollout=replace(TURNS.rollout, engine=EngineConfig("mine:Engine"))),
            "turns, .* use self or hf",
        ),
        (replace(TURNS, method=MethodConfig(source="initial")), "turns, .* 'initial' responses; use policy"),
    ],
)
def test_what_is_not_defined_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)
