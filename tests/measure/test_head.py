"""The head alone: log-probabilities and entropies from hidden states, by hand, in chunks, never with whole logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_helpers import QWEN, SIZES, reference, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.measure.head import LogitMap, default_chunk, head_logps
from moe_rl.measure.logprobs import token_logps


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


def test_an_excluded_token_takes_no_part_in_the_entropy():
    hidden, weight = weights((3, 4)).requires_grad_(), weights((6, 4)).requires_grad_()
    bias, targets = torch.zeros(6, dtype=torch.float64), torch.tensor([0, 1, 2])
    bias[5] = -torch.inf
    found = head_logps(hidden, weight, targets, bias=bias, entropy=True)
    wanted = head_logps(hidden, weight[:5], targets, entropy=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        (gradient,), (same,) = (torch.autograd.grad(x.sum(), hidden, retain_graph=True) for x in (one, other))
        torch.testing.assert_close(gradient, same)


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
