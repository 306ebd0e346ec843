"""Contexts inside each other, exceptions, copies, two models: nothing is left behind, nothing leaks."""

import copy
import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from routing_helpers import assert_same, disturbed, hooked, moe, routes_of, tokens
from tiny_families import tiny_config
from torch import nn
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    UnsupportedModelError,
    attach,
    change_counts,
    expert_load,
    find_sites,
    record_margins,
    record_routes,
    replay_routes,
    router_js,
)
from moe_rl.routing.hooks import Tap


def test_inner_replay_wins_and_every_recorder_sees_what_was_used() -> None:
    model, inputs = moe(), tokens()
    outer_routes, inner_routes = routes_of(disturbed(model), inputs), routes_of(model, inputs)
    model = disturbed(model, 0.1)
    with record_routes(model) as outermost, replay_routes(model, outer_routes):
        with replay_routes(model, inner_routes, sites=[0]), record_routes(model) as innermost:
            model(inputs)
        with record_routes(model) as after:
            model(inputs)
    assert torch.equal(innermost.routes.ids[:, :, 0], inner_routes.ids[:, :, 0])
    assert torch.equal(innermost.routes.ids[:, :, 1:], outer_routes.ids[:, :, 1:])
    assert after.routes.equal(outer_routes)
    assert torch.equal(outermost.calls[0].ids, innermost.routes.ids)
    assert torch.equal(outermost.calls[1].ids, outer_routes.ids)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(error: type[BaseException], attached: bool) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    handle = attach(model) if attached else None
    plain = model(inputs).logits

    def fail(*_: object) -> None:
        raise error("on purpose")

    for place in (model.model.layers[1].mlp.experts, model.model.layers[1].mlp.gate, model.model.norm):
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(error), replay_routes(model, routes, shadow=True), record_routes(model):
            model(inputs)
        hook.remove()
        assert bool(hooked(model)) == attached
        assert torch.overrides._len_torch_function_stack() == 0
    inner = model.model.layers[1].mlp.gate
    inner.forward = fail  # inside the router itself
    with pytest.raises(error), replay_routes(model, routes):
        model(inputs)
    del inner.forward
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.equal(model(inputs).logits, plain)
    with record_routes(model) as recording:
        model(inputs)
    assert recording.routes.equal(routes)
    if handle is not None:
        handle.detach()
    assert not hooked(model)


def test_a_call_that_was_interrupted_is_over_before_the_next_one_in_the_same_context() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    gate = model.model.layers[1].mlp.gate

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with replay_routes(model, routes), record_routes(model) as recording:
        gate.forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(inputs)
        del gate.forward
        model(inputs)
        assert torch.overrides._len_torch_function_stack() == 0
    assert recording.routes.equal(routes)


def hooks_of_ours(model: nn.Module) -> list[Any]:
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    return [hook for table in tables for hook in table.values() if "moe_rl" in type(hook).__module__ or _is_inert(hook)]


