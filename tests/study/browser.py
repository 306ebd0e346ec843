"""Driver of a headless Chromium over its DevTools pipe, with the standard library alone."""

import base64
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_rl.study.watch import make_server

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE = 150.0  # seconds; so many because shared machines stall


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """A browser with one page. `complaints`: errors of scripts and in the log. `requests`: the URLs of all requests."""

    def __init__(self, executable: str):
        self.profile = tempfile.mkdtemp(prefix="moe_rl-browser-")
        read_commands, self.write = os.pipe()
        self.read, write_answers = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "browser", executable, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self.buffer, self.number, self.session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result. Raises RuntimeError: when the answer is an error."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """Return the next message of the browser, after noting errors and requests in it."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            if not select.select([self.read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self.read, 1 << 20)
            if not data:
                raise RuntimeError(f"the browser ended with status {self.process.wait(5)}")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        event = json.loads(line)
        about = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:2000])
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        return event

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", str(result)))
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true; an exception in it counts as not yet true."""
        tried = f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if value := self.js(tried):
                    return value
            except RuntimeError as error:
                if "navigated" not in str(error):  # raised while the page changes: ask again
                    raise
            time.sleep(0.05)
        raise TimeoutError(f"never true: {expression}; complaints: {self.complaints}")

    def click(self, selector: str) -> None:
        """Click with the mouse at the middle of the first element that matches, once there is one."""
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Home": 36, "End": 35}
        options = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def look(self, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path, full: bool = True) -> None:
        """Write the whole page, or with `full=False` the visible part, as PNG."""
        options: dict[str, Any] = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close")
        for handle in (self.read, self.write):
            os.close(handle)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


@contextmanager
def serving(folder):
    """Context manager: serve a folder and yield the address.

    The port is a new one, because the browser keeps connections to the servers of earlier tests.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server(folder, port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(browser, chart="reward"):
    """Return the number of thick lines in a chart of the page."""
    return browser.js(f"document.querySelectorAll('#chart-{chart} .thick path').length")


def text(browser, selector):
    """Return the text of the first element that matches, or an empty text."""
    return browser.js(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
