"""Every method in the one loop: it trains, what it learns from is what it names, and interruption changes nothing."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from micro import MICRO, logps, rows

from moe_rl.objectives import (
    OBJECTIVES,
    accepted_advantages,
    decoupled_advantages,
    group_advantages,
    leave_one_out_advantages,
    policy_loss,
)
from moe_rl.rollout import TaskConfig
from moe_rl.training import (
    EvalConfig,
    MethodConfig,
    ProbeConfig,
    RewardConfig,
    ValueConfig,
    begin,
    run,
    validate,
)
from moe_rl.training.loop import advantages_of, collect_batch, responses
from moe_rl.training.optimizer import memory_metrics
from moe_rl.training.score import score_rollout

MICRO = replace(MICRO, eval=EvalConfig(prompts=4), probe=ProbeConfig(every=0), checkpoint_every=9)  # at the end
LEARNED = RewardConfig(model="learned", initial_batches=1, retrain_every=1, batch_size=4)
ARMS = {
    **{name: {"method": {"objective": name}} for name in [*OBJECTIVES, "dpo"]},
    "ppo_head": {"method": {"objective": "ppo"}, "value": ValueConfig(model="head")},
    "gspo_token_process": {"method": {"objective": "gspo_token", "advantage": "process"}},
    "grpo_decoupled": {"method": {"objective": "grpo", "advantage": "decoupled"}},
    "grpo_leave_one_out": {"method": {"objective": "grpo", "advantage": "leave_one_out"}},
    "grpo_learned_reward": {"method": {"objective": "grpo"}, "reward": LEARNED},
    "iterative_grpo": {
        "method": {"objective": "grpo", "kl_coef": 0.1},
        "reward": LEARNED,
        "optim": replace(MICRO.optim, reference_reset_every=1),
    },
    "dpo_online": {"method": {"objective": "dpo", "source": "policy"}},
    "rspo_replay": {"method": {"objective": "rspo", "replay": "R2"}},
}


def config_of(name, **changes):
    arm = ARMS[name]
    return replace(MICRO, **{**arm, "method": MethodConfig(**arm["method"])} | changes)


def weights(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ARMS)
def test_every_method_trains(state_of, tmp_path, name):
    state = state_of(config_of(name), tmp_path)
    before = {key: weights(module) for key, (module, _) in state.trained.items()}
    run(state)
    for key, (module, _) in state.trained.items():
        assert not same(before[key], weights(module)), f"{key} did not learn"
        assert all(bool(v.isfinite().all()) for v in module.state_dict().values())
    # None is written where a number is not finite: a mean over tokens that were clipped, of none
    absent = {"aux_loss", "groups_equal", "rollout_logp_gap", "masked_mismatch_kl", "unmasked_mismatch_kl"}
    for row in rows(tmp_path, "update") + rows(tmp_path, "rollout"):
        assert all(v is not None and math.isfinite(v) for k, v in row.items() if k not in absent | {"kind"}), row


@pytest.mark.parametrize("name", ["ppo", "ppo_head", "iterative_grpo", "rft", "dpo", "rspo"])
def test_interrupted_runs_end_as_uninterrupted_ones(state_of, tmp_path, name):
    arm = config_of(name)
    lag = replace(MICRO.rollout, lag=int(name == "ppo"))
    config = replace(arm, optim=replace(arm.optim, steps=3), rollout=lag, checkpoint_every=1)
    whole = state_of(config, tmp_path / "whole")
    run(whole)

    class Stop(Exception):
        pass

    def stop(row):
        if row["kind"] == "update" and row["step"] == 2:
            raise Stop

    broken = state_of(config, tmp_path / "broken")
    broken.log.listener = stop
    with pytest.raises(Stop):
        run(broken)
    resumed = state_of(config, tmp_path / "broken")
    assert resumed.step == 2
    run(resumed)
    for key, (module, _) in whole.trained.items():
        assert same(weights(module), weights(resumed.trained[key][0])), key
    for key, module in whole.frozen.items():
        assert same(weights(module), weights(resumed.frozen[key])), key
    assert rows(tmp_path / "whole") == rows(tmp_path / "broken")


def test_the_study_of_all_methods_has_every_preset():
    study = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "methods.yaml").read_text())
    assert {arm["method"]["objective"] for arm in study["arms"].values()} == {*OBJECTIVES, "dpo"}


# -- advantages ------------------------------------------------------------------------------------------------


def test_advantages_are_those_that_the_method_names(state_of, tmp_path):
    def batch(name, **method):
        config = config_of(name)
        return collect_batch(state_of(replace(config, method=replace(config.method, **method)), tmp_path / name))

    for name, expected in {
        "grpo": lambda r: group_advantages(r, 4),
        "dr_grpo": lambda r: group_advantages(r, 4, scale="none"),
        "grpo_leave_one_out": lambda r: leave_one_out_advantages(r, 4),
        "online_rft": accepted_advantages,
        "sft": torch.ones_like,
    }.items():
        made = batch(name)
        assert torch.equal(made.advantages, expected(made.rewards)), name
    (row,) = rows(tmp_path / "online_rft", "rollout")
    assert 0 < row["accepted"] == row["reward"] < 1


def test_decoupled_advantages_are_of_every_reward_by_itself(state_of, tmp_path):
    state = state_of(config_of("grpo_decoupled"), tmp_path)
    rollout = responses(state, random.Random(0), state.generator("test"))
    scores = score_rollout(rollout, state.policy, state.ranks, temperature=1.0)
    advantages, _, metrics = advantages_of(state, rollout, scores)
    table = torch.tensor([list(state.task.rewards(None, text).values()) for text in rollout.completions])
    assert torch.equal(advantages, decoupled_advantages(table, 4)) and bool(table.std(0).all())
    assert [metrics["reward_odd"], metrics["reward_short"]] == pytest.approx(table.mean(0).tolist())


def on_tokens(state, rollout, row):
    """Column -> step reward of one response, by the lengths of its tokens' texts (a sampled `<pad>` has five)."""
    found = {}
    columns = rollout.completion_mask[row].nonzero().flatten().tolist()
    for end, reward in state.task.step_rewards(rollout.problems[row], rollout.completions[row]):
        length = 0
        for column in columns:
            length += len(state.tokenizer.decode([rollout.input_ids[row, column]]))
            if length >= end:
                found[column] = found.get(column, 0.0) + reward
                break
    return found


