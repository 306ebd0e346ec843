"""Experts implementations in whole models: logits, gradients, generation and routes are those of eager experts."""

import pytest
import torch
from experts_helpers import MODELS, NAMES, PLAIN, assert_same, logits_and_gradients, make_model

from moe_rl.routing import RoutedExperts, experts_sorted, record_routes, replay_routes
from moe_rl.routing import experts as room


@PLAIN
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_equal_eager(monkeypatch, ours, name):
    model, tokens = make_model(name), torch.arange(14).view(2, 7)
    expected = logits_and_gradients(model, tokens)
    file, function = {
        "megablocks_reference": (room, "dropless_experts"),
        "sorted_mm": (experts_sorted, "check_experts"),  # which it calls first
    }[ours]
    ran, run = [], getattr(file, function)
    monkeypatch.setattr(file, function, lambda *args: ran.append(args[0]) or run(*args))
    model.set_experts_implementation(ours)
    got = logits_and_gradients(model, tokens)
    assert ran == [m for m in model.modules() if hasattr(m, "_apply_gate")]  # every experts layer, once, in order
    routers = [n for n in got if n.endswith((".gate.weight", "router.weight", "router.layer.weight"))]
    assert len(routers) == len(ran) and all(got[n].any() for n in routers)  # the gradient passes the weights
    assert_same(got, expected, rtol=1e-9, atol=1e-12)


@PLAIN
def test_chosen_when_the_model_is_made(ours):
    tokens = torch.arange(14).view(2, 7)
    model = make_model("MixtralConfig", ours)
    assert model.config._experts_implementation == ours
    expected = logits_and_gradients(make_model("MixtralConfig"), tokens)
    assert_same(logits_and_gradients(model, tokens), expected, rtol=1e-9, atol=1e-12)


@PLAIN
def test_generation_keeps_the_name_and_the_tokens(ours):
    model, prompt = make_model("OlmoeConfig"), torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.set_experts_implementation(ours)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert model.config._experts_implementation == ours


@PLAIN
@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig"])
def test_routes_are_recorded_and_replayed_unchanged(ours, name):
    model, tokens = make_model(name), torch.arange(14).view(2, 7)
    with record_routes(model) as eager:
        model(tokens)
    model.set_experts_implementation(ours)
    with record_routes(model) as recording:
        live = model(tokens).logits
    routes = recording.routes
    assert torch.equal(routes.ids, eager.routes.ids) and routes.sites == eager.routes.sites

    with replay_routes(model, routes):
        assert torch.equal(model(tokens).logits, live)
    # Routes that the model would not choose: every expert's neighbour. Forced alike, the two must agree.
    shifted = RoutedExperts((routes.ids.long() + 1) % routes.num_experts, routes.sites, routes.num_experts)
    with replay_routes(model, shifted):
        got = logits_and_gradients(model, tokens)
    model.set_experts_implementation("eager")
    with replay_routes(model, shifted):
        expected = logits_and_gradients(model, tokens)
    assert_same(got, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(got["logits"], live)


def test_registering_twice_changes_nothing():
    assert room.register_experts() == NAMES == ("megablocks", "megablocks_reference", "sorted_mm")
    make_model("MixtralConfig").set_experts_implementation("megablocks")
