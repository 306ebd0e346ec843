"""Models of the benchmarks: Qwen3-MoE of any size, with four attention heads and by default two key-value heads."""

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.policy import char_tokenizer
from moe_rl.routing.experts import register_experts


def qwen3_moe(
    hidden: int, layers: int, experts: int, k: int, width: int, vocab: int = 512, **more: Any
) -> Qwen3MoeConfig:
    """Return the configuration of a model: layers of `hidden` units, top k of `experts`, each of `width` units."""
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
    """Return a model of random weights over the characters of `alphabet`, and its tokenizer.

    sizes: the first arguments of `qwen3_moe`.
    ends: whether an end token may end a response; if not, neither model nor tokenizer has one.
    implementation: the experts implementation; None: the model's default.
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
