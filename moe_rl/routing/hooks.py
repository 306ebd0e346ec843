"""Hooks on a model's routers, and who listens to them.

One `Tap` per model. Its hooks are on the model while a context is open or the model is attached; nothing of them is
left behind. Listeners (the open contexts) stand in a list, outermost first; each is told when a call of the model
begins and when it ends.
"""

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing.calls import Call
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.selection import Job, Probe, Selection, selection_mode
from moe_rl.routing.sites import Site
from moe_rl.routing.traced import no_type_check


@runtime_checkable
class Listener(Protocol):
    """An open context."""

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call, cache: Any) -> None: ...


def _inert(*_: Any) -> None:
    """What our hooks become in a copy of the model."""


@no_type_check
class _Hook(partial):
    """A hook that is not in a deep copy of its model, and does nothing in a pickle of it."""

    module: nn.Module

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., None]:
        twin = memo.get(id(self.module))  # its hooks are still to come: swept when the whole copy is made
        if twin is not None:
            memo.setdefault(_Sweep, _Sweep()).twins.append(twin)
        return _inert

    def __reduce__(self) -> Any:
        return _same, (_inert,)


class _Sweep:
    """Lives in the memo of a deepcopy; its end is the end of the copying, when inert hooks can be taken off."""

    def __init__(self) -> None:
        self.twins: list[nn.Module] = []

    def __del__(self) -> None:
        for twin in self.twins:
            own = vars(twin)
            for hooks, *flags in _HOOK_TABLES:
                for key in [key for key, hook in own.get(hooks, {}).items() if hook is _inert]:
                    for table in (hooks, *flags):
                        own[table].pop(key, None)


_HOOK_TABLES = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def _same(value: Any) -> Any:
    return value


