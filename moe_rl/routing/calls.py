"""One model call, the calls that a KV cache joins into one logical forward, and the recording of them."""

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.kv_cache import CHANGED, CacheState, tokens_in
from moe_rl.routing.packing import packed_dtype
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.selection import Job, Selector
from moe_rl.routing.sites import Site
from moe_rl.routing.traced import no_type_check

_PAGED = ("block_table", "read_index", "write_index")


@no_type_check
class Call:
    """What one call of the model is given, and what its sites did. Keyed by site, never a queue.

    A recomputation for the backward pass runs under the very Call of its forward and so finds the same routes; once
    closed, a Call takes no more results.
    """

    def __init__(self, inputs: dict[str, Any], sites: int, frame: FrameType | None = None) -> None:
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        if given is None or given.ndim < 2:
            raise RoutingError(
                "cannot tell batch and length of this call: expected input_ids [B,S] or inputs_embeds [B,S,d]"
            )
        for name in _PAGED:
            if inputs.get(name) is not None:
                raise RoutingError(
                    "packed continuous batching (paged attention) mixes sequences on one axis: routes of such calls "
                    "would belong to no sequence. Use generate(), or your engine's own capture of routed experts"
                )
        self.batch, self.length = int(given.shape[0]), int(given.shape[1])
        self.tokens: Tensor | None = ids
        self.cache: Any = inputs.get("past_key_values")
        self.caches = self.cache is not None or inputs.get("use_cache") is True  # asked for: the rest comes with it
        self.past = 0 if self.cache is None else tokens_in(self.cache)
        self.jobs: list[Job | None] = [None] * sites
        self.chosen: list[Tensor | None] = [None] * sites  # `[B·S,K]`, as they reached the experts
        self.proven = [False] * sites  # the tensor that reached the experts is the one that the router was given
        self.fired = [False] * sites
        self.frame = frame  # the call of the model; None where it is compiled
        self.grad = torch.is_grad_enabled()  # without gradients nothing is recomputed
        self.disturb: Callable[..., Tensor] | None = None  # see rerun.py
        self.disturbed = [False] * sites
        self.rerun = False  # a router (or a block, with its experts) runs for `disturb`
        self.open = True

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def job(self, site: int) -> Job:
        own = self.jobs[site]
        if own is None:
            own = self.jobs[site] = Job()
        return own

    def close(self, names: list[str]) -> None:
        """End of the forward: every site has fired, or the result would be silently partial."""
        self.open = False
        self.frame = None
        silent = [name for name, ids in zip(names, self.chosen, strict=True) if ids is None]
        if silent:
            raise RoutingError(
                f"{len(silent)} of {len(names)} routing sites did not run in this forward, first {silent[0]}: a fused "
                "or replaced MoE block that bypasses its router or its experts, or layers that were skipped"
            )

    def kept(self) -> Tensor | None:
        """`[L,B·S]` bool: did the experts get what was forced? None if nothing was, and where nothing is to compare,
        because the very tensors that answered the routers reached the experts."""
        if all(job is None or job.forced is None or proven for job, proven in zip(self.jobs, self.proven, strict=True)):
            return None
        pairs = [(job, ids) for job, ids in zip(self.jobs, self.chosen, strict=True) if ids is not None]
        wanted = [ids if job is None or job.forced is None else job.forced for job, ids in pairs]
        device = wanted[0].device
        forced = torch.stack([ids if ids.device == device else ids.to(device) for ids in wanted])
        kept = torch.stack([ids if ids.device == device else ids.to(device) for _, ids in pairs]) == forced
        if any(job is not None and job.holes != "none" for job, _ in pairs):
            kept |= forced < 0
        return kept.all(-1)

    def forget(self) -> None:
        """Keep what a recomputation needs (the forced routes), and nothing else: it may wait for a late backward."""
        self.tokens = self.cache = None
        self.chosen = []
        for job in self.jobs:
            if job is not None:
                job.close()


