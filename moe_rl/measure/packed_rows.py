"""Several sequences in one row: a test of whether a model keeps them apart, given their positions alone, and the way
back to one sequence a row."""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from moe_rl.routing.calls import device_of
from moe_rl.routing.contexts import taps_within
from moe_rl.routing.experts_sorted import compute_dtype
from moe_rl.routing.probing import quiet

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
ROWS, LENGTHS = 3, (7, 5)
"""Number of rows in the test, and numbers of tokens of the two sequences in each row."""

_APART: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[str, bool]]]" = weakref.WeakKeyDictionary()


def unpacked(values: Shaped[Tensor, "B T ..."], position_ids: Int[Tensor, "B T"]) -> Shaped[Tensor, "S N ..."]:
    """Return values of packed rows with one sequence a row, in order, 0 (False) behind each; with gradient.

    position_ids: as in `token_logps`: 0 where a sequence begins, each row's first token included. No padding.

    Raises ValueError for other shapes, or a row that begins within a sequence.

    >>> unpacked(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[0, 1, 0], [0, 1, 2]])).tolist()
    [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    """
    if position_ids.ndim != 2 or values.shape[:2] != position_ids.shape or bool((position_ids[:, 0] != 0).any()):
        raise ValueError(
            "values and position_ids: expected [B,T,...] and [B,T] with 0 where a sequence and each row begins, got "
            f"{list(values.shape)} and {list(position_ids.shape)}, rows from {position_ids[..., 0].tolist()}"
        )
    begins = (position_ids.flatten() == 0).nonzero()[1:, 0].tolist()
    return pad_sequence(list(values.flatten(0, 1).tensor_split(begins)), batch_first=True)


def refuse_leak(model: nn.Module, lm: PreTrainedModel, evaluating: AbstractContextManager[None], single: bool) -> None:
    """Raise ValueError unless a model keeps the sequences of a row apart.

    `leak` tests it inside the context `evaluating`; a model that passed is not tested again with the same attention
    and the same `single`."""
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
    """Return why sequences in one row are not scored as in rows of their own; None if they are, on a few tokens.

    Contexts that are open on the model do not see the calls of this test.

    In at least one row, log-probabilities must be the same up to three times the effect of one rounding of the
    embeddings plus 1e-6 nats: rounding flips a route in some rows only, while a leak is in all. Layers other than
    attention are refused by their type, because in 16 bits their leak may be too small to be seen.

    Args:
        single: test rows one by one. Flash attention looks for packed sequences only in a batch of one row.
    """
    if "position_ids" not in inspect.signature(type(lm).forward).parameters:
        return "it takes no position_ids"
    config = lm.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {*ATTENDING, "indexed_attention"})
    if others:
        return f"layers of type {', '.join(others)} carry more than attention along a row"
    while isinstance(model, DistributedDataParallel):  # DDP waits for other processes, which may not run this test
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

    with _hidden_from_contexts(model):
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
    """Return the largest absolute difference in each row; -inf equals -inf."""
    return torch.where(a == b, 0, a - b).abs().amax((1, 2))


@contextmanager
def _hidden_from_contexts(model: nn.Module) -> Iterator[None]:
    """Context manager: contexts that are open on a model, or on a part of it, do not see its calls."""
    with ExitStack() as stack:
        for tap in taps_within(model):
            tap.refuse_other_thread()
            stack.enter_context(quiet(tap))
        yield


def drawn(high: int, shape: Sequence[int]) -> Tensor:
    """Return random integers below `high` on the CPU, the same at every call."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), device="cpu")


@contextmanager
def nudged(lm: PreTrainedModel) -> Iterator[None]:
    """Context manager: embeddings are changed up or down by one rounding of the dtype in which they are computed."""

    def nudge(module: nn.Module, args: Any, states: Tensor) -> Tensor:
        dtype = compute_dtype(states, states.device)  # under autocast, autocast's dtype
        signs = drawn(2, states.shape).to(states) * 2 - 1
        return states * (1 + torch.finfo(dtype).eps * signs)

    handle = cast(nn.Module, lm.get_input_embeddings()).register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()
