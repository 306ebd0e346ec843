"""Weights kept aside, and a model that holds them for a moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KEPT_FP32 = "moe_rl_kept_fp32"
"""Attribute of modules that compute in fp32 in a model of lower precision (`distributed.router_fp32`)."""


def kept_fp32(model: nn.Module) -> set[int]:
    """Ids of the parameters and buffers that stay in fp32 when the model is cast."""
    kept = [module for module in model.modules() if getattr(module, KEPT_FP32, False)]
    return {id(tensor) for module in kept for tensor in (*module.parameters(), *module.buffers())}


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers on the CPU (of a sharded model: this rank's shard)."""
    return {name: local.cpu().clone() for name, local in _locals(model)}


@contextmanager
def temporary_weights(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """`model` with other weights inside, and bit for bit its own again after. Not inside a forward or a backward."""
    own = {name for name, _ in _locals(model)}
    if own != weights.keys():
        raise ValueError(f"weights of another model: {sorted(own ^ weights.keys())[:3]} are not in both")
    with temporary(lambda: _locals(model), weights):
        yield


@contextmanager
def temporary(tensors: Callable[[], Iterable[tuple[str, Tensor]]], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, named `tensors`, which are looked up anew each time, hold other values; after, bit for bit their own."""
    kept = {name: tensor.clone() for name, tensor in tensors()}
    try:
        _put(tensors(), values)
        yield
    finally:
        _put(tensors(), kept)


def _locals(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            yield name, getattr(tensor.detach(), "_local_tensor", tensor.detach())


@torch.no_grad()
def _put(tensors: Iterable[tuple[str, Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors:
        tensor.copy_(values[name])
