"""Predicted routes against a router whose weights have moved, and what is read of routers against the model's own."""

import copy

import jaxtyping
import numpy as np
import pytest
import torch
from routing_helpers import hooked, moe, routes_of, tokens

from moe_rl.routing import (
    RoutingError,
    biased_routes,
    change_counts,
    find_sites,
    noisy_routes,
    predicted_routes,
    record_margins,
    record_router_logits,
    record_routes,
    replay_routes,
    rerun,
)

FAMILIES = ["Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GraniteMoeForCausalLM", "DeepseekV3ForCausalLM"]


def read(model, inputs):
    with torch.no_grad(), record_router_logits(model) as reading:
        model(input_ids=inputs)
    return reading


def weights_for(model, inputs, scale=1.0):
    reading = read(model, inputs)
    shape = reading.logits.shape[2], reading.logits.shape[3], reading.inputs.shape[3]
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_only_the_choice_is_predicted(family):
    """The output is that of a replay of the predicted routes: gate weights are the live router's."""
    model, inputs = moe(family), tokens()
    plain, routes = model(input_ids=inputs).logits, routes_of(model, inputs)
    weights = weights_for(model, inputs)
    with predicted_routes(model, 0 * weights), record_routes(model) as unmoved:
        assert torch.equal(model(input_ids=inputs).logits, plain)
    assert unmoved.routes.equal(routes)
    with predicted_routes(model, weights), record_routes(model) as predicted:
        out = model(input_ids=inputs).logits
    assert not predicted.routes.equal(routes)
    with replay_routes(model, predicted.routes):
        assert torch.equal(model(input_ids=inputs).logits, out)
    with replay_routes(model, routes), predicted_routes(model, weights):
        assert torch.equal(model(input_ids=inputs).logits, plain), "a replay wins where it forces"
    assert hooked(model) == []


@torch.no_grad()
def test_autocast_does_not_round_the_prediction(monkeypatch):
    model, inputs, moves = moe(), tokens(), []
    weights = weights_for(model, inputs)
    init = rerun.Moved.__init__
    monkeypatch.setattr(
        rerun.Moved, "__init__", lambda self, move: init(self, lambda *a: moves.append(move(*a)) or moves[-1])
    )
    with torch.autocast("cpu", torch.bfloat16), predicted_routes(model, weights):
        model(input_ids=inputs)
    assert [move.dtype for move in moves] == [torch.float32] * 3


@torch.no_grad()
def test_the_first_site_chooses_as_one_whose_weights_have_moved():
    """Deeper ones see other hidden states: with the moved router the gates move, too."""
    model, inputs = moe(), tokens()
    weights = weights_for(model, inputs, 0.3)
    moved = copy.deepcopy(model)
    moved.get_submodule(routes_of(model, inputs).sites[0]).weight += weights[0]
    with predicted_routes(model, weights), record_routes(model) as predicted:
        model(input_ids=inputs)
    first = predicted.routes.ids[:, :, 0]
    assert torch.equal(first, routes_of(moved, inputs).ids[:, :, 0])
    assert not torch.equal(first, routes_of(model, inputs).ids[:, :, 0])


@pytest.mark.parametrize("family", FAMILIES[:3])
@torch.no_grad()
def test_inputs_and_logits_of_every_router_are_read(family):
    model, inputs = moe(family), tokens()
    expected = model(input_ids=inputs, output_router_logits=True)
    with record_router_logits(model) as reading, record_routes(model) as recording:
        assert torch.equal(model(input_ids=inputs).logits, expected.logits)
    assert recording.routes.equal(routes_of(model, inputs))
    for site, logits in enumerate(expected.router_logits):
        torch.testing.assert_close(reading.logits[:, :, site].flatten(0, 1), logits)
    if family == "Qwen3MoeForCausalLM":
        for site, name in enumerate(recording.routes.sites):
            weight = model.get_submodule(name).weight
            torch.testing.assert_close(reading.inputs[:, :, site] @ weight.T, reading.logits[:, :, site])


