"""Routers of one checkpoint on the body of another: which of the two moves the selection?

{old, new} routers x {old, new} body: four sets of routes for the same tokens. What new routers change on the old body
is the routers' own doing; what old routers choose otherwise on the new body came to them in the hidden states.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn

from moe_rl.measure.weights import temporary
from moe_rl.routing import find_sites


def gates_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy, on the CPU, of all that the routers hold: weights, biases, selection biases; by qualified name."""
    return {name: tensor.cpu().clone() for name, tensor in _gates(model)}


def with_gates(model: nn.Module, gates: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, the model routes with other routers (`gates_of` a model of the same architecture).

    Raises:
        ValueError: names or shapes that are not this model's.
    """
    return temporary(lambda: _gates(model), gates)


def _gates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for site in find_sites(model):
        if not site.fixed:
            for name, tensor in (*site.module.named_parameters(), *site.module.named_buffers()):
                yield f"{site.name}.{name}", tensor.detach()
            block = site.parents[0]  # some hold the selection bias beside the router, and give it to its forward
            for name, beside in (*block._parameters.items(), *block._buffers.items()):
                if beside is not None and beside.ndim == 1 and "bias" in name:
                    yield f"{site.name.rpartition('.')[0]}.{name}", beside.detach()
