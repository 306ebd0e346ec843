"""Two engines in one loop: R3, anchors, the measured gap, and weight syncs that stop the run when they are wrong."""

import random
from dataclasses import replace

import pytest
import torch
from micro import MICRO, logps, rows

from moe_rl.measure.catalogue import find
from moe_rl.rollout import engine
from moe_rl.rollout.completions import unrouted_tokens
from moe_rl.rollout.engine import ModelEngine, forward_logps
from moe_rl.rollout.engine_config import check_routes
from moe_rl.rollout.engines import EngineConfig, EngineError, HuggingFaceEngine
from moe_rl.routing import RoutedExperts, RoutingError, replay_routes
from moe_rl.training import EvalConfig, MethodConfig, ProbeConfig, rollout_engine, run, validate
from moe_rl.training.loop import collect_batch
from moe_rl.training.rollout_engine import probed_tensors, rebuilt

MICRO = replace(
    MICRO,
    model=replace(MICRO.model, tiny=replace(MICRO.model.tiny, initializer_range=0.3)),
    rollout=replace(MICRO.rollout, engine=EngineConfig(kind="hf", router_format="int4")),
    optim=replace(MICRO.optim, steps=1),
    eval=EvalConfig(every=0, prompts=2),
    probe=ProbeConfig(every=0),
)
PROBED = ProbeConfig(sequences=16, tokens_every=0)


def changed(engine=None, method=None, **optim):
    rollout = replace(MICRO.rollout, engine=EngineConfig(**engine)) if engine is not None else MICRO.rollout
    return replace(MICRO, rollout=rollout, method=MethodConfig(**(method or {})), optim=replace(MICRO.optim, **optim))


def finished(state_of, folder, config):
    state = state_of(config, folder)
    run(state)
    return state


