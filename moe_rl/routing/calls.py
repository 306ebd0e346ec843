"""One model call, the calls that a KV cache joins into one logical forward, and the recording of them."""

from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import refusals
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.kv_cache import CHANGED, CacheState, tokens_in
from moe_rl.routing.packing import hide, packed_dtype
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.selection import Job, Selector
from moe_rl.routing.traced import no_type_check

_PAGED = ("block_table", "read_index", "write_index")
CACHE_NAMES = ("cache", "past_key_values")
"""What a model calls its cache, as an argument and in its output: since transformers 5.24, and before."""


@no_type_check
def cache_name(accepts: Collection[str]) -> str:
    """The name of the cache among the arguments that a forward accepts."""
    return next((name for name in CACHE_NAMES if name in accepts), CACHE_NAMES[-1])


@no_type_check
def cache_given(inputs: Mapping[str, Any]) -> Any:
    """The cache that a call is given, by either name; None if there is none."""
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


@no_type_check
def cache_left(output: Any) -> Any:
    """The cache in a model's output, by either name; None if there is none."""
    name = next((name for name in CACHE_NAMES if hasattr(output, name)), None)
    return None if name is None else getattr(output, name)


@no_type_check
class Call:
    """What one call of the model is given, and what its sites did. Keyed by site, never a queue.

    A recomputation for the backward pass runs under the very Call of its forward and so finds the same routes; once
    closed, a Call takes no more results.
    """

    def __init__(self, inputs: dict[str, Any], sites: int, frame: FrameType | None = None) -> None:
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        if not isinstance(given, Tensor) or given.ndim < 2:
            raise refusals.without_batch(given)
        if any(inputs.get(name) is not None for name in _PAGED):
            raise refusals.packed_batch()
        self.batch, self.length = int(given.shape[0]), int(given.shape[1])
        self.tokens: Tensor | None = ids
        self.mask: Any = inputs.get("attention_mask")
        self.cache: Any = cache_given(inputs)
        self.caches = self.cache is not None or inputs.get("use_cache") is True  # asked for: the rest comes with it
        self.past = 0 if self.cache is None else tokens_in(self.cache)
        self.jobs: list[Job | None] = [None] * sites
        self.chosen: list[Tensor | None] = [None] * sites  # `[B·S,K]`, as they reached the experts
        self.proven = [False] * sites  # the tensor that reached the experts is the one that the router was given
        self.fired = [False] * sites
        self.frame = frame  # the call of the model; None where it is compiled
        self.grad = torch.is_grad_enabled()  # without gradients nothing is recomputed
        self.disturb: Callable[..., None] | None = None  # see rerun.py
        self.open = True
        self.follows: CacheState | None = None  # what this call goes on with
        self.left: CacheState | None = None  # and what it leaves
        self.changed: bool | Tensor = False  # whether the cache is another one since

    def goes_on(self, left: list[CacheState]) -> None:
        """Which of the calls that left these caches, if any, this one continues."""
        before = None if self.cache is None else next((one for one in left if one.holds(self.cache)), None)
        if self.past < 0:  # a cache that does not count
            self.past = 0 if before is None else before.length
        if before is not None and self.past:
            self.follows, self.changed = before, before.changed(self.cache, self.past)

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def knows_mask(self) -> bool:
        """Whether this call has an attention mask over tokens, `[B,T]`. What a mask of another form hides is not looked
        for, nor what that of one decoded token does: padding that matters stands in the prompt."""
        mask = self.mask
        return self.length > 1 and isinstance(mask, Tensor) and mask.shape == (self.batch, self.past + self.length)

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
            raise refusals.silent_sites(silent, len(names))

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
        self.tokens = self.mask = self.cache = None
        self.chosen = []
        for job in self.jobs:
            if job is not None:
                job.close()


class Listener:
    """An open context, which is told when a call of the model begins, when it ends, and when the context does.

    steers: whether it has something for the routers to do; False: it reads the ids that reach the experts, no more.
    """

    steers = True

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...

    def finish(self) -> None: ...


class Step(NamedTuple):
    """One call: tensors `[B,S,...]`, behind `past` tokens of the calls before it."""

    parts: tuple[Tensor, ...]
    past: int
    changed: bool | Tensor


@no_type_check
class Collected:
    """What a listener keeps of all calls, joined along the tokens where a KV cache connects them. `unknown` fills the
    rows of a cache that was filled before anyone listened."""

    def __init__(self, *unknown: int) -> None:
        self.unknown = unknown
        self.steps: list[Step] = []
        self.chains: list[list[Step]] = []
        self._of: dict[CacheState | None, list[Step]] = {}  # the chain whose last call left this cache

    def end(self, call: Call, *parts: Tensor) -> None:
        step = Step(parts, call.past, call.changed)
        self.steps.append(step)
        chain = self._of.pop(call.follows, None)
        if chain is None:
            chain = []
            self.chains.append(chain)
        chain.append(step)
        if call.left is not None:
            self._of[call.left] = chain

    def forwards(self) -> list[tuple[Tensor, ...]]:
        """`[B,T,...]` of each logical forward; RoutingError where nothing proves that its calls are one."""
        return [_joined(chain, self.unknown) for chain in self.chains]

    def together(self) -> tuple[Tensor, ...]:
        """Every call, joined along the batch; RoutingError where that is not possible."""
        if not self.steps:
            raise refusals.nothing_seen()
        alone = self.forwards()
        lengths = {parts[0].shape[1] for parts in alone}
        if len(lengths) > 1:
            raise refusals.different_lengths(len(alone), lengths)
        return alone[0] if len(alone) == 1 else tuple(torch.cat(part) for part in zip(*alone, strict=True))


