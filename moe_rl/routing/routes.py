"""The class RoutedExperts: which experts every router chose for every token; packed, aligned with tokens. Files and
tables are in `formats`, constructors from what other programs return in `others`, moving and joining in `moving`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.formats import Stored
from moe_rl.routing.moving import Moved
from moe_rl.routing.others import FromOthers
from moe_rl.routing.packing import as_tensor, is_live, shown, unpack_ids, words
from moe_rl.routing.sites import canonical_site, match_sites
from moe_rl.routing.validity import checked_tokens, experts_per_site, pack_checked


class RoutedExperts(FromOthers, Moved, Stored):
    """The experts that every routing site chose for every token of a batch.

    ids: integer `[B,T,L,K]`, aligned with the tokens: `ids[b,t,l]` are the K experts that site l gave to
        token t. A row (the last axis) that holds a -1 has no route ("live": its router decides for itself
        under replay) and is normalised to all -1. Slot order is kept, because the order of summation
        matters bit for bit; change metrics ignore it.
    sites: L qualified module names, kept without wrapper parts (`canonical_site`), so that the routes of a
        bare, compiled, DDP or PEFT-wrapped model have the same names.
    num_experts: experts per site; one int, or L of them where sites differ.
    tokens: optional integer `[B,T]`, the token ids that these routes belong to (-1 = unknown). They travel
        with the routes, so that routes shuffled differently from their tokens can be caught.
    meta: optional values to keep with the routes (model name, library versions, ...): JSON values. `hash_routed` lists
        the sites whose experts are a table over token ids (`record_routes` sets it): rows there may name one twice.

    Stored as `.packed`, uint8 up to 255 experts and uint16 above (sentinel: the largest value); `.ids`
    decodes to int64. Never changed after construction: every method returns a new object.

    Raises RoutingError, naming the site and the offending value, for float or bool ids, another number of
    axes, a number of sites other than L, ids out of range, negative ids other than -1, an id twice in a row
    (except at hash-routed sites).

    >>> ids = torch.tensor([[[[3, 0]], [[-1, -1]]]])
    >>> routes = RoutedExperts(ids, ["model.layers.0.mlp.gate"], num_experts=4)
    >>> routes.shape, routes.packed.dtype, routes.has_live
    (torch.Size([1, 2, 1, 2]), torch.uint8, True)
    """

    def __init__(
        self,
        ids: Tensor | np.ndarray | Sequence[Any],  # no shape annotation: `pack_checked` checks ids
        sites: Sequence[str],
        num_experts: int | Sequence[int] | np.integer | np.ndarray | Tensor,
        *,
        tokens: Tensor | np.ndarray | Sequence[Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(sites, str):  # its letters would be the names
            raise RoutingError(f"sites must be a list of names, got the text {sites!r}: for one site, [{sites!r}]")
        names = tuple(canonical_site(name) for name in sites)
        experts = experts_per_site(num_experts, names)
        packed = pack_checked(as_tensor(ids, "ids"), names, experts, (meta or {}).get("hash_routed", ()))
        known = None if tokens is None else checked_tokens(as_tensor(tokens, "tokens"), packed)
        vars(self).update(vars(self._trusted(packed, names, experts, tokens=known, meta=meta)))

    @classmethod
    def _trusted(
        cls,
        packed: UInt[Tensor, "B T L K"],
        sites: tuple[str, ...],
        num_experts: Sequence[int],
        *,
        tokens: Int[Tensor, "B T"] | None = None,
        meta: Mapping[str, Any] | None = None,
        has_live: bool | None = None,
    ) -> "RoutedExperts":
        """Make an object of valid packed ids and canonical names: nothing is checked, no device sync."""
        self = cls.__new__(cls)
        held = {"packed": packed, "sites": sites, "_tokens": tokens, "_experts": tuple(num_experts)}
        vars(self).update(held, _meta=dict(meta or {}), _has_live=has_live)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: routes do not change; make new ones")

    def _with(self, packed: Tensor, tokens: Tensor | None, has_live: bool | None = None) -> "RoutedExperts":
        """Return routes with other rows and tokens, and the same sites, num_experts and meta."""
        return RoutedExperts._trusted(
            packed, self.sites, self._experts, tokens=tokens, meta=self._meta, has_live=has_live
        )

    def with_ids(self, ids: Tensor | np.ndarray, tokens: Int[Tensor, "B T"] | None = None) -> "RoutedExperts":
        """Return routes with other ids at the same sites, with the same meta, checked as any new object. tokens: of the
        new ids."""
        return RoutedExperts(ids, self.sites, self.num_experts, tokens=tokens, meta=self.meta)

    # Contents

    packed: UInt[Tensor, "B T L K"]
    """`[B,T,L,K]`, uint8 or uint16; the largest value of the dtype means live."""
    sites: tuple[str, ...]
    """L qualified module names, without wrapper parts."""
    _tokens: Int[Tensor, "B T"] | None
    """`tokens`, with -2 - id for those that the attention mask of a recording hid (`packing.hide`)."""
    _experts: tuple[int, ...]
    _meta: dict[str, Any]
    _has_live: bool | None

    @property
    def tokens(self) -> Int[Tensor, "B T"] | None:
        """int32 token ids that the routes belong to (-1 = unknown), or None."""
        return None if self._tokens is None else shown(self._tokens)

    @property
    def attended(self) -> Bool[Tensor, "B T"] | None:
        """True where a token is known and was not hidden by the attention mask of a recording; None without tokens."""
        return None if self._tokens is None else self._tokens >= 0

    @property
    def ids(self) -> Int[Tensor, "B T L K"]:
        """int64 ids `[B,T,L,K]`, -1 = live. Decoded anew at every access."""
        return unpack_ids(self.packed)

    def site_ids(self, site: int | str) -> Int[Tensor, "B T K"]:
        """Return the int64 ids of one site, by position or name; other sites are not decoded."""
        return unpack_ids(self.packed[:, :, match_sites(self.sites, site)[0]])

    @property
    def num_experts(self) -> int | tuple[int, ...]:
        """Experts per site: one int, or L of them where sites differ."""
        return self._experts[0] if len(set(self._experts)) == 1 else self._experts

    @property
    def meta(self) -> dict[str, Any]:
        """Values kept with the routes (a copy)."""
        return dict(self._meta)

    @property
    def shape(self) -> torch.Size:
        """(B, T, L, K)."""
        return self.packed.shape

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed ids: B·T·L·K times 1 or 2."""
        return self.packed.nbytes

    @property
    def live(self) -> Bool[Tensor, "B T L"]:
        """True where a row has no route."""
        return is_live(self.packed[..., 0])

    @property
    def has_live(self) -> bool:
        """Whether any row is live. Computed once (one device sync), then remembered."""
        known = self._has_live
        if known is None:
            known = vars(self)["_has_live"] = bool(self.live.any())
        return known

    def equal(self, other: "RoutedExperts") -> bool:
        """Return whether sites, num_experts, ids (slot order included), and tokens if both know theirs, are equal."""
        if self.sites != other.sites or self._experts != other._experts or self.shape != other.shape:
            return False
        mine, theirs = self.tokens, other.tokens
        if mine is not None and theirs is not None and not torch.equal(mine, theirs.to(self.device)):
            return False
        return torch.equal(words(self.packed), words(other.packed.to(self.device)))

    def __repr__(self) -> str:
        b, t, sites, k = self.shape
        return (
            f"RoutedExperts({b} sequences x {t} tokens x {sites} sites x {k} of {self.num_experts} experts, "
            f"{self.packed.dtype} on {self.device}{', with tokens' if self.tokens is not None else ''})"
        )

    # Parts of the routes; more in the mixin `Moved`

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RoutedExperts":
        """Return the same routes on another device."""
        tokens = None if self._tokens is None else self._tokens.to(device, non_blocking=non_blocking)
        return self._with(self.packed.to(device, non_blocking=non_blocking), tokens, self._has_live)

    def rows(
        self, index: int | slice | Sequence[int] | Sequence[bool] | np.integer | np.ndarray | Tensor
    ) -> "RoutedExperts":
        """Return the routes of some sequences: an int (B becomes 1), a slice, ints, or a bool mask over B.

        Raises RoutingError for an index out of range or a mask of another length.
        """
        size = self.shape[0]
        try:
            given = range(size)[index] if isinstance(index, slice) else index
            wanted = as_tensor(given, "rows").cpu()
            if wanted.dtype == torch.uint8 or (wanted.is_floating_point() and not wanted.numel()):
                wanted = wanted.long()  # torch takes uint8 for a mask, and an empty list for floats
            # Indexing 0..B-1 on the CPU gives every kind of index one meaning, and errors without a sync.
            chosen = torch.arange(size, device="cpu")[wanted]
        except (IndexError, TypeError) as error:
            raise RoutingError(f"rows: no such rows among B = {size} sequences: {error}") from error
        chosen = chosen.reshape(-1).to(self.device)
        tokens = None if self._tokens is None else self._tokens.index_select(0, chosen)
        packed = words(self.packed).index_select(0, chosen).view(self.packed.dtype)
        return self._with(packed, tokens, None if self._has_live else self._has_live)

    def columns(self, part: slice) -> "RoutedExperts":
        """Return the routes of a range of token positions, the same in every sequence, e.g. to cut off padding.

        Raises RoutingError for anything but a slice.
        """
        if not isinstance(part, slice):
            raise RoutingError(f"columns: expected a slice of token positions, such as slice(3), got {part!r}")
        tokens = None if self._tokens is None else self._tokens[:, part]
        return self._with(self.packed[:, part].contiguous(), tokens, None if self._has_live else self._has_live)
