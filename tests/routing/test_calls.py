"""Every way in which a model is called: padding, caches, generation modes, checkpointing, compilation, wrappers."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_families import VOCABULARY, tiny_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    UnsupportedModelError,
    attach,
    find_sites,
    noisy_routes,
    record_routes,
    replay_routes,
)


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def moe(family: str = "Qwen3MoeForCausalLM", seed: int = 0) -> Any:
    model = tiny_model(family, seed)
    model.generation_config.eos_token_id = None  # generate to the full length
    return model


def disturbed(model: nn.Module, scale: float = 0.05) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return other


def routes_of(model: nn.Module, inputs: Tensor, **kwargs: Any) -> RoutedExperts:
    with torch.no_grad(), record_routes(model) as recording:
        model(input_ids=inputs, **kwargs)
    return recording.routes


def hooked(model: nn.Module) -> list[str]:
    """Modules that carry a hook or a wrapped checkpoint function of ours."""
    return [
        name
        for name, m in model.named_modules()
        if any("moe_rl" in type(h).__module__ for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        or "moe_rl" in type(vars(m).get("_gradient_checkpointing_func")).__module__
    ]


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], exact: bool = True) -> None:
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        if exact:
            assert torch.equal(value, right[name]), name
        else:
            torch.testing.assert_close(value, right[name])


# -- padding and caches ----------------------------------------------------------------------------------------------


def test_left_and_right_padding_route_alike_after_realignment() -> None:
    model, inputs = moe(), tokens(2, 8)
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    right = left.flip(1)
    moved = inputs.clone()
    moved[0] = torch.cat([inputs[0, 3:], inputs[0, :3]])
    position = (left.cumsum(1) - 1).clamp(min=0)
    a = routes_of(model, inputs, attention_mask=left, position_ids=position)
    b = routes_of(model, moved, attention_mask=right)
    assert torch.equal(a.ids[0, 3:].sort(-1)[0], b.ids[0, :5].sort(-1)[0])
    assert torch.equal(a.ids[1].sort(-1)[0], b.ids[1].sort(-1)[0])
    other = disturbed(model)
    with replay_routes(other, b), record_routes(other) as recording:
        other(input_ids=moved, attention_mask=right)
    assert recording.routes.equal(b)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 2},
        {"do_sample": True},
        {"cache_implementation": "offloaded"},
    ],
    ids=["dynamic", "static", "chunked prefill", "prompt lookup", "sampled", "offloaded"],
)
def test_generate_records_what_teacher_forcing_routes(options: dict[str, Any]) -> None:
    model = moe()
    # a repetitive prompt, so that prompt lookup has candidates to accept and to reject
    batch = 1 if "prompt_lookup_num_tokens" in options else 3
    inputs = tokens(batch, 4).repeat(1, 3)
    if "offloaded" in str(options) and not torch.cuda.is_available():
        options = {"cache_implementation": "dynamic"}
    torch.manual_seed(0)
    with record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=9, attention_mask=torch.ones_like(inputs), **options)
    routes = recording.routes
    assert routes.shape[:2] == (batch, output.shape[1] - 1)
    assert routes.tokens is not None and torch.equal(routes.tokens.long(), output[:, :-1])
    assert routes.equal(routes_of(model, output[:, :-1]))
    assert not hooked(model)


def test_generate_follows_replayed_routes() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=5, do_sample=False)
    other = disturbed(model)
    with replay_routes(other, recording.routes, check_tokens=False) as replay, record_routes(other) as again:
        other.generate(inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(again.routes.ids, recording.routes.ids)
    assert replay.replayed_fraction == 1
    with replay_routes(other, recording.routes, check_tokens=False), pytest.raises(RoutingError, match="do not fit"):
        other.generate(inputs, max_new_tokens=6, do_sample=False)
    with replay_routes(other, recording.routes), pytest.raises(RoutingError, match="other tokens: sequence 0, token 7"):
        other.generate(inputs, max_new_tokens=5, do_sample=False)
    assert output.shape[1] == recording.routes.shape[1] + 1


def test_left_padded_generation_equals_teacher_forcing() -> None:
    model, inputs = moe(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with record_routes(model) as recording:
        output = model.generate(inputs, attention_mask=mask, max_new_tokens=4, do_sample=False)
    full = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], dim=1)
    position = (full.cumsum(1) - 1).clamp(min=0)
    forced = routes_of(model, output[:, :-1], attention_mask=full, position_ids=position)
    assert torch.equal(recording.routes.ids[full.bool()], forced.ids[full.bool()])


def test_speculative_decoding_with_an_assistant_drops_the_rejected_tokens() -> None:
    model, inputs = moe(), tokens(1, 6)
    assistant = disturbed(model, 0.02)
    with record_routes(model) as recording, record_routes(assistant) as helper:
        output = model.generate(inputs, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    plain = model.generate(inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, plain)
    assert any(step.shape[1] > 1 for step in recording.steps[1:])  # it did verify several tokens at once
    routes = recording.routes
    length = min(routes.shape[1], output.shape[1])
    assert length >= output.shape[1] - 1
    forced = routes_of(model, output[:, : output.shape[1] - 1])
    assert torch.equal(routes.ids[:, : forced.shape[1]], forced.ids)
    assert helper.steps


def test_beam_search_is_refused_and_steps_stay() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        model.generate(inputs, num_beams=3, max_new_tokens=4, do_sample=False)
    with pytest.raises(RoutingError, match="beam search"):
        _ = recording.routes
    assert [step.shape[:2] for step in recording.steps] == [(6, 7), (6, 1), (6, 1), (6, 1)]


def test_packed_continuous_batching_is_refused() -> None:
    model = moe()
    with record_routes(model), pytest.raises(RoutingError, match="continuous batching"):
        model.model(input_ids=tokens(1, 4), block_table=torch.zeros(1, 1))


def test_manual_cache_loop_joins_steps_and_a_cache_from_before_has_no_routes() -> None:
    model, inputs = moe(), tokens(2, 8)
    whole = routes_of(model, inputs)
    with torch.no_grad(), record_routes(model) as recording:
        cache = model(inputs[:, :3]).past_key_values
        for t in range(3, 8):
            model(inputs[:, t : t + 1], past_key_values=cache)
    assert recording.routes.equal(whole)
    with torch.no_grad():
        cache = model(inputs[:, :3]).past_key_values
        with record_routes(model) as recording:
            model(inputs[:, 3:], past_key_values=cache)
    assert torch.equal(recording.routes.ids[:, 3:], whole.ids[:, 3:])
    assert bool(recording.routes.live[:, :3].all())


def test_a_reordered_cache_is_noticed() -> None:
    model, inputs = moe(), tokens(2, 6)
    with torch.no_grad(), record_routes(model) as recording:
        cache = model(inputs[:, :4]).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        model(inputs[:, 4:], past_key_values=cache)
    with pytest.raises(RoutingError, match="reordered"):
        _ = recording.routes
    assert len(recording.steps) == 2


def test_static_cache_by_hand() -> None:
    model, inputs = moe(), tokens(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs[:, :4], past_key_values=cache)
        model(inputs[:, 4:], past_key_values=cache)
    assert recording.routes.equal(routes_of(model, inputs))


def test_several_forwards_join_along_the_batch_or_are_told_apart() -> None:
    model, inputs = moe(), tokens(4, 6)
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs[:1])
        model(inputs[1:])
    assert recording.routes.equal(routes_of(model, inputs))
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs)
        model(inputs[:, :4])
    with pytest.raises(RoutingError, match=r"different lengths \[4, 6\]"):
        _ = recording.routes
    assert [call.shape[1] for call in recording.calls] == [6, 4]


def test_the_base_model_is_one_model_with_its_wrapper() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    base = routes_of(model.model, inputs)
    assert torch.equal(base.ids, routes.ids) and base.sites[0] == "layers.0.mlp.gate"
    other = disturbed(model)
    with replay_routes(other.model, routes), record_routes(other) as recording:
        other.model(inputs_embeds=other.get_input_embeddings()(inputs))
    assert torch.equal(recording.routes.ids, routes.ids)
    assert recording.routes.tokens is None


# -- gradient checkpointing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DbrxForCausalLM"])
def test_checkpointed_backward_replays_however_late(family: str, reentrant: bool) -> None:
    model = moe(family)
    first, second = tokens(seed=1), tokens(seed=2)
    old = [routes_of(model, first), routes_of(model, second)]
    model = disturbed(model).train()

    def loss(inputs: Tensor, routes: RoutedExperts) -> Tensor:
        with replay_routes(model, routes):
            return model(inputs, use_cache=False).logits.square().mean()

    def backward(order: list[int]) -> dict[str, Tensor]:
        losses = [loss(first, old[0]), loss(second, old[1])]
        for i in order:
            losses[i].backward()
        return grads(model)

    wanted = backward([0, 1])
    with torch.no_grad():
        live = routes_of(model, first)
    assert not torch.equal(live.ids, old[0].ids)  # a live recomputation would differ
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(wanted, backward([0, 1]))
    assert_same(wanted, backward([1, 0]), exact=False)  # sums in another order

    early = loss(first, old[0])
    with replay_routes(model, old[1]), record_routes(model) as recording:
        late = model(second, use_cache=False).logits.square().mean()
        early.backward()  # recomputed under the first routes, inside the second context
        late.backward()
    assert_same(wanted, grads(model))
    assert recording.routes.equal(old[1])
    assert not hooked(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_noise_is_recomputed_as_it_was(reentrant: bool) -> None:
    model, inputs = moe().train(), tokens()

    def backward() -> dict[str, Tensor]:
        with noisy_routes(model, 1.0, torch.Generator().manual_seed(3)):
            loss = model(inputs, use_cache=False).logits.square().mean()
        loss.backward()
        return grads(model)

    wanted = backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(wanted, backward())


def test_checkpointing_switched_on_inside_the_context_is_followed() -> None:
    model, inputs = moe(), tokens()
    old = routes_of(model, inputs)
    model = disturbed(model).train()
    with replay_routes(model, old):
        model(inputs, use_cache=False).logits.square().mean().backward()
    wanted = grads(model)
    with replay_routes(model, old):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(inputs, use_cache=False).logits.square().mean()
    loss.backward()
    assert_same(wanted, grads(model))
    assert not hooked(model)


def test_torch_checkpoint_wrapper_is_followed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, inputs = moe(), tokens()
    old = routes_of(model, inputs)
    model = disturbed(model)
    with replay_routes(model, old):
        model(inputs, use_cache=False).logits.square().mean().backward()
    wanted = grads(model)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    assert [site.name for site in find_sites(model)] == list(old.sites)
    with replay_routes(model, old):
        loss = model(inputs, use_cache=False).logits.square().mean()
    loss.backward()
    assert_same(wanted, {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in grads(model).items()})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_by_hand_is_refused(reentrant: bool) -> None:
    model, inputs = moe(), tokens()
    old = routes_of(model, inputs)
    embedded = model.get_input_embeddings()(inputs)
    with replay_routes(model, old), pytest.raises(RoutingError, match="by hand"):
        checkpoint(lambda e: model(inputs_embeds=e).logits, embedded, use_reentrant=reentrant)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda h, **kwargs: checkpoint(lambda x: forward(x, **kwargs), h, use_reentrant=reentrant)
    with replay_routes(model, old), pytest.raises(RoutingError, match=r"layers\.1.*by hand"):
        model(inputs, use_cache=False)
    assert not hooked(model)


# -- compilation -----------------------------------------------------------------------------------------------------


def test_compile_after_attach_is_exact_without_graph_breaks() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, inputs, others = moe(), tokens(seed=1), tokens(seed=2)
    model.model.layers = model.model.layers[:1]  # compilation is slow
    model.set_experts_implementation("batched_mm")
    mine, foreign = routes_of(model, inputs), routes_of(model, others)
    counter = CompileCounterWithBackend("aot_eager")
    with attach(model):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        plain = model(inputs, use_cache=False).logits
        assert torch.equal(compiled(inputs, use_cache=False).logits, plain)
        for wanted, given in ((mine, inputs), (foreign, others)):
            with record_routes(compiled) as recording:
                compiled(given, use_cache=False)
            assert recording.routes.equal(wanted)
        frames = counter.frame_count
        for forced in (foreign, mine, foreign):
            with replay_routes(compiled, forced, check_tokens=False) as replay:
                loss = compiled(inputs, use_cache=False).logits.square().mean()
                loss.backward()
            assert replay.replayed_fraction == 1
            found = grads(model)
            with replay_routes(model, forced, check_tokens=False):
                model(inputs, use_cache=False).logits.square().mean().backward()
            assert_same(grads(model), found, exact=False)
        assert counter.frame_count == frames + 1  # one graph for replay, whatever is replayed
        assert torch.equal(compiled(inputs, use_cache=False).logits, plain)
    with pytest.raises(RoutingError, match="compiled already"), record_routes(compiled):
        pass
    with pytest.raises(RoutingError, match="compiled already"):
        attach(compiled)
    torch._dynamo.reset()


def test_compiled_before_is_an_error_never_silence() -> None:
    torch._dynamo.reset()
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    inside = torch.compile(lambda x: model(x, use_cache=False).logits, backend="eager")
    inside(inputs)
    with pytest.warns(UserWarning, match="attach"), replay_routes(model, routes) as replay:
        inside(inputs)
    with pytest.raises(RoutingError, match="nothing was replayed"):
        _ = replay.replayed_fraction
    with record_routes(model) as recording:
        inside(inputs)
    with pytest.raises(RoutingError, match="attach"):
        _ = recording.routes
    model.compile(backend="eager")
    with pytest.raises(RoutingError, match="compiled already"), record_routes(model):
        pass
    torch._dynamo.reset()


# -- precision, experts implementations, adapters --------------------------------------------------------------------


def test_bfloat16_and_autocast() -> None:
    inputs = tokens()
    for model in (moe().bfloat16(), moe("DeepseekV3ForCausalLM").bfloat16()):
        with record_routes(model) as recording:
            plain = model(inputs).logits
        with replay_routes(model, recording.routes):
            assert torch.equal(model(inputs).logits, plain)
    model = moe()
    with torch.autocast("cpu", torch.bfloat16):
        with record_routes(model) as recording:
            plain = model(inputs).logits
        with replay_routes(model, recording.routes):
            assert torch.equal(model(inputs).logits, plain)
    other = disturbed(model)
    with replay_routes(other, recording.routes), torch.autocast("cpu", torch.bfloat16):
        other(inputs).logits.float().square().mean().backward()
    assert all(bool((site.module.weight.grad != 0).any()) for site in find_sites(other))


def test_routes_pass_between_experts_implementations() -> None:
    model, inputs = moe(), tokens()
    logits = {}
    model.set_experts_implementation("eager")
    routes = routes_of(model, inputs)
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        with replay_routes(model, routes), record_routes(model) as recording:
            logits[name] = model(inputs).logits
        assert recording.routes.equal(routes)
    torch.testing.assert_close(logits["eager"], logits["grouped_mm"])
    torch.testing.assert_close(logits["eager"], logits["batched_mm"])


@pytest.mark.parametrize("adapted", ["attention", "router parameter", "router copy"])
def test_peft_models_share_site_names_with_the_bare_model(adapted: str) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    config = {
        "attention": peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "router parameter": peft.LoraConfig(
            target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], init_lora_weights=False
        ),
        "router copy": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], init_lora_weights=False),
    }[adapted]
    wrapped = peft.get_peft_model(model, config)
    assert [site.name for site in find_sites(wrapped)] == list(routes.sites)
    with record_routes(wrapped) as recording:
        plain = wrapped(input_ids=inputs).logits
    assert recording.routes.sites == routes.sites
    with replay_routes(wrapped, recording.routes):
        assert torch.equal(wrapped(input_ids=inputs).logits, plain)
    with replay_routes(wrapped, routes), record_routes(wrapped) as recording:
        wrapped(input_ids=inputs).logits.square().mean().backward()
    assert recording.routes.equal(routes)
    trained = {n for n, p in wrapped.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    assert (adapted == "attention") != any(".mlp.gate." in name for name in trained)
    with wrapped.disable_adapter():
        assert routes_of(wrapped, inputs).equal(routes)
    assert not hooked(wrapped)


# -- contexts --------------------------------------------------------------------------------------------------------


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


def test_a_copy_made_while_attached_is_untouched() -> None:
    model, inputs = moe(), tokens()
    model.gradient_checkpointing_enable()
    routes = routes_of(model, inputs)
    with replay_routes(model, routes), record_routes(model) as recording:
        twin = copy.deepcopy(model)
        assert not hooked(twin)
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
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    with record_routes(model), pytest.raises(RoutingError, match=r"1 of 3 routing sites.*layers\.1\.mlp\.gate"):
        model(inputs)
    del model.model.layers[1].mlp.forward
    with replay_routes(model, routes), pytest.raises(RoutingError, match="outside a call"):
        model.model.layers[0].mlp(torch.randn(1, 2, 32))
    assert not hooked(model)
