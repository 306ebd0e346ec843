"""MegaBlocks' real kernels: under Triton's interpreter where triton and megablocks are installed, and on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experts_helpers import COVERED, E, assert_same, make_experts, make_inputs, relative, run


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
