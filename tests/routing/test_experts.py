"""Experts implementations: the dropless pipeline against transformers' own eager experts."""

import pytest
import torch
from experts_helpers import COVERED, PLAIN, E, H, Sizes, assert_same, make_experts, make_inputs, relative, run
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_rl.routing import experts as room


@PLAIN
def test_golden(ours):
    """One token x=2, hidden size 1, three experts, relu gate; experts 0 and 1 chosen with weights 1/4 and 1/2.

    expert 0: gate 1*2=2, up 3*2=6, down 1 -> 2*6*1  = 12
    expert 1: gate 2*2=4, up 1*2=2, down 10 -> 4*2*10 = 80
    y = 12/4 + 80/2 = 43, dy/dw = (12, 80). Both are quadratic in x, so dy/dx = 2y/x = 43.
    y is linear in each matrix entry: dy/dgate0 = 3/1, dy/dup0 = 3/3, dy/ddown0 = 3/1; of expert 1 the part is
    40: dy/dgate1 = 40/2, dy/dup1 = 40/1, dy/ddown1 = 40/10. Expert 2 has no slot: zeros.
    """
    config = Sizes()
    config.hidden_size = config.intermediate_size = 1
    config.num_local_experts, config.hidden_act = 3, "relu"
    config._experts_implementation = ours
    experts = MixtralExperts(config).double()
    experts.gate_up_proj.data = torch.tensor([[[1.0], [3.0]], [[2.0], [1.0]], [[9.0], [9.0]]]).double()
    experts.down_proj.data = torch.tensor([[[1.0]], [[10.0]], [[9.0]]]).double()
    x = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[0.5, 0.25]], dtype=torch.float64, requires_grad=True)
    y = experts(x, torch.tensor([[1, 0]]), w)
    y.sum().backward()
    assert y.item() == 43.0
    assert w.grad.tolist() == [[80.0, 12.0]]
    assert x.grad.tolist() == [[43.0]]
    assert experts.gate_up_proj.grad.flatten().tolist() == [3.0, 1.0, 20.0, 40.0, 0.0, 0.0]
    assert experts.down_proj.grad.flatten().tolist() == [3.0, 4.0, 0.0]


@PLAIN
@pytest.mark.parametrize("family", COVERED)
@pytest.mark.parametrize(
    ("tokens", "k", "num_used"),
    [(17, 3, E), (1, 3, E), (1, 1, E), (9, 1, E), (9, 2, 2), (5, 1, 1), (4, E, E)],
    ids=["usual", "one token", "one slot", "k=1", "four experts empty", "one expert", "k=E"],
)
def test_equals_eager_in_outputs_and_all_gradients(ours, family, tokens, k, num_used):
    experts = make_experts(COVERED[family])
    inputs = make_inputs(tokens, k, num_used)
    expected = run(experts, "eager", *inputs)
    assert_same(run(experts, ours, *inputs), expected, rtol=1e-11, atol=1e-11)
    unused = sorted(set(range(E)) - set(inputs[1].flatten().tolist()))
    assert all(not expected[name][e].any() for name in ("gate_up_proj", "down_proj") for e in unused)


@PLAIN
@pytest.mark.parametrize("family", COVERED)
def test_bf16_is_as_close_to_float64_as_eager_is(ours, family):
    """Rounding differs between two bf16 paths; what must hold is that neither is further from the truth."""
    exact, rounded = make_experts(COVERED[family]), make_experts(COVERED[family], dtype=torch.bfloat16)
    for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
        p.data = q.data.double()
    inputs = make_inputs(64, 3, dtype=torch.bfloat16)
    truth = run(exact, "eager", inputs[0].double(), inputs[1], inputs[2].double())
    eager = run(rounded, "eager", *inputs)
    got = run(rounded, ours, *inputs)
    for name in truth:
        assert got[name].dtype == torch.bfloat16
        assert relative(got[name], truth[name]) < 1.3 * relative(eager[name], truth[name]) + 1e-3, name
        assert relative(got[name], truth[name]) < 0.05, name


