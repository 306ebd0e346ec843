"""Token log-probabilities against `log_softmax` and `gather` on the model's own logits, in float64."""

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.measure import logprobs
from moe_rl.measure.head import LogitMap, default_chunk, head_logps, logit_map_of
from moe_rl.measure.logprobs import token_logps

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
FAMILIES = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN),
    "qwen3_moe_tied": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN | {"tie_word_embeddings": True}),
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


class Float64Throughout(TorchFunctionMode):
    """Models cast to fp32 inside (norms, softmax). Two calls of one model may then differ by 1e-9: the last bit of a
    product depends on the memory's alignment, and a cast makes it 29 bits larger. Here such casts do nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.fixture
def float64_throughout():
    with Float64Throughout():
        yield


# -- against the plain computation ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_log_softmax_and_gather(family, float64_throughout):
    model = build(family)
    data = batch("right" if family == "gemma2" else "both")  # gemma2 itself gives NaN for left padding in float64
    assert logprobs._obstacle(model, model)[0] is None  # otherwise the plain path would be compared with itself
    want_logps, want_entropy = reference(model, *data, temperature=0.8)
    got = token_logps(model, *data, temperature=0.8, entropy=True, chunk_size=3)
    assert got.logps.dtype == torch.float64
    torch.testing.assert_close(got.logps, want_logps, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got.entropy, want_entropy, atol=1e-10, rtol=1e-10)
    a, b = weights(), weights(seed=4)
    want = gradients(model, (want_logps * a).sum() + (want_entropy * b).sum())
    assert_same_gradients(gradients(model, (got.logps * a).sum() + (got.entropy * b).sum()), want, 1e-10)


@pytest.mark.parametrize("which", ["logps", "entropy"])
def test_gradient_through_one_of_the_two_results(which, float64_throughout):
    model, data = build(), batch()
    got = getattr(token_logps(model, *data, entropy=True, chunk_size=4), which)
    want = reference(model, *data)[0 if which == "logps" else 1]
    assert_same_gradients(gradients(model, (got * weights()).sum()), gradients(model, (want * weights()).sum()), 1e-10)


def test_exactly_zero_outside_the_completion_and_at_a_first_token():
    model = build()
    ids, attended, _ = batch()
    completion = attended.clone()  # every real token is asked for, the first of each row included
    out = token_logps(model, ids, attended, completion, entropy=True)
    first = attended & (attended.cumsum(1) == 1)
    for values in (out.logps, out.entropy):
        assert torch.equal(values == 0, ~attended | first)


def test_rows_without_completion_give_no_gradient():
    model = build()
    ids, attended, completion = batch()
    alone = token_logps(model, ids[1:2], attended[1:2], completion[1:2], entropy=True)
    assert torch.equal(alone.logps, torch.zeros(1, T, dtype=torch.float64))
    model.zero_grad()
    (alone.logps.sum() + alone.entropy.sum()).backward()
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_padding_side_and_padding_values_do_not_matter(float64_throughout):
    model = build()
    ids, completion_from = torch.tensor([[5, 6, 7, 8, 9]]), 2
    results = []
    for left, right, pad in ((0, 0, 0), (3, 0, 0), (3, 0, 17), (0, 2, 4), (1, 1, 2)):
        padded = F.pad(ids, (left, right), value=pad)
        real = F.pad(torch.ones_like(ids), (left, right))
        asked = F.pad((torch.arange(5) >= completion_from)[None], (left, right))
        results.append(token_logps(model, padded, real, asked).logps[:, left : left + 5])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-12, rtol=1e-12)


def test_positions_count_real_tokens():
    model, seen = build(), []
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    ids, _, completion = batch()
    attended = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1, 1, 1, 1, 1, 0, 0], [1] * 7])
    token_logps(model, ids, attended, completion)
    assert seen[0][0].tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert seen[0][1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    given_ids = torch.arange(T).expand(B, T) + 3
    token_logps(model, ids, attended, completion, position_ids=given_ids)
    assert torch.equal(seen[1], given_ids)


def test_integer_and_bool_masks_agree():
    model = build()
    ids, attended, completion = batch()
    want = token_logps(model, ids, attended, completion).logps
    assert torch.equal(token_logps(model, ids, attended.long(), completion.int()).logps, want)


def test_bfloat16_model_gives_fp32_from_its_own_logits():
    model, data = build(dtype=torch.bfloat16), batch()
    got, want = token_logps(model, *data, chunk_size=5), reference(model, *data)[0]
    assert got.logps.dtype == torch.float32
    torch.testing.assert_close(got.logps, want, atol=1e-5, rtol=1e-5)
    a = weights(dtype=torch.float32)
    got, want = gradients(model, (got.logps * a).sum()), gradients(model, (want * a).sum())
    assert got["lm_head.weight"].dtype == torch.bfloat16
    assert_same_gradients(got, want, 0.03)  # bf16 has 8 bits


# -- the head alone ---------------------------------------------------------------------------------------------


def test_golden():
    """Logits (0, ln 3): p = (1/4, 3/4). Token 0: -ln 4; entropy ln 4 - (3/4) ln 3.
    At temperature 1/2, logits (0, ln 9): p = (1/10, 9/10). Token 1: ln 0.9.
    With scale 2, the same as temperature 1/2. With softcap c, ln 3 becomes c tanh(ln 3 / c); c = ln 3 / atanh(1/2)
    gives c / 2."""
    hidden, weight = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    bias = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    zero, one = torch.tensor([0]), torch.tensor([1])
    logps, entropy = head_logps(hidden, weight, zero, bias=bias, entropy=True)
    assert logps.item() == pytest.approx(-math.log(4), abs=1e-14)
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), abs=1e-14)
    for options in ({"temperature": 0.5}, {"logit_map": LogitMap(scale=2.0)}):
        logps, none = head_logps(hidden, weight, one, bias=bias, **options)
        assert logps.item() == pytest.approx(math.log(0.9), abs=1e-14) and none is None
    cap = math.log(3) / math.atanh(0.5)
    logps, _ = head_logps(hidden, weight, zero, bias=bias, logit_map=LogitMap(softcap=cap))
    assert logps.item() == pytest.approx(-math.log(1 + math.exp(cap / 2)), abs=1e-14)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 9), v=st.integers(1, 12), chunk=st.integers(1, 11), scale=st.sampled_from([0.01, 1.0, 300.0]))
def test_chunk_size_does_not_matter(n, v, chunk, scale):
    hidden, weight = weights((n, 3)) * scale, weights((v, 3), seed=5)
    targets = torch.arange(n) % v
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    results = []
    for size in (chunk, None):
        logps, entropy = head_logps(hidden, weight, targets, entropy=True, chunk_size=size)
        loss = (logps * weights((n,))).sum() + (entropy * weights((n,), seed=6)).sum()
        results.append((logps, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    want = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(results[0][0], want, atol=1e-10, rtol=1e-10)
    for got, other in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.3), LogitMap(2.0, 1.5)])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck(logit_map, entropy):
    inputs = [weights((5, 3)), weights((4, 3), seed=5), weights((4,), seed=6)]
    targets = torch.tensor([0, 3, 3, 1, 2])

    def run(hidden, weight, bias):
        logps, entropies = head_logps(
            hidden,
            weight,
            targets,
            bias=bias,
            logit_map=logit_map,
            temperature=0.7,
            entropy=entropy,
            chunk_size=2,
        )
        return (logps, entropies) if entropy else logps

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_entropy_gradient_at_a_uniform_distribution_is_zero():
    """The entropy is largest there."""
    weight = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
    _, entropy = head_logps(weights((3, 2)), weight, torch.tensor([0, 1, 2]), entropy=True)
    torch.testing.assert_close(entropy, torch.full((3,), math.log(6), dtype=torch.float64))
    (gradient,) = torch.autograd.grad(entropy.sum(), weight)
    assert gradient.abs().max() < 1e-15


def test_bfloat16_weight_gradient_is_summed_in_fp32():
    """512 tokens with the same gradient, one a chunk: bf16 sums would stop growing at 256 times the step.
    V = 2 at zero logits: d logp(token 0) / d weight[0] = (1 - 1/2) * hidden = 1/2 a token."""
    hidden, weight = torch.ones(512, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    logps, _ = head_logps(hidden, weight, torch.zeros(512, dtype=torch.long), chunk_size=1)
    logps.sum().backward()
    assert weight.grad.tolist() == [[256.0], [-256.0]]


class LargestLogits(TorchDispatchMode):
    """The most elements of any tensor made with the vocabulary as a dimension, the weight's own shape aside."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.vocabulary, self.weight, self.largest = vocabulary, {vocabulary, hidden}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and self.vocabulary in made.shape and set(made.shape) != self.weight:
                self.largest = max(self.largest, made.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_whole(dtype):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, "vocab_size": 101}, **QWEN)
    model = Qwen3MoeForCausalLM(config).to(dtype)
    ids = torch.randint(0, 101, (6, 20))
    ones, completion = torch.ones_like(ids), torch.arange(20).expand(6, 20) >= 5  # 90 completion tokens
    with LargestLogits(101, 16) as watch:
        out = token_logps(model, ids, ones, completion, entropy=True, chunk_size=7)
        (out.logps.sum() + out.entropy.sum()).backward()
    assert watch.largest == 7 * 101
    with LargestLogits(101, 16) as watch:  # the watch does see logits
        reference(model, ids, ones.bool(), completion)[0].sum().backward()
    assert watch.largest >= 6 * 19 * 101


