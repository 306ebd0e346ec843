"""The vLLM engine without vLLM: our server and client, with a stand-in for the package or for the server.

The real one is in test_vllm.py, which wants an environment that has it.
"""

import copy
import random
import sys

import numpy as np
import pytest
import torch
from fake_python import SERVER, fake_python, lent
from safetensors import safe_open

from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import make_task
from moe_rl.rollout.engine import ModelEngine, forward_logps
from moe_rl.rollout.engines import EngineConfig, EngineError, check_engine, check_engine_here, make_engine
from moe_rl.rollout.tasks import TaskConfig
from moe_rl.rollout.vllm_engine import VllmEngine, write_hub
from moe_rl.routing import RoutingError, record_routes
from moe_rl.training.rollout_engine import SyncGuard, probed_tensors, sync_probe

TASK = make_task(TaskConfig(name="mod_chain", options={"steps": 1}))
TOKENIZER = char_tokenizer(TASK.alphabet)
TINY = TinyConfig(
    hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8, initializer_range=0.3
)


@pytest.fixture(scope="module")
def model():
    return build_tiny(TINY, TOKENIZER).eval()


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_VLLM_STALE", str(folder / "stale"))
        patch.setenv("MOE_RL_VLLM_PYTHON", fake_python(folder))
        engine = make_engine(EngineConfig(kind="vllm", dtype="float32", timeout=240.0), model, TOKENIZER)
    engine.stale = folder / "stale"
    yield engine
    engine.close()


@pytest.fixture
def synced(engine, model):
    engine.sync(model.state_dict(), 0)
    return engine


def respond(engine, temperature=1.0, seed=1, group_size=4, new=7):
    rng = random.Random(0)
    return engine.sample(
        [TASK.problem(rng) for _ in range(3)],
        group_size=group_size,
        max_new_tokens=new,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
        record_routes=True,
    )


def moved(model, scale=0.3):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other


def routes_of(model, rollout):
    mask = rollout.attention_mask
    with torch.no_grad(), record_routes(model) as recording:
        model(
            input_ids=rollout.input_ids,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        )
    return recording.routes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_routes_are_those_of_sampling(synced, model, temperature):
    rollout = respond(synced, temperature)
    mask = rollout.completion_mask
    assert bool(mask.any(1).all()) and (rollout.logps[~mask] == 0).all()
    exact = forward_logps(model, rollout, temperature)
    torch.testing.assert_close(rollout.logps, exact, rtol=0, atol=2e-5)
    torch.testing.assert_close(synced.logps(rollout, temperature), exact, rtol=0, atol=2e-5)
    assert (forward_logps(model, rollout, 1.7) - exact)[mask].abs().max() > 1e-2
    own = routes_of(model, rollout)
    real = rollout.attention_mask
    last = real & (real.long().flip(1).cumsum(1).flip(1) == 1)
    assert rollout.routes.sites == own.sites and rollout.routes.num_experts == own.num_experts
    assert torch.equal((rollout.routes.ids >= 0).all(-1).all(-1), real & ~last)
    live = rollout.routes.ids >= 0
    assert torch.equal(rollout.routes.ids[live].long(), own.ids.long()[live])


def test_a_seed_says_what_is_sampled_whatever_else_is_in_the_batch(synced):
    first, again, other = respond(synced), respond(synced), respond(synced, seed=2)
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(first.logps, again.logps)
    assert not (first.input_ids.shape == other.input_ids.shape and torch.equal(first.input_ids, other.input_ids))
    assert len({tuple(row.tolist()) for row in first.input_ids[:4]}) > 1, "one seed for each response of a group"
    generator = torch.Generator().manual_seed(1)
    torch.rand(3 * 4 * 7, generator=generator, dtype=torch.float64)
    left = torch.Generator().manual_seed(1)
    synced.sample([TASK.problem(random.Random(0))] * 3, group_size=4, max_new_tokens=7, generator=left, temperature=1.0)
    assert torch.equal(left.get_state(), generator.get_state()), "as many numbers as other engines draw"


def test_completions_end_at_an_end_token_or_the_limit(synced):
    rollout = respond(synced, temperature=3.0, group_size=12)
    ends = TOKENIZER.eos_token_id
    for row, mask, finished in zip(rollout.input_ids, rollout.completion_mask, rollout.finished, strict=True):
        tokens = row[mask].tolist()
        assert ends not in tokens[:-1] and (tokens[-1] == ends) == bool(finished)
        assert finished or len(tokens) == 7
    assert 0 < int(rollout.finished.sum()) < len(rollout), "both happen"


def test_a_text_that_the_engine_would_cut_off_is_refused(synced, monkeypatch):
    monkeypatch.setitem(synced.settings, "max_model_len", 8)
    said = r"and 7 new ones .*, and 1 more with which .* are more than the 8 positions that the engine has"
    with pytest.raises(ValueError, match=said):
        respond(synced)


