"""A vLLM that another machine lends, over real sockets: whatever happens on either side, the error says what, nothing
stays behind, and the next one is served."""

import contextlib
import hashlib
import http.client
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_python import REPOSITORY, SERVER, fake_python, lent

from moe_rl.rollout import vllm_servers
from moe_rl.rollout.engine_config import EngineConfig, EngineError
from moe_rl.rollout.vllm_engine import check_vllm
from moe_rl.rollout.vllm_host.child import LENGTHS
from moe_rl.rollout.vllm_host.server import frame
from moe_rl.rollout.vllm_servers import HttpServer

TOKEN = "0123456789abcdef"
CLIENT = """
import sys
from pathlib import Path
from moe_rl.rollout.vllm_servers import HttpServer
server = HttpServer(sys.argv[1], 600.0)
server.ask({"do": "logps", "temperature": "echo", "word": "ready"})
(server.folder / "weights").mkdir()
print(server.folder, flush=True)
server.ask({"do": "logps", "temperature": "hang"})
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with lent(fake_python(tmp_path_factory.mktemp("python"), SERVER)) as host:
        yield host


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """This side's temporary folder, to be empty in the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("MOE_RL_VLLM_TOKEN", raising=False)
    yield folder
    assert list(folder.iterdir()) == []


@contextlib.contextmanager
def session(host, seconds=60.0):
    with contextlib.closing(HttpServer(host.url, seconds)) as server:
        yield server


def asked(server, word, tensors=None):
    return server.ask({"do": "logps", "temperature": "echo", "word": word}, tensors)


def raw(host, method, path, body=b"", headers=None, connection=None):
    """Status and answer, past our own client."""
    connection = connection or http.client.HTTPConnection(host.url.removeprefix("http://"), timeout=30)
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def used_by(host):
    return raw(host, "GET", "/")[1]["used_by"]


def processes(host):
    """Of the host: those of its sessions."""
    return [pid for file in Path(f"/proc/{host.pid}/task").glob("*/children") for pid in file.read_text().split()]


def test_headers_and_arrays_go_there_and_back(host):
    big = np.arange(3_000_000, dtype=np.int64).reshape(3, -1).T
    with session(host) as server:
        header, found = asked(server, "grüße", {"big": big, "none": np.zeros((0, 2), np.float32)})
        assert header == {"asked": "grüße"} and found["none"].shape == (0, 2)
        assert found["big"].dtype == np.int64 and np.array_equal(found["big"], big * 2)
        assert used_by(host).startswith("127.0.0.1 since 20")
    assert used_by(host) is None
    with pytest.raises(EngineError, match=f"the vLLM server at {host.url} was closed"):
        asked(server, "")


def test_a_model_arrives_file_by_file_and_stays_nowhere(host, temporary):
    files = {"config.json": b"{}", "model-00001-of-00002.safetensors": os.urandom(3 * 2**20 + 1), "empty.json": b""}

    def write(folder):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)

    with session(host) as server:
        for _ in range(2):  # what was there before is not taken for a part of it
            header = server.load(write, {"dtype": "float32", "max_num_seqs": 4})
            assert header["files"] == {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
            assert [path.name for path in server.folder.iterdir()] == []
            del files["empty.json" if "empty.json" in files else "config.json"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_nothing_of_a_session_stays_with_the_host(host):
    with session(host) as server:
        asked(server, "up")
        (pid,) = processes(host)
        folder = Path(Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2])
        assert (folder / "stderr").exists()
    assert not folder.exists() and processes(host) == []


def test_what_the_server_raises_is_said_and_it_goes_on(host):
    with session(host) as server:
        with pytest.raises(EngineError, match=r"(?s) could not logps: ValueError: no such thing; .*Traceback"):
            server.ask({"do": "logps", "temperature": "fail"})
        assert asked(server, "on")[0] == {"asked": "on"}


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("crash", r"(?s)could not logps: vLLM's process ended while it was asked to logps with exit status 3; its "
         r"last lines:\n.*  a kernel went wrong$"),
        ("hang", r"(?s)no answer to 'logps' in 1 s \(rollout.engine.timeout\); the session was ended;.*\n  thinking$"),
        ("babble", r"sent an answer to 'logps' that cannot be read"),
    ],
)  # fmt: skip
def test_a_session_that_crashes_hangs_or_babbles_ends_and_the_next_begins(host, do, message):
    with session(host) as server:
        asked(server, "up")
        server.seconds = 1.0
        with pytest.raises(EngineError, match=message):
            server.ask({"do": "logps", "temperature": do})
        with pytest.raises(EngineError, match="was closed"):
            asked(server, "on")
    with session(host) as server:
        assert asked(server, "next")[0] == {"asked": "next"}


