"""One model call, and the calls that a KV cache joins into one logical forward."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.kv_cache import CHANGED, CacheState, tokens_in
from moe_rl.routing.selection import Job
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
                "model, without attach(model) before?)"
            )
        lengths = {joined.length for joined in self.joined}
        if len(lengths) > 1:
            raise RoutingError(
                f"{len(self.joined)} forwards with different lengths {sorted(lengths)} do not make one batch; `.calls` "
                "of the recording has each of them"
            )
        alone = [joined.parts() for joined in self.joined]
        return alone[0] if len(alone) == 1 else tuple(torch.cat(part) for part in zip(*alone, strict=True))
