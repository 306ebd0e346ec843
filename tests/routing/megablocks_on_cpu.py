"""MegaBlocks' real Python and Triton kernels on a CPU, for tests: run as a program, it prints errors as JSON.

Needs triton, megablocks and stanford-stk (docs/megablocks.md); starts with TRITON_INTERPRET=1 because triton
decides at import whether its kernels are interpreted. What only CUDA has is stood in for by torch:

- `megablocks_ops` (sort, histogram, cumulative sum) and `grouped_gemm_backend` (the grouped matrix product), with
  the checks that the compiled modules make of their arguments;
- `Autotuner.run`, which would time every configuration on a GPU: the first one is taken;
- the interpreter's float32 -> bfloat16 cast, which truncates where a GPU rounds to nearest.

So this validates layouts, permutation and gradients, and says nothing of the two compiled modules.
"""

import importlib.util
import json
import sys
import types

import numpy as np
import torch


def install_stand_ins():
    """Put the stand-ins into `sys.modules`; before megablocks is imported."""
    operations = types.ModuleType("megablocks_ops")
    operations.sort, operations.histogram, operations.inclusive_cumsum = _sort, _histogram, _inclusive_cumsum
    operations.exclusive_cumsum = None  # imported by name with the others, not used here
    sys.modules["megablocks_ops"] = operations
    backend = types.ModuleType("grouped_gemm_backend")
    backend.gmm = _gmm
    sys.modules["grouped_gemm_backend"] = backend
    if importlib.util.find_spec("grouped_gemm") is None:  # it cannot be built beside a CPU torch
        package, ops = types.ModuleType("grouped_gemm"), types.ModuleType("grouped_gemm.ops")
        ops.gmm, package.ops, package.backend = _GroupedGemm.apply, ops, backend
        sys.modules |= {"grouped_gemm": package, "grouped_gemm.ops": ops, "grouped_gemm.backend": backend}

    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def round_to_nearest(builder, source, target):
        if str(target.scalar) != "bf16":
            return builder.cast_impl(source, target)
        rounded = torch.from_numpy(np.asarray(source.data, np.float32)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target.scalar)

    InterpreterBuilder.create_fp_trunc = round_to_nearest
    Autotuner.run = lambda self, *args, **kwargs: self.fn.run(*args, **kwargs, **self.configs[0].kwargs)


def _sort(x, end_bit, x_out, iota_out):
    assert x.ndim == 1 and x.is_contiguous() and x_out.dtype == iota_out.dtype == x.dtype
    assert x.dtype in (torch.int16, torch.int32, torch.int64)
    _, order = torch.sort(x & (2**end_bit - 1), stable=True)  # radix sort looks at the lowest bits only
    x_out.copy_(x[order])
    iota_out.copy_(order)


def _histogram(x, num_bins):
    assert x.ndim == 1 and x.dtype in (torch.int16, torch.int32, torch.int64)
    return torch.bincount(x[(x >= 0) & (x < num_bins)], minlength=num_bins).to(torch.int32)


def _inclusive_cumsum(x, dim, out):
    assert x.ndim == 2 and dim == 1 and out.dtype == x.dtype
    out.copy_(torch.cumsum(x, dim=1))


def _gmm(a, b, c, batch_sizes, trans_a, trans_b):
    assert batch_sizes.device.type == "cpu" and batch_sizes.dtype == torch.int64 and batch_sizes.ndim == 1
    assert a.is_contiguous() and b.is_contiguous() and c.is_contiguous() and a.dtype == b.dtype == c.dtype
    assert int(batch_sizes.sum()) == len(a) and not (trans_a and trans_b)
    start = 0
    for expert, size in enumerate(batch_sizes.tolist()):
        rows = slice(start, start + size)
        if trans_a:
            c[expert] = a[rows].T @ b[rows]
        else:
            c[rows] = a[rows] @ (b[expert].T if trans_b else b[expert])
        start += size


class _GroupedGemm(torch.autograd.Function):
    """What grouped_gemm.ops does around its compiled module, where that package is absent."""

    @staticmethod
    def forward(ctx, a, b, batch_sizes, trans_b):
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        out = a.new_empty(len(a), b.shape[1] if trans_b else b.shape[2])
        _gmm(a, b, out, batch_sizes, False, trans_b)
        return out

    @staticmethod
    def backward(ctx, grad):
        a, b, batch_sizes = ctx.saved_tensors
        grad, a_grad, b_grad = grad.contiguous(), torch.empty_like(a), torch.empty_like(b)
        _gmm(grad, b, a_grad, batch_sizes, False, not ctx.trans_b)
        left, right = (grad, a) if ctx.trans_b else (a, grad)
        _gmm(left, right, b_grad, batch_sizes, True, False)
        return a_grad, b_grad, None, None


def compare_experts(suite, dtype, other):
    """Relative difference of each output and gradient from another implementation, the worst over the edge cases."""
    cases = {"usual": (11, 3, 6), "one token": (1, 3, 6), "k=1": (7, 1, 6), "empty experts": (7, 2, 2)}
    report = {}
    for family, cls in suite.COVERED.items():
        experts, worst = suite.make_experts(cls, dtype=dtype), {}
        for tokens, k, num_used in cases.values():
            for strided in (False, True):
                inputs = suite.make_inputs(tokens, k, num_used, dtype=dtype)
                if strided:
                    inputs = [torch.stack([t, t], dim=-1)[..., 0] for t in inputs]
                expected, got = (suite.run(experts, name, *inputs) for name in (other, "megablocks"))
                for name in expected:
                    worst[name] = max(worst.get(name, 0.0), suite.relative(got[name], expected[name]))
        report[family] = worst
    return report


def compare_models(suite, dtype):
    """Largest difference of a logit and largest relative gradient error of whole models against eager."""
    report, tokens = {}, torch.arange(14).view(2, 7)
    for name in ("Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig"):
        model = suite.make_model(name, dtype=dtype)
        expected = suite.logits_and_gradients(model, tokens)
        report[name] = {}
        for implementation in ("megablocks", "megablocks_reference", "grouped_mm"):
            model.set_experts_implementation(implementation)
            got = suite.logits_and_gradients(model, tokens)
            errors = [suite.relative(got[n], expected[n]) for n in expected if n != "logits"]
            logits = (got["logits"].float() - expected["logits"].float()).abs().max().item()
            report[name][implementation] = {"logits": logits, "gradients": max(errors)}
    return report


def replays(suite):
    """Do routes recorded through the kernels equal eager's, and does their replay reproduce the logits bit for bit?"""
    from moe_rl.routing import record_routes, replay_routes  # as late as the suite: after the stand-ins

    model, tokens = suite.make_model("Qwen3MoeConfig", dtype=torch.float32), torch.arange(14).view(2, 7)
    with record_routes(model) as eager:
        model(tokens)
    model.set_experts_implementation("megablocks")
    with record_routes(model) as recording:
        live = model(tokens).logits
    with replay_routes(model, recording.routes):
        replayed = model(tokens).logits
    return torch.equal(recording.routes.ids, eager.routes.ids) and torch.equal(replayed, live)


if __name__ == "__main__":
    install_stand_ins()
    import experts_helpers as suite

    report = {"replays": replays(suite)}
    for dtype in (torch.float32, torch.bfloat16):
        report[str(dtype)] = {
            "eager": compare_experts(suite, dtype, "eager"),
            "reference": compare_experts(suite, dtype, "megablocks_reference"),
            "models": compare_models(suite, dtype),
        }
    print(json.dumps(report, indent=1))
