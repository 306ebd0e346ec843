"""Weights kept aside and put back, buffers among them, and the dtypes of a copy."""

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.measure.weights import KEPT_FP32, copy_weights, dtypes_as_loaded, temporary_weights


class Head(nn.Module):
    """One that no architecture of transformers has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 3.0))


def small():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.head = Head()
    return model


def dtypes(model, dtype):
    found = {id(tensor): wanted for tensor, wanted in dtypes_as_loaded(model, dtype)}
    return {name: found[id(t)] for name, t in (*model.named_parameters(), *model.named_buffers()) if id(t) in found}


def test_weights_kept_aside_are_copies_and_buffers_are_among_them():
    model = small()
    kept = copy_weights(model)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.scale.zero_()
    assert kept["head.weight"].tolist() == [1, 1] and kept["head.scale"].tolist() == [3, 3]
    with temporary_weights(model, kept):
        assert model.head.weight.tolist() == [1, 1] and model.head.scale.tolist() == [3, 3]
    assert model.head.weight.tolist() == model.head.scale.tolist() == [0, 0]


def test_a_name_too_many_too_few_or_of_another_shape_is_refused():
    model = small()
    kept = copy_weights(model)
    less = {name: tensor for name, tensor in kept.items() if name != "head.scale"}
    for other, name in (
        (kept | {"head.more": torch.ones(2)}, "head.more"),
        (less, "head.scale"),
        (kept | {"head.weight": torch.ones(3)}, "head.weight"),
    ):
        with pytest.raises(ValueError, match=rf"by name or shape: \['{name}'\]"), temporary_weights(model, other):
            pass
    assert all(torch.equal(kept[name], tensor) for name, tensor in copy_weights(model).items())


def test_a_copy_has_the_dtypes_that_loading_gives():
    """Buffers that the class does not make keep theirs; modules that compute in fp32, and of fp16 those that the
    architecture keeps, stay."""
    model = small()
    found = dtypes(model, torch.bfloat16)
    assert found["lm_head.weight"] == found["head.weight"] == torch.bfloat16
    assert found["model.rotary_emb.inv_freq"] == found["head.scale"] == torch.float32
    setattr(model.lm_head, KEPT_FP32, True)
    assert dtypes(model, torch.bfloat16)["lm_head.weight"] == torch.float32
    model._keep_in_fp32_modules = ["embed_tokens"]
    assert dtypes(model, torch.float16)["model.embed_tokens.weight"] == torch.float32
    assert dtypes(model, torch.bfloat16)["model.embed_tokens.weight"] == torch.bfloat16
