"""Copies of a model's weights, and context managers under which a model holds other weights."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.measure.logprobs import hf_model
from moe_rl.routing import canonical_site

KEPT_FP32 = "moe_rl_kept_fp32"
"""Attribute of modules that compute in fp32 in a model of lower precision (`distributed.router_fp32`, scalar heads)."""


def dtypes_as_loaded(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield each floating parameter and buffer with the dtype that `from_pretrained(dtype=...)` gives it.

    This is `dtype`, but fp32 for tensors that the architecture keeps in fp32 (rotary frequencies, selection biases of
    DeepSeek-V3, routers of Ernie 4.5) and for modules that the run keeps in fp32 (`KEPT_FP32`)."""
    inner: Any = hf_model(model)
    with torch.device("meta"):  # a model made by the class itself shows the dtypes
        made = type(inner)._from_config(copy.deepcopy(inner.config), dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in (*made.named_parameters(), *made.named_buffers())}
    names = [*(inner._keep_in_fp32_modules_strict or ())]
    if dtype == torch.float16:
        names += inner._keep_in_fp32_modules or ()
    patterns = [re.compile(name.replace("*", ".*")) for name in names]  # parts of names, as transformers has them
    kept = {id(t) for m in model.modules() if getattr(m, KEPT_FP32, False) for t in (*m.parameters(), *m.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = dtypes.get(canonical_site(name), dtype if isinstance(tensor, nn.Parameter) else tensor.dtype)
        if id(tensor) in kept or any(pattern.search(name) for pattern in patterns):
            wanted = torch.float32
        if tensor.is_floating_point() and wanted.is_floating_point:
            yield tensor, wanted


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers on the CPU (of a sharded model: this rank's shard)."""
    return {name: local.cpu().clone() for name, local in _locals(model)}


def temporary_weights(model: nn.Module, weights: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Context manager: `model` holds other weights, afterwards its own bit for bit. Not inside forward or backward."""
    return temporary(lambda: _locals(model), weights)


@contextmanager
def temporary(tensors: Callable[[], Iterable[tuple[str, Tensor]]], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: the named `tensors` hold other values; afterwards their own, bit for bit.

    `tensors` is called anew each time they are written. Raises ValueError if names or shapes differ."""
    kept = {name: tensor.clone() for name, tensor in tensors()}
    own, other = ({name: tensor.shape for name, tensor in held.items()} for held in (kept, values))
    if differ := sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name)):
        raise ValueError(f"weights of another model, or of another architecture, by name or shape: {differ[:3]}")
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
