"""Swapped routers: those of one checkpoint on the body of another, to see which of the two moves the selection.

{old, new} routers x {old, new} body give four sets of routes for the same tokens. What new routers change on the old
body comes from the routers; if old routers choose differently on the new body than on the old one,
that comes from the new body's hidden states.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn

from moe_rl.measure.weights import temporary
from moe_rl.routing import find_sites
from moe_rl.routing.others import ranked_experts


def gates_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy, on the CPU, of the routers' weights, biases and selection biases, by qualified name."""
    return {name: tensor.cpu().clone() for name, tensor in _gates(model)}


def with_gates(model: nn.Module, gates: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Context manager: let the model route with the routers `gates`, `gates_of` a model of the same architecture.

    Raises:
        ValueError: `gates` has names or shapes that are not this model's.
    """
    return temporary(lambda: _gates(model), gates)


def _gates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all routers but hash-routed ones, by qualified name."""
    for site in find_sites(model):
        if not site.fixed:
            for name, tensor in (*site.module.named_parameters(), *site.module.named_buffers()):
                yield f"{site.name}.{name}", tensor.detach()
            block = site.parents[0]  # some blocks hold the selection bias themselves, and pass it to the router
            for name, beside in (*block._parameters.items(), *block._buffers.items()):
                if beside is None or beside.ndim != 1 or "bias" not in name:
                    continue
                if len(beside) == ranked_experts(site.module, site.name):  # JetMoE's is one of the experts' output
                    yield f"{site.name.rpartition('.')[0]}.{name}", beside.detach()
