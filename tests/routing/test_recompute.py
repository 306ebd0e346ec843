"""Gradient checkpointing and compilation: the backward pass sees the routes of its forward, or an error."""

from typing import Any

import pytest
import torch
from routing_helpers import assert_same, disturbed, grads, hooked, moe, routes_of, tokens
from sweeps import sweep
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    attach,
    biased_routes,
    find_sites,
    noisy_routes,
    record_routes,
    replay_routes,
)

# -- gradient checkpointing --------------------------------


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


@pytest.mark.parametrize("outer", [True, False])
def test_checkpointing_by_hand_inside_a_layer_that_is_checkpointed_is_refused(outer: bool) -> None:
    """The recomputation inside would choose live: with other routes the gradient was that of other experts."""
    model, inputs = moe(), tokens()
    old = routes_of(model, inputs)
    model = disturbed(model).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": outer})
    model.enable_input_require_grads()
    with replay_routes(model, old):
        model(inputs, use_cache=False).logits.square().mean().backward()
    block = model.model.layers[0].mlp
    forward = block.forward
    for reentrant in (True, False):
        block.forward = lambda x, how=reentrant: checkpoint(forward, x, use_reentrant=how)
        with replay_routes(model, old), pytest.raises(RoutingError, match=r"layers\.0.*by hand"):
            model(inputs, use_cache=False)
    assert not hooked(model)


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
    for context in (replay_routes(model, old), record_routes(model)):
        with context, pytest.raises(RoutingError, match=r"layers\.1.*by hand"):
            model(inputs, use_cache=False)
    for without in (torch.no_grad, torch.inference_mode):  # nothing will be recomputed
        with without(), replay_routes(model, old) as replay:
            model(inputs, use_cache=False)
        assert replay.replayed_fraction == 1
    assert not hooked(model)


# -- compilation --------------------------------


def compiled_parts(what: str) -> tuple[Any, Any]:
    """An attached model of one layer (compilation is slow), in train mode, and what to call: compiled in part."""
    torch._dynamo.reset()
    model = moe(seed=1).train()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    attach(model)  # gradient checkpointing is switched on only after this
    layer = model.model.layers[0]
    if what == "wrapped":
        return model, torch.compile(model, backend="aot_eager")
    if what == "wrapped layer":
        model.model.layers[0] = torch.compile(layer, backend="aot_eager")
    elif what != "nothing":
        parts = {"model": model, "base": model.model, "layer": layer, "mlp": layer.mlp, "router": layer.mlp.gate}
        parts[what].compile(backend="aot_eager")
    return model, model


def one_layer_routes(inputs: Tensor) -> RoutedExperts:
    other = moe(seed=2)
    other.model.layers = other.model.layers[:1]
    return routes_of(other, inputs)


@pytest.mark.parametrize(
    ("what", "reentrant"),
    [
        ("wrapped", True),
        ("layer", False),
        *(sweep(what, True) for what in ("model", "base", "layer", "wrapped layer")),
        *(sweep(what, False) for what in ("wrapped", "model", "base", "wrapped layer")),
    ],
)
def test_a_compiled_model_with_gradient_checkpointing_is_refused(what: str, reentrant: bool) -> None:
    """The recomputation ran outside of any call: the loss was that of the routes, the gradient that of others."""
    inputs = tokens()
    routes = one_layer_routes(inputs)
    model, run = compiled_parts(what)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    contexts = [replay_routes(model, routes, once=True)]
    if what == "wrapped":
        contexts += [noisy_routes(model, 1.0), biased_routes(model)]
    for context in contexts:
        with pytest.raises(RoutingError, match=r"compiled.*gradient_checkpointing_disable.*compile attention"), context:
            run(inputs, use_cache=False).logits.square().mean().backward()
    with torch.no_grad(), replay_routes(model, routes, once=True) as replay:  # nothing is recomputed
        run(inputs, use_cache=False)
    assert replay.replayed_fraction == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("mlp", True),
        ("router", False),
        ("model", True),
        *(
            sweep(*case)
            for case in (("mlp", False), ("router", True), ("layer", True), ("layer", False), ("model", False))
        ),
    ],
)
def test_a_checkpoint_by_hand_around_or_in_what_is_compiled_is_refused(what: str, late: bool) -> None:
    """Neither the forward nor its recomputation was seen: the gradient was that of other experts."""
    inputs = tokens()
    routes = one_layer_routes(inputs)
    model, run = compiled_parts(what)
    layer = model.model.layers[0]
    if late and what == "model":  # the model's own checkpoints, of which nothing was known when it was compiled
        match, switch = "gradient_checkpointing_disable", model.gradient_checkpointing_enable
    else:
        match = "gradient_checkpointing_disable" if what == "model" else r"layers\.0.*by hand"

        def switch(options: dict[str, bool]) -> None:
            forward = layer.forward
            layer.forward = lambda h, **kwargs: checkpoint(lambda x: forward(x, **kwargs), h, **options)

    if not late:
        switch({"use_reentrant": True})
    with pytest.raises(RoutingError, match=match), replay_routes(model, routes):
        if late:
            switch({"use_reentrant": True})
        run(inputs, use_cache=False).logits.square().mean().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("what", ["mlp", "router"])