@no_type_check
class Joined:
    """Tensors `[B,S,...]` of successive calls, joined along the tokens while a KV cache connects them."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.length = 0
        self.pieces: list[tuple[Tensor, ...]] = []
        self.refused: str | None = None
        self.changed: bool | Tensor = False
        self.left: CacheState | None = None

    def start(self, length: int, *parts: Tensor) -> None:
        """Rows of a cache that was filled before anyone listened."""
        self.pieces.append(parts)
        self.length = length

    def check(self, call: Call) -> None:
        """Before a call that continues this one: is the cache as it was left?"""
        if self.left is not None:
            self.changed = self.changed | self.left.changed(call.cache, call.past)
        if call.batch != self.batch:
            self.refused = (
                f"the batch changed from {self.batch} to {call.batch} sequences between two calls on one KV cache"
            )

    def add(self, call: Call, *parts: Tensor) -> None:
        """Append a call; a cache that was cropped since (speculative decoding) first crops what was recorded."""
        if call.past < self.length:
            self.crop(call.past)
        self.pieces.append(parts)
        self.length += call.length

    def crop(self, length: int) -> None:
        while self.length > length:
            last = self.pieces.pop()
            size = last[0].shape[1]
            self.length -= size
            if self.length < length:
                keep = length - self.length
                self.pieces.append(tuple(part[:, :keep] for part in last))
                self.length += keep

    def parts(self) -> tuple[Tensor, ...]:
        """The joined tensors, `[B,T,...]`."""
        if bool(self.changed):
            raise RoutingError(f"{CHANGED}. `.steps` has each call by itself")
        if self.refused:
            raise RoutingError(self.refused)
        return tuple(torch.cat(part, dim=1) for part in zip(*self.pieces, strict=True))


@no_type_check
class Collected:
    """What a listener keeps of all calls: a tuple of tensors `[B,S,...]` each, joined where a KV cache joins them."""

    def __init__(self) -> None:
        self.joined: list[Joined] = []
        self.steps: list[tuple[Tensor, ...]] = []

    def begin(self, call: Call) -> None:
        before = self._continued(call) if call.past else None
        if before is not None:
            before.check(call)

    def end(self, call: Call, cache: Any, parts: tuple[Tensor, ...], unknown: tuple[int, ...]) -> None:
        """`unknown` fills the rows of a cache that was filled before anyone listened."""
        self.steps.append(parts)
        joined = self._continued(call) if call.past else None
        if joined is None:
            joined = Joined(call.batch)
            self.joined.append(joined)
            if call.past:
                gap = [
                    torch.full((call.batch, call.past, *part.shape[2:]), value, device=part.device).to(part.dtype)
                    for part, value in zip(parts, unknown, strict=True)
                ]
                joined.start(call.past, *gap)
        joined.add(call, *parts)
        if cache is not None:
            joined.left = CacheState(cache, joined.length)

    def _continued(self, call: Call) -> Joined | None:
        known = ((joined, joined.left) for joined in reversed(self.joined))
        return next((joined for joined, left in known if left and left.continued_by(call.cache, call.past)), None)

    def together(self) -> tuple[Tensor, ...]:
        """Every call, joined along the batch; RoutingError where that is not possible."""
        if not self.joined:
            raise RoutingError(
                "nothing was seen: no call of the model happened inside the context (a compiled function around the "
                "model, without attach(model) before? code that torch.compile made of this class without hooks? "
                "torch._dynamo.reset() forgets that)"
            )
        lengths = {joined.length for joined in self.joined}
        if len(lengths) > 1:
            raise RoutingError(
                f"{len(self.joined)} forwards with different lengths {sorted(lengths)} do not make one batch; `.calls` "
                "of the recording has each of them"
            )
        alone = [joined.parts() for joined in self.joined]
        return alone[0] if len(alone) == 1 else tuple(torch.cat(part) for part in zip(*alone, strict=True))


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model computes: what accelerate offloads lies on the meta device between its calls."""
    if model.device.type != "meta":
        return model.device
    places = (getattr(getattr(m, "_hf_hook", None), "execution_device", None) for m in model.modules())
    return torch.device(next((place for place in places if place is not None), "meta"))


# -- what is recorded of calls -----------------------------------------------------------------------------------------


@runtime_checkable
class Routers(Protocol):
    """What a recording knows of a model: its sites, what the self-check learned of each, and the model of one call."""

    names: list[str]
    sites: list[Site]
    probes: list[Selector]
    boundary: PreTrainedModel


@no_type_check
def stacked(routers: Routers, call: Call, ids: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """`[B,S,L,K]`, packed to `dtype`, from one `[B·S,K]` for each site."""
    shape = (call.batch, call.length, len(ids), routers.probes[0].k)
    try:
        return torch.cat(ids, dim=1).to(dtype).view(shape)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, RuntimeError):  # a site without ids, with other rows, or on another device
        rows = [_rows_of(call, name, one) for name, one in zip(routers.names, ids, strict=True)]
    return torch.cat([one.to(rows[0].device) for one in rows], dim=1).to(dtype).view(shape)


def _rows_of(call: Call, name: str, ids: Tensor | None) -> Tensor:
    if ids is None or ids.shape[0] != call.rows:
        raise RoutingError(
            f"site {name} routed {'no' if ids is None else ids.shape[0]} tokens in a call of {call.batch} x "
            f"{call.length}: does this model drop or pack padding before its experts?"
        )
    return ids


def wrapped(routers: Routers, names: tuple[str, ...], packed: Tensor, tokens: Tensor) -> RoutedExperts:
    """Packed ids and tokens (-1 = unknown) as RoutedExperts that say where they come from."""
    meta: dict[str, Any] = {
        "model": getattr(routers.boundary.config, "name_or_path", "") or "",
        "class": type(routers.boundary).__name__,
        "transformers": transformers.__version__,
    }
    if fixed := [name for name, site in zip(names, routers.sites, strict=True) if site.fixed]:
        meta["hash_routed"] = fixed  # a table over token ids, which may name an expert twice
    experts = [probe.num_experts for probe in routers.probes]
    known = tokens if bool((tokens >= 0).any()) else None
    return RoutedExperts._trusted(packed, names, experts, tokens=known, meta=meta)


@no_type_check
def tokens_of(call: Call, like: Tensor) -> Tensor:
    """`[B,S]` int32 token ids of a call, -1 where it was given embeddings."""
    if call.tokens is None:
        return torch.full((call.batch, call.length), -1, dtype=torch.int32, device=like.device)
    return call.tokens.to(like.device, torch.int32, copy=True)


def one_width(routers: Routers) -> None:
    widths = {probe.k for probe in routers.probes}
    if len(widths) > 1:
        raise RoutingError(
            f"{type(routers.boundary).__name__} gives a token different numbers of experts at different sites "
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

    def __init__(self, routers: Routers, names: list[str]) -> None:
        one_width(routers)
        self._routers, self._names, self._seen = routers, tuple(names), Collected()
        self._dtype = packed_dtype(max(probe.num_experts for probe in routers.probes))

    def begin(self, call: Call) -> None:
        self._seen.begin(call)

    def end(self, call: Call, cache: Any) -> None:
        packed = stacked(self._routers, call, call.chosen, self._dtype)
        self._seen.end(call, cache, (packed, tokens_of(call, packed)), (torch.iinfo(packed.dtype).max, -1))

    def finish(self) -> None:
        pass  # what cannot be joined is said where it is asked for

    def _wrap(self, parts: tuple[Tensor, ...]) -> RoutedExperts:
        return wrapped(self._routers, self._names, *parts)

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
