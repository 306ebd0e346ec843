"""Replay in parts, its counts, its errors; selection noise."""

import copy
from typing import Any

import jaxtyping
import pytest
import torch
from routing_helpers import disturbed, grads, moe, routes_of, sets, tokens
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    find_sites,
    noisy_routes,
    record_margins,
    record_routes,
    replay_routes,
)


def used(model: Any, inputs: Tensor, routes: RoutedExperts, **options: Any) -> tuple[Tensor, Any]:
    with torch.no_grad(), replay_routes(model, routes, **options) as replay, record_routes(model) as recording:
        model(inputs)
    return recording.routes.ids, replay


@pytest.mark.parametrize("sites", [[0, 2], [-3, "model.layers.2.mlp.gate"], "*.layers.[02].*"])
def test_only_these_sites(sites: Any) -> None:
    model, inputs = moe(), tokens()
    old = routes_of(disturbed(model), inputs)
    ids, replay = used(model, inputs, old, sites=sites)
    assert torch.equal(ids[:, :, [0, 2]], old.ids[:, :, [0, 2]])
    assert not torch.equal(ids[:, :, 1], old.ids[:, :, 1])
    assert (replay.replayed_rows, replay.live_rows) == (2 * 7 * 2, 2 * 7)  # B·T·2 sites forced, B·T·1 live
    assert replay.replayed_fraction == pytest.approx(2 / 3)


def test_only_these_tokens() -> None:
    model, inputs = moe(), tokens()
    old, live = routes_of(disturbed(model), inputs), routes_of(model, inputs)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 6] = True
    ids, replay = used(model, inputs, old, tokens=mask)
    assert torch.equal(ids[mask], old.ids[mask])
    assert torch.equal(ids[0, :2], live.ids[0, :2])  # before the first forced token nothing has changed
    assert torch.equal(ids[1, :6], live.ids[1, :6])
    assert (replay.replayed_rows, replay.live_rows) == (4 * 3, 10 * 3)
    assert torch.equal(used(model, inputs, old, tokens=~torch.zeros_like(mask))[0], old.ids)
    assert torch.equal(used(model, inputs, old, tokens=torch.zeros_like(mask))[0], live.ids)


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV2", "DeepseekV3", "GraniteMoe"])  # the last ranks logits
def test_only_the_first_slots(name: str) -> None:
    model, inputs = moe(f"{name}ForCausalLM"), tokens()
    model.eval()
    old = routes_of(disturbed(model), inputs)
    with torch.no_grad(), replay_routes(model, old, slots=1) as replay, record_routes(model) as recording:
        output = model(inputs, output_router_logits=True)
    ids = recording.routes.ids
    assert torch.equal(ids[..., 0], old.ids[..., 0])
    assert replay.replayed_fraction == 1
    if name == "Qwen3Moe":  # softmax keeps the order of the logits: the other slot is the best of the rest
        logits = torch.stack([x.reshape(2, 7, -1) for x in output.router_logits], dim=2)
        rest = logits.scatter(-1, ids[..., :1], float("-inf"))
        assert torch.equal(ids[..., 1], rest.argmax(-1))
    assert bool((ids[..., 0] != ids[..., 1]).all())
    assert torch.equal(used(model, inputs, old, slots=2)[0], old.ids)


def test_slots_that_are_not_forced_are_the_outer_replays_or_the_noises() -> None:
    model, inputs = moe(), tokens()
    inner, outer = (routes_of(disturbed(model, scale), inputs) for scale in (0.1, 0.3))
    inside = replay_routes(model, inner, slots=1)
    with torch.no_grad(), replay_routes(model, outer), inside, record_routes(model) as recording:
        model(inputs)
    first, ids = inner.ids[..., 0], recording.routes.ids
    other = torch.where(outer.ids[..., 0] == first, outer.ids[..., 1], outer.ids[..., 0])
    assert torch.equal(ids, torch.stack([first, other], dim=-1))
    live = outer.ids
    live[:, ::2] = -1  # there the rest of the inner replay is chosen by the router
    partly = RoutedExperts(live, outer.sites, 8)
    inside = replay_routes(model, inner, slots=1)
    with torch.no_grad(), replay_routes(model, partly), inside, record_routes(model) as recording:
        model(inputs)
    mixed, (clean, _) = recording.routes.ids, used(model, inputs, inner, slots=1)
    assert torch.equal(mixed[..., 0], first) and bool((mixed[..., 0] != mixed[..., 1]).all())
    assert torch.equal(mixed[:, 1::2], ids[:, 1::2]) and torch.equal(mixed[:, 0, 0], clean[:, 0, 0])
    assert not torch.equal(clean, ids)
    inside = replay_routes(model, inner, slots=1)
    with torch.no_grad(), noisy_routes(model, 50.0), inside, record_routes(model) as recording:
        model(inputs)
    ids = recording.routes.ids
    assert torch.equal(ids[..., 0], first) and bool((ids[..., 0] != ids[..., 1]).all())
    assert float((ids[..., 1] != clean[..., 1]).float().mean()) > 0.5


