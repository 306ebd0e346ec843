"""A process that answers frames on its pipes; it can crash, hang or be killed, and nothing of it stays behind.

Standard library only: it runs in the trainer, and in vLLM's Python where that lends it to a trainer elsewhere.
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

LENGTHS = struct.Struct("<QQ")  # of a frame's header and tensors, bytes: see `server`
PART = 2**20
SHOWN_LINES = 15
"""Of its standard error, in messages."""
LAST_SECONDS = 10.0
"""In which a process that is to end may do so by itself."""

Wait = Callable[[list[int], list[int]], None]
"""Returns when one of these files can be read or one of those be written; raises to give up."""


class Child:
    """A running process; it ends with this object, with `close`, or with this process.

    Attributes:
        folder: of its own, for what it writes and what it is to read; gone when it has ended.
    """

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        """Args:
        command: the program and its arguments; the folder is appended.
        env: of the process; None: as here.

        Raises:
            OSError: it cannot be started.
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
                    start_new_session=True,  # with its own children it can be ended as one group
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._end = weakref.finalize(self, _end, self.process, self.folder)  # also when the interpreter exits

    @property
    def closed(self) -> bool:
        """Whether it was closed here; a process that died by itself was not."""
        return not self._end.alive

    def send(self, message: bytes, wait: Wait) -> None:
        """Raises BrokenPipeError where the process has ended, and what `wait` raises."""
        assert self.process.stdin is not None
        left, file = memoryview(message), self.process.stdin.fileno()
        while left:
            wait([], [file])
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(file, left) :]

    def answer(self, wait: Wait) -> Iterator[bytes]:
        """A frame in parts, the first of which is its lengths.

        Raises:
            EOFError: the process ends before the frame does.
            Exception: what `wait` raises.
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
        """The end of its standard error, to be added to a message."""
        try:
            log = self.log.read_bytes()
        except OSError:  # closed meanwhile
            log = b""
        lines = log[-20_000:].decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        return "; it wrote nothing" if not lines else "; its last lines:\n  " + "\n  ".join(lines)

    def stop(self) -> str:
        """Close it; how it ended, and what it said. For a process that has ended by itself, or hangs."""
        try:
            code = f" with exit status {self.process.wait(1.0)}"
        except subprocess.TimeoutExpired:  # it would not look at the end of its input
            code = ""
            _kill(self.process)
        said = self.said()
        self.close()
        return code + said

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """End it and remove its folder; it has so long to do the first by itself. Once is enough."""
        if self._end.detach():
            _end(self.process, self.folder, seconds)


def _read(file: int, most: int, wait: Wait) -> bytes:
    wait([file], [])
    part = os.read(file, most)
    if not part:
        raise EOFError
    return part


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]", folder: Path, seconds: float = LAST_SECONDS) -> None:
    """Ask it to end by ending its input; then end it and whatever it started."""
    try:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait(seconds)
    except (OSError, subprocess.TimeoutExpired):
        pass
    _kill(process)  # and its children, where it has left any
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
