"""Comparing gradients: cosines and norms by hand, and against autograd's own."""

import math

import pytest
import torch
from torch import nn

from moe_rl.measure.gradients import compare_gradients, gradient_metrics, layer_of, loss_gradient


def test_cosine_and_norms_by_group():
    one = {"layers.0.w": torch.tensor([3.0, 0.0]), "layers.1.w": torch.tensor([1.0]), "head": torch.tensor([2.0])}
    other = {"layers.0.w": torch.tensor([3.0, 4.0]), "layers.1.w": torch.tensor([-2.0]), "new": torch.tensor([1.0])}
    found = compare_gradients(one, other, layer_of)
    assert found["0"] == pytest.approx((3 * 3 / (3 * 5), 5 / 3)) and found["1"] == pytest.approx((-1, 2))
    assert found["other"] == (0.0, 0.5), "head and new: nothing in common"
    whole = compare_gradients(one, other)["all"]
    assert whole == pytest.approx((7 / math.sqrt(14 * 30), math.sqrt(30 / 14)))
    assert math.isnan(compare_gradients({"w": torch.zeros(2)}, {"w": torch.ones(2)})["all"][0])


def test_the_gradient_of_a_loss_leaves_grad_alone_and_leaves_out_what_is_frozen_or_unused():
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "frozen": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    x = torch.tensor([[1.0, 2.0]])
    found = loss_gradient(model, (model["used"](x) + model["frozen"](x)).sum())
    assert found.keys() == {"used.weight"} and found["used.weight"].tolist() == [[1.0, 2.0]]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_a_probe_logs_has_routers_and_layers_apart():
    natural = {"layers.0.gate.weight": torch.tensor([1.0, 0.0]), "layers.0.up": torch.tensor([1.0])}
    replayed = {"layers.0.gate.weight": torch.tensor([0.0, 2.0]), "layers.0.up": torch.tensor([1.0])}
    found = gradient_metrics(natural, replayed, (replayed, replayed), ["layers.0.gate"])
    assert (found["router_gradient_cosine"], found["router_gradient_norm_ratio"]) == (0.0, 2.0)
    assert found["layer_names"] == ["0"] and found["layer_gradient_cosine"] == [found["gradient_cosine"]]
    assert found["gradient_cosine"] == pytest.approx(1 / math.sqrt(2 * 5))
    assert found["gradient_halves_cosine"] == pytest.approx(1.0)
    more = {"module.layers.0.gate_up.weight": torch.tensor([5.0]), "layers.1.gate.weight": torch.tensor([1.0, 0.0])}
    sites = ["layers.0.gate", "layers.1.gate"]
    wrapped = {f"module.{name}": value for name, value in natural.items()} | more
    found = gradient_metrics(
        wrapped, {"module.layers.0.gate.weight": torch.tensor([0.0, 2.0])}, (natural, natural), sites
    )
    assert found["router_gradient_norm_ratio"] == pytest.approx(2 / math.sqrt(2)), "of two routers, no gate_up"
    fixed = gradient_metrics(natural, replayed, (natural, natural), ["layers.0.hash"])
    assert math.isnan(fixed["router_gradient_cosine"])
    nothing = gradient_metrics({}, {}, ({}, {}), sites)
    assert all(nothing[name] == [] if name.startswith("layer_") else math.isnan(nothing[name]) for name in nothing)
