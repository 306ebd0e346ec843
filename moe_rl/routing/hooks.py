"""Hooks on a model's routers, which inform the open contexts (listeners) and force their routes.

There is one `Tap` per model. Its hooks are on the model while a context is open or the model is attached, and leave
nothing behind. Listeners are kept in a list, outermost first; each is told when a call of the model begins and when it
ends. Per site there are three hooks: before the router (enter the mode that answers its selection), after the router
(leave the mode), and before the experts (read the ids that reach them: what is recorded, and the proof that what was
forced was used). If all contexts only read, and the ids reach the experts unchanged, the last hook is enough.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling as compiling  # half the cost of is_compiling
from transformers import PreTrainedModel

from moe_rl.routing import refusals
from moe_rl.routing.calls import Call, Listener, Routers, cache_left, device_of
from moe_rl.routing.checkpoints import CHECKPOINT_FUNCTIONS, SWITCH, Segments, refuse, same, traced_by_hand
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.evidence import kept_slots
from moe_rl.routing.kv_cache import CacheState
from moe_rl.routing.selection import Selection, Selector, beneath, stack
from moe_rl.routing.sites import Site
from moe_rl.routing.traced import no_type_check


def _inert(*_: Any) -> None:
    """Do nothing: what replaces our hooks in a copy of the model."""


@no_type_check
class _Hook(partial):
    """A hook that does nothing in a deep or pickled copy of its model, because the copy gets hooks of its own."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> Any:
        return same, (_inert,)


@cache
def _parameters(forward: Callable[..., Any]) -> list[str]:
    """Return the argument names of a class's method, in order; cached, because each context may make a `Tap`."""
    return list(inspect.signature(forward).parameters)[1:]


