"""Two processes of gloo, forked from a server that has imported torch and transformers once for all tests."""

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch

PRELOADED = ["moe_rl.study.run", "transformers.models.qwen3_moe.modeling_qwen3_moe"]


def run_two(worker: Callable[..., None], *args: Any) -> None:
    """`worker(rank, port, *args)` in each; a free port is theirs to meet at. Raises what either raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(worker, args=(port, *args), nprocs=2, start_method="forkserver")
