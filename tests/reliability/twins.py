"""Comparison of a run that was disturbed and then goes on with its twin: an equal run without a disturbance."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from small_runs import METHODS, start, wait

from moe_rl.study.run import run_one
from moe_rl.training import RunConfig


@dataclass
class Twin:
    """A run without interruption: its configuration, a description of its files (`content`), its wall-clock seconds."""

    config: RunConfig
    content: dict[str, str]
    seconds: float

    def other(self, folder: Path) -> str:
        """Continue the run in `folder` to its end; return the names of files that differ from this run's.

        After a failure, returns the exit status and the log file. If nothing differs, removes the folder and returns an
        empty text.
        """
        status = complete(self.config, folder)
        if status:
            return f"exit status {status}: {log_of(folder)}"
        own = content(folder)
        wrong = sorted(name for name in own.keys() | self.content.keys() if own.get(name) != self.content.get(name))
        if not wrong:
            shutil.rmtree(folder)
        return ", ".join(wrong[:5])


def twin_of(method: str, root: Path, steps: int | None = None) -> Twin:
    """Make a run of one of `METHODS` in `root`/twin and return it. steps: number of steps; None: the method's."""
    config = METHODS[method]
    config = replace(config, optim=replace(config.optim, steps=steps or config.optim.steps))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "twin"
    began = time.monotonic()
    status = complete(config, folder)
    assert status == 0, log_of(folder).read_text()
    return Twin(config, content(folder), time.monotonic() - began)


def complete(config: RunConfig, folder: Path) -> int:
    """Run, or go on, to the end in a process of its own; return the exit status."""
    return wait(start(lambda: run_one(config, folder, command="campaign"), log_of(folder)))


def log_of(folder: Path) -> Path:
    """Return the file to which the run in a folder prints."""
    return folder.with_name(f"{folder.name}.log")


def content(folder: Path) -> dict[str, str]:
    """Return file -> description: metrics without times, digests of checkpoint tensors and of all other files.

    Two runs have equal descriptions exactly if weights, optimizers, random numbers, tokens, routes and metrics are
    equal. Of files that hold times, only the existence counts.
    """
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            kept = [row if row["kind"] != "step" else {"kind": "step", "step": row["step"]} for row in rows]
            found[name] = json.dumps(kept)
        elif path.suffix == ".safetensors":
            found[name] = tensors_of(path)
        elif name in (".lock", "env.json", "DONE", "checkpoint/state.json"):  # these files hold times
            found[name] = "there"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def tensors_of(path: Path) -> str:
    """Return a digest of every tensor and header entry of a file, in sorted order.

    safetensors writes header entries in another order in each process.
    """
    with safe_open(path, "pt") as file:
        header = sorted((file.metadata() or {}).items())
        digest = hashlib.sha256(json.dumps([entry for entry in header if entry[0] != "sha256"]).encode())
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
