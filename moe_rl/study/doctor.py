"""`moe-rl doctor [FILE]`: what this machine can run, and what a study would need. Loads no model, downloads nothing."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from moe_rl.measure.noise_floor import free_bytes
from moe_rl.policy.models import check_path, has_tokenizer, load_tokenizer
from moe_rl.policy.tiny import char_tokenizer
from moe_rl.processes import usable_cores
from moe_rl.rollout import TaskError, make_task
from moe_rl.rollout.completions import check_positions, encode_prompts
from moe_rl.rollout.engines import EngineError
from moe_rl.rollout.task import problems_of
from moe_rl.starts import NOT_INSTALLED, version_of
from moe_rl.study.config import StudyConfig
from moe_rl.study.memory import Plan, architecture, plan
from moe_rl.study.power import fewest_pairs
from moe_rl.study.run import check_here, processor
from moe_rl.study.statistics import FEWEST
from moe_rl.study.words import count
from moe_rl.training import RunConfig


@dataclass(frozen=True)
class Check:
    """One line of the report; `ok` is None if nothing is required."""

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """What a machine has to compute with: devices, and memory and disk in bytes.

    `accelerator`: cuda, cpu or planned; `asked`: whether the number of devices is that of a plan which somebody asked
    for.
    """

    accelerator: str
    devices: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    bf16: bool
    asked: bool = False


def inspect_machine() -> Machine:
    """Return what this machine has: devices, host memory and disk space.

    Device memory is what is free on the fullest device, host memory what is available, disk what is free in this
    folder.
    """
    host, disk = available_memory(), shutil.disk_usage(".").free
    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        names = tuple(torch.cuda.get_device_name(i) for i in indices)
        free = min(torch.cuda.mem_get_info(i)[0] for i in indices)
        return Machine("cuda", names, free, host, disk, torch.cuda.is_bf16_supported(including_emulation=False))
    return Machine("cpu", (processor(),), host, host, disk, True)


def planned(devices: int | None, memory: float | None) -> Machine:
    """Return this machine, or as it would be with so many devices, of so many GB.

    Raises ValueError: fewer than one device, more than a million, or devices without memory.
    """
    here = inspect_machine()
    if devices is None and memory is None:
        return here
    count = len(here.devices) if devices is None else devices
    size = here.device_bytes if memory is None else memory * 1e9
    if not 1 <= count <= 1_000_000 or not 1 <= size < math.inf:
        raise ValueError(
            f"doctor: at least 1 device with some memory, at most a million of them, got {count} with {size / 1e9:g} GB"
        )
    kind = here.accelerator if memory is None else "planned"
    names, asked = ("planned device",) * count, devices is not None
    bf16 = here.bf16 if memory is None else True  # more of the same devices compute what these do
    return replace(here, accelerator=kind, devices=names, device_bytes=int(size), bf16=bf16, asked=asked)


def available_memory() -> int:
    """Return the bytes of host memory that are available now: what the kernel says, within the container's limit."""
    free = free_bytes(torch.device("cpu"))
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *left_in_cgroups()])


