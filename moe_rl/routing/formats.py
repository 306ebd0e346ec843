"""Routes as safetensors files: written atomically, and a file says what it is."""

import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.routing.errors import RoutingError

FORMAT = "moe_rl.routed_experts"
FORMAT_VERSION = 1


def write_routes(path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write to a temporary name beside `path`, flush, rename: `path` is never half a file.

    facts: JSON values, kept in the safetensors header.
    """
    target = Path(path)
    try:
        header = {key: json.dumps(value) for key, value in {**facts, "written_by": _versions()}.items()}
    except TypeError as error:
        raise RoutingError(f"meta must hold JSON values only to be saved: {error}") from error
    header |= {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary, header)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # what safetensors makes of an OSError, a full disk above all
            raise OSError(f"{target}: not written ({error})") from error
        raise


def read_routes(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file of `write_routes`.

    Raises FileNotFoundError; RoutingError, each with its own message, for a folder and a file that is cut off, that is
    not safetensors, that holds something else, or that a newer version wrote.
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
            facts = {k: json.loads(v) for k, v in header.items() if k not in ("format", "format_version")}
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise RoutingError(f"{path}: {_what_it_is(Path(path))} ({error})") from error


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
