"""Recording: the experts that were used, kept call by call."""

from typing import Any

import torch
import transformers
from torch import Tensor

from moe_rl.routing.calls import Call, Collected
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.hooks import Tap
from moe_rl.routing.packing import packed_dtype
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.traced import no_type_check


@no_type_check
def stacked(tap: Tap, call: Call, ids: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """`[B,S,L,K]`, packed to `dtype`, from one `[B·S,K]` for each site."""
    shape = (call.batch, call.length, len(ids), tap.probes[0].k)
    try:
        return torch.cat(ids, dim=1).to(dtype).view(shape)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, RuntimeError):  # a site without ids, with other rows, or on another device
        rows = [_rows_of(call, name, one) for name, one in zip(tap.names, ids, strict=True)]
    return torch.cat([one.to(rows[0].device) for one in rows], dim=1).to(dtype).view(shape)


def _rows_of(call: Call, name: str, ids: Tensor | None) -> Tensor:
    if ids is None or ids.shape[0] != call.rows:
        raise RoutingError(
            f"site {name} routed {'no' if ids is None else ids.shape[0]} tokens in a call of {call.batch} x "
            f"{call.length}: does this model drop or pack padding before its experts?"
        )
    return ids


def wrapped(tap: Tap, names: tuple[str, ...], packed: Tensor, tokens: Tensor) -> RoutedExperts:
    """Packed ids and tokens (-1 = unknown) as RoutedExperts that say where they come from."""
    meta: dict[str, Any] = {
        "model": getattr(tap.boundary.config, "name_or_path", "") or "",
        "class": type(tap.boundary).__name__,
        "transformers": transformers.__version__,
    }
    if fixed := [name for name, site in zip(names, tap.sites, strict=True) if site.fixed]:
        meta["hash_routed"] = fixed  # a table over token ids, which may name an expert twice
    experts = [probe.num_experts for probe in tap.probes]
    known = tokens if bool((tokens >= 0).any()) else None
    return RoutedExperts._trusted(packed, names, experts, tokens=known, meta=meta)


@no_type_check
def tokens_of(call: Call, like: Tensor) -> Tensor:
    """`[B,S]` int32 token ids of a call, -1 where it was given embeddings."""
    if call.tokens is None:
        return torch.full((call.batch, call.length), -1, dtype=torch.int32, device=like.device)
    return call.tokens.to(like.device, torch.int32, copy=True)


def one_width(tap: Tap) -> None:
    widths = {probe.k for probe in tap.probes}
    if len(widths) > 1:
        raise RoutingError(
            f"{type(tap.boundary).__name__} gives a token different numbers of experts at different sites "
            f"({sorted(widths)}); RoutedExperts holds one number for all sites"
        )


@no_type_check
class Recording:
    """The experts that were used, as their ids reached them. Rows are packed as they come.

    `.routes`: all of it as one RoutedExperts: one forward, one generate() (`[B,P+G-1,L,K]`: the last sampled token was
        never routed), or several forwards of one length, joined along the batch.
    `.calls`: one RoutedExperts per logical forward; calls on one KV cache are one.
    `.steps`: one per call of the model, whatever happened to the cache in between.
    """

    def __init__(self, tap: Tap, names: list[str]) -> None:
        one_width(tap)
        self._tap, self._names, self._seen = tap, tuple(names), Collected()
        self._dtype = packed_dtype(max(probe.num_experts for probe in tap.probes))

    def begin(self, call: Call) -> None:
        self._seen.begin(call)

    def end(self, call: Call, cache: Any) -> None:
        packed = stacked(self._tap, call, call.chosen, self._dtype)
        self._seen.end(call, cache, (packed, tokens_of(call, packed)), (torch.iinfo(packed.dtype).max, -1))

    def finish(self) -> None:
        pass  # what cannot be joined is said where it is asked for

    def _wrap(self, parts: tuple[Tensor, ...]) -> RoutedExperts:
        return wrapped(self._tap, self._names, *parts)

    @property
    def steps(self) -> list[RoutedExperts]:
        """`[B,S,L,K]` for each call of the model."""
        return [self._wrap(step) for step in self._seen.steps]

    @property
    def calls(self) -> list[RoutedExperts]:
        """`[B,T,L,K]` for each logical forward."""
        return [self._wrap(joined.parts()) for joined in self._seen.joined]

    @property
    def routes(self) -> RoutedExperts:
        """Everything, joined along the batch. Raises RoutingError where nothing was seen, where lengths differ, and
        where nothing proves that the KV cache kept its rows between calls (beam search)."""
        return self._wrap(self._seen.together())
