"""The loop, on a model of a few thousand parameters: only the method differs, and replay is whole."""

from dataclasses import replace

import pytest
import torch
from micro import MICRO, logps, rows
from safetensors import SafetensorError
from sweeps import sweep

from moe_rl.measure.catalogue import HEADS
from moe_rl.measure.logprobs import token_logps
from moe_rl.rollout.engine import seeded_generator
from moe_rl.routing import record_routes
from moe_rl.study.run import run_one
from moe_rl.training import (
    CheckpointError,
    EvalConfig,
    MethodConfig,
    ProbeConfig,
    RewardConfig,
    run,
    train,
    validate,
)
from moe_rl.training.batch import micro_batches
from moe_rl.training.checkpoint import save_checkpoint
from moe_rl.training.incidents import NotFiniteError
from moe_rl.training.loop import collect_batch, evaluate, update_policy
from moe_rl.training.other_methods import rescored


def method(**changes):
    return replace(MICRO, method=MethodConfig(**changes))


def weights(state):
    return {k: v.clone() for k, v in state.ranks.unwrap_model(state.policy).state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_first_update_is_on_policy_and_later_ones_are_not(state_of, tmp_path):
    run(state_of(MICRO, tmp_path))
    first, second = rows(tmp_path, "update")[:2]
    assert first["var_token_log_ratio"] < 1e-12 and first["clipped_tokens"] == 0 and abs(first["k3"]) < 1e-9
    assert second["var_token_log_ratio"] > 1e-8 and second["k3"] > 0
    assert all(r["rollout_logp_gap"] < 1e-4 for r in rows(tmp_path, "rollout"))
    assert [r["step"] for r in rows(tmp_path, "eval")] == [0, 2]


def test_groups_of_equal_rewards_are_counted_whatever_their_reward(state_of, tmp_path):
    """Of one group alone, the standard deviation of eight times 0.1 in float32 is 8e-9, not 0."""
    config = replace(MICRO, rollout=replace(MICRO.rollout, prompts=1, group_size=8))
    state = state_of(replace(config, optim=replace(MICRO.optim, num_minibatches=1)), tmp_path)
    state.task.reward = lambda problem, completion: 0.1
    assert not collect_batch(state).advantages.any()
    assert rows(tmp_path, "rollout")[0]["groups_equal"] == 1


def test_arms_share_prompts_samples_and_order(state_of, tmp_path):
    """What the policy samples at step 0, and on which rows it updates first, does not depend on the method."""
    for name, changes in {"grpo": {}, "replay": {"replay": "R2"}, "gspo": {"objective": "gspo"}}.items():
        run(state_of(method(**changes), tmp_path / name))
    start = [rows(tmp_path / name, "rollout")[0] for name in ("grpo", "replay", "gspo")]
    assert start[0] == start[1] == start[2]
    ends = [rows(tmp_path / name, "rollout")[1] for name in ("grpo", "replay", "gspo")]
    assert ends[0] != ends[2]


def test_replay_is_whole_in_every_update_and_absent_elsewhere(state_of, tmp_path):
    run(state_of(method(replay="R2"), tmp_path / "replay"))
    run(state_of(MICRO, tmp_path / "live"))
    assert all(r["replayed_rows"] == r["routed_rows"] > 0 for r in rows(tmp_path / "replay", "update"))
    assert all(r["replayed_rows"] == 0 < r["routed_rows"] for r in rows(tmp_path / "live", "update"))
    assert all(r["slots_changed"] == 0 < r["slots"] for r in rows(tmp_path / "replay", "update"))
    assert sum(r["slots_changed"] for r in rows(tmp_path / "live", "update")) > 0
    assert sum(r["slots_changed"] for r in rows(tmp_path / "replay", "probe")) > 0, "the probe routes live"


def test_replay_is_a_no_op_on_the_first_minibatch(state_of, tmp_path):
    run(state_of(method(replay="R2"), tmp_path / "replay"))
    run(state_of(MICRO, tmp_path / "live"))
    a, b = (rows(tmp_path / name, "update")[0] for name in ("replay", "live"))
    assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"]


def test_noise_moves_the_update_and_replay_is_immune_to_it(state_of, tmp_path):
    run(state_of(method(noise=1.0), tmp_path / "noise"))
    first = rows(tmp_path / "noise", "update")[0]
    assert first["var_token_log_ratio"] > 1e-8
    assert 0.2 < first["slots_changed"] / first["slots"] < 0.9, "the dose is measured"
    quiet = state_of(method(replay="R2"), tmp_path / "a")
    noisy = state_of(method(replay="R2", noise=1.0), tmp_path / "b")
    run(quiet), run(noisy)
    assert same(weights(quiet), weights(noisy))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_selection_noise_is_drawn_anew_in_every_update(state_of, tmp_path, monkeypatch):
    seeds = []

    def noted(*args, noise, **options):
        seeds.append(noise.initial_seed())
        return update_policy(*args, noise=noise, **options)

    monkeypatch.setattr("moe_rl.training.loop.update_policy", noted)
    run(state_of(replace(method(noise=1.0), probe=ProbeConfig(every=0)), tmp_path))
    assert len(seeds) == len(set(seeds)) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": replace(MICRO.rollout, group_size=2, lag=1, dynamic_sampling=2)},
        {"reward": RewardConfig(model="learned", initial_batches=2, retrain_every=1, epochs=1)},
    ],
    ids=["refills", "learned reward"],
)
def test_no_random_numbers_are_drawn_twice_in_a_run(state_of, tmp_path, monkeypatch, changes):
    drawn = []

    def noted(*key):
        drawn.append(key)
        return seeded_generator(*key)

    monkeypatch.setattr("moe_rl.training.state.seeded_generator", noted)
    run(state_of(replace(method(noise=1.0), probe=ProbeConfig(every=0), **changes), tmp_path))
    assert len(drawn) == len(set(drawn))
    purposes = {purpose.split("/")[0] for _, purpose, *_ in drawn}
    more = {"reward", "retrain"} if "reward" in changes else {"refill"}
    assert purposes == {"evaluate", "sample", "order", "noise", *more}


