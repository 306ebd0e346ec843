"""Experts layers, small models and comparisons for the tests of experts implementations."""

import pytest
import torch
import transformers
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_rl.routing import experts as room

NAMES = room.register_experts()
PLAIN = pytest.mark.parametrize("ours", ["megablocks_reference", "sorted_mm"])  # in plain torch
E, H, WIDTH = 6, 8, 16  # experts, hidden size, width of an expert


class Sizes:
    """The config fields that the experts classes of the different families read."""

    hidden_size = H
    intermediate_size = moe_intermediate_size = WIDTH
    num_experts = num_local_experts = n_routed_experts = moe_num_experts = E
    hidden_act = mlp_hidden_act = "silu"
    moe_latent_size = None
    swiglu_limit, swiglu_alpha = 0.5, 1.7


COVERED = {
    "qwen3_moe": Qwen3MoeExperts,
    "mixtral": MixtralExperts,
    "olmoe": OlmoeExperts,
    "deepseek_v4": DeepseekV4Experts,  # a gate of its own: clamped
}
if hasattr(AriaExperts, "_apply_gate"):  # older transformers have it outside the interface
    COVERED["aria"] = AriaExperts  # weights transposed


def make_experts(cls, implementation="eager", dtype=torch.float64, seed=0):
    """Experts with random weights, the same for the same seed whatever the dtype."""
    config = Sizes()
    config._experts_implementation = implementation
    experts = cls(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return experts


def make_inputs(tokens, k, num_experts=E, dtype=torch.float64, seed=1):
    """Hidden states, distinct experts per token, positive weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=generator, dtype=torch.float64)
    scores = torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64)
    weights, index = scores.topk(k, dim=-1)
    return hidden.to(dtype), index, weights.to(dtype)


def run(experts, implementation, hidden, index, weights):
    """Output, and the gradients of hidden states, routing weights and every expert weight."""
    experts.config._experts_implementation = implementation
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    out = experts(hidden, index, weights)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    parameters = dict(experts.named_parameters())
    gradients = torch.autograd.grad((out * probe).sum(), [hidden, weights, *parameters.values()])
    return dict(zip(["output", "hidden", "weights", *parameters], [out.detach(), *gradients], strict=True))


def assert_same(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "Qwen3MoeConfig": QWEN | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "OlmoeConfig": {"num_experts": 6, "num_experts_per_tok": 3},
    "Qwen2MoeConfig": QWEN | {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "GraniteMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4MoeConfig": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "MiniMaxM2Config": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
}


def make_model(name, implementation="eager", dtype=torch.float64):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(SMALL | MODELS[name]))
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # spread the router: with the default 0.02 all logits are near zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def logits_and_gradients(model, tokens):
    model.zero_grad()
    logits = model(tokens).logits
    logits.log_softmax(-1)[..., 3].sum().backward()
    return {"logits": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
