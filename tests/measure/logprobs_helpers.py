"""Small models of many families, padded batches, and the plain computation of log-probabilities."""

import torch
import torch.nn.functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

V, B, T = 31, 4, 7
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "experts_implementation": "eager",  # the only one that takes float64
}
QWEN = {"head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}


def seeing(experts_implementation, **text):
    """The configuration of a model that takes images, too."""
    vision = {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text["rope_parameters"] = ROTARY
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, experts_implementation=experts_implementation)


FAMILIES = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN),
    "qwen3_moe_tied": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN | {"tie_word_embeddings": True}),
    "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, seeing, QWEN),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 6.0},
    ),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.0625}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 0.7}),
}
MOE_WITH_AUX = ["qwen3_moe", "mixtral", "olmoe", "granitemoe"]


def build(family="qwen3_moe", dtype=torch.float64):
    model, config, more = FAMILIES[family]
    torch.manual_seed(0)
    model = model(config(**SIZES, **more)).to(dtype).eval()
    with torch.no_grad():  # the usual initialisation is so small that every distribution is nearly uniform
        model.get_output_embeddings().weight.mul_(20)
    return model


def batch(padding="both"):
    """Row 0 padded on the left, row 1 has no completion, row 2 padded on the right, row 3 is full."""
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
    attended = torch.ones(B, T, dtype=torch.bool)
    if padding == "both":
        attended[0, :2] = False
    attended[2, 5:] = False
    completion = torch.zeros(B, T, dtype=torch.bool)
    completion[:, 3:] = True
    completion[1] = False
    return ids, attended, completion & attended


def reference(model, ids, attended, completion, temperature=1.0):
    """(log-probabilities, entropies) [B,T] from whole logits."""
    positions = (attended.long().cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=attended.long(), position_ids=positions, use_cache=False)
    log_p = (out.logits[:, :-1].to(torch.promote_types(out.logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    logps = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = completion.logical_not()
    return F.pad(logps, (1, 0)).masked_fill(zero, 0.0), F.pad(entropy, (1, 0)).masked_fill(zero, 0.0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got, want, tolerance):
    assert got.keys() == want.keys()
    assert max(g.abs().max() for g in want.values()) > 1e-3  # there is something to compare
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=tolerance, rtol=tolerance, msg=name)


def weights(shape=(B, T), seed=3, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