def test_held_out_prompts_are_evaluated_the_same_every_time_and_not_trained_on(state_of, tmp_path):
    state, asked = state_of(MICRO, tmp_path), []
    draw = state.task.problem

    def noted(rng, held_out=False):
        asked.append((held_out, draw(rng, held_out=held_out)))
        return asked[-1][1]

    state.task.problem = noted
    collect_batch(state)
    for state.step in (0, 1):
        evaluate(state)
    assert [held_out for held_out, _ in asked] == [False] * 4 + [True] * 16 and asked[4:12] == asked[12:]
    collect_batch(state)
    assert asked[20:] != asked[:4], "another step has prompts of its own"


@pytest.mark.parametrize("lag", [0, 2])
def test_interrupted_run_ends_as_the_uninterrupted_one(state_of, tmp_path, lag):
    config = replace(MICRO, optim=replace(MICRO.optim, steps=4), rollout=replace(MICRO.rollout, lag=lag))
    config = replace(config, method=MethodConfig(kl_coef=0.1), checkpoint_every=2, eval=EvalConfig(every=1, prompts=8))
    whole = state_of(config, tmp_path / "whole")
    run(whole)

    class Stop(Exception):
        pass

    def stop(row):
        if row["kind"] == "update" and row["step"] == 3:
            raise Stop

    broken = state_of(config, tmp_path / "broken")
    broken.log.listener = stop
    with pytest.raises(Stop):
        run(broken)
    assert rows(tmp_path / "broken")[-1]["step"] == 3
    resumed = state_of(config, tmp_path / "broken")
    assert resumed.step == 2 and max(r["step"] for r in rows(tmp_path / "broken", timed=True)) <= 2
    run(resumed)
    assert same(weights(whole), weights(resumed))
    assert rows(tmp_path / "whole") == rows(tmp_path / "broken")


def test_lag_trains_on_what_an_older_policy_sampled(state_of, tmp_path):
    config = replace(MICRO, optim=replace(MICRO.optim, steps=3), rollout=replace(MICRO.rollout, lag=1))
    state = state_of(config, tmp_path)
    run(state)
    updates = rows(tmp_path, "update")
    assert updates[0]["var_token_log_ratio"] < 1e-12, "the first batch is still on-policy"
    assert all(r["var_token_log_ratio"] > 1e-8 for r in updates[2:]), "later ones start off-policy"
    assert len(state.waiting) == 1
    # A batch's row has the step that samples it, as the catalogue says; what trains on it is a step later.
    sampled, probes = rows(tmp_path, "rollout"), rows(tmp_path, "probe")
    assert [row["step"] for row in sampled] == [0, 0, 1, 2] and {row["step"] for row in probes} == {0, 1, 2}
    assert "at the step that sampled it" in HEADS["rollout"] and "`lag` steps later" in HEADS["rollout"]


