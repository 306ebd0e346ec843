"""Experts implementation `sorted_mm` for small models on a CPU, where moving rows costs more than the products.

    y[t] = sum_k w[t,k] * W_down[e] gate(W_gate_up[e] x[t]),   e = top_k_index[t,k]

The T*K slots are sorted by expert, each expert multiplies its run of rows, and one fused gather adds the weighted rows
of each token. Compared with transformers' `grouped_mm`, rows are moved by `index_select` and `embedding_bag` instead
of general indexing, which is several times slower on a CPU, and the backward pass is written out: the gradient of the
routing weights comes from the narrow rows inside the experts, both halves of the gate write into one buffer, and rows
are gathered again instead of kept. `benchmarks/experts.py` measures it.
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations import moe

from moe_rl.routing.errors import RoutingError, UnsupportedExpertsError


class Slots(NamedTuple):
    """The S = T*K slots (slot = token * K + k), and their order when sorted by expert.

    Attributes:
        slot: `[S]`, slot of each sorted row.
        token: `[S]`, token of each sorted row.
        row: `[S]`, sorted row of each slot.
        bags: `[T]`, first slot of each token.
        sizes: how many rows each of the E experts has.
        offsets: `[E]`, where the rows of each expert end, on the device.
    """

    slot: Tensor
    token: Tensor
    row: Tensor
    bags: Tensor
    sizes: list[int]
    offsets: Tensor

    def sums(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return `[T,d]` from rows `[S,d]`: the sum over each token's slots of weight (`[S]`, by slot) times row."""
        return torch.embedding_bag(rows, self.row, self.bags, False, 0, False, weights)[0]


