"""A selection bias: the choice is of scores + bias, all else is of the scores alone."""

import pytest
import torch
from routing_helpers import assert_same, grads, hooked, moe, routes_of, tokens

from moe_rl.routing import (
    RoutingError,
    UnsupportedModelError,
    biased_routes,
    noisy_routes,
    record_margins,
    record_routes,
    replay_routes,
)


def bias_for(model, inputs, scale=0.1):
    routes = routes_of(model, inputs)
    shape = routes.shape[2], routes.num_experts
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_the_choice_is_the_top_k_of_score_plus_bias():
    model, inputs = moe(), tokens()
    bias = bias_for(model, inputs)
    with biased_routes(model, bias), record_routes(model) as recording:
        logits = model(input_ids=inputs, output_router_logits=True).router_logits
    k = recording.routes.shape[-1]
    for site, scores in enumerate(logits):
        expected = (scores.softmax(-1) + bias[site]).topk(k).indices
        found = recording.routes.site_ids(site).reshape(-1, k)
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values), site
    plain = routes_of(model, inputs)
    assert not recording.routes.equal(plain) and not hooked(model)


def test_gates_and_gradients_are_those_of_a_replay_of_the_biased_choice():
    model, inputs = moe(), tokens()
    bias = bias_for(model, inputs)
    with biased_routes(model, bias), record_routes(model) as recording:
        out = model(input_ids=inputs).logits
        out.square().sum().backward()
    own = grads(model)
    with replay_routes(model, recording.routes):
        again = model(input_ids=inputs).logits
        again.square().sum().backward()
    assert torch.equal(out, again)
    assert all(torch.equal(value, own[name]) for name, value in grads(model).items())


@torch.no_grad()
def test_no_bias_changes_no_bit_and_a_replay_and_noise_stand_above_it():
    model, inputs = moe(), tokens()
    plain, routes = model(input_ids=inputs).logits, routes_of(model, inputs)
    with biased_routes(model) as bias:
        assert torch.equal(model(input_ids=inputs).logits, plain)
        bias += bias_for(model, inputs)
        with replay_routes(model, routes):
            assert torch.equal(model(input_ids=inputs).logits, plain)
        biased = routes_of(model, inputs)
        with noisy_routes(model, 0.0), record_routes(model) as recording:
            model(input_ids=inputs)
        assert recording.routes.equal(biased), "noise of size 0 leaves the biased choice"
        live = type(routes)(torch.full(routes.shape, -1), routes.sites, routes.num_experts)
        with replay_routes(model, live), record_routes(model) as recording:
            model(input_ids=inputs)
        assert recording.routes.equal(biased), "rows of -1 are left to the biased router"


@torch.no_grad()
def test_biases_inside_each_other_add_up():
    model, inputs = moe(), tokens()
    one, two = bias_for(model, inputs), bias_for(model, inputs).flip(1)
    with biased_routes(model, one + two), record_routes(model) as expected:
        model(input_ids=inputs)
    with biased_routes(model, one), biased_routes(model, two), record_routes(model) as recording:
        model(input_ids=inputs)
    assert recording.routes.equal(expected.routes)
    with biased_routes(model, two), record_routes(model) as inner:
        model(input_ids=inputs)
    assert not inner.routes.equal(expected.routes)


@torch.no_grad()
def test_margins_are_of_the_biased_scores():
    model, inputs = moe(), tokens()
    bias = bias_for(model, inputs)
    with biased_routes(model, bias), record_margins(model) as margins, record_routes(model) as recording:
        logits = model(input_ids=inputs, output_router_logits=True).router_logits
    k = recording.routes.shape[-1]
    for site, scores in enumerate(logits):
        best = (scores.softmax(-1) + bias[site]).sort(-1, descending=True).values
        torch.testing.assert_close(margins.values[..., site].flatten(), best[:, k - 1] - best[:, k])


def test_the_self_check_of_the_other_mode_sees_no_bias():
    model, inputs = moe().eval(), tokens()
    with biased_routes(model, bias_for(model, inputs, 10.0)), torch.no_grad():
        model.train()
        with record_routes(model) as recording:
            model(input_ids=inputs)
    assert recording.routes.shape[0] == len(inputs)


def test_recomputation_finds_the_same_biased_choice():
    model, inputs = moe().train(), tokens()
    bias = bias_for(model, inputs)
    with biased_routes(model, bias):
        model(input_ids=inputs).logits.square().sum().backward()
    plain = grads(model)
    model.gradient_checkpointing_enable()
    with biased_routes(model, bias):
        model(input_ids=inputs).logits.square().sum().backward()
    assert all(torch.equal(value, plain[name]) for name, value in grads(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_bias_that_is_changed_before_the_backward_changes_no_recomputation(reentrant):
    model, inputs = moe().train(), tokens()
    change = bias_for(model, inputs, 1.0)

    def gradients():
        with biased_routes(model, bias_for(model, inputs).flip(1)), biased_routes(model) as bias:
            bias += bias_for(model, inputs)
            loss = model(input_ids=inputs).logits.square().sum()
            bias.copy_(change)
            loss.backward()
        return grads(model)

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(gradients(), plain)
    with biased_routes(model) as bias:
        loss = model(input_ids=inputs).logits.square().sum()
        bias.copy_(change)
        loss.backward()
        again = routes_of(model, inputs)
    natural = grads(model)
    model.gradient_checkpointing_disable()
    model(input_ids=inputs).logits.square().sum().backward()
    assert_same(natural, grads(model))
    assert not again.equal(routes_of(model, inputs)), "the next call has the new bias"


def test_what_cannot_have_a_bias_is_refused():
    model = moe()
    with pytest.raises(RoutingError, match=r"bias must be \[L,E\]"), biased_routes(model, torch.zeros(1, 3)):
        pass
    bias = torch.zeros(bias_for(model, tokens()).shape)
    bias[1, 2] = float("nan")
    with pytest.raises(RoutingError, match=r"expert 2 is NaN \(one of 1\)"), biased_routes(model, bias):
        pass
    with biased_routes(model, bias.nan_to_num(-torch.inf)):  # leaves an expert out
        assert not (routes_of(model, tokens()).ids[:, :, 1] == 2).any()
    for family in ("DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "PhimoeForCausalLM"):  # groups, a table, max calls
        with pytest.raises(UnsupportedModelError, match="e_score_correction_bias"), biased_routes(moe(family)):
            pass