def _joined(chain: list[Step], unknown: tuple[int, ...]) -> tuple[Tensor, ...]:
    first, *later = chain
    if any(bool(step.changed) for step in later):
        raise RoutingError(f"{CHANGED}. `.steps` has each call by itself")
    B = len(first.parts[0])
    pieces, length = [], first.past
    if first.past:
        gaps = (
            torch.full((B, length, *p.shape[2:]), u, device=p.device).to(p.dtype)
            for p, u in zip(first.parts, unknown, strict=True)
        )
        pieces = [tuple(gaps)]
    for step in chain:
        if len(step.parts[0]) != B:
            raise RoutingError(
                f"the batch changed from {B} to {len(step.parts[0])} sequences between two calls on one KV cache"
            )
        if step.past < length:  # it was cropped since (speculative decoding)
            pieces = [tuple(torch.cat(part, dim=1)[:, : step.past] for part in zip(*pieces, strict=True))]
        pieces.append(step.parts)
        length = step.past + step.parts[0].shape[1]
    return tuple(torch.cat(part, dim=1) for part in zip(*pieces, strict=True))


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model computes: what accelerate offloads lies on the meta device between its calls."""
    if model.device.type != "meta":
        return model.device
    places = (getattr(getattr(m, "_hf_hook", None), "execution_device", None) for m in model.modules())
    return torch.device(next((place for place in places if place is not None), "meta"))


# -- what is recorded of calls -----------------------------------------------------------------------------------------


class Routers(NamedTuple):
    """What a recording knows of a model. It holds nothing of the model itself, and may outlive it."""

    names: tuple[str, ...]
    fixed: list[bool]  # see Site
    probes: list[Selector]  # what the self-check learned of each
    model: str
    family: str


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
        raise refusals.other_tokens_routed(name, ids, call.batch, call.length)
    return ids


def wrapped(routers: Routers, packed: Tensor, tokens: Tensor) -> RoutedExperts:
    """Packed ids and tokens (-1 = unknown) as RoutedExperts that say where they come from."""
    meta: dict[str, Any] = {"model": routers.model, "class": routers.family, "transformers": transformers.__version__}
    if fixed := [name for name, fixed in zip(routers.names, routers.fixed, strict=True) if fixed]:
        meta["hash_routed"] = fixed  # a table over token ids, which may name an expert twice
    experts = [probe.num_experts for probe in routers.probes]
    known = tokens if bool((tokens >= 0).any()) else None
    return RoutedExperts._trusted(packed, routers.names, experts, tokens=known, meta=meta)


@no_type_check
def tokens_of(call: Call, like: Tensor) -> Tensor:
    """`[B,S]` int32 token ids of a call, -1 where it was given embeddings; those that its attention mask hides are
    written as `packing.hide` does."""
    if call.tokens is None:
        return torch.full((call.batch, call.length), -1, dtype=torch.int32, device=like.device)
    tokens = call.tokens.to(like.device, torch.int32, copy=True)
    return hide(tokens, call.mask[:, call.past :].to(like.device) != 0) if call.knows_mask() else tokens


def one_width(routers: Routers) -> None:
    widths = {probe.k for probe in routers.probes}
    if len(widths) > 1:
        raise refusals.different_widths(routers.family, widths)


@no_type_check
class Recording(Listener):
    """The experts that were used, as their ids reached them. Rows are packed as they come.

    `.routes`: all of it as one RoutedExperts: one forward, one generate() (`[B,P+G-1,L,K]`: the last sampled token was
        never routed; with drafts, of prompt lookup or an assistant, those that were rejected last stay behind it, and
        `routes.columns(slice(P + G - 1))` is without them), or several forwards of one length, joined along the batch.
    `.calls`: one RoutedExperts per logical forward; calls on one KV cache are one.
    `.steps`: one per call of the model, whatever happened to the cache in between.
    """

    steers = False

    def __init__(self, routers: Routers) -> None:
        one_width(routers)
        self._routers = routers
        self._dtype = packed_dtype(max(probe.num_experts for probe in routers.probes))
        self._seen = Collected(torch.iinfo(self._dtype).max, -1)

    def end(self, call: Call) -> None:
        packed = stacked(self._routers, call, call.chosen, self._dtype)
        self._seen.end(call, packed, tokens_of(call, packed))

    def __repr__(self) -> str:
        calls, sites = len(self._seen.steps), len(self._routers.names)
        return f"Recording(calls of {self._routers.family}: {calls}; sites: {sites}; what they chose: .routes)"

    def _wrap(self, parts: tuple[Tensor, ...]) -> RoutedExperts:
        return wrapped(self._routers, *parts)

    @property
    def steps(self) -> list[RoutedExperts]:
        """`[B,S,L,K]` for each call of the model."""
        return [self._wrap(step.parts) for step in self._seen.steps]

    @property
    def calls(self) -> list[RoutedExperts]:
        """`[B,T,L,K]` for each logical forward."""
        return [self._wrap(parts) for parts in self._seen.forwards()]

    @property
    def routes(self) -> RoutedExperts:
        """Everything, joined along the batch. Raises RoutingError where nothing was seen, where lengths differ, and
        where nothing proves that the KV cache kept its rows between calls (beam search)."""
        return self._wrap(self._seen.together())