def left_in_cgroups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the bytes left under each memory limit (cgroup v2, v1) of this process's group and the groups above it.

    Groups without a limit are left out. Inactive page cache counts as left, because the kernel drops it when memory is
    wanted.
    """
    lines = [line.split(":", 2) for line in own.read_text().splitlines()] if own.exists() else []
    groups = {name: path.strip("/") for _, names, path in lines for name in names.split(",")}  # v2 has an empty name
    left = []
    for group, most, now, cached in (
        (root / groups.get("", ""), "max", "current", "inactive_file"),
        (root / "memory" / groups.get("memory", ""), "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
    ):
        for folder in (group, *group.parents):
            try:
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in (most, now))
                cache = re.search(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.M)
            except (OSError, ValueError):  # not there, or no limit
                continue
            left.append(limit - used + (int(cache[1]) if cache else 0))
    return left


def check_packages() -> list[Check]:
    """Check every package of the instrument and the laboratory against its bounds; then list the optional extras."""
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires("moe_rl") or ()]
    except importlib.metadata.PackageNotFoundError:
        return [Check("moe_rl", False, "not installed as a package", "pip install -e . in its folder")]
    checks = [Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} (>=3.11)")]
    extras: dict[str, list[Requirement]] = {}
    for requirement in declared:
        marker = str(requirement.marker or "")
        extra = next((name for name in EXTRAS if f'extra == "{name}"' in marker), None)
        if extra is not None:
            extras.setdefault(extra, []).append(requirement)
        elif not marker or 'extra == "lab"' in marker:
            found, fits = installed(requirement)
            package = "'.[lab]' in the checkout" if marker else f"'{requirement.name}{requirement.specifier}'"
            remedy = "" if fits else f"pip install {package}"
            checks.append(Check(requirement.name, fits, f"{found} ({requirement.specifier})", remedy))
    for extra, requirements in sorted(extras.items()):
        found = ", ".join(f"{r.name} {installed(r)[0]}" for r in requirements)
        all_fit = all(installed(r)[1] for r in requirements)
        remedy = "" if all_fit else f"pip install '.[{extra}]' in the checkout"
        checks.append(Check(f"extra: {extra}", None, found, remedy))
    present = importlib.util.find_spec("megablocks") is not None
    checks.append(Check("megablocks", None, "installed" if present else "not installed", "docs/megablocks.md"))
    return checks


EXTRAS = ("notebooks", "peft", "trl", "reasoning-gym", "math-verify", "slurm", "trackers")
"""Extras for users; their packages are optional."""


def installed(requirement: Requirement) -> tuple[str, bool]:
    """Return the installed version of a package, and whether that is within the bounds."""
    version = version_of(requirement.name)
    return version, version != NOT_INSTALLED and requirement.specifier.contains(Version(version), prereleases=True)


def check_machine_parts(machine: Machine) -> list[Check]:
    """List torch's build, devices, cores, memory, disk and compilers, for information."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    compilers = ", ".join(name if shutil.which(name) else f"no {name}" for name in ("g++", "nvcc"))
    bf16 = "bf16" if machine.bf16 else "no native bf16"
    devices = f"{len(machine.devices)} x {machine.devices[0]} ({machine.accelerator})"
    return [
        Check("torch build", None, f"{torch.__version__}, {build}"),
        Check("devices", None, f"{devices}, {gb(machine.device_bytes)} free, {bf16}"),
        Check("cores", None, str(usable_cores())),
        Check("host memory", None, f"{gb(machine.host_bytes)} available"),
        Check("disk", None, f"{gb(machine.disk_bytes)} free here"),
        Check("compilers", None, compilers, "torch.compile needs a C++ compiler" if "no g++" in compilers else ""),
    ]


def check_study(study: StudyConfig, machine: Machine) -> tuple[list[Check], Plan | None, str]:
    """Check what a study needs, for its most demanding arm, against what there is; return checks, plan and arm.

    The plan is None if the model's configuration is not at hand, or peft is missing and an arm needs it.
    """
    runs = {arm: study.resolve(arm, study.seeds[0]) for arm in study.arms}
    checks = [check_options(runs), *check_parts(runs, machine), *check_comparisons(study)]
    if any(run.model.lora is not None for run in runs.values()) and importlib.util.find_spec("peft") is None:
        return [*checks, Check("peft", False, "not installed", "pip install '.[peft]' in the checkout")], None, ""
    counts = {arm: processes(run, machine) for arm, run in runs.items()}
    shared = machine.accelerator == "cpu"  # all processes share the host's memory
    try:
        plans = {arm: plan(run, counts[arm]) for arm, run in runs.items()}
        needed = {arm: of.peak * (counts[arm] if shared else 1) for arm, of in plans.items()}
    except (ValueError, OSError) as error:
        return [*checks, Check("model configuration", False, str(error))], None, ""
    arm = max(needed, key=lambda name: needed[name])
    worst, n, distributed = plans[arm], counts[arm], runs[arm].distributed
    said = 1 if distributed.strategy == "none" else distributed.processes or n
    how = "whole (ddp)" if distributed.strategy == "ddp" else "sharded"
    where = f"for {n} processes together, {how}" if shared else f"on each of {n}, {how}"
    checks.append(fits("device memory", needed[arm], machine.device_bytes, where if n > 1 else "on one device"))
    if said != n:
        holds, alone = "one device holds" if said == 1 else f"each of {said} holds", plan(runs[arm], said).peak
        strategy = "fsdp2" if distributed.strategy == "none" else distributed.strategy
        remedy = f"needs --distributed.strategy {strategy} --distributed.processes {n}"
        checks.append(Check("processes", None, f"as the file stands {holds} {gb(alone)}", remedy))
    elif (most := max(counts.values())) > len(machine.devices) and not shared:
        found = f"distributed.processes: {most}, and devices here: {len(machine.devices)}"
        checks.append(Check("processes", False, found, f"--devices {most} plans for machines that have them"))
    if machine.accelerator != "cpu":
        checks.append(fits("host memory", worst.host_bytes, machine.host_bytes, "to load models and write checkpoints"))
    each = [plans[arm] for arm, _ in study.runs()]
    kept = sum(one.kept_bytes for one in each)
    disk = kept + sum(one.checkpoint_bytes for one in each) + max(one.checkpoint_bytes for one in each)
    where = f"for the checkpoints of {len(each)} runs" + (f", {gb(kept)} of it for policies that stay" if kept else "")
    checks.append(fits("disk", disk, machine.disk_bytes, where))
    return checks, worst, arm


