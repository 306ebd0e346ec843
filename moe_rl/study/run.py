"""The execution of one run: checks before it, its folder, its environment, its end. Training is `moe_rl.training`."""

import dataclasses
import os
import platform
import random
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from moe_rl.checks import sha256_of_bytes
from moe_rl.done import NAME, remedy, what_is_lost, write_done
from moe_rl.files import sole_writer, sweep, write_atomic, write_json
from moe_rl.names import seed_of
from moe_rl.policy.models import check_machine, check_tiny, seeded
from moe_rl.processes import suit_small_model
from moe_rl.rollout import make_task
from moe_rl.rollout.engines import check_engine_here
from moe_rl.rollout.task import checked_reward, problems_of, user_code
from moe_rl.settings import FREE, listed, plain, with_defaults
from moe_rl.starts import OF_THE_POLICY, begun_under, version_of
from moe_rl.study.config import ConfigError, DamagedRunError, changed_settings, dump_run
from moe_rl.training import RunConfig, train, validate
from moe_rl.training.checkpoint import settle
from moe_rl.training.distributed import ranks_of
from moe_rl.training.launch import check_shares
from moe_rl.training.levers import check_sites
from moe_rl.training.trackers import check_tracker
from moe_rl.yaml_files import parse_yaml

PACKAGES = ("moe_rl", "torch", "transformers", "accelerate", "numpy", "pandas", "pyarrow", "matplotlib", "scipy")
SHOWN = 16
"""Number of problems of each split by which a changed task is recognised."""


def run_one(
    config: RunConfig,
    folder: str | Path,
    cache_dir: str | Path | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
    command: str = "",
) -> None:
    """Run one arm and seed in `folder`, or finish the run that was begun there. Does nothing if the run is done.

    Raises:
        ValueError: the configuration cannot run.
        ModelError, EngineError: the model or the rollout engine cannot run on this machine.
        ConfigError: the folder holds a run of another configuration, or of a task whose data or code changed since, or
            a damaged one (DamagedRunError).
        InUseError: another process runs in the folder.
        DistributedError: there are other processes than the configuration asks for, or ranks disagree.
    """
    place = Path(folder).expanduser()
    if config.model.path is None:
        suit_small_model()
    config = dataclasses.replace(config, model=seeded(config.model, config.seed))
    validate(config)
    task = check_here(config)
    ranks = ranks_of(config.distributed, config.model.device)
    ranks.agree("the configuration", dataclasses.asdict(config))

    about = {**environment(command), "processes": ranks.size, "task_sha256": task}

    def begin() -> bool:
        if not check_folder(config, place):
            return False
        check_shares(config, ranks.size)
        lock.enter_context(sole_writer(place, command))
        sweep(place)
        if not check_folder(config, place):  # another process has done it meanwhile
            return False
        goes_on = settle(place) is not None
        before = begun_under(place, about) if goes_on else {}
        if task and (before.get("task_sha256") or task) != task:
            raise ConfigError(
                f"{place} was begun with other problems of the task {config.task.name}: its data or code changed "
                "since. Nothing was overwritten: put them back to go on, or move the folder away to begin again."
            )
        about.update(before)
        if not begun(place) or _free_differ(place / "config.yaml", config):
            write_atomic(place / "config.yaml", dump_run(config))
        write_json(place / "env.json", about)
        return True

    def listen(row: dict[str, Any]) -> None:
        if row["kind"] != "policy":
            if listener:
                listener(row)
        elif ranks.main:
            write_json(place / "env.json", {**{key: row[key] for key in OF_THE_POLICY}, **about})

    with ExitStack() as lock:
        if not ranks.first(begin):
            return
        started = time.time()
        train(config, place, cache_dir, listen)
        if ranks.main:
            write_done(place, seconds=round(time.time() - started, 1))
        ranks.agree("the end", "done")  # no rank exits earlier: launchers stop the others if one fails at exit


def check_here(config: RunConfig) -> str:
    """Raise an error, before anything is written, if this machine or installation lacks something that a run needs.

    Also if the model or the engine lacks something, as far as that is known without loading them. Returns the digest of
    `check_task`.

    Raises:
        ValueError: the tiny model does not have the sites of `method.keep_sites`.
        ModelError: see `moe_rl.policy.models.check_machine`.
        EngineError: the same for the rollout engine.
        TrackerError: the tracker's package is missing.
        TaskError: the task gives no problem or no reward.
    """
    check_machine(config.model)
    check_engine_here(config.rollout.engine, config.model.device)
    check_tracker(config.tracker)
    task = check_task(config)
    if config.model.path is None:
        sites = check_tiny(config.model, make_task(config.task).alphabet)
        check_sites(config.method.keep_sites or (), sites)
    return task


