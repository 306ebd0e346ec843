"""A server in a process of this machine that is asked over its pipes; it can crash, hang or be killed, never in
silence."""

import select
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from moe_rl.rollout.engine_config import EngineError
from moe_rl.rollout.vllm_host.child import Child
from moe_rl.rollout.vllm_host.server import frame, unframe


class Asked:
    """A server that is asked by frames; how they travel (`_answered`) and how it ends (`said`, `stop`), its subclass
    says."""

    def ask(
        self: Any, request: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answer: its header and its tensors.

        Raises:
            EngineError: the server says that it failed, has ended or is gone, or does not answer in time; with the last
                lines that it wrote, where they are known. In all cases but the first it is closed.
        """
        what = str(request["do"])
        answer = self._answered(what, frame(dict(request), dict(tensors or {})))
        try:
            header, found = unframe(answer)
        except (ValueError, MemoryError, SafetensorError) as error:
            said = self.stop()
            raise EngineError(f"{self.name} answered {what!r} with what is no message ({error}){said}") from error
        if "error" in header:
            raise EngineError(f"{self.name} could not {what}: {header['error']}{self.said()}")
        return header, found


class ServerProcess(Child, Asked):
    """A running server of this machine."""

    def __init__(self, command: list[str], name: str, seconds: float):
        """Args:
        command: the program and its arguments; the folder is appended.
        name: what messages call it.
        seconds: after which an answer that has not come is an error.
        """
        self.name, self.seconds = name, seconds
        try:
            super().__init__(command)
        except OSError as error:
            raise EngineError(f"{name} cannot be started: {command[0]}: {error.strerror or error}") from error

    def _answered(self, what: str, message: bytes) -> bytes:
        if self.closed:
            raise EngineError(f"{self.name} was closed")
        deadline = time.monotonic() + self.seconds

        def wait(reads: list[int], writes: list[int]) -> None:
            if not any(select.select(reads, writes, [], max(0.0, deadline - time.monotonic()))):
                raise TimeoutError

        try:
            self.send(message, wait)
            return b"".join(self.answer(wait))
        except (BrokenPipeError, EOFError) as error:
            raise EngineError(f"{self.name} ended while it was asked to {what}{self.stop()}") from error
        except TimeoutError as error:
            late = f"gave no answer to {what!r} in {self.seconds:g} s (rollout.engine.timeout) and was stopped"
            raise EngineError(f"{self.name} {late}{self.stop()}") from error
        except BaseException:  # interrupted: the answer to come would be taken for that to the next request
            self.close(0.0)
            raise

    def load(self, write: Callable[[Path], None], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Let it open the model that `write` writes to a folder in hub format; what it says of itself."""
        folder = self.folder / "weights"
        try:
            write(folder)
            return self.ask({"do": "open", "model": str(folder), "settings": dict(settings)})[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
