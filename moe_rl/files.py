"""Files that are written whole or not at all, and locks of folders. Every subpackage may import this module; it imports
none of them."""

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
    """Context manager: write `path` whole or not at all, under a temporary name beside it that is flushed to the disk
    and then renamed.

    Raises:
        OSError: naming `path`, whatever failed; what was there before is still there.
    """
    with _renamed(Path(path)) as name, open(name, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _renamed(path: Path) -> Iterator[str]:
    """Context manager: yield a temporary name beside `path`; the file of that name replaces `path` if the block ends
    well, and is removed if not."""
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
    """Remove the temporary files that interrupted calls of `atomic_file` or `write_tensors` left in a folder and below.
    No other process may be writing there."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager: add `path` to an OSError that the block raises."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write text or bytes to `path` whole or not at all, with `atomic_file`; return the path."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in the folder survives a power failure. Does nothing on
    Windows."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class InUseError(RuntimeError):
    """An error: another process writes to the folder; the message names the process and what to do."""


@contextmanager
def sole_writer(folder: Path, command: str = "") -> Iterator[None]:
    """Context manager: lock `folder`, so that this process alone writes there. The operating system frees the lock when
    its holder ends, however that happens. Without file locks (Windows, some network drives) nothing is locked.

    Raises:
        InUseError: another process has the lock; the message says which, since when and with what command.
    """
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with ExitStack() as opened:
        with naming(path):  # for the lock file only, not for errors of the caller's block
            file = opened.enter_context(open(path, "a+", encoding="utf-8"))
            _lock(file, folder, command)
        try:
            yield
        finally:
            file.truncate(0)  # an empty file says that nobody writes here now


def _lock(file: TextIO, folder: Path, command: str) -> None:
    """Lock an open lock file and write into it which process holds it. Raises InUseError if another writer does."""
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
    """Return whether the last `sole_writer` of a folder still has it; None if that cannot be told: there never was one,
    or it is on another machine, or this is Windows. A process that was killed is recognised by its number, which
    another process may have by now."""
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
    """Context manager: wait for the file lock `path` and hold it. The operating system frees the lock if its holder
    dies. Without file locks (Windows, some network drives) there is no waiting."""
    if fcntl is None:
        yield
        return
    with open(path, "w") as file:
        with _locks_missing():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _locks_missing() -> Iterator[None]:
    """Context manager: ignore the errors by which a file system says that it has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def write_json(path: Path, value: Any) -> Path:
    """Write `value` as indented JSON, which a person can read, with `write_atomic`; return the path."""
    return write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file atomically; return its path. The tensors must be contiguous and share no memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    with _renamed(path) as name:
        try:
            save_file(dict(tensors), name, metadata)
        except SafetensorError as error:  # safetensors turns an OSError, above all that of a full disk, into this
            code = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
    return path
