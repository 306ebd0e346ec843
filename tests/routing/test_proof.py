"""Replay is proven while it happens: what is not replayed is an error, and so is what cannot be told."""

import threading
from typing import Any

import accelerate
import pytest
import torch
from routing_helpers import disturbed, moe, routes_of, tokens
from tiny_families import tiny_model
from torch import Tensor
from torch.nn import functional
from transformers import (
    DynamicCache,
    StaticCache,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    UnsupportedModelError,
    change_counts,
    find_sites,
    record_routes,
    replay_routes,
)


class Router(Qwen3MoeTopKRouter):
    def scores(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)

    def forward(self, hidden: Tensor) -> Any:
        logits = self.scores(hidden)
        gates, ids = self.choose(logits.sigmoid())
        return logits, gates, ids

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.topk(self.top_k)


class SortsInTraining(Router):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            return scores.topk(self.top_k)
        ids = scores.argsort(-1, descending=True)[:, : self.top_k]
        return scores.gather(-1, ids), ids


class OverrulesInTraining(Router):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        gates, ids = scores.topk(self.top_k)
        return gates, scores.argsort(-1, descending=True)[:, : self.top_k] if self.training else ids


class TwiceForMany(Router):
    """Another branch for more tokens than the self-check tries."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if len(scores) > 100:
            scores.topk(self.top_k)
        return scores.topk(self.top_k)


class Halves(Router):
    """Halves the gates of experts that the live choice does not hold."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        gates, ids = scores.topk(self.top_k)
        least = scores.sort(-1, descending=True).values[:, self.top_k - 1 : self.top_k]
        return torch.where(gates >= least, gates, gates / 2), ids


class ScalesClosedGroups(Router):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        groups = scores.unflatten(-1, (4, 2)).amax(-1)
        closed = torch.ones_like(groups).scatter(-1, groups.topk(2).indices, 0).repeat_interleave(2, -1)
        return (scores * (1 - 0.9 * closed)).topk(self.top_k)


