"""Files that are written whole or not at all. Every room may use it; it knows none of them."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` whole or not at all: a temporary name beside it, flushed to the disk, then renamed.

    Raises:
        OSError: naming `path`, whatever failed; what was there before is still there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file when writing it fails."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def write_atomic(path: Path, content: str | bytes) -> Path:
    """`atomic_file` for text or bytes; returns the path."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def write_json(path: Path, value: Any) -> Path:
    """`write_atomic` of JSON that a person can read."""
    return write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file, written atomically; tensors must be contiguous and share no memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        with naming(path):
            try:
                save_file(dict(tensors), name, metadata)
            except SafetensorError as error:  # what safetensors makes of an OSError, a full disk above all
                code = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
                raise OSError(code, os.strerror(code)) from error
            with open(name, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