def sort_slots(top_k_index: Int[Tensor, "T K"], num_experts: int) -> Slots:
    """Sort the slots of `top_k_index` by expert. Raises RoutingError for an index outside 0..num_experts-1."""
    (T, K), device = top_k_index.shape, top_k_index.device
    ids, slot = top_k_index.reshape(-1).sort()
    experts = torch.arange(num_experts + 1, device=device, dtype=ids.dtype)
    bounds = torch.searchsorted(ids, experts, out_int32=True)
    sizes = [end - start for start, end in pairwise(bounds.tolist())]
    if lost := T * K - sum(sizes):
        raise RoutingError(
            f"{lost} of {T * K} expert indices lie outside 0..{num_experts - 1}. Were these routes "
            "recorded from a model with another number of experts?"
        )
    row = torch.empty(T * K, dtype=torch.int32, device=device)
    row.scatter_(0, slot, torch.arange(T * K, dtype=torch.int32, device=device))
    bags = torch.arange(0, T * K, K, dtype=torch.int32, device=device)
    return Slots(slot, slot // K, row, bags, sizes, bounds[1:])


def sorted_mm(
    self: Any,
    hidden_states: Float[Tensor, "T d"],
    top_k_index: Int[Tensor, "T K"],
    top_k_weights: Float[Tensor, "T K"],
) -> Float[Tensor, "T d"]:
    """Compute the experts layer `self`, on any device and in any float dtype; the module docstring has the equation.

    Computed in the dtype of the expert weights, or of an enclosing `torch.autocast`; returned in that of
    `hidden_states`. Differentiable once in the hidden states, the routing weights and the expert weights. One device
    synchronisation per call.

    Raises:
        UnsupportedExpertsError: experts with another layout (`check_experts`).
        RoutingError: an expert index outside 0..E-1.
    """
    check_experts(self)
    if top_k_index.numel() == 0:
        return torch.zeros_like(hidden_states)
    gate_up, down = self.gate_up_proj, self.down_proj  # read once: adapters compute them
    dtype, transposed = compute_dtype(gate_up, hidden_states.device), getattr(self, "is_transposed", False)
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    slots = sort_slots(top_k_index, gate_up.shape[0])
    weights = top_k_weights.reshape(-1).to(torch.promote_types(dtype, top_k_weights.dtype))
    autocast = torch.is_autocast_enabled(device := hidden_states.device.type)  # entering a context costs time
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        rows = _run(_Up, hidden_states.to(dtype), gate_up, transposed, slots)
        rows = _run(_SwiGLU, rows) if _is_swiglu(self) else self._apply_gate(rows)
        out = _run(_Down, rows, down, weights, transposed, slots)
    return out.to(hidden_states.dtype)


def _is_swiglu(experts: Any) -> bool:
    """Return whether the gate is silu(first half) * second half."""
    plain = getattr(type(experts), "_apply_gate", None) is getattr(moe, "_default_apply_gate", type)
    return plain and isinstance(experts.act_fn, nn.SiLU)


def _run(node: Any, *inputs: Any) -> Tensor:
    """Apply the autograd function `node`; if no gradient is wanted, call its forward alone, which is faster."""
    return node.apply(*inputs) if torch.is_grad_enabled() else node.forward(_Untaped(), *inputs)


class _Untaped:
    """Stand-in for the context of an autograd function that is never asked for gradients."""

    def save_for_backward(self, *_: Tensor) -> None:
        pass


# -- products by expert -----------------------------------------------------------------------------------------------


def _kernel(*tensors: Tensor) -> bool:
    """Return whether torch's grouped product takes these: no float64, and rows of multiples of 16 bytes."""
    return hasattr(F, "grouped_mm") and all(
        t.dtype != torch.float64 and t.data_ptr() % 16 == 0 and all(n * t.itemsize % 16 == 0 for n in t.shape[1:])
        for t in tensors
    )


def _products(x: Tensor, w: Tensor, slots: Slots) -> Tensor:
    """Return `[S,out]`: sorted rows `[S,in]`, each times the matrix of its expert in `[E,in,out]`."""
    if _kernel(x, w):
        return F.grouped_mm(x, w, offs=slots.offsets)
    out = x.new_empty(x.shape[0], w.shape[2])
    for rows, matrix, product in zip(x.split(slots.sizes), w.unbind(0), out.split(slots.sizes), strict=True):
        torch.mm(rows, matrix, out=product)
    return out


def _outer_sums(x: Tensor, y: Tensor, slots: Slots) -> Tensor:
    """Return `[E,in,out]`: sums of x^T y over the rows `[S,in]`, `[S,out]` of each expert; zeros if it has none."""
    if _kernel(x, y):
        return F.grouped_mm(x.T, y, offs=slots.offsets)
    out = x.new_empty(len(slots.sizes), x.shape[1], y.shape[1])
    for left, right, product in zip(x.split(slots.sizes), y.split(slots.sizes), out.unbind(0), strict=True):
        torch.mm(left.T, right, out=product)
    return out


# -- the three autograd functions --------------------------------------------------------------------------------------


class _Up(torch.autograd.Function):
    """Autograd function: rows of the tokens, sorted, times their experts' matrices: `[T,in] -> [S,out]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, transposed: bool, slots: Slots) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.transposed, ctx.slots = transposed, slots
        return _products(x.index_select(0, slots.token), w if transposed else w.mT, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, w), slots = ctx.saved_tensors, ctx.slots
        dx = dw = None
        if ctx.needs_input_grad[0]:
            rows = _products(grad, w.mT if ctx.transposed else w, slots)
            dx = slots.sums(rows, rows.new_ones(len(rows)))
        if ctx.needs_input_grad[1]:
            rows = x.index_select(0, slots.token)
            dw = _outer_sums(rows, grad, slots) if ctx.transposed else _outer_sums(grad, rows, slots)
        return dx, dw, None, None


class _SwiGLU(torch.autograd.Function):
    """Autograd function: silu(first half) * second half of each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        out = torch.empty_like(rows)
        (gate, up), (d_gate, d_up) = rows.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        torch.mul(F.silu(gate), grad, out=d_up)
        return out


class _Down(torch.autograd.Function):
    """Autograd function: sorted rows times their experts' matrices, weighted and summed by token. `[S,in] ->
    [T,out]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, weights: Tensor, transposed: bool, slots: Slots) -> Tensor:
        ctx.save_for_backward(x, w, weights)
        ctx.transposed, ctx.slots = transposed, slots
        return slots.sums(_products(x, w if transposed else w.mT, slots).to(weights.dtype), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, w, weights), slots = ctx.saved_tensors, ctx.slots
        need_x, need_w, need_weights = ctx.needs_input_grad[:3]
        scale = weights.index_select(0, slots.slot).to(x.dtype)[:, None]
        grad = grad.to(x.dtype).index_select(0, slots.token)
        dx = dw = d_weights = None
        if need_w:
            scaled = x * scale
            dw = _outer_sums(scaled, grad, slots) if ctx.transposed else _outer_sums(grad, scaled, slots)
        if need_x or need_weights:
            dx = _products(grad, w.mT if ctx.transposed else w, slots)
        if need_weights:  # (W x).g = x.(W^T g): summed over the narrower side
            d_weights = (dx * x).sum(1, dtype=weights.dtype).index_select(0, slots.row)
        return dx.mul_(scale) if need_x and dx is not None else None, dw, d_weights, None, None


# -- which experts are supported ---------------------------------------------------------------------------------------


def check_experts(experts: Any) -> None:
    """Raise UnsupportedExpertsError for experts that `sorted_mm` and the MegaBlocks pipeline would compute wrongly.

    Covered: gated experts without bias, gate and up projections concatenated in `gate_up_proj`, either
    orientation (`is_transposed`), all experts present on this device, ordinary floating-point weights.

    Raises:
        UnsupportedExpertsError: naming the class and every property that is not covered.
    """
    # getattr with transformers' own defaults: older versions of transformers lack the newer attributes.
    refused = []
    if getattr(experts, "has_bias", False):
        refused.append("its projections have a bias")
    if not getattr(experts, "has_gate", True):
        refused.append("it is not gated (one up_proj instead of gate_up_proj)")
    if not getattr(experts, "is_concatenated", True):
        refused.append("gate and up projections are interleaved, not concatenated")
    if getattr(experts, "has_post_expert_norm", False):
        refused.append("it normalises each expert's output (has_post_expert_norm)")
    if getattr(experts, "_is_expert_parallel", False):
        refused.append("its experts are spread over devices (expert parallelism)")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name, None)
        if not isinstance(weight, Tensor) or weight.ndim != 3:
            refused.append(f"{name} is not one tensor [experts, ., .]")
        elif hasattr(weight, "placements"):
            refused.append(f"{name} is sharded (a DTensor)")
        elif weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            refused.append(f"{name} is stored as {dtype_name(weight.dtype)} (quantised?)")
    if not hasattr(experts, "_apply_gate"):
        refused.append("it has no _apply_gate")
    if refused:
        raise UnsupportedExpertsError(
            f"{type(experts).__name__} cannot run as megablocks or sorted_mm: {'; '.join(refused)}. "
            'Choose another implementation: model.set_experts_implementation("grouped_mm") or "eager".'
        )


def compute_dtype(weight: Tensor, device: torch.device) -> torch.dtype:
    """Return the dtype in which an experts layer computes: that of its weights, or of an enclosing `torch.autocast`."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return weight.dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
