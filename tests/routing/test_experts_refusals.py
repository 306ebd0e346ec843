"""What experts implementations refuse, by name, and what they need."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from experts_helpers import NAMES, PLAIN, E, H, assert_same, make_experts, make_inputs, run
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from moe_rl.routing import experts as room
from moe_rl.routing.errors import RoutingError, UnsupportedExpertsError


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
