"""verl's FSDP engine: on a stand-in with its signatures, and on the real class where verl is installed."""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from moe_rl.integrations import verl as integration
from moe_rl.policy import TinyConfig, build_tiny, char_tokenizer
from moe_rl.routing import RoutingError, record_routes

TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
LENGTHS = (5, 3, 7)


class Batch(dict):
    """What is used of a TensorDict."""


def nested(tensors):
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def batch(packed, **more):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 10, (n,), generator=generator) for n in LENGTHS]
    return Batch(input_ids=nested(ids), use_remove_padding=packed, **more)


def stand_in(packed):
    """An engine whose methods have the signatures of verl 0.9.1, and which lays tokens out as verl does."""

    class FSDPEngineWithLMHead:
        use_ulysses_sp = False

        def __init__(self):
            self.module = build_tiny(TINY, char_tokenizer("0123456789+=^$")).train()
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=2.0)

        def _get_packed_pad_size(self, packed_length: int) -> int:
            return 2 if packed else 0

        def forward_step(self, micro_batch, loss_function, forward_only):
            tokens = micro_batch["input_ids"]
            if packed:
                ids = torch.nn.functional.pad(tokens.values(), (0, 2))[None]
                position = torch.cat([torch.arange(n) for n in (*LENGTHS, 2)])[None]
                output = self.module(input_ids=ids, position_ids=position)
            else:
                ids = torch.nested.to_padded_tensor(tokens, padding=0)
                mask = torch.arange(ids.shape[1]) < tokens.offsets().diff()[:, None]
                output = self.module(input_ids=ids, attention_mask=mask)
            loss = output.logits[..., :3].square().mean()
            return loss, {"model_output": {}, "loss": float(loss.detach()), "metrics": {"actor/loss": 1.0}}

        def optimizer_step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

    return FSDPEngineWithLMHead


class ActorRolloutRefWorker:
    def __init__(self, strategy):
        self.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        self.enable_routing_replay = False


@pytest.fixture
def installed(monkeypatch, request):
    """`install` on a stand-in of verl's modules."""
    packed, replay = request.param
    worker = type("ActorRolloutRefWorker", (ActorRolloutRefWorker,), {})
    engine = stand_in(packed)
    names = {
        "verl": {"__version__": "0.9.1"},
        "verl.workers": {},
        "verl.workers.engine": {},
        "verl.workers.engine.fsdp": {},
        "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": engine},
        "verl.workers.engine_workers": {"ActorRolloutRefWorker": worker},
    }
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    integration.install(replay=replay)
    return packed, engine, worker


def both(*replays):
    return pytest.mark.parametrize("installed", [(p, r) for p in (False, True) for r in replays], indirect=True)


def scored(engine, packed):
    """The batch after the pass of the old log-probabilities: its routes went through verl's trainer."""
    with torch.no_grad():
        _, output = engine.forward_step(
            batch(packed, enable_routing_replay=True), loss_function=None, forward_only=True
        )
    routes = output["model_output"]["routed_experts"]
    parts = [part.clone() for part in routes.unbind()]
    assert [tuple(part.shape) for part in parts] == [(n, 2, 2) for n in LENGTHS]
    return batch(packed, enable_routing_replay=True, routed_experts=nested(parts)), parts


def update(engine, data):
    loss, output = engine.forward_step(data, loss_function=None, forward_only=False)
    loss.backward()
    engine.optimizer_step()
    return output["metrics"]


@both("none", "R2")
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1)])
def test_routes_of_sequences_of_other_lengths_are_refused(order, installed):
    """Behind the first update nothing else would show it: the tokens are those of the micro-batch itself."""
    packed, kind, _ = installed
    engine = kind()
    data, parts = scored(engine, packed)
    update(engine, data)
    data["routed_experts"] = nested([parts[i] for i in order])
    with pytest.raises(RoutingError, match=r"routed_experts are of sequences of .*, input_ids have \[5, 3, 7\]"):
        update(engine, data)


@both("R2")
def test_a_micro_batch_without_any_route_says_nothing_of_what_was_replayed_or_changed(installed):
    """verl takes means over micro-batches, and NaN would be that of all."""
    packed, kind, _ = installed
    engine = kind()
    _, parts = scored(engine, packed)
    none = nested([torch.full_like(part, -1) for part in parts])
    metrics = update(engine, batch(packed, enable_routing_replay=True, routed_experts=none))
    assert {name for name in metrics if name.startswith("routing/")} == {"routing/first_change"}


@both("R2")
def test_later_updates_take_the_old_policys_experts(installed):
    packed, kind, _ = installed
    engine = kind()
    data, parts = scored(engine, packed)
    first = update(engine, data)
    assert first["routing/first_change"] == 0 and first["routing/replayed_fraction"] == 1
    assert first["actor/loss"] == 1.0  # verl's own stay
    with record_routes(engine.module) as recording:  # by itself: what the second update used
        second = update(engine, data)
    assert "routing/first_change" not in second and second["routing/replayed_fraction"] == 1
    assert second["routing/shadow_slot_change"] > 0
    used = recording.routes.ids
    rows = used[0].split([*LENGTHS, 2])[:3] if packed else [used[i, :n] for i, n in enumerate(LENGTHS)]
    assert all(torch.equal(row, part.long()) for row, part in zip(rows, parts, strict=True))


