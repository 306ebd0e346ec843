"""Contexts that change or watch the live choice: selection noise, predicted routes, a selection bias, margins, logits.

All but the bias run a router once more, on copies and without gradients, before its real run, and then have the real
run choose the same experts. A bias is added where a router ranks its experts.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from moe_rl.routing.calls import Call, Listener, device_of
from moe_rl.routing.contexts import acquire
from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.hooks import Tap
from moe_rl.routing.partial import completed
from moe_rl.routing.router_stats import boundary_margin
from moe_rl.routing.selection import MAX, TOPK, Job, Selection, Selector
from moe_rl.routing.sequential_max import WithLogits


class _Run(NamedTuple):
    """A router that is about to run: its index among the sites, name, Selector, module, arguments, selection bias."""

    site: int
    name: str
    probe: Selector
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bias: Tensor | None

    def choice(self, watch: TorchFunctionMode) -> Tensor:
        """Return the `[N,K]` ids that the router chooses while the mode `watch` is on."""
        job = Job(bias=self.bias)
        mode = (self.probe.mode or Selection)(self.name, self.probe, job)
        if not is_dynamo_compiling():
            mode.report = partial(_end, job)  # type: ignore[method-assign]  # for this mode only
        copies = [a.clone() if isinstance(a, Tensor) else a for a in self.args]  # some scale their input in place
        with torch.no_grad(), _unseen(), suppress(_Chosen), mode, watch:
            self.module.forward(*copies, **self.kwargs)
        if job.chosen is None:
            raise RoutingError(f"site {self.name} ranked no experts in this forward")
        if isinstance(watch, WithLogits):
            watch.check(self.name)
        return job.chosen


class _Chosen(Exception):
    """Exception that ends the extra run of a router when the choice is made."""


def _end(job: Job, ids: Tensor, *_: Any) -> None:
    """Store the choice and end the run, in place of `Selection.report`. Nothing behind the choice runs (in DBRX's
    block, the experts)."""
    job.chosen = ids.reshape(-1, ids.shape[-1])
    raise _Chosen


@contextmanager
def _unseen() -> Iterator[None]:
    """Context manager: keep the extra run out of what transformers collects of a forward (`output_router_logits`). If a
    whole block is run again (DBRX), so is the router in it."""
    if is_dynamo_compiling():
        yield
        return
    from transformers.utils.output_capturing import _active_collector  # imported here: private to transformers

    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)


class Rerun(Listener):
    """Base class of contexts that run each router once more before its real run, and force the same choice there."""

    def begin(self, call: Call) -> None:
        call.disturb = self._once

    def _once(self, call: Call, tap: Tap, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a router once more, and force the experts of that run on the real run."""
        if not call.open:  # a recomputation, which finds the choice in its job
            return
        job = call.job(index)
        call.open = False  # ids at experts of a block that is run again are not those of the call
        ids = self.choose(_Run(index, tap.names[index], tap.checked(index, module), module, args, kwargs, job.bias))
        call.open = True
        if job.forced is not None:  # any replay has precedence
            ids = job.forced if job.holes == "none" else completed(job.forced, ids)
        job.forced, job.holes = ids, "none"

    def choose(self, run: _Run) -> Tensor:
        """Return the `[N,K]` ids that the router is to choose."""
        raise NotImplementedError


