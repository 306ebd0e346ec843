"""Expert ids <-> their compact storage, and the check that ids are what they claim to be."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int, Integer, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError

LIVE = -1  # "no route: the router decides for itself"; in packed form the largest value of the dtype
_CHUNK = 1 << 20  # ids validated at a time, so that the int64 temporaries stay small


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


def pack_checked(ids: Tensor, sites: Sequence[str], experts: Sequence[int]) -> UInt[Tensor, "B T L K"]:
    """Packed ids, rows with a -1 normalised to all -1; RoutingError with the site and value of what is wrong.

    ids: `[B,T,L,K]` by claim only, so it carries no annotation; experts: num_experts of each of the L sites.
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
        words(packed)[chunk] = words(_checked(ids[chunk].to(torch.int64), chunk.start, ids.dtype, sites, experts))
    return packed


def check_packed(packed: Tensor, sites: Sequence[str], experts: Sequence[int]) -> None:
    """RoutingError unless `packed` is what `pack_checked` makes for these sites."""
    expected = packed_dtype(max(experts))
    if packed.dtype != expected or packed.ndim != 4 or packed.shape[2] != len(sites) or packed.shape[3] < 1:
        raise RoutingError(
            f"packed ids are {packed.dtype} {list(packed.shape)}, expected {expected} [B,T,{len(sites)},K]"
        )
    for chunk in _chunks(packed):
        again = _checked(unpack_ids(packed[chunk]), chunk.start, torch.int64, sites, experts)
        if not torch.equal(words(again), words(packed[chunk])):
            raise RoutingError("a row of packed ids is live in some slots only")


def _chunks(ids: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, ids.shape[1:].numel()))
    return [slice(start, start + step) for start in range(0, len(ids), step)]


def _checked(wide: Tensor, start: int, dtype: torch.dtype, sites: Sequence[str], experts: Sequence[int]) -> Tensor:
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
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LIVE)
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
