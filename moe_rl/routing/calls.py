"""Bookkeeping of model calls: one call, the calls that a KV cache joins into one logical forward, their recording."""

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
"""Names of the KV cache, as an argument of a model and in its output: since transformers 5.24, and before."""


@no_type_check
def cache_name(accepts: Collection[str]) -> str:
    """Return the name of the KV cache among the arguments that a forward accepts; by default the older name."""
    return next((name for name in CACHE_NAMES if name in accepts), CACHE_NAMES[-1])


@no_type_check
def cache_given(inputs: Mapping[str, Any]) -> Any:
    """Return the KV cache among the inputs of a call, under either name, or None."""
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


@no_type_check
def cache_left(output: Any) -> Any:
    """Return the KV cache in a model's output, under either name or (`return_dict=False`) in a tuple, or None."""
    if type(output) is tuple:
        return next((one for one in output if hasattr(one, "get_seq_length")), None)
    return next((getattr(output, name) for name in CACHE_NAMES if hasattr(output, name)), None)


@no_type_check
class Call:
    """The inputs of one call of the model, and the jobs and results of its sites, stored by site index.

    A recomputation for the backward pass runs under the same Call object as its forward, and so finds the same routes.
    A closed Call takes no more results.
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
        mask = inputs.get("attention_mask")  # a dict: by kind of layer
        self.mask: Any = mask.get("full_attention", next(iter(mask.values()), None)) if isinstance(mask, dict) else mask
        self.cache: Any = cache_given(inputs)
        self.caches = self.cache is not None or inputs.get("use_cache") is True  # other tokens may come later
        self.past = 0 if self.cache is None else tokens_in(self.cache)
        self.jobs: list[Job | None] = [None] * sites
        self.chosen: list[Tensor | None] = [None] * sites  # `[B·S,K]`, as they reached the experts
        self.proven = [False] * sites  # the tensor that reached the experts is the one that the router was given
        self.fired = [False] * sites
        self.frame = frame  # Python frame of the model's call; None if compiled
        self.grad = torch.is_grad_enabled()  # without gradients nothing is recomputed
        self.disturb: Callable[..., None] | None = None  # runs before each router (rerun.py)
        self.open = True
        self.follows: CacheState | None = None  # state of the KV cache that this call continues
        self.left: CacheState | None = None  # state of the KV cache after this call
        self.changed: bool | Tensor = False  # whether the cache was changed since the call before

    def goes_on(self, left: list[CacheState]) -> None:
        """Set `follows` and `changed` by this call's KV cache among `left`; `past`, too, if that counts no tokens."""
        before = None if self.cache is None else next((one for one in left if one.holds(self.cache)), None)
        if self.past < 0:  # a cache that does not count its tokens
            self.past = 0 if before is None else before.length
        if before is not None and self.past:
            self.follows, self.changed = before, before.changed(self.cache, self.past)

    @property
    def rows(self) -> int:
        """Number of tokens of the call, B·S."""
        return self.batch * self.length

    def attended(self) -> Tensor | None:
        """Return `[B,S]` bool: tokens that the attention mask, `[B,T]` or `[B,1,S,T]`, shows to any token. None without
        such a mask, and for one decoded token: padding that matters stands in the prompt."""
        mask = self.mask
        if self.length == 1 or not isinstance(mask, Tensor):
            return None
        over_tokens = mask.shape == (self.batch, self.past + self.length)
        return mask[:, self.past :] != 0 if over_tokens else self._shown_by(mask)

    def _shown_by(self, mask: Tensor) -> Tensor | None:
        """Return `attended` of a mask `[B,1,S,T]`, or of one with room behind T (a static cache); None for others."""
        end = self.past + self.length
        if mask.ndim != 4 or mask.shape[::2] != (self.batch, self.length) or mask.shape[3] < end:
            return None
        shown = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
        return shown[:, 0, :, self.past : end].any(1)

    def job(self, site: int) -> Job:
        """Return the Job of a site; make one on first use."""
        own = self.jobs[site]
        if own is None:
            own = self.jobs[site] = Job()
        return own

    def close(self, names: list[str]) -> None:
        """Close the call after its forward. Raises RoutingError if a site chose no experts: the result is partial."""
        self.open = False
        self.frame = None
        silent = [name for name, ids in zip(names, self.chosen, strict=True) if ids is None]
        if silent:
            raise refusals.silent_sites(silent, len(names))

    def kept(self) -> Tensor | None:
        """Return a `[L,B·S]` bool tensor: whether the experts received the forced ids. None if nothing was forced, or
        if there is nothing to compare, because the very tensors that answered the routers reached the experts."""
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
        """Drop all but the forced routes, which a recomputation needs: a late backward may keep this Call alive."""
        self.tokens = self.mask = self.cache = None
        self.chosen = []
        for job in self.jobs:
            if job is not None:
                job.close()


