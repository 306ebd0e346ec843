"""The context managers: record what routers choose, make them choose it again, disturb their choice."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from moe_rl.routing.calls import Call, Joined
from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.hooks import Listener, Tap
from moe_rl.routing.noise import Noise
from moe_rl.routing.routes import RoutedExperts, pack_ids
from moe_rl.routing.selection import Holes, Probe
from moe_rl.routing.selfcheck import examine
from moe_rl.routing.site_names import match_sites
from moe_rl.routing.sites import boundary_of, find_sites

# What is known about models that are alive; neither keeps a model alive.
_TAPS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tap]]" = weakref.WeakKeyDictionary()
_PROBES: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, list[Probe]]]" = weakref.WeakKeyDictionary()


def _acquire(model: nn.Module) -> tuple[Tap, list[str]]:
    """The tap of a model, checked, and the names of its sites as seen from `model`."""
    sites = find_sites(model)
    boundary = boundary_of(model, sites)
    modules = [m for site in sites for m in site.modules]
    known = _TAPS.get(boundary)
    tap = known() if known else None
    if tap is None or [m for site in tap.sites for m in site.modules] != modules:
        tap = Tap(model, sites, boundary)
        _TAPS[boundary] = weakref.ref(tap)
    if not tap.users:
        _refuse_compiled(model)
        tap.root = model
        signature = [(type(m), getattr(boundary.config, "_experts_implementation", None)) for m in modules]
        cached = _PROBES.get(boundary)
        if cached is None or cached[0] != signature:
            _PROBES[boundary] = cached = (signature, examine(tap))
        tap.probes = cached[1]
    return tap, [site.name for site in sites]


@contextmanager
def _listening(tap: Tap, listener: Listener) -> Iterator[None]:
    tap.users += 1
    tap.hook()
    tap.listeners.append(listener)
    try:
        yield
    finally:
        tap.listeners.remove(listener)
        tap.users -= 1
        if not tap.users:
            tap.unhook()


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or "_compiled_call" in vars(module):
            raise RoutingError(
                f"{name or type(module).__name__} is compiled already: torch.compile skips hooks that were added later, "
                "so nothing would be recorded or replayed. Call attach(model) before torch.compile(model)"
            )


class Attachment:
    """Hooks that stay on a model until `.detach()`; also a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._tap, _ = _acquire(model)
        self._tap.users += 1
        self._tap.hook()
        self._attached = True

    def detach(self) -> None:
        """Take the hooks off (once no context is open any more)."""
        if self._attached:
            self._attached = False
            self._tap.users -= 1
            if not self._tap.users:
                self._tap.unhook()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: nn.Module) -> Attachment:
    """Put idle hooks on a model: needed before `torch.compile`, useful where contexts are opened very often.

    Raises UnsupportedModelError if the model fails the self-check, RoutingError if it is compiled already.
    """
    return Attachment(model)


# -- recording -------------------------------------------------------------------------------------------------------