def test_an_fp32_engine_is_a_control(state_of, tmp_path):
    """No slot differs, no gap, and the run is that of the training model sampling itself."""
    finished(state_of, tmp_path / "copy", changed({"kind": "hf", "dtype": "float32"}, steps=2))
    finished(state_of, tmp_path / "self", changed({}, steps=2))
    engines = rows(tmp_path / "copy", "engine", pair="engines")
    assert len(engines) == 2 and all(r["slots_changed"] == 0 < r["slots"] for r in engines)
    assert all(r["gap_max"] < 1e-4 and r["sync_gap"] < 1e-5 for r in engines)
    assert not rows(tmp_path / "self", "engine"), "one engine: nothing to compare"
    for a, b in zip(rows(tmp_path / "copy", "update"), rows(tmp_path / "self", "update"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_the_gap_of_a_sync_is_what_its_definition_says(state_of, tmp_path):
    """A mean, not the largest of the sync probe's tokens."""
    state = state_of(changed({"kind": "hf"}), tmp_path)
    guard = state.sync_guard
    mask = guard.probe.completion_mask
    of_engine, of_model = (logps(state, x, guard.probe).logps[mask] for x in (guard.engine.model, guard.model))
    apart = (of_engine - of_model).detach().abs()
    assert guard.gap == pytest.approx(float(apart.mean()), rel=1e-4) and 2 * apart.mean() < apart.max()
    assert find("engine", "sync_gap").definition.startswith("mean abs(log pi - log mu)")


def test_the_sync_probe_is_scored_in_parts_of_a_micro_batch(state_of, tmp_path, monkeypatch):
    sizes = []

    def counted(model, part, temperature):
        sizes.append(len(part))
        return forward_logps(model, part, temperature)

    whole = state_of(changed({"kind": "hf"}), tmp_path / "whole").sync_guard
    monkeypatch.setattr(rollout_engine, "forward_logps", counted)
    monkeypatch.setattr(engine, "forward_logps", counted)  # as ModelEngine.logps scores
    parts = state_of(changed({"kind": "hf"}, micro_batch=3), tmp_path / "parts").sync_guard
    assert set(sizes) == {3, 2} and sizes.count(3) == 2 * sizes.count(2), "of 8 responses 3, 3 and 2"
    assert torch.equal(parts.probe.input_ids, whole.probe.input_ids)
    assert parts.gap == pytest.approx(whole.gap, rel=0.05)  # sums of other shapes in bf16


def test_r2_leaves_the_first_update_unaltered_and_r3_alters_it(state_of, tmp_path):
    for replay in ("none", "R2", "R3"):
        finished(state_of, tmp_path / replay, changed(method={"replay": replay}))
    live, r2, r3 = (rows(tmp_path / replay, "update")[0] for replay in ("none", "R2", "R3"))
    assert (r2["loss"], r2["grad_norm"]) == (live["loss"], live["grad_norm"])
    assert abs(r3["grad_norm"] - live["grad_norm"]) > 1e-4 * live["grad_norm"]
    assert r2["slots_changed"] == 0 < r3["slots_changed"]
    # The gap of a rollout row is to the old policy routed live, as its definition says, not to the one that R3 scores.
    (sampled,), (live, replayed) = (rows(tmp_path / "R3", kind) for kind in ("rollout", "engine"))
    assert (
        sampled["rollout_logp_gap"]
        == pytest.approx(live["gap_mean"], rel=1e-4)
        != pytest.approx(replayed["gap_mean"], rel=1e-2)
    )
    assert "routed live, under R3 and PR2 too" in find("rollout", "rollout_logp_gap").definition
    # The old policy was scored under the same routes, so the first ratio is 1 all the same.
    assert r3["var_token_log_ratio"] < 1e-12 and r3["clipped_tokens"] == 0


def test_r3_forces_all_but_padding_and_last_tokens_in_every_update(state_of, tmp_path):
    state = finished(state_of, tmp_path, changed(method={"replay": "R3"}))
    updates = rows(tmp_path, "update")
    live = 0
    batch = collect_batch(state)
    for index in range(len(batch)):
        real = int(batch.attention_mask[index].sum())
        live += batch.attention_mask.shape[1] - (real - 1)
    assert int(batch.rollout_routes.live.sum()) == 2 * live  # two sites
    for row in updates:
        assert 0 < row["replayed_rows"] < row["routed_rows"]
        assert row["routed_rows"] - row["replayed_rows"] >= 2 * 8  # at least each response's last token, two sites


def test_r3_on_the_training_models_own_routes_changes_nothing(state_of, tmp_path):
    finished(state_of, tmp_path / "live", changed({}))
    finished(state_of, tmp_path / "R3", changed({}, {"replay": "R3"}))
    live, r3 = rows(tmp_path / "live", "update"), rows(tmp_path / "R3", "update")
    assert r3[0]["grad_norm"] == pytest.approx(live[0]["grad_norm"], rel=1e-4)
    assert r3[0]["replayed_rows"] > 0 == r3[0]["slots_changed"]


def test_ratios_anchored_on_the_rollout_begin_with_the_gap_between_the_engines(state_of, tmp_path):
    """One minibatch and no step behind it: the variance that the loss sees is that of the engines' rows."""
    for replay, pair in (("none", "engines"), ("R3", "engines_replayed")):
        folder = tmp_path / replay
        finished(state_of, folder, changed(method={"replay": replay, "anchor": "rollout"}, num_minibatches=1))
        (update,), (gap,) = rows(folder, "update"), rows(folder, "engine", pair=pair)
        assert gap["var_token"] > 1e-8
        assert update["var_token_log_ratio"] == pytest.approx(gap["var_token"], rel=1e-3)
        assert update["var_sequence_log_ratio"] == pytest.approx(gap["var_sequence"], rel=1e-3)
    finished(state_of, tmp_path / "old", changed(method={"anchor": "old"}, num_minibatches=1))
    assert rows(tmp_path / "old", "update")[0]["var_token_log_ratio"] < 1e-12


def test_the_gap_does_not_depend_on_the_method_and_replay_narrows_it(state_of, tmp_path):
    for name, method in {"a": {"replay": "R3"}, "b": {"objective": "gspo", "anchor": "rollout"}}.items():
        finished(state_of, tmp_path / name, replace(changed(method=method), probe=PROBED))
    for pair in ("engines", "engines_replayed"):
        assert rows(tmp_path / "a", "engine", pair=pair) == rows(tmp_path / "b", "engine", pair=pair)
    (live,), (forced,) = (rows(tmp_path / "a", "engine", pair=p) for p in ("engines", "engines_replayed"))
    assert live["sites_changed"] > 0 and forced["var_token"] < live["var_token"]
    sampled = rows(tmp_path / "a", "update")[0]["tokens"] + rows(tmp_path / "a", "update")[1]["tokens"]
    assert live["measured"] == forced["measured"] == sampled > live["tokens"] and "tokens" not in forced
    new = rows(tmp_path / "a", "engine", pair="rollout_to_new")
    assert [r["update"] for r in new] == [1, 2] and new[1]["k3"] > 0
    probes = rows(tmp_path / "a", "probe")
    assert probes[0]["tokens"] == sum(rows(tmp_path / "a", "update")[i]["tokens"] for i in (0, 1))
    assert new[0]["tokens"] == probes[0]["tokens"] - 16, "last tokens have no route of the engine's"


def test_the_probe_measures_natural_routing_in_r3_arms_too(state_of, tmp_path):
    """At a learning rate of nearly 0 the probe sees no change, though old log-probabilities are under forced routes."""
    finished(state_of, tmp_path, replace(changed(method={"replay": "R3"}, learning_rate=1e-12), probe=PROBED))
    (_, probe) = rows(tmp_path, "probe")
    assert probe["slots_changed"] == 0 and probe["var_token_natural"] < 1e-10
    assert rows(tmp_path, "update")[0]["slots_changed"] > 0


def test_an_interrupted_r3_run_ends_as_the_uninterrupted_one(state_of, tmp_path):
    """With lag, so that a batch waits in the checkpoint with its rollout's routes."""
    config = changed(method={"replay": "R3", "anchor": "rollout"}, steps=3)
    config = replace(config, rollout=replace(config.rollout, lag=1))
    whole = finished(state_of, tmp_path / "whole", config)

    class Stop(Exception):
        pass

    def stop(row):
        if row["kind"] == "update" and row["step"] == 1:
            raise Stop

    broken = state_of(config, tmp_path / "broken")
    broken.log.listener = stop
    with pytest.raises(Stop):
        run(broken)
    resumed = finished(state_of, tmp_path / "broken", config)
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name
    for kind in ("rollout", "update", "engine"):
        assert rows(tmp_path / "whole", kind) == rows(tmp_path / "broken", kind)


# -- routes with holes ---------------------------------------------------------------------------------------------


def test_tokens_without_a_route():
    # left padding, three tokens of which the last was never fed back, right padding
    assert unrouted_tokens(torch.tensor([[0, 1, 1, 1, 0]]).bool()).int().tolist() == [[1, 0, 0, 1, 1]]


def test_routes_of_an_engine_that_lost_or_invented_some_are_refused(state_of, tmp_path):
    state = state_of(MICRO, tmp_path)
    problems = [state.task.problem(random.Random(i)) for i in range(4)]
    rollout = state.engine.sample(
        problems,
        group_size=4,
        max_new_tokens=state.max_new_tokens,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        record_routes=True,
    )
    ids, routes = rollout.routes.ids, rollout.routes
    assert check_routes(rollout) is routes
    prompt, last = ids.clone(), ids.clone()
    b, t = rollout.attention_mask.nonzero()[0].tolist()
    prompt[b, t, 1] = -1
    last[0, int(rollout.attention_mask[0].nonzero()[-1])] = torch.arange(2)
    for wrong, message in (
        (prompt, r"1 of .* first: sequence 0, token 0, site model\.layers\.1\.mlp\.gate has no route"),
        (last, "2 of"),
    ):
        broken = replace(rollout, routes=RoutedExperts(wrong, routes.sites, routes.num_experts))
        with pytest.raises(RoutingError, match=message):
            check_routes(broken)
    with pytest.raises(RoutingError, match="gave no routes"):
        check_routes(replace(rollout, routes=None))


def test_a_forward_outside_replay_or_twice_under_it_is_an_error(state_of, tmp_path):
    state = state_of(changed(method={"replay": "R3"}), tmp_path)
    batch = collect_batch(state)
    with (
        pytest.raises(RoutingError, match=r"replay forced 0 .*expects one forward"),
        replay_routes(state.policy, batch.rollout_routes, once=True),
    ):
        pass
    with (
        pytest.raises(RoutingError, match="expects one forward"),
        replay_routes(state.policy, batch.rollout_routes, once=True),
    ):
        logps(state, state.policy, batch)
        logps(state, state.policy, batch)


# -- wrong syncs ---------------------------------------------------------------------------------------------------


class Wrong(HuggingFaceEngine):
    """Syncs what `distort` leaves of the weights."""

    def sync(self, weights, version):
        super().sync(self.distort(dict(weights), version), version)


class Skips(Wrong):
    name = "model.layers.1.self_attn.k_norm.weight"

    def distort(self, weights, version):
        return {**weights, self.name: self.model.state_dict()[self.name].clone()}


class SwapsTwo(Wrong):
    def distort(self, weights, version):
        a, b = (f"model.layers.{i}.mlp.experts.down_proj" for i in (0, 1))
        return {**weights, a: weights[b], b: weights[a]}


class RollsExperts(Wrong):
    def distort(self, weights, version):
        name = "model.layers.0.mlp.experts.gate_up_proj"
        return {**weights, name: weights[name].roll(1, 0)}


class StopsListening(Wrong):
    """Right at first; from step 1 on nothing arrives any more."""

    def distort(self, weights, version):
        return weights if version < 1 else {k: v.clone() for k, v in self.model.state_dict().items()}


class BreaksDown(Wrong):  # right at first; from step 1 on one tensor arrives as NaN
    def distort(self, weights, version):
        return weights if version < 1 else {**weights, "lm_head.weight": weights["lm_head.weight"] * float("nan")}


class ShiftsRoutes(HuggingFaceEngine):
    """Says of every token but the first what the routers chose for the one before it."""

    def sample(self, *args, **options):
        rollout = super().sample(*args, **options)
        if rollout.routes is not None:  # None: the probe of a sync
            ids = rollout.routes.ids
            for row, real in zip(ids, rollout.attention_mask, strict=True):
                routed = real.nonzero()[:-1, 0]
                row[routed] = row[routed].roll(1, 0)
            rollout = replace(rollout, routes=rollout.routes.with_ids(ids, rollout.input_ids))
        return rollout


def engine_is(monkeypatch, kind):
    monkeypatch.setattr(rollout_engine, "make_engine", lambda config, model, tok, *_: kind(model, tok, config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_does_not_arrive_is_named_before_the_first_step(state_of, tmp_path, monkeypatch, dtype):
    engine_is(monkeypatch, Skips)
    with pytest.raises(
        EngineError, match=r"1 of the tensors tried do not reach .* model\.layers\.1\.self_attn\.k_norm"
    ):
        state_of(changed({"kind": "hf", "dtype": dtype}), tmp_path)


@pytest.mark.parametrize("kind", [SwapsTwo, RollsExperts])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_in_the_wrong_place_stop_the_run(state_of, tmp_path, monkeypatch, kind, dtype):
    engine_is(monkeypatch, kind)
    closed = []
    monkeypatch.setattr(kind, "close", lambda engine: closed.append(engine))
    with pytest.raises(EngineError, match=r"away from those of before\. Tensors that land in another's place"):
        state_of(changed({"kind": "hf", "dtype": dtype}), tmp_path)
    assert len(closed) == 1, "nobody else can: there is no state yet"


def test_an_engine_that_stops_listening_stops_the_run(state_of, tmp_path, monkeypatch):
    engine_is(monkeypatch, StopsListening)
    state = state_of(changed({"kind": "hf", "dtype": "float32"}, steps=3), tmp_path)
    with pytest.raises(EngineError, match=r"weight sync 1: .* differ by .* tolerance 0\.001 .*does not hold"):
        run(state)
    assert {r["step"] for r in rows(tmp_path, "update")} == {0}, "nothing was trained on its samples"


def test_an_engine_that_says_nan_stops_the_run(state_of, tmp_path, monkeypatch):
    engine_is(monkeypatch, BreaksDown)
    with pytest.raises(EngineError, match=r"weight sync 1: .* differ by nan .*does not hold"):
        run(state_of(changed({"kind": "hf", "dtype": "float32"}, steps=2), tmp_path))


def test_a_gap_that_an_engine_built_anew_has_too_is_arithmetic_and_no_wrong_sync(state_of, tmp_path):
    state = state_of(changed({"kind": "hf", "dtype": "bfloat16"}, steps=2), tmp_path)
    state.sync_guard.tolerance = 0.0  # as if routers that flip at ties had opened the gap since start-up
    run(state)
    assert state.sync_guard.gap > 0
    assert {r["step"] for r in rows(tmp_path, "update")} == {0, 1}


def test_an_engine_loaded_with_other_weights_is_refused(state_of, tmp_path, monkeypatch):
    def other(model, tokenizer, config):
        engine = HuggingFaceEngine(model, tokenizer, config)
        with torch.no_grad():
            engine.model.lm_head.weight.mul_(-1)
        return engine

    engine_is(monkeypatch, other)
    with pytest.raises(
        EngineError, match=r"on the weights that it was just loaded with; its arithmetic explains at most 0\.5"
    ):
        state_of(changed({"kind": "hf"}), tmp_path)


def test_the_start_up_test_leaves_the_policy_as_it_was(state_of, tmp_path):
    a = state_of(changed({}), tmp_path / "a").policy.state_dict()
    b = state_of(MICRO, tmp_path / "b").policy.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_engine_of_ones_own_is_asked_to_say_how_it_is_made_anew_for_a_sharded_model():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(EngineError, match=r"no second ModelEngine can be built: give the class a method renewed\(\)"):
        rebuilt(ModelEngine(model, None), model)


def test_of_many_tensors_one_of_each_kind_is_tried_at_different_depths():
    weights = {f"layers.{i}.{kind}.weight": torch.zeros(1) for i in range(100) for kind in ("q", "k", "gate")}
    chosen = probed_tensors({**weights, "head.weight": torch.zeros(1), "count": torch.zeros(1, dtype=torch.int64)})
    assert sorted(name.rpartition("layers.")[2].split(".", 1)[-1] for name in chosen) == [
        "gate.weight",
        "k.weight",
        "q.weight",
        "weight",
    ]
    assert len({name.split(".")[1] for name in chosen}) == 4


# -- configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed({"kind": "remote"}), r"rollout\.engine\.kind: expected one of self, hf"),
        (
            changed(method={"objective": "sft"}),
            "method.source: a rollout engine and replay R3 or PR2 need responses of the current",
        ),
        (changed({}, {"objective": "rft", "replay": "R3"}), "method.source: a rollout engine and replay R3"),
    ],
)
def test_what_cannot_run_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_routes_that_are_shifted_by_one_token_stop_the_run(state_of, tmp_path, monkeypatch):
    engine_is(monkeypatch, ShiftsRoutes)
    state = state_of(changed({"kind": "hf", "dtype": "float32"}, {"replay": "R3"}), tmp_path)
    with pytest.raises(RoutingError, match="shifted by one token: row t holds those of token t-1"):
        collect_batch(state)