@pytest.mark.parametrize("arm", [{"objective": "grpo_decoupled", "replay": "R2"}, {"objective": "rspo"}])
def test_a_batch_that_waited_is_scored_again(state_of, tmp_path, monkeypatch, arm):
    rollout = replace(MICRO.rollout, lag=1, rescore=True)
    config = replace(MICRO, optim=replace(MICRO.optim, steps=3), rollout=rollout, method=MethodConfig(**arm))
    pairs = []

    def kept(state, batch):
        pairs.append((batch, again := rescored(state, batch)))
        said = logps(state, state.policy, batch)
        torch.testing.assert_close(again.old_logps, said.logps.detach())
        with record_routes(state.policy) as present, torch.no_grad():
            token_logps(state.policy, *batch.tokens)
        assert again.routes.equal(present.routes)
        return again

    monkeypatch.setattr("moe_rl.training.loop.rescored", kept)
    run(state_of(config, tmp_path))
    assert [batch.step for batch, _ in pairs] == [0, 0, 1]
    for batch, again in pairs[1:]:
        moved = (again.old_logps - batch.old_logps)[batch.completion_mask].abs().max()
        assert moved > 1e-4 and torch.equal(again.rollout_logps, batch.rollout_logps)
        torch.testing.assert_close(batch.rollout_logps, batch.old_logps, atol=1e-5, rtol=1e-5)
        assert torch.equal(again.advantages, batch.advantages)
        assert (again.route_scores is None) == (arm["objective"] != "rspo")
        assert again.route_scores is None or not torch.equal(again.route_scores, batch.route_scores)
    first = [row for row in rows(tmp_path, "update") if row["update"] == 1]
    assert all(row["var_token_log_ratio"] < 1e-12 for row in first), "the ratio is to the present weights"
    if arm["objective"] == "grpo_decoupled":
        assert first[0]["correction_weight_max"] == pytest.approx(1, abs=1e-5)
        assert first[2]["correction_weight_max"] > 1.0001, "the weight is of those over the sampler"


def test_what_waited_and_has_no_log_probability_any_more_is_named(state_of, tmp_path):
    state = state_of(replace(MICRO, rollout=replace(MICRO.rollout, lag=1, rescore=True)), tmp_path)
    batch = collect_batch(state)
    for weight in state.policy.parameters():
        weight.data.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="scoring: logps of 16 of 16 responses are not finite, first of row 0"):
        rescored(state, batch)


@pytest.mark.parametrize(
    "arm", [{"objective": "rspo", "replay": "R2"}, {"replay": "R3"}, sweep({}), sweep({"objective": "dapo"})]
)
def test_micro_batches_do_not_change_the_update(state_of, tmp_path, arm):
    """Responses of unequal length, so that rows change places and padding is left out."""
    ends, long = [], replace(MICRO.rollout, max_new_tokens=20)
    for size in (None, 3):
        config = replace(method(**arm), optim=replace(MICRO.optim, micro_batch=size, steps=1), rollout=long)
        state = state_of(config, tmp_path / str(size))
        run(state)
        ends.append((weights(state), rows(tmp_path / str(size), "update")))
    for name in ends[0][0]:
        torch.testing.assert_close(ends[0][0][name], ends[1][0][name], rtol=2e-4, atol=2e-5)
    whole, parts = ends[0][1][1], ends[1][1][1]
    assert parts["routed_rows"] < whole["routed_rows"], "padding was left out"
    for name in set(whole) - {"routed_rows", "replayed_rows", "lr", "kind"}:
        if isinstance(whole[name], float | int):
            assert parts[name] == pytest.approx(whole[name], rel=2e-3, abs=2e-5), name


def test_micro_batches_are_of_like_length_and_without_the_padding_that_all_share():
    lengths = torch.tensor([2, 5, 1, 4, 5, 3])
    mask = (torch.arange(8) >= 1) & (torch.arange(8) < 1 + lengths[:, None])
    found = [(rows.tolist(), (columns.start, columns.stop)) for rows, columns in micro_batches(mask, 2)]
    assert found == [([1, 4], (1, 6)), ([3, 5], (1, 5)), ([0, 2], (1, 3))]
    pairs = [rows.tolist() for rows, _ in micro_batches(mask, 2, together=2)]
    assert pairs == [[0, 1], [4, 5], [2, 3]], "by the longer of each"
    ((rows, columns),) = micro_batches(mask, None)
    assert rows.tolist() == list(range(6)) and columns == slice(0, 8), "as it is"


def test_frozen_routers_keep_their_weights_and_a_multiplier_moves_them_more(state_of, tmp_path):
    def router_shift(**changes):
        config = replace(MICRO, optim=replace(MICRO.optim, **changes))
        state = state_of(config, tmp_path / str(changes))
        before = weights(state)
        run(state)
        after = weights(state)
        names = [n for n in before if n.endswith("mlp.gate.weight")]
        assert len(names) == 2
        return sum(float((after[n] - before[n]).norm()) for n in names)

    assert router_shift(freeze_router=True) == 0.0
    assert router_shift(router_lr_multiplier=10.0) > 2 * router_shift()