class Recording:
    """What the routers used, call by call. Rows are detached and packed as they come.

    `.routes`: all of it as one RoutedExperts: one forward, one generate() (`[B,P+G-1,L,K]`: the last sampled token was
        never routed), or several forwards of one length, joined along the batch.
    `.calls`: one RoutedExperts per logical forward; calls on one KV cache are one.
    `.steps`: one per call of the model, whatever the cache did in between.
    """

    def __init__(self, tap: Tap, names: list[str]) -> None:
        widths = {p.k for p in tap.probes}
        if len(widths) > 1:
            raise RoutingError(
                f"{type(tap.boundary).__name__} gives tokens different numbers of experts at different sites ({widths}); "
                "RoutedExperts holds one number"
            )
        self._tap, self._names = tap, tuple(names)
        self._experts = [p.num_experts for p in tap.probes]
        self._joined: list[Joined] = []
        self._steps: list[tuple[Tensor, Tensor]] = []

    def begin(self, call: Call) -> None:
        call.capture = True
        joined = self._continued(call)
        if joined is not None:
            joined.check(call)

    def end(self, call: Call, cache: Any) -> None:
        chosen = [ids for ids in call.chosen if ids is not None]
        wrong = [i for i, ids in enumerate(chosen) if ids.shape[0] != call.rows]
        if wrong:
            raise RoutingError(
                f"site {self._names[wrong[0]]}: routed {chosen[wrong[0]].shape[0]} tokens in a call of {call.batch} x "
                f"{call.length}: does this model drop or pack padding before its experts?"
            )
        ids = torch.stack([c.to(chosen[0].device) for c in chosen], dim=1)
        self._keep(call, cache, pack_ids(ids, max(self._experts)).unflatten(0, (call.batch, call.length)))

    def _keep(self, call: Call, cache: Any, packed: Tensor) -> None:
        tokens = packed.new_full((call.batch, call.length), -1, dtype=torch.int32)
        if call.tokens is not None:
            tokens = tokens.copy_(call.tokens)
        self._steps.append((packed, tokens))
        joined = self._continued(call)
        if joined is None:
            joined = Joined(call.batch)
            self._joined.append(joined)
            if call.past:  # a cache that was filled before this recording began
                gap = (call.batch, call.past)
                live = packed.new_full((*gap, *packed.shape[2:]), 0) - 1
                joined.start(call.past, live, tokens.new_full(gap, -1))
        joined.add(call, packed, tokens)
        joined.follow(cache)

    def _continued(self, call: Call) -> Joined | None:
        return next((j for j in reversed(self._joined) if j.continues(call)), None)

    def _wrap(self, packed: Tensor, tokens: Tensor) -> RoutedExperts:
        model = self._tap.boundary
        meta = {
            "model": getattr(model.config, "name_or_path", "") or "",
            "class": type(model).__name__,
            "transformers": transformers.__version__,
        }
        known = tokens if bool((tokens >= 0).any()) else None
        return RoutedExperts._trusted(packed, self._names, self._experts, tokens=known, meta=meta)

    @property
    def steps(self) -> list[RoutedExperts]:
        """`[B,S,L,K]` for each call of the model."""
        return [self._wrap(*step) for step in self._steps]

    @property
    def calls(self) -> list[RoutedExperts]:
        """`[B,T,L,K]` for each logical forward."""
        return [self._wrap(j.part(0), j.part(1)) for j in self._joined]

    @property
    def routes(self) -> RoutedExperts:
        """Everything, joined along the batch. Raises RoutingError where that is not possible."""
        if not self._joined:
            raise RoutingError(
                "nothing was recorded: no call of the model happened inside the context (a compiled function around "
                "the model, without attach(model) before?)"
            )
        if len(self._joined) == 1:
            return self.calls[0]
        lengths = {j.length for j in self._joined}
        if len(lengths) > 1:
            raise RoutingError(
                f"{len(self._joined)} forwards with different lengths {sorted(lengths)} do not make one batch; "
                "`.calls` has each of them"
            )
        parts = [(j.part(0), j.part(1)) for j in self._joined]
        return self._wrap(torch.cat([p for p, _ in parts]), torch.cat([t for _, t in parts]))


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Recording]:
    """Record which experts every router of `model` chooses for every token, in forward() and generate().

    model: any Mixture-of-Experts model of transformers, bare or wrapped (DDP, FSDP2, PEFT, ...). Outputs are not
        changed by one bit. Inside `replay_routes` or `noisy_routes` the experts that were really used are recorded.
    Yields a Recording; read `.routes` when the calls are done.

    Raises UnsupportedModelError for a model that fails the self-check (run once per model), RoutingError for one that
    was compiled without `attach`, for packed continuous batching, and for a forward in which a router did not run.
    """
    tap, names = _acquire(model)
    recording = Recording(tap, names)
    with _listening(tap, recording):
        yield recording


# -- replaying -------------------------------------------------------------------------------------------------------


