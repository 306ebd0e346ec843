"""Levers on the routers: a bias that balances loads, a part of the routes that is replayed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from micro import MICRO, rows

from moe_rl.measure.catalogue import find
from moe_rl.objectives import group_advantages
from moe_rl.policy.lora import LoraConfig
from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    change_counts,
    expert_load,
    load_cv,
    record_routes,
    replay_routes,
)
from moe_rl.training import MethodConfig, ProbeConfig, run, validate
from moe_rl.training.batch import Batch
from moe_rl.training.levers import ExpertBias, check_choice, kept_rows, only_rows
from moe_rl.training.loop import collect_batch
from moe_rl.training.update import update_routing

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe, routes_of, tokens

QUIET = replace(MICRO, probe=ProbeConfig(every=0))
MICRO_KL = replace(QUIET, method=MethodConfig(kl_coef=0.1))


def with_optim(config=QUIET, **changes):
    return replace(config, optim=replace(config.optim, **changes))


def weights(state):
    return {name: value.clone() for name, value in state.policy.state_dict().items()}


def test_the_bias_follows_the_sign_of_the_load_error():
    bias = ExpertBias.__new__(ExpertBias)
    bias.rate, bias.values = 0.5, torch.zeros(2, 4)
    bias.update(torch.tensor([[8, 0, 2, 2], [3, 3, 3, 3]]))
    bias.update(torch.tensor([[3, 3, 3, 3], [0, 0, 0, 4]]))
    assert bias.values.tolist() == [[-0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]


def test_a_bias_evens_out_the_loads_of_a_policy_that_does_not_learn(state_of, tmp_path):
    """Learning rate near 0: what moves the loads is the bias."""
    config = with_optim(expert_bias_rate=0.002, learning_rate=1e-12, steps=6, num_minibatches=4)
    state = state_of(config, tmp_path)
    first = collect_batch(state)
    mask = first.attention_mask.bool()

    def unevenness():
        with state.expert_bias.applied(state.policy), torch.no_grad(), record_routes(state.policy) as recording:
            state.policy(input_ids=first.input_ids, attention_mask=mask.long())
        return float(load_cv(expert_load(recording.routes, mask)).mean())

    before = unevenness()
    run(state)
    assert unevenness() < 0.8 * before


@pytest.mark.parametrize("live", [False, True])
def test_under_replay_a_bias_follows_the_loads_it_is_told_to(state_of, tmp_path, live):
    """A policy that does not learn: replayed loads are those of scoring at all updates of a step, and only the live
    choice follows the bias, which moved after each of them."""
    config = with_optim(
        expert_bias_rate=0.05, expert_bias_loads="live" if live else "used", learning_rate=1e-12, num_minibatches=2
    )
    state = state_of(replace(config, method=MethodConfig(replay="R2")), tmp_path)
    batch = collect_batch(state)
    tokens = batch.attention_mask.bool()
    used, noise = expert_load(batch.routes, tokens), torch.Generator()
    for _ in range(3):
        with state.expert_bias.applied(state.policy):
            with torch.no_grad(), record_routes(state.policy) as recording:
                state.policy(input_ids=batch.input_ids, attention_mask=tokens.long())
            with torch.no_grad(), update_routing(state.policy, state.config.method, batch, noise, live) as count:
                state.policy(input_ids=batch.input_ids, attention_mask=tokens.long())
        assert torch.equal(count.loads[0], used)
        chosen = expert_load(recording.routes, tokens)  # of deeper sites for other hidden states than under replay
        assert torch.equal(count.loads[-1][0], (chosen if live else used)[0])
        state.expert_bias.update(count.loads[-1])
    assert not torch.equal(chosen[0], used[0])
    run(state_of(replace(config, method=MethodConfig(replay="R2")), tmp_path / "run"))  # and in a run
    assert all(row["replayed_rows"] == row["routed_rows"] for row in rows(tmp_path / "run", "update"))


def test_a_run_follows_the_loads_that_its_setting_names(state_of, tmp_path):
    ends = []
    for loads in ("used", "live"):
        config = with_optim(expert_bias_rate=0.05, expert_bias_loads=loads, num_minibatches=4)
        run(state := state_of(replace(config, method=MethodConfig(replay="R2")), tmp_path / loads))
        ends.append(state.expert_bias.values)
    assert not torch.equal(*ends)


def test_a_run_with_a_bias_resumes_to_the_same_numbers(state_of, tmp_path):
    config = with_optim(expert_bias_rate=0.01)
    run(whole := state_of(config, tmp_path / "whole"))
    run(state_of(replace(config, optim=replace(config.optim, steps=1)), tmp_path / "broken"))
    resumed = state_of(config, tmp_path / "broken")
    run(resumed)
    assert torch.equal(whole.expert_bias.values, resumed.expert_bias.values)
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())
    assert rows(tmp_path / "whole", "update") == rows(tmp_path / "broken", "update")


def test_kept_rows_are_those_of_the_least_margin_by_site():
    margins = torch.tensor([[[0.3, 1.0], [0.1, 2.0], [0.2, 3.0], [0.0, 0.0]]])
    tokens = torch.tensor([[True, True, True, False]])
    kept = kept_rows(margins, tokens, 2 / 3)
    assert kept[0].tolist() == [[False, True], [True, True], [True, False], [False, False]]
    assert torch.equal(kept_rows(margins, tokens, 0.6), kept), "1.8 of three rows are two"
    drawn = kept_rows(margins, tokens, 2 / 3, torch.Generator().manual_seed(0))
    assert drawn.sum((0, 1)).tolist() == [2, 2] and not bool(drawn[0, 3].any())
    many = torch.zeros(1, 99, 1), torch.ones(1, 99, dtype=torch.bool), 0.5
    again, other = (kept_rows(*many, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(kept_rows(*many, torch.Generator().manual_seed(0)), again) and not torch.equal(again, other)
    fixed = torch.tensor([[[torch.nan], [0.3]]])
    assert kept_rows(fixed, tokens[:, :2], 0.5).flatten().tolist() == [False, True], "without a choice comes last"
    routes = only_rows(RoutedExperts(torch.arange(8).view(1, 4, 2, 1), ("a", "b"), 8), kept)
    assert routes.ids[0, :, :, 0].tolist() == [[-1, 1], [2, 3], [4, -1], [-1, -1]]


def test_part_of_the_routes_is_replayed_and_the_rest_is_live(state_of, tmp_path):
    """Under heavy noise, which replay ignores: kept rows are the old policy's, others mostly are not."""
    method = MethodConfig(replay="R2", keep=0.5, noise=5.0)
    state = state_of(replace(QUIET, method=method), tmp_path)
    batch = collect_batch(state)
    tokens = batch.attention_mask.bool()
    assert batch.kept.sum((0, 1)).tolist() == [round(0.5 * int(tokens.sum()))] * 2
    noise = torch.Generator().manual_seed(0)
    with (
        torch.no_grad(),
        update_routing(state.policy, method, batch, noise) as count,
        record_routes(state.policy) as seen,
    ):
        state.policy(input_ids=batch.input_ids, attention_mask=tokens.long())
    assert count.replayed_rows == int(batch.kept.sum())
    same = (seen.routes.ids.sort(-1).values == batch.routes.ids.sort(-1).values).all(-1)
    assert bool(same[batch.kept].all()) and not bool(same[tokens[..., None] & ~batch.kept].all())
    assert int(count.loads.sum()) == int(tokens.sum()) * batch.routes.shape[2] * batch.routes.shape[3]
    assert count.slots_changed == change_counts(batch.routes, seen.routes, batch.completion_mask).slots_changed


