"""Compact storage of expert ids, and the comparison of two rows of ids."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer, Shaped, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.traced import no_type_check

LIVE = -1  # "no route: the router decides for itself"; in packed form the largest value of the dtype
_CPU_ROWS = 1 << 18  # rows that are compared at a time, so that temporaries stay in the CPU's cache
_DEVICE_ROWS = 1 << 24
_IDS = 1 << 20  # ids that are unpacked at a time, so that the int64 temporaries stay small


def packed_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest unsigned dtype that holds ids `0..num_experts-1` and, as its largest value, the sentinel."""
    if num_experts <= 255:
        return torch.uint8
    if num_experts <= 65535:
        return torch.uint16
    raise RoutingError(f"num_experts is {num_experts}; at most 65535 are supported")


def pack_ids(ids: Integer[Tensor, "*rows"], num_experts: int) -> UInt[Tensor, "*rows"]:
    """Return valid ids (-1 = live) in their compact dtype: a cast, in which -1 wraps to the largest value."""
    dtype = packed_dtype(num_experts)
    return ids.to(torch.int16).view(dtype) if dtype == torch.uint16 else ids.to(dtype)


def chunks(ids: Shaped[Tensor, "*rows"]) -> list[slice]:
    """Return slices of the first axis, each of about a million ids."""
    step = max(1, _IDS // max(1, ids.shape[1:].numel()))
    return [slice(start, start + step) for start in range(0, len(ids), step)]


def unpack_ids(packed: UInt[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Return int64 ids, with -1 for the sentinel: the inverse of `pack_ids`."""
    ids = words(packed).to(torch.int64)
    if packed.dtype == torch.uint16:
        ids.bitwise_and_(0xFFFF)
    return ids.masked_fill_(ids == torch.iinfo(packed.dtype).max, LIVE)


def repacked(packed: UInt[Tensor, "*rows"], num_experts: int) -> UInt[Tensor, "*rows"]:
    """Return packed ids in the dtype for `num_experts` experts; the sentinel is another value in each dtype."""
    same = packed.dtype == packed_dtype(num_experts)
    return packed if same else pack_ids(unpack_ids(packed), num_experts)


def words(packed: UInt[Tensor, "*rows"]) -> Integer[Tensor, "*rows"]:
    """Return a view of packed ids in a dtype that every torch kernel knows. Few know uint16, least of all indexed
    writes."""
    return packed.view(torch.int16) if packed.dtype == torch.uint16 else packed


def is_live(packed: UInt[Tensor, "*rows"]) -> Bool[Tensor, "*rows"]:
    """Return a bool tensor, True where packed ids are the sentinel."""
    return words(packed) == (255 if packed.dtype == torch.uint8 else -1)


# -- token ids, and which of them an attention mask hides --------------------------------------------------------------


@no_type_check
def hide(tokens: Tensor, attended: Tensor) -> Tensor:
    """Return `[B,T]` token ids, with -2 - id for those that the mask hides: one tensor, moved and cut as one."""
    return torch.where(attended, tokens, -2 - tokens)


@no_type_check
def shown(tokens: Tensor) -> Tensor:
    """Return `[B,T]` token ids as they are, hidden or not; -1 = unknown. The inverse of `hide`."""
    return torch.where(tokens < -1, -2 - tokens, tokens)


# -- comparing rows as sets --------------------------------------------------------------------------------------------


def compact(ids: Tensor) -> UInt[Tensor, "*rows K"]:
    """Pack plain ids (-1 = no route) in the smallest possible dtype, rows with a -1 as all sentinel; one sync."""
    check_integers(ids)
    if ids.numel() == 0:
        return ids.to(torch.uint8)
    # torch has no max on the CPU for unsigned dtypes of more than a byte.
    wide = ids if ids.dtype.is_signed or ids.dtype == torch.uint8 else ids.to(torch.int64)
    low, high = (int(x) for x in torch.aminmax(wide))
    if low < LIVE:
        raise RoutingError(f"expert ids hold {low}; below zero only -1 has a meaning (no route)")
    top = None if ids.dtype.is_signed else torch.iinfo(ids.dtype).max
    if high == top and ids.shape[-1] > 1 and bool((wide == top).all(-1).any()):
        raise RoutingError(f"a row of ids is {top} in every slot, the sentinel of packed {ids.dtype} ids: pass `.ids`")
    if low == LIVE:
        wide = torch.where((wide == LIVE).any(-1, keepdim=True), LIVE, wide)
    return pack_ids(wide, high + 1)


def as_tensor(values: Any, name: str) -> Tensor:
    """Return tensors as they are, arrays and lists as CPU tensors. Raises RoutingError for anything but numbers."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):  # torch takes neither reversed arrays nor another machine's byte order
        values = values.astype(values.dtype.newbyteorder("="), order="C")
    try:
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(values).__name__
        raise RoutingError(f"{name}: expected a tensor or an array of numbers, got {got} ({error})") from error


def check_integers(ids: Tensor) -> None:
    """Raise RoutingError for ids of a dtype that is not integer: rounded values would count as ids."""
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise RoutingError(f"expected integer expert ids [...,L,K], got {ids.dtype}: router logits or gate weights?")


def token_mask(mask: Shaped[Tensor, "..."], like: Shaped[Tensor, "... L K"]) -> Bool[Tensor, "..."]:
    """Return the mask as bool, on the device of the ids `like`. The mask is bool, or 0 and 1 as tokenizers write it.

    Raises RoutingError: no tensor, another shape than that of the tokens, or other values.
    """
    check_tensor(mask)
    if mask.shape != like.shape[:-2]:
        raise RoutingError(f"mask must have the shape {list(like.shape[:-2])} of tokens, got {list(mask.shape)}")
    return as_mask(mask).to(like.device)


def as_mask(mask: Any, name: str = "mask") -> Bool[Tensor, "..."]:
    """Return the mask as bool. Raises RoutingError for no tensor, and for other values than 0 and 1, as labels have."""
    check_tensor(mask, name)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise RoutingError(f"{name}: expected only 0 and 1 (or bool), got other values; it says which tokens count")
    return mask.bool()


def check_tensor(mask: Any, name: str = "mask") -> None:
    """Raise RoutingError for lists and arrays, which have no device to compare on."""
    if not isinstance(mask, Tensor):
        raise RoutingError(
            f"{name} must be a tensor, bool or of 0 and 1, got {type(mask).__name__}: torch.as_tensor({name})"
        )


def rows_at_once(ids: Tensor) -> int:
    """Return how many rows `differing_rows` is best given at a time, so that its temporaries stay small."""
    if ids.device.type != "cpu":
        return _DEVICE_ROWS
    return _CPU_ROWS // 4 if ids.dtype.is_signed else _CPU_ROWS  # signed ids are packed on the way


def differing_rows(
    old: Integer[Tensor, "N K"], new: Integer[Tensor, "N K"]
) -> tuple[Int[Tensor, " D"], UInt[Tensor, " D"], Bool[Tensor, " N"] | None]:
    """Return indices of rows whose sets differ, K - |old ∩ new| of each, and which rows are routed on both sides.

    A row without a route on either side does not count as differing. The last is `[N]` bool, or None for all rows. Rows
    are first compared as machine words, 16 bytes read and one written for K = 8 of up to 255 experts. Only the rows
    that differ, because of other sets or only of another order, are then compared slot by slot. Rows in ascending
    order, and others where the order stayed, therefore cost little more than reading them.
    """
    a, b = (compact(x) if x.dtype.is_signed else x for x in (old, new))
    if a.dtype != b.dtype:  # their sentinels differ
        a, b = (repacked(x, 65535) for x in (a, b))
    return (_differing_numpy if a.device.type == "cpu" else _differing_torch)(a, b)


def _differing_numpy(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    old_rows, new_rows = old.contiguous().numpy(), new.contiguous().numpy()
    index = np.flatnonzero(unequal_rows(old_rows, new_rows))
    hit = shared_slots(*(planes_of(rows.take(index, 0)) for rows in (old_rows, new_rows)))
    changed = len(hit) - np.add.reduce(hit.view(np.uint8), axis=0, dtype=np.uint8)
    a, b = (_row_words(rows)[0] for rows in (old_rows, new_rows))
    live, routed = np.iinfo(a.dtype).max, None  # a row without a route is the sentinel in every slot
    # A row without a route on both sides is equal, one without it in `new` alone is unequal: read no more of `new`.
    if (len(a) and a.max() == live) or (b.take(index) == live).any():
        routed = (a != live) & (b != live)
        changed *= routed.take(index)
    if not changed.all():  # some are the same sets in another order
        kept = np.flatnonzero(changed != 0)
        index, changed = index.take(kept), changed.take(kept)
    found = torch.from_numpy(index), torch.from_numpy(changed)
    return *found, None if routed is None else torch.from_numpy(routed)


def _row_words(rows: np.ndarray) -> list[np.ndarray]:
    """Return rows of ids as columns of the largest words that divide a row."""
    size = math.gcd(rows.shape[1] * rows.itemsize, 8)
    return list(rows.view(f"u{size}").T)


def unequal_rows(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return `[N]` bool: whether the bytes of two rows differ."""
    (a, b), *rest = zip(_row_words(old), _row_words(new), strict=True)
    differ = a != b
    for a, b in rest:
        differ |= a != b
    return differ


def planes_of(rows: np.ndarray) -> np.ndarray:
    """Return the planes `[K,N]` of the rows, each one slot of many rows, on which comparisons vectorise. numpy
    transposes bytes five times faster than torch does on the CPU, which is much of the work."""
    return np.ascontiguousarray(rows.T)


def shared_slots(planes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return `[K,N]` bool: which slots hold an expert that the other row holds too, by K·K comparisons."""
    hit = planes == others[0]
    for plane in others[1:]:
        hit |= planes == plane
    return hit


def _differing_torch(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    routed = ~is_live(old[:, 0]) & ~is_live(new[:, 0])
    old, new = words(old), words(new)
    index = (old != new).any(-1).nonzero()[:, 0]
    a, b = old[index], new[index]
    hit = a == b[:, :1]
    for slot in range(1, b.shape[1]):
        hit |= a == b[:, slot, None]
    changed = ((b.shape[1] - hit.sum(-1)) * routed[index]).to(torch.uint8)
    kept = changed > 0
    return index[kept], changed[kept], routed
