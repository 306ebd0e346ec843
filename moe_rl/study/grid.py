"""Running of a whole study: many runs at a time, here or as jobs of a cluster, with progress and resumption."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from moe_rl.files import sole_writer, write_atomic, write_json
from moe_rl.names import RESERVED, ROUNDING
from moe_rl.settings import FREE, differences, listed, plain
from moe_rl.study.config import (
    ConfigError,
    DamagedRunError,
    StudyConfig,
    changed_settings,
    dump_study,
    load_study,
    parse_study,
)
from moe_rl.study.folders import StudyDataError, read_yaml, seeds_in
from moe_rl.study.jobs import Jobs, job_options
from moe_rl.study.launchers import Launcher, NotTakenError, Processes, check_roundings
from moe_rl.study.run import begun, check_folder, environment
from moe_rl.study.runs import Run, show
from moe_rl.study.words import not_mathematics
from moe_rl.training.launch import launched_processes
from moe_rl.yaml_files import parse_yaml

POLL_SECONDS = 1.0
AGAIN_SECONDS = 60.0
"""Seconds after which a run that a launcher did not take is offered again, unless another run ends before."""


class StudyFailed(RuntimeError):
    """Error for a study with runs that did not finish; the message says which, why and how to go on."""


def run_study(
    study: StudyConfig,
    output: Path,
    cold_starts: Path,
    workers: int,
    command: str,
    roundings: Sequence[str] = ("native",),
    launcher: str = "processes",
    launcher_options: Sequence[str] = (),
    whole: StudyConfig | None = None,
) -> None:
    """Run every (arm, seed) of `study` under `output`, `workers` at a time; finished runs are kept.

    Each of `roundings` repeats the whole study, cold starts included, with other CPU kernels: `native` in `output`
    itself, any other in `output/rounding_NAME`, which is a study folder of its own.

    Args:
        launcher: `processes` of this machine, or jobs: `slurm`, `submitit-local` (see `moe_rl.study.jobs`).
        launcher_options: options of the jobs, as `key=value`.
        whole: the study of the whole file, if `study` has only some of its arms; None: `study` has all of them.

    Raises:
        ConfigError: `output` is another study's or holds something else, a run folder belongs to another
            configuration, a rounding that this machine does not have, or a
            launcher that cannot start here; nothing is started.
        ModelError, EngineError: an arm that this machine cannot run; nothing is started (jobs of a cluster: each job
            finds out for itself).
        NotTakenError: the cluster takes no job, and none goes on.
        InUseError: another process runs this study.
        StudyFailed: runs that ended with an error, or whose folder is damaged, after all the others were finished.
    """
    check_labels(study)
    # a cluster's nodes are other machines than this one: each job checks its own node
    check_roundings(roundings, "AVX512" if launcher == "slurm" else torch.backends.cpu.get_cpu_capability())
    places = {name: output if name == "native" else output / f"{ROUNDING}{name}" for name in roundings}
    if launcher == "processes" and launcher_options:
        raise ConfigError("--launcher-options are those of jobs: say --launcher slurm too")
    make = Processes() if launcher == "processes" else Jobs(launcher, study.name, output, job_options(launcher_options))
    for option, path in (("--output", output), ("--cold-starts", cold_starts)):
        if str(path).startswith("-"):
            raise ConfigError(f"{option}: {path} would be taken for an option later; say {path.absolute()}")
    for place in places.values():
        check_place(study, place)
        check_other_seeds(study, place)
    runs = [run for name, place in places.items() for run in _runs(study, place, name, make.check)]
    with sole_writer(output, command):
        declared = {place: _study_yaml(study, place, whole or study) for place in places.values()}
        for place, text in declared.items():
            (place / "logs").mkdir(parents=True, exist_ok=True)
            write_atomic(place / "study.yaml", text)
            write_json(place / "env.json", environment(command))
        show(runs, workers, _schedule(runs, make, cold_starts, workers))
    failed = [run for run in runs if run.state == "failed"]
    if failed:
        reasons = "\n".join(f"  {run.name}: {run.reason()}" for run in failed)
        others = "The others are complete. " if len(failed) < len(runs) else ""
        raise StudyFailed(
            f"{len(failed)} of {len(runs)} runs did not finish:\n{reasons}\n"
            f"{others}The same command goes on from the last checkpoints."
        )


def check_place(study: StudyConfig, place: Path) -> None:
    """Raise ConfigError if a study's folder is another study's, or holds what no study writes."""
    remedy = "Nothing was overwritten: choose another --output, or move the folder away"
    declared = place / "study.yaml"
    if declared.is_file():
        with suppress(StudyDataError):  # damaged: it is written anew
            name = read_yaml(declared).get("name")
            if name != study.name:
                raise ConfigError(f"{place} holds the study {name!r}, and this one is {study.name!r}. {remedy}")
        return
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        ours = path.name in RESERVED or path.name.startswith((".", ROUNDING)) or seeds_in(path)
        if not ours:
            raise ConfigError(f"{place} holds no study (no study.yaml) but {path.name}. {remedy}")


def check_other_seeds(study: StudyConfig, place: Path) -> None:
    """Raise ConfigError if an arm has runs of other seeds, with other settings, in `place`: they would be pooled."""
    for name, arm in study.arms.items():
        for seed in sorted(seeds_in(place / name) - set(arm.seeds or study.seeds)):
            folder = place / name / f"seed{seed}"
            with suppress(StudyDataError):  # damaged or missing: reported where the run is read
                changed = changed_settings(read_yaml(folder / "config.yaml"), study.resolve(name, seed))
                if changed and begun(folder):
                    raise ConfigError(
                        f"{folder} was run under other settings ({listed(changed)}), and seeds of one arm are pooled. "
                        "Nothing was overwritten: choose another --output, or move that folder away"
                    )


def _study_yaml(study: StudyConfig, place: Path, whole: StudyConfig) -> str:
    """Return the text of a folder's `study.yaml`, which every run in the folder reads.

    Raises ConfigError: no run could read it, because of the options of this command, or of arms that earlier commands
    ran there.
    """
    merged = with_earlier(study, place, whole)
    text = dump_study(merged)
    try:
        parse_study(parse_yaml(text.encode()), merged=True)
    except ValueError as error:
        if merged.arms.keys() == study.arms.keys():
            raise ConfigError(f"the study with the options of this command: {error}") from error
        raise ConfigError(
            f"{place}: this study, with the arms that earlier commands ran there: {error}. Nothing was overwritten: "
            "choose another --output"
        ) from error
    return text


def with_earlier(study: StudyConfig, place: Path, whole: StudyConfig) -> StudyConfig:
    """Return the study as its folder holds it: also with the arms and seeds that earlier commands ran there.

    Arms and seeds that this command leaves out (`--arms`, `--seeds`) are added in the order of the study file, with the
    comparisons that were declared of them.

    whole: the study of the whole file, of which `study` may have some arms: a pair whose arms two commands ran is
        declared there.
    """
    try:
        earlier = load_study(place / "study.yaml", merged=True)
    except ConfigError:  # none yet, or one of another version
        return study
    if earlier.name != study.name or set(differences(plain(earlier.base), plain(study.base))) - set(FREE):
        return study
    there = {name: seeds_in(place / name) for name in (*study.arms, *earlier.arms)}
    every_arm = replace(study, arms={**earlier.arms, **study.arms})
    settings = {name: repr(every_arm.resolve(name, study.seeds[0])) for name in every_arm.arms}
    ours = {settings[name] for name in study.arms}  # an earlier arm with one of these was only renamed
    others = {n: a for n, a in earlier.arms.items() if n not in study.arms and there[n] and settings[n] not in ours}
    seeds = {name: there[name] | set(arm.seeds or study.seeds) for name, arm in study.arms.items()}
    seeds |= {name: there[name] for name in others}
    every = set().union(*seeds.values())
    both = {**study.arms, **others}
    arms = {
        name: replace(both[name], seeds=None if seeds[name] == every else tuple(sorted(seeds[name])))
        for name in dict.fromkeys((*whole.arms, *both))
        if name in both
    }
    # pairs with an arm that the study file no longer has
    gone = [pair for pair in earlier.comparisons or () if not set(pair) <= whole.arms.keys()]
    kept = tuple(pair for pair in (*(whole.comparisons or ()), *gone) if set(pair) <= arms.keys())
    comparisons = None if whole.comparisons is None and not kept else kept
    return replace(study, arms=arms, seeds=tuple(sorted(every)), comparisons=comparisons)


def check_labels(study: StudyConfig) -> None:
    """Raise ConfigError for a label that figures cannot draw: between two `$` matplotlib reads mathematics."""
    for name, arm in study.arms.items():
        why = not_mathematics(arm.label)
        if why:
            raise ConfigError(
                f"arms.{name}.label: {arm.label!r} is no mathematics that figures can draw ({why}); write \\$ for a "
                "dollar"
            )


def _runs(study: StudyConfig, place: Path, rounding: str, check: Callable[[Run], None]) -> list[Run]:
    """Return every (arm, seed) of `study` in `place` as a Run, with what is there already.

    Runs that are still to be made are checked. Raises the errors of `run_study`.
    """
    runs = []
    for arm, seed in study.runs():
        config = study.resolve(arm, seed)
        folder = place / arm / f"seed{seed}"
        run = Run(arm, seed, folder, place / "logs" / f"{arm}_seed{seed}.log", config, rounding)
        try:
            run.state = "waiting" if check_folder(config, folder) else "done"
        except DamagedRunError as error:
            run.state, run.problem = "failed", str(error)
        if run.state == "waiting":
            if launched_processes() > 1:
                raise ConfigError("moe-rl study is started once, not under torchrun or accelerate launch")
            check(run)
        runs.append(run)
    return runs


def _next(waiting: list[Run], active: list[Run]) -> Run:
    """Return the first waiting run that needs no cold start which another run is making, else the first run."""
    making = [run for run in active if run.starting]
    free = (run for run in waiting if not any(run.begins_like(other) for other in making))
    return next(free, waiting[0])


def _schedule(runs: list[Run], launcher: Launcher, cold_starts: Path, workers: int) -> Iterator[None]:
    """Start and watch the runs; yield once per poll. Raises NotTakenError: no run goes on, and none is taken."""
    waiting = [run for run in runs if run.state == "waiting"]
    active: list[Run] = []
    again = 0.0
    try:
        while waiting or active:
            while waiting and len(active) < workers and time.monotonic() >= again:
                run = _next(waiting, active)
                run.read()
                try:
                    launcher.start(run, _arguments(run, cold_starts))
                except NotTakenError as error:
                    if not active:
                        raise
                    run.note, again = str(error), time.monotonic() + AGAIN_SECONDS
                    break
                except ConfigError as error:  # concerns this run alone
                    run.state, run.problem = "failed", str(error)
                    waiting.remove(run)
                    continue
                waiting.remove(run)
                run.state, run.seconds = "running", time.monotonic()
                active.append(run)
            time.sleep(POLL_SECONDS)
            for run in list(active):
                run.read()
                finished = launcher.ended(run)
                if finished is not None:
                    run.state = "done" if finished else "failed"
                    run.seconds = time.monotonic() - run.seconds
                    active.remove(run)
                    again = 0.0
            yield
    finally:
        launcher.leave()


def _arguments(run: Run, cold_starts: Path) -> list[object]:
    """Return the arguments of `moe-rl` with which this run is made."""
    study = run.log.parent.parent / "study.yaml"
    chosen = ["run", study, "--arm", run.arm, "--seed", run.seed]
    # --trust: whoever started the study has decided about the code that the study names
    return [*chosen, "--output", run.folder, "--cold-starts", cold_starts, "--trust"]