def test_routes_of_some_sites_are_replayed_and_the_others_are_live(state_of, tmp_path):
    """Heavy noise re-routes the first site; the second is the old policy's, alone or with half of its rows."""
    for keep, part in ((1.0, "all"), (0.5, "half")):
        method = MethodConfig(replay="R2", keep=keep, keep_sites=(1,), noise=5.0)
        state = state_of(replace(QUIET, method=method), tmp_path / part)
        batch = collect_batch(state)
        tokens = batch.attention_mask.bool()
        assert batch.kept.sum((0, 1)).tolist() == [0, round(keep * int(tokens.sum()))]
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad(), update_routing(state.policy, method, batch, noise), record_routes(state.policy) as seen:
            state.policy(input_ids=batch.input_ids, attention_mask=tokens.long())
        same = (seen.routes.ids.sort(-1).values == batch.routes.ids.sort(-1).values).all(-1)
        assert bool(same[batch.kept].all()) and not bool(same[..., 0][tokens].all())
    state = state_of(replace(QUIET, method=MethodConfig(replay="R2", keep_sites=(0, 2))), tmp_path / "none")
    with pytest.raises(ValueError, match=r"keep_sites: no site \[2\]; this model has 2, from 0 to 1"):
        collect_batch(state)


def test_sites_that_are_all_routed_by_a_table_are_refused():
    """Of DeepSeek-V4's, a run of `keep_sites: [0]` replayed nothing and looked like one without a replay."""
    routes = routes_of(moe("DeepseekV4ForCausalLM"), tokens())
    fixed = len(routes.meta["hash_routed"])
    with pytest.raises(ValueError, match=rf"keep_sites: \[0\] route by a table .* sites that choose: \[{fixed}"):
        check_choice([0], routes)
    check_choice([0, fixed], routes)
    with pytest.raises(ValueError, match=r"keep_sites: no site \[99\]"):
        check_choice([0, 99], routes)


