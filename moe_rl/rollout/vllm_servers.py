"""Clients of vLLM servers, which answer frames (see `moe_rl.rollout.vllm_host`): of a process of this machine, over its
pipes, and of another machine (`python -I vllm_host` there), over HTTP. A server that crashes, hangs or is killed always
leads to an EngineError."""

import contextlib
import http.client
import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError

from moe_rl.rollout.engine_config import EngineError, url_address
from moe_rl.rollout.vllm_host.agreed import TOKEN_VARIABLE, digest, keep_alive, token
from moe_rl.rollout.vllm_host.child import PART, Child
from moe_rl.rollout.vllm_host.server import frame, unframe

CONNECT_SECONDS = 20.0
"""Time limit for a connection, and for requests that compute nothing."""
BUSY_SECONDS = 30.0
"""How long to wait for another run's session to end; that of a run that was killed ends within seconds."""
FOLDER = Path(__file__).parent / "vllm_host"
SWEEP = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class FrameClient:
    """Base class of clients of a server that answers frames. A subclass defines how a frame is sent (`_answered`),
    the last lines that the server wrote (`said`), and how the server is ended (`stop`)."""

    def ask(
        self: Any, request: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Send a request and return header and tensors of the answer.

        Raises:
            EngineError: the server says that it failed, has ended or is gone, or does not answer in time; with the last
                lines that it wrote, if they are known. In all cases but the first the server is closed.
        """
        what = str(request["do"])
        answer = self._answered(what, frame(dict(request), dict(tensors or {})))
        try:
            header, found = unframe(answer)
        except (ValueError, MemoryError, SafetensorError) as error:
            said = self.stop()
            raise EngineError(f"{self.name} sent an answer to {what!r} that cannot be read ({error}){said}") from error
        if "error" in header:
            raise EngineError(f"{self.name} could not {what}: {header['error']}{self.said()}")
        return header, found


class ServerProcess(Child, FrameClient):
    """A running vLLM server of this machine, in a child process that is asked over its pipes."""

    def __init__(self, command: list[str], name: str, seconds: float):
        """Start the server's process.

        Args:
            command: the program and its arguments; the folder is appended.
            name: the server's name in messages.
            seconds: time limit for an answer.

        Raises:
            EngineError: the process cannot be started.
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
        except BaseException:  # interrupted: the late answer would be taken for that to the next request
            self.close(0.0)
            raise

    def load(self, write: Callable[[Path], None], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Let the server open the model that `write` writes to a folder in hub format; return its answer's header."""
        folder = self.folder / "weights"
        try:
            write(folder)
            return self.ask({"do": "open", "model": str(folder), "settings": dict(settings)})[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class HttpServer(FrameClient):
    """A session with the vLLM server at a url; the session ends with this object, with `close`, or with this process.

    Attributes:
        folder: folder of this machine for weights that are sent; removed when the session has ended, also if this
            process is killed.
    """

    def __init__(self, url: str, seconds: float):
        """Begin a session with a server.

        Args:
            url: where the server listens.
            seconds: time limit for an answer.

        Raises:
            EngineError: the server cannot be reached, refuses the session, or is in use.
        """
        self.url, self.seconds = url, seconds
        self.name = f"the vLLM server at {url}"
        self.connection = _connected(url)
        self.folder = Path(tempfile.mkdtemp(prefix="moe_rl_weights_"))
        sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SWEEP, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._end = weakref.finalize(self, _end, self.connection, sweeper)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _answered(self, what: str, message: bytes) -> bytes:
        return self._request("POST", "/ask", what, message)

    def stop(self) -> str:
        """End the session with a server whose answer cannot be read; return an empty text to add to an error."""
        self.connection.close()  # closed first: such a server may not understand a request to end the session
        self.close()
        return ""

    def load(self, write: Callable[[Path], None], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Let the server open the model that `write` writes to a folder in hub format, sent file by file; return its
        answer's header."""
        folder = self.folder / "weights"
        try:
            write(folder)
            for file in sorted(folder.iterdir()):
                with file.open("rb") as body:
                    self._request("PUT", f"/weights/{file.name}", f"take {file.name}", body, file.stat().st_size)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self.ask({"do": "open", "settings": dict(settings)})[0]

    def close(self) -> None:
        """End the session. Further calls do nothing."""
        self._end()

    def _begin(self) -> None:
        """Begin the session; while another run has one, try again for `BUSY_SECONDS`."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                status, said = _exchange(self.connection, "POST", "/session", CONNECT_SECONDS)
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{self.name} was lost before a session began: {error}") from error
            if status == 200:
                return
            if status != 409 or time.monotonic() > deadline:
                many = "; it serves one run at a time" if status == 409 else ""
                raise EngineError(f"{self.name} cannot begin a session: {_reason(status, said)}{many}")
            time.sleep(0.5)

    def _request(self, method: str, path: str, what: str, body: bytes | BinaryIO, length: int | None = None) -> bytes:
        """Send a request on the session's connection and return the body of the answer. Raises EngineError, and closes
        the session, for any status but 200, a lost connection or a late answer."""
        if not self._end.alive:
            raise EngineError(f"{self.name} was closed")
        try:
            status, said = _exchange(self.connection, method, path, self.seconds, body, length)
        except TimeoutError as error:
            late = f"gave no answer to {what!r} in {self.seconds:g} s (rollout.engine.timeout); the session was ended"
            words = self.said()
            self.close()
            raise EngineError(f"{self.name} {late}{words}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise EngineError(
                f"{self.name} was lost while it was asked to {what} ({type(error).__name__}: {error}): has it ended, "
                "or the network or tunnel to it? When it is there again, the same command goes on with the run."
            ) from error
        if status == 200:
            return said
        self.close()
        raise EngineError(f"{self.name} could not {what}: {_reason(status, said)}")

    def said(self) -> str:
        """Return the last lines that vLLM wrote, asked on a new connection, because the session's may be waiting for an
        answer. Empty if they cannot be had."""
        try:
            with contextlib.closing(_connected(self.url)) as connection:
                return str(json.loads(_exchange(connection, "GET", "/log", CONNECT_SECONDS)[1])["said"])
        except (EngineError, OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return ""


def ask_versions(url: str) -> dict[str, str]:
    """Return the versions of vLLM and of the packages it computes with, as the server at a url reports them.

    Raises:
        EngineError: the server cannot be reached, wants another token, or is none of this version of moe_rl.
    """
    where = f"rollout.engine.url: {url}"
    with contextlib.closing(_connected(url)) as connection:
        try:
            status, said = _exchange(connection, "GET", "/", CONNECT_SECONDS)
            about = json.loads(said)
            code, versions = about.get("moe_rl"), about.get("versions")
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            status, code, about = 0, None, {}
    if status == 401:
        raise EngineError(
            f"{where} says: {about.get('error')}. Set the variable {TOKEN_VARIABLE} to what it was when that server "
            "was started."
        )
    if status != 200 or not isinstance(code, str) or not isinstance(versions, dict):
        raise EngineError(
            f"{where} answers, but is no vllm_host of moe_rl (vLLM's own server, `vllm serve`, will not do). "
            "docs/engines.md has the commands that start one."
        )
    if code != digest():
        raise EngineError(
            f"{where} runs a vllm_host of another version of moe_rl ({code}, here {digest()}). End it, copy "
            f"{FOLDER.resolve()} to that machine, and start it again."
        )
    return versions


def _connected(url: str) -> http.client.HTTPConnection:
    """Return an open connection to the server at a url. Raises EngineError if it cannot be reached."""
    host, port = url_address(url)
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS, blocksize=PART)
    try:
        connection.connect()
    except OSError as error:
        raise EngineError(
            f"rollout.engine.url: {url} cannot be reached: {error.strerror or error}. Is the server started there "
            "(docs/engines.md), and the tunnel, if it needs one?"
        ) from error
    connection.auto_open = 0  # another connection would be another session
    keep_alive(connection.sock)
    return connection


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    seconds: float,
    body: bytes | BinaryIO | None = None,
    length: int | None = None,
) -> tuple[int, bytes]:
    """Send a request and return status and body of the answer. The answer may take `seconds` after the request is sent,
    and each part of the request's `body` as long. `length`: bytes of a `body` that is a file.

    Raises:
        TimeoutError, OSError, HTTPException: as the connection raises them.
    """
    connection_socket: socket.socket | None = connection.sock
    if connection_socket is None:
        raise http.client.NotConnected
    connection_socket.settimeout(seconds)
    headers = {} if length is None else {"Content-Length": str(length)}
    try:
        secret = token()
    except ValueError as error:
        raise EngineError(str(error)) from error
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    connection.request(method, path, body, headers)
    deadline = time.monotonic() + seconds
    with connection.getresponse() as response:
        length_said, found = response.getheader("Content-Length", "0"), bytearray()
        if not length_said.isdecimal():
            raise http.client.HTTPException(f"its answer has a Content-Length of {length_said!r}")
        expected = int(length_said)
        while len(found) < expected:
            connection_socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = response.read1(min(expected - len(found), PART))
            if not part:
                raise http.client.IncompleteRead(b"", expected - len(found))
            found += part
        return response.status, bytes(found)


def _reason(status: int, said: bytes) -> str:
    """Return why a request was refused: the `error` in the answer's JSON, else the HTTP status."""
    try:
        return str(json.loads(said)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"


def _end(connection: http.client.HTTPConnection, sweeper: "subprocess.Popen[bytes]") -> None:
    """End the session on the server, so that it is free when this returns, and let `sweeper` remove the folder. A
    connection that waits for an answer is only closed."""
    with contextlib.suppress(OSError, http.client.HTTPException, EngineError):
        _exchange(connection, "DELETE", "/session", CONNECT_SECONDS)
    connection.close()
    assert sweeper.stdin is not None
    sweeper.stdin.close()
    sweeper.wait()