class Moved(Rerun):
    """A rerun that makes each router choose what it would choose if `move` were added to its logits.

    move: (index of the site, the router's input, its logits) -> what is added, fp32.
    """

    def __init__(self, move: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        self.move = move

    def choose(self, run: _Run) -> Tensor:
        def moved(states: Tensor, logits: Tensor) -> Tensor:
            # At least float32 from here on: in bfloat16 a small move would be rounded away.
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return wide + self.move(run.site, states, logits).to(wide.device)

        return run.choice(WithLogits(run.probe, moved))


class Bias(Listener):
    """A context that adds a bias `[L,E]` to the scores that routers rank; experts: number of experts of each site."""

    def __init__(self, bias: Tensor, experts: list[int]) -> None:
        self.bias, self.experts = bias, experts

    def begin(self, call: Call) -> None:
        now = self.bias.clone()  # a recomputation ranks with the bias of its forward
        for index, count in enumerate(self.experts):
            job, bias = call.job(index), now[index, :count]
            job.bias = bias if job.bias is None else job.bias + bias.to(job.bias)


class _Watch(TorchFunctionMode):
    """Mode that keeps the scores that a router ranks."""

    def __init__(self, probe: Selector) -> None:
        super().__init__()
        self.probe, self.calls = probe, 0
        self.scores: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (MAX if self.probe.by_max else TOPK):
            if self.calls == (0 if self.probe.by_max else self.probe.selection):
                self.scores = (args[0] if args else kwargs["input"]).detach()
            self.calls += 1
        return func(*args, **(kwargs or {}))


class Reading(Rerun):
    """Base class of reruns that read numbers of every token at every site, `[N,...]` of each site."""

    def __init__(self, sites: int) -> None:
        self._sites = sites
        self._now: list[Tensor | None] = []  # of the call that is under way
        self._calls: list[tuple[int, int, list[Tensor | None]]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(calls: {len(self._calls)}; sites: {self._sites})"

    def begin(self, call: Call) -> None:
        super().begin(call)
        self._now = [None] * self._sites

    def end(self, call: Call) -> None:
        self._calls.append((call.batch, call.length, self._now))

    @property
    def values(self) -> Float[Tensor, "B T L ..."]:
        """What was read, float32 or wider; NaN at sites without a choice; calls of one length joined along the batch.
        Raises RoutingError for calls of several lengths, as those of generate() are, and for sites of several
        widths."""
        if not self._calls:
            raise RoutingError("nothing was read: no call of the model happened inside the context")
        lengths = sorted({length for _, length, _ in self._calls})
        if len(lengths) > 1:
            raise RoutingError(
                f"calls of different lengths {lengths} do not make one batch: open one context for each length"
            )
        parts = []
        for batch, length, rows in self._calls:
            read = [row for row in rows if row is not None] or [
                torch.empty(batch * length, dtype=torch.float32, device="cpu")
            ]
            if len(shapes := {row.shape[1:] for row in read}) > 1:
                raise RoutingError(f"sites of different widths do not make one tensor: {sorted(map(list, shapes))}")
            none = torch.full_like(read[0], float("nan"))
            one = torch.stack([none if row is None else row for row in rows], 1)
            parts.append(one.view(batch, length, *one.shape[1:]))
        return torch.cat(parts)


class Margins(Reading):
    """Recorded margins of the choices of every router: `.values` `[B,T,L]`, float32, on the CPU."""

    def choose(self, run: _Run) -> Tensor:
        k, experts = run.probe.k, run.probe.num_experts
        watch = _Watch(run.probe)
        ids = run.choice(watch)
        assert watch.scores is not None  # a choice was made
        scores = watch.scores.reshape(-1, experts)
        scores = scores if run.bias is None else scores + run.bias.to(scores.device)
        never = torch.full((len(scores),), float("inf"), device=scores.device)
        margin = boundary_margin(scores.float(), k) if k < experts else never
        self._now[run.site] = margin.cpu()
        return ids


class RouterLogits(Reading):
    """Recorded input and logits of every router: `.inputs` `[B,T,L,H]`, `.logits` `[B,T,L,E]`. Detached, float32 or
    wider."""

    def choose(self, run: _Run) -> Tensor:
        def seen(states: Tensor, logits: Tensor) -> Tensor:
            both = [x.detach().reshape(-1, x.shape[-1]) for x in (states, logits)]
            wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in both]
            self.width = wide[0].shape[-1]
            self._now[run.site] = torch.cat(wide, -1)
            return logits

        return run.choice(WithLogits(run.probe, seen))

    @property
    def inputs(self) -> Float[Tensor, "B T L H"]:
        return self.values[..., : self.width]

    @property
    def logits(self) -> Float[Tensor, "B T L E"]:
        return self.values[..., self.width :]


# -- the contexts ------------------------------------------------------------------------------------------------------


@contextmanager
def noisy_routes(model: nn.Module, sigma: float, generator: torch.Generator | None = None) -> Iterator[None]:
    """Context manager: choose experts by the top k of `logits + sigma * N(0,1)`. Selection noise, a stress test.

    Only the choice is noisy: gate weights, gradients and router losses come from the clean logits of the chosen
    experts. The strength of this routing volatility can be set, while real volatility has to be waited for; the noise
    is no model of how real routers change. A replay, inside or outside, wins where it forces. A recomputation (gradient
    checkpointing) finds the choice of its forward. Routers that are random in train mode (jitter) draw twice.

    sigma: in units of the router's logits. generator: source of the noise; its device may differ from the model's.
    Under autocast a router may rank scores that bfloat16 rounds, which these contexts do not: near-ties may then be
    decided otherwise, at sigma 0 too.
    Raises UnsupportedModelError where no one linear map in the router has the logits (an adapter on it adds a second);
    RoutingError for a negative or infinite sigma, inside another of `noisy_routes`, `predicted_routes`,
    `record_margins` and `record_router_logits`, and where adapters in a router were switched since it was opened.
    """
    number = isinstance(sigma, Real) or (isinstance(sigma, Tensor) and sigma.numel() == 1)
    if not number or not 0 <= sigma < math.inf:  # infinite logits have no softmax
        raise RoutingError(f"sigma must be a finite number of at least 0, got {sigma!r}")
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise RoutingError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")

    def noise(site: int, states: Tensor, logits: Tensor) -> Tensor:
        device = generator.device if generator is not None else logits.device
        return sigma * torch.randn(logits.shape, generator=generator, device=device, dtype=torch.float32)

    tap, _ = _with_logits(model)
    with tap.listen(Moved(noise)):
        yield


@contextmanager
def predicted_routes(model: nn.Module, weights: Float[Tensor, "L E H"]) -> Iterator[None]:
    """Context manager: choose experts by the top k of what the router makes of `logits + W h`, h the router's input.

    These are the routes of a predictor of where the router will have moved to (PR², arXiv 2606.00395). Gate weights,
    gradients and router losses come from the logits alone. A replay wins where it forces.

    weights: W of every site, in order. They may be changed in place between calls.
    Raises RoutingError for another shape, NaN or infinity, and inside the contexts in which `noisy_routes` raises it;
    UnsupportedModelError as `noisy_routes`.
    """
    tap, names = _with_logits(model)
    _refuse_no_reals(weights, "weights")
    if weights.ndim != 3 or len(weights) != len(names):
        raise RoutingError(f"weights must be [L,E,H] of {len(names)} sites, got {list(weights.shape)}")
    if broken := int((~weights.isfinite()).sum()):  # one such logit decides every choice
        raise RoutingError(f"weights: {broken} of {weights.numel()} are not finite. Did their training diverge?")

    def prediction(site: int, states: Tensor, logits: Tensor) -> Tensor:
        own, needed = weights[site], [logits.shape[-1], states.shape[-1]]
        if list(own.shape) != needed:
            raise RoutingError(f"site {names[site]}: weights must be [E,H] = {needed}, got {list(own.shape)}")
        with torch.autocast(states.device.type, enabled=False):  # it would round a small move away
            return nn.functional.linear(states.to(own.dtype), own.detach())

    with tap.listen(Moved(prediction)):
        yield


@contextmanager
def record_router_logits(model: nn.Module) -> Iterator[RouterLogits]:
    """Context manager: record the `.inputs` `[B,T,L,H]` and the `.logits` `[B,T,L,E]` of every router, in all calls,
    detached. Outputs are not changed, unless a router draws (Phi-MoE in train mode), which then draws twice. Inside a
    replay the logits are those of the hidden states that follow it. Raises as `record_margins` and `noisy_routes`."""
    tap, _ = _with_logits(model)
    reading = RouterLogits(len(tap.sites))
    with tap.listen(reading):
        yield reading


def _with_logits(model: nn.Module) -> tuple[Tap, list[str]]:
    """Return `acquire(model)`. Raises as `noisy_routes` does of routers without logits and inside another context."""
    tap, names = acquire(model, adapters=True)
    for name, site, probe in zip(names, tap.sites, tap.probes, strict=True):
        if not probe.maps and not site.fixed:
            raise UnsupportedModelError(f"site {name} ({type(site.module).__name__}): no one linear map has its logits")
    _refuse_second(tap)
    return tap, names


@contextmanager
def biased_routes(model: nn.Module, bias: Float[Tensor, "L E"] | None = None) -> Iterator[Float[Tensor, "L E"]]:
    """Context manager: choose experts by the top k of `scores + bias`; gates and gradients come from the scores alone.

    This is the selection bias of DeepSeek-V3 (arXiv 2412.19437, eq. 16; arXiv 2408.15664), for models that have none.
    It is added to the bias of a model that has one, and to that of another `biased_routes` around. A replay wins where
    it forces; noise and margins see the bias. The bias acts only inside the context: to train under it, sample and
    score inside, too.

    bias: of every site, in order, and expert, in units of what the router ranks (see `record_margins`); where sites
        differ in the number of experts, further columns are ignored. None: zeros.
    Yields the bias, which may be changed in place between calls, before their backward too: a recomputation (gradient
        checkpointing) ranks with the bias of its forward.
    Raises RoutingError for another shape, or NaN; UnsupportedModelError where the experts are not one top k of all
    scores (groups of experts, hash routing, Phi-MoE), and as `record_routes`.
    """
    tap, names = acquire(model)
    experts = [probe.num_experts for probe in tap.probes]
    if bias is None:
        bias = torch.zeros(len(names), max(experts), device=device_of(tap.boundary))
    _refuse_no_reals(bias, "bias")
    if bias.shape != (len(names), max(experts)):
        raise RoutingError(f"bias must be [L,E] = {[len(names), max(experts)]}, got {list(bias.shape)}")
    if nan := bias.isnan().nonzero().tolist():  # NaN would decide every choice; -inf leaves an expert out
        site, expert = nan[0]
        raise RoutingError(f"bias of site {names[site]}, expert {expert} is NaN (one of {len(nan)})")
    for name, site, probe in zip(names, tap.sites, tap.probes, strict=True):
        if site.fixed or probe.by_max or probe.calls != 1:
            raise UnsupportedModelError(
                f"site {name} ({type(site.module).__name__}): its experts are not one top k of all scores, so that a "
                "bias on the last choice would not be a bias on the selection. Families that limit a token to groups "
                "of experts have a bias of their own (e_score_correction_bias)"
            )
    with tap.listen(Bias(bias, experts)):
        yield bias


def _refuse_no_reals(given: Any, name: str) -> None:
    """Raise RoutingError unless `given` is a tensor of real numbers, on a device that holds them."""
    if not isinstance(given, Tensor):
        raise RoutingError(f"{name} must be a tensor, got {type(given).__name__}; of lists and arrays: torch.as_tensor")
    if given.is_complex() or given.dtype == torch.bool or given.is_meta or given.is_sparse:
        got = f"{given.dtype}, {given.layout} on {given.device}"
        raise RoutingError(f"{name} must be a dense tensor of real numbers, got {got}")


def _refuse_second(tap: Tap) -> None:
    """Raise RoutingError if a context that runs routers once more is open on this model already."""
    if any(isinstance(listener, Rerun) for listener in tap.listeners):
        raise RoutingError(
            "noisy_routes, predicted_routes, record_margins or record_router_logits is open on this model already: "
            "each has a router choose again what it chose in a run of its own, so that of two only one would act. "
            "Leave that context first"
        )


@contextmanager
def record_margins(model: nn.Module) -> Iterator[Margins]:
    """Context manager: record in `.values` `[B,T,L]` the `boundary_margin` s_(k) - s_(k+1) of what every router ranks.

    Margins are in units of the scores: probabilities if softmax comes before the selection, as in Qwen3-MoE, OLMoE and
    Mixtral; logits if softmax comes after, as in Granite; with the selection bias if there is one. They are infinite if
    all experts are taken. A change of scores below half the margin cannot change the choice, except in routers that
    first choose groups of experts (DeepSeek-V3): there it is the margin within the groups that are open, a smaller
    change can open another group, and a warning says so.

    Outputs are not changed, unless a router draws (Phi-MoE in train mode), which then draws twice. Inside a replay the
    margin is that of the live choice. Raises as `record_routes`; RoutingError in contexts where `noisy_routes` does.
    """
    tap, names = acquire(model)
    _refuse_second(tap)
    if grouped := [name for name, probe in zip(names, tap.probes, strict=True) if probe.grouped]:
        warnings.warn(
            f"site {grouped[0]} (one of {len(grouped)}) first chooses groups of experts: its margin is that within the "
            "groups that are open, and a change of scores below half of it can still open another group",
            stacklevel=3,
        )
    margins = Margins(len(tap.sites))
    with tap.listen(margins):
        yield margins
