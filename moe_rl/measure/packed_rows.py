"""Whether a model keeps sequences apart that stand one behind the other in a row, by their positions alone."""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from moe_rl.routing.calls import device_of
from moe_rl.routing.contexts import taps_within
from moe_rl.routing.experts_sorted import compute_dtype
from moe_rl.routing.probing import quiet

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
ROWS, LENGTHS = 3, (7, 5)
"""Rows that a model is tried out with, and the tokens of the two sequences in each."""

_APART: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[str, bool]]]" = weakref.WeakKeyDictionary()


def refuse_leak(model: nn.Module, lm: PreTrainedModel, evaluating: AbstractContextManager[None], single: bool) -> None:
    """ValueError unless a model keeps the sequences of a row apart, which is tried out once (`leak`), `evaluating`."""
    passed, key = _APART.setdefault(lm, set()), (str(lm.config.get_text_config()._attn_implementation), single)
    if key in passed:
        return
    with evaluating:
        why = leak(model, lm, single)
    if why is not None:
        raise ValueError(
            f"{type(lm).__name__} does not keep sequences apart that stand in one row: {why}. Score each sequence in a "
            "row of its own, without position_ids"
        )
    passed.add(key)


@torch.no_grad()
def leak(model: nn.Module, lm: PreTrainedModel, single: bool) -> str | None:
    """Why rows of several sequences are not what the sequences are in rows of their own; None: they are, on a few
    tokens. Contexts that are open on the model are not told.

    In one row of several at least, log-probabilities must be the same up to three times what one rounding of the
    embeddings changes and 1e-6 nats: where rounding flips a route, it does so in some rows, and a leak is in all.
    Refused by name, as little of it may be seen in 16 bits: layers that are no attention.

    Args:
        single: try rows one by one. Flash attention looks for packed sequences only in a batch of one row.
    """
    if "position_ids" not in inspect.signature(type(lm).forward).parameters:
        return "it takes no position_ids"
    config = lm.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {*ATTENDING, "indexed_attention"})
    if others:
        return f"layers of type {', '.join(others)} carry more than attention along a row"
    while isinstance(model, DistributedDataParallel):  # it waits for other processes, which may have no such rows
        model = model.module
    device = device_of(lm)
    ids = drawn(config.vocab_size, (ROWS, sum(LENGTHS))).to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS]).expand(ROWS, -1)

    def logps(of: Tensor, at: Tensor) -> Tensor:
        size = 1 if single else ROWS
        inputs: dict[str, Any] = {"attention_mask": None, "use_cache": False, "return_dict": True}
        parts = zip(of.split(size), at.split(size), strict=True)
        logits = [model(input_ids=i, position_ids=p, **inputs).logits for i, p in parts]
        return torch.cat(logits).cpu().double().log_softmax(-1)

    with _unheard(model):
        parts = zip(ids.split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
        apart = torch.cat([logps(*part) for part in parts], 1)
        try:
            together = logps(ids, positions)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return str(error)
        with nudged(lm):
            rounded = logps(ids, positions)
    far, rounding = float(_farthest(apart, together).min()), float(_farthest(rounded, together).max())
    if far <= 3 * rounding + 1e-6:
        return None
    return f"log-probabilities differ by {far:.2g} nats from those apart, of which rounding explains {rounding:.2g}"


def _farthest(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference in each row; two of -inf are the same."""
    return torch.where(a == b, 0, a - b).abs().amax((1, 2))


@contextmanager
def _unheard(model: nn.Module) -> Iterator[None]:
    """Contexts that are open on a model, or on a part of it, are not told of its calls."""
    with ExitStack() as stack:
        for tap in taps_within(model):
            tap.refuse_other_thread()
            stack.enter_context(quiet(tap))
        yield


def drawn(high: int, shape: Sequence[int]) -> Tensor:
    """The same random integers at every call, on the CPU."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), device="cpu")


@contextmanager
def nudged(lm: PreTrainedModel) -> Iterator[None]:
    """Embeddings up or down by one rounding of the dtype that they are computed in."""

    def nudge(module: nn.Module, args: Any, states: Tensor) -> Tensor:
        dtype = compute_dtype(states, states.device)  # autocast's, where it is on
        signs = drawn(2, states.shape).to(states) * 2 - 1
        return states * (1 + torch.finfo(dtype).eps * signs)

    handle = cast(nn.Module, lm.get_input_embeddings()).register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()
