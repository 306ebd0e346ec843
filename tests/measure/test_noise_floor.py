"""The noise floor's variants leave the model as it was; its rows are tested in tests/training/test_probe.py."""

import math

import pytest
import torch

from moe_rl.measure.noise_floor import (
    OTHER_EXPERTS,
    NoiseFloor,
    OtherExpertsError,
    experts_computed_by,
    floor_metrics,
    rounded_copy,
)
from moe_rl.measure.scoring import Scored, TokenBatch
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.routing import RoutedExperts


def small():
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    return build_tiny(tiny, char_tokenizer("ab"))


def text(rows):
    mask = torch.ones(rows, 3, dtype=torch.bool)
    return TokenBatch(torch.arange(3 * rows).view(rows, 3) % 4, mask, mask & (torch.arange(3) > 0))


def test_a_rounded_copy_leaves_the_model_and_another_implementation_is_given_back():
    model = small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = rounded_copy(model)
    assert model.training and not any(module.training for module in copied.modules())
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = model.config._experts_implementation
    other = OTHER_EXPERTS.get(name, "eager")
    with pytest.raises(ZeroDivisionError), experts_computed_by(model, other):
        assert model.config._experts_implementation == other != name
        raise ZeroDivisionError
    assert model.config._experts_implementation == name
    with pytest.raises(OtherExpertsError, match="Qwen3MoeForCausalLM has no experts implementation 'none'"):
        experts_computed_by(model, "none").__enter__()
    assert model.config._experts_implementation == name


def test_a_variant_that_fails_without_a_word_is_left_out(monkeypatch):
    model, tried = small(), []

    def no_memory(*_):
        tried.append(1)
        raise MemoryError

    monkeypatch.setattr("moe_rl.measure.noise_floor.rounded_copy", no_memory)
    floor = NoiseFloor()
    for _ in range(2):
        names = [variant.name for variant in floor.variants(model, text(1))]
        assert names == ["repeat", "experts"] and floor.left_out["bf16"] == "MemoryError"
        assert floor.left_out["batch"] == "one sequence has no other batch shape"
    assert len(tried) == 1, "what failed once is not tried again"


def test_a_copy_that_would_take_most_of_the_memory_is_left_out(monkeypatch):
    model = small()
    need = 2 * sum(parameter.numel() for parameter in model.parameters())
    for free, made in ((1.3 * need, True), (1.2 * need, False)):  # of which it may take 0.8
        monkeypatch.setattr("moe_rl.measure.noise_floor.free_bytes", lambda _, free=free: free)
        floor = NoiseFloor()
        assert ("bf16" in [variant.name for variant in floor.variants(model, text(1))]) is made
        assert made or floor.left_out["bf16"].startswith("a bf16 copy takes")


@pytest.mark.parametrize(("rows", "pieces"), [(2, 1), (5, 2), (9, 3)])
def test_sequences_are_scored_in_four_pieces_at_most_and_a_bf16_model_has_no_copy(rows, pieces):
    model = small().bfloat16()
    model.set_experts_implementation("eager")
    found = {variant.name: variant for variant in NoiseFloor().variants(model, text(rows))}
    assert found["batch"].detail == f"{rows} sequences at once and in pieces of {pieces}"
    assert found["batch"].scored.logps.shape == (rows, 3) == found["batch"].scored.routes.shape[:2]
    assert "bf16" not in found


def test_between_two_variants_the_model_is_as_it_was():
    """In the body of a loop over the variants it computed its experts by the other implementation."""
    model = small()
    own = model.config._experts_implementation
    met = [(name, model.config._experts_implementation) for name, *_ in NoiseFloor(bf16=False).variants(model, text(1))]
    assert met == [("repeat", own), ("experts", own)]


def test_gaps_of_a_floor_are_of_the_other_scoring_over_the_first():
    routes = [RoutedExperts(torch.tensor(ids).view(1, 2, 1, 1), ("gate",), 4) for ids in ([0, 1], [0, 2])]
    base, other = Scored(torch.zeros(1, 2), routes[0]), Scored(torch.tensor([[math.log(2), 9.0]]), routes[1])
    found = floor_metrics(torch.tensor([[True, False]]), base, other)
    assert float(found["k3"]) == pytest.approx(2 - 1 - math.log(2)) and found["tokens_changed"] == 0
    found = floor_metrics(torch.tensor([[True, True]]), base, other)
    assert (found["tokens_changed"], found["position_sites_changed"].tolist()) == (1, [0, 1])
