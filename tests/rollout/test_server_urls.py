"""Which machine a study's vLLM is on: the url or a variable that names it, and what answers there."""

import contextlib
import http.server
import json
import shutil
import threading

import pytest
from fake_python import HOST, SERVER, fake_python, lent

from moe_rl.rollout.engine_config import EngineConfig, EngineError, check_engine
from moe_rl.rollout.vllm_engine import check_vllm, start_vllm
from moe_rl.rollout.vllm_host.agreed import digest
from moe_rl.rollout.vllm_servers import HttpServer


@pytest.fixture(autouse=True)
def without_a_token(monkeypatch):
    monkeypatch.delenv("MOE_RL_VLLM_TOKEN", raising=False)


class Other(http.server.BaseHTTPRequestHandler):
    """Another server than ours."""

    def do_GET(self):
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_):
        pass


class Nonsense(Other):
    """Its answers have a length that is no number."""

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", self.server.length)
        self.end_headers()


@pytest.mark.parametrize("length", ["soon", "-1", "1e3", ""])
def test_an_answer_whose_length_is_no_number_is_an_error_of_the_engine(length):
    with http.server.HTTPServer(("127.0.0.1", 0), Nonsense) as server:
        server.length = length
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EngineError, match=rf"before a session began: .* Content-Length of '{length}'"):
            HttpServer(f"http://127.0.0.1:{server.server_port}", 5.0)
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, b'{"detail": "Not Found"}', "answers, but is no vllm_host of moe_rl"),
        (200, b"<html>", "answers, but is no vllm_host of moe_rl"),
        (200, b"[]", "answers, but is no vllm_host of moe_rl"),
        (200, json.dumps({"moe_rl": "abc", "versions": {}}).encode(), r"another version of moe_rl \(abc, here .*copy .*"
         r"vllm_host to that machine"),
        (200, json.dumps({"moe_rl": digest(), "versions": {"vllm": "0.21.0"}}).encode(), "has vLLM 0.21.0; supported"),
        (200, json.dumps({"moe_rl": digest(), "versions": {}}).encode(), "has no vLLM"),
    ],
)  # fmt: skip
def test_another_server_or_version_is_refused_before_anything_runs(status, answer, message):
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        server.status, server.answer = status, answer
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(EngineError, match=rf"rollout.engine.url: http://127.0.0.1:\d+ .*{message}"):
            check_vllm(EngineConfig(kind="vllm", url=f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()


def test_a_changed_file_of_the_host_is_another_version(tmp_path):
    copied = tmp_path / "elsewhere" / "vllm_host"
    shutil.copytree(HOST, copied, ignore=shutil.ignore_patterns("__pycache__"))
    with lent(fake_python(tmp_path, SERVER), host=copied) as host:
        check_vllm(EngineConfig(kind="vllm", url=host.url))
    with (copied / "server.py").open("a") as file:
        file.write("# changed\n")
    other = pytest.raises(EngineError, match="runs a vllm_host of another version of moe_rl")
    with lent(fake_python(tmp_path, SERVER), host=copied) as host, other:
        check_vllm(EngineConfig(kind="vllm", url=host.url))


def test_a_url_where_nobody_listens(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        port = server.server_port
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:1"):
        with pytest.raises(EngineError, match=rf"rollout.engine.url: {url} cannot be reached: .*Is the server started"):
            check_vllm(EngineConfig(kind="vllm", url=url))


def test_a_url_comes_from_the_study_or_a_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("MOE_RL_VLLM_PYTHON", raising=False)
    config = EngineConfig(kind="vllm")
    with lent(fake_python(tmp_path, SERVER)) as host:
        monkeypatch.setenv("MOE_RL_VLLM_URL", host.url)
        check_vllm(config)
        with contextlib.closing(start_vllm(config)) as server:
            assert isinstance(server, HttpServer)
        monkeypatch.setenv("MOE_RL_VLLM_PYTHON", "/my/python")
        with pytest.raises(EngineError, match="variables MOE_RL_VLLM_PYTHON and MOE_RL_VLLM_URL are both set"):
            check_vllm(config)
        check_vllm(EngineConfig(kind="vllm", url=host.url))
    with pytest.raises(EngineError, match="/other/python is no Python that can be run"):
        check_vllm(EngineConfig(kind="vllm", python="/other/python"))
    monkeypatch.delenv("MOE_RL_VLLM_PYTHON")
    monkeypatch.setenv("MOE_RL_VLLM_URL", "gpu:8471")
    with pytest.raises(EngineError, match="the variable MOE_RL_VLLM_URL: expected http://HOST:PORT, got 'gpu:8471'"):
        check_vllm(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "https://gpu:8471"}, "url: expected http://HOST:PORT, got 'https://gpu:8471'; for an encrypted way"),
        ({"url": "http://gpu"}, "rollout.engine.url: expected http://HOST:PORT, got 'http://gpu'"),
        ({"url": "http://gpu:8471/v1"}, "rollout.engine.url: expected http://HOST:PORT"),
        ({"url": "http://gpu:8471?x=1"}, "rollout.engine.url: expected http://HOST:PORT"),
        ({"url": "http://me:secret@gpu:8471"}, "rollout.engine.url: expected http://HOST:PORT"),
        ({"url": "http://gpu:99999"}, "rollout.engine.url: expected http://HOST:PORT"),
        ({"url": "http://[gpu:8471"}, "rollout.engine.url: expected http://HOST:PORT"),
        ({"url": "http://gpu:8471", "python": "python3"}, "rollout.engine.python and .url: .* got both 'python3' and"),
        ({"url": "http://gpu:8471", "kind": "hf"}, "rollout.engine.url: is for kind vllm and .* of kind 'hf', got '"),
    ],
)
def test_settings_that_name_no_machine_are_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        check_engine(EngineConfig(**{"kind": "vllm", **changes}))
