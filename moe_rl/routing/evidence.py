"""Test whether forced experts show, in any known form, in what a router returns and its experts are called with."""

from typing import Any

import torch
from torch import Tensor


def kept_slots(forced: Tensor, output: Any, arrived: Any, num_experts: int) -> Tensor | None:
    """Return which slots of `forced` `[N,K]` show unchanged; None if they do not. Either all do, or all but those of
    one id (a skip expert that is remapped). output: what the router returned; arrived: arguments of the modules beside
    the router, which decide if they hold ids."""
    received = _ids_like(forced, arrived) or _ids_like(forced, output)
    if received:
        kept = [_unchanged(ids, forced) for ids in received]
        return None if any(k is None for k in kept) else torch.stack([k for k in kept if k is not None]).all(0)
    whole = torch.ones_like(forced, dtype=torch.bool)
    outputs = tensors_of(output)
    for table in outputs:  # Llama 4: scores of all experts, zero where not selected
        if table.is_floating_point() and table.numel() == forced.shape[0] * num_experts:
            used = table.reshape(forced.shape[0], -1) != 0
            if torch.equal(used, torch.zeros_like(used).scatter(-1, forced, True)):
                return whole
    for order in outputs:  # JetMoE: slots sorted by expert
        if not order.is_floating_point() and order.numel() == forced.numel():
            slots = order.reshape(-1).sort().values
            permutes = torch.equal(slots, torch.arange(len(slots), device=slots.device))
            if permutes and bool((forced.reshape(-1)[order.reshape(-1)].diff() >= 0).all()):
                return whole
    return None


def _ids_like(forced: Tensor, values: Any) -> list[Tensor]:
    """Return the integer tensors `[..,K]` in `values` that have one row for each token, in the shape of `forced`."""
    tensors = [t for t in tensors_of(values) if not t.is_floating_point() and t.dtype != torch.bool]
    return [
        t.reshape(forced.shape)
        for t in tensors
        if t.ndim > 1 and t.shape[-1] == forced.shape[-1] and t.numel() == forced.numel()
    ]


def _unchanged(ids: Tensor, forced: Tensor) -> Tensor | None:
    """Return which slots of `ids` equal `forced`, if all do, or all but every slot of one forced id; else None."""
    same = ids == forced
    if bool(same.all()):
        return same
    lost = forced[~same].unique()
    return same if len(lost) == 1 and not bool((forced[same] == lost).any()) else None


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, tuple | list) else []