def _is_inert(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == "_inert"


def test_a_copy_made_while_attached_is_untouched() -> None:
    model, inputs = moe(), tokens()
    model.gradient_checkpointing_enable()
    routes = routes_of(model, inputs)
    with replay_routes(model, routes), record_routes(model) as recording:
        twin = copy.deepcopy(model)
        assert all(_is_inert(hook) for hook in hooks_of_ours(twin)) and hooks_of_ours(model)
        twin(tokens(3, 4, seed=9))
    assert len(recording.steps) == 0
    assert routes_of(disturbed(twin), inputs).sites == routes.sites


def test_two_models_at_once_and_their_memory() -> None:
    left, right, inputs = moe(seed=0), moe(seed=1), tokens()
    a, b = routes_of(left, inputs), routes_of(right, inputs)
    with record_routes(left) as one, record_routes(right) as two, replay_routes(right, a):
        left(inputs)
        right(inputs)
    assert one.routes.equal(a) and two.routes.equal(a) and not b.equal(a)
    alive = weakref.ref(left)
    with attach(right):  # idle hooks hold no cache
        out = right(inputs)
        cache = weakref.ref(out.past_key_values)
        with record_routes(right):
            right(inputs[:, :1], past_key_values=out.past_key_values)
        del out
        gc.collect()
        assert cache() is None
    del left, one
    gc.collect()
    assert alive() is None


def test_attach_stays_until_detached() -> None:
    model, inputs = moe(), tokens()
    plain = model(inputs).logits
    handle = attach(model)
    with record_routes(model) as recording:
        model(inputs)
    assert hooked(model) and torch.equal(model(inputs).logits, plain)
    with record_routes(model) as again:
        handle.detach()
        model(inputs)
    assert again.routes.equal(recording.routes)
    assert not hooked(model)


def test_a_check_that_draws_nothing_leaves_the_processs_random_numbers_alone(monkeypatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("another thread would draw the same numbers again")

    quiet = moe().eval()
    for name in ("manual_seed", "set_rng_state"):
        monkeypatch.setattr(torch, name, never)
    with record_routes(quiet):
        pass
    monkeypatch.undo()
    drawn = disturbed(moe()).train()
    for layer in drawn.model.layers:
        layer.self_attn.attention_dropout = 0.5
    state = torch.get_rng_state()
    with record_routes(drawn):
        pass
    assert torch.equal(torch.get_rng_state(), state)


def test_of_a_head_that_takes_no_two_sequences_it_is_said_what_may_do() -> None:
    config = moe().config
    config.pad_token_id = None
    model = Qwen3MoeForSequenceClassification(config).eval()
    with (
        pytest.raises(UnsupportedModelError, match="does a context on the Qwen3MoeModel in it work"),
        record_routes(model),
    ):
        pass
    with record_routes(model.model) as recording:
        model(tokens(1, 5))
    assert recording.routes.shape[:2] == (1, 5)


def test_the_model_is_left_as_it_was_by_the_self_check() -> None:
    model = moe().train()
    model.model.layers[0].eval()
    before = {n: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with record_routes(model):
        pass
    assert torch.equal(torch.get_rng_state(), state)
    assert before == {
        n: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()
    }
    assert_same(buffers, dict(model.named_buffers()))
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM registers no router"):
        find_sites(LlamaForCausalLM(LlamaConfig(**config)))
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        find_sites(nn.Linear(2, 2))
    with torch.device("meta"):
        model = type(moe())(moe().config)
    with pytest.raises(UnsupportedModelError, match="meta device"), record_routes(model):
        pass


def test_a_router_that_is_bypassed_or_called_alone_is_an_error() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    with record_routes(model), pytest.raises(RoutingError, match=r"1 of 3 routing sites.*layers\.1\.mlp\.gate"):
        model.model.layers[1].mlp.forward = lambda hidden: hidden
        model(inputs)
    text = r"layers\.1\.mlp\.gate.*did not run in a forward"
    with pytest.raises(UnsupportedModelError, match=text), record_routes(model):  # checked again: a forward is another
        pass
    del model.model.layers[1].mlp.forward
    with replay_routes(model, routes), pytest.raises(RoutingError, match="outside a call"):
        model.model.layers[0].mlp(torch.randn(1, 2, 32))
    assert not hooked(model)


def test_a_recording_alone_leaves_the_routers_without_hooks_and_misses_nothing() -> None:
    model, inputs = moe(), tokens()
    gate, experts = model.model.layers[0].mlp.gate, model.model.layers[0].mlp.experts
    other = routes_of(disturbed(model), inputs)
    wanted = routes_of(model, inputs)
    with record_routes(model) as recording:
        assert not (gate._forward_hooks or gate._forward_pre_hooks)
        assert len(experts._forward_pre_hooks) == 1
        model(inputs)
        with replay_routes(model, other):
            assert gate._forward_hooks and gate._forward_pre_hooks
            model(inputs)
        model(inputs)
        with pytest.raises(RoutingError, match="outside a call"):
            model.model.layers[0].mlp(torch.randn(1, 2, 32))
    assert [routes.equal(which) for routes, which in zip(recording.calls, (wanted, other, wanted), strict=True)] == [
        True
    ] * 3
    with record_routes(model), pytest.raises(RoutingError, match="outside a call"):
        model.model.layers[0].mlp(torch.randn(1, 2, 32))
    assert not hooked(model)


def test_ids_that_routers_return_by_sequence_are_rows_all_the_same() -> None:
    """One expert per token, ids `[B,S]` without an axis of slots."""
    model, inputs = moe(), tokens()
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1
    wanted = routes_of(model, inputs)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: (*out[:2], out[2].reshape(2, -1)))
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: (args[0], args[1].reshape(-1, 1), args[2]))
    assert routes_of(model, inputs).equal(wanted)


def test_a_context_inside_a_replay_does_not_forget_what_was_not_read_yet(monkeypatch):
    """On a device the proof is read at the end; opening another context there once set it to nothing."""

    def deferred(self, call):
        kept = None if self.examining else call.kept()
        if kept is not None:
            self.lost = self.lost + (~kept).sum(-1)

    monkeypatch.setattr(Tap, "prove", deferred)
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    block = model.model.layers[1].mlp

    def chooses_again(hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        gates = block.gate(flat)[1]
        ids = functional.linear(flat, block.gate.weight).argsort(-1, descending=True)[:, : gates.shape[-1]]
        return block.experts(flat, ids, gates).reshape(hidden.shape)

    with pytest.raises(RoutingError, match="got others than were forced"), torch.no_grad():  # noqa: SIM117
        with replay_routes(model, routes):
            monkeypatch.setattr(block, "forward", chooses_again)
            model(inputs)
            monkeypatch.delattr(block, "forward")
            with record_routes(model):
                pass


@pytest.mark.parametrize("fault", ["ids are overwritten", "experts are called twice"])
def test_what_a_block_does_between_its_router_and_its_experts_is_noticed(fault: str) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    block = model.model.layers[1].mlp

    def forward(hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, gates, ids = block.gate(flat)
        if fault == "ids are overwritten":
            ids.add_(1).remainder_(8)  # in place: it is the very tensor that the router was given
        else:
            block.experts(flat, ids, gates)
        return block.experts(flat, ids, gates).reshape(hidden.shape)

    said = {"ids are overwritten": "got others than were forced", "experts are called twice": "called twice in one"}
    with pytest.raises(RoutingError, match=rf"layers\.1\.mlp\.gate.*{said[fault]}"), torch.no_grad():  # noqa: SIM117
        with replay_routes(model, routes):
            block.forward = forward
            model(inputs)


@torch.no_grad()
def test_a_rotary_embedding_that_has_grown_stays_so_when_the_model_is_checked() -> None:
    config = tiny_config("qwen3_moe")
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = Qwen3MoeForCausalLM(config).eval()
    model(tokens(1, 32))
    shorter = tokens(1, 20)
    plain = model(shorter).logits
    with record_routes(model):
        assert torch.equal(model(shorter).logits, plain)


def test_a_context_that_is_opened_again_asks_for_no_signature(monkeypatch) -> None:
    """It was a third of what opening one costs, and one is opened around every minibatch."""
    model = moe()
    with record_routes(model):
        pass
    monkeypatch.setattr("inspect.signature", lambda *_: pytest.fail("asked again"))
    with record_routes(model):
        pass


def test_a_recording_that_is_kept_keeps_no_model() -> None:
    model, inputs = moe(), tokens()
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs)
    alive = weakref.ref(model.model)
    del model
    gc.collect()
    assert alive() is None and recording.routes.shape == (2, 7, 3, 2)


def test_contexts_that_are_closed_leave_no_object_and_no_open_file(tmp_path) -> None:
    model, inputs, path = moe().train(), tokens(), tmp_path / "routes"
    model.gradient_checkpointing_enable()

    def contexts() -> None:
        with attach(model), torch.no_grad(), record_routes(model) as recording:
            model.generate(inputs, max_new_tokens=2)
        recording.routes.save(path)
        with pytest.raises(RoutingError), replay_routes(model, RoutedExperts.load(path)):
            model(inputs[:1])
        with replay_routes(model, routes_of(model, inputs), shadow=True), record_margins(model):
            loss = model(inputs, use_cache=False).logits.sum()
        loss.backward()

    def after(times: int) -> tuple[int, int]:
        for _ in range(times):
            contexts()
        gc.collect()
        return len(gc.get_objects()), len(os.listdir("/dev/fd"))

    (objects, files), (more_objects, more_files) = after(2), after(9)
    assert more_objects - objects < 9, "less than one for each time"
    assert more_files == files and not hooked(model)


@torch.no_grad()
def test_nothing_goes_to_torchs_default_device(tmp_path) -> None:
    # The default may be a GPU where routes are on a CPU (counts always are); "meta" holds no values at all.
    model, other, inputs = moe(), disturbed(moe()), tokens()
    mask, logits = torch.ones_like(inputs), torch.randn(4, 8)
    arrays = [np.ones((6, 3, 2), dtype=np.int32) * [0, 1]] * 2
    with torch.device("meta"):
        with record_routes(model) as recording, record_margins(model) as margins:
            model(inputs)
        routes = recording.routes
        with replay_routes(other, routes, shadow=True, slots=1) as replay:
            other(inputs)
        made = RoutedExperts(routes.ids.tolist(), routes.sites, routes.num_experts, tokens=inputs)
        made.save(tmp_path / "routes")
        assert RoutedExperts.load(tmp_path / "routes").rows([1, 0]).rows([1, 0]).equal(routes)
        assert made.realign(mask, mask).select([0, 1, 2]).equal(routes)
        counts = replay.shadow_change(routes, mask) + change_counts(routes, routes, pair="shadow")
        assert counts.rates()["slot_change"] > 0 and counts.overdispersion > 0
        assert RoutedExperts.from_vllm(arrays, routes.sites, 8).shape == (2, 6, 3, 2)
        found = [margins.values, replay.regret, expert_load(routes, mask), router_js(logits, logits + 1)]
        assert all(values.device.type == "cpu" for values in found)
