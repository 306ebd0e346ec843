"""The models that benchmarks build: Qwen3-MoE of any size, with four heads over two of keys."""

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.policy import char_tokenizer
from moe_rl.routing.experts import register_experts


def qwen3_moe(
    hidden: int, layers: int, experts: int, k: int, width: int, vocab: int = 512, **more: Any
) -> Qwen3MoeConfig:
    """Layers of `hidden` units, each with `k` of `experts` experts of `width` inner units."""
    defaults: dict[str, Any] = {"intermediate_size": 2 * hidden, "head_dim": hidden // 4, "num_key_value_heads": 2}
    return Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_experts=experts,
        num_experts_per_tok=k,
        **{**defaults, **more},
    )


def policy(alphabet: str, *sizes: int, ends: bool, implementation: str | None = None) -> tuple[Any, Any]:
    """A model of random weights over the characters of `alphabet`, of these `sizes` of `qwen3_moe`, and its tokenizer.

    ends: whether an end token may end a response; else neither knows one. implementation: of the experts.
    """
    register_experts()
    tokenizer = char_tokenizer(alphabet)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    special["eos_token_id"] = tokenizer.eos_token_id if ends else None
    if not ends:
        tokenizer.eos_token = None
    config = qwen3_moe(*sizes, vocab=len(tokenizer), max_position_embeddings=4096, **special)
    if implementation:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config), tokenizer