def test_default_chunk_is_bounded_by_memory_or_by_the_weight():
    assert default_chunk(151_936, 512) * 151_936 * 4 <= 128 * 2**20
    assert default_chunk(151_936, 4096) == 1024
    assert default_chunk(2**26, 1) == 1


# -- what the model does around its head ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("qwen3_moe", LogitMap()),
        ("granitemoe", LogitMap(1 / 6.0)),
        ("cohere", LogitMap(0.0625)),
        ("gemma2", LogitMap(1.0, 0.7)),
    ],
)
def test_the_treatment_of_logits_is_found(family, want):
    model, calls = build(family), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    found = logit_map_of(model)
    assert found.scale == pytest.approx(want.scale, rel=1e-12)
    assert found.softcap == pytest.approx(want.softcap, rel=1e-12) if want.softcap else found.softcap is None
    assert not calls  # nothing ran that a recording could see


class Squared(Qwen3MoeForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.01 * out.logits**2
        return out


def test_an_unknown_treatment_takes_whole_logits_and_says_so_once(caplog, float64_throughout):
    model = Squared(Qwen3MoeConfig(**SIZES, **QWEN)).double()
    data = batch()
    logprobs._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        got = [token_logps(model, *data, temperature=0.8, entropy=True) for _ in range(2)][1]
    assert [r.message for r in caplog.records if "Squared" in r.message and "whole logits" in r.message] == [
        "Squared: it treats its head's output to more than a scale and a soft cap; its log-probabilities are taken "
        "from whole logits"
    ]
    want_logps, want_entropy = reference(model, *data, temperature=0.8)
    torch.testing.assert_close(got.logps, want_logps, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got.entropy, want_entropy, atol=1e-10, rtol=1e-10)
    none = token_logps(model, *(x[1:2] for x in data))  # no completion token at all
    assert torch.equal(none.logps, torch.zeros(1, T, dtype=torch.float64))


def test_both_ways_agree(float64_throughout):
    model = build()
    data = batch()
    fast = token_logps(model, *data).logps
    model.lm_head.forward = model.lm_head.forward  # a forward of its own, as other libraries give it
    assert "forward of its own" in logprobs._obstacle(model, model)[0]
    torch.testing.assert_close(token_logps(model, *data).logps, fast, atol=1e-12, rtol=1e-12)


def test_every_module_runs_once_and_the_head_is_given_back():
    model, runs = build(), []
    routers = [layer.mlp.gate for layer in model.model.layers]
    for module in (model, model.model, *routers, model.lm_head):
        module.register_forward_hook(lambda module, *_: runs.append(module))
    token_logps(model, *batch())
    assert len(runs) == 5 and len(set(map(id, runs))) == 5
    assert "forward" not in vars(model.lm_head)

    def fail(*_):
        raise KeyError("a hook failed")

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="a hook failed"):
        token_logps(model, *batch())
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("family", MOE_WITH_AUX)
def test_the_load_balancing_loss_is_the_models_own(family, float64_throughout):
    model = build(family)
    ids, attended, completion = batch()
    out = token_logps(model, ids, attended, completion, aux_loss=True)
    positions = (attended.long().cumsum(1) - 1).clamp(min=0)
    own = model(input_ids=ids, attention_mask=attended.long(), position_ids=positions, output_router_logits=True)
    assert torch.equal(out.aux_loss, own.aux_loss) and out.aux_loss > 0
    assert len(out.router_logits) == 2
    assert_same_gradients(gradients(model, out.aux_loss), gradients(model, own.aux_loss), 1e-12)