def test_there_is_one_session_at_a_time(host, monkeypatch):
    monkeypatch.setattr(vllm_servers, "BUSY_SECONDS", 0.0)
    with session(host) as server:
        with pytest.raises(EngineError, match=r"in use by 127\.0\.0\.1 since 20.*; it serves one run at a time"):
            HttpServer(host.url, 5.0)
        assert asked(server, "still")[0] == {"asked": "still"}
    monkeypatch.setattr(vllm_servers, "BUSY_SECONDS", 30.0)
    with session(host) as first:
        threading.Timer(0.7, first.close).start()
        with session(host) as second:  # waits
            assert asked(second, "mine")[0] == {"asked": "mine"}


def test_a_killed_trainer_frees_the_host_and_leaves_no_weights(host):
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, host.url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    folder = Path(client.stdout.readline().strip())
    assert (folder / "weights").exists()
    time.sleep(0.5)  # it waits for an answer by now
    client.kill()
    client.wait()
    with session(host) as server:
        assert asked(server, "mine")[0] == {"asked": "mine"}
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


def test_a_host_that_ends_in_the_middle_is_named(tmp_path):
    with lent(fake_python(tmp_path, SERVER)) as host, session(host) as server:
        asked(server, "up")
        threading.Timer(0.5, host.send_signal, [signal.SIGKILL]).start()
        with pytest.raises(EngineError, match=r"was lost while it was asked to logps .*the same command goes on with"):
            server.ask({"do": "logps", "temperature": "hang"})
        assert host.wait(30) == -signal.SIGKILL  # its sockets close before it has ended


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_host_and_its_session(tmp_path, number):
    with lent(fake_python(tmp_path, SERVER)) as host, session(host) as server:
        asked(server, "up")
        (pid,) = processes(host)
        folder = Path(Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2])
        host.send_signal(number)
        assert host.wait(30) == 0 and not Path(f"/proc/{pid}").exists() and not folder.exists()
        assert host.stderr.read() == ""


def test_a_token_is_wanted_where_there_is_one(tmp_path, monkeypatch):
    def check():
        check_vllm(EngineConfig(kind="vllm", url=host.url))

    with lent(fake_python(tmp_path, SERVER), token=TOKEN) as host:
        with pytest.raises(EngineError, match=r"says: a token is required. Set the variable MOE_RL_VLLM_TOKEN"):
            check()
        monkeypatch.setenv("MOE_RL_VLLM_TOKEN", TOKEN[:-1])
        with pytest.raises(EngineError, match="says: wrong token"):
            check()
        for method, path in (("POST", "/session"), ("PUT", "/weights/config.json"), ("POST", "/ask"), ("GET", "/log")):
            assert raw(host, method, path, headers={"Authorization": "Bearer"})[0] == 401
        monkeypatch.setenv("MOE_RL_VLLM_TOKEN", "gr\u00fc\u00dfe")
        with pytest.raises(EngineError, match="variable MOE_RL_VLLM_TOKEN: expected printable ASCII"):
            check()
        monkeypatch.setenv("MOE_RL_VLLM_TOKEN", TOKEN + "\n")
        check()
        with session(host) as server:
            assert asked(server, "in")[0] == {"asked": "in"}


