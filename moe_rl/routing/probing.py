"""Probe forwards of a few tokens through a model, which show what its routers do; for the self-check only."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from moe_rl.routing.calls import Call, Listener, device_of
from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.hooks import Tap
from moe_rl.routing.selection import FILL, LINEAR, MAX, TOPK, Job

_SEEDED = ContextVar("seeded", default=False)  # whether `forward` seeds the random numbers
_ONE_AT_A_TIME = threading.RLock()  # held while the state of the process is read or changed


def refused(tap: Tap, index: int, why: str) -> UnsupportedModelError:
    """Return the error that a site of the model cannot be intercepted, with the reason."""
    site = tap.sites[index]
    return UnsupportedModelError(
        f"{type(tap.boundary).__name__}, site {site.name} ({type(site.module).__name__}): {why}"
    )


@dataclass
class Seen:
    """Record of what one site did in one forward. ranked: for each topk, the number of experts, k, the ids, and how
    many linear maps came before."""

    ranked: list[tuple[int, int, Tensor, int]] = field(default_factory=list)
    maxima: int = 0
    linear: list[int] = field(default_factory=list)  # output widths of linear maps
    masked: list[int] = field(default_factory=list)  # widths of the tensors that were masked
    output: tuple[Any, ...] = ()
    arrived: list[tuple[str, dict[int | str, Any]]] = field(default_factory=list)  # calls of modules beside it
    ran: int = 0

    @property
    def arguments(self) -> list[Any]:
        return [value for _, arguments in self.arrived for value in arguments.values()]

    def arrival_of(self, ids: Tensor) -> tuple[str, int | str] | None:
        """Return the name of the module beside the router that is called once with just these ids, and which argument
        they are; None if there is no such module."""
        names = [name for name, _ in self.arrived]
        for name, arguments in self.arrived:
            for place, value in arguments.items():
                if (
                    names.count(name) == 1
                    and isinstance(value, Tensor)
                    and not value.is_floating_point()
                    and value.numel() == ids.numel()
                    and torch.equal(value.reshape(ids.shape), ids.to(value.dtype))
                ):
                    return name, place
        return None


class _Watch(TorchFunctionMode):
    """Mode that notes in `seen` which operations a router performs."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in TOPK:
            scores = args[0] if args else kwargs["input"]
            self.seen.ranked.append((scores.shape[-1], out[1].shape[-1], out[1].detach(), len(self.seen.linear)))
        elif func in LINEAR and isinstance(out, Tensor) and out.ndim:
            self.seen.linear.append(out.shape[-1])
        elif func in FILL:
            self.seen.masked.append(args[0].shape[-1])
        elif func in MAX and kwargs and "dim" in kwargs:
            self.seen.maxima += 1
        return out


class _Force(Listener):
    """A listener that forces given ids, `[N,K]` per site."""

    def __init__(self, tap: Tap, forced: list[Tensor]) -> None:
        self.tap, self.forced = tap, forced
        self.used: list[Tensor | None] | None = None

    def begin(self, call: Call) -> None:
        for index, (site, ids) in enumerate(zip(self.tap.sites, self.forced, strict=True)):
            if not site.fixed:
                call.jobs[index] = Job(ids)

    def end(self, call: Call) -> None:
        self.used = call.chosen


def forced_forward(tap: Tap, forced: list[Tensor], batch: int, length: int) -> tuple[Tensor, list[Tensor | None]]:
    """Return the output under forced routes, and the ids that each site used."""
    listener = _Force(tap, forced)
    with tap.listen(listener):
        out = forward(tap, batch, length)
    if listener.used is None:
        raise UnsupportedModelError(f"{type(tap.boundary).__name__} was not called by {type(tap.root).__name__}")
    return out, listener.used


