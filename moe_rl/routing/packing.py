"""Expert ids <-> their compact storage, the check that ids are what they claim to be, and how two rows compare."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError

LIVE = -1  # "no route: the router decides for itself"; in packed form the largest value of the dtype
_CHUNK = 1 << 20  # ids validated at a time, so that the int64 temporaries stay small
_CPU_ROWS = 32768  # rows at a time: at K = 8 the planes of both sides (512 KiB) stay in the L2 cache
_DEVICE_ROWS = 1 << 24


def packed_dtype(num_experts: int) -> torch.dtype:
    """Smallest unsigned dtype that holds ids `0..num_experts-1` and, as its largest value, the sentinel."""
    if num_experts <= 255:
        return torch.uint8
    if num_experts <= 65535:
        return torch.uint16
    raise RoutingError(f"num_experts is {num_experts}; at most 65535 are supported")


def pack_ids(ids: Int[Tensor, "*rows"], num_experts: int) -> UInt[Tensor, "*rows"]:
    """Valid ids (-1 = live) in their compact dtype: a cast, in which -1 wraps to the largest value."""
    dtype = packed_dtype(num_experts)
    return ids.to(torch.int16).view(dtype) if dtype == torch.uint16 else ids.to(dtype)


def unpack_ids(packed: UInt[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """int64 ids with -1 for the sentinel; the inverse of `pack_ids`."""
    ids = words(packed).to(torch.int64)
    if packed.dtype == torch.uint16:
        ids.bitwise_and_(0xFFFF)
    return ids.masked_fill_(ids == torch.iinfo(packed.dtype).max, LIVE)


def words(packed: UInt[Tensor, "*rows"]) -> Integer[Tensor, "*rows"]:
    """The same memory in a dtype that every torch kernel knows: few know uint16, least of all indexed writes."""
    return packed.view(torch.int16) if packed.dtype == torch.uint16 else packed


def is_live(packed: UInt[Tensor, "*rows"]) -> Bool[Tensor, "*rows"]:
    """True where packed ids are the sentinel."""
    return words(packed) == (255 if packed.dtype == torch.uint8 else -1)


def pack_checked(
    ids: Tensor, sites: Sequence[str], experts: Sequence[int], repeats: Collection[str] = ()
) -> UInt[Tensor, "B T L K"]:
    """Packed ids, rows with a -1 normalised to all -1; RoutingError with the site and value of what is wrong.

    ids: `[B,T,L,K]` by claim only, so it carries no annotation; experts: num_experts of each of the L sites; repeats:
        sites whose rows may name an expert twice.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RoutingError(f"ids must be integers, got {ids.dtype}: router logits or gate weights, not ids?")
    if ids.ndim != 4:
        raise RoutingError(f"ids must be [B,T,L,K] (sequence, token, site, slot), got {list(ids.shape)}")
    if ids.shape[2] != len(sites):
        raise RoutingError(f"ids {list(ids.shape)} have {ids.shape[2]} sites on axis 2, named: {len(sites)}")
    if ids.shape[3] < 1:
        raise RoutingError(f"ids {list(ids.shape)} have no slots")
    if len(set(sites)) != len(sites):
        twice = next(site for i, site in enumerate(sites) if site in sites[:i])
        raise RoutingError(f"site {twice} is named twice (names are compared without wrapper parts)")
    packed = torch.empty(ids.shape, dtype=packed_dtype(max(experts)), device=ids.device)
    for chunk in _chunks(ids):
        words(packed)[chunk] = words(
            _checked(ids[chunk].to(torch.int64), chunk.start, ids.dtype, sites, experts, repeats)
        )
    return packed


def check_packed(packed: Tensor, sites: Sequence[str], experts: Sequence[int], repeats: Collection[str] = ()) -> None:
    """RoutingError unless `packed` is what `pack_checked` makes for these sites."""
    expected = packed_dtype(max(experts))
    if packed.dtype != expected or packed.ndim != 4 or packed.shape[2] != len(sites) or packed.shape[3] < 1:
        raise RoutingError(
            f"packed ids are {packed.dtype} {list(packed.shape)}, expected {expected} [B,T,{len(sites)},K]"
        )
    for chunk in _chunks(packed):
        again = _checked(unpack_ids(packed[chunk]), chunk.start, torch.int64, sites, experts, repeats)
        if not torch.equal(words(again), words(packed[chunk])):
            raise RoutingError("a row of packed ids is live in some slots only")


def _chunks(ids: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, ids.shape[1:].numel()))
    return [slice(start, start + step) for start in range(0, len(ids), step)]


def _checked(
    wide: Tensor,
    start: int,
    dtype: torch.dtype,
    sites: Sequence[str],
    experts: Sequence[int],
    repeats: Collection[str],
) -> Tensor:
    bad = (wide < LIVE) | (wide >= torch.tensor(experts, device=wide.device)[:, None])
    if bad.any():
        b, t, site, k = bad.nonzero()[0].tolist()
        value, limit = int(wide[b, t, site, k]), experts[site]
        cause = "routes of another model, or physical instead of logical expert ids?"
        if value < LIVE:
            cause = "below zero only -1 has a meaning (live); an overflow of int8 or int16?"
        elif not dtype.is_signed and value == torch.iinfo(dtype).max:
            cause = f"{value} is the sentinel of packed {dtype} ids: pass `.ids`, or -1 in its place"
        raise RoutingError(
            f"site {sites[site]}: sequence {start + b}, token {t}, slot {k} names expert {value}, "
            f"expected 0..{limit - 1} or -1: {cause}"
        )
    wide = torch.where((wide == LIVE).any(-1, keepdim=True), LIVE, wide)
    ordered = wide.sort(-1).values
    once = torch.tensor([site not in repeats for site in sites], device=wide.device)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LIVE) & once[:, None]
    if twice.any():
        b, t, site, _ = twice.nonzero()[0].tolist()
        raise RoutingError(
            f"site {sites[site]}: sequence {start + b}, token {t} names an expert twice: "
            f"{wide[b, t, site].tolist()}; rows that are padding or were never captured must be -1"
        )
    return pack_ids(wide, max(experts))


def move_tokens(
    values: Integer[Tensor, "B T *rest"],
    source: Bool[Tensor, "B T_source"],
    target: Bool[Tensor, "B T_target"],
    fill: int,
) -> Integer[Tensor, "B T_target *rest"]:
    """The n-th True position of `source` to the n-th of `target`; `fill` elsewhere and where `values` end."""
    b, t = values.shape[:2]
    extra = values.new_full((b, source.shape[1] - t, *values.shape[2:]), fill)
    moved = values.new_full((b, target.shape[1], *values.shape[2:]), fill)
    moved[target] = torch.cat([values, extra], dim=1)[source]
    return moved


# -- comparing rows as sets --------------------------------------------------------------------------------------------


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