def test_process_advantages_are_returns_to_go_on_the_tokens_that_end_steps(state_of, tmp_path):
    """Against the definition in plain loops."""
    state = state_of(config_of("gspo_token_process"), tmp_path)
    rollout = responses(state, random.Random(0), state.generator("test"))
    scores = score_rollout(rollout, state.policy, state.ranks, temperature=state.config.rollout.temperature)
    advantages, _, metrics = advantages_of(state, rollout, scores)
    steps = [on_tokens(state, rollout, row) for row in range(16)]
    expected = torch.zeros_like(advantages)
    for group in range(4):
        mine = steps[4 * group : 4 * group + 4]
        all_rewards = torch.tensor([reward for found in mine for reward in found.values()])
        for row, found in enumerate(mine, start=4 * group):
            for t in range(expected.shape[1]):
                ahead = [reward for column, reward in found.items() if column >= t]
                gains = [(r - all_rewards.mean()) / (all_rewards.std() + 1e-4) for r in ahead]
                expected[row, t] = sum(gains) if all_rewards.std() > 0 else 0.0
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1
    assert metrics["steps_per_response"] == sum(map(len, steps)) / 16


def test_dr_grpo_divides_by_the_generation_budget(state_of, tmp_path):
    state = state_of(config_of("dr_grpo"), tmp_path)
    assert state.method.objective.length_constant == state.task.max_new_tokens == 7
    config = config_of("dr_grpo", rollout=replace(MICRO.rollout, max_new_tokens=5))
    assert state_of(config, tmp_path / "short").method.objective.length_constant == 5


