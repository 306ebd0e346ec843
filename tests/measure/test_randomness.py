"""Jitter of routers: found, and off where it is turned off."""

import sys
from pathlib import Path

import pytest
import torch

from moe_rl.measure.randomness import turn_off_randomness

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe


@pytest.mark.parametrize("family", ["PhimoeForCausalLM", "MixtralForCausalLM", "DbrxForCausalLM"])
def test_router_jitter_is_found_and_turned_off(family):
    model = moe(family)
    for module in model.modules():
        for name in ("router_jitter_noise", "input_jitter_noise", "jitter_noise", "moe_jitter_eps"):
            if hasattr(module, name):
                setattr(module, name, 0.3)
    found = turn_off_randomness(model)
    assert found and all(text.endswith("= 0.3") for text in found)
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model(ids).logits)
