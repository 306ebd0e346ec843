"""Safetensors files of routes, written atomically, with a header that names the format, and a checksum."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_rl.files import write_tensors
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import LIVE, hide, token_mask
from moe_rl.routing.validity import check_packed, checked_tokens, experts_per_site
from moe_rl.starts import version_of

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "moe_rl.routed_experts"
FORMAT_VERSION = 2
"""Version of the file format. Version 1 had no checksum."""
CHECKSUM = "sha256"

Made = TypeVar("Made", bound="Stored")


class Stored:
    """Mixin of `RoutedExperts`: its files and tables."""

    _trusted: Any  # constructor without checks, for valid parts

    @property
    def token_hash(self: Any) -> str | None:
        """SHA-256 over shape and int32 little-endian values of the tokens; None if the tokens are unknown."""
        if self.tokens is None:
            return None
        values = self.tokens.cpu().contiguous().numpy().astype("<i4")
        return hashlib.sha256(repr(values.shape).encode() + values.tobytes()).hexdigest()

    def save(self: Any, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file; its header has sites, num_experts, K, meta, token hash, library versions.

        Written to a temporary name, flushed, then renamed, so that `path` is never half a file. A name that other
        readers take for their format (.parquet, .csv, .npy, .npz) is accepted with a warning.

        Raises RoutingError if `meta` holds anything but JSON values.
        """
        if (suffix := Path(path).suffix.lower()) in (".parquet", ".csv", ".npy", ".npz"):
            warnings.warn(
                f"{path} will be a safetensors file, whatever {suffix} says; .safetensors is its name, and to_frame() "
                "makes a table",
                stacklevel=2,
            )
        tensors = {"ids": self.packed} | ({} if self.tokens is None else {"tokens": self.tokens})
        if self.tokens is not None and bool((self._tokens < LIVE).any()):
            tensors["attended"] = self.attended
        header = {
            "sites": self.sites,
            "num_experts": self._experts,
            "num_experts_per_tok": self.shape[3],
            "token_hash": self.token_hash,
            "meta": self._meta,
        }
        write_routes(path, tensors, header)

    @classmethod
    def load(cls: type[Made], path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Made:
        """Read a file of `save`; library versions of the writer are under `meta["written_by"]`.

        Raises FileNotFoundError; RoutingError for a file that is cut off, foreign, of a newer format, or
        whose parts do not fit each other (ids against header, tokens against their hash).
        """
        tensors, header = read_routes(path)
        try:
            packed, sites, tokens = tensors["ids"], tuple(header["sites"]), tensors.get("tokens")
            experts = experts_per_site(header["num_experts"], sites)
            check_packed(packed, sites, experts, header["meta"].get("hash_routed", ()))
            tokens = None if tokens is None else checked_tokens(tokens, packed)
            if tokens is not None and "attended" in tensors:
                tokens = hide(tokens, tensors["attended"])
            meta = {**header["meta"], "written_by": header["written_by"]}
            expected = header["token_hash"], header["num_experts_per_tok"]
        except (AttributeError, KeyError, TypeError, RoutingError) as error:
            raise RoutingError(f"{path}: header and contents do not fit each other: {error}") from error
        routes = cls._trusted(packed, sites, experts, tokens=tokens, meta=meta)
        if (routes.token_hash, routes.shape[3]) != expected:
            raise RoutingError(f"{path}: tokens or slots are not those that the header names")
        return routes.to(device)

    def to_frame(self: Any, mask: Tensor | None = None) -> "pd.DataFrame":
        """Return a tidy table, one row per (sequence, position, site); live rows are left out.

        Columns: `sequence`, `position` (t), `token` (where known), `site` (categorical), `expert_0` ..
        `expert_{K-1}` in slot order. mask: `[B,T]`, True at the positions to keep.

        >>> from moe_rl.routing import RoutedExperts
        >>> routes = RoutedExperts(torch.tensor([[[[3, 0]], [[2, 3]]]]), ["gate"], 4)
        >>> routes.to_frame().melt(["sequence", "position", "site"], value_name="expert")["expert"].tolist()
        [3, 2, 0, 3]
        """
        import pandas as pd

        keep = ~self.live
        if mask is not None:
            keep = keep & token_mask(mask, self.packed)[:, :, None]
        where = keep.nonzero().cpu().numpy()
        chosen = self.ids[keep].cpu().numpy()
        columns: dict[str, Any] = {"sequence": where[:, 0], "position": where[:, 1]}
        if self.tokens is not None:
            columns["token"] = self.tokens.cpu().numpy()[where[:, 0], where[:, 1]]
        columns["site"] = pd.Categorical.from_codes(where[:, 2], pd.Index(self.sites))
        columns |= {f"expert_{slot}": chosen[:, slot] for slot in range(chosen.shape[1])}
        return pd.DataFrame(columns)


def write_routes(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a file of routes whole or not at all, with a checksum of all that is in the file.

    header: JSON values, kept in the header of the safetensors file.
    """
    try:
        text = {key: json.dumps(value) for key, value in {**header, "written_by": _versions()}.items()}
    except TypeError as error:
        raise RoutingError(f"meta must hold JSON values only to be saved: {error}") from error
    text |= {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    own = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(Path(path), own, {**text, CHECKSUM: _checksum(own, text)})


def read_routes(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a file that `write_routes` made.

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
            names = file.keys()  # `file` is no dict: it cannot be iterated over
            tensors = {name: file.get_tensor(name) for name in names}
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
    """Return the SHA-256 of every header entry and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _what_it_is(path: Path) -> str:
    # Layout of safetensors: u64 header length, JSON header, data.
    """Return a guess of what is wrong with a file that safetensors cannot read."""
    with open(path, "rb") as file:
        start = file.read(9)
    size = path.stat().st_size
    if len(start) < 9 or (start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30):
        return f"cut off or damaged, {size} bytes are there; copied incompletely, or a full disk?"
    return "not a safetensors file, so not saved by RoutedExperts.save"


def _versions() -> dict[str, str]:
    return {"torch": str(torch.__version__), **{name: version_of(name) for name in ("moe_rl", "transformers")}}
