"""Files that are written whole or not at all. Every room may use it; it knows none of them."""

import errno
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # there is no lock then


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write `path` whole or not at all: a temporary name beside it, flushed to the disk, then renamed.

    Raises:
        OSError: naming `path`, whatever failed; what was there before is still there.
    """
    with _renamed(Path(path)) as name, open(name, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _renamed(path: Path) -> Iterator[str]:
    """A temporary name beside `path`, which takes its place if the block ends well and is removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        with naming(path):
            yield name
            os.chmod(name, 0o644)
            os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what an interrupted `atomic_file` or `write_tensors` left in a folder and below; no other process may be
    writing there."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


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


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it outlives a power failure; not on Windows."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class InUseError(RuntimeError):
    """A folder that another process writes to; the message names the process and what to do."""


@contextmanager
def sole_writer(folder: Path, command: str = "") -> Iterator[None]:
    """Inside, this process alone writes to `folder`. The lock is the system's and ends with its holder, however that
    ends; where there are no file locks (Windows, some network drives) there is none.

    Raises:
        InUseError: another process has it; says which, since when and with what command.
    """
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with ExitStack() as opened:
        with naming(path):  # and not what fails in the block
            file = opened.enter_context(open(path, "a+", encoding="utf-8"))
            _lock(file, folder, command)
        try:
            yield
        finally:
            file.truncate(0)  # nobody writes here now


def _lock(file: TextIO, folder: Path, command: str) -> None:
    try:
        with _locks_missing():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        if holder.startswith(f"process {os.getpid()} on {platform.node()}, "):
            raise InUseError(
                f"{folder} is being written by another writer of this very process ({holder}): "
                "one of an earlier cell? Close that first, or choose another folder."
            ) from None
        raise InUseError(
            f"{folder} is being written by another process ({holder or 'it does not say which'}). "
            "Wait until it is done, stop it, or choose another --output."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%F %T')}: {command}")
    file.flush()


def still_written(folder: Path) -> bool | None:
    """Whether the last `sole_writer` of a folder still has it; None where that cannot be told: none ever was, or it is
    of another machine. A process that was killed is told by its number, which another may have by now."""
    try:
        held = (folder / ".lock").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.match(r"process (\d+) on (\S*), since ", held)
    if match is None:
        return None if held else False
    if match[2] != platform.node() or os.name == "nt":
        return None
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait for the file lock `path`, which the system frees if its holder dies; where there are none (Windows, some
    network drives), go without."""
    if fcntl is None:
        yield
        return
    with open(path, "w") as file:
        with _locks_missing():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _locks_missing() -> Iterator[None]:
    """Go on where a file system has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def write_json(path: Path, value: Any) -> Path:
    """`write_atomic` of JSON that a person can read."""
    return write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file, written atomically; tensors must be contiguous and share no memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    with _renamed(path) as name:
        try:
            save_file(dict(tensors), name, metadata)
        except SafetensorError as error:  # what safetensors makes of an OSError, a full disk above all
            code = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
    return path