@pytest.mark.parametrize("family", ["PhimoeForCausalLM", "DeepseekV2ForCausalLM", "JetMoeForCausalLM"])
def test_partial_replay_of_odd_routers(family: str) -> None:
    model, inputs = moe(family), tokens()
    old, live = routes_of(disturbed(model), inputs), routes_of(model, inputs)
    mask = torch.arange(7).expand(2, 7) >= 3
    ids, _ = used(model, inputs, old, tokens=mask)
    assert torch.equal(ids[mask], old.ids[mask])
    assert torch.equal(ids[~mask], live.ids[~mask])
    ids, _ = used(model, inputs, old, slots=1)
    assert torch.equal(ids[..., 0], old.ids[..., 0])


def test_phimoe_in_train_mode_replays_its_own_sample() -> None:
    model, inputs = moe("PhimoeForCausalLM").train(), tokens()
    for site in find_sites(model):
        site.module.router_jitter_noise, site.module.input_jitter_noise = 0.5, 0.0

    def run(*contexts: Any) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(7)
        loss = model(inputs).logits.square().mean()
        loss.backward()
        return loss.detach(), grads(model)

    with record_routes(model) as recording:
        plain, wanted = run()
    with replay_routes(model, recording.routes):
        replayed, found = run()
    assert torch.equal(plain, replayed)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    torch.manual_seed(8)
    with record_routes(model) as other:
        model(inputs)
    assert not other.routes.equal(recording.routes)
    with replay_routes(model, recording.routes), record_routes(model) as again:
        model(inputs)
    assert again.routes.equal(recording.routes)


# -- routes that do not fit ------------------------------------------------------------------------------------------


def test_the_last_sampled_token_may_be_missing_if_the_others_prove_it() -> None:
    model, inputs = moe(), tokens(2, 8)
    routes = routes_of(model, inputs[:, :7])
    with torch.no_grad(), replay_routes(model, routes) as replay, record_routes(model) as recording:
        model(inputs)
    assert torch.equal(recording.routes.ids[:, :7], routes.ids)
    assert (replay.replayed_rows, replay.live_rows) == (2 * 7 * 3, 2 * 3)
    with replay_routes(model, routes, once=True):
        model(inputs)
    twice = r"forced 84 .* rows and left 0 live, but the routes hold 42 and lack 0"
    with pytest.raises(RoutingError, match=twice), replay_routes(model, routes, once=True):
        model(inputs)
        model(inputs)
    unknown = RoutedExperts(routes.ids, routes.sites, routes.num_experts)
    with replay_routes(model, unknown), pytest.raises(RoutingError, match="do not fit"):
        model(inputs)
    with replay_routes(model, routes), pytest.raises(RoutingError, match="do not fit"):
        model(inputs_embeds=model.get_input_embeddings()(inputs))


@pytest.mark.parametrize("cached", [1, 2, 6])
def test_the_missing_route_of_the_last_token_does_not_depend_on_what_was_cached(cached: int) -> None:
    model, inputs = moe(), tokens(2, 8)
    routes = routes_of(disturbed(model, 0.2), inputs[:, :7])
    with torch.no_grad(), replay_routes(model, routes) as replay, record_routes(model) as recording:
        cache = model(inputs[:, :cached], use_cache=True).past_key_values
        model(inputs[:, cached:], past_key_values=cache)
    assert torch.equal(recording.routes.ids[:, :7], routes.ids)
    assert (replay.replayed_rows, replay.live_rows) == (2 * 7 * 3, 2 * 3)


def test_rows_are_counted_over_calls_in_and_out_of_inference_mode() -> None:
    model, inputs = moe(), tokens()
    chosen = tokens(seed=1) % 2 == 0
    with replay_routes(model, routes_of(model, inputs), tokens=chosen) as replay:
        with torch.inference_mode():
            model(inputs)
        model(inputs).logits.sum().backward()
    assert replay.replayed_rows == 2 * 3 * int(chosen.sum()) and replay.live_rows == 2 * 3 * int((~chosen).sum())


@pytest.mark.parametrize("shape", [(2, 6), (2, 9), (1, 7), (3, 7)])
def test_another_shape_is_an_error(shape: tuple[int, int]) -> None:
    model = moe()
    routes = routes_of(model, tokens(2, 7))
    text = rf"2 sequences x 7 tokens do not fit this call of {shape[0]} x {shape[1]}.*another batch"
    with replay_routes(model, routes), pytest.raises(RoutingError, match=text) as found:
        model(tokens(*shape))
    assert ("use_cache=True" in str(found.value)) is (shape == (2, 6))