@both("none")
def test_measuring_changes_no_bit(installed):
    packed, kind, _ = installed
    engine, plain = kind(), stand_in(packed)()
    data, _ = scored(engine, packed)
    rates = [update(engine, data)["routing/slot_change"] for _ in range(3)]
    for _ in range(3):
        update(plain, batch(packed))
    assert rates[0] == 0 and rates[2] > 0
    pairs = zip(engine.module.parameters(), plain.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@both("R2")
def test_what_is_not_marked_is_left_alone(installed):
    packed, kind, _ = installed
    engine = kind()
    with torch.no_grad():
        _, output = engine.forward_step(
            batch(packed, enable_routing_replay=False), loss_function=None, forward_only=True
        )
    assert output["model_output"] == {}  # the reference
    assert set(update(engine, batch(packed))) == {"actor/loss"}
    engine._router_replay = "verl's own"  # of an engine that replays by itself (VeOmni)
    with torch.no_grad():
        _, output = engine.forward_step(
            batch(packed, enable_routing_replay=True), loss_function=None, forward_only=True
        )
    assert output["model_output"] == {}
    assert set(update(engine, batch(packed, enable_routing_replay=True))) == {"actor/loss"}


@both("R2")
def test_the_reference_with_the_adapters_off_takes_no_routes_place(installed):
    packed, kind, _ = installed
    engine = kind()
    engine.module.config._name_or_path = "tiny"
    adapters = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    engine.module = get_peft_model(engine.module, adapters)
    data, _ = scored(engine, packed)
    with torch.no_grad(), engine.module.disable_adapter():
        _, output = engine.forward_step(
            batch(packed, enable_routing_replay=True), loss_function=None, forward_only=True
        )
    assert output["model_output"] == {}, "verl would put its routes where the old policy's are"
    assert update(engine, data)["routing/first_change"] == 0


@both("R2")
def test_errors(installed):
    packed, kind, worker = installed
    engine = kind()
    with pytest.raises(RoutingError, match="without routes of the old policy"):
        update(engine, batch(packed, enable_routing_replay=True))
    data, parts = scored(engine, packed)
    other = [(part + 1) % 6 for part in parts]
    with pytest.raises(RoutingError, match="before any weight moved"):
        update(engine, batch(packed, enable_routing_replay=True, routed_experts=nested(other)))
    engine.use_ulysses_sp = True
    with pytest.raises(RoutingError, match="sequence parallelism"):
        update(engine, data)
    with pytest.raises(RoutingError, match="installed in this process already"):
        integration.install()
    sys.modules["verl"].__version__ = "0.7.0"
    with pytest.raises(RoutingError, match=r"verl 0.7.0 is not known here \(0.9.1"):
        integration.install()
    with pytest.raises(RoutingError, match="none, R2 in verl's FSDP engine, got 'R3'"):
        integration.install(replay="R3")
    with pytest.raises(RoutingError, match=r"first_change_tolerance, a share .* at most 1, got 5.0"):
        integration.install(first_change_tolerance=5.0)
    made = [worker(strategy) for strategy in ("fsdp", "fsdp2", "megatron")]
    assert [one.enable_routing_replay for one in made] == [True, True, False]
    made[2].enable_routing_replay = True  # verl's own setting for Megatron
    assert made[2].enable_routing_replay


@pytest.mark.parametrize("packed", [False, True])
def test_the_real_engine(packed, monkeypatch):
    """verl's own forward_step on its own TensorDict, without ray and FSDP around it."""
    real = pytest.importorskip("verl.workers.engine.fsdp.transformer_impl", reason="verl is not installed")
    from verl.utils.tensordict_utils import get_tensordict

    kind = real.FSDPEngineWithLMHead
    for name in ("forward_step", "optimizer_step", "_get_packed_pad_size"):  # the stand-in is called as the real one
        theirs, ours = (inspect.signature(getattr(one, name)).parameters for one in (kind, stand_in(packed)))
        assert list(theirs) == list(ours)
    for name in ("get_device_id", "get_device_name"):
        monkeypatch.setattr(real, name, lambda: "cpu")
    step = integration.forward_step(kind.forward_step, "R2", 0.0)
    engine = object.__new__(kind)
    engine.module = build_tiny(TINY, char_tokenizer("0123456789+=^$"), attn_implementation="sdpa").train()
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size, engine.pad_to_length = False, 1, False
    engine._autocast_dtype, engine.get_data_parallel_group = torch.float32, lambda: None
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=2.0)
    settings = {
        "use_remove_padding": packed, "temperature": 1.0, "use_fused_kernels": False, "calculate_entropy": False,
        "enable_routing_replay": True, "pad_token_id": 0,
    }  # fmt: skip

    def data(**more):
        position = nested([torch.arange(n) for n in LENGTHS])
        return get_tensordict({"input_ids": batch(packed)["input_ids"], "position_ids": position, **more}, settings)

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {"actor/loss": 1.0}

    with torch.no_grad():
        _, output = step(engine, data(), None, True)
    parts = [part.clone() for part in output["model_output"]["routed_experts"].unbind()]
    assert [tuple(part.shape) for part in parts] == [(n, 2, 2) for n in LENGTHS]
    for update in range(3):
        with record_routes(engine.module) as recording:
            value, output = step(engine, data(routed_experts=nested(parts)), loss, False)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.routing_steps = update + 1
        used = recording.routes.ids
        rows = used[0].split(LENGTHS) if packed else [used[i, :n] for i, n in enumerate(LENGTHS)]
        assert all(torch.equal(row, part.long()) for row, part in zip(rows, parts, strict=True))
        metrics = output["metrics"]
        assert metrics["routing/replayed_fraction"] == 1
        assert (metrics["routing/shadow_slot_change"] > 0) == (update > 0) == ("routing/first_change" not in metrics)
