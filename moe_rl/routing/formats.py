"""Routes of others: safetensors files, and what inference engines return.

A file is written atomically, says what it is and has a checksum. Arrays of engines become padded ids `[B,T,L,K]`.
"""

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_rl.files import write_tensors
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE

FORMAT = "moe_rl.routed_experts"
FORMAT_VERSION = 2
"""1 had no checksum."""
CHECKSUM = "sha256"


def write_routes(path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a file whole or not at all, with a checksum of all that is in it.

    facts: JSON values, kept in the safetensors header.
    """
    try:
        header = {key: json.dumps(value) for key, value in {**facts, "written_by": _versions()}.items()}
    except TypeError as error:
        raise RoutingError(f"meta must hold JSON values only to be saved: {error}") from error
    header |= {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(Path(path), own, {**header, CHECKSUM: _checksum(own, header)})


def read_routes(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file of `write_routes`.

    Raises FileNotFoundError; RoutingError, each with its own message, for a folder and a file that is cut off, that is
    not safetensors, that holds something else, that a newer version wrote, or whose content is not what was written.
    """
    if Path(path).is_dir():
        raise RoutingError(f"{path} is a folder; expected a file of RoutedExperts.save")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise RoutingError(
                    f"{path}: a safetensors file, but not of routes (format {header.get('format')!r}, "
                    f"expected {FORMAT!r}); model weights?"
                )
            written = int(header["format_version"])
            if written > FORMAT_VERSION:
                raise RoutingError(
                    f"{path}: format version {written}, this moe_rl reads up to {FORMAT_VERSION}; update it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        checksum = header.pop(CHECKSUM, None)
        if checksum != _checksum(tensors, header) and (checksum is not None or written > 1):
            raise RoutingError(f"{path} is damaged: its content is not what was written")
        return tensors, {k: json.loads(v) for k, v in header.items() if k not in ("format", "format_version")}
    except SafetensorError as error:
        raise RoutingError(f"{path}: {_what_it_is(Path(path))} ({error})") from error
    except RoutingError:
        raise
    except (KeyError, ValueError) as error:
        raise RoutingError(f"{path} is damaged: its header cannot be read ({error})") from error


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """SHA-256 of every header entry and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _what_it_is(path: Path) -> str:
    # Layout of safetensors: u64 header length, JSON header, data.
    with open(path, "rb") as file:
        start = file.read(9)
    size = path.stat().st_size
    if len(start) < 9 or (start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30):
        return f"cut off or damaged, {size} bytes are there; copied incompletely, or a full disk?"
    return "not a safetensors file, so not saved by RoutedExperts.save"


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("moe_rl", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # imported from a checkout
            found[name] = "unknown"
    return found


# -- inference engines -------------------------------------------------------------------------------------------------


def ids_from_engine(
    arrays: Sequence[np.ndarray], sites: Sequence[str], layers: Sequence[int] | None, mask: Tensor | None
) -> Int[Tensor, "B T L K"]:
    """Per-sequence arrays `[rows, layers, K]` of all hidden layers -> ids of the routed ones, padded with -1.

    rows is one less than the tokens of the sequence (the last sampled token was never fed back) or equal.
    mask: `[B,T]`, True where sequence b has a token; the routes go to its first `rows` True positions.
    Without it sequences are aligned left (padding on the right).

    Raises RoutingError if an array has another number of axes, layers or slots, if its rows do not fit the
    mask, if a layer that should be routed is all zeros (the engine captured nothing there), or if one that
    should be dense is not (the layer map is wrong).
    """
    arrays = [np.asarray(a) for a in arrays]
    if not arrays or any(a.ndim != 3 or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        raise RoutingError(
            "expected one array [P+G-1, layers, K] per sequence, layers and K alike in all; "
            f"got shapes {[a.shape for a in arrays]}"
        )
    if any(not np.issubdtype(a.dtype, np.integer) for a in arrays):
        raise RoutingError(f"expected integer ids, got {sorted({str(a.dtype) for a in arrays})}")
    num_layers, top_k = arrays[0].shape[1:]
    chosen = list(layers) if layers is not None else _layers_by_name(sites, num_layers)
    if len(chosen) != len(sites) or not all(0 <= layer < num_layers for layer in chosen):
        raise RoutingError(f"layers {chosen} do not name one of 0..{num_layers - 1} for each of {len(sites)} sites")
    captured = np.any([np.any(a != 0, axis=(0, 2)) for a in arrays], axis=0)
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
            f"{chosen}; pass layers= with the layer index of each site"
        )
    if mask is None:
        rows = torch.tensor([len(a) for a in arrays])
        mask = torch.arange(int(rows.max()))[None, :] < rows[:, None]
    mask = mask.detach().cpu().bool()
    if mask.ndim != 2 or len(mask) != len(arrays):
        raise RoutingError(f"mask must be [B,T] with B = {len(arrays)} sequences, got {list(mask.shape)}")
    ids = torch.full((*mask.shape, len(sites), top_k), LIVE)
    for b, array in enumerate(arrays):
        where = mask[b].nonzero()[:, 0]
        if len(where) - len(array) not in (0, 1):
            raise RoutingError(
                f"sequence {b}: {len(array)} rows of routes for {len(where)} tokens in the mask, expected "
                f"{len(where)}, or {len(where) - 1} as the last sampled token has none. Prompt left out?"
            )
        ids[b, where[: len(array)]] = torch.from_numpy(array[:, chosen].astype(np.int64))
    return ids


def decode_sglang(payload: str | bytes, num_layers: int, top_k: int) -> np.ndarray:
    """SGLang's `meta_info["routed_experts"]`: base64 of little-endian int32 `[tokens-1, layers, K]`."""
    try:
        flat = np.frombuffer(base64.b64decode(payload, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise RoutingError(f"not base64 of int32 expert ids: {error}") from error
    if flat.size % (num_layers * top_k):
        raise RoutingError(
            f"{flat.size} ids are not a whole number of [layers={num_layers}, K={top_k}] blocks: "
            "num_layers counts all hidden layers, dense ones too"
        )
    return flat.reshape(-1, num_layers, top_k)


def _layers_by_name(sites: Sequence[str], num_layers: int) -> list[int]:
    """Engine layer of each site: in order if every layer is a site, else the first number in its name."""
    if len(sites) == num_layers:
        return list(range(num_layers))
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", site) for site in sites]
    layers = [int(number[1]) if number else -1 for number in numbers]
    if len(set(layers)) != len(sites) or min(layers) < 0 or max(layers) >= num_layers:
        raise RoutingError(
            f"{len(sites)} sites, but the engine returned {num_layers} layers, and the names of the sites "
            f"({sites[0]}, ...) do not say which layers they are: pass layers="
        )
    return layers