@torch.no_grad()
def test_under_a_replay_logits_are_those_of_the_replayed_states():
    model, inputs = moe(), tokens()
    routes = routes_of(moe(seed=1), inputs)
    with replay_routes(model, routes):
        expected = model(input_ids=inputs, output_router_logits=True).router_logits
        with record_router_logits(model) as reading:
            model(input_ids=inputs)
    for site, logits in enumerate(expected):
        torch.testing.assert_close(reading.logits[:, :, site].flatten(0, 1), logits)


@torch.no_grad()
def test_decoding_follows_the_prediction():
    """What generate() chooses under it is what one forward over the whole sequence chooses."""
    model, inputs = moe(), tokens()
    weights = weights_for(model, inputs)
    with predicted_routes(model, weights):
        with record_routes(model) as decoded:
            out = model.generate(inputs, max_new_tokens=5, do_sample=False)
        with record_routes(model) as whole:
            model(input_ids=out)
    ids = decoded.routes.ids[:, : out.shape[1] - 1].sort(-1).values
    assert torch.equal(ids, whole.routes.ids[:, :-1].sort(-1).values)


def test_gradients_are_those_of_a_replay():
    model, inputs = moe().train(), tokens()
    weights = weights_for(model, inputs)
    with predicted_routes(model, weights), record_routes(model) as predicted:
        model(input_ids=inputs).logits.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with replay_routes(model, predicted.routes):
        model(input_ids=inputs).logits.square().sum().backward()
    assert all(torch.equal(p.grad, found[name]) for name, p in model.named_parameters() if p.grad is not None)


def test_what_does_not_fit_is_refused():
    model, inputs = moe(), tokens()
    weights = weights_for(model, inputs)
    with (
        pytest.raises(RoutingError, match=r"weights must be \[L,E,H\] of 3 sites, got \[1, "),
        predicted_routes(model, weights[:1]),
    ):
        pass
    with (
        pytest.raises(RoutingError, match=r"weights must be \[E,H\] = \[8, 32\], got \[8, 5\]"),
        predicted_routes(model, weights[..., :5]),
    ):
        model(input_ids=inputs)
    broken = weights.clone()
    broken[1, 2, 3] = float("nan")
    with pytest.raises(RoutingError, match=r"weights: 1 of \d+ are not finite"), predicted_routes(model, broken):
        pass
    for other in (noisy_routes(model, 0.1), record_margins(model), predicted_routes(model, weights)):
        with other, pytest.raises(RoutingError, match="of two only one would act"), record_router_logits(model):
            pass
    with record_router_logits(model) as reading:
        pass
    with pytest.raises(RoutingError, match="nothing was read"):
        _ = reading.logits
    with record_router_logits(model) as reading, torch.no_grad():
        model(input_ids=inputs)
        model(input_ids=inputs[:, :3])
    with pytest.raises(RoutingError, match=r"different lengths \[3, 7\]"):
        _ = reading.inputs


@pytest.mark.parametrize("context", [biased_routes, predicted_routes])
def test_what_is_no_tensor_of_numbers_is_refused(context, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    model = moe()
    for given, got in [
        ([[0.0]], "must be a tensor, got list; of lists and arrays: torch.as_tensor"),
        (np.zeros((3, 8)), "must be a tensor, got ndarray"),
        (torch.zeros(3, 8, dtype=torch.complex64), "must be a dense tensor of real numbers, got torch.complex64"),
        (torch.zeros(3, 8, device="meta"), "on meta"),
        (torch.zeros(3, 8).to_sparse(), "got torch.float32, torch.sparse_coo"),
    ]:
        with pytest.raises(RoutingError, match=got), context(model, given):
            pass
    assert hooked(model) == []


def test_each_site_has_the_weights_of_its_place():
    model, inputs = moe(), tokens()
    plain, routers = routes_of(model, inputs), [site.module.weight.detach() for site in find_sites(model)]
    weights = torch.stack([torch.zeros_like(routers[0]), *(-2 * weight for weight in routers[1:])])
    with predicted_routes(model, weights):  # the last experts become the first, but at site 0
        turned = routes_of(model, inputs)
    changed = change_counts(plain, turned).per_site_changed
    assert changed[0] == 0 and bool((changed[1:] == inputs.numel()).all())