@pytest.mark.parametrize(
    ("address", "token", "versions", "message"),
    [
        ("0.0.0.0:0", "", "0.32.0", r"0\.0\.0\.0 may be reached from other machines: set MOE_RL_VLLM_TOKEN"),
        ("gpu.example:0", "", "0.32.0", "gpu.example may be reached from other machines"),
        ("127.0.0.1:0", "short", "0.32.0", "MOE_RL_VLLM_TOKEN: at least 16 characters, got 5"),
        ("127.0.0.1", "", "0.32.0", "expected HOST:PORT, e.g. 127.0.0.1:8471, got '127.0.0.1'"),
        ("127.0.0.1:x", "", "0.32.0", "127.0.0.1:x: Port could not be cast"),
        ("192.0.2.1:0", TOKEN, "0.32.0", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
        ("127.0.0.1:0", "", None, "python has no vLLM; run this with the Python of vLLM's environment"),
    ],
)
def test_a_host_that_cannot_or_must_not_listen_says_why(tmp_path, address, token, versions, message):
    python = fake_python(tmp_path, SERVER, json.dumps({"vllm": versions} if versions else {}))
    with pytest.raises(AssertionError, match=message), lent(python, address, token):
        pass


def test_a_host_listens_on_ipv6_too(tmp_path):
    with lent(fake_python(tmp_path, SERVER), "[::1]:0") as host, session(host) as server:
        assert host.url.startswith("http://[::1]:") and asked(server, "six")[0] == {"asked": "six"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("PUT", "/weights/..", b"x", {}, 400, "no name for a file of weights"),
        ("PUT", "/weights/..%2Fconfig.json", b"x", {}, 400, "no name for a file of weights"),
        ("PUT", "/weights/../config.json", b"x", {}, 404, "no such request"),
        ("PUT", "/weights/.config.json", b"x", {}, 400, "no name for a file of weights"),
        ("PUT", "/weights/modeling.py", b"x", {}, 400, "no name for a file of weights"),
        ("PUT", "/weights/pytorch_model.bin", b"x", {}, 400, "no name for a file of weights"),
        ("PUT", "/weights/config.json", iter([b"x"]), {}, 411, "the length of the body must be given"),
        ("PUT", "/weights/config.json", b"x", {"Content-Length": "-1"}, 411, "the length of the body"),
        ("POST", "/ask", b"x" * 3, {}, 400, "not a request: error: unpack_from requires"),
        ("POST", "/ask", LENGTHS.pack(2, 2) + b"{}", {}, 400, "lengths that are not its own"),
        ("POST", "/ask", LENGTHS.pack(2, 0) + b"no", {}, 400, "not a request: JSONDecodeError"),
        ("POST", "/ask", LENGTHS.pack(2, 0) + b"[]", {}, 400, "not a request: TypeError"),
        ("POST", "/ask", frame({"do": "crash"}), {}, 400, "'crash' is none of open, sample, logps"),
        ("POST", "/ask", frame({"do": "open", "settings": {"worker_cls": "x.Y"}}), {}, 400, "argument 'worker_cls'"),
        ("POST", "/ask", b"", {"Content-Length": str(2**31 + 1)}, 413, "a request of 2147483649 bytes"),
        ("POST", "/session", b"", {}, 400, "this connection has a session"),
        ("GET", "/weights", b"", {}, 404, "no such request: GET /weights"),
        ("GET", "/", b"", {"Origin": "http://evil.example"}, 403, "of web pages"),
    ],
)
def test_requests_that_no_trainer_makes_are_refused(host, method, path, body, headers, status, message):
    connection = http.client.HTTPConnection(host.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        assert raw(host, "POST", "/session", connection=connection) == (200, {})
        found, said = raw(host, method, path, body, headers, connection)
    assert found == status and message in said["error"]
    with session(host):  # that connection's has ended
        pass
    for path, method in (("/ask", "POST"), ("/weights/config.json", "PUT")):
        assert raw(host, method, path) == (400, {"error": "this connection has no session"})


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_a_full_disk_over_there_is_said(host, tmp_path):
    connection = http.client.HTTPConnection(host.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        raw(host, "POST", "/session", connection=connection)
        (pid,) = processes(host)
        command = Path(f"/proc/{pid}/cmdline")
        while not (folder := command.read_text().rstrip("\0").rpartition("\0")[2]).startswith("/"):
            time.sleep(0.01)  # it is empty while the process becomes another program
        (Path(folder) / "weights").symlink_to("/dev/full")
        status, said = raw(host, "PUT", "/weights/config.json", b"x" * 2**22, connection=connection)
    assert status == 507 and "cannot write config.json to" in said["error"]
