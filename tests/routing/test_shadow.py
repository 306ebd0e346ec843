"""The shadow of a replay: what the routers would have chosen, and what the forced choice costs in their scores."""

import copy

import pytest
import torch
from routing_helpers import disturbed, grads, moe, routes_of, sets, tokens

from moe_rl.routing import RoutingError, biased_routes, record_routes, replay_routes


def test_shadow_is_the_live_choice_and_regret_its_price() -> None:
    model, inputs = moe(), tokens()
    old = routes_of(disturbed(model, 0.2), inputs)
    with torch.no_grad(), replay_routes(model, old, shadow=True) as replay:
        output = model(inputs, output_router_logits=True)
    probabilities = torch.stack([x.reshape(2, 7, -1) for x in output.router_logits], dim=2).softmax(-1)
    best = probabilities.topk(2)
    assert torch.equal(sets(replay.shadow.ids), sets(best.indices))
    wanted = best.values.sum(-1) - probabilities.gather(-1, old.ids).sum(-1)
    torch.testing.assert_close(replay.regret, wanted)
    assert bool((replay.regret >= 0).all()) and replay.regret.shape == (2, 7, 3)
    same = (sets(replay.shadow.ids) == sets(old.ids)).all(-1)
    assert bool((replay.regret[same] < 1e-6).all()) and bool((replay.regret[~same] > 0).all())
    assert replay.shadow.sites == old.sites and torch.equal(replay.shadow.tokens, old.tokens)


@pytest.mark.parametrize("slots", [None, 1])
def test_regret_is_of_the_scores_that_were_ranked_not_of_gates_renormalised_in_place(slots: int | None) -> None:
    """Qwen3-MoE with norm_topk_prob, as its checkpoints have it, divides the values of its topk in place."""
    model, inputs = moe(), tokens()
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = True
    old = routes_of(disturbed(model, 0.2), inputs)
    with torch.no_grad(), replay_routes(model, old, slots=slots, shadow=True) as replay, record_routes(model) as used:
        logits = model(inputs, output_router_logits=True).router_logits
    probabilities = torch.stack([x.reshape(2, 7, -1) for x in logits], dim=2).softmax(-1)
    price = probabilities.topk(2).values.sum(-1) - probabilities.gather(-1, used.routes.ids).sum(-1)
    assert float(price.max()) > 1e-3
    torch.testing.assert_close(replay.regret, price)


def test_regret_counts_the_bias_that_the_choice_was_made_with() -> None:
    model, inputs = moe(), tokens()
    old = routes_of(model, inputs)
    bias = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 0.3
    with torch.no_grad(), biased_routes(model, bias), replay_routes(model, old, shadow=True) as replay:
        logits = model(inputs, output_router_logits=True).router_logits
    ranked = torch.stack([x.reshape(2, 7, -1) for x in logits], dim=2).softmax(-1) + bias
    best = ranked.topk(2)
    assert torch.equal(sets(replay.shadow.ids), sets(best.indices))
    price = best.values.sum(-1) - ranked.gather(-1, old.ids).sum(-1)
    assert float(price.max()) > 0.1
    torch.testing.assert_close(replay.regret, price)


@pytest.mark.parametrize(
    "family", ["DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM", "PhimoeForCausalLM", "JetMoeForCausalLM"]
)
def test_shadow_of_the_own_routes_is_those_routes(family: str) -> None:
    model, inputs = moe(family), tokens()
    own = routes_of(model, inputs)
    with torch.no_grad(), replay_routes(model, own, shadow=True) as replay:
        model(inputs)
    assert torch.equal(sets(replay.shadow.ids), sets(own.ids))
    assert float(replay.regret.max()) < 1e-6
    with torch.no_grad(), replay_routes(model, own, sites=[-1], shadow=True) as replay:
        model(inputs)
    assert torch.equal(sets(replay.shadow.ids), sets(own.ids))


def test_shadow_of_a_generation_is_joined_and_gradients_do_not_know_it() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        model.generate(inputs, max_new_tokens=4, do_sample=False)
    routes = recording.routes
    with replay_routes(model, routes, shadow=True) as replay:
        model.generate(inputs, max_new_tokens=4, do_sample=False)
    assert replay.shadow.equal(routes) and replay.regret.shape == routes.shape[:3]
    other, old = disturbed(model), routes_of(model, inputs)
    found = []
    for shadow in (False, True):
        with replay_routes(other, old, shadow=shadow) as replay:
            other(inputs).logits.square().mean().backward()
        found.append(grads(other))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not replay.regret.requires_grad
    with pytest.raises(RoutingError, match="shadow=True"), replay_routes(other, old) as replay:
        _ = replay.shadow


def test_a_replay_of_the_sites_with_few_experts_ranks_those_with_many() -> None:
    """The shadow is of all sites: in the one byte that holds the replayed ones, expert 256 would be expert 0."""
    model, inputs = moe().eval(), tokens()
    wide = copy.deepcopy(model.config)
    wide.num_experts = 300
    block = type(model.model.layers[1].mlp)(wide)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].mlp = block.eval()
    routes = routes_of(model, inputs)
    few = routes.select([i for i, site in enumerate(routes.sites) if ".1." not in site])
    assert few.packed.dtype == torch.uint8 and int(routes.ids.max()) > 255
    with torch.no_grad(), replay_routes(model, few, sites=few.sites, shadow=True) as replay:
        model(inputs)
    assert replay.shadow.equal(routes)