@PLAIN
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(ours, dtype):
    inputs = make_inputs(12, 2, dtype=dtype)
    experts = make_experts(MixtralExperts, dtype=dtype)
    expected, got = run(experts, "eager", *inputs), run(experts, ours, *inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    assert all(relative(got[n], expected[n]) < tolerance and got[n].dtype == dtype for n in expected)


def test_routing_weights_stay_float32_beside_bf16_rows():
    """Some routers return float32 weights with bf16 hidden states. bf16 has steps of 2^-7 at 1 and 2^-6 at 3:
    3 * (1 + 2^-8) = 3.01171875 rounds to 193/64 = 3.015625; with the weight rounded first (to 1) it would be 3."""
    row, slot = torch.full((1, 2), 3.0, dtype=torch.bfloat16), torch.tensor([0])
    out = room.REFERENCE.scatter(row, slot, slot, torch.tensor([1 + 2**-8]), torch.tensor([1]), 1)
    assert out.dtype == torch.bfloat16 and out.tolist() == [[3.015625, 3.015625]]


@PLAIN
def test_non_contiguous_inputs(ours):
    experts = make_experts(Qwen3MoeExperts)
    hidden, index, weights = make_inputs(10, 3)
    expected = run(experts, ours, hidden, index, weights)
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in (hidden, index, weights)]
    transposed = [t.T.contiguous().T for t in (hidden, index, weights)]
    assert not any(t.is_contiguous() for t in strided + transposed)
    assert_same(run(experts, ours, *strided), expected, rtol=0, atol=0)
    assert_same(run(experts, ours, *transposed), expected, rtol=0, atol=0)


@PLAIN
def test_no_tokens(ours):
    experts = make_experts(Qwen3MoeExperts, ours)
    assert experts(*make_inputs(0, 2)).shape == (0, H)


@PLAIN
@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 12), k=st.integers(1, E), seed=st.integers(0, 99))
def test_order_of_tokens_and_slots_does_not_matter(ours, tokens, k, seed):
    """Dropless: a token's result depends on its own experts only, not on its neighbours nor on slot order."""
    experts = make_experts(MixtralExperts, ours, seed=seed)
    hidden, index, weights = make_inputs(tokens, k, seed=seed)
    expected = experts(hidden, index, weights)
    slots, rows = torch.randperm(k), torch.randperm(tokens)
    torch.testing.assert_close(experts(hidden, index[:, slots], weights[:, slots]), expected)
    torch.testing.assert_close(experts(hidden[rows], index[rows], weights[rows]), expected[rows])
    torch.testing.assert_close(experts(hidden[:1], index[:1], weights[:1]), expected[:1])


@PLAIN
def test_autocast_computes_in_its_dtype(ours):
    """float32 master weights under bf16 autocast: the matrices are rounded, as eager's linear layers round them."""
    experts = make_experts(OlmoeExperts, dtype=torch.float32)
    inputs = make_inputs(32, 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager, got = (run(experts, name, *inputs) for name in ("eager", ours))
    for name in eager:
        assert got[name].dtype == torch.float32
        assert relative(got[name], eager[name]) < 0.01, name
    full = run(experts, ours, *inputs)
    assert relative(got["output"], full["output"]) > 1e-3  # it did compute in bf16


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 70), k=st.integers(1, E), seed=st.integers(0, 99), width=st.sampled_from([16, 6]))
def test_sorted_mm_equals_eager_with_and_without_torchs_grouped_product(tokens, k, seed, width):
    """In float32, where torch's grouped product takes rows of 64 bytes and refuses those of 24; the same bits twice."""
    config = Sizes()
    config.moe_intermediate_size, config._experts_implementation = width, "eager"
    experts = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    inputs = make_inputs(tokens, k, dtype=torch.float32, seed=seed)
    expected, got, again = (run(experts, name, *inputs) for name in ("eager", "sorted_mm", "sorted_mm"))
    assert_same(got, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected["output"].abs().max())))
    assert_same(again, got, rtol=0, atol=0)


@pytest.mark.parametrize("trained", ["hidden", "weights", "gate_up_proj", "down_proj"])
def test_sorted_mm_gives_the_gradients_that_are_asked_for(trained):
    experts = make_experts(Qwen3MoeExperts)
    hidden, index, weights = make_inputs(9, 2)
    expected = run(experts, "eager", hidden, index, weights)[trained]
    experts.config._experts_implementation = "sorted_mm"
    leaves = {"hidden": hidden, "weights": weights, **dict(experts.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == trained)
    out = experts(hidden, index, weights)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * probe).sum().backward()
    torch.testing.assert_close(leaves[trained].grad, expected)
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [trained]
    with torch.no_grad():
        assert torch.equal(experts(hidden, index, weights), out)
