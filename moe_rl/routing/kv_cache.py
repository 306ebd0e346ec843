"""Check that a KV cache is as an earlier call left it, which proves that two calls of a model are one forward."""

import weakref
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing.traced import no_type_check

CHANGED = (
    "the KV cache was reordered or changed between two calls (beam search, sequences leaving the batch, a cache that "
    "was moved or edited): nothing proves that its rows are the same sequences as before"
)


@no_type_check
class CacheState:
    """The state of a KV cache after a call, to recognise the call that continues on it and to see changes in between.

    The rows of the cache are still the same sequences if the cache holds the very tensors that it held, unchanged
    (torch counts the changes of a tensor), or views of them (a cropped cache). Where that cannot be seen (inference
    mode, an offloaded or a compiled cache), a sum of the keys of each token, taken over their bits, is compared.
    """

    def __init__(self, cache: Any, length: int) -> None:
        self._cache, self.length = weakref.ref(cache), length
        eager = not torch.compiler.is_compiling() and not getattr(cache, "offloading", False)
        self._places = _places(cache) if eager else None
        self._sums = _sums(cache) if self._places is None or getattr(cache, "is_compileable", False) else None

    def holds(self, cache: Any) -> bool:
        """Return whether this is the state of `cache`."""
        return self._cache() is cache

    def changed(self, cache: Any, past: int) -> bool | Tensor:
        """Return whether rows of the cache may be other sequences now: False only if the contrary is proven. Called
        before a call that continues this one with `past` cached tokens. Returns a tensor if the answer is on the
        device, so that nothing waits for it."""
        if self._places is not None and not torch.compiler.is_compiling():
            now = _places(cache) or []
            if len(now) == len(self._places) and all(
                new() is old() and rest == before
                for (new, *rest), (old, *before) in zip(now, self._places, strict=True)
            ):
                return False
        before, sums = self._sums, None if self._sums is None else _sums(cache)
        if before is None or sums is None or sums.shape[0] != before.shape[0]:
            return True
        known = min(past, self.length, sums.shape[1])
        return (sums[:, :known] != before[:, :known].to(sums.device)).any()


@no_type_check
def tokens_in(cache: Any) -> int:
    """Return the number of tokens in the cache; -1 if the cache does not count them."""
    try:
        return int(cache.get_seq_length())
    except ValueError:  # recurrent layers only: such a cache does not count tokens
        return -1


@no_type_check
def _places(cache: Any) -> list[Any] | None:
    """Return the identity and state of every tensor in the layers of a cache; None without tensors, or if torch does
    not tell. For each tensor: what it is (or is a view of), how often that was written to, and which row of it is the
    first. Cropping changes none of these, along whichever axis the tokens are. torch does not tell in inference mode
    and under torch.func."""
    found: list[Any] = []
    for layer in getattr(cache, "layers", ()):
        for value in vars(layer).values():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
            for tensor in held:  # a quantised layer holds numbers and their scale
                if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.numel():
                    whole = tensor if tensor._base is None else tensor._base
                    try:
                        count, start, first = whole._version, whole.data_ptr(), tensor.data_ptr()
                    except (RuntimeError, NotImplementedError):  # inference mode; torch.func
                        return None
                    row = (first - start) // max(1, tensor.stride(0) * tensor.itemsize)
                    found.append((weakref.ref(whole), count, start, row, tensor.stride(0), tensor.shape[0]))
    return found or None


@no_type_check
def _sums(cache: Any) -> Tensor | None:
    """Return `[B,T]` sums over the bits of one layer's keys, or None. The sums are of integers, so that their order
    cannot matter. The layer is the first that keeps the keys of all tokens, because those of a sliding window move when
    it is cropped; if there is none, the first layer."""
    layers = getattr(cache, "layers", ())
    whole = [layer for layer in layers if not getattr(layer, "is_sliding", False)]
    for layer in (*whole, *layers):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel():
            if getattr(cache, "offloading", False) and torch.cuda.is_available():
                torch.cuda.synchronize()  # the copy to the CPU may still be under way
            words = keys.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.itemsize])
            return words.sum(dim=(1, 3), dtype=torch.int64)
    return None