def test_greedy_tokens_are_the_models(synced, model):
    own, found = respond(ModelEngine(model, TOKENIZER), 0.0), respond(synced, 0.0)
    assert torch.equal(own.input_ids, found.input_ids) and own.completions == found.completions
    torch.testing.assert_close(found.logps, own.logps, rtol=0, atol=2e-5)


def test_a_sync_brings_other_weights_and_nothing_stays_on_disk(synced, model):
    rollout, other = respond(synced), moved(model)
    synced.sync(other.state_dict(), 7)
    assert synced.version == 7
    torch.testing.assert_close(synced.logps(rollout, 1.0), forward_logps(other, rollout), rtol=0, atol=2e-5)
    assert [path.name for path in synced.server.folder.iterdir()] == ["stderr"]


def test_what_another_machine_lends_is_the_same_bit_for_bit(synced, model, tmp_path):
    with lent(fake_python(tmp_path)) as host:
        config = EngineConfig(kind="vllm", dtype="float32", timeout=240.0, url=host.url)
        engine = make_engine(config, model, TOKENIZER)
        try:
            here, there = respond(synced), respond(engine)
            assert torch.equal(here.input_ids, there.input_ids) and torch.equal(here.logps, there.logps)
            assert torch.equal(here.routes.ids, there.routes.ids)
            scored, other = engine.logps(here), moved(model)
            assert torch.equal(synced.logps(here), scored)
            for one in (synced, engine):
                one.sync(other.state_dict(), 1)
            assert torch.equal(synced.logps(here), engine.logps(here))
            assert not torch.equal(engine.logps(here), scored)
            first = engine.server
            assert list(first.folder.iterdir()) == [] and engine.renewed() is engine and engine.server is not first
            assert torch.equal(engine.logps(here), scored), "of the model's weights"
        finally:
            engine.close()


def test_the_guard_stops_at_reloads_that_change_nothing(synced, model):
    probe = sync_probe(synced, TASK, 7, 1.0)
    synced.stale.touch()
    try:
        with pytest.raises(
            EngineError, match=r"tried do not reach the rollout engine, first \S+, \S+, \S+: after each"
        ):
            SyncGuard(synced, model, probe, 1.0, build=lambda: synced)
    finally:
        synced.stale.unlink()


def test_where_a_sync_is_slow_one_tensor_of_each_kind_is_tried(model):
    weights = model.state_dict()
    few, kinds = probed_tensors(weights, 0), {name.replace(".0.", ".*.").replace(".1.", ".*.") for name in weights}
    assert len(few) == len(kinds) < len(probed_tensors(weights)) and VllmEngine.slow_sync


def test_weights_are_written_under_the_names_of_the_architectures_checkpoints(model, tmp_path):
    write_hub(model, model.state_dict(), tmp_path / "hub")
    with safe_open(tmp_path / "hub" / "model.safetensors", "pt") as file:
        up = file.get_tensor("model.layers.1.mlp.experts.5.up_proj.weight")
    assert torch.equal(up, model.model.layers[1].mlp.experts.gate_up_proj[5, 8:])
    weights = dict(model.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"][:3]
    with pytest.raises(EngineError, match=r"model.norm.weight is \[3\] in the training model and \[16\] in the engine"):
        write_hub(model, weights, tmp_path / "other")
    del weights["model.norm.weight"]
    with pytest.raises(EngineError, match=r"model.norm.weight is no tensor in the training model"):
        write_hub(model, weights, tmp_path / "other")
    with pytest.raises(EngineError, match=r"cannot write the weights .*TMPDIR"):
        (tmp_path / "file").touch()
        write_hub(model, model.state_dict(), tmp_path / "file" / "under")


def test_what_vllm_refuses_is_said(model, tmp_path):
    server = SERVER.replace('return {"vllm"', 'raise ValueError("too long")\n        return {"vllm"')
    config = EngineConfig(kind="vllm", python=fake_python(tmp_path, server))
    with pytest.raises(EngineError, match=r"(?s)the vLLM server \(.*python\) could not open: ValueError: too long; "):
        make_engine(config, model, TOKENIZER)


def test_temperatures_and_lengths_that_vllm_would_change_are_refused(synced):
    with pytest.raises(ValueError, match=r"vLLM samples at 0.01 or above, or at 0 \(greedy\); got 0.001"):
        respond(synced, 0.001)
    with pytest.raises(ValueError, match="are more than the 512 positions"):
        respond(synced, new=512)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ('{"routes": found["routes"][:, 0]}', EngineError, r"routes of vLLM: expected \[\d+, layers, K\]"),
        ('{"routes": found["routes"][1:]}', EngineError, r"routes of vLLM: expected \[\d+, layers, K\] .* got"),
        ('{"routes": found["routes"][:, :1]}', RoutingError, r"returned 1 layers, but \S+ is layer 1"),
        ('{"routes": found["routes"] * [[[1], [0]]]}', RoutingError, "is all zeros in every sequence"),
        ('{"logps": found["logps"][1:]}', EngineError, r"gave logps as float32 \[5\], not 6 values"),
        ('{"logps": found["logps"] + 1}', EngineError, r"vLLM gave a log-probability of 1.0 nats"),
        ('{"logps": found["logps"] - np.inf}', EngineError, r"vLLM gave a log-probability of -inf nats; .* finite"),
        ('{"tokens": found["tokens"] * 1.0}', EngineError, r"gave tokens as float64 \[6\], not 6 values"),
        ('{"tokens": found["tokens"] - 2}', EngineError, "gave tokens below 0"),
        ('{"tokens": found["tokens"] + 99}', EngineError, r"vLLM gave token ids from 100 to 102; the model has 0 to"),
        ('{"tokens": found["tokens"] * 0 + 1}', EngineError, r"vLLM gave tokens behind the end token of row 0"),
        ('{"tokens": found["tokens"] * 0 + 2}', EngineError, r"vLLM: row 0 stops after 2 of 7 tokens, at no end"),
        ('{"lengths": found["lengths"] * 1.0}', EngineError, r"gave lengths as float64 \[3\], not 3 values"),
        ('{"lengths": found["lengths"] * 9}', EngineError, "have lengths .*, expected 3 of 1 to 7 tokens"),
    ],
)
def test_answers_of_another_shape_are_refused(model, tmp_path, changes, error, message):
    config = EngineConfig(kind="vllm", python=fake_python(tmp_path, SERVER, changes=f"lambda found: {changes}"))
    engine = make_engine(config, model, TOKENIZER)
    try:
        with pytest.raises(error, match=message):
            respond(engine, group_size=1)
    finally:
        engine.close()


