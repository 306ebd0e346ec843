"""Runs of under a second of every method, made in forked processes, so that torch is imported once for all of them."""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("training", "study")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from micro import MICRO, judged
from safetensors import safe_open

from moe_rl.files import InUseError
from moe_rl.objectives import OBJECTIVES
from moe_rl.study.run import run_one
from moe_rl.training import EvalConfig, MethodConfig, RewardConfig, RunConfig, ValueConfig, state

torch.set_num_threads(1)
IN_USE = 75  # exit status of a run whose folder another process writes to
STEPS = 3
BASE = replace(
    MICRO,
    optim=replace(MICRO.optim, steps=STEPS),
    eval=EvalConfig(every=2, prompts=4),
    probe=replace(MICRO.probe, floor=False),
)
LEARNED = RewardConfig(model="learned", initial_batches=1, retrain_every=1, batch_size=4)
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"method": MethodConfig(objective=name)} for name in [*OBJECTIVES, "dpo"]},
    "grpo + R2": {"method": MethodConfig(objective="grpo", replay="R2")},
    "grpo + R3": {"method": MethodConfig(objective="grpo", replay="R3")},
    "gspo, noise": {"method": MethodConfig(objective="gspo", noise=0.5)},
    "grpo, lag 2": {"rollout": replace(MICRO.rollout, lag=2)},
    "ppo, value head": {"method": MethodConfig(objective="ppo"), "value": ValueConfig(model="head")},
    "grpo, learned reward": {"method": MethodConfig(objective="grpo"), "reward": LEARNED},
    "iterative grpo": {
        "method": MethodConfig(objective="grpo", kl_coef=0.1),
        "reward": LEARNED,
        "optim": replace(BASE.optim, reference_reset_every=1),
    },
}
METHODS: dict[str, RunConfig] = {name: replace(BASE, **changes) for name, changes in CHANGES.items()}


def start(act: Callable[[], Any], log: Path) -> int:
    """`act` in a forked process; returns its number. What it prints, and how it failed, is added to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not getattr(state.make_task, "judged", False):  # a random model has no reward of a task that it cannot solve
            state.make_task = judged(state.make_task)
            state.make_task.judged = True
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        act()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except InUseError:
        status = IN_USE
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int, seconds: float = 0.0) -> int | None:
    """Its exit status, negative for a signal, if it ends within so many seconds; else None."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(min(0.002, seconds))


def wait(child: int, seconds: float = 300.0) -> int:
    """Its exit status. Raises TimeoutError, after it was killed, for one that does not end."""
    status = ended(child, seconds)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError(f"process {child} did not end within {seconds:g} seconds")
    return status


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
    """Every tensor and fact of a file; the order in which safetensors writes the facts is another in each process."""
    with safe_open(path, "pt") as file:
        facts = sorted((file.metadata() or {}).items())
        digest = hashlib.sha256(json.dumps([fact for fact in facts if fact[0] != "sha256"]).encode())
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing(folder: Path, twin: dict[str, str]) -> list[str]:
    """Files in which a finished run is not its twin."""
    own = content(folder)
    return sorted(name for name in own.keys() | twin.keys() if own.get(name) != twin.get(name))


def warm_up(root: Path) -> None:
    """One run in this process, so that forked ones have all imports and caches from it."""
    run_one(replace(BASE, optim=replace(BASE.optim, steps=1)), root / "warm_up")
