"""Conversion of arrays to ids `[B,T,L,K]`: per-sequence arrays of inference engines, padded arrays of trainers."""

import base64
import binascii
import io
import re
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE, as_mask, as_tensor, check_integers

NPY = b"\x93NUMPY"  # how a .npy file begins
FEW_SITES = 8  # if K = 1: with at least so many sites, a token with expert 0 at every site counts as not captured


def ids_from_engine(
    given: Sequence[np.ndarray | str | bytes], sites: Sequence[str], layers: Sequence[int] | None, mask: Tensor | None
) -> Int[Tensor, "B T L K"]:
    """Return ids of the routed layers, padded with -1, from one array `[rows, layers, K]` of all layers per sequence.

    The layers axis counts all hidden layers. An array may also be text of vLLM's server: base64 of a .npy file.
    rows is the number of tokens of the sequence, or one less (the last sampled token was never fed back).
    mask: `[B,T]`, True where sequence b has a token; the routes go to the first `rows` True positions of its row.
    Without a mask, sequences are aligned left (padding on the right).

    Raises RoutingError if an array has another number of axes, layers or slots, if its rows do not fit the
    mask, if a layer that should be routed is all zeros (the engine captured nothing there), or if one that
    should be dense is not (the layer map is wrong).
    """
    arrays = [decode_npy(a) if isinstance(a, str | bytes) else np.asarray(a) for a in given]
    if not arrays or any(a.ndim != 3 or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        raise RoutingError(
            "expected one array [P+G-1, layers, K] per sequence, layers and K alike in all; "
            f"got shapes {[a.shape for a in arrays]}"
        )
    if any(not np.issubdtype(a.dtype, np.integer) for a in arrays):
        raise RoutingError(f"expected integer ids, got {sorted({str(a.dtype) for a in arrays})}")
    num_layers, top_k = arrays[0].shape[1:]
    chosen = layers_of(sites, num_layers, layers)
    check_layers(sites, chosen, np.any([np.any(a > 0, axis=(0, 2)) for a in arrays], axis=0))
    if mask is None:
        rows = torch.tensor([len(a) for a in arrays], device="cpu")
        mask = torch.arange(int(rows.max()), device="cpu")[None, :] < rows[:, None]
    mask = as_mask(mask).detach().cpu()
    if mask.ndim != 2 or len(mask) != len(arrays):
        raise RoutingError(f"mask must be [B,T] with B = {len(arrays)} sequences, got {list(mask.shape)}")
    ids = torch.full((*mask.shape, len(sites), top_k), LIVE, device="cpu")
    for b, array in enumerate(arrays):
        where = mask[b].nonzero()[:, 0]
        if len(where) - len(array) not in (0, 1):
            raise RoutingError(
                f"sequence {b}: {len(array)} rows of routes for {len(where)} tokens in the mask, expected "
                f"{len(where)}, or {len(where) - 1} as the last sampled token has none. Prompt left out?"
            )
        ids[b, where[: len(array)]] = torch.from_numpy(array[:, chosen].astype(np.int64))
    if top_k == 1:  # if K > 1, a row of zeros names expert 0 twice, which no router chooses
        refuse_lost(_lost(ids))
    return ids


def decode_npy(payload: str | bytes) -> np.ndarray:
    """Decode `routed_experts` of vLLM's server: base64 of a .npy file, uint8 or uint16 `[tokens-1, layers, K]`."""
    try:
        raw = base64.b64decode(payload, validate=True)
        if not raw.startswith(NPY):  # numpy would read archives and pickles, too
            raise ValueError(f"it begins with {raw[: len(NPY)]!r}")
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise RoutingError(f"not base64 of a .npy file of expert ids, as vLLM's server sends them: {error}") from error


def decode_sglang(payload: str | bytes, num_layers: int, top_k: int) -> np.ndarray:
    """Decode SGLang's `meta_info["routed_experts"]`: base64 of little-endian int32 `[tokens-1, layers, K]`."""
    if num_layers < 1 or top_k < 1:
        raise RoutingError(f"num_layers {num_layers}, num_experts_per_tok {top_k}: expected at least 1 of each")
    try:
        raw = base64.b64decode(payload, validate=True)
        flat = np.frombuffer(raw, dtype="<i4") if not raw.startswith(NPY) else None
    except (binascii.Error, ValueError, TypeError) as error:
        raise RoutingError(f"not base64 of int32 expert ids: {error}") from error
    if flat is None:
        raise RoutingError("not base64 of int32 expert ids, but of a .npy file, as vLLM's server sends: from_vllm")
    if flat.size % (num_layers * top_k):
        raise RoutingError(
            f"{flat.size} ids are not a whole number of [layers={num_layers}, K={top_k}] blocks: "
            "num_layers counts all hidden layers, dense ones too"
        )
    return flat.reshape(-1, num_layers, top_k)


def ids_from_padded(
    array: Tensor | np.ndarray, mask: Tensor | np.ndarray, sites: Sequence[str], layers: Sequence[int] | None
) -> Int[Tensor, "B T L K"]:
    """Return ids of the routed layers, -1 outside `mask`, from padded ids of all hidden layers or of the routed ones.

    Values outside the mask are ignored, in particular zeros, which would otherwise name expert 0. A row that is zero at
    every site was not captured: for the last token of a sequence (sampled, but never fed back) the row becomes -1; for
    any other token it is refused, unless `_lost` takes it for expert 0.

    Raises RoutingError: another number of axes, ids that are no integers, a mask that does not fit, layers that are
    all zeros or mapped to no site, a token without routes inside a sequence.
    """
    ids, there = (as_tensor(x, name).cpu().detach() for x, name in ((array, "array"), (mask, "mask")))
    check_integers(ids)
    if ids.ndim != 4:
        raise RoutingError(f"expected ids [B,T,layers,K] (sequence, token, layer, slot), got {list(ids.shape)}")
    if there.shape != ids.shape[:2]:
        raise RoutingError(
            f"mask {list(there.shape)} does not fit ids {list(ids.shape)}: expected [B,T] = {list(ids.shape[:2])}, "
            "True where a sequence has a token, prompt included (an attention mask, not a response mask)"
        )
    there = as_mask(there)
    if not there.any():
        raise RoutingError("the mask is False everywhere: no token to take routes of")
    ids = ids.to(torch.int64)
    chosen = layers_of(sites, ids.shape[2], layers)
    within = ids[there]
    check_layers(sites, chosen, (within > 0).any(-1).any(0).numpy())
    ids = ids[:, :, chosen].masked_fill(~there[..., None, None], LIVE)
    last = there & (there.flip(1).cumsum(1).flip(1) == 1)
    missing = (ids == 0).all(-1).all(-1)
    refuse_lost(_lost(ids) & ~last)
    return ids.masked_fill((missing & last)[..., None, None], LIVE)


def _lost(ids: Int[Tensor, "B T L K"]) -> Bool[Tensor, "B T"]:
    """Return which tokens have zeros at every site, because the engine did not capture them. If K = 1 and L <
    FEW_SITES, none: zeros may then mean expert 0."""
    few = ids.shape[3] == 1 and ids.shape[2] < FEW_SITES
    zeros = (ids == 0).all(-1).all(-1)
    return torch.zeros_like(zeros) if few else zeros


def refuse_lost(lost: Bool[Tensor, "B T"]) -> None:
    """Raise RoutingError, which names the first lost token, if any token is lost (`_lost`)."""
    if lost.any():
        b, t = lost.nonzero()[0].tolist()
        raise RoutingError(
            f"sequence {b}, token {t} has no routes (zeros at every site), nor have {int(lost.sum()) - 1} others: "
            "tokens that the engine took from its prefix cache, a tool's text behind the last answer (verl), or the "
            "mask is True on padding? Set such rows to -1 to let the router decide there"
        )


def layers_of(sites: Sequence[str], num_layers: int, layers: Sequence[int] | None) -> list[int]:
    """Return each site's index on an axis of `num_layers` layers: as in `layers`, else by number or name. Raises
    RoutingError if none fits."""
    chosen = list(layers) if layers is not None else _layers_by_name(sites, num_layers)
    distinct = len(set(chosen)) == len(chosen) == len(sites)
    if not distinct or not all(0 <= layer < num_layers for layer in chosen):
        raise RoutingError(f"layers {chosen} do not name one of 0..{num_layers - 1} for each of {len(sites)} sites")
    return chosen


def check_layers(sites: Sequence[str], chosen: Sequence[int], captured: np.ndarray) -> None:
    """Raise RoutingError for a site whose layer is all zeros, and for a layer that holds routes but belongs to no site.

    captured: `[layers]`, whether a layer has any value but zeros (and -1, which stands for no route).
    """
    for site, layer in zip(sites, chosen, strict=True):
        if not captured[layer]:
            raise RoutingError(
                f"site {site} (layer {layer} of the engine) is all zeros in every sequence: the engine "
                "captured nothing there (a fused kernel that bypasses the router?), or the layer is dense"
            )
    stray = sorted(set(np.flatnonzero(captured).tolist()) - set(chosen))
    if stray:
        raise RoutingError(
            f"layers {stray} of the engine hold routes, but no site was mapped to them: sites are mapped to "
            f"{list(chosen)}; pass layers= with the layer index of each site"
        )


def pad_left_aligned(parts: Sequence[Tensor], fill: int) -> Tensor:
    """Stack tensors `[T_b, ...]` of equal trailing shape to `[B,T,...]`, with `fill` behind the shorter ones."""
    return pad_sequence(list(parts), batch_first=True, padding_value=fill)


def _layers_by_name(sites: Sequence[str], num_layers: int) -> list[int]:
    """Return each site's engine layer: in order if every layer is a site, else the first number in the site's name."""
    if len(sites) == num_layers:
        return list(range(num_layers))
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", site) for site in sites]
    layers = [int(number[1]) if number else -1 for number in numbers]
    if len(set(layers)) == len(sites) and min(layers) >= 0 and max(layers) >= num_layers:
        raise RoutingError(
            f"the engine returned {num_layers} layers, but {sites[layers.index(max(layers))]} is layer {max(layers)}: "
            "are these routes of another model? If the engine returns the sites alone, pass layers="
        )
    if len(set(layers)) != len(sites) or min(layers) < 0:
        raise RoutingError(
            f"{len(sites)} sites, but the engine returned {num_layers} layers, and the names of the sites "
            f"({sites[0]}, ...) do not say which layers they are: pass layers="
        )
    return layers