def forward(tap: Tap, batch: int, length: int) -> Tensor:
    """Return the output of the outermost model for a few fixed tokens. The model is called as the user calls it, so
    that FSDP and DDP see the call."""
    model = tap.root
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
        model = inner
    table = tap.boundary.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    vocabulary = int(table.shape[0])
    ids = (torch.arange(batch * length, device=device_of(tap.boundary)) * 7 + 1) % vocabulary
    if _SEEDED.get():
        torch.manual_seed(0)
    try:
        try:
            out = model(input_ids=ids.reshape(batch, length))
        except TypeError:  # a module around the model with a forward of its own
            outermost = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
            if outermost is model:
                raise
            out = outermost(input_ids=ids.reshape(batch, length))
    except RoutingError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"the self-check could not run {type(model).__name__} on {batch} x {length} token ids: "
            f"{type(error).__name__}: {error}"
            + ("" if tap.boundary is model else f" (does a context on the {type(tap.boundary).__name__} in it work?)")
        ) from error
    logits = getattr(out, "logits", None)
    return (logits if logits is not None else out[0]).detach()


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors that are plain attributes of a module."""
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)}


@contextmanager
def quiet(tap: Tap) -> Iterator[None]:
    """Context manager: nothing is proven, compiled or differentiated; afterwards buffers and numbers are restored."""
    model, tap.examining = tap.boundary, True
    outer, tap.listeners = (tap.listeners, tap.lost, tap.left), []  # a context may be open already
    held = [(module, dict(module._buffers), _numbers(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)  # what follows is of the whole process
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # layers that were compiled on their own would not show what they do
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            tap.examining, (tap.listeners, tap.lost, tap.left) = False, outer
            for module, own, numbers in held:  # a dynamic rotary embedding makes new ones, for the length of a text
                module._buffers.update(own)
                vars(module).update(numbers)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def alike(tap: Tap, batch: int, length: int) -> Iterator[Tensor]:
    """Context manager: every forward draws the same random numbers; afterwards the random states are restored. Yields
    the output of such a forward.

    The random states belong to the whole process: if a forward draws nothing, they are left alone, because another
    thread may draw.
    """
    devices = sorted({p.device.index or 0 for p in tap.boundary.parameters() if p.device.type == "cuda"})
    with _ONE_AT_A_TIME:
        own, others = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        plain = forward(tap, batch, length)
        if draws := not torch.equal(forward(tap, batch, length).nan_to_num(), plain.nan_to_num()):
            torch.set_rng_state(own)
            for device, state in zip(devices, others, strict=True):
                torch.cuda.set_rng_state(state, device)
            token = _SEEDED.set(True)
            try:
                with torch.random.fork_rng(devices=devices):
                    yield forward(tap, batch, length)
            finally:
                _SEEDED.reset(token)
    if not draws:
        yield plain


@contextmanager
def around(tap: Tap, depths: list[int], mode: Callable[[int], TorchFunctionMode]) -> Iterator[None]:
    """Context manager: every router runs under a mode of its own."""
    modes: list[TorchFunctionMode] = []

    def enter(index: int) -> None:
        modes.append(mode(index))
        modes[-1].__enter__()

    def leave(*_: Any) -> None:
        modes.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for index, depth in enumerate(depths):
            for module in scope_of(tap, index, depth):
                before = module.register_forward_pre_hook(lambda m, a, i=index: enter(i))
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def watch(tap: Tap, depths: list[int], batch: int, length: int) -> list[Seen]:
    """Run one forward, and return what each site did in it."""
    with evidence(tap, depths) as seen, around(tap, depths, lambda index: _Watch(seen[index])):
        forward(tap, batch, length)
    return seen


def scope_of(tap: Tap, index: int, depth: int) -> tuple[nn.Module, ...]:
    """Return the modules in which a site selects. Raises UnsupportedModelError if no module selects for this site
    alone."""
    site = tap.sites[index]
    if depth > len(site.parents):
        raise refused(tap, index, "selects experts without torch.topk, in a way that is not known")
    inside = {m for module in tap.scope(index, depth) for m in module.modules()} if depth else set()
    if any(m in inside for i, other in enumerate(tap.sites) if i != index for m in other.modules):
        raise refused(tap, index, "makes no selection of its own, and the module around it holds several routers")
    return tap.scope(index, depth)


@contextmanager
def evidence(tap: Tap, depths: list[int] | None = None) -> Iterator[list[Seen]]:
    """Context manager: collect what the routers return, and what the modules beside them are called with."""
    depths = depths or [p.depth for p in tap.probes]
    seen = [Seen() for _ in tap.sites]
    with ExitStack() as stack:
        for index, (site, depth, found) in enumerate(zip(tap.sites, depths, seen, strict=True)):
            for module in scope_of(tap, index, depth):
                stack.callback(module.register_forward_hook(partial(_returned, found)).remove)
            for name, module in site.parents[0].named_children() if site.parents else ():
                if module not in site.modules:
                    called = partial(_called, found, name)
                    stack.callback(module.register_forward_pre_hook(called, with_kwargs=True).remove)
        yield seen


def _returned(found: Seen, module: nn.Module, args: Any, output: Any) -> None:
    found.ran += 1
    found.output = tuple(output) if isinstance(output, tuple | list) else (output,)


def _called(found: Seen, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    found.arrived.append((name, {**dict(enumerate(args)), **kwargs}))