@no_type_check
class Tap:
    """The hooks on one model: those on the boundary open and close a Call, those on a router carry out its Job."""

    def __init__(self, model: nn.Module, sites: list[Site], boundary: PreTrainedModel) -> None:
        self.root, self.sites, self.boundary = model, sites, boundary
        self.selecting: list[nn.Module] = []  # the routers, their blocks and experts
        self.modules: list[nn.Module] = []  # all modules of the root
        self.names = [site.name for site in sites]
        own = vars(boundary).get("forward")  # replaces the class's; not cached: it may hold the model
        self.parameters = list(inspect.signature(own).parameters) if own else _parameters(type(boundary).forward)
        self.probes: list[Selector] = []  # what the self-check learned last
        self.modes: dict[tuple[bool, int], Selector] = {}  # selectors by train mode and site
        self.examining = False  # the self-check is under way, and judges for itself
        self.listeners: list[Listener] = []
        self.thread = 0  # the thread that opened the contexts
        self.users = 0  # number of open contexts and attachments
        self.call: Call | None = None
        self.left: list[CacheState] = []  # state of each KV cache after the last call on it, newest first
        self._entered: dict[int, Selection] = {}  # modes that are on, by site
        self._looked: set[int] = set()  # sites without `arrival` whose output was looked at in this context
        self.words: Tensor | None = None  # input_ids of the outer model's call, if there is one (`whole`)
        self.lost: Any = None  # [L]: number of rows forced and not used; None if nothing is forced
        self._handles: list[Any] = []
        self._readers: list[tuple[Any, int]] = []  # pre-hooks of the experts and routers, and the id of ours
        self._with_router: set[int] = set()  # sites whose routers have hooks
        self._steered = False  # all routers have hooks, not only those that alone show the ids
        self.resumed: dict[int, Call] = {}  # by thread: the Call of the checkpointed segment that the thread runs
        self.segments: dict[int, Any] = {}  # by thread: Python frame of that segment
        self._checkpointed: list[nn.Module] = []  # the modules that have, or may get, a checkpoint function
        self._followed: list[tuple[nn.Module, str]] = []  # replaced checkpoint functions

    # -- hooks --------------------------------------------------------------------------------------------------------

    def hook(self, steer: bool = True) -> bool:
        """Put on missing hooks; with `steer` also those on all routers. Return whether there were none before."""
        if new := not self._handles:
            if (whole := self.whole()) is not None:
                self._add(whole, self.before_whole, self.after_whole)
            self._add(self.boundary, self.before_model, self.after_model)
            for index in range(len(self.sites)):
                experts = self.experts(index)
                if experts is None:
                    self._add_router(index)
                else:
                    self._read(experts, self.before_experts, index)
            self._checkpointed = [
                module
                for module in self.modules
                if hasattr(type(module), SWITCH) or SWITCH in (own := module.__dict__) or "checkpoint_fn" in own
            ]
        self.follow()  # gradient checkpointing may have been switched on since the hooks were put on
        if steer and not self._steered:
            self._steered = True
            for index in range(len(self.sites)):
                if index not in self._with_router:  # in a new self-check every router has hooks already
                    self._add_router(index)
        self.read_last()
        return new

    def read_last(self) -> None:
        """Move our pre-hooks behind those that were added later: these may change ids, or what a router is given."""
        for hooks, own in self._readers:
            if next(reversed(hooks), own) != own and own in hooks:
                hooks.move_to_end(own)

    def _add_router(self, index: int) -> None:
        self._with_router.add(index)
        for module in self.scope(index):
            self._read(module, self.before_site, index)
            self._handles.append(module.register_forward_hook(_Hook(self.after_site, index), always_call=True))

    def _read(self, module: nn.Module, before: Callable[..., None], index: int) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(before, index), with_kwargs=True))
        self._readers.append((module._forward_pre_hooks, self._handles[-1].id))

    def _add(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(_Hook(after), always_call=True))

    def follow(self) -> None:
        """Replace the checkpoint functions that are not followed yet by `Segments`."""
        for module in self._checkpointed:
            for name in CHECKPOINT_FUNCTIONS:
                own = vars(module).get(name)
                if callable(own) and not (isinstance(own, Segments) and own.tap is self):
                    setattr(module, name, Segments(self, own))
                    self._followed.append((module, name))

    def whole(self) -> PreTrainedModel | None:
        """Return the outermost model of which `boundary` is the language part, or None. This model alone is given the
        tokens; it may call the boundary with embeddings of text and images."""
        others = (m for m in self.modules if isinstance(m, PreTrainedModel) and m.config is not self.boundary.config)
        return next((m for m in others if any(part is self.boundary for part in m.modules())), None)

    def unhook(self) -> None:
        """Take off all hooks, and put the checkpoint functions back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._readers.clear()
        self._with_router.clear()
        self._steered = False
        for module, name in self._followed:
            own = vars(module).get(name)
            if isinstance(own, Segments) and own.tap is self:
                setattr(module, name, own.original)
        self._followed.clear()
        self.left = []

    def abandon(self) -> None:
        """Leave the modes that a KeyboardInterrupt left on (torch runs no hook then), and forget the call."""
        while self._entered:
            self._entered.popitem()[1].__exit__(None, None, None)
        self.call = self.words = None

    def routers(self, names: list[str]) -> Routers:
        """Return what is known of the routers, apart from the model. names: of the sites, in the context's model."""
        model, fixed = getattr(self.boundary.config, "name_or_path", "") or "", [site.fixed for site in self.sites]
        return Routers(tuple(names), fixed, self.probes, model, type(self.boundary).__name__)

    def scope(self, index: int, depth: int | None = None) -> tuple[nn.Module, ...]:
        """Return the modules in which a site selects: the router, or its holder `depth` (default: found) levels up."""
        if depth is None:
            depth = self.probes[index].depth if self.probes else 0
        return self.sites[index].modules if depth == 0 else (self.sites[index].parents[depth - 1],)

    def experts(self, index: int) -> nn.Module | None:
        """Return the module that receives the selected ids unchanged, or None."""
        arrival = self.probes[index].arrival if self.probes else None
        return None if arrival is None else getattr(self.sites[index].parents[0], arrival[0])

    # -- one call -----------------------------------------------------------------------------------------------------

    def before_whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.words = {**dict(zip(_parameters(type(module).forward), args, strict=False)), **kwargs}.get("input_ids")

    def after_whole(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.words = None

    def before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listeners:
            return
        compiled, where = compiling(), type(module).__name__
        inputs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        embeds = inputs.get("inputs_embeds")
        if self.words is not None and embeds is not None and self.words.shape == embeds.shape[:2]:
            inputs["input_ids"] = self.words
        call = Call(inputs, len(self.sites), None if compiled else sys._getframe(1))  # refuses a packed batch
        if compiled:
            if traced_by_hand(self):
                refuse(refusals.checkpointed_by_hand, where)
        else:
            if threading.get_ident() != self.thread:
                raise refusals.of_another_thread(where, self.thread)
            if stack(None)[1]:
                raise refusals.checkpointed_by_hand(where)
            if self._entered:
                self.abandon()  # an earlier call in this context was interrupted
            self.read_last()
            if torch.is_grad_enabled():
                self.follow()  # gradient checkpointing may have been switched on since
        call.goes_on(self.left)
        for listener in self.listeners:
            listener.begin(call)
        for index, probe in enumerate(self.probes):
            if probe.arrival is None and probe.output is None:  # only the mode sees what is selected here
                call.job(index)
        self.call = call

    def after_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self.call
        if call is None or not (compiling() or threading.get_ident() == self.thread):
            return  # not listening, or a call of another thread, which was refused
        self.call = None
        if output is None:  # the forward raised
            return
        call.close(self.names)
        self.prove(call)
        cache = call.cache if call.cache is not None else cache_left(output)
        self.left = [one for one in self.left if not (one.holds(cache) or one.holds(None))]
        if cache is not None:
            call.left = CacheState(cache, call.past + call.length)
            self.left = [call.left, *self.left]
        for listener in self.listeners:
            listener.end(call)
        call.forget()

    def before_site(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiled = compiling()
        call = self.call if compiled else self.asking(index)
        if call is None:
            return
        if compiled and traced_by_hand(self):
            refuse(refusals.checkpointed_by_hand, self.names[index])
        if call.open and call.fired[index]:
            raise refusals.ran_twice(self.names[index])
        if call.disturb is not None and not self.sites[index].fixed:
            call.disturb(call, self, index, module, args, kwargs)
        job = call.jobs[index]
        if job is not None:
            frame = None if compiled else sys._getframe(1)
            probe = self.checked(index, module)
            mode = (probe.mode or Selection)(self.names[index], probe, job, frame)
            mode.__enter__()
            self._entered[index] = mode

    def after_site(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode = self._entered.pop(index, None) if self._entered else None
        if mode is not None:
            mode.__exit__(None, None, None)
        call = self.now()
        if call is None or output is None:
            return
        if mode is not None and not self.sites[index].fixed and not self.examining:
            mode.check()
        if not call.open:
            return
        call.fired[index] = True
        probe = self.probes[index]
        if probe.arrival is None:
            chosen = call.job(index).chosen if probe.output is None else output[probe.output]
            self.reached(call, index, chosen)
            if probe.output is None and not self.examining:
                self.look(index, chosen, output)

    def look(self, index: int, chosen: Any, output: Any) -> None:
        """Raise RoutingError unless the router's output shows the chosen ids in a known form; once per context."""
        if index in self._looked or compiling():
            return
        self._looked.add(index)
        if kept_slots(chosen, output, [], self.probes[index].num_experts) is None:
            raise RoutingError(f"site {self.names[index]}: {refusals.LOST}")

    def before_experts(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.now() if self._steered else self.asking(index)
        if call is None or not call.open or (arrival := self.probes[index].arrival) is None:
            return  # no arrival: the self-check has not found out yet
        place = arrival[1]
        ids = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        if not isinstance(ids, Tensor):
            raise refusals.without_ids(self.names[index], type(module).__name__, place)
        if call.chosen[index] is not None:
            raise RoutingError(f"site {self.names[index]}: its experts were called twice in one forward")
        self.reached(call, index, ids)
        job = call.jobs[index]
        call.proven[index] = job is not None and job.is_answer(ids)

    def reached(self, call: Call, index: int, ids: Tensor | None) -> None:
        if ids is None:
            raise RoutingError(f"site {self.names[index]} made no selection in this forward")
        k = self.probes[index].k
        call.chosen[index] = ids if ids.ndim == 2 and ids.shape[1] == k else ids.reshape(-1, k)

    # -- the Call of the current thread -------------------------------------------------------------------------------

    def now(self) -> Call | None:
        """Return the Call that this thread is in, or None."""
        if compiling():
            return self.call
        thread = threading.get_ident()
        return self.resumed.get(thread) or (self.call if thread == self.thread else None)

    def asking(self, index: int) -> Call | None:
        """Return the Call under which a router runs, None if it is left alone. Raises RoutingError in other cases."""
        if not self.listeners and not self.resumed:
            return None
        call = self.now()
        if call is not None and not call.open:  # recomputed
            return call
        if call is not None and call.frame is None:  # only this part is not compiled, e.g. it is in a checkpoint
            if call.grad and any(listener.steers for listener in self.listeners) and stack(None)[1]:
                raise refusals.compiled_checkpoints(type(self.boundary).__name__)
            return call
        if call is not None and not call.grad and beneath(call.frame):  # no gradients: nothing is recomputed
            return call
        inside, checkpointed = stack(None if call is None else call.frame)
        if call is not None and inside:
            segment = self.segments.get(threading.get_ident())
            by_hand = checkpointed and (segment is None or stack(segment)[1])
            bare = segment is None and not torch.is_grad_enabled() and any(one.steers for one in self.listeners)
            if call.grad and (by_hand or bare):  # bare: a checkpoint that is in nobody's known file
                raise refusals.checkpointed_by_hand(self.names[index])
            return call
        if not self.listeners or checkpointed:
            return None  # recomputation of a forward that ran live, before the context
        if threading.get_ident() != self.thread:
            raise refusals.of_another_thread(self.names[index], self.thread)
        raise refusals.outside_a_call(self.names[index], type(self.boundary).__name__)

    def checked(self, index: int, module: nn.Module) -> Selector:
        """Return the Selector of a router in its present mode. Raises RoutingError if that mode was not checked."""
        probe = self.probes[index] if self.examining else self.modes.get((module.training, index))
        if probe is None:
            raise refusals.unchecked_mode(self.names[index], module.training)
        return probe

    # -- proof --------------------------------------------------------------------------------------------------------

    def prove(self, call: Call) -> None:
        """Raise RoutingError if experts got other ids than forced; on a device, or compiled, count for `settle`."""
        kept = None if self.examining else call.kept()
        if kept is None:
            return
        if kept.device.type != "cpu" or compiling():
            self.lost = self.lost + (~kept).sum(-1)
        elif not bool(kept.all()):
            raise refusals.lost(self.names, (~kept).sum(-1))

    def settle(self) -> None:
        """Raise RoutingError if the experts of a forced row were others; waits for the device once."""
        if self.lost is None:
            return
        lost, self.lost = self.lost, torch.zeros_like(self.lost) if self.listeners else None
        if bool(lost.any()):
            raise refusals.lost(self.names, lost)

    def refuse_other_thread(self) -> None:
        """Raise RoutingError if another thread has a context open."""
        if self.listeners and self.thread != threading.get_ident():
            raise refusals.of_another_thread(f"a context of {type(self.boundary).__name__}", self.thread)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Context manager: put the hooks on and inform `listener` of every call."""
        self.refuse_other_thread()
        self.thread = threading.get_ident()
        if not self.listeners:
            self.lost, self.left = None, []
        if listener.steers and self.lost is None:
            self.lost = torch.zeros(len(self.sites), dtype=torch.int64, device=device_of(self.boundary))
        self._looked.clear()
        self.users += 1
        try:
            self.hook(listener.steers)  # inside try: a KeyboardInterrupt may arrive here, too
            self.listeners.append(listener)
            yield
        finally:
            self.listeners[:] = [other for other in self.listeners if other is not listener]
            self.abandon()
            self.users -= 1
            if not self.users:
                self.unhook()
        self.settle()
        listener.finish()
