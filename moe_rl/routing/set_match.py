"""How many experts two rows of ids share, as sets: the kernel under every change metric."""

import numpy as np
import torch
from jaxtyping import Bool, Shaped, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE, packed_dtype

_CPU_ROWS = 32768  # rows at a time: with K = 8 the planes of both sides (512 KiB) stay in the L2 cache
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
    packed = ids.to(packed_dtype(high + 1))
    if low == LIVE:
        live = (ids == LIVE).any(-1, keepdim=True)
        packed = torch.where(live, torch.iinfo(packed.dtype).max, packed.to(torch.int32)).to(packed.dtype)
    return packed


def shared_slots(
    old: UInt[Tensor, "*rows K"], new: UInt[Tensor, "*rows K"]
) -> tuple[UInt[Tensor, "*rows"], Bool[Tensor, "*rows"]]:
    """|old ∩ new| of each row as uint8, and whether both rows have a route (else the count means nothing).

    Ids are distinct within a row, so that a slot of `old` is shared if it equals any slot of `new`: K·K
    comparisons, done on planes (one slot of many rows) because those vectorise; about 16 bytes are read and
    2 written per row at K = 8.
    """
    if old.dtype != new.dtype:  # their sentinels differ
        old, new = (_widened(x) for x in (old, new))
    rows, k = old.shape[:-1], old.shape[-1]
    shared = torch.empty(rows.numel(), dtype=torch.uint8, device=old.device)
    both = torch.empty(rows.numel(), dtype=torch.bool, device=old.device)
    match, step = (_match_numpy, _CPU_ROWS) if old.device.type == "cpu" else (_match_torch, _DEVICE_ROWS)
    flat_old, flat_new = old.reshape(-1, k), new.reshape(-1, k)
    for start in range(0, len(shared), step):
        part = slice(start, start + step)
        match(flat_old[part], flat_new[part], shared[part], both[part])
    return shared.view(rows), both.view(rows)


def _match_numpy(old: Tensor, new: Tensor, shared: Tensor, both: Tensor) -> None:
    # numpy transposes bytes five times faster than torch does on the CPU, which is most of the work.
    a, b = (np.ascontiguousarray(x.numpy().T) for x in (old, new))
    hit = a == b[0]
    for plane in b[1:]:
        hit |= a == plane
    np.add.reduce(hit.view(np.uint8), axis=0, dtype=np.uint8, out=shared.numpy())
    live = np.iinfo(a.dtype).max
    np.logical_and(a[0] != live, b[0] != live, out=both.numpy())


def _match_torch(old: Tensor, new: Tensor, shared: Tensor, both: Tensor) -> None:
    live = torch.iinfo(old.dtype).max
    if old.dtype == torch.uint16:  # few torch kernels know uint16; equality is the same on the signed view
        old, new, live = old.view(torch.int16), new.view(torch.int16), -1
    hit = old == new[:, :1]
    for slot in range(1, new.shape[1]):
        hit |= old == new[:, slot, None]
    shared.copy_(hit.sum(-1))
    both.copy_((old[:, 0] != live) & (new[:, 0] != live))


def _widened(packed: Tensor) -> Shaped[Tensor, "*rows K"]:
    """uint8 -> uint16, sentinel included."""
    if packed.dtype == torch.uint16:
        return packed
    wide = packed.to(torch.int32)
    return wide.masked_fill_(wide == 255, 65535).to(torch.uint16)
