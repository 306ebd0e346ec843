"""RoutedExperts: which experts every router chose for every token, packed, aligned with the tokens, savable."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.site_names import canonical_site, match_sites

if TYPE_CHECKING:
    import pandas as pd

LIVE = (
    -1
)  # in `ids`: this token's router decides for itself; in the packed form: the largest value of the dtype


def packed_dtype(num_experts: int) -> torch.dtype:
    """Smallest unsigned dtype that holds ids `0..num_experts-1` and, as its largest value, the sentinel."""
    if num_experts <= 255:
        return torch.uint8
    if num_experts <= 65535:
        return torch.uint16
    raise RoutingError(f"num_experts is {num_experts}; at most 65535 are supported")


def pack_ids(ids: Int[Tensor, "*rows"], num_experts: int) -> Tensor:
    """Valid ids (-1 = live) in their compact dtype. The cast is all there is: -1 wraps to the largest value."""
    return ids.to(packed_dtype(num_experts))


def unpack_ids(packed: Tensor) -> Int[Tensor, "*rows"]:
    """int64 ids with -1 for the sentinel; the inverse of `pack_ids`."""
    ids = packed.to(torch.int64)
    return ids.masked_fill_(ids == torch.iinfo(packed.dtype).max, LIVE)


class RoutedExperts:
    """The experts that every routing site chose for every token of a batch.

    ids: integer `[B,T,L,K]`, aligned with the tokens: `ids[b,t,l]` are the K experts that site l gave to token t. A row
        (the last axis) that holds a -1 has no route ("live": its router decides for itself under replay) and is
        normalised to all -1. Slot order is kept, because the order of summation matters bit for bit; change metrics
        ignore it.
    sites: L qualified module names, without wrapper parts (`canonical_site`), so that the routes of a bare, compiled,
        DDP or PEFT-wrapped model have the same names.
    num_experts: experts per site; one int, or L of them where sites differ.
    tokens: optional integer `[B,T]`, the token ids that these routes belong to (-1 = unknown). They travel with the
        routes, so that routes shuffled differently from their tokens can be caught.
    meta: optional facts to keep with the routes (model name, library versions, ...): JSON values.

    Stored as `.packed`, in uint8 up to 255 experts and uint16 above (sentinel: the largest value); `.ids` decodes to
    int64. Objects are not changed after construction: every method returns a new one.

    Raises RoutingError, naming the site and the offending value, for float or bool ids, a wrong number of axes, a
    number of sites other than L, ids out of range, negative ids other than -1, and an id twice in one row.

    >>> routes = RoutedExperts(torch.tensor([[[[3, 0]], [[-1, -1]]]]), ["model.layers.0.mlp.gate"], num_experts=4)
    >>> routes.shape, routes.packed.dtype, routes.has_live
    (torch.Size([1, 2, 1, 2]), torch.uint8, True)
    """

    def __init__(
        self,
        ids: Tensor,
        sites: Sequence[str],
        num_experts: int | Sequence[int],
        *,
        tokens: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        # `ids` and `tokens` carry no shape annotation: what is wrong with them is for `_validated` to say.
        names = tuple(canonical_site(name) for name in sites)
        experts = _expert_counts(num_experts, names)
        ids = _validated(torch.as_tensor(ids), names, experts)
        self._set(pack_ids(ids, max(experts)), names, experts, _checked_tokens(tokens, ids), meta, None)

    @classmethod
    def _trusted(
        cls,
        packed: Tensor,
        sites: tuple[str, ...],
        num_experts: int | Sequence[int],
        *,
        tokens: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
        has_live: bool | None = None,
    ) -> "RoutedExperts":
        """Wrap packed ids that are known to be valid, with canonical site names; no check, no device sync."""
        self = cls.__new__(cls)
        self._set(packed, sites, _expert_counts(num_experts, sites), tokens, meta, has_live)
        return self

    def _set(
        self,
        packed: Tensor,
        sites: tuple[str, ...],
        experts: tuple[int, ...],
        tokens: Tensor | None,
        meta: Mapping[str, Any] | None,
        has_live: bool | None,
    ) -> None:
        self._packed, self._sites, self._experts = packed, sites, experts
        self._tokens, self._meta, self._has_live = tokens, dict(meta or {}), has_live

    def _like(
        self,
        packed: Tensor,
        tokens: Tensor | None,
        sites: tuple[str, ...] | None = None,
        has_live: bool | None = None,
    ) -> "RoutedExperts":
        return RoutedExperts._trusted(
            packed, sites or self._sites, self._experts, tokens=tokens, meta=self._meta, has_live=has_live
        )

    # -- what is in it ------------------------------------------------------------------------------------------------

    @property
    def packed(self) -> Tensor:
        """`[B,T,L,K]`, uint8 or uint16; the largest value of the dtype means live."""
        return self._packed

    @property
    def ids(self) -> Int[Tensor, "B T L K"]:
        """`[B,T,L,K]` int64, -1 = live. Decoded anew at every call."""
        return unpack_ids(self._packed)

    def site_ids(self, site: int | str) -> Int[Tensor, "B T K"]:
        """int64 ids of one site, by position or name; decodes nothing else."""
        return unpack_ids(self._packed[:, :, match_sites(self._sites, site)[0]])

    @property
    def sites(self) -> tuple[str, ...]:
        return self._sites

    @property
    def num_experts(self) -> int | tuple[int, ...]:
        """Experts per site: one int, or L of them where sites differ."""
        return self._experts[0] if len(set(self._experts)) == 1 else self._experts

    @property
    def tokens(self) -> Int[Tensor, "B T"] | None:
        """int32 token ids that the routes belong to (-1 = unknown), or None."""
        return self._tokens

    @property
    def meta(self) -> dict[str, Any]:
        return dict(self._meta)

    @property
    def shape(self) -> torch.Size:
        """(B, T, L, K)."""
        return self._packed.shape

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed ids: B·T·L·K times 1 or 2."""
        return self._packed.nbytes

    @property
    def live(self) -> Bool[Tensor, "B T L"]:
        """True where a row has no route."""
        return self._packed[..., 0] == torch.iinfo(self._packed.dtype).max

    @property
    def has_live(self) -> bool:
        """Whether any row is live. Computed once (one device sync), then remembered."""
        if self._has_live is None:
            self._has_live = bool(self.live.any())
        return self._has_live

    @property
    def token_hash(self) -> str | None:
        """SHA-256 of the tokens (shape and int32 values, little-endian), or None where they are unknown."""
        if self._tokens is None:
            return None
        values = self._tokens.to("cpu", torch.int32).contiguous().numpy().astype("<i4")
        return hashlib.sha256(repr(tuple(values.shape)).encode() + values.tobytes()).hexdigest()

    def equal(self, other: "RoutedExperts") -> bool:
        """Same sites, num_experts and ids, slot order included; and the same tokens where both know theirs."""
        if self._sites != other._sites or self._experts != other._experts or self.shape != other.shape:
            return False
        if self._tokens is not None and other._tokens is not None:
            if not torch.equal(self._tokens, other._tokens.to(self.device)):
                return False
        return torch.equal(self._packed, other._packed.to(self.device))

    def __repr__(self) -> str:
        b, t, l, k = self.shape  # noqa: E741
        return (
            f"RoutedExperts({b} sequences x {t} tokens x {l} sites x {k} of {self.num_experts} experts, "
            f"{self.nbytes / 2**20:.1f} MiB on {self.device}{', with tokens' if self._tokens is not None else ''})"
        )

    # -- taking parts, putting together -------------------------------------------------------------------------------

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RoutedExperts":
        """The same routes on another device."""
        tokens = None if self._tokens is None else self._tokens.to(device, non_blocking=non_blocking)
        return self._like(self._packed.to(device, non_blocking=non_blocking), tokens, has_live=self._has_live)

    def rows(self, index: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> "RoutedExperts":
        """The routes of some sequences: an int (B becomes 1), a slice, ints (in that order), or a bool mask over B."""
        chosen = torch.arange(self.shape[0])[
            index if isinstance(index, slice) else torch.as_tensor(index).cpu()
        ]
        chosen = chosen.reshape(-1).to(self.device)
        tokens = None if self._tokens is None else self._tokens.index_select(0, chosen)
        return self._like(self._packed.index_select(0, chosen), tokens, has_live=self._has_live or None)

    def select(self, sites: str | int | Iterable[str | int]) -> "RoutedExperts":
        """The routes of some sites, in the order asked for: names, shell patterns or indices."""
        chosen = match_sites(self._sites, sites)
        index = torch.tensor(chosen, device=self.device)
        return RoutedExperts._trusted(
            self._packed.index_select(2, index),
            tuple(self._sites[i] for i in chosen),
            [self._experts[i] for i in chosen],
            tokens=self._tokens,
            meta=self._meta,
        )


def _expert_counts(num_experts: int | Sequence[int], sites: tuple[str, ...]) -> tuple[int, ...]:
    counts = (
        (num_experts,) * len(sites) if isinstance(num_experts, int) else tuple(int(n) for n in num_experts)
    )
    if not sites:
        raise RoutingError("no sites: routes need at least one routing site")
    if len(counts) != len(sites):
        raise RoutingError(f"num_experts gives {len(counts)} numbers for {len(sites)} sites")
    if min(counts) < 1:
        raise RoutingError(f"num_experts must be positive, got {num_experts}")
    return counts


def _validated(ids: Tensor, sites: tuple[str, ...], experts: tuple[int, ...]) -> Int[Tensor, "B T L K"]:
    """int64 ids with live rows normalised, or a RoutingError."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise RoutingError(
            f"ids must be integers, got {ids.dtype}: router logits or weights instead of expert ids?"
        )
    if ids.ndim != 4:
        raise RoutingError(
            f"ids must be [B,T,L,K] (sequence, token, site, slot), got shape {tuple(ids.shape)}"
        )
    if ids.shape[2] != len(sites):
        raise RoutingError(
            f"ids {tuple(ids.shape)} hold {ids.shape[2]} sites on axis 2, but {len(sites)} sites were named"
        )
    if len(set(sites)) != len(sites):
        twice = next(s for i, s in enumerate(sites) if s in sites[:i])
        raise RoutingError(f"site {twice} is named twice (names are compared without wrapper parts)")
    wide = ids.to(torch.int64)
    counts = torch.tensor(experts, device=ids.device)[:, None]
    _refuse(wide, (wide < LIVE) | (wide >= counts), sites, experts, ids.dtype)
    wide = torch.where((wide == LIVE).any(-1, keepdim=True), LIVE, wide)
    if ids.shape[-1] > 1:
        ordered = wide.sort(-1).values
        twice_mask = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LIVE)
        if bool(twice_mask.any()):
            b, t, l, _ = twice_mask.nonzero()[0].tolist()  # noqa: E741
            raise RoutingError(
                f"site {sites[l]}: sequence {b}, token {t} names an expert twice: {wide[b, t, l].tolist()}; padding or "
                "rows that were never captured should be -1"
            )
    return wide


def _refuse(
    ids: Tensor, bad: Tensor, sites: tuple[str, ...], experts: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not bool(bad.any()):
        return
    b, t, l, k = bad.nonzero()[0].tolist()  # noqa: E741
    value = int(ids[b, t, l, k])
    cause = "routes of another model?"
    if value < LIVE:
        cause = "only -1 has a meaning below zero (live); an int8 or int16 overflow?"
    elif not dtype.is_signed and value == torch.iinfo(dtype).max:
        cause = (
            f"{value} is the packed sentinel of {dtype}: decode it to -1, or pass `.ids` instead of `.packed`"
        )
    raise RoutingError(
        f"site {sites[l]}: sequence {b}, token {t}, slot {k} holds expert {value}; expected 0..{experts[l] - 1} or -1. {cause}"
    )


def _checked_tokens(tokens: Tensor | None, ids: Tensor) -> Tensor | None:
    if tokens is None:
        return None
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.shape != ids.shape[:2]:
        raise RoutingError(
            f"tokens must be integers of shape [B,T] = {tuple(ids.shape[:2])}, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    return tokens.to(ids.device, torch.int32)