def loss_of(state, batch):
    """The method's loss of the current policy on a whole batch."""
    return policy_loss(
        state.method.objective,
        logps(state, state.policy, batch).logps,
        batch.old_logps,
        batch.advantages,
        batch.completion_mask,
        rollout_logps=batch.rollout_logps if state.method.needs_rollout_logps else None,
    )


@pytest.mark.parametrize(("name", "shift"), [("gspo_rollout", 0.5), ("gspo", 0.0)])
def test_the_ratio_is_against_the_anchor_that_is_named(state_of, tmp_path, name, shift):
    """Rollout log-probabilities that are half a nat lower raise the ratio of the one and not of the other."""
    state = state_of(config_of(name), tmp_path)
    batch = collect_batch(state)
    batch = replace(batch, rollout_logps=batch.old_logps - 0.5)
    loss = loss_of(state, batch)
    assert loss.sequence_log_ratio.detach() == pytest.approx(torch.full((16,), shift), abs=1e-5)


def test_minirl_corrects_for_the_engine_that_sampled(state_of, tmp_path):
    """Its weight is min(pi_old / pi_rollout, 5), here e^0.5 on every token."""
    state = state_of(config_of("minirl"), tmp_path)
    batch = collect_batch(state)
    plain, shifted = (
        loss_of(state, replace(batch, rollout_logps=batch.old_logps - lower)).loss.detach() for lower in (0.0, 0.5)
    )
    assert plain.abs() > 1e-3
    assert float(shifted / plain) == pytest.approx(math.exp(0.5), rel=1e-4)


@pytest.mark.parametrize("name", ["rspo", "rspo_after_clip"])
def test_router_shift_is_none_on_the_first_update_and_grows(state_of, tmp_path, name):
    """The first minibatch meets the policy that sampled it: gamma = 1 up to rounding. Later ones do not."""
    run(state_of(config_of(name, optim=replace(MICRO.optim, warmup_updates=0)), tmp_path))
    first, second = rows(tmp_path, "update")[:2]
    assert first["route_weight"] == pytest.approx(1.0, abs=1e-5) and first["route_weight_floored"] == 0.0
    assert second["route_weight"] < 0.99


# -- sources ---------------------------------------------------------------------------------------------------


def test_rft_learns_from_the_initial_policy_whatever_became_of_the_current_one(state_of, tmp_path):
    seen = {}
    for rate in (1e-2, 1e-3):
        config = config_of("rft", optim=replace(MICRO.optim, learning_rate=rate, steps=3))
        state = state_of(config, tmp_path / str(rate))
        start = weights(state.policy)
        run(state)
        assert same(start, weights(state.initial))
        seen[rate] = [(r["reward"], r["response_length"]) for r in rows(tmp_path / str(rate), "rollout")]
    assert seen[1e-2] == seen[1e-3]
    run(state_of(config_of("online_rft", optim=replace(MICRO.optim, steps=3)), tmp_path / "online"))
    online = [(r["reward"], r["response_length"]) for r in rows(tmp_path / "online", "rollout")]
    assert online[0] == seen[1e-2][0] and online != seen[1e-2]


def test_sft_imitates_demonstrations(tmp_path):
    """Under the task's own verifier they are all right, and their likelihood rises."""
    config = config_of("sft", optim=replace(MICRO.optim, steps=6))
    state = begin(config, tmp_path)
    run(state)
    assert [r["reward"] for r in rows(tmp_path, "rollout")] == [1.0] * 6
    losses = [r["loss"] for r in rows(tmp_path, "update")]
    assert losses[-1] < losses[0] - 0.5


