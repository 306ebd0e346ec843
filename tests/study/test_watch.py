"""The server of `moe-rl watch`: what it answers, and whom it refuses."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from synthetic import write_study
from token_files import write_step

from moe_rl.cli import main
from moe_rl.study.watch import ASSETS, make_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("runs") / "s", ("grpo", "gspo"), (0,), 3, tokens_every=99)
    (folder / "grpo" / "seed0" / "tokens" / "step_000000.parquet").unlink()
    write_step(folder / "grpo" / "seed0", 2)
    server = make_server(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, path, method="GET", host="localhost", body=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.request(method, path, body=body, headers={"Host": host})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def api(server, path):
    answer, content = ask(server, f"/api/{path}")
    return answer.status, json.loads(content)


def test_the_page_and_its_files_come_from_here_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in ASSETS:
        answer, content = ask(server, path)
        assert answer.status == 200 and len(content) == int(answer.headers["Content-Length"])
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert b"https://" not in content.replace(b"https://www.w3.org", b"")
    answer, content = ask(server, "/", "HEAD")
    assert answer.status == 200 and content == b""


def test_the_api_answers(server):
    status, study = api(server, "study")
    assert status == 200 and [run["run"] for run in study["runs"]] == ["grpo/seed0", "gspo/seed0"]
    status, run = api(server, "run?run=grpo/seed0")
    assert len(run["rows"]["rollout"]) == 3 and run["token_steps"] == [2]
    assert api(server, f"run?run=grpo/seed0&since={run['since']}")[1]["rows"] == {}
    sites = api(server, "sites?run=grpo/seed0")[1]
    assert len(sites["rows"]) == 12 and sites["floor"] == []  # 3 steps of 4 updates; the floor was not measured
    assert api(server, "tokens?run=grpo/seed0&step=2")[1]["top"] == 2
    assert api(server, "response?run=grpo/seed0&step=2&seq=0&update=2")[1]["changed"] == [0, 1, 0]


def test_curves_and_alarms_do_not_wait_for_a_response(server):
    answers: list[dict] = []
    asking = threading.Thread(target=lambda: answers.append(server.api.run({"run": "grpo/seed0"})), daemon=True)
    with server.api.lock:  # as while a response is read
        asking.start()
        asking.join(60)
        assert answers and "alarms" in answers[0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "no such answer 'nothing'"),
        ("run", "run=ARM/seedN is missing"),
        ("run?run=../../etc", "no run '../../etc'; there are grpo/seed0, gspo/seed0"),
        ("run?run=grpo/seed0&since=x", "since: expected a cursor"),
        ("run?run=grpo/seed0&since=999999999999999999-00000000", "since: expected a cursor"),
        ("tokens?run=grpo/seed0&step=1", r"stored no tokens of step 1; stored are [2]"),
        ("tokens?run=grpo/seed0&step=../2", "step: expected a whole number"),
        ("response?run=grpo/seed0&step=2&seq=7&update=2", "no response 7 after update 2"),
    ],
)
def test_what_is_not_there_is_named(server, path, message):
    status, content = api(server, path)
    assert status == 404 and message in content["error"]


def test_a_value_that_nobody_thought_of_is_answered(server):
    metrics = server.api.studies.folder / "grpo" / "seed0" / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(before + json.dumps({"kind": "update", "step": 0, "update": 1, "grad_norm": 10**400}) + "\n")
    status, content = api(server, "run?run=grpo/seed0")
    metrics.write_text(before)
    assert status == 500 and "run: the files hold what cannot be shown (OverflowError" in content["error"]
    config = server.api.studies.folder / "grpo" / "seed0" / "config.yaml"
    kept = config.read_text()
    config.write_text(re.sub(r"(?m)^( +)steps: .*$", r"\1steps: .inf", kept))
    assert ".inf" in config.read_text()
    status, content = api(server, "study")
    config.write_text(kept)
    assert status == 200 and {run["run"]: run["steps"] for run in content["runs"]}["grpo/seed0"] is None


def test_a_cursor_behind_the_end_begins_again(server):
    status, run = api(server, "run?run=grpo/seed0&since=999999999999999-00000000")
    assert status == 200 and run["reset"] and len(run["rows"]["rollout"]) == 3


@pytest.mark.parametrize("request_line", [b"BREW / HTTP/1.1", b"\xff / HTTP/1.1", b"GET " + b"/" * 70_000])
def test_what_is_no_request_gets_an_answer_with_the_same_headers(server, request_line):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as line:
        line.sendall(request_line + b"\r\nHost: localhost\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    assert answer.split(b" ", 2)[1].startswith(b"4") and b"default-src 'none'" in answer


def test_strangers_writers_and_climbers_are_refused(server):
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        assert ask(server, "/api/study", host=host)[0].status == 403
    for host in ("localhost:9000", "127.0.0.1:1", "LOCALHOST"):
        assert ask(server, "/", host=host)[0].status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        answer, _ = ask(server, "/api/study", method, body="x")
        assert answer.status == 405 and answer.headers["Allow"] == "GET, HEAD"
    up = ("/../watch.py", "/static/../watch.py", "/%2e%2e/watch.py")
    for path in (*up, "/etc/passwd", "//etc/passwd", "/study.yaml"):
        assert ask(server, path)[0].status == 404
    assert "Access-Control-Allow-Origin" not in ask(server, "/api/study")[0].headers


def test_a_taken_port_is_said_and_the_default_moves_on(server):
    with pytest.raises(ValueError, match=f"--port {server.server_port}"):
        make_server(server.api.studies.folder, server.server_port)
    for nonsense in (-1, 65536):
        with pytest.raises(ValueError, match=f"--port {nonsense}: expected 0 to 65535"):
            make_server(server.api.studies.folder, nonsense)
    other = make_server(server.api.studies.folder)
    assert other.server_port != server.server_port
    other.server_close()


def test_the_command_names_a_wrong_folder(tmp_path, capsys):
    for folder, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no study and no run found")):
        with pytest.raises(SystemExit) as stop:
            main(["watch", str(folder)])
        assert stop.value.code == 1 and message in capsys.readouterr().err


def command(server):
    """The command on the server's folder, as it says where it is, and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moe_rl", "watch", str(server.api.studies.folder), "--port", str(port)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by all that a shell puts behind itself  # noqa: E731
    process = subprocess.Popen(command, preexec_fn=heard, **options)
    assert f"http://127.0.0.1:{port}/" in process.stdout.readline()
    return process, port


def test_chosen_metrics_are_answered_while_torch_is_still_being_imported(server):
    """Half imported by one thread, transformers lacks names for another."""
    process, port = command(server)
    path, said = "/api/run?run=grpo/seed0&metrics=probe.var_token_natural", []

    def get():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", path)
        said.append(connection.getresponse().status)

    threads = [threading.Thread(target=get) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.terminate()
    _, error = process.communicate(timeout=300)
    assert (said, error) == ([200] * 3, "")


def test_the_command_serves_until_interrupted(server):
    process, _ = command(server)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "") and out.endswith("stopped\n")