def test_a_python_without_vllm_or_with_an_unknown_one_is_refused_before_anything_runs(tmp_path, monkeypatch):
    def check(python):
        check_engine_here(EngineConfig(kind="vllm", python=python), "cpu")

    monkeypatch.delenv("MOE_RL_VLLM_PYTHON", raising=False)
    with pytest.raises(EngineError, match=r"name its Python in rollout.engine.python or in the variable MOE_RL_VLLM"):
        check(None)
    with pytest.raises(EngineError, match=r"/no/such/python is no Python that can be run: .*No such file"):
        check("/no/such/python")
    with pytest.raises(EngineError, match=r"/bin/false is no Python that can be run: exit status 1"):
        check("/bin/false")
    for name, versions, message in (
        ("none", '{"torch": "2.13.0"}', r"has no vLLM. docs/engines.md has the commands"),
        ("old", '{"vllm": "0.21.0"}', r"has vLLM 0.21.0; supported are 0\.32\.\*"),
        ("later", '{"vllm": "0.320.1"}', r"has vLLM 0.320.1"),
        ("known", '{"vllm": "0.32.1"}', None),
        ("newest", '{"vllm": "0.33.0"}', None),
        ("unread", '{"vllm": "0.34.0"}', r"has vLLM 0.34.0; supported are 0\.32\.\*, 0\.33\.\*, because"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        python = fake_python(folder, SERVER, versions)
        if message is None:
            check(python)
            continue
        with pytest.raises(EngineError, match=message):
            check(python)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"gpu_memory_utilisation": 0.4}}, "did you mean 'gpu_memory_utilization'"),
        ({"options": {"worker_extension_cls": "my.module.Class"}}, "kind vllm takes block_size, .*got 'worker_ext"),
        ({"options": {"max_model_len": -1}}, "options.max_model_len: a positive whole number, got -1"),
        ({"options": {"max_model_len": 1.5}}, "options.max_model_len: a positive whole number, got 1.5"),
        ({"options": {"block_size": True}}, "options.block_size: a positive whole number, got True"),
        ({"options": {"gpu_memory_utilization": 4}}, "gpu_memory_utilization: a number above 0 and at most 1, got 4"),
        ({"router_format": "int4"}, "rollout.engine.router_format: is for kind hf"),
        ({"timeout": 0.0}, "rollout.engine.timeout: a positive number of seconds"),
        ({"timeout": float("inf")}, "rollout.engine.timeout: a positive number of seconds"),
        ({"kind": "hf", "python": "python3"}, "rollout.engine.python: is for kind vllm and .* of kind 'hf', got '"),
    ],
)
def test_settings_that_vllm_does_not_take_are_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        check_engine(EngineConfig(**{"kind": "vllm", **changes}))


def test_the_stand_in_is_for_processes_of_its_own():
    """Here TRL would take it for vLLM. pytest puts what it imports on the path."""
    assert not [place for place in sys.path if "fake_vllm" in place]


def test_routes_of_bytes_are_read_as_numbers():
    """vLLM returns uint8 for up to 256 experts; 255 is an expert, not -1."""
    from moe_rl.routing import RoutedExperts

    array = np.array([[[255, 3]], [[0, 254]]], np.uint8)
    assert RoutedExperts.from_vllm([array], ["gate"], 256).ids.tolist() == [[[[255, 3]], [[0, 254]]]]