class Listener:
    """Base class of an open context, which is told when a call of the model begins or ends, and when the context ends.

    steers: whether the context gives the routers something to do; if False, it only reads the ids that reach the
    experts.
    """

    steers = True

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...

    def finish(self) -> None: ...


class Step(NamedTuple):
    """Results of one call: tensors `[B,S,...]`, behind the `past` tokens that the KV cache already held."""

    parts: tuple[Tensor, ...]
    past: int
    changed: bool | Tensor


@no_type_check
class Collected:
    """The results of all calls that a listener saw, joined along the tokens where a KV cache connects the calls. The
    values `unknown`, one per tensor of a call, fill the rows of tokens that were in a cache before anyone listened."""

    def __init__(self, *unknown: int) -> None:
        self.unknown = unknown
        self.steps: list[Step] = []
        self.chains: list[list[Step]] = []
        self._of: dict[CacheState | None, list[Step]] = {}  # the chain whose last call left this cache

    def end(self, call: Call, *parts: Tensor) -> None:
        """Append the results of a call to those of the call that it continues."""
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
        """Return the tensors `[B,T,...]` of each logical forward. Raises RoutingError if nothing proves that its calls
        are one."""
        return [_joined(chain, self.unknown) for chain in self.chains]

    def together(self) -> tuple[Tensor, ...]:
        """Return the tensors of all calls, joined along the batch. Raises RoutingError if that is not possible."""
        if not self.steps:
            raise refusals.nothing_seen()
        alone = self.forwards()
        lengths = {parts[0].shape[1] for parts in alone}
        if len(lengths) > 1:
            raise refusals.different_lengths(len(alone), lengths)
        return alone[0] if len(alone) == 1 else tuple(torch.cat(part) for part in zip(*alone, strict=True))


