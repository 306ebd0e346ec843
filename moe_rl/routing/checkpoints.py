"""Support of gradient checkpointing: a segment that is run again in the backward pass uses the routes of its forward.

Checkpoint functions of transformers and of torch's `checkpoint_wrapper` are attributes of modules. While hooks are on,
each is replaced by a wrapper that remembers which Call each segment belongs to (`Tap.follow`). Other checkpoints are
refused.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as compiling

from moe_rl.routing import refusals
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.selection import stack

CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")  # transformers, torch's checkpoint_wrapper
SWITCH = "gradient_checkpointing"


class Segments:
    """Wrapper of a checkpoint function: a segment is recomputed, however late, under the Call of its forward."""

    def __init__(self, tap: Any, original: Callable[..., Any]) -> None:
        self.tap, self.original = tap, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tap, call = self.tap, self.tap.call
        if call is None:
            return self.original(function, *args, **kwargs)
        whole = call.open and call.frame is None  # the model is compiled together with its hooks
        if whole or compiling():
            if call.grad and not (whole and all(not listener.steers for listener in tap.listeners)):
                refuse(refusals.compiled_checkpoints, type(tap.boundary).__name__)
            return self.original(function, *args, **kwargs)

        def segment(*inner: Any, **named: Any) -> Any:
            with _resuming(tap, call, sys._getframe()):
                return function(*inner, **named)

        return self.original(segment, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original

    def __reduce__(self) -> Any:
        return same, (self.original,)


@torch.compiler.disable(reason=refusals.COMPILED_CHECKPOINTS)
def refuse(error: Callable[[str], RoutingError], where: str) -> None:
    """Raise `error(where)` outside of the compiled graph, so that the caller gets the error unchanged."""
    raise error(where)


@torch.compiler.assume_constant_result
def traced_by_hand(tap: Any) -> bool:
    """Return whether code being compiled is in a checkpoint that is not followed, judged by Python's stack."""
    call = tap.call
    if threading.get_ident() in tap.resumed or not (call is None or call.grad):
        return False
    return stack(None if call is None else call.frame)[1]


@contextmanager
def _resuming(tap: Any, call: Any, frame: FrameType) -> Iterator[None]:
    """Context manager: run a segment of `call`, also again, with hooks even after the context was left.

    frame: the Python frame of the segment; a checkpoint inside it is one that is not followed."""
    thread = threading.get_ident()
    before, outer = (tap.resumed.get(thread), tap.segments.get(thread)), tap.call
    hooked = tap.hook()
    tap.resumed[thread] = tap.call = call
    tap.segments[thread] = frame
    try:
        yield
    finally:
        tap.call = outer
        if before[0] is None:
            del tap.resumed[thread], tap.segments[thread]
        else:
            tap.resumed[thread], tap.segments[thread] = before
        if hooked:
            tap.unhook()


def same(value: Any) -> Any:
    """Return `value`: `__reduce__` methods name this function, so that unpickling yields the value."""
    return value
