"""Where routers are found, and what the self-check makes of routers that no transformers version has yet."""

import copy
from typing import Any

import pytest
import torch
from routing_helpers import disturbed, moe, routes_of, tokens
from tiny_families import tiny_model
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    UnsupportedModelError,
    find_sites,
    record_routes,
    replay_routes,
)


def test_sites_are_the_routers_by_their_real_names() -> None:
    model = moe()
    sites = find_sites(model)
    assert [site.name for site in sites] == [f"model.layers.{i}.mlp.gate" for i in range(3)]
    assert all(site.module is model.get_submodule(site.name) for site in sites)
    assert [site.name for site in find_sites(model.model)] == [f"layers.{i}.mlp.gate" for i in range(3)]


def test_dense_layers_have_no_site_and_attention_routers_have_one() -> None:
    assert [s.name for s in find_sites(tiny_model("DeepseekV3ForCausalLM"))] == [
        f"model.layers.{i}.mlp.gate" for i in (1, 2)
    ]
    jetmoe = [s.name for s in find_sites(tiny_model("JetMoeForCausalLM"))]
    assert jetmoe[:2] == ["model.layers.0.mlp.router", "model.layers.0.self_attention.experts.router"]


def test_hash_routed_layers_are_fixed_recorded_and_not_replayed() -> None:
    model, inputs = tiny_model("DeepseekV4ForCausalLM"), tokens()
    table = torch.stack([torch.randperm(8)[:2] for _ in range(64)])
    sites = find_sites(model)
    assert [site.fixed for site in sites] == [True, False, False]
    sites[0].module.tid2eid.copy_(table)
    routes = routes_of(model, inputs)
    assert torch.equal(routes.ids[:, :, 0], table[inputs])
    with replay_routes(model, routes) as replay:
        model(inputs)
    assert (replay.replayed_rows, replay.live_rows) == (2 * 7 * 2, 0)
    with replay_routes(model, routes.select([1, 2])) as replay:  # as engines that capture no table give them
        model(inputs)
    assert replay.replayed_fraction == 1


# -- routers of families to come -------------------------------------------------------------------------------------


class Renamed(Qwen3MoeTopKRouter):
    """Another order of outputs, another call of topk: fine."""

    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        logits.topk(self.top_k, dim=-1)  # a decoy of the same size, not used for routing
        chosen = (logits.sigmoid() + 0.01).topk(self.top_k, sorted=False).indices
        gates = logits.sigmoid().gather(-1, chosen)
        return logits, gates / gates.sum(-1, keepdim=True), chosen


class Sorting(Qwen3MoeTopKRouter):
    """Selects without topk."""

    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        chosen = logits.argsort(-1, descending=True)[:, : self.top_k]
        return logits, logits.sigmoid().gather(-1, chosen), chosen


class Dropping(Qwen3MoeTopKRouter):
    """Overrules its top-k afterwards: every expert takes at most four tokens, the rest go to expert 0."""

    def forward(self, hidden_states: Tensor) -> Any:
        logits, gates, chosen = super().forward(hidden_states)
        place = functional.one_hot(chosen, self.num_experts).cumsum(0).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return logits, gates, chosen.masked_fill(place > 4, 0)


class Masking(Qwen3MoeTopKRouter):
    """Reads gates from scores that the live selection of groups masks, by torch.where."""

    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        groups = logits.unflatten(-1, (4, 2)).amax(-1)
        open_groups = torch.zeros_like(groups).scatter(-1, groups.topk(2).indices, 1).repeat_interleave(2, -1)
        scores = torch.where(open_groups.bool(), logits.sigmoid(), 0.0)
        gates, chosen = scores.topk(self.top_k, dim=-1)
        return logits, gates, chosen


class Impure(Qwen3MoeTopKRouter):
    """Ranks one thing and returns the gates of another experts' choice: what it returns is not what it used."""

    def forward(self, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        chosen = logits.topk(self.top_k, dim=-1).indices
        return logits, logits.sigmoid().gather(-1, chosen), (chosen + 1) % self.num_experts


def with_router(router: type[Qwen3MoeTopKRouter]) -> Any:
    model = moe()
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = router
    return model


def test_a_new_router_that_selects_by_topk_just_works() -> None:
    model, inputs = with_router(Renamed), tokens()
    with record_routes(model) as recording:
        plain = model(inputs).logits
    with replay_routes(model, recording.routes):
        assert torch.equal(model(inputs).logits, plain)
    other = disturbed(model)
    with replay_routes(other, recording.routes), record_routes(other) as again:
        other(inputs).logits.square().mean().backward()
    assert again.routes.equal(recording.routes)
    assert all(bool((site.module.weight.grad != 0).any()) for site in find_sites(other))


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (Sorting, "without torch.topk"),
        (Dropping, "do not show"),
        (Masking, "gates of forced experts are zero"),
        (Impure, "do not show"),
    ],
)
def test_a_new_router_that_does_otherwise_is_refused_by_name(router: type[nn.Module], reason: str) -> None:
    text = rf"gate \({router.__name__}\).*{reason}"
    with pytest.raises(UnsupportedModelError, match=text), record_routes(with_router(router)):
        pass


def test_such_a_router_is_refused_also_where_nothing_but_the_model_holds_it() -> None:
    model = with_router(Sorting).model
    model.gate = model.layers[0].mlp.gate
    for layer in model.layers:
        layer.mlp = nn.Identity()
    model.norm.register_forward_pre_hook(lambda _, args: model.gate(*args) and None)
    with pytest.raises(UnsupportedModelError, match=r"gate \(Sorting\).*without torch.topk"), record_routes(model):
        pass


def test_a_selection_in_a_block_of_several_routers_is_refused() -> None:
    model = with_router(Sorting)
    for block in (layer.mlp for layer in model.model.layers):
        block.second = copy.deepcopy(block.gate)
        block.register_forward_pre_hook(lambda module, args: module.second(*args) and None)
    with pytest.raises(UnsupportedModelError, match="around it holds several routers"), record_routes(model):
        pass


def test_a_router_shared_by_layers_or_never_run_is_refused() -> None:
    model = moe()
    model.model.layers[1].mlp.gate = model.model.layers[0].mlp.gate
    with pytest.raises(UnsupportedModelError, match="ran 2 times"), record_routes(model):
        pass
    model = moe()
    model.model.spare = type(model.model.layers[0].mlp)(model.config)
    with pytest.raises(UnsupportedModelError, match=r"spare\.gate.*did not run"), record_routes(model):
        pass


def test_a_model_that_cannot_be_run_on_token_ids_says_so() -> None:
    model = moe()
    model.model.embed_tokens.forward = lambda ids: ids.no_such_thing
    text = r"could not run Qwen3MoeForCausalLM.*no_such_thing"
    with pytest.raises(UnsupportedModelError, match=text), record_routes(model):
        pass


def test_a_name_of_routes_that_fits_several_sites_is_refused() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    one = RoutedExperts(routes.ids[:, :, :1], ["gate"], 8)
    text = r"site gate may be model\.layers\.0\.mlp\.gate or model\.layers\.1\.mlp\.gate of this model: name"
    for sites in (None, [0]):
        with pytest.raises(RoutingError, match=text), replay_routes(model, one, sites=sites):
            pass
    short = RoutedExperts(routes.ids, [name.removeprefix("model.layers.") for name in routes.sites], 8)
    with torch.no_grad(), replay_routes(model, short, once=True) as replay:
        model(inputs)
    assert replay.replayed_fraction == 1