@pytest.mark.parametrize("part", [False, True])
def test_layers_that_are_routed_by_a_table_are_no_rows_to_replay(part):
    """DeepSeek-V4: the first layers look experts up by token id; a whole replay is one of the other sites."""
    model, ids = moe("DeepseekV4ForCausalLM"), tokens()
    routes = routes_of(model, ids)
    fixed = len(routes.meta["hash_routed"])
    assert 0 < fixed < len(routes.sites)
    kept = torch.rand(routes.shape[:3], generator=torch.Generator().manual_seed(0)) < 0.5
    wanted = only_rows(routes, kept) if part else routes
    with replay_routes(model, wanted, once=True) as replay, torch.no_grad():
        model(input_ids=ids)
    forced = int((~wanted.live[..., fixed:]).sum())
    assert (replay.replayed_rows, replay.live_rows) == (forced, kept[..., fixed:].numel() - forced)
    with (
        pytest.raises(RoutingError, match="expects one forward of the whole batch, and nothing more"),
        replay_routes(model, wanted, once=True),
        torch.no_grad(),
    ):
        model(input_ids=ids)
        model(input_ids=ids)
    zeros, real = torch.zeros(ids.shape), torch.ones_like(ids).bool()
    batch = Batch(ids, real, real, zeros[:, 0], zeros[:, 0], zeros, routes, zeros, None, 0)
    with update_routing(model, MethodConfig(replay="R2"), batch, torch.Generator()) as count, torch.no_grad():
        model(input_ids=ids)
    assert count.replayed_rows == count.routed_rows == kept[..., fixed:].numel()


