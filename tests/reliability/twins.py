"""What every part asks of a run that something happened to: that it goes on and ends as one without it."""

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
    """A run that nothing interrupted: its configuration, what it is (`content`), and how long it took."""

    config: RunConfig
    content: dict[str, str]
    seconds: float

    def other(self, folder: Path) -> str:
        """Go on with the run in `folder` to its end: how it is another than this one, with the file that it printed
        to; empty if it is the same, and the folder is removed."""
        status = complete(self.config, folder)
        if status:
            return f"exit status {status}: {log_of(folder)}"
        own = content(folder)
        wrong = sorted(name for name in own.keys() | self.content.keys() if own.get(name) != self.content.get(name))
        if not wrong:
            shutil.rmtree(folder)
        return ", ".join(wrong[:5])


def twin_of(method: str, root: Path, steps: int | None = None) -> Twin:
    """Of one of `METHODS`, in `root`/twin; `steps`: of so many steps."""
    config = METHODS[method]
    config = replace(config, optim=replace(config.optim, steps=steps or config.optim.steps))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "twin"
    began = time.monotonic()
    status = complete(config, folder)
    assert status == 0, log_of(folder).read_text()
    return Twin(config, content(folder), time.monotonic() - began)


def complete(config: RunConfig, folder: Path) -> int:
    """Run, or go on, to the end in a process of its own; its exit status."""
    return wait(start(lambda: run_one(config, folder, command="campaign"), log_of(folder)))


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def content(folder: Path) -> dict[str, str]:
    """What a finished run is, by file: metrics without times, every tensor of the checkpoint, every byte of the rest.
    Equal for two runs exactly if weights, optimizers, random numbers, tokens, routes and metrics are."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            kept = [row if row["kind"] != "step" else {"kind": "step", "step": row["step"]} for row in rows]
            found[name] = json.dumps(kept)
        elif path.suffix == ".safetensors":
            found[name] = tensors_of(path)
        elif name in (".lock", "env.json", "DONE", "checkpoint/state.json"):  # they hold times
            found[name] = "there"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def tensors_of(path: Path) -> str:
    """Every tensor and header entry of a file; safetensors writes the entries in another order in each process."""
    with safe_open(path, "pt") as file:
        header = sorted((file.metadata() or {}).items())
        digest = hashlib.sha256(json.dumps([entry for entry in header if entry[0] != "sha256"]).encode())
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
