"""Gradient checkpointing: a segment that is run again in the backward pass finds the routes of its forward.

Checkpoint functions of transformers and of torch's `checkpoint_wrapper` are attributes of modules. While hooks are on,
a wrapper stands there that remembers which Call each segment belongs to. Other checkpoints are refused.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from moe_rl.routing.traced import no_type_check

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")  # transformers, torch's checkpoint_wrapper
_SWITCH = "gradient_checkpointing"
_FILES = (
    os.path.join("torch", "utils", "checkpoint.py"),
    os.path.join("activation_checkpointing", "checkpointing.py"),
)
_known: dict[str, bool] = {}  # file names that were looked at


class Checkpoints:
    """The checkpoint functions in the modules of one model. tap: whose `call` is under way.

    resumed: the Call that a segment is run again of, by the thread that does.
    """

    def __init__(self, tap: Any) -> None:
        self._tap = tap
        self.resumed: dict[int, Any] = {}
        self._modules: list[nn.Module] = []
        self._wrapped: list[tuple[nn.Module, str]] = []

    def find(self) -> None:
        """The modules that have, or may get, a checkpoint function: each time that hooks are put on."""
        self._modules = [
            module
            for module in self._tap.modules
            if hasattr(type(module), _SWITCH) or _SWITCH in (own := module.__dict__) or "checkpoint_fn" in own
        ]

    def follow(self) -> None:
        for module in self._modules:
            for name in _ATTRIBUTES:
                own = vars(module).get(name)
                if callable(own) and not isinstance(own, _Segments):
                    setattr(module, name, _Segments(self._tap, own))
                    self._wrapped.append((module, name))

    def unfollow(self) -> None:
        for module, name in self._wrapped:
            own = vars(module).get(name)
            if isinstance(own, _Segments):
                setattr(module, name, own.original)
        self._wrapped.clear()

    @contextmanager
    def resuming(self, call: Any) -> Iterator[None]:
        """Run a segment of `call` again (or for the first time), with hooks even after the context was left."""
        tap, thread = self._tap, threading.get_ident()
        before, outer = self.resumed.get(thread), tap.call
        hooked = tap.hook()
        self.resumed[thread] = tap.call = call
        try:
            yield
        finally:
            tap.call = outer
            if before is None:
                del self.resumed[thread]
            else:
                self.resumed[thread] = before
            if hooked:
                tap.unhook()


class _Segments:
    """A checkpoint function whose recomputation, however late, runs under the Call of its forward."""

    def __init__(self, tap: Any, original: Callable[..., Any]) -> None:
        self.tap, self.original = tap, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tap, call = self.tap, self.tap.call
        if call is None or torch.compiler.is_compiling():  # a compiled segment carries its routes in its graph
            return self.original(function, *args, **kwargs)

        def segment(*inner: Any, **named: Any) -> Any:
            with tap.checkpoints.resuming(call):
                return function(*inner, **named)

        return self.original(segment, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original

    def __reduce__(self) -> Any:
        return same, (self.original,)


def same(value: Any) -> Any:
    return value


@no_type_check
def stack(until: FrameType | None) -> tuple[bool, bool]:
    """Whether the caller of the caller runs beneath the frame `until`, and whether a checkpoint function lies between.

    By file name, because nothing else in torch says, before it happens, that a forward will be run again.
    """
    frame: FrameType | None = sys._getframe(2)
    checkpointed = False
    while frame is not None and frame is not until:
        name = frame.f_code.co_filename
        found = _known.get(name)
        if found is None:
            found = _known[name] = name.endswith(_FILES)
        checkpointed = checkpointed or found
        frame = frame.f_back
    return frame is not None, checkpointed
