"""The noise floor's variants leave the model as it was; its rows are tested in tests/training/test_probe.py."""

import pytest
import torch

from moe_rl.measure.noise_floor import (
    OTHER_EXPERTS,
    NoiseFloor,
    OtherExpertsError,
    experts_computed_by,
    rounded_copy,
)
from moe_rl.measure.scoring import TokenBatch
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer


def test_a_rounded_copy_leaves_the_model_and_another_implementation_is_given_back():
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    model = build_tiny(tiny, char_tokenizer("ab"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = rounded_copy(model)
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
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
    model = build_tiny(tiny, char_tokenizer("ab"))

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr("moe_rl.measure.noise_floor.rounded_copy", no_memory)
    mask = torch.ones(1, 3, dtype=torch.bool)
    floor = NoiseFloor()
    names = [variant.name for variant in floor.variants(model, TokenBatch(torch.tensor([[1, 2, 3]]), mask, mask))]
    assert names == ["repeat", "experts"] and floor.left_out == {"bf16": "MemoryError"}