def _joined(chain: list[Step], unknown: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Join the calls of one logical forward along the tokens. Raises RoutingError if the KV cache was changed in
    between."""
    first, *later = chain
    if any(bool(step.changed) for step in later):
        raise RoutingError(f"{CHANGED}. `.steps` has each call by itself")
    B, length = len(first.parts[0]), 0
    pieces: list[tuple[Tensor, ...]] = []
    for step in chain:
        if len(step.parts[0]) != B:
            raise RoutingError(
                f"the batch changed from {B} to {len(step.parts[0])} sequences between two calls on one KV cache"
            )
        if step.past < length:  # the cache was cropped since then (speculative decoding)
            pieces = [tuple(torch.cat(part, dim=1)[:, : step.past] for part in zip(*pieces, strict=True))]
        if gap := max(0, step.past - length):  # tokens that came into the cache unseen
            fills = zip(first.parts, unknown, strict=True)
            pieces.append(tuple(torch.full((B, gap, *p.shape[2:]), u, device=p.device).to(p.dtype) for p, u in fills))
        pieces.append(step.parts)
        length = step.past + step.parts[0].shape[1]
    return tuple(torch.cat(part, dim=1) for part in zip(*pieces, strict=True))


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model computes. Parameters that accelerate offloads are on the meta device between
    calls."""
    if model.device.type != "meta":
        return model.device
    places = (getattr(getattr(m, "_hf_hook", None), "execution_device", None) for m in model.modules())
    return torch.device(next((place for place in places if place is not None), "meta"))


# -- what is recorded of calls -----------------------------------------------------------------------------------------


class Routers(NamedTuple):
    """What a recording knows of the routers of a model. It holds no part of the model, and may outlive the model."""

    names: tuple[str, ...]
    fixed: list[bool]  # see Site
    probes: list[Selector]  # per site, what the self-check learned
    model: str
    family: str


@no_type_check
def stacked(routers: Routers, call: Call, ids: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Return ids `[B,S,L,K]`, packed to `dtype`, from one tensor `[B·S,K]` for each site."""
    shape = (call.batch, call.length, len(ids), routers.probes[0].k)
    try:
        return torch.cat(ids, dim=1).to(dtype).view(shape)  # type: ignore[arg-type]  # None is a TypeError
    except (TypeError, RuntimeError):  # a site without ids, with another number of rows, or on another device
        rows = [_rows_of(call, name, one) for name, one in zip(routers.names, ids, strict=True)]
    return torch.cat([one.to(rows[0].device) for one in rows], dim=1).to(dtype).view(shape)


def _rows_of(call: Call, name: str, ids: Tensor | None) -> Tensor:
    """Return `ids`. Raises RoutingError unless they have one row for each token of the call."""
    if ids is None or ids.shape[0] != call.rows:
        raise refusals.other_tokens_routed(name, ids, call.batch, call.length)
    return ids


def wrapped(routers: Routers, packed: Tensor, tokens: Tensor) -> RoutedExperts:
    """Return RoutedExperts of packed ids and tokens (-1 = unknown), which say in `meta` where they come from."""
    meta: dict[str, Any] = {"model": routers.model, "class": routers.family, "transformers": transformers.__version__}
    if fixed := [name for name, fixed in zip(routers.names, routers.fixed, strict=True) if fixed]:
        meta["hash_routed"] = fixed  # a table over token ids, which may name an expert twice
    experts = [probe.num_experts for probe in routers.probes]
    known = tokens if bool((tokens >= 0).any()) else None
    return RoutedExperts._trusted(packed, routers.names, experts, tokens=known, meta=meta)


@no_type_check
def tokens_of(call: Call, like: Tensor) -> Tensor:
    """Return the `[B,S]` int32 token ids of a call, -1 if it was given embeddings. Tokens that its attention mask hides
    are encoded as by `packing.hide`."""
    if call.tokens is None:
        return torch.full((call.batch, call.length), -1, dtype=torch.int32, device=like.device)
    tokens, shown = call.tokens.to(like.device, torch.int32, copy=True), call.attended()
    return tokens if shown is None else hide(tokens, shown.to(like.device))


def one_width(routers: Routers) -> None:
    """Raise RoutingError if sites give a token different numbers of experts."""
    widths = {probe.k for probe in routers.probes}
    if len(widths) > 1:
        raise refusals.different_widths(routers.family, widths)


@no_type_check
class Recording(Listener):
    """A recording of the experts that were used, read from the ids that reach the experts. Rows are packed as they
    come.

    `.routes`: the whole recording as one RoutedExperts: one forward; or one generate() (`[B,P+G-1,L,K]`: the last
        sampled token was never routed; with drafts of prompt lookup or an assistant, the drafts that were rejected last
        stay at the end, and `routes.columns(slice(P + G - 1))` removes them); or several forwards of one length,
        joined along the batch.
    `.calls`: one RoutedExperts per logical forward; all calls on one KV cache are one forward.
    `.steps`: one RoutedExperts per call of the model, whatever happened to the cache in between.
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
        """Routes `[B,S,L,K]` of each call of the model."""
        return [self._wrap(step.parts) for step in self._seen.steps]

    @property
    def calls(self) -> list[RoutedExperts]:
        """Routes `[B,T,L,K]` of each logical forward."""
        return [self._wrap(parts) for parts in self._seen.forwards()]

    @property
    def routes(self) -> RoutedExperts:
        """Routes of all calls, joined along the batch. Raises RoutingError if no call was seen, if lengths differ, or
        if nothing proves that the KV cache kept its rows between calls (beam search)."""
        return self._wrap(self._seen.together())
