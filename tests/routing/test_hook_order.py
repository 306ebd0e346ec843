"""Hooks of others on the experts and the routers, added after ours: what they change is seen."""

from typing import Any

import pytest
import torch
from routing_helpers import hooked, moe, routes_of, tokens
from torch import Tensor

from moe_rl.policy.router_precision import keep_routers_fp32
from moe_rl.routing import (
    RoutingError,
    attach,
    noisy_routes,
    predicted_routes,
    record_margins,
    record_router_logits,
    record_routes,
    replay_routes,
)


def next_expert(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0], (args[1] + 1) % 8, args[2]


def change_ids(model: Any) -> list[Tensor]:
    """Add a hook that changes the ids at the last site, and the ids that reach the experts behind it."""
    arrived: list[Tensor] = []
    experts = model.model.layers[-1].mlp.experts
    experts.register_forward_pre_hook(next_expert)
    experts.register_forward_pre_hook(lambda module, args: arrived.append(args[1].clone()))
    return arrived


@pytest.mark.parametrize("attached", [False, True])
def test_a_hook_that_changes_ids_is_seen_by_recordings_and_refused_in_replays(attached: bool) -> None:
    model, inputs = moe(), tokens()
    assert model.config.num_experts == 8
    routes = routes_of(model, inputs)
    handle = attach(model) if attached else None
    with torch.no_grad(), record_routes(model) as recording:
        arrived = change_ids(model)
        model(inputs)
    last = recording.routes.site_ids(-1)
    assert torch.equal(last.flatten(0, 1), arrived[-1]) and not torch.equal(last, routes.site_ids(-1))
    if handle is not None:
        handle.detach()
    assert not hooked(model)
    model = moe()
    handle = attach(model) if attached else None
    with pytest.raises(RoutingError, match="the experts got others than were forced"), replay_routes(model, routes):
        change_ids(model)
        model(inputs)
    assert handle is None or hooked(model)


def test_hooks_added_between_attaching_and_compiling_are_seen() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    with attach(model):
        model.model.layers[-1].mlp.experts.register_forward_pre_hook(next_expert)
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad(), record_routes(model) as recording:
            compiled(inputs, use_cache=False)
    torch._dynamo.reset()
    assert not torch.equal(recording.routes.site_ids(-1), routes.site_ids(-1))


def test_hooks_of_others_keep_their_order_and_may_all_be_taken_off() -> None:
    model, inputs = moe(), tokens()
    experts = model.model.layers[0].mlp.experts
    called: list[int] = []
    with torch.no_grad(), record_routes(model) as recording:
        for number in range(3):
            experts.register_forward_pre_hook(lambda module, args, number=number: called.append(number))
        model(inputs)
        assert called == [0, 1, 2] and len(recording.steps) == 1
        experts._forward_pre_hooks.clear()
        with pytest.raises(RoutingError, match="1 of 3 routing sites did not run"):
            model(inputs)


CONTEXTS = {
    "noise of 0": lambda model: noisy_routes(model, 0.0),
    "a prediction of 0": lambda model: predicted_routes(model, torch.zeros(3, 8, model.config.hidden_size)),
    "margins": record_margins,
    "router logits": record_router_logits,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_router_that_runs_once_more_runs_behind_a_hook_added_later(context: str) -> None:
    model, inputs = moe(), tokens()
    with attach(model), torch.no_grad():
        plain = model(inputs).logits
        with CONTEXTS[context](model), record_routes(model) as recording:
            for layer in model.model.layers:  # one of others, which changes what the router is given
                layer.mlp.gate.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
            got = model(inputs).logits
        assert not torch.equal(got, plain)
        with record_routes(model) as bare:
            assert torch.equal(model(inputs).logits, got)
    assert torch.equal(bare.routes.ids, recording.routes.ids)


def test_routers_kept_in_fp32_after_attaching_take_noise() -> None:
    model, inputs = moe().bfloat16(), tokens()
    with attach(model), torch.no_grad():
        keep_routers_fp32(model)
        with noisy_routes(model, 0.0), record_routes(model) as recording:
            model(inputs)
        with record_routes(model) as bare:
            model(inputs)
    assert torch.equal(bare.routes.ids, recording.routes.ids)