def test_a_part_of_all_is_all(state_of, tmp_path):
    run(state_of(replace(QUIET, method=MethodConfig(replay="R2")), tmp_path / "all"))
    state = state_of(replace(QUIET, method=MethodConfig(replay="R2", keep=1 - 1e-9)), tmp_path / "part")
    run(state)

    whole, part = (rows(tmp_path / name, "update") for name in ("all", "part"))
    assert [row["slots_changed"] for row in part] == [0] * len(whole)
    for name in ("loss", "grad_norm", "k3"):  # padding is live, so that experts sum over other rows
        assert [row[name] for row in part] == pytest.approx([row[name] for row in whole], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(QUIET, method=MethodConfig(keep=0.5)), "method.keep: only replay R2 can replay a part"),
        (replace(QUIET, method=MethodConfig(replay="R2", keep_by="random")), "method.keep_by"),
        (replace(QUIET, method=MethodConfig(keep_sites=(0,))), "method.keep_sites: only for replay R2"),
        (
            replace(QUIET, method=MethodConfig(replay="R2", keep_sites=())),
            "method.keep_sites: one or more different sites",
        ),
        (with_optim(freeze_router=True, router_lr_multiplier=0.1), "router_lr_multiplier: 0.1 has no effect"),
        (
            replace(
                with_optim(freeze_router=True), model=replace(MICRO.model, lora=LoraConfig(rank=2, train_router=True))
            ),
            "model.lora.train_router: has no effect",
        ),
        (with_optim(expert_bias_rate=0.1, expert_bias_loads="live"), "has an effect only with an expert bias"),
        (with_optim(MICRO_KL, expert_bias_rate=0.1, reference_reset_every=1), "cannot be reset"),
        (
            with_optim(replace(MICRO_KL, model=replace(QUIET.model, lora=LoraConfig(rank=2))), expert_bias_rate=0.1),
            "its adapters off",
        ),
        (
            replace(
                with_optim(expert_bias_rate=0.1),
                rollout=replace(QUIET.rollout, engine=replace(QUIET.rollout.engine, kind="hf")),
            ),
            "rollout.engine.kind",
        ),
    ],
)
def test_levers_that_mean_nothing_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)


# -- what DAPO adds to the rollout -------------------------------------------------------------------------------------


def test_dynamic_sampling_trains_on_groups_with_a_signal_and_counts(state_of, tmp_path):
    method = MethodConfig(objective="dapo")
    rollout = replace(QUIET.rollout, group_size=2, dynamic_sampling=5)
    run(state_of(replace(QUIET, method=method, rollout=replace(rollout, dynamic_sampling=0)), tmp_path / "plain"))
    run(state_of(replace(QUIET, method=method, rollout=rollout), tmp_path / "refilled"))
    plain, full = (rows(tmp_path / name, "rollout") for name in ("plain", "refilled"))
    assert any(row["groups_equal"] for row in plain), "else there is nothing to see"
    assert full[0]["groups_replaced"] > 0 and full[0]["groups_equal"] < plain[0]["groups_equal"]
    for row in full:
        assert row["refills"] <= 5 and row["reward_n"] == 2 * row["groups_sampled"] >= 8
        assert row["kept_reward"] == pytest.approx(0.5) or row["groups_equal"] > 0, "pairs of 0 and 1"
    assert "refills" not in plain[0]
    assert "replaced ones left out" in find("rollout", "groups_equal").definition


def test_overlong_responses_pay_in_the_advantages_and_not_in_the_reward(state_of, tmp_path):
    rollout = replace(QUIET.rollout, overlong_buffer=3)
    state = state_of(replace(QUIET, rollout=rollout), tmp_path / "on")
    batch = collect_batch(state)
    plain = collect_batch(state_of(QUIET, tmp_path / "off"))
    assert torch.equal(batch.rewards, plain.rewards) and torch.equal(batch.input_ids, plain.input_ids)
    lengths = batch.completion_mask.sum(1)
    paid = batch.rewards - ((lengths - (state.max_new_tokens - 3)) / 3).clamp(0, 1)
    torch.testing.assert_close(batch.advantages, group_advantages(paid, 4))
    assert not torch.equal(batch.advantages, plain.advantages)
    (row,) = rows(tmp_path / "on", "rollout")
    assert row["overlong_penalty"] == pytest.approx(float((paid - batch.rewards).mean())) and row["overlong"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(QUIET, method=MethodConfig(objective="ppo"), rollout=replace(QUIET.rollout, dynamic_sampling=1)),
            "gae",
        ),
        (replace(QUIET, rollout=replace(QUIET.rollout, overlong_buffer=999)), "at most the length limit"),
        (
            replace(QUIET, method=MethodConfig(objective="sft"), rollout=replace(QUIET.rollout, overlong_buffer=1)),
            "'one'",
        ),
    ],
)
def test_options_of_dapo_that_mean_nothing_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)