def test_other_tokens_are_an_error_that_names_the_row() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    changed = inputs.clone()
    changed[1, 4] = 3 if inputs[1, 4] != 3 else 4
    with replay_routes(model, routes), pytest.raises(RoutingError, match=r"sequence 1, token 4 was \d+ and is now"):
        model(changed)
    with replay_routes(model, routes.rows([1, 0])), pytest.raises(RoutingError, match="order of rows"):
        model(inputs)
    with replay_routes(model, routes, check_tokens=False) as replay:
        model(changed)
    assert replay.replayed_fraction == 1
    unknown = RoutedExperts(routes.ids, routes.sites, 8)
    with replay_routes(model, RoutedExperts.cat([routes.rows(0), unknown.rows(1)])) as replay:
        model(changed)  # nothing is known of the tokens of the second sequence
    assert replay.replayed_fraction == 1
    live = routes.ids
    live[1, 4, 0] = -1  # forced at the other sites
    with (
        replay_routes(model, RoutedExperts(live, routes.sites, 8, tokens=routes.tokens)),
        pytest.raises(RoutingError, match="sequence 1, token 4"),
    ):
        model(changed)
    live[1, 4] = -1  # tokens of rows that force nothing do not matter
    with replay_routes(model, RoutedExperts(live, routes.sites, 8, tokens=routes.tokens)):
        model(changed)


def test_routes_of_another_model_are_an_error() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    ids, sites = routes.ids, list(routes.sites)
    for wrong, text in [
        (RoutedExperts(ids[:, :, :2], sites[:2], 8), "none for model.layers.2.mlp.gate"),
        (RoutedExperts(ids, [*sites[:2], "model.layers.7.mlp.gate"], 8), "layers.7.mlp.gate, which it does not have"),
        (RoutedExperts(ids[:, :, [0, 1, 2, 0]], [*sites, "model.layers.7.mlp.gate"], 8), "hold 4, and model.layers.7"),
        (RoutedExperts(ids, sites, 16), "2 of 8 experts; the routes hold 2 of 16"),
        (RoutedExperts(ids[..., :1], sites, 8), "2 of 8 experts; the routes hold 1 of 8"),
        (RoutedExperts(ids, sites, (8, 8, 16)), r"layers\.2\.mlp\.gate .* the routes hold 2 of 16"),
    ]:
        with pytest.raises(RoutingError, match=text), replay_routes(model, wrong):
            pass
    with replay_routes(model, routes.select("*.0.*"), sites="*.0.*") as replay:
        model(inputs)
    assert replay.replayed_fraction == pytest.approx(1 / 3)
    shuffled = RoutedExperts(ids[:, :, [2, 0, 1]], [sites[i] for i in (2, 0, 1)], 8)
    assert torch.equal(used(model, inputs, shuffled)[0], ids)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sites": "model.layers.9.mlp.gate"}, "no routing site matches"),
        ({"sites": [5]}, "no routing site matches 5"),
        *(({"slots": slots}, r"slots must be 1\.\.2") for slots in (0, 3, 1.5, "1")),
        ({"tokens": torch.ones(2, 6, dtype=torch.bool)}, r"bool mask \[B,T\] = \(2, 7\)"),
        ({"tokens": torch.ones(2, 7)}, "bool mask"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], text: str) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    with pytest.raises(RoutingError, match=text), replay_routes(model, routes, **options):
        pass


def test_tokens_that_are_no_tensor_are_refused(monkeypatch) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    chosen: Any = [[True] * 7] * 2
    refused = pytest.raises(RoutingError, match="tokens must be a tensor, bool or of 0 and 1, got list")
    with refused, replay_routes(model, routes, tokens=chosen):
        pass


def test_nothing_seen_is_an_error() -> None:
    model = moe()
    with record_routes(model) as recording:
        pass
    with pytest.raises(RoutingError, match="no call of the model"):
        _ = recording.routes
    routes = routes_of(model, tokens())
    with replay_routes(model, routes) as replay:
        pass
    with pytest.raises(RoutingError, match="nothing was replayed"):
        _ = replay.replayed_fraction


def test_live_rows_stay_live_exactly() -> None:
    model, inputs = moe("DeepseekV3ForCausalLM"), tokens()
    routes = routes_of(model, inputs)
    ids = routes.ids
    ids[:, 2::2] = -1
    with torch.no_grad():
        plain = model(inputs).logits
        with replay_routes(model, RoutedExperts(ids, routes.sites, 8), once=True) as replay:
            assert torch.equal(model(inputs).logits, plain)
    assert (replay.replayed_rows, replay.live_rows) == (2 * 4 * 2, 2 * 3 * 2)  # of 7 tokens 0, 1, 3, 5 are forced


# -- noise -----------------------------------------------------------------------------------------------------------