def processes(run: RunConfig, machine: Machine) -> int:
    """Return over how many processes, one device each, a run is planned.

    That is the number that was asked for, else what the run says itself (one without a strategy, or
    `distributed.processes`), else one for each device that is here.
    """
    if machine.asked:
        return len(machine.devices)
    return 1 if run.distributed.strategy == "none" else run.distributed.processes or len(machine.devices)


def check_options(runs: Mapping[str, RunConfig]) -> Check:
    """Check whether the arms' options of models and engines are usable here."""
    try:
        for run in runs.values():
            check_here(run)
    except (ValueError, TaskError, EngineError) as error:
        return Check("model options", False, str(error))
    return Check("model options", True, "usable here")


def check_parts(runs: Mapping[str, RunConfig], machine: Machine) -> list[Check]:
    """Check tasks, prompts and bf16 of all arms; a line that does not hold of every arm names its arms."""
    known: dict[str, list[Check]] = {}
    arms: dict[Check, list[str]] = {}
    for arm, run in runs.items():
        parts = repr((run.task, run.model))
        if parts not in known:
            known[parts] = check_task(run)
            if run.model.dtype == "bfloat16" and not machine.bf16:
                remedy = "model.dtype float32, or another device"
                known[parts].append(Check("bf16", False, "the device has no native bf16", remedy))
            elif run.model.dtype == "bfloat16" and machine.accelerator == "cpu":
                known[parts].append(Check("bf16", None, "works on a CPU, slower than fp32 on most"))
        for check in known[parts]:
            arms.setdefault(check, []).append(arm)
    return [
        check if len(of) == len(runs) else replace(check, found=f"{', '.join(of)}: {check.found}")
        for check, of in arms.items()
    ]


def check_task(run: RunConfig) -> list[Check]:
    """Check that the task is usable here, and that tokenizer and model can take its prompts.

    The tokenizer must have tokens for the prompts, and the model positions for prompts and responses. There is no
    second line if the tokenizer, the model's configuration or the task is not at hand.
    """
    path = run.model.path
    try:
        task = make_task(run.task)
        problems = problems_of(task, random.Random(0), 64)
    except (ValueError, TaskError) as error:
        return [Check("task", False, str(error))]
    usable = Check("task", True, "usable here")
    try:
        folder = None if path is None else Path(check_path(path))
        alphabet = task.alphabet if folder is None else ""
        config = architecture(run.model, alphabet)
    except (ValueError, OSError):
        return [usable]  # a line of its own says what is wrong with the model's configuration
    if folder is not None and not has_tokenizer(folder):
        return [usable]  # a hub id, or a folder with a configuration alone
    try:
        tokenizer = (
            char_tokenizer(alphabet) if folder is None else load_tokenizer(str(folder), run.model.trust_remote_code)
        )
        lengths = encode_prompts(tokenizer, problems)[1].sum(1)
        check_positions(config, problems, lengths, run.rollout.max_new_tokens or task.max_new_tokens)
    except ValueError as error:
        return [usable, Check("prompts", False, str(error))]
    return [usable, Check("prompts", True, "the tokenizer has tokens for them, the model room for the responses")]