class SortedGates(Router):
    """Gates in the order of a sort of its own, not of the experts."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.sort(-1, descending=True).values[:, : self.top_k], scores.topk(self.top_k).indices


def with_router(router: type[Router]) -> Any:
    model = moe()
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = router
    return model


def replay(model: Any, inputs: Tensor, routes: RoutedExperts) -> None:
    with torch.no_grad(), replay_routes(model, routes):
        model(inputs, use_cache=False)


@pytest.mark.parametrize("router", [SortsInTraining, OverrulesInTraining])
def test_a_router_that_selects_otherwise_in_training_is_refused_there_and_nowhere_else(router: type[Router]) -> None:
    model, inputs = with_router(router), tokens()
    routes = routes_of(model, inputs)
    replay(model, inputs, routes)
    with pytest.raises(UnsupportedModelError, match=rf"gate \({router.__name__}\)"):
        replay(model.train(), inputs, routes)


def test_a_mode_that_was_not_checked_is_refused_inside_a_context() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    with (
        pytest.raises(RoutingError, match=r"is in train mode, but.*call model.train\(\) before"),
        replay_routes(model, routes),
    ):
        model.train()
        model(inputs)


def test_a_recording_goes_on_in_a_mode_that_was_not_checked_where_ids_reach_the_experts() -> None:
    def recorded(family: str) -> tuple[Any, RoutedExperts]:
        model = tiny_model(family).eval()
        with record_routes(model) as recording, torch.no_grad():
            model.train()
            model(inputs, use_cache=False)
        return model, recording.routes

    inputs = tokens()
    model, routes = recorded("Qwen3MoeForCausalLM")
    assert torch.equal(routes.ids, routes_of(model, inputs).ids)
    with pytest.raises(RoutingError, match="is in train mode, but"):
        recorded("Llama4ForCausalLM")  # whose experts get none: its selection has to be known


def test_the_number_of_selections_is_that_of_the_check() -> None:
    model, many = with_router(TwiceForMany), tokens(8, 20)
    routes = routes_of(model, many)
    with pytest.raises(RoutingError, match=r"layers\.0.*made 2 topk calls, 1 when it was checked"):
        replay(model, many, routes)


@pytest.mark.parametrize("router", [Halves, ScalesClosedGroups, SortedGates])
def test_gates_that_depend_on_the_live_choice_are_refused(router: type[Router]) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"\({router.__name__}\): gates of forced experts depend on which"):
        routes_of(with_router(router), tokens())


@pytest.mark.parametrize("part", ["router", "block"])
def test_a_forward_that_is_replaced_inside_the_context_is_noticed(part: str) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    block = model.model.layers[1].mlp

    def route(hidden: Tensor) -> Any:
        logits = functional.linear(hidden.reshape(-1, 32), block.gate.weight)
        ids = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.softmax(-1).gather(-1, ids), ids

    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 32)
        _, gates, _ = block.gate(flat)
        return block.experts(flat, route(flat)[2], gates).reshape(hidden.shape)

    with torch.no_grad(), replay_routes(model, routes) as replay, record_routes(model) as recording:
        model(inputs)
        if part == "router":
            block.gate.forward = route
        else:
            block.forward = forward
        text = {"router": "made 0 topk calls", "block": "the experts got others than were forced"}[part]
        with pytest.raises(RoutingError, match=rf"layers\.1\.mlp\.gate.*{text}"):
            model(inputs)
    assert replay.replayed_rows == 2 * 7 * 3 and len(recording.calls) == 1  # the proven call alone counts


def test_counts_of_nested_replays_are_of_rows_that_were_really_theirs() -> None:
    model, inputs = moe(), tokens()
    outer, inner = routes_of(disturbed(model, 0.2), inputs), routes_of(disturbed(model, 0.3), inputs)
    with torch.no_grad(), replay_routes(model, outer) as one, replay_routes(model, inner, sites=[1]) as two:
        model(inputs)
    alike = int((outer.ids[:, :, 1] == inner.ids[:, :, 1]).all(-1).sum())
    assert (one.replayed_rows, two.replayed_rows) == (2 * 7 * 2 + alike, 2 * 7)
    ids = outer.ids
    ids[:, ::2] = -1  # what is not forced is not replayed, though it is what it is
    partly = RoutedExperts(ids, outer.sites, 8)
    with torch.no_grad(), replay_routes(model, partly) as one, replay_routes(model, inner, sites=[1]) as two:
        model(inputs)
    alike = int((ids[:, :, 1] == inner.ids[:, :, 1]).all(-1).sum())
    assert (one.replayed_rows, two.replayed_rows) == (2 * 3 * 2 + alike, 2 * 7)


@pytest.mark.parametrize("kind", ["call", "context", "context in a mode that was not checked"])
def test_another_thread_is_refused_by_name(kind: str) -> None:
    model, inputs, said = moe(), tokens(), []
    routes = routes_of(disturbed(model, 0.2), inputs)

    def other() -> None:
        try:
            if kind == "call":
                model(inputs)
            else:
                with record_routes(model if kind == "context" else model.train()):
                    pass
        except RoutingError as error:
            said.append(str(error))
        finally:
            model.eval()

    with torch.no_grad(), replay_routes(model, routes) as replay, record_routes(model) as recording:
        thread = threading.Thread(target=other, name="bystander")
        thread.start()
        thread.join()
        model(inputs)
    assert "'bystander'" in said[0] and "'MainThread'" in said[0] and "copy of the model" in said[0]
    assert recording.routes.equal(routes) and replay.replayed_fraction == 1
    thread = threading.Thread(target=lambda: said.append(routes_of(model, inputs)))  # with no context open: welcome
    thread.start()
    thread.join()
    assert isinstance(said[1], RoutedExperts)


def test_a_topk_of_the_user_after_a_caught_interrupt_is_his_own() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    router = type(model.model.layers[1].mlp.gate)

    class Interrupted(router):
        def forward(self, hidden: Tensor) -> Any:
            raise KeyboardInterrupt

    gate = model.model.layers[1].mlp.gate
    scores = torch.rand(14, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), replay_routes(model, routes) as replay:
        gate.__class__ = Interrupted
        with pytest.raises(KeyboardInterrupt):
            model(inputs)
        gate.__class__ = router
        assert torch.equal(scores.topk(2).indices, scores.sort(-1, descending=True).indices[:, :2])
        with pytest.raises(RoutingError, match="outside a call"):
            model.model.layers[0].mlp(torch.randn(2, 7, 32))
        model(inputs)
    assert replay.replayed_fraction == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("change", ["nothing", "crop", "reorder twice", "in place", "data"])
def test_a_cache_is_followed_only_where_its_rows_are_proven(change: str, static: bool, mode: Any) -> None:
    model, inputs = moe(), tokens(2, 6)
    order = torch.tensor([1, 0])
    cache = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
    if static and change == "crop" and not hasattr(cache.layers[0], "crop"):
        pytest.skip("transformers crops a static cache since 5.24")
    with mode(), record_routes(model) as recording:
        model(inputs[:, :4], past_key_values=cache)
        if change == "crop":
            cache.crop(-1)
        elif change == "reorder twice":
            cache.reorder_cache(order)
            cache.reorder_cache(torch.tensor([0, 0]))
        elif change != "nothing":
            for layer in cache.layers:
                for states in (layer.keys, layer.values):
                    if change == "data":
                        states.data = states[order].clone()
                    else:
                        states.copy_(states[order].clone())
        model(inputs[:, 3 if change == "crop" else 4 :], past_key_values=cache)
    if change in ("nothing", "crop"):
        assert recording.routes.equal(routes_of(model, inputs))
    else:
        with pytest.raises(RoutingError, match=r"reordered or changed.*\.steps"):
            _ = recording.routes


def test_a_shorter_call_of_unknown_tokens_is_refused_unless_the_rest_follows() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    unknown = RoutedExperts(routes.ids, routes.sites, 8)
    with torch.no_grad():
        with pytest.raises(RoutingError, match="calls on a KV cache ended after 4"), replay_routes(model, unknown):
            model(inputs[:, 3:], use_cache=True)
        with replay_routes(model, unknown) as replay:
            cache = model(inputs[:, :4], use_cache=True).past_key_values
            model(inputs[:, 4:], past_key_values=cache)
    assert replay.replayed_fraction == 1


def test_functional_gradients_with_a_default_cache() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (inputs,)).logits.square().mean()

    with replay_routes(model, routes), record_routes(model) as recording:
        found = torch.func.grad(loss)(parameters)
        loss(parameters).backward()
    assert recording.calls[0].equal(routes)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # its sums may be formed in another order
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_topk_may_be_called_by_keyword() -> None:
    class Keywords(Router):
        def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            return torch.topk(input=scores, k=self.top_k, dim=-1)

    model, inputs = with_router(Keywords), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    with replay_routes(model, routes), record_routes(model) as recording:
        model(inputs)
    assert recording.routes.equal(routes)


def test_a_model_that_accelerate_offloads_is_replayed() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    with torch.no_grad(), replay_routes(model, routes):
        wanted = model(inputs).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.device.type == "meta"
    with torch.no_grad(), replay_routes(model, routes) as replay:
        assert torch.equal(model(inputs).logits, wanted)
    assert replay.replayed_fraction == 1


def test_an_encoder_decoder_is_refused_for_what_it_is() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(vocab_size=32, num_experts=4, **sizes))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        find_sites(model)


def test_a_plain_forward_recomputed_inside_a_replay_stays_plain() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    model.train()
    model(inputs, use_cache=False).logits.square().mean().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(inputs, use_cache=False).logits.square().mean()
    with replay_routes(model, routes):
        loss.backward()
    for name, gradient in wanted.items():
        assert torch.equal(gradient, model.get_parameter(name).grad), name


def test_gates_that_underflow_are_no_masked_gates() -> None:
    """A saturated softmax over all experts, one of which is taken: ZAYA."""
    model, inputs = tiny_model("ZayaForCausalLM"), tokens()
    with torch.no_grad():
        for site in find_sites(model):
            maps = [p for p in site.module.parameters() if p.ndim == 2]
            maps[-1].mul_(1e6)
    assert routes_of(model, inputs).shape == (2, 7, 3, 1)


def test_weights_that_are_not_finite_are_named() -> None:
    """Not the family is at fault."""
    model, inputs = moe(), tokens()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
        with pytest.raises(UnsupportedModelError, match=r"not finite: layers.1.self_attn.o_proj.weight holds values"):
            routes_of(model, inputs)
        model = moe().half()
        model.model.layers[1].post_attention_layernorm.weight.fill_(6e4)
        with pytest.raises(UnsupportedModelError, match=r"its weights are, .* overflows \(torch.float16\)"):
            routes_of(model, inputs)


def test_a_table_that_names_an_expert_twice_is_recorded_as_it_is(tmp_path: Any) -> None:
    model, inputs = tiny_model("DeepseekV4ForCausalLM"), tokens()  # a fresh table is all zeros
    routes = routes_of(model, inputs)
    assert routes.ids[:, :, 0].unique().tolist() == [0]
    routes.save(tmp_path / "routes.safetensors")
    assert RoutedExperts.load(tmp_path / "routes.safetensors").equal(routes)
    again = RoutedExperts(routes.ids, routes.sites, routes.num_experts, meta=routes.meta)
    assert torch.equal(again.ids, routes.ids)
    with pytest.raises(RoutingError, match="names an expert twice"):
        RoutedExperts(routes.ids, routes.sites, routes.num_experts)


def test_shadow_change_is_natural_change_at_the_first_site_only() -> None:
    model, inputs = moe(), tokens(4, 16)
    old = routes_of(disturbed(model, 0.1), inputs)
    with torch.no_grad(), replay_routes(model, old, shadow=True) as replay:
        model(inputs)
    shadow, natural = replay.shadow_change(old), change_counts(old, routes_of(model, inputs))
    assert shadow.pair == "shadow" and natural.pair == "policies"
    assert shadow.per_site_slots_changed[0] == natural.per_site_slots_changed[0] > 0
    assert not torch.equal(shadow.per_site_slots_changed, natural.per_site_slots_changed)
