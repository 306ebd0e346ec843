"""A server in a process of its own that is asked over its pipes; it can crash, hang or be killed, never in silence."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.rollout.engine_config import EngineError
from moe_rl.rollout.vllm_server import LENGTHS, frame, unframe

SHOWN_LINES = 15
"""Of the server's standard error, in messages."""
LAST_SECONDS = 10.0
"""In which a server that is closed may end by itself."""


class ServerProcess:
    """A running server; it ends with this object, with `close`, or with this process.

    Attributes:
        folder: of its own, for what it writes and what it is to read; gone when it is closed.
    """

    def __init__(self, command: list[str], name: str, seconds: float):
        """Args:
        command: the program and its arguments; the folder is appended.
        name: what messages call it.
        seconds: after which an answer that has not come is an error.
        """
        self.name, self.seconds = name, seconds
        self.folder = Path(tempfile.mkdtemp(prefix="moe_rl_engine_"))
        self.log = self.folder / "stderr"
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # with its own children it can be ended as one group
                )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"{name} cannot be started: {command[0]}: {error.strerror or error}") from error
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self._end = weakref.finalize(self, _end, self.process, self.folder)  # also when the interpreter exits

    def ask(
        self, request: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answer: its header and its tensors.

        Raises:
            EngineError: the server says that it failed, has ended, or does not answer in time; with the last lines of
                its standard error. In the last two cases it is closed.
        """
        if not self._end.alive:
            raise EngineError(f"{self.name} was closed")
        what, deadline = str(request["do"]), time.monotonic() + self.seconds
        try:
            self._send(frame(dict(request), dict(tensors or {})), deadline)
            lengths = LENGTHS.unpack(self._receive(LENGTHS.size, deadline))
            header, found = unframe(*(self._receive(length, deadline) for length in lengths))
        except (BrokenPipeError, EOFError) as error:
            self._stop(f"ended while it was asked to {what}", error)
        except TimeoutError as error:
            self._stop(
                f"gave no answer to {what!r} in {self.seconds:g} s (rollout.engine.timeout) and was stopped", error
            )
        except (ValueError, MemoryError) as error:  # not a frame
            self._stop(f"answered {what!r} with what is no message ({error})", error)
        if "error" in header:
            raise EngineError(f"{self.name} could not {what}: {header['error']}{self._said()}")
        return header, found

    def close(self) -> None:
        """End it and remove its folder. Once is enough."""
        self._end()

    def _stop(self, how: str, error: Exception) -> Any:
        try:
            code = f" with exit status {self.process.wait(1.0)}"
        except subprocess.TimeoutExpired:  # it hangs, and would not look at the end of its input
            code = ""
            _kill(self.process)
        said = self._said()
        self.close()
        raise EngineError(f"{self.name} {how}{code}{said}") from error

    def _said(self) -> str:
        """The end of the server's standard error."""
        lines = self.log.read_bytes()[-20_000:].decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        return "; it wrote nothing" if not lines else "; its last lines:\n  " + "\n  ".join(lines)

    def _send(self, data: bytes, deadline: float) -> None:
        assert self.process.stdin is not None
        left, file = memoryview(data), self.process.stdin.fileno()
        while left:
            if not select.select([], [file], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            try:
                left = left[os.write(file, left) :]
            except BlockingIOError:
                continue

    def _receive(self, length: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        parts, file = bytearray(), self.process.stdout.fileno()
        while len(parts) < length:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(file, min(length - len(parts), 1 << 20))
            if not part:
                raise EOFError(f"{len(parts)} of {length} bytes")
            parts += part
        return bytes(parts)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Ask it to end by ending its input; then end it and whatever it started."""
    try:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait(LAST_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        pass
    _kill(process)  # and its children, where it has left any
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