def check_comparisons(study: StudyConfig) -> list[Check]:
    """Check that the declared comparisons have the pairs of seeds that a verdict needs.

    A user who hears of missing pairs after the runs hears of them too late.
    """
    seeds = {name: set(arm.seeds or study.seeds) for name, arm in study.arms.items()}
    pairs = [len(seeds[arm] & seeds[other]) for arm, other in study.comparisons or ()]
    family = sum(n >= FEWEST for n in pairs) or len(pairs)
    few = [n for n in pairs if n < fewest_pairs(family)]
    if not few:
        return []
    which = f"{len(few)} of {len(pairs)} declared" if len(few) < len(pairs) else f"{len(pairs)} declared"
    each = count(max(few), "pair") if min(few) == max(few) else f"{min(few)} to {max(few)} pairs"
    what = "a range and no verdict" if min(few) < FEWEST else "“no difference of interest” at most"
    needed = f"“higher” and “lower” over {family} need {fewest_pairs(family)} pairs"
    return [Check("comparisons", None, f"{which}, {each} of seeds: {what}", needed)]


def fits(name: str, needed: int, there: int, where: str) -> Check:
    """Return a check, in plain words, of the bytes that are needed against those that are there."""
    words = f"needs {gb(needed)} {where}, {gb(there)} there"
    return Check(name, needed <= there, words, "" if needed <= there else f"{gb(needed - there)} too little")


def gb(count: int) -> str:
    """Return a number of bytes as text in decimal units, with two or more digits.

    >>> gb(61_064_245_248), gb(2_490_000_000), gb(460_000)
    ('61 GB', '2.5 GB', '0.46 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= 9.95 * size:
            return f"{count / size:.0f} {unit}"
        if count >= 0.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e6:.2f} MB"


def examine(study: StudyConfig | None, machine: Machine) -> dict[str, Any]:
    """Return everything that the report says as plain data; `ok`: whether nothing that is required is missing."""
    checks = check_packages() + check_machine_parts(machine)
    found: dict[str, Any] = {"machine": asdict(machine), "checks": [asdict(check) for check in checks]}
    if study is not None:
        of_study, needs, arm = check_study(study, machine)
        checks += of_study
        found["study"] = {"name": study.name, "arm": arm, "checks": [asdict(check) for check in of_study]}
        if needs is not None:
            found["study"] |= {"plan": asdict(needs) | {"peak": needs.peak}}
    found["ok"] = all(check.ok is not False for check in checks)
    return found


def report(found: dict[str, Any]) -> str:
    """Return the findings of `examine` as lines of text."""
    lines = ["This machine", *map(_line, found["checks"])]
    if study := found.get("study"):
        lines += ["", f"Study {study['name']}"]
        if needs := study.get("plan"):
            lines += [
                f"  {needs['architecture']}; {needs['parameters']:,} parameters, {needs['trainable']:,} trained",
                f"  prompts of {needs['prompt_tokens']} and responses of {needs['new_tokens']} tokens; routes "
                f"{needs['routes_bytes_per_token']}, KV cache {needs['kv_bytes_per_token']} bytes a token",
                f"  per device, arm {study['arm']} (the most demanding):",
            ]
            rows = [(need["bytes"], _need(need)) for need in needs["needs"]] + [
                (needs["peak"], "at the fullest; sampling, updating and probing do not happen at once"),
                (needs["host_bytes"], "on the host, all processes, to load models and write checkpoints"),
            ]
            lines += [f"    {gb(size):>9}  {words}" for size, words in rows]
        lines += map(_line, study["checks"])
    end = "Everything required is there." if found["ok"] else "Something required is missing: see the lines marked !!"
    return "\n".join([*lines, "", end])


def _need(need: dict[str, Any]) -> str:
    """Return one need of the plan in words: its name, when it is there, and its note."""
    when = {"always": "", "update": "while updating"}.get(need["when"], f"while {need['when']}")
    words = "; ".join(filter(None, (when, need["note"])))
    return f"{need['name']} ({words})" if words else need["name"]


def _line(check: dict[str, Any]) -> str:
    """Return one check as a line of the report."""
    mark = {True: "ok", False: "!!", None: "  "}[check["ok"]]
    return f"  {mark} {check['name']:20} {check['found']}" + (f" -> {check['remedy']}" if check["remedy"] else "")


def doctor(study: StudyConfig | None, machine: Machine, as_json: bool) -> int:
    """Print the report and return the exit status: 0 if all that is required is there, else 1."""
    found = examine(study, machine)
    print(json.dumps(found, indent=1) if as_json else report(found))
    return 0 if found["ok"] else 1
