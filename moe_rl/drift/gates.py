"""Routers of one checkpoint on the body of another: which of the two moves the selection?

{old, new} routers x {old, new} body: four sets of routes for the same tokens. What new routers change on the old body
is the routers' own doing; what old routers choose otherwise on the new body came to them in the hidden states.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from moe_rl.measure.weights import temporary
from moe_rl.routing import find_sites


def gates_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy, on the CPU, of all that the routers hold: weights, biases, selection biases; by qualified name."""
    return {name: tensor.cpu().clone() for name, tensor in _gates(model)}


@contextmanager
def with_gates(model: nn.Module, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model routes with other routers (`gates_of` a model of the same architecture).

    Raises:
        ValueError: names or shapes that are not this model's.
    """
    own = dict(_gates(model))
    if own.keys() != gates.keys() or any(own[name].shape != gates[name].shape for name in own):
        differ = sorted(own.keys() ^ gates.keys()) or ["other shapes"]
        raise ValueError(f"these routers are of another architecture: {differ[0]}")
    with temporary(lambda: _gates(model), gates):
        yield


def _gates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for site in find_sites(model):
        if not site.fixed:
            for name, tensor in (*site.module.named_parameters(), *site.module.named_buffers()):
                yield f"{site.name}.{name}", tensor.detach()