# -- wrappers ---------------------------------------------------------------------------------------------------


def assert_as_reference(model, bare, tolerance=1e-10, strip=""):
    data, a = batch(), weights()
    want = reference(bare, *data)[0]
    want_gradients = gradients(bare, (want * a).sum())
    got = token_logps(model, *data, chunk_size=3).logps
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    found = {
        name.replace(strip, ""): g.full_tensor() if hasattr(g, "full_tensor") else g
        for name, g in gradients(model, (got * a).sum()).items()
    }
    assert_same_gradients(found, want_gradients, tolerance)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("unused", [False, True])
def test_distributed_data_parallel(one_process, unused, float64_throughout):
    bare = build()
    model = DistributedDataParallel(copy.deepcopy(bare), find_unused_parameters=unused)
    assert_as_reference(model, bare, strip="module.")


@pytest.mark.parametrize("apart", [False, True])
def test_fully_sharded_and_resharded(one_process, apart, float64_throughout):
    """The head's weight is a DTensor outside the model's forward, and is freed again before backward."""
    bare = build()
    model = copy.deepcopy(bare)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    if apart:
        fully_shard(model.lm_head, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    assert_as_reference(model, bare)


def test_lora_on_the_backbone_and_on_the_head(float64_throughout):
    peft = pytest.importorskip("peft")
    for targets in (["q_proj", "v_proj"], ["q_proj", "lm_head"]):
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(build(), config).double()
        assert_as_reference(model, model)


def test_compiled_as_a_whole_or_in_part():
    bare = build()
    bare.model.layers, bare.config.num_hidden_layers = bare.model.layers[:1], 1  # compiling takes long
    bare.set_experts_implementation("batched_mm")
    whole = torch.compile(copy.deepcopy(bare), backend="aot_eager")
    assert_as_reference(whole, bare, 1e-7, strip="_orig_mod.")
    backbone = copy.deepcopy(bare)
    backbone.model.compile(backend="aot_eager")
    assert logprobs._obstacle(backbone, backbone)[0] is None
    assert_as_reference(backbone, bare, 1e-7)


def test_autocast_rounds_the_product_as_the_model_would():
    model, data = build(dtype=torch.float32), batch()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = token_logps(model, *data, chunk_size=64).logps, reference(model, *data)[0]
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    exact = token_logps(model, *data).logps
    assert (got - exact).abs().max() > 1e-4  # autocast was in force
    hidden, weight, bias = (weights(s, dtype=torch.float32) for s in ((5, 3), (4, 3), (4,)))
    targets = torch.tensor([0, 3, 3, 1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = head_logps(hidden, weight, targets, bias=bias, chunk_size=5)
        want = F.linear(hidden, weight, bias).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_refusals():
    model = build()
    ids, attended, completion = batch()
    with pytest.raises(ValueError, match=r"true on padding \(first at row 0, position 1\)"):
        wrong = completion.clone()
        wrong[0, 1] = True
        token_logps(model, ids, attended, wrong)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_logps(model, ids, attended, completion, temperature=0.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_logps(model, ids, attended, completion, chunk_size=0)
    with pytest.raises(TypeError, match="Linear holds no transformers model with an output head"):
        token_logps(torch.nn.Linear(2, 2), ids, attended, completion)
    with pytest.raises(TypeError, match="Qwen3MoeModel holds no transformers model with an output head"):
        token_logps(model.model, ids, attended, completion)
    sizes = {name: size for name, size in SIZES.items() if name != "experts_implementation"}
    with pytest.raises((ValueError, TypeError), match=r"aux_loss|load-balancing"):
        token_logps(LlamaForCausalLM(LlamaConfig(**sizes)), ids, attended, completion, aux_loss=True)