def test_the_reference_holds_the_policy_back_and_iterative_grpo_moves_it(state_of, tmp_path):
    config = replace(method(kl_coef=0.5), optim=replace(MICRO.optim, steps=3, reference_reset_every=2))
    state = state_of(config, tmp_path)
    start = {k: v.clone() for k, v in state.reference.state_dict().items()}
    run(state)
    assert not same(start, state.reference.state_dict()), "reset at step 2"
    assert not same(weights(state), state.reference.state_dict()), "but not the last policy"


def test_aux_loss_is_off_and_said_to_be_unless_asked_for(state_of, tmp_path):
    run(state_of(MICRO, tmp_path / "off"))
    config = replace(MICRO, optim=replace(MICRO.optim, aux_loss_coef=0.1))
    run(state_of(config, tmp_path / "on"))
    off, on = rows(tmp_path / "off", "update")[0], rows(tmp_path / "on", "update")[0]
    assert off["aux_loss"] is None and off["aux_loss_coef"] == 0.0
    assert on["aux_loss"] > 0.9 and on["aux_loss_coef"] == 0.1
    assert on["grad_norm"] != off["grad_norm"]


def test_the_load_balancing_loss_of_micro_batches_is_their_mean_and_no_sum(state_of, tmp_path):
    """Without advantages it alone has a gradient; loads of a part are nearly those of all."""
    ends = []
    for size in (None, 4):
        optim = replace(MICRO.optim, aux_loss_coef=1.0, micro_batch=size, steps=1)
        state = state_of(replace(MICRO, optim=optim, probe=ProbeConfig(every=0)), tmp_path / str(size))
        state.task.reward = lambda *_: 0.5
        run(state)
        ends.append(rows(tmp_path / str(size), "update")[0])
    for name in ("aux_loss", "grad_norm"):
        assert ends[1][name] == pytest.approx(ends[0][name], rel=0.3), name


def test_a_damaged_checkpoint_is_named_and_nothing_is_overwritten(state_of, tmp_path):
    run(state_of(MICRO, tmp_path))
    path = tmp_path / "checkpoint" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"is damaged.*Delete .*checkpoint .*the policies in checkpoints/ too"):
        train(MICRO, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        train(MICRO, tmp_path)
    (tmp_path / "checkpoint" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is missing or unreadable"):
        train(MICRO, tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(state_of, tmp_path, monkeypatch):
    state = state_of(MICRO, tmp_path)
    run(state)
    saved = {p.name: p.read_bytes() for p in (tmp_path / "checkpoint").iterdir()}

    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint"):
        save_checkpoint(state)
    assert not (tmp_path / "checkpoint.new").exists()
    assert {p.name: p.read_bytes() for p in (tmp_path / "checkpoint").iterdir()} == saved


def test_probe_tables_agree_with_the_probe_rows(state_of, tmp_path):
    import pandas as pd

    run(state_of(MICRO, tmp_path))
    for row in rows(tmp_path, "probe"):
        table = pd.read_parquet(tmp_path / "tokens" / f"step_{row['step']:06d}.parquet")
        table = table[table["update"] == row["update"]]
        assert len(table) == row["tokens"]
        assert int((table.flips > 0).sum()) == row["tokens_changed"]
        assert int(table.flips.sum()) == row["sites_changed"]
        log_ratio = (table.logp_natural - table.old_logp).astype("float64")
        assert log_ratio.var() == pytest.approx(row["var_token_natural"], rel=1e-3, abs=1e-9)


def test_a_configuration_is_validated_once(tmp_path, monkeypatch):
    """By the first of `run_one` and `train` that sees it; another one, be it a copy with one change, by itself."""
    seen = []
    monkeypatch.setattr("moe_rl.training.validation.check_settings", seen.append)
    config = replace(MICRO, optim=replace(MICRO.optim, steps=1))
    run_one(config, str(tmp_path / "run"))  # a path may be text
    assert len(seen) == 1 and (tmp_path / "run" / "DONE").exists()
    validate(seen[0])
    assert len(seen) == 1
    validate(replace(seen[0], seed=1))
    assert len(seen) == 2


def test_plain_grpo_asks_nobody_but_the_old_policy(state_of, tmp_path):
    assert state_of(replace(MICRO, method=MethodConfig(replay="R2")), tmp_path / "plain").scorers == ()
    more = replace(MICRO, method=MethodConfig(objective="rspo", replay="R3", kl_coef=0.1))
    asked = [type(scorer).__name__ for scorer in state_of(more, tmp_path / "more").scorers]
    assert asked == ["EngineRoutes", "Reference"], "RSPO's scores are read in the pass under the engine's routes"
