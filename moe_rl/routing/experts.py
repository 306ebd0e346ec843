"""Experts implementations for transformers: MegaBlocks, the same pipeline in plain torch, and one for CPUs.

    register_experts()
    model.set_experts_implementation("megablocks")            # MegaBlocks' kernels: bf16 on a CUDA device
    model.set_experts_implementation("megablocks_reference")  # plain torch: any device, any float dtype
    model.set_experts_implementation("sorted_mm")             # plain torch, the fastest for small models on a CPU

The first two, in this file, are one *dropless* pipeline (MegaBlocks, arXiv 2211.15841): the T*K routed slots are sorted
by expert, every expert multiplies its own run of rows whatever its length, and the results return to their tokens. No
expert has a capacity, so no token is dropped and no expert's rows are padded. The third is in
`moe_rl.routing.experts_sorted`.

An experts implementation receives the indices and weights that the router has already chosen. Recording and
replay happen in the router, hence they work through these implementations as through any other.

MegaBlocks and grouped_gemm are optional and are imported when the `megablocks` implementation first runs;
`docs/megablocks.md` says how they are installed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_rl.routing.errors import RoutingError, UnsupportedExpertsError
from moe_rl.routing.experts_sorted import check_experts, compute_dtype, dtype_name, sorted_mm

_INSTALL = """
  pip install triton
  pip install --no-deps --no-build-isolation stanford-stk==0.7.1 grouped_gemm==0.3.0 megablocks==0.10.0