class Replay:
    """Forces routes, and counts.

    `.replayed_rows`, `.live_rows`: (token, site) rows of all forwards so far that were forced, at least in part, and
        that were left to the router. `.replayed_fraction` is their ratio; 1 where everything was forced.
    `.shadow`, `.regret`: with `shadow=True`, what the routers would have chosen, and by how much they prefer it.
    """

    def __init__(
        self,
        tap: Tap,
        names: list[str],
        routes: RoutedExperts,
        sites: str | int | Iterable[str | int] | None,
        tokens: Tensor | None,
        slots: int | None,
        shadow: bool,
        check_tokens: bool,
    ) -> None:
        self._tap, self._names = tap, names
        order = _align(routes, names, tap)
        packed = routes.packed.to(tap.boundary.device)
        batch, length, _, k = packed.shape
        sentinel = torch.iinfo(packed.dtype).max
        ids = packed[:, :, order].to(torch.int64) if order != list(range(len(names))) else packed
        self._tokens = routes.tokens.to(packed.device) if routes.tokens is not None and check_tokens else None
        if slots is not None and not 0 < slots <= k:
            raise RoutingError(f"slots must be 1..{k} (experts per token), got {slots}")
        if tokens is not None and (tokens.dtype != torch.bool or tokens.shape != (batch, length)):
            raise RoutingError(
                f"tokens must be a bool mask [B,T] = {(batch, length)}, True where routes are forced; got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
        ids = ids.to(torch.int64)
        ids = ids.masked_fill(ids == sentinel, -1)
        self._holes: Holes = "rows" if routes.has_live else "none"
        if tokens is not None:
            ids = ids.masked_fill(~tokens.to(ids.device)[:, :, None, None], -1)
            self._holes = "rows" if not bool(tokens.all()) else self._holes
        if slots is not None and slots < k:
            ids[..., slots:] = -1
            self._holes = "slots"
        self._ids = ids
        self._chosen = set(range(len(names)) if sites is None else match_sites(names, sites))
        self._shadow = shadow
        self.replayed_rows = 0
        self.live_rows = 0

    def begin(self, call: Call) -> None:
        stop = call.past + call.length
        batch, length = self._ids.shape[:2]
        if call.batch != batch or stop > length or (call.cache is None and stop != length):
            raise RoutingError(
                f"routes for {batch} sequences x {length} tokens do not fit this call of {call.batch} x {call.length} tokens"
                f"{f' after {call.past} cached ones' if call.past else ''}: another batch? Record its routes first, or "
                "use routes.rows(...) and routes.realign(...)"
            )
        ids = self._ids[:, call.past : stop]
        if self._tokens is not None and call.tokens is not None and not torch.compiler.is_compiling():
            self._compare(call, ids, self._tokens[:, call.past : stop])
        per_site = ids.permute(2, 0, 1, 3).reshape(len(self._names), call.rows, -1)
        for index in range(len(self._names)):
            if self._tap.sites[index].fixed:
                continue
            job = call.job(index)
            job.shadow = job.shadow or self._shadow
            if index in self._chosen:
                job.impose(per_site[index], self._holes)

    def _compare(self, call: Call, ids: Tensor, tokens: Tensor) -> None:
        given = call.tokens
        assert given is not None
        wrong = (tokens != given) & (tokens >= 0) & (ids >= 0).flatten(2).any(-1)
        if bool(wrong.any()):
            b, t = wrong.nonzero()[0].tolist()
            raise RoutingError(
                f"these routes were recorded for other tokens: sequence {b}, token {call.past + t} was "
                f"{int(tokens[b, t])} and is now {int(given[b, t])} ({int(wrong.any(1).sum())} of {call.batch} sequences "
                "differ). Another batch, another row order or another padding? (check_tokens=False switches this off)"
            )

    def end(self, call: Call, cache: Any) -> None:
        free = [i for i, site in enumerate(self._tap.sites) if not site.fixed]
        rows = len(free) * call.rows
        forced = 0
        for index in free:
            job = call.jobs[index]
            if index in self._chosen and job is not None and job.forced is not None:
                forced += call.rows if self._holes == "none" else 0
        if self._holes != "none":
            part = self._ids[:, call.past : call.past + call.length, sorted(self._chosen & set(free)), 0]
            forced = int((part >= 0).sum())
        self.replayed_rows += forced
        self.live_rows += rows - forced

    @property
    def replayed_fraction(self) -> float:
        if not self.replayed_rows + self.live_rows:
            raise RoutingError("nothing was replayed: no call of the model happened inside the context")
        return self.replayed_rows / (self.replayed_rows + self.live_rows)


def _align(routes: RoutedExperts, names: list[str], tap: Tap) -> list[int]:
    """For each site of the model, its position in the routes; RoutingError where they are of another model."""
    given = list(routes.sites)
    where = {name: i for i, name in enumerate(given)}
    missing = [name for name in names if name not in where]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        raise RoutingError(
            f"sites do not match: the model has {len(names)}, the routes {len(given)}; "
            + (f"no routes for {missing[0]}; " if missing else "")
            + (f"no site {unknown[0]} in the model; " if unknown else "")
            + "routes of another model?"
        )
    counts = routes.num_experts
    experts = [counts] * len(given) if isinstance(counts, int) else list(counts)
    for name, probe in zip(names, tap.probes, strict=True):
        if experts[where[name]] != probe.num_experts or routes.shape[-1] != probe.k:
            raise RoutingError(
                f"site {name} gives each token {probe.k} of {probe.num_experts} experts; the routes hold "
                f"{routes.shape[-1]} of {experts[where[name]]}: routes of another model?"
            )
    return [where[name] for name in names]


@contextmanager
def replay_routes(
    model: nn.Module,
    routes: RoutedExperts,
    *,
    sites: str | int | Iterable[str | int] | None = None,
    tokens: Tensor | None = None,
    slots: int | None = None,
    shadow: bool = False,
    check_tokens: bool = True,
) -> Iterator[Replay]:
    """Make the routers of `model` choose the given experts; gate weights come from the live scores.

    With live scores s and forced experts e the router continues with (s[e], e) where it would have with top-k of s:
    Routing Replay of arXiv 2507.18071, section 5.3. Everything after the selection is the model's own code, so gates and their
    gradients are exact. Put forward *and* backward inside where you can; with transformers' gradient checkpointing a
    backward after the context is replayed, too.

    routes: for exactly this batch; rows of -1 are left to the router.
    sites, tokens, slots: force only these sites (names, shell patterns or indices), only these tokens (bool [B,T]), only
        the first n slots (the others are the best of the remaining experts).
    shadow: also rank live: `.shadow` and `.regret` of the Replay.
    check_tokens: compare input_ids with those that the routes were recorded for.
    Nested: an inner replay decides where it forces, elsewhere the outer one does.

    Raises RoutingError for routes that do not fit (sites, experts, shape, tokens); UnsupportedModelError as
    `record_routes`.
    """
    tap, names = _acquire(model)
    replay = Replay(tap, names, routes, sites, tokens, slots, shadow, check_tokens)
    with _listening(tap, replay):
        yield replay


@contextmanager
def noisy_routes(model: nn.Module, sigma: float, generator: torch.Generator | None = None) -> Iterator[None]:
    """Selection noise, a stress test: experts are chosen by the top k of `logits + sigma * N(0,1)`.

    Only the choice is noisy: gate weights, gradients and router losses come from the clean logits of the chosen experts.
    It is routing volatility of a dose that can be set, where real volatility has to be waited for; nothing in it is a
    model of how real routers change. A replay, inside or outside, wins where it forces. A recomputation (gradient
    checkpointing) finds the choice of its forward. Routers that are random in train mode (jitter) draw once more.

    sigma: in units of the router's logits. generator: source of the noise; its device may differ from the model's.
    Raises UnsupportedModelError where the logits are not one linear map inside the router.
    """
    if not sigma >= 0:
        raise RoutingError(f"sigma must not be negative, got {sigma}")
    tap, names = _acquire(model)
    for name, site, probe in zip(names, tap.sites, tap.probes, strict=True):
        if probe.logits < 0 and not site.fixed:
            raise UnsupportedModelError(f"site {name} ({type(site.module).__name__}): no linear map makes its logits")
    with _listening(tap, Noise(sigma, generator)):
        yield
