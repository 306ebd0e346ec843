"""Routers in fp32 inside a bf16 Qwen3-MoE."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.measure.noise_floor import rounded_copy
from moe_rl.policy.router_precision import keep_routers_fp32
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.rollout.engines import HuggingFaceEngine
from moe_rl.routing import record_routes, replay_routes
from moe_rl.training.optimizer import make_optimizer


@pytest.fixture
def bf16():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=50, head_dim=16, **sizes, **experts)).to(torch.bfloat16)


IDS = torch.arange(40).view(2, 20)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_logits_and_gates_are_fp32_and_all_else_is_as_it_was(bf16, experts):
    model = keep_routers_fp32(bf16)
    model.set_experts_implementation(experts)
    gate, seen = model.model.layers[0].mlp.gate, {}
    gate.register_forward_hook(lambda module, args, out: seen.update(x=args[0], logits=out[0], gates=out[1]))
    model.model.layers[0].mlp.experts.register_forward_hook(lambda module, args, out: seen.update(out=out))
    loss = model(IDS, use_cache=False).logits.float().square().mean()
    assert seen["logits"].dtype == seen["gates"].dtype == torch.float32 and seen["out"].dtype == torch.bfloat16
    assert torch.equal(seen["logits"], F.linear(seen["x"].float(), gate.weight)), "the product itself is in fp32"
    assert (seen["logits"].bfloat16().float() != seen["logits"]).any(), "and not rounded on the way"
    loss.backward()
    dtypes = {name.rsplit(".", 2)[-2]: p.grad.dtype for name, p in model.named_parameters()}
    assert dtypes.pop("gate") == torch.float32 and set(dtypes.values()) == {torch.bfloat16}


def test_what_bf16_routers_round_together_fp32_routers_tell_apart(bf16):
    """Two experts whose weights differ by less than bf16 resolves in the logit: fp32 ranks them as they are."""
    gate = bf16.model.layers[0].mlp.gate
    kept = copy.deepcopy(bf16)
    keep_routers_fp32(kept)
    x = torch.ones(1, 32)
    with torch.no_grad():
        for router in (gate, kept.model.layers[0].mlp.gate):
            router.weight.zero_()
            router.weight[:2] = 1.0  # both logits are 32
            router.weight[1, 0] += 2**-6  # representable; 32 + 1/64 is not: bf16 has steps of 1/4 there
        low = gate(x.bfloat16())[0]
        high = kept.model.layers[0].mlp.gate(x.bfloat16())[0]
    assert low[0, 0] == low[0, 1] == 32
    assert high[0, 1] - high[0, 0] == 2**-6


def test_replay_training_and_copies(bf16):
    model = keep_routers_fp32(bf16).train()
    with record_routes(model) as recording:
        plain = model(IDS, use_cache=False).logits
    with replay_routes(model, recording.routes):
        assert torch.equal(model(IDS, use_cache=False).logits, plain)
    assert torch.equal(copy.deepcopy(model)(IDS, use_cache=False).logits, plain), "a reference is kept in fp32 as well"
    model(IDS, use_cache=False).logits.float().square().mean().backward()
    optimizer = make_optimizer([{"params": list(model.parameters()), "lr": 1e-5}], (0.9, 0.999), 0.0)
    before = model.model.layers[0].mlp.gate.weight.detach().clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = model.model.layers[0].mlp.gate.weight
    assert after.dtype == torch.float32 and bool((after != before).any())


def test_a_copy_in_another_precision_keeps_them_and_computes(bf16):
    model = keep_routers_fp32(bf16)
    engine = HuggingFaceEngine(model, None, EngineConfig(kind="hf", dtype="float16"))
    for copied, dtype in ((engine.model, torch.float16), (rounded_copy(model, torch.float16), torch.float16)):
        assert copied.model.layers[0].mlp.gate.weight.dtype == torch.float32
        assert copied.lm_head.weight.dtype == copied(IDS, use_cache=False).logits.dtype == dtype
