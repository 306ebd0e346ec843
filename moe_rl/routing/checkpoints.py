"""Gradient checkpointing: a segment that is run again in the backward pass finds the routes of its forward.

Checkpoint functions of transformers and of torch's `checkpoint_wrapper` are attributes of modules. While hooks are on,
a wrapper stands there that remembers which Call each segment belongs to (`Tap.follow`). Other checkpoints are refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")  # transformers, torch's checkpoint_wrapper
SWITCH = "gradient_checkpointing"


class Segments:
    """A checkpoint function whose recomputation, however late, runs under the Call of its forward."""

    def __init__(self, tap: Any, original: Callable[..., Any]) -> None:
        self.tap, self.original = tap, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tap, call = self.tap, self.tap.call
        if call is None or torch.compiler.is_compiling():  # a compiled segment carries its routes in its graph
            return self.original(function, *args, **kwargs)

        def segment(*inner: Any, **named: Any) -> Any:
            with _resuming(tap, call):
                return function(*inner, **named)

        return self.original(segment, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original

    def __reduce__(self) -> Any:
        return same, (self.original,)


@contextmanager
def _resuming(tap: Any, call: Any) -> Iterator[None]:
    """Run a segment of `call` again (or for the first time), with hooks even after the context was left."""
    thread = threading.get_ident()
    before, outer = tap.resumed.get(thread), tap.call
    hooked = tap.hook()
    tap.resumed[thread] = tap.call = call
    try:
        yield
    finally:
        tap.call = outer
        if before is None:
            del tap.resumed[thread]
        else:
            tap.resumed[thread] = before
        if hooked:
            tap.unhook()


def same(value: Any) -> Any:
    return value