def test_demonstrations_have_no_engine_to_correct_for(state_of, tmp_path):
    """Nobody sampled them: the optional correction of MiniRL is 1, and not pi_old over a probability of 1."""
    ends = []
    for name, more in (("minirl", {}), ("plain", {"corrections": ()})):
        own = MethodConfig(objective="minirl", source="demonstrations", advantage="one", **more)
        config = config_of("grpo", method=own, optim=replace(MICRO.optim, steps=1), eval=EvalConfig(prompts=2))
        run(state := state_of(config, tmp_path / name))
        ends.append(weights(state.policy))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_refusals_name_the_method_and_the_remedy():
    def refused(pattern, name="grpo", **changes):
        with pytest.raises(ValueError, match=pattern):
            validate(config_of(name, **changes))

    one = replace(MICRO.rollout, group_size=1)
    refused(
        "method.objective: expected one of .*got 'grop'. Did you mean 'grpo'", method=MethodConfig(objective="grop")
    )
    refused("rollout.group_size: a group baseline needs 2 or more, got 1 .grpo", rollout=one)
    refused("method.clip_low: dpo learns from pairs", method=MethodConfig(objective="dpo", clip_low=0.1))
    refused("task demonstrates one", method=MethodConfig(objective="dpo", source="demonstrations"))
    refused("optim.micro_batch: dpo's pairs stay together", "dpo", optim=replace(MICRO.optim, micro_batch=3))
    refused("rollout.lag: rft learns from 'initial'", "rft", rollout=replace(MICRO.rollout, lag=1))
    refused("no group to be compared with", method=MethodConfig(source="demonstrations"))
    imitates = MethodConfig(objective="ppo", source="demonstrations")
    refused("a prompt has one demonstration", method=imitates, reward=RewardConfig("learned"))
    refused("nobody sampled the demonstrations", method=MethodConfig(objective="grpo_tis", source="demonstrations"))
    refused("not batch", method=MethodConfig(advantage="process", advantage_scale="batch"))
    refused(
        r"asks for step_rewards\(\), which task copy lacks",
        method=MethodConfig(advantage="process"),
        task=TaskConfig(name="copy"),
    )
    refused("learned reward has no threshold", "online_rft", reward=LEARNED)
    refused("must divide rollout.prompts .4., got 3", optim=replace(MICRO.optim, num_minibatches=3))
    refused(
        r"asks for rewards\(\), which task copy lacks",
        method=MethodConfig(advantage="decoupled"),
        task=TaskConfig(name="copy"),
    )
    refused("by 'one': imitation looks at no reward", method=MethodConfig(advantage="one"), reward=LEARNED)
    refused("by 'process': step rewards come from the task", "gspo_token_process", reward=LEARNED)
    refused("by 'decoupled': several rewards come from the task", "grpo_decoupled", reward=LEARNED)
    refused("group_size: a reward model learns from pairs .* got 1", "ppo", rollout=one, reward=LEARNED)
    refused("got reward.model 'learned'", rollout=replace(MICRO.rollout, dynamic_sampling=1), reward=LEARNED)
    refused("value.lam: .* of at least 0 and of at most 1, got 1.5", "ppo", value=ValueConfig(lam=1.5))
    refused("batch's 8 responses", "dpo", probe=ProbeConfig(sequences=9))
    for name in ("ppo", "sft", "rft", "online_rft"):
        validate(config_of(name, rollout=one))


@pytest.mark.parametrize(
    ("own", "word"),
    [
        ({"objective": "sapo", "clip_high": 0.3}, "clip_high"),
        ({"objective": "gspo", "temperature_pos": 2.0}, "temperature_pos"),
        ({"objective": "grpo", "ratio_cap": 5.0}, "ratio_cap"),
        ({"objective": "grpo", "length_constant": 100.0}, "length_constant"),
        ({"objective": "grpo", "route_floor": 0.5}, "route_floor"),
        ({"objective": "ppo", "advantage_scale": "none"}, "advantage_scale"),
        ({"objective": "grpo", "kl_estimator": "k1"}, "kl_estimator"),
        ({"objective": "grpo", "kl_importance_weighted": True}, "kl_importance_weighted"),
        ({"objective": "grpo", "beta": 0.04}, "beta"),
        ({"objective": "online_rft", "ratio": "sequence"}, "ratio"),
        ({"objective": "online_rft", "anchor": "rollout"}, "anchor"),
        ({"objective": "online_rft", "route_weight": "before_clip"}, "route_weight"),
    ],
)
def test_a_knob_that_the_method_would_not_read_is_refused(own, word):
    """It would be a run of the unchanged method, under a name that says otherwise."""
    with pytest.raises(ValueError, match=f"method.{word}: .*not read"):
        validate(replace(MICRO, method=MethodConfig(**own)))


