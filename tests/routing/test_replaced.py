"""What was replaced since the self-check: it is checked again, and what is hooked is what runs."""

import copy
from typing import Any

import pytest
import torch
from routing_helpers import disturbed, moe, routes_of, tokens
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from moe_rl.routing import RoutedExperts, RoutingError, UnsupportedModelError, attach, record_routes, replay_routes


def masks(self: Any, hidden: Tensor) -> Tensor:
    """A block's forward: gates of experts outside of the live choice become 0."""
    logits, gates, ids = self.gate(flat := hidden.reshape(-1, hidden.shape[-1]))
    least = logits.sort(-1, descending=True).values[:, ids.shape[1] - 1, None]
    return self.experts(flat, ids, torch.where(logits.gather(-1, ids) >= least, gates, 0)).view_as(hidden)


def halves(self: Any, hidden: Tensor) -> Any:
    """A router's forward: gates of experts outside of the live choice are halved."""
    logits = nn.functional.linear(hidden, self.weight)
    gates, ids = logits.softmax(-1).topk(self.top_k)
    least = logits.sort(-1, descending=True).values[:, self.top_k - 1, None]
    return logits, torch.where(logits.gather(-1, ids) >= least, gates, gates / 2), ids


class Masking(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts

    forward = masks


def replayed(model: Any, routes: RoutedExperts, inputs: Tensor) -> float:
    with torch.no_grad(), replay_routes(model, routes, once=True) as replay:
        model(inputs)
    return replay.replayed_fraction


@pytest.mark.parametrize("held", ["attachment", "replay"])
def test_a_block_that_is_replaced_is_checked_again_whatever_is_kept(held: str) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    with replay_routes(model, routes) as kept:
        model(inputs)
    handle: Any = attach(model) if held == "attachment" else kept
    for layer in model.model.layers:
        layer.mlp = Masking(layer.mlp)
    with pytest.raises(UnsupportedModelError, match="gates of forced experts are zero"):
        replayed(model, routes, inputs)
    assert handle is not None


@pytest.mark.parametrize(("cls", "forward"), [(Qwen3MoeSparseMoeBlock, masks), (Qwen3MoeTopKRouter, halves)])
def test_a_class_whose_forward_is_replaced_is_checked_again(cls: type, forward: Any, monkeypatch: Any) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    assert replayed(model, routes, inputs) == 1
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="gates of forced experts"):
        replayed(model, routes, inputs)
    monkeypatch.undo()
    assert replayed(model, routes, inputs) == 1


@pytest.mark.parametrize("part", ["block", "experts", "compiled"])
def test_hooks_are_on_the_block_and_the_experts_that_run(part: str) -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(disturbed(model, 0.2), inputs)
    with attach(model):
        for layer in model.model.layers:
            if part == "block":
                gate, layer.mlp = layer.mlp.gate, copy.deepcopy(layer.mlp)
                layer.mlp.gate = gate
            elif part == "experts":
                layer.mlp.experts = copy.deepcopy(layer.mlp.experts)
            else:
                layer.mlp.experts = torch.compile(layer.mlp.experts, backend="eager")
                layer.mlp.gate = torch.compile(layer.mlp.gate, backend="eager")
        assert replayed(model, routes, inputs) == 1


def test_what_is_replaced_inside_an_open_context_is_refused_in_the_next_one() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        model(inputs)
        for layer in model.model.layers:
            layer.mlp = Masking(layer.mlp)
        with pytest.raises(RoutingError, match="replaced inside an open context of Qwen3MoeModel"):
            routes_of(model, inputs)
        assert len(recording.steps) == 1, "none of the self-check"


def test_a_mode_that_was_not_checked_is_checked_inside_an_open_recording() -> None:
    """The recording has no hooks on the routers, and the check that began anew put none on."""
    model, inputs = moe().eval(), tokens()
    wanted = routes_of(model, inputs)
    with record_routes(model) as outer:
        model(inputs)
        with record_routes(model.train()) as inner:
            model(inputs)
    assert inner.routes.equal(wanted) and outer.routes.equal(wanted.rows([0, 1, 0, 1]))
