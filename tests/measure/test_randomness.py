"""Dropout and jitter of routers: found, and off where they are turned off; what eval mode computes stays."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch

from moe_rl.measure.randomness import random_parts, turn_off_randomness
from moe_rl.policy import ModelConfig
from moe_rl.policy.models import load_model
from moe_rl.routing import change_counts, record_routes

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe
from tiny_families import families

FAMILIES = ["PhimoeForCausalLM", "MixtralForCausalLM", "DbrxForCausalLM"]
IDS = torch.tensor([[1, 2, 3, 1, 2]])


def jittery(family):
    model = moe(family)
    for module in model.modules():
        for name in ("router_jitter_noise", "input_jitter_noise", "jitter_noise", "moe_jitter_eps"):
            if hasattr(module, name):
                setattr(module, name, 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_router_jitter_is_found_and_turned_off(family):
    model = jittery(family)
    found = turn_off_randomness(model)
    assert found and all(text.endswith("= 0.3") for text in found)
    assert not list(random_parts(model))
    with torch.no_grad():
        assert torch.equal(model.train()(IDS).logits, model(IDS).logits)


def test_a_dropout_that_is_a_number_of_the_module_is_found():
    model = moe("DbrxForCausalLM")
    for module in model.modules():
        if hasattr(module, "resid_pdrop"):
            module.resid_pdrop = 0.3
    with torch.no_grad():
        assert not torch.equal(model.train()(IDS).logits, model(IDS).logits)
        assert any(text.endswith("resid_pdrop = 0.3") for text in turn_off_randomness(model))
        assert torch.equal(model.train()(IDS).logits, model(IDS).logits) and not list(random_parts(model))


def test_dropout_counts_as_change_of_experts_until_it_is_turned_off():
    model = moe().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    said = record_routes.__doc__ + change_counts.__doc__
    assert said.count("moe_rl.measure.randomness.turn_off_randomness") == 2, "nothing else tells"

    def change(model):
        torch.manual_seed(0)
        routes = []
        for _ in range(2):
            with torch.no_grad(), record_routes(model) as recording:
                model(IDS)
            routes.append(recording.routes)
        return change_counts(*routes).rates()["slot_change"]

    assert change(model) > 0
    assert change(model.eval()) == 0
    turn_off_randomness(model)
    assert change(model.train()) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_eval_mode_computes_what_it_did_and_train_mode_the_same(family):
    model = jittery(family).eval()
    with torch.no_grad():
        before = model(IDS).logits
        turn_off_randomness(model)
        assert torch.equal(model(IDS).logits, before)
        for later in (model.train(), copy.deepcopy(model).train()):
            assert torch.equal(later(IDS).logits, before)


@pytest.mark.parametrize("family", families())
def test_a_loaded_model_computes_what_transformers_does_in_both_modes(family, tmp_path):
    """Phi-MoE's `router_jitter_noise` is a threshold of eval mode, too: with 0 every gate would be 1."""
    model = moe(family).eval()
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings(action="ignore"):
        loaded = load_model(str(tmp_path), ModelConfig(path=str(tmp_path)))
    weights, read = model.state_dict(), loaded.state_dict()
    assert weights.keys() == read.keys() and all(torch.equal(weights[name], read[name]) for name in weights)
    loaded.load_state_dict(weights, assign=True)  # those of a file lie at other addresses, by which plain kernels round
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)
        assert torch.equal(loaded.train()(IDS).logits, model(IDS).logits)


def test_a_dropout_of_any_kind_that_is_the_model_itself_has_the_name_of_its_kind():
    assert turn_off_randomness(torch.nn.AlphaDropout(0.25)) == ["AlphaDropout.p = 0.25"]
