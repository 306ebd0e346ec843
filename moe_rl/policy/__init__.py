"""Policies: loading a hub or local Mixture-of-Experts model, or making the tiny one; adapters; router precision."""

from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig, load_policy, seeded
from moe_rl.policy.tiny import ColdStartConfig, ModelError, TinyConfig, build_tiny, char_tokenizer, cold_start

__all__ = [
    "ColdStartConfig",
    "LoraConfig",
    "ModelConfig",
    "ModelError",
    "TinyConfig",
    "build_tiny",
    "char_tokenizer",
    "cold_start",
    "load_policy",
    "seeded",
]