def test_knobs_that_are_read_or_are_the_presets_own_pass():
    with pytest.raises(ValueError, match="reference_reset_every: grpo has no reference"):
        validate(replace(MICRO, optim=replace(MICRO.optim, reference_reset_every=2)))
    for own in (
        {"objective": "sapo", "clip_high": 0.27, "temperature_pos": 2.0},
        {"objective": "grpo", "gate": "sigmoid", "temperature_neg": 1.5},
        {"objective": "dr_grpo", "length_constant": 100.0},
        {"objective": "grpo", "kl_coef": 0.1, "kl_estimator": "k1", "kl_importance_weighted": True},
        {"objective": "dpo", "beta": 0.04},
    ):
        validate(replace(MICRO, method=MethodConfig(**own)))


# -- DPO -------------------------------------------------------------------------------------------------------


def test_dpo_takes_the_best_and_the_worst_of_each_group(state_of, tmp_path):
    state = state_of(config_of("dpo_online"), tmp_path)
    batch = collect_batch(state)
    better, worse = batch.rewards[0::2], batch.rewards[1::2]
    assert len(batch) == 8 and bool((better >= worse).all()) and bool((better > worse).any())
    assert torch.equal(batch.advantages[0::2], (better > worse).float())
    assert torch.equal(batch.advantages[0::2], -batch.advantages[1::2])


def test_dpo_pairs_stay_together_in_micro_batches(state_of, tmp_path):
    ends, long = [], replace(MICRO.rollout, max_new_tokens=20)  # lengths by which rows alone would change places
    for size in (None, 2):
        config = config_of("dpo", optim=replace(MICRO.optim, micro_batch=size, steps=1), rollout=long)
        state = state_of(config, tmp_path / str(size))
        run(state)
        ends.append((weights(state.policy), rows(tmp_path / str(size), "update")))
    assert ends[0][1][1]["loss"] == pytest.approx(ends[1][1][1]["loss"], abs=1e-5)
    for name in ends[0][0]:
        torch.testing.assert_close(ends[0][0][name], ends[1][0][name], rtol=2e-4, atol=2e-5)


def test_the_gap_of_a_batch_of_pairs_is_of_all_its_responses(state_of, tmp_path):
    for name in ("grpo", "dpo"):
        config = config_of(name)
        config = replace(config, method=replace(config.method, source="policy"))
        collect_batch(state_of(config, tmp_path / name))
    grpo, dpo = (rows(tmp_path / name, "rollout")[0] for name in ("grpo", "dpo"))
    assert dpo["rollout_logp_gap"] == grpo["rollout_logp_gap"] > 0 and 2 * dpo["pairs"] < dpo["reward_n"]


def test_memory_rows_say_what_each_method_keeps(state_of, tmp_path):
    """The value model is the policy without its output head, V x H = 16 x 16 weights, and with one of H + 1."""
    for name in ("grpo", "ppo", "ppo_head", "dpo"):
        run(state_of(config_of(name, optim=replace(MICRO.optim, steps=1)), tmp_path / name))
    grpo, ppo, head, dpo = (rows(tmp_path / name, "step")[0] for name in ("grpo", "ppo", "ppo_head", "dpo"))
    assert "value_bytes" not in grpo and "reference_bytes" not in grpo
    assert ppo["model_parameters"] == grpo["model_parameters"]
    assert ppo["value_parameters"] == ppo["model_parameters"] - 16 * 16 + 17
    assert ppo["value_optimizer_bytes"] >= 2 * ppo["value_bytes"]
    assert head["value_parameters"] == 17
    assert dpo["reference_bytes"] == dpo["initial_bytes"] == dpo["model_bytes"]


def test_the_peak_is_the_largest_over_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    ranks = SimpleNamespace(device=torch.device("cuda"), largest=lambda own: max(own, 9.0))
    assert memory_metrics({}, {}, ranks) == {"peak_bytes": 9}