Their version pins conflict with a recent torch, hence --no-deps; CUDA 13 needs one edit: docs/megablocks.md.
On any device, experts_implementation="megablocks_reference" runs the same pipeline in plain torch."""


@dataclass(frozen=True)
class Backend:
    """The six operations of a dropless experts layer, with the signatures of `megablocks.ops` and `grouped_gemm`.

    S = T*K slots, numbered row-major: slot = token * K + k. "Sorted row" r belongs to slot `indices[r]`.

    - `sort(ids [S], end_bit) -> (bin_ids [S], indices [S])`: experts in ascending order, and their slots;
      stable; only the lowest `end_bit` bits are compared.
    - `histogram(ids [S], E) -> counts [E]`
    - `cumsum(counts [E], dim) -> bins [E]`: inclusive.
    - `gather(x [T, d], indices, bin_ids, bins, K) -> [S, d]`: token rows, sorted by expert.
    - `gmm(a [S, d], b [E, n, d] if trans_b else [E, d, n], batch_sizes [E], trans_b) -> [S, n]`: rows of
      expert e times the matrix of expert e. `batch_sizes` is int64 on the CPU.
    - `scatter(x [S, d], indices, bin_ids, weights [S], bins, K) -> [T, d]`: weighted rows back to their
      tokens, summed over k. The products are formed in float32 (or wider); the gradient reaches `weights`.
    """

    sort: Callable
    histogram: Callable
    cumsum: Callable
    gather: Callable
    gmm: Callable
    scatter: Callable


def dropless_experts(
    experts: Any,
    hidden_states: Float[Tensor, "T d"],
    top_k_index: Int[Tensor, "T K"],
    top_k_weights: Float[Tensor, "T K"],
    backend: Backend,
) -> Float[Tensor, "T d"]:
    """Compute a dropless experts layer: sort, count, permute, gate_up, gate, down, unpermute.

        y[t] = sum_k w[t,k] * W_down[e] gate(W_gate_up[e] x[t]),   e = top_k_index[t,k]

    Computed in the dtype of the expert weights, or of an enclosing `torch.autocast`; returned in that of
    `hidden_states`. Differentiable in the hidden states, the routing weights and the expert weights. An
    expert that no slot chose gets a gradient of zeros.

    Costs one device synchronisation per layer and call, since `gmm` wants the group sizes on the CPU.

    Raises:
        UnsupportedExpertsError: experts with another layout (`check_experts`).
        RoutingError: an expert index outside 0..E-1.
    """
    check_experts(experts)
    if top_k_index.numel() == 0:
        return torch.zeros_like(hidden_states)
    gate_up, down = experts.gate_up_proj, experts.down_proj  # read once: adapters compute them on access
    num_experts, top_k = gate_up.shape[0], top_k_index.shape[-1]
    dtype = compute_dtype(gate_up, hidden_states.device)
    trans_b = not getattr(experts, "is_transposed", False)

    ids = top_k_index.reshape(-1).to(torch.int32)
    bin_ids, indices = backend.sort(ids, max(1, (num_experts - 1).bit_length()))
    counts = backend.histogram(ids, num_experts)
    bins = backend.cumsum(counts, 0).reshape(-1)  # megablocks squeezes a single expert's count to a scalar
    batch_sizes = counts.to("cpu", torch.int64)
    _check_counted(experts, batch_sizes, top_k_index)

    # The casts are explicit because the kernels do not take part in autocast.
    with torch.autocast(hidden_states.device.type, enabled=False):
        rows = backend.gather(hidden_states.to(dtype).contiguous(), indices, bin_ids, bins, top_k)
        rows = backend.gmm(rows, gate_up.to(dtype).contiguous(), batch_sizes, trans_b)
        rows = experts._apply_gate(rows).contiguous()
        rows = backend.gmm(rows, down.to(dtype).contiguous(), batch_sizes, trans_b)
        out = backend.scatter(rows, indices, bin_ids, top_k_weights.reshape(-1).contiguous(), bins, top_k)
    return out.to(hidden_states.dtype)


def megablocks_reference(
    self: Any,
    hidden_states: Float[Tensor, "T d"],
    top_k_index: Int[Tensor, "T K"],
    top_k_weights: Float[Tensor, "T K"],
) -> Float[Tensor, "T d"]:
    """Compute `dropless_experts` in plain torch: any device, float16 to float64, gradients by autograd.

    Rounds where the MegaBlocks kernels round, so that the two implementations can be compared in bf16.

    >>> import torch
    >>> from transformers import MixtralConfig
    >>> from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    >>> register_experts()
    ('megablocks', 'megablocks_reference', 'sorted_mm')
    >>> config = MixtralConfig(hidden_size=4, intermediate_size=8, num_local_experts=3)
    >>> config._experts_implementation = "megablocks_reference"
    >>> experts = MixtralExperts(config)
    >>> _ = [torch.nn.init.normal_(p) for p in experts.parameters()]
    >>> y = experts(torch.randn(5, 4), torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5))
    >>> y.shape
    torch.Size([5, 4])
    """
    return dropless_experts(self, hidden_states, top_k_index, top_k_weights, REFERENCE)


def megablocks(
    self: Any,
    hidden_states: Float[Tensor, "T d"],
    top_k_index: Int[Tensor, "T K"],
    top_k_weights: Float[Tensor, "T K"],
) -> Float[Tensor, "T d"]:
    """Compute `dropless_experts` with the kernels of MegaBlocks and grouped_gemm: bfloat16 on a CUDA device.

    Under Triton's interpreter (`TRITON_INTERPRET=1`) CPU tensors pass, for tests that supply stand-ins for
    the two compiled modules.

    Raises:
        UnsupportedExpertsError: another device or dtype, or more slots than the kernels can address.
        ImportError: MegaBlocks or one of its parts is missing; the message has the install steps.
    """
    check_experts(self)
    _check_kernels(self, hidden_states, top_k_index)
    return dropless_experts(self, hidden_states, top_k_index, top_k_weights, _megablocks_backend())


def check_megablocks(dtype: torch.dtype, device: str) -> None:
    """Raise UnsupportedExpertsError, before anything is loaded, if `megablocks` could not run, naming all it lacks.

    Args:
        dtype: the dtype that the experts will compute in.
        device: where the experts will run: `auto`, `cuda`, ...; `auto` is a CUDA device if there is one.

    Under Triton's interpreter (`TRITON_INTERPRET=1`) any device and dtype pass.

    Raises:
        UnsupportedExpertsError: no CUDA device, another one asked for, another dtype than bfloat16, a package or one of
            its compiled modules that is missing.
    """
    missing = []
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device not in ("auto", "cuda"):
            missing.append(f"a CUDA device (device is {device!r})")
        elif not torch.cuda.is_available():
            missing.append("a CUDA device (there is none here)")
        if dtype != torch.bfloat16:
            missing.append(f"bfloat16 (dtype is {dtype_name(dtype)})")
    try:
        _megablocks_backend()
    except ImportError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        missing.append(f"its packages ({cause}; docs/megablocks.md says how they are installed)")
    if missing:
        raise UnsupportedExpertsError(
            f"experts_implementation: megablocks needs {', '.join(missing)}. megablocks_reference runs the same "
            "pipeline in plain torch, on any device."
        )


def register_experts() -> tuple[str, ...]:
    """Register `megablocks`, `megablocks_reference` and `sorted_mm` with transformers, and return these names.

    From then on `from_pretrained(..., experts_implementation=NAME)` and
    `model.set_experts_implementation(NAME)` accept them. Registering twice changes nothing. Needs neither
    MegaBlocks nor a GPU: a missing part is reported when a layer first runs.

    `generate` on a GPU replaces `grouped_mm` by `batched_mm` while it decodes; it leaves these names alone,
    so sampling and training run the same experts code.
    """
    implementations = {"megablocks": megablocks, "megablocks_reference": megablocks_reference, "sorted_mm": sorted_mm}
    for name, function in implementations.items():
        ALL_EXPERTS_FUNCTIONS.register(name, function)
    return tuple(implementations)


def check_experts_name(name: str | None) -> None:
    """Raise UnsupportedExpertsError for an implementation that transformers does not know. None, its default, passes.

    Raises:
        UnsupportedExpertsError: naming the implementations that transformers knows.
    """
    known = {"eager", *register_experts(), *ALL_EXPERTS_FUNCTIONS.keys()}
    if name is not None and name not in known:
        raise UnsupportedExpertsError(
            f"experts_implementation: expected one of {', '.join(sorted(known))}, got {name!r}"
        )


def _check_kernels(experts: Any, hidden_states: Tensor, top_k_index: Tensor) -> None:
    """Raise UnsupportedExpertsError for what MegaBlocks' and grouped_gemm's kernels lack, beyond `check_experts`."""
    where, instead = type(experts).__name__, "Or choose experts_implementation='megablocks_reference'."
    device = hidden_states.device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedExpertsError(
            f"{where}: megablocks needs tensors on a CUDA device, these are on {str(device)!r}. "
            f"Move the model: model.to('cuda'). {instead}"
        )
    dtype = compute_dtype(experts.gate_up_proj, device)
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise UnsupportedExpertsError(
            f"{where}: megablocks multiplies in bfloat16 only, this layer computes in {dtype_name(dtype)}. "
            "Load the model with dtype=torch.bfloat16, or run it under torch.autocast('cuda', torch.bfloat16). "
            f"{instead}"
        )
    # The copy kernels form slot * hidden_size in 32 bits; past that they would read and write elsewhere.
    elements = top_k_index.numel() * hidden_states.shape[-1]
    if elements >= 2**31:
        raise UnsupportedExpertsError(
            f"{where}: {tuple(top_k_index.shape)} routed slots of {hidden_states.shape[-1]} features are "
            f"{elements:,} elements; megablocks' kernels address at most {2**31 - 1:,}. "
            f"Use smaller batches. {instead}"
        )


def _check_counted(experts: Any, batch_sizes: Tensor, top_k_index: Tensor) -> None:
    """Raise RoutingError if an index names no expert, and so is in no count. The counts are on the CPU anyway, so the
    check is free."""
    uncounted = top_k_index.numel() - int(batch_sizes.sum())
    if uncounted:
        raise RoutingError(
            f"{type(experts).__name__}: {uncounted} of {top_k_index.numel()} expert indices lie outside "
            f"0..{len(batch_sizes) - 1}. Were these routes recorded from a model with another number of experts?"
        )


def _megablocks_backend() -> Backend:
    """Return the operations of MegaBlocks and grouped_gemm. Raises ImportError, with the install steps, if one is
    missing."""
    try:
        from grouped_gemm.ops import gmm
        from megablocks import ops
    except ImportError as error:
        raise ImportError(
            "experts_implementation='megablocks' needs MegaBlocks and grouped_gemm with their compiled modules, "
            f"but: {error}. Install them with CUDA_HOME set, beside the torch you use:{_INSTALL}"
        ) from error
    return Backend(ops.sort, ops.histogram, ops.inclusive_cumsum, ops.gather, gmm, ops.scatter)


# -- the same operations in plain torch; `bin_ids` and `bins` are for kernels only -------------------------------------


def _sort(ids: Tensor, end_bit: int) -> tuple[Tensor, Tensor]:
    return torch.sort(ids, stable=True)


def _histogram(ids: Tensor, num_experts: int) -> Tensor:
    return (ids == torch.arange(num_experts, device=ids.device)[:, None]).sum(1, dtype=torch.int32)


def _gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    # Expand, then permute: in the backward pass every slot is written once and a token's K gradients
    # are summed in one reduction, as in the kernels, instead of being accumulated K times in bf16.
    return x.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, x.shape[-1])[indices]


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
    matrices = (b.mT if trans_b else b).unbind(0)
    return torch.cat([x @ w for x, w in zip(a.split(batch_sizes.tolist()), matrices, strict=True)])


def _scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor, bins: Tensor, top_k: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    slots = x[torch.argsort(indices)]
    weighted = (slots.to(wide) * weights.to(wide)[:, None]).to(x.dtype)
    return weighted.view(-1, top_k, x.shape[-1]).sum(1)


REFERENCE = Backend(_sort, _histogram, torch.cumsum, _gather, _gmm, _scatter)
