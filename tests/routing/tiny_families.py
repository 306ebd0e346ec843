"""A tiny random model of every causal-LM MoE family that the installed transformers has, found, not listed."""

import os
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64

# Every size that a configuration may have, made small. A field is set only where the default has a value for it.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 32,
    "dense_intermediate_size": 32,
    "ffn_hidden_size": 32,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "o_groups": 2,
    "index_topk": 32,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    "router_hidden_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = 3

# What a family needs beyond that.
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 8,
        "swa_qk_nope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_layers": 2},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


@cache
def families() -> dict[str, str]:
    """Model class -> model type, for every causal LM whose modelling file registers a source of `router_logits`."""
    root = os.path.join(os.path.dirname(transformers.__file__), "models")
    found: dict[str, str] = {}
    for model_type, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = model_type_to_module_name(model_type)
        path = os.path.join(root, name, f"modeling_{name}.py")
        if os.path.exists(path):
            with open(path) as file:
                # "ForConditionalGeneration" are vision-language wrappers of a text family that is found by itself
                text = not str(classes).count("ForConditionalGeneration")
                if text and '"router_logits":' in file.read():
                    found[classes[0] if isinstance(classes, tuple) else classes] = model_type
    return found


def supported() -> list[str]:
    """All of `families` but Doge, whose selection is not one top-k, and Inkling2-Loop, whose looped layers run a router
    several times in one forward."""
    return sorted(set(families()) - {"DogeForCausalLM", "Inkling2LoopForCausalLM"})


def tiny_config(model_type: str) -> Any:
    default = AutoConfig.for_model(model_type)
    small = {k: v for k, v in SMALL.items() if isinstance(vars(default).get(k), int)}
    own = vars(default)
    if own.get("num_key_value_heads") in (1, own.get("num_attention_heads")):
        small["num_key_value_heads"] = 1 if own["num_key_value_heads"] == 1 else 4
    if own.get("head_dim") == own.get("qk_rope_head_dim", -1):
        small["head_dim"] = small["qk_rope_head_dim"]
    if hasattr(default, "num_hidden_layers"):
        small["num_hidden_layers"] = LAYERS
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):  # one layer of each kind, then the last kind
        kinds = list(dict.fromkeys(vars(default).get(name) or ()))
        if kinds:
            small[name] = (kinds + kinds[-1:] * LAYERS)[: max(LAYERS, len(kinds))]
            if len(kinds) > LAYERS:
                small["num_hidden_layers"] = len(kinds)
    return AutoConfig.for_model(model_type, **{**small, **OWN.get(model_type, {})})


def tiny_model(family: str, seed: int = 0) -> nn.Module:
    """Random weights, float32, eval mode."""
    torch.manual_seed(seed)
    return getattr(transformers, family)(tiny_config(families()[family])).eval()
