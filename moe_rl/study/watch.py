"""`moe-rl watch`: a server of one local page that follows a study. Loopback only, read only, nothing from outside.

A page of another site could reach a server on this machine: requests whose Host is not this machine's name are refused
(DNS rebinding), answers are same-origin, and run names are looked up in a list, never made into paths.
"""

import errno
import json
import os
import re
import sys
import threading
import webbrowser
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from moe_rl.names import nearest
from moe_rl.study.alarms import ALARMS, Alarm, AlarmError, LiveAlarms, alarms_of
from moe_rl.study.cursor import LiveError, stamp
from moe_rl.study.figures.screen import scales
from moe_rl.study.live import LiveStudies, LiveStudy
from moe_rl.study.live_rows import expert_counts, new_rows, new_sites
from moe_rl.study.shown import choosable
from moe_rl.study.token_view import TokenStep, static, stored_steps, tokens_file

ADDRESS = "127.0.0.1"
PORT = 8765
OWN_NAMES = {"127.0.0.1", "localhost"}
KINDS = {".js": "text/javascript", ".css": "text/css"}
ASSETS = {
    "/": ("watch.html", "text/html"),
    **{
        f"/{file.name}": (file.name, KINDS[file.suffix])
        for file in Path(__file__).with_name("static").iterdir()
        if file.suffix in KINDS
    },
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def watch(folder: str | Path, port: int = 0, open_browser: bool = False) -> None:
    """Serve the page of a study (or run) folder until interrupted.

    Args:
        folder: runs/STUDY, runs/STUDY/ARM/seedN, or a folder of studies; it may still be empty of rows.
        port: 0 takes 8765 or the next free one.
        open_browser: open the page in this machine's browser.

    Raises:
        StudyDataError: the folder is missing, or holds neither a study nor a run.
        ValueError: the port is taken, or is no valid port.
    """
    server = make_server(folder, port)
    url = f"http://{ADDRESS}:{server.server_port}/"
    try:
        print(f"watching {folder} at {url}  (Ctrl-C ends it)", flush=True)
        # Routes need torch, which takes seconds to import: a thread does it while the reader looks at the curves.
        threading.Thread(target=import_torch, daemon=True).start()
        if open_browser:
            webbrowser.open(url)
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")
    finally:
        server.server_close()


def make_server(folder: str | Path, port: int = 0) -> "WatchServer":
    """Return the server, bound to a port but not serving yet."""
    study = LiveStudies(folder)
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: expected 0 to 65535. Leave it out to take a free one.")
    for candidate in [port] if port else [*range(PORT, PORT + 20), 0]:
        try:
            return WatchServer((ADDRESS, candidate), study)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            if port:
                raise ValueError(f"--port {port}: {error.strerror}. Leave it out to take a free one.") from error
    raise ValueError("no free port on this machine")


class WatchServer(ThreadingHTTPServer):
    """The HTTP server of one or several studies; threads that end with the process answer the requests."""

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows it would let two servers share a port

    def __init__(self, address: tuple[str, int], studies: LiveStudies):
        super().__init__(address, Handler)
        self.api = Api(studies)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a closed tab is no error
            super().handle_error(request, client_address)


class Api:
    """The answers to /api/... requests, as JSON values; `study` in a query names one of several studies.

    Raises LiveError for what does not exist, StudyDataError for damaged files.
    """

    def __init__(self, studies: LiveStudies):
        self.studies = studies
        self.lock = threading.Lock()
        self.alarms_lock = threading.Lock()  # separate: every poll takes it, and a long response holds the other one
        self.alarms: dict[Path, LiveAlarms] = {}
        names = ("study", "catalogue", "experts", "run", "sites", "tokens", "response")
        self.answers: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {n: getattr(self, n) for n in names}

    def study(self, query: dict[str, str]) -> dict[str, Any]:
        """Return runs, arms, conditions, settings in which arms differ, and alarms, with the colours of the page."""
        live = self._live(query)
        table, problem = _alarm_table(live.thresholds)
        names = ("name", "title", "rule", "source", "declared")
        alarms = [{name: getattr(a, name) for name in names} | {"of": [a.kind, a.metric]} for a in table]
        about = {"alarms": alarms, "alarms_problem": problem, "studies": self.studies.names()}
        return {**live.overview(), **about, "scales": scales()}

    def catalogue(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the metrics that can be drawn besides the page's own curves."""
        import_torch()
        return {"metrics": choosable()}

    def run(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the curves of `run` after the cursor `since`, and the steps whose tokens are stored.

        The chosen `metrics` (kind.name, with commas between them) are added; an answer that reaches the end of the file
        also has the alarms of the run.
        """
        folder, metrics = self._folder(query), {}
        for name in filter(None, query.get("metrics", "").split(",")):
            known = self.catalogue(query)["metrics"]
            if name not in known:
                raise LiveError(f"metrics: no metric {name!r}{nearest(name, list(known))}")
            metrics[name] = known[name]
        rows = new_rows(folder / "metrics.jsonl", query.get("since", ""), metrics)
        answer = {**rows, "token_steps": stored_steps(folder)}
        return answer if answer["more"] else {**answer, "alarms": self._alarms(self._live(query), query["run"], folder)}

    def experts(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the numbers of tokens by site and expert of `run`, old and new, over the stored steps."""
        folder = self._folder(query)
        import_torch()
        with self.lock:
            return expert_counts(folder)

    def sites(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the slot change by routing site of `run` after the cursor `since`, and the noise floor."""
        return new_sites(self._folder(query) / "metrics.jsonl", query.get("since", ""))

    def tokens(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the responses and updates that `run` stored of `step`."""
        with self.lock:
            return self._step(query).index()

    def response(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the tokens of the response `seq` of `run` and `step` after `update`."""
        with self.lock:
            stored, seq, update = self._step(query), _whole(query, "seq"), _whole(query, "update")
            if update not in stored.updates_of(seq):
                raise LiveError(
                    f"no response {seq} after update {update} of step {stored.step}; stored are responses "
                    f"{stored.sequences} and updates {stored.updates}"
                )
            return stored.response(seq, update, routers=True)

    def _live(self, query: dict[str, str]) -> LiveStudy:
        return self.studies.study(query.get("study", ""))

    def _alarms(self, live: LiveStudy, run: str, folder: Path) -> dict[str, Any]:
        table, _ = _alarm_table(live.thresholds)
        own = live.responses(run) == "policy"
        with self.alarms_lock:
            known = self.alarms.get(folder)
            if known is None or known.alarms != table:
                known = self.alarms[folder] = LiveAlarms(folder / "metrics.jsonl", table)
            return known.now(own)

    def _step(self, query: dict[str, str]) -> TokenStep:
        folder, step = self._folder(query), _whole(query, "step")
        if step not in stored_steps(folder):
            raise LiveError(f"run {query['run']!r} stored no tokens of step {step}; stored are {stored_steps(folder)}")
        import_torch()
        return _token_step(folder, step, stamp(tokens_file(folder, step)))

    def _folder(self, query: dict[str, str]) -> Path:
        if "run" not in query:
            raise LiveError("run=ARM/seedN is missing")
        return self._live(query).run(query["run"]).folder


class Handler(BaseHTTPRequestHandler):
    """The handler of requests: GET and HEAD of the page, its files and the API; all else is refused."""

    protocol_version = "HTTP/1.1"
    server_version = "moe-rl"
    sys_version = ""
    timeout = 60
    server: WatchServer

    def do_GET(self) -> None:
        if not own_host(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"moe-rl watch answers to 127.0.0.1 and localhost only\n")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:  # as of "http://["
            return self.send_error(HTTPStatus.BAD_REQUEST)
        if url.path in ASSETS:
            name, kind = ASSETS[url.path]
            self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", static(name).encode())
        elif url.path.startswith("/api/"):
            self._send(*_answer(self.server.api, url.path.removeprefix("/api/"), url.query))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"read only\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the library itself refuses: an unknown method, or what is no request at all."""
        self.close_connection = True
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(status, "text/plain", f"{status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a terminal full of requests would hide what matters."""


def own_host(host: str) -> bool:
    """Return whether a Host header names this machine, with any port, because of SSH forwarding.

    >>> own_host("localhost:9000"), own_host("127.0.0.1"), own_host("study.example:8765"), own_host("")
    (True, True, False, False)
    """
    match = re.fullmatch(r"([^:\[\]]+)(?::\d{1,5})?", host.strip().lower())
    return match is not None and match[1] in OWN_NAMES


def _answer(api: Api, name: str, query: str) -> tuple[HTTPStatus, str, bytes]:
    try:
        if name not in api.answers:
            raise LiveError(f"no such answer {name!r}; there are {', '.join(api.answers)}")
        asked = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
        status, content = HTTPStatus.OK, _json(api.answers[name](asked))
    except LiveError as error:
        status, content = HTTPStatus.NOT_FOUND, _json({"error": str(error)})
    except (OSError, ValueError) as error:  # StudyDataError is a ValueError
        status, content = HTTPStatus.INTERNAL_SERVER_ERROR, _json({"error": str(error)})
    except Exception as error:  # unforeseen values in a file: the page says so, and goes on
        what = f"{name}: the files hold what cannot be shown ({type(error).__name__}: {error})"
        status, content = HTTPStatus.INTERNAL_SERVER_ERROR, _json({"error": what})
    return status, "application/json; charset=utf-8", content


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _alarm_table(own: Any) -> tuple[tuple[Alarm, ...], str]:
    """Return a study's alarms, and what is wrong with the study's own thresholds (then those of `ALARMS` hold)."""
    try:
        if isinstance(own, dict) and any(isinstance(value, dict) for value in own.values()):
            import_torch()
        return alarms_of(own), ""
    except AlarmError as error:
        return ALARMS, str(error)


def _whole(query: dict[str, str], name: str) -> int:
    value = query.get(name, "")
    if not re.fullmatch(r"\d{1,9}", value):
        raise LiveError(f"{name}: expected a whole number, got {value!r}")
    return int(value)


@lru_cache(maxsize=8)
def _token_step(folder: Path, step: int, _stamp: tuple[int, ...]) -> TokenStep:
    return TokenStep(folder, step)


_IMPORTING = threading.Lock()


def import_torch() -> None:
    """Import what the catalogue and routes need, torch among it, which takes seconds.

    Only one thread at a time may import: another would find modules of transformers that are not filled yet.
    """
    with _IMPORTING:
        import moe_rl.measure.catalogue
        import moe_rl.training.route_tables  # noqa: F401
