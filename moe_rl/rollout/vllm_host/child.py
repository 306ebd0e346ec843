"""A child process that answers frames on its pipes; if it crashes, hangs or is killed, nothing of it stays behind.

Standard library only: this module runs in the trainer, and in vLLM's Python on a machine that lends vLLM to a trainer.
"""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

LENGTHS = struct.Struct("<QQ")  # lengths in bytes of a frame's header and tensors: see `server`
PART = 2**20
SHOWN_LINES = 15
"""How many lines of the process's standard error a message shows."""
LAST_SECONDS = 10.0
"""How long a process that is to end has to do so by itself."""

Wait = Callable[[list[int], list[int]], None]
"""Type of functions (reads, writes): return when one of the files can be read or written; raise to give up."""


class Child:
    """A running child process, which ends with this object, with `close`, or with the process that made it.

    Attributes:
        folder: folder of the child's own, for files that it writes or is to read; removed when it has ended.
    """

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        """Start the process.

        Args:
            command: the program and its arguments; the folder is appended.
            env: environment of the process; None: that of this process.

        Raises:
            OSError: the process cannot be started.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="moe_rl_engine_"))
        self.log = self.folder / "stderr"
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=env,
                    start_new_session=True,  # so that it can be killed with its own children, as one group
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._end = weakref.finalize(self, _end, self.process, self.folder)  # also when the interpreter exits

    @property
    def closed(self) -> bool:
        """Return whether the process was closed from here; False for one that died by itself."""
        return not self._end.alive

    def send(self, message: bytes, wait: Wait) -> None:
        """Write a message to the process. Raises BrokenPipeError if it has ended, and any exception of `wait`."""
        assert self.process.stdin is not None
        left, file = memoryview(message), self.process.stdin.fileno()
        while left:
            wait([], [file])
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(file, left) :]

    def answer(self, wait: Wait) -> Iterator[bytes]:
        """Yield the process's answer, a frame, in parts, the first of which is its lengths.

        Raises:
            EOFError: the process ends before the frame does.
            Exception: any exception that `wait` raises.
        """
        assert self.process.stdout is not None
        file, lengths = self.process.stdout.fileno(), b""
        while len(lengths) < LENGTHS.size:
            lengths += _read(file, LENGTHS.size - len(lengths), wait)
        yield lengths
        left = sum(LENGTHS.unpack(lengths))
        while left:
            part = _read(file, min(left, PART), wait)
            left -= len(part)
            yield part

    def said(self) -> str:
        """Return the last lines of the process's standard error, to be added to a message."""
        try:
            log = self.log.read_bytes()
        except OSError:  # closed meanwhile
            log = b""
        lines = log[-20_000:].decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        return "; it wrote nothing" if not lines else "; its last lines:\n  " + "\n  ".join(lines)

    def stop(self) -> str:
        """Close a process that has ended by itself or hangs; return, for a message, its exit status and last lines."""
        try:
            code = f" with exit status {self.process.wait(1.0)}"
        except subprocess.TimeoutExpired:  # it hangs, and would not notice the end of its input
            code = ""
            _kill(self.process)
        said = self.said()
        self.close()
        return code + said

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """End the process, which has `seconds` to end by itself, and remove its folder. Further calls do nothing."""
        if self._end.detach():
            _end(self.process, self.folder, seconds)


def _read(file: int, most: int, wait: Wait) -> bytes:
    """Read at most `most` bytes of a file, when `wait` says that it is ready. Raises EOFError at its end."""
    wait([file], [])
    part = os.read(file, most)
    if not part:
        raise EOFError
    return part


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]", folder: Path, seconds: float = LAST_SECONDS) -> None:
    """Close the process's pipes, so that it ends; after `seconds` kill it and all its children, and remove `folder`."""
    try:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait(seconds)
    except (OSError, subprocess.TimeoutExpired):
        pass
    _kill(process)  # also kills children that it has left
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