def test_noise_moves_the_choice_and_only_the_choice() -> None:
    model, inputs = moe(), tokens()
    plain = routes_of(model, inputs)
    with torch.no_grad(), noisy_routes(model, 0.0), record_routes(model) as silent:
        quiet = model(inputs).logits
    assert silent.routes.equal(plain) and torch.equal(quiet, model(inputs).logits)
    generator = torch.Generator().manual_seed(0)
    with noisy_routes(model, 1.0, generator), record_routes(model) as noisy:
        loud = model(inputs).logits
        loud.square().mean().backward()
    found = grads(model)
    assert not torch.equal(sets(noisy.routes.ids), sets(plain.ids))
    with replay_routes(model, noisy.routes):  # the same experts without noise: the very same output and gradients
        clean = model(inputs).logits
        clean.square().mean().backward()
    assert torch.equal(clean, loud)
    wanted = grads(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad(), noisy_routes(model, 1.0, torch.Generator().manual_seed(0)), record_routes(model) as again:
        model(inputs)
    assert again.routes.equal(noisy.routes)


def test_noise_is_gaussian_on_the_logits() -> None:
    # Expert 0 leads expert 1 by 1 logit, the others are out of reach: with noise sigma on each, top-1 is expert 1 with
    # probability P(N(0, 2 sigma²) > 1) = Phi(-1 / (sigma sqrt 2)); at sigma = 1 that is Phi(-0.7071) = 0.2398.
    model = copy.deepcopy(moe("FlexOlmoForCausalLM"))
    site = find_sites(model)[0]
    inputs = tokens(64, 48)

    def logits(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = torch.zeros_like(args[0])
        hidden[..., 0] = 1
        return (hidden,)

    with torch.no_grad():
        site.module.weight.zero_()
        site.module.weight[:, 0] = torch.tensor([1.0, 0.0, -99, -99, -99, -99, -99, -99])
    site.module.register_forward_pre_hook(logits)
    site.module.top_k = 1
    for other in find_sites(model)[1:]:
        other.module.top_k = 1
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), noisy_routes(model, 1.0, generator), record_routes(model) as recording:
        model(inputs)
    share = float((recording.routes.ids[:, :, 0, 0] == 1).float().mean())
    assert abs(share - 0.2398) < 4 * (0.2398 * 0.7602 / (64 * 48)) ** 0.5  # four standard errors


@pytest.mark.parametrize("family", ["DeepseekV2ForCausalLM", "PhimoeForCausalLM", "ZayaForCausalLM", "DbrxForCausalLM"])
def test_noise_on_odd_routers_and_replay_inside_it_wins(family: str) -> None:
    model, inputs = moe(family), tokens()
    plain = routes_of(model, inputs)
    with torch.no_grad(), noisy_routes(model, 2.0, torch.Generator().manual_seed(0)), record_routes(model) as noisy:
        model(inputs)
    assert not torch.equal(sets(noisy.routes.ids), sets(plain.ids))
    for first, second in ((noisy_routes, None), (None, noisy_routes)):
        with torch.no_grad():
            outer = first(model, 2.0) if first else replay_routes(model, plain)
            with outer, second(model, 2.0) if second else replay_routes(model, plain), record_routes(model) as both:
                model(inputs)
        assert both.routes.equal(plain)
    with (
        torch.no_grad(),
        noisy_routes(model, 2.0),
        replay_routes(model, plain, sites=[0]),
        record_routes(model) as part,
    ):
        model(inputs)
    assert torch.equal(part.routes.ids[:, :, 0], plain.ids[:, :, 0])
    assert not torch.equal(sets(part.routes.ids), sets(plain.ids))


class ScalesItsInput(Qwen3MoeTopKRouter):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden.mul_(0.5))


@torch.no_grad()
def test_a_router_that_scales_its_input_in_place_scales_it_once() -> None:
    model, inputs = moe(), tokens()
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = ScalesItsInput
    plain = model(inputs).logits
    with noisy_routes(model, 0.0):
        assert torch.equal(model(inputs).logits, plain)


@torch.no_grad()
def test_where_a_table_routes_there_is_neither_noise_nor_a_margin() -> None:
    model, inputs = moe("DeepseekV4ForCausalLM"), tokens()
    plain = routes_of(model, inputs)
    with noisy_routes(model, 2.0, torch.Generator().manual_seed(0)), record_routes(model) as noisy:
        model(inputs)
    same = [torch.equal(sets(noisy.routes.site_ids(i)), sets(plain.site_ids(i))) for i in range(3)]
    assert same == [True, False, False]
    with record_margins(model) as margins:
        model(inputs)
    assert margins.values[..., 0].isnan().all() and margins.values[..., 1:].isfinite().all()


def test_negative_noise_is_an_error() -> None:
    with pytest.raises(RoutingError, match="sigma"), noisy_routes(moe(), -1.0):
        pass
