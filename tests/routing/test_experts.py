"""Experts implementations: the dropless pipeline against transformers' own eager experts, and what it refuses.

The interpreter test runs MegaBlocks' real Triton kernels on the CPU, where triton and megablocks are installed.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_rl.routing import RoutedExperts, experts_sorted, record_routes, replay_routes
from moe_rl.routing import experts as room
from moe_rl.routing.errors import RoutingError, UnsupportedExpertsError

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


# --- the reference -------------------------------------------------------------------------------------


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


# --- whole models --------------------------------------------------------------------------------------

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


@PLAIN
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_equal_eager(monkeypatch, ours, name):
    model, tokens = make_model(name), torch.arange(14).view(2, 7)
    expected = logits_and_gradients(model, tokens)
    file, function = {
        "megablocks_reference": (room, "dropless_experts"),
        "sorted_mm": (experts_sorted, "check_experts"),  # which it calls first
    }[ours]
    ran, run = [], getattr(file, function)
    monkeypatch.setattr(file, function, lambda *args: ran.append(args[0]) or run(*args))
    model.set_experts_implementation(ours)
    got = logits_and_gradients(model, tokens)
    assert ran == [m for m in model.modules() if hasattr(m, "_apply_gate")]  # every experts layer, once, in order
    routers = [n for n in got if n.endswith((".gate.weight", "router.weight", "router.layer.weight"))]
    assert len(routers) == len(ran) and all(got[n].any() for n in routers)  # the gradient passes the weights
    assert_same(got, expected, rtol=1e-9, atol=1e-12)


@PLAIN
def test_chosen_when_the_model_is_made(ours):
    tokens = torch.arange(14).view(2, 7)
    model = make_model("MixtralConfig", ours)
    assert model.config._experts_implementation == ours
    expected = logits_and_gradients(make_model("MixtralConfig"), tokens)
    assert_same(logits_and_gradients(model, tokens), expected, rtol=1e-9, atol=1e-12)


@PLAIN
def test_generation_keeps_the_name_and_the_tokens(ours):
    model, prompt = make_model("OlmoeConfig"), torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.set_experts_implementation(ours)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert model.config._experts_implementation == ours


@PLAIN
@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig"])
def test_routes_are_recorded_and_replayed_unchanged(ours, name):
    model, tokens = make_model(name), torch.arange(14).view(2, 7)
    with record_routes(model) as eager:
        model(tokens)
    model.set_experts_implementation(ours)
    with record_routes(model) as recording:
        live = model(tokens).logits
    routes = recording.routes
    assert torch.equal(routes.ids, eager.routes.ids) and routes.sites == eager.routes.sites

    with replay_routes(model, routes):
        assert torch.equal(model(tokens).logits, live)
    # Routes that the model would not choose: every expert's neighbour. Forced alike, the two must agree.
    shifted = RoutedExperts((routes.ids.long() + 1) % routes.num_experts, routes.sites, routes.num_experts)
    with replay_routes(model, shifted):
        got = logits_and_gradients(model, tokens)
    model.set_experts_implementation("eager")
    with replay_routes(model, shifted):
        expected = logits_and_gradients(model, tokens)
    assert_same(got, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(got["logits"], live)


def test_registering_twice_changes_nothing():
    assert room.register_experts() == NAMES == ("megablocks", "megablocks_reference", "sorted_mm")
    make_model("MixtralConfig").set_experts_implementation("megablocks")


# --- what is refused, by name --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(
    ("cls", "reasons"),
    [
        (GptOssExperts, ["bias", "interleaved"]),
        (NemotronHExperts, ["not gated", "gate_up_proj"]),
    ],
)
def test_other_layouts_are_refused(implementation, cls, reasons):
    experts = make_experts(cls, implementation)
    with pytest.raises(UnsupportedExpertsError) as error:
        experts(*make_inputs(3, 2))
    assert cls.__name__ in str(error.value) and "grouped_mm" in str(error.value)
    assert all(reason in str(error.value) for reason in reasons)


@PLAIN
def test_post_norm_expert_parallelism_and_sharded_or_quantised_weights_are_refused(ours):
    experts = make_experts(MixtralExperts, ours)
    experts.has_post_expert_norm = True  # as in muse_spark, which older transformers lack
    with pytest.raises(UnsupportedExpertsError, match=r"MixtralExperts .*has_post_expert_norm"):
        experts(*make_inputs(3, 2))
    experts = make_experts(MixtralExperts, ours)
    experts._is_expert_parallel = True
    with pytest.raises(UnsupportedExpertsError, match="expert parallelism"):
        experts(*make_inputs(3, 2))
    experts = make_experts(MixtralExperts, ours)
    experts.down_proj.placements = ()  # what marks a DTensor
    with pytest.raises(UnsupportedExpertsError, match="down_proj is sharded"):
        experts(*make_inputs(3, 2))
    experts = make_experts(MixtralExperts, ours)
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedExpertsError, match="gate_up_proj is stored as float8_e4m3fn"):
        experts(*make_inputs(3, 2))


@PLAIN
def test_older_transformers_without_the_newer_attributes(ours):
    experts, inputs = make_experts(OlmoeExperts), make_inputs(5, 2)
    expected = run(experts, "eager", *inputs)
    for name in ("has_post_expert_norm", "is_concatenated", "is_transposed", "has_gate", "has_bias"):
        if hasattr(experts, name):
            delattr(experts, name)
    assert_same(run(experts, ours, *inputs), expected, rtol=1e-11, atol=1e-11)


@PLAIN
@pytest.mark.parametrize("wrong", [E, -1, 1000])
def test_an_index_that_no_expert_owns(ours, wrong):
    experts = make_experts(MixtralExperts, ours)
    hidden, index, weights = make_inputs(4, 2)
    index[2, 1] = wrong
    with pytest.raises(RoutingError, match=r"1 of 8 expert indices lie outside 0\.\.5"):
        experts(hidden, index, weights)


def test_megablocks_refuses_cpu_tensors(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedExpertsError, match=r"CUDA device, these are on 'cpu'.*megablocks_reference"):
        make_experts(MixtralExperts, "megablocks", torch.bfloat16)(*make_inputs(3, 2, dtype=torch.bfloat16))


def test_megablocks_on_cuda_refuses_other_dtypes_and_too_many_slots():
    """Fake tensors have a CUDA device and no memory, so these checks run on every machine."""
    experts = make_experts(MixtralExperts, "megablocks", torch.float32)
    with (
        FakeTensorMode(),
        pytest.raises(UnsupportedExpertsError, match="bfloat16 only, this layer computes in float32"),
    ):
        inputs = torch.empty(3, H, device="cuda"), torch.empty(3, 2, dtype=torch.int64, device="cuda")
        experts(*inputs, torch.empty(3, 2, device="cuda"))
    experts = make_experts(MixtralExperts, "megablocks", torch.bfloat16)
    tokens = 2**31 // (8 * H)  # with k=8 exactly 2^31 elements: the first count that 32 bits cannot address
    with FakeTensorMode(), pytest.raises(UnsupportedExpertsError, match=r"2,147,483,648 elements.*smaller batches"):
        index = torch.empty(tokens, 8, dtype=torch.int64, device="cuda")
        experts(torch.empty(tokens, H, device="cuda"), index, torch.empty(tokens, 8, device="cuda"))


@pytest.mark.parametrize("missing", ["megablocks", "grouped_gemm"])
def test_missing_packages_name_the_install_steps(monkeypatch, missing):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # past the device check
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.ops", None)
    with pytest.raises(ImportError, match=r"(?s)pip install --no-deps --no-build-isolation.*docs/megablocks\.md"):
        make_experts(MixtralExperts, "megablocks")(*make_inputs(3, 2))


def test_importing_the_room_imports_no_kernels():
    """Optional packages are imported inside functions only."""
    statements = ast.parse(Path(room.__file__).read_text()).body
    imported = [ast.unparse(s) for s in statements if isinstance(s, ast.Import | ast.ImportFrom)]
    assert imported and not [s for s in imported if "megablocks" in s or "grouped_gemm" in s]


# --- the real kernels ----------------------------------------------------------------------------------


def has(*packages):
    """Installed? Asked without importing: beside a CPU torch megablocks imports only with the stand-ins."""
    return all(importlib.util.find_spec(package) for package in packages)


@pytest.mark.slow
@pytest.mark.skipif(not has("triton", "megablocks", "stk"), reason="needs triton, megablocks and stanford-stk")
def test_triton_kernels_under_the_interpreter():
    """In a process of its own, because triton decides at import whether its kernels are interpreted.

    The kernels must agree with eager, and with the reference bit for bit in all but the routing weights' gradient,
    which is a dot product over the hidden size summed in another order.
    """
    program = Path(__file__).with_name("megablocks_on_cpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["replays"]
    for dtype, tolerance in {"torch.float32": 5e-7, "torch.bfloat16": 0.015}.items():
        errors = report[dtype]
        assert errors["eager"].keys() == errors["reference"].keys() == COVERED.keys()
        for family in COVERED:
            assert max(errors["eager"][family].values()) < tolerance, (dtype, family)
            weights = errors["reference"][family].pop("weights")
            assert weights < tolerance and not any(errors["reference"][family].values()), (dtype, family)
        for name, implementations in errors["models"].items():
            for error in implementations.values():
                assert error["logits"] < tolerance and error["gradients"] < 2 * tolerance, (dtype, name)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    not (torch.cuda.is_available() and has("triton", "megablocks", "stk", "grouped_gemm")),
    reason="needs a CUDA device, megablocks and grouped_gemm",
)
@pytest.mark.parametrize("family", COVERED)
def test_kernels_on_a_gpu(family):
    """bf16 on CUDA: close to eager, exact zeros for experts without a slot, the same bits twice."""
    experts = make_experts(COVERED[family], dtype=torch.bfloat16).cuda()
    for tokens, k, num_used in [(64, 3, E), (1, 2, E), (9, 1, E), (9, 2, 2)]:
        inputs = [t.cuda() for t in make_inputs(tokens, k, num_used, dtype=torch.bfloat16)]
        expected, first, second = (run(experts, name, *inputs) for name in ("eager", "megablocks", "megablocks"))
        for name in expected:
            assert relative(first[name], expected[name]) < 0.02, name
        assert_same(second, first, rtol=0, atol=0)
        unused = sorted(set(range(E)) - set(inputs[1].flatten().tolist()))
        assert not any(first[name][unused].any() for name in ("gate_up_proj", "down_proj"))