class _Segments:
    """A checkpoint function whose recomputation, however late, runs under the Call of its forward."""

    def __init__(self, tap: "Tap", original: Callable[..., Any]) -> None:
        self.tap, self.original = tap, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tap, call = self.tap, self.tap.call
        if call is None:
            return self.original(function, *args, **kwargs)

        def segment(*inner: Any, **named: Any) -> Any:
            with tap.resumed(call):
                return function(*inner, **named)

        return self.original(segment, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original

    def __reduce__(self) -> Any:
        return _same, (self.original,)


_CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")  # transformers, torch's checkpoint_wrapper
_CHECKPOINTING = "gradient_checkpointing"
_CHECKPOINT_KEYS = {_CHECKPOINTING, "checkpoint_fn"}


@no_type_check
class Tap:
    """Hooks on one model: the boundary opens and closes a Call, each router asks it what to do."""

    def __init__(self, model: nn.Module, sites: list[Site], boundary: PreTrainedModel) -> None:
        self.root, self.sites, self.boundary = model, sites, boundary
        self.names = [site.name for site in sites]
        self.parameters = list(inspect.signature(self.boundary.forward).parameters)
        self.probes: list[Probe] = []
        self.listeners: list[Listener] = []
        self.users = 0
        self.call: Call | None = None
        self._counted: tuple[Any, int] = (None, 0)  # a weak reference to the last cache, and how far it went
        self._modes: dict[int, Selection] = {}  # entered and not left, by site
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, str]] = []
        self._checkpointed = [
            m for m in boundary.modules() if hasattr(type(m), _CHECKPOINTING) or vars(m).keys() & _CHECKPOINT_KEYS
        ]
        self._segments = 0

    # -- hooks --------------------------------------------------------------------------------------------------------

    def hook(self) -> None:
        if self._handles:
            return
        self._add(self.boundary, self.before_model, self.after_model)
        for index in range(len(self.sites)):
            for module in self.scope(index):
                self._add(module, self.before_site, self.after_site, index)
        self.wrap_checkpoints()

    def _add(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None], *first: int) -> None:
        enter, leave = _Hook(before, *first), _Hook(after, *first)
        enter.module = leave.module = module
        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, name in self._wrapped:
            own = module.__dict__.get(name)
            if isinstance(own, _Segments):
                setattr(module, name, own.original)
        self._wrapped.clear()
        self._counted = (None, 0)

    def abandon(self) -> None:
        """Leave modes that a KeyboardInterrupt left open (torch runs no hook then), and forget the call."""
        while self._modes:
            self._modes.popitem()[1].__exit__(None, None, None)
        self.call = None

    def scope(self, index: int) -> tuple[nn.Module, ...]:
        """The modules in which the selection of a site happens: the router, or a holder of it (DBRX)."""
        depth = self.probes[index].depth if self.probes else 0
        return self.sites[index].modules if depth == 0 else (self.sites[index].parents[depth - 1],)

    def wrap_checkpoints(self) -> None:
        for module in self._checkpointed:
            for name in _CHECKPOINT_ATTRIBUTES:
                own = vars(module).get(name)
                if callable(own) and not isinstance(own, _Segments):
                    setattr(module, name, _Segments(self, own))
                    self._wrapped.append((module, name))

    @contextmanager
    def resumed(self, call: Call) -> Iterator[None]:
        """Run a segment of `call` again (or for the first time), with hooks even after the context was left."""
        before, hooked = self.call, bool(self._handles)
        self.hook()
        self.call = call
        self._segments += 1
        try:
            yield
        finally:
            self._segments -= 1
            self.call = before
            if not hooked:
                self.unhook()

    # -- one call -----------------------------------------------------------------------------------------------------

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listeners:
            return
        if self._modes:
            self.abandon()  # a call that was interrupted, inside this very context
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self.wrap_checkpoints()  # gradient checkpointing may have been switched on since
            if _may_recompute():
                _refuse_checkpoint_by_hand(type(module).__name__)
        inputs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        call = Call(inputs, len(self.sites))
        if call.past < 0:
            cache, length = self._counted
            call.past = length if cache is not None and cache() is call.cache else 0
        for listener in self.listeners:
            listener.begin(call)
        if call.capture:
            for index, probe in enumerate(self.probes):
                if probe.output is None:  # only the mode sees what is selected here
                    call.job(index)
        self.call = call

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, self.call = self.call, None
        if call is None or output is None:  # not listening, or the forward raised
            return
        call.close(self.names)
        cache = call.cache if call.cache is not None else getattr(output, "past_key_values", None)
        for listener in self.listeners:
            listener.end(call, cache)
        self._counted = (weakref.ref(cache) if cache is not None else None, call.past + call.length)
        call.forget()

    def before_site(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.call
        if call is None:
            if self.listeners:
                raise RoutingError(
                    f"site {self.names[index]} ran outside a call of {type(self.boundary).__name__}: part of the model "
                    "was called by itself, or recomputed by a checkpoint that was set by hand (use "
                    "model.gradient_checkpointing_enable(), which replay follows)"
                )
            return
        if call.open:
            if call.fired[index]:
                raise RoutingError(
                    f"site {self.names[index]} ran twice in one forward: one router that "
                    "several layers share cannot be told apart"
                )
            if call.grad and not self._segments and not torch.compiler.is_compiling() and _may_recompute():
                _refuse_checkpoint_by_hand(self.names[index])
        if call.disturb is not None and not call.disturbed[index] and not self.sites[index].fixed:
            call.disturbed[index] = True  # a recomputation finds the noisy choice in its job
            ids = call.disturb(self.names[index], self.probes[index], module, args, kwargs)
            call.job(index).underlay(ids)
        job = call.jobs[index]
        if job is not None:
            mode = selection_mode(self.names[index], self.probes[index], job, module.training)
            mode.__enter__()
            self._modes[index] = mode

    def after_site(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode = self._modes.pop(index, None) if self._modes else None
        if mode is not None:
            mode.__exit__(None, None, None)
        call = self.call
        if call is None or output is None or not call.open:
            return
        call.fired[index] = True
        if call.capture:
            call.chosen[index] = self.read(index, call.jobs[index], output)

    def read(self, index: int, job: Job | None, output: Any) -> Tensor:
        probe = self.probes[index]
        ids = job.chosen if job is not None else output[probe.output] if probe.output is not None else None
        if ids is None:
            raise RoutingError(f"site {self.names[index]} made no selection in this forward")
        return ids if ids.ndim == 2 and ids.shape[1] == probe.k else ids.reshape(-1, probe.k)


_CHECKPOINT_FILES = (
    os.path.join("torch", "utils", "checkpoint.py"),
    os.path.join("activation_checkpointing", "checkpointing.py"),
)


_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_forward_gradients = torch._C._is_fwd_grad_enabled


@no_type_check
def _may_recompute() -> bool:
    """Cheap sign of a checkpoint set by hand: saved-tensor hooks, or the inside of an autograd function, which unlike
    plain `no_grad` also has forward-mode gradients off."""
    return _saved_tensor_hooks(True) is not None or not _forward_gradients()


def _refuse_checkpoint_by_hand(where: str) -> None:
    """torch.utils.checkpoint around the model or a layer, not through transformers: it recomputes out of reach."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT_FILES):
            raise RoutingError(
                f"{where} runs inside torch.utils.checkpoint that was set up by hand: its recomputation in the "
                "backward pass cannot be told which routes its forward had. Use "
                "model.gradient_checkpointing_enable() or torch's checkpoint_wrapper, which are followed"
            )
        frame = frame.f_back