def test_compiled_parts_of_layers_replay_under_gradient_checkpointing(what: str) -> None:
    inputs = tokens()
    routes = one_layer_routes(inputs)
    found = []
    for part in ("nothing", what):
        model, run = compiled_parts(part)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with replay_routes(model, routes, once=True):
            loss = run(inputs, use_cache=False).logits.square().mean()
        loss.backward()
        found.append({name.replace("_orig_mod.", ""): grad for name, grad in grads(model).items()})
    assert_same(*found, exact=False)
    torch._dynamo.reset()


def test_a_compiled_model_with_gradient_checkpointing_is_recorded() -> None:
    inputs = tokens()
    model, _ = compiled_parts("nothing")
    wanted = routes_of(model, inputs)
    model.zero_grad()
    model(inputs, use_cache=False).logits.square().mean().backward()
    plain = grads(model)
    model, run = compiled_parts("wrapped")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with record_routes(model) as recording:
        run(inputs, use_cache=False).logits.square().mean().backward()
    assert recording.routes.equal(wanted)
    assert_same(plain, grads(model), exact=False)
    torch._dynamo.reset()


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


def test_a_compiled_model_refuses_other_tokens_and_a_forgotten_mask() -> None:
    """They were compared in uncompiled calls only: any tokens were replayed, with a fraction of 1."""
    torch._dynamo.reset()
    model, inputs = moe(), tokens()
    model.model.layers = model.model.layers[:1]
    model.set_experts_implementation("batched_mm")
    mask = torch.ones_like(inputs)
    mask[0, :2] = 0
    plain, masked = routes_of(model, inputs), routes_of(model, inputs, attention_mask=mask)
    with attach(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # nothing waits for the comparison

        def replay(given: Tensor, routes: RoutedExperts, attention_mask: Tensor | None = None, **options: Any) -> float:
            with replay_routes(compiled, routes, **options) as replayed:
                compiled(given, attention_mask=attention_mask, use_cache=False)
            return replayed.replayed_fraction

        assert replay(inputs, plain) == replay(inputs, masked, mask) == 1
        for others, count in ((inputs.flip(0), int((inputs != inputs.flip(0)).sum())), (inputs - 1, inputs.numel())):
            with pytest.raises(RoutingError, match=f"recorded for other tokens: {count} of compiled calls differ"):
                replay(others, plain)
            assert replay(others, plain, check_tokens=False) == 1
        with pytest.raises(RoutingError, match=r"attention mask that hides 2 tokens of padding.*forgotten"):
            replay(inputs, masked)
        with replay_routes(compiled, plain) as replayed:  # a count that is asked for inside says so, too, and once
            compiled(inputs.flip(0), use_cache=False)
            with pytest.raises(RoutingError, match="recorded for other tokens"):
                _ = replayed.replayed_rows
        assert replay(inputs, plain) == 1
    torch._dynamo.reset()


def test_decoding_that_is_compiled_goes_on_with_a_prefill_that_is_not() -> None:
    """What generate() does with a static cache on a GPU: the compiled call cannot see where the cache lies."""
    torch._dynamo.reset()
    model, inputs = moe(), tokens(2, 5)
    model.model.layers = model.model.layers[:1]  # compilation is slow
    model.config.num_hidden_layers = 1
    model.set_experts_implementation("batched_mm")
    routes = routes_of(disturbed(model, 0.2), inputs)
    with torch.no_grad(), attach(model):
        compiled = torch.compile(model, backend="aot_eager")
        with replay_routes(model, routes) as replay, record_routes(model) as recording:
            cache = StaticCache(config=model.config, max_cache_len=8)
            model(inputs[:, :4], past_key_values=cache)
            compiled(inputs[:, 4:], past_key_values=cache)
    assert replay.replayed_fraction == 1 and recording.routes.equal(routes)


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


def test_what_is_said_of_compiled_code_leads_to_a_recording() -> None:
    """Compiled and run, refused, attached as it says: torch still runs the code that it made without hooks."""
    torch._dynamo.reset()
    inputs = tokens()
    first = torch.compile(moe(), backend="eager")
    first(inputs)
    with pytest.raises(RoutingError, match=r"Call attach.*torch._dynamo.reset\(\) before both"), record_routes(first):
        pass
    model = moe()
    routes = routes_of(model, inputs)
    for reset in (False, True):
        if reset:
            torch._dynamo.reset()
        with attach(model), record_routes(model) as recording:
            torch.compile(model, backend="eager")(inputs)
        if not reset:
            with pytest.raises(RoutingError, match=r"nothing was seen.*torch._dynamo.reset\(\) forgets that"):
                _ = recording.routes
    assert recording.routes.equal(routes)
    torch._dynamo.reset()