def check_task(config: RunConfig) -> str:
    """Judge one problem of each split, so that a task that cannot work is found before the first step.

    Returns a digest of the task's `identity` and of a few problems; empty if the problems differ each time. Raises
    TaskError.
    """
    task = make_task(config.task)
    for held_out in (False, True):
        problem = problems_of(task, random.Random(0), 1, held_out)[0]
        with user_code(task, "reward", problem, problem.answer, config.task.verifier_seconds):
            checked_reward(task.reward(problem, problem.answer))
    asked = _task_text(task)
    return sha256_of_bytes(asked.encode()) if asked == _task_text(task) else ""


def _task_text(task: Any) -> str:
    """Return the task's `identity` and `SHOWN` problems of each split as text."""
    problems = [p for held_out in (False, True) for p in problems_of(task, random.Random(0), SHOWN, held_out)]
    shown = [(p.prompt, p.messages, p.answer if isinstance(p.answer, str) else "") for p in problems]
    return repr([getattr(task, "identity", ""), *shown])


def check_folder(config: RunConfig, folder: Path) -> bool:
    """Return True if there is work left to do in `folder`.

    Raises ConfigError if the folder belongs to another configuration, is named for another seed, or is not empty and
    holds no run; DamagedRunError if the folder has lost some of what was written there.
    """
    named = seed_of(folder)
    if named not in (None, config.seed):
        raise ConfigError(
            f"{folder} is named for seed {named}, and this run has seed {config.seed}: say --seed {named}, or --output "
            f".../seed{config.seed}"
        )
    stored = folder / "config.yaml"
    if stored.exists():
        try:
            old = parse_yaml(stored.read_bytes())
            if not isinstance(old, dict):
                raise ValueError("it holds no mapping of settings")
        except OSError as error:
            raise DamagedRunError(f"{stored} cannot be read ({error.strerror}). Nothing was changed.") from error
        except ValueError as error:
            raise DamagedRunError(f"{stored} is damaged: {error}. Move {folder} away to run again.") from error
        changed = changed_settings(old, config)
        if changed and begun(folder):
            raise ConfigError(
                f"{folder} holds a run of another configuration ({listed(changed)}). Nothing was overwritten: choose "
                "another --output, or move the folder away."
            )
    elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no run (no config.yaml). Choose another --output.")
    lost = what_is_lost(folder, checkpoint=True)
    if lost:
        raise DamagedRunError(f"{lost}. {remedy(folder)}")
    return not (folder / NAME).exists()


def _free_differ(stored: Path, config: RunConfig) -> bool:
    """Return whether the stored configuration differs from `config` in settings that change no number (`FREE`)."""
    then = with_defaults(parse_yaml(stored.read_bytes()), config)
    return any(then.get(name) != now for name, now in plain(config).items() if name in FREE)


def begun(folder: Path) -> bool:
    """Return whether a run left more in `folder` than its settings and environment.

    The settings of a run that failed before it left more (of a wrong path, say) may be corrected.
    """
    return any(path.name not in ("config.yaml", "env.json") and path.name[0] != "." for path in folder.iterdir())


def environment(command: str) -> dict[str, Any]:
    """Return the facts that a reader needs to repeat the run, or to see why numbers differ elsewhere.

    They are commit, versions, device, processor, instruction set in use, math libraries, threads and `command`.
    """
    cuda = torch.cuda.is_available()
    return {
        **_git(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "cuda": torch.version.cuda if cuda else None,
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "rounding": os.environ.get("ATEN_CPU_CAPABILITY", "native"),
        "math_libraries": _math_libraries(torch.__config__.show()),
        "threads": torch.get_num_threads(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def processor() -> str:
    return platform.processor() or platform.machine()


def _cpu_model() -> str:
    """Return the name of the processor, as far as the system tells."""
    with suppress(OSError):
        if named := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M):
            return named[1].strip()
    return processor()


def _math_libraries(built: str) -> list[str]:
    """Return what `torch.__config__.show()` lists; of the build settings only the BLAS, not the compiler's flags."""
    lines = re.findall(r"^\s*- (.*)", built, re.M)
    return [line for line in lines if not line.startswith("Build settings")] + re.findall(r"BLAS_INFO=\w+", built)


def _git() -> dict[str, Any]:
    """Return the commit and dirty flag of the source tree, None for a tree that is not a checkout."""
    describe, here = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"], Path(__file__).parent
    try:
        ran = subprocess.run(describe, cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": None, "git_dirty": None}
    said = ran.stdout.strip()
    return {"git_commit": said.removesuffix("-dirty"), "git_dirty": said.endswith("-dirty")}
