"""How many experts two rows of ids do not share, as sets: the kernel under every change metric."""

import numpy as np
import torch
from jaxtyping import Bool, Integer, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE, is_live, pack_ids, words

_CPU_ROWS = 32768  # rows at a time: at K = 8 the planes of both sides (512 KiB) stay in the L2 cache
_DEVICE_ROWS = 1 << 24


def compact(ids: Tensor) -> UInt[Tensor, "*rows K"]:
    """Plain ids (-1 = no route) packed as small as they allow, rows with a -1 all sentinel; one sync."""
    if ids.dtype == torch.bool or ids.is_floating_point():
        raise RoutingError(f"expected integer expert ids [...,L,K], got {ids.dtype}: router logits instead?")
    if ids.numel() == 0:
        return ids.to(torch.uint8)
    wide = ids.to(torch.int32) if ids.dtype == torch.uint16 else ids  # uint16 has no max on the CPU
    low, high = (int(x) for x in torch.aminmax(wide))
    if low < LIVE:
        raise RoutingError(f"expert ids hold {low}; below zero only -1 has a meaning (no route)")
    if low == LIVE:
        wide = torch.where((wide == LIVE).any(-1, keepdim=True), LIVE, wide)
    return pack_ids(wide, high + 1)


def changed_slots(
    old: Integer[Tensor, "*rows K"], new: Integer[Tensor, "*rows K"]
) -> tuple[UInt[Tensor, "*rows"], Bool[Tensor, "*rows"]]:
    """K - |old ∩ new| of each row as uint8, and whether both rows have a route; without, the count is 0.

    Ids are distinct within a row, so that a slot of `old` is shared if it equals any slot of `new`: K·K
    comparisons, done on planes (one slot of many rows) because those vectorise. Per row 2K ids are read and 2
    bytes written. Unsigned ids are taken as packed (`pack_ids`), signed ones are packed on the way.
    """
    rows, k = old.shape[:-1], old.shape[-1]
    changed = torch.empty(rows.numel(), dtype=torch.uint8, device=old.device)
    both = torch.empty(rows.numel(), dtype=torch.bool, device=old.device)
    match, step = (_match_numpy, _CPU_ROWS) if old.device.type == "cpu" else (_match_torch, _DEVICE_ROWS)
    flat_old, flat_new = old.reshape(-1, k), new.reshape(-1, k)
    for start in range(0, len(changed), step):
        part = slice(start, start + step)
        a, b = (compact(x[part]) if x.dtype.is_signed else x[part] for x in (flat_old, flat_new))
        if a.dtype != b.dtype:  # their sentinels differ
            a, b = _widened(a), _widened(b)
        match(a, b, changed[part], both[part])
    return changed.view(rows), both.view(rows)


def _match_numpy(old: Tensor, new: Tensor, changed: Tensor, both: Tensor) -> None:
    # numpy transposes bytes five times faster than torch does on the CPU, which is most of the work.
    a, b = (np.ascontiguousarray(x.numpy().T) for x in (old, new))
    hit = a == b[0]
    for plane in b[1:]:
        hit |= a == plane
    live = np.iinfo(a.dtype).max
    routed = np.logical_and(a[0] != live, b[0] != live, out=both.numpy())
    shared = np.add.reduce(hit.view(np.uint8), axis=0, dtype=np.uint8)
    np.multiply(len(b) - shared, routed, out=changed.numpy())


def _match_torch(old: Tensor, new: Tensor, changed: Tensor, both: Tensor) -> None:
    both.copy_(~is_live(old[:, 0]) & ~is_live(new[:, 0]))
    old, new = words(old), words(new)
    hit = old == new[:, :1]
    for slot in range(1, new.shape[1]):
        hit |= old == new[:, slot, None]
    changed.copy_((new.shape[1] - hit.sum(-1)) * both)


def _widened(packed: UInt[Tensor, "*rows K"]) -> UInt[Tensor, "*rows K"]:
    """uint8 -> uint16, sentinel included."""
    if packed.dtype == torch.uint16:
        return packed
    wide = packed.to(torch.int16)
    return wide.masked_fill_(is_live(packed), -1).view(torch.uint16)
