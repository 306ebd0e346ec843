"""Checks that expert ids, numbers of experts and token ids are valid."""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Int, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE, check_integers, chunks, pack_ids, packed_dtype, unpack_ids, words


def pack_checked(
    ids: Tensor, sites: Sequence[str], experts: Sequence[int], repeats: Collection[str] = ()
) -> UInt[Tensor, "B T L K"]:
    """Return packed ids, rows with a -1 as all -1. Raises RoutingError with the site and value of what is wrong.

    ids: expected as `[B,T,L,K]`, which is checked here and so not annotated; experts: num_experts of each of the L
        sites; repeats: sites whose rows may name an expert twice.
    """
    check_integers(ids)
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
    for chunk in chunks(ids):
        words(packed)[chunk] = words(
            _checked(ids[chunk].to(torch.int64), chunk.start, ids.dtype, sites, experts, repeats)
        )
    return packed


def check_packed(packed: Tensor, sites: Sequence[str], experts: Sequence[int], repeats: Collection[str] = ()) -> None:
    """Raise RoutingError unless `packed` is what `pack_checked` makes for these sites."""
    expected = packed_dtype(max(experts))
    if packed.dtype != expected or packed.ndim != 4 or packed.shape[2] != len(sites) or packed.shape[3] < 1:
        raise RoutingError(
            f"packed ids are {packed.dtype} {list(packed.shape)}, expected {expected} [B,T,{len(sites)},K]"
        )
    for chunk in chunks(packed):
        again = _checked(unpack_ids(packed[chunk]), chunk.start, torch.int64, sites, experts, repeats)
        if not torch.equal(words(again), words(packed[chunk])):
            raise RoutingError("a row of packed ids is live in some slots only")


def _checked(
    wide: Tensor,
    start: int,
    dtype: torch.dtype,
    sites: Sequence[str],
    experts: Sequence[int],
    repeats: Collection[str],
) -> Tensor:
    """Return the packed ids of a chunk of sequences; start, dtype: first sequence and original dtype, for messages."""
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


def experts_per_site(num_experts: Any, sites: tuple[str, ...]) -> tuple[int, ...]:
    """Return one number of experts for each site, from one number for all sites or from several."""
    if not sites:
        raise RoutingError("no sites were named: routes need at least one")
    try:  # anything that is an integer, or several: numpy's and torch's scalars too
        one = isinstance(num_experts, int) or getattr(num_experts, "ndim", None) == 0
        counts = tuple(operator.index(n) for n in ((num_experts,) * len(sites) if one else num_experts))
    except TypeError:
        counts = ()
    if len(counts) != len(sites) or min(counts) < 1:
        raise RoutingError(f"num_experts must be positive, one int or {len(sites)} of them, got {num_experts}")
    return counts


def checked_tokens(tokens: Tensor, packed: Tensor) -> Int[Tensor, "B T"]:
    """Return int32 token ids of the shape of the routes, on their device; -1 is unknown. Raises RoutingError for
    anything else."""
    shape = packed.shape[:2]
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.shape != shape:
        raise RoutingError(f"tokens must be integers [B,T] = {list(shape)}, got {tokens.dtype} {list(tokens.shape)}")
    if tokens.numel():  # larger ids would wrap; -2 - id stands for an id that a mask hid (`hide`)
        low, high = (int(x) for x in torch.aminmax(tokens.to(torch.int64)))
        if low < -1 or high >= 2**31:
            raise RoutingError(
                f"tokens from {low} to {high} are no token ids: below zero only -1 has a meaning (unknown; labels have "
                "-100?), and they are kept in 32 bits"
            )
    return tokens.to(packed.device, torch.int32, copy=True)  # a copy: the caller may write to the original
