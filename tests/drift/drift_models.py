"""Tiny checkpoints of several families, saved as a person would have them."""

import copy

import torch
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ALPHABET = "abcdefghij =+"
TEXTS = ["abc=def", "ghij+a", "aa bb cc dd", "j=i+h", "fedcba", "a+b=c d+e=f"]
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def build(family, tokenizer, **changes):
    torch.manual_seed(0)
    common = COMMON | {"vocab_size": len(tokenizer), "pad_token_id": 0} | changes
    experts, moe_size = common.pop("experts", 6), common.pop("moe_size", 12)
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(**common, num_experts=experts, moe_intermediate_size=moe_size, head_dim=8)
        return Qwen3MoeForCausalLM(config)
    if family == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**common, num_experts=experts))
    if family == "granitemoe":
        return GraniteMoeForCausalLM(GraniteMoeConfig(**common, num_local_experts=experts))
    del common["num_experts_per_tok"]
    return LlamaForCausalLM(LlamaConfig(**common))


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def moved(model, scale=0.05):
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return new
