"""Configurations of runs that take under a second, one for each method, and functions that run them in forks.

Forked processes need not import torch themselves.
"""

import functools
import importlib.metadata
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

from moe_rl.files import InUseError
from moe_rl.objectives import OBJECTIVES
from moe_rl.study import run as study_run
from moe_rl.study.run import run_one
from moe_rl.training import EvalConfig, MethodConfig, RewardConfig, RunConfig, ValueConfig, setup

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
    "grpo + R2, half of the routes": {"method": MethodConfig(replay="R2", keep=0.5)},
    "grpo, lag 2": {"rollout": replace(MICRO.rollout, lag=2)},
    "grpo, partial rollouts": {"rollout": replace(MICRO.rollout, segment=3)},
    "grpo, dynamic sampling": {"rollout": replace(MICRO.rollout, dynamic_sampling=2)},
    "grpo, expert bias": {"optim": replace(BASE.optim, expert_bias_rate=0.01)},
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
    """Call `act` in a forked process and return the process id; output and traceback are appended to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not getattr(setup.make_task, "judged", False):  # else a random model would earn no reward
            setup.make_task = judged(setup.make_task)
            setup.make_task.judged = True
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
    """Return a child's exit status, negative for a signal, if the child ends within so many seconds; else None."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(min(0.002, seconds))


def wait(child: int, seconds: float = 3600.0) -> int:
    """Return a child's exit status. If it does not end in time, kill it and raise TimeoutError."""
    status = ended(child, seconds)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError(f"process {child} did not end within {seconds:g} seconds")
    return status


def warm_up(root: Path) -> None:
    """Make one run in this process, from which forked processes inherit imports and caches.

    Package versions and git's answers, which every run records, are cached for all of them.
    """
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    study_run._git = functools.cache(study_run._git)
    run_one(replace(BASE, optim=replace(BASE.optim, steps=1)), root / "warm_up")
