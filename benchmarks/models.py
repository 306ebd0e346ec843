"""The models that benchmarks build: Qwen3-MoE of any size, with four heads over two of keys."""

from typing import Any

from transformers import Qwen3MoeConfig


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
