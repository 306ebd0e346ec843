"""The command line, `moe-rl COMMAND ...`: `moe_rl.usage.SUMMARY` says what each command does.

The first pages of help, and messages about a wrong command or study file, are printed before torch is imported;
`--help-all` and messages about wrong options of `study` and `run` are printed after.
"""

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from moe_rl.arguments import Given, arm_and_seed, fail, load, parse, study_file
from moe_rl.drift.commands import check_routes, compare_routes, drift, floor
from moe_rl.names import nearest
from moe_rl.processes import ends_with_its_reader, importing, interrupts, waiting_threads_sleep

LABORATORY = ("accelerate", "pandas", "pyarrow", "matplotlib", "scipy", "rich", "tyro", "yaml", "jinja2", "tokenizers")
"""Packages that the commands need beyond those of the instrument: the extra `lab`."""


@ends_with_its_reader()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Expected errors are one message on stderr and exit status 1; wrong usage is exit status
    2."""
    waiting_threads_sleep()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--version"]:
        from moe_rl import __version__

        print(f"moe_rl {__version__}")
        return
    missing = [name for name in LABORATORY if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            "the commands need the laboratory: pip install '.[lab]' in the checkout of moe_rl (not installed: "
            f"{', '.join(missing)}). moe_rl.routing, moe_rl.objectives and moe_rl.measure work without it."
        )
    from moe_rl.usage import root_page

    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(root_page())
        sys.exit(0 if arguments else 2)
    name, rest = arguments[0], arguments[1:]
    if name not in VERBS:
        what, known = ("option", ("--help", "--version")) if name.startswith("-") else ("command", tuple(VERBS))
        fail(f"unknown {what} {name!r}{nearest(name, known)}", 2)
    resumes = name in ("study", "run")
    try:
        with interrupts():
            VERBS[name](rest)
    except KeyboardInterrupt:
        fail(f"interrupted{'; the same command goes on from the last checkpoints' if resumes else ''}", 130)
    except BrokenPipeError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        fail(f"{error.filename}: a folder is needed there, and it is a file. Move it away, or name another folder.")
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        kept = ". What was finished is kept; the same command goes on from there." if resumes else ""
        fail(f"{error.strerror or error}{where}{kept}")
    except (ValueError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("MOE_RL_TRACEBACK"):
            raise
        fail(str(error))


def study_verb(arguments: list[str]) -> None:
    """Run `moe-rl study`: all arms and seeds of a study, then its figures and report; without arguments, list the
    studies."""
    from moe_rl.usage import studies_page

    if not arguments:
        print(studies_page())
        return
    given = study_file("study", arguments)
    if given.studies:
        run_listed(given)
        return
    with importing():
        import tyro

        from moe_rl.names import ROUNDING
        from moe_rl.study.config import check_seeds
        from moe_rl.study.folders import run_folders
        from moe_rl.study.grid import run_study
        from moe_rl.study.launchers import workers_of
        from moe_rl.training import RunConfig

    study = load(given.path)

    @dataclass(frozen=True)
    class Options:
        """Run a study. Any field of the base configuration can be given, e.g. --optim.steps 5."""

        base: Annotated[RunConfig, tyro.conf.arg(name="")]
        output: Path = Path("runs") / study.name
        """Folder of the study."""
        cold_starts: Path = Path("runs") / "cold_starts"
        """Where cold-started models are kept; studies share them."""
        workers: int = 0
        """Runs at a time, one thread each; 0: one per core (one in all on a GPU, or with the vLLM of another machine),
        or all as jobs."""
        launcher: Literal["processes", "slurm", "submitit-local"] = "processes"
        """Where runs are made: by processes of this machine, or as jobs of a Slurm cluster through submitit, which the
        same command submits, watches and finds again. submitit-local: the same jobs without a cluster, to try them."""
        launcher_options: tuple[str, ...] = ()
        """Options of each job, KEY=VALUE: timeout_min (default 720), mem_gb, nodes, cpus_per_task, gpus_per_node, and
        those of sbatch that submitit knows: partition, account, qos, constraint, gres, ..."""
        seeds: tuple[int, ...] = study.seeds
        """Seeds of every arm that does not name its own."""
        arms: tuple[str, ...] = tuple(study.arms)
        """Arms to run."""
        rounding: tuple[Literal["native", "avx512", "avx2", "default"], ...] = ("native",)
        """Repeat the seeds, cold starts included, with other CPU kernels, e.g. native avx2 default: how much of the
        spread is rounding. All but native go to OUTPUT/rounding_NAME."""
        figures: bool = True
        """Draw figures and the report when the runs are done."""
        trust: bool = False
        """Let the study file run code that is no part of moe_rl, and send data to machines that it names."""

    options = parse(Options, given.options, f"moe-rl study {given.word or 'NAME|FILE'}", Options(base=study.base))
    for name in ("seeds", "arms", "rounding"):
        if not getattr(options, name):
            fail(f"--{name}: at least one is needed", 2)
    check_seeds("--seeds", options.seeds)
    for arm in options.arms:
        if arm not in study.arms:
            near = "; arms are separated by spaces" if "," in arm else nearest(arm, study.arms)
            fail(f"unknown arm {arm!r} in {given.word}{near}", 2)
    if options.seeds != study.seeds and all(study.arms[arm].seeds for arm in options.arms):
        fail(f"--seeds: {'each of these arms names' if len(options.arms) > 1 else 'this arm names'} its own seeds", 2)
    if options.workers < 0:
        fail(f"--workers {options.workers}: expected how many runs at a time, or 0 for one per core", 2)
    chosen = replace(study.with_arms(options.arms).with_base(options.base), seeds=options.seeds)
    run_study(
        chosen,
        options.output,
        options.cold_starts,
        options.workers or workers_of(chosen, options.launcher, len(options.rounding)),
        shlex.join(["moe-rl", "study", *arguments]),
        options.rounding,
        options.launcher,
        options.launcher_options,
        study,
    )
    if not options.figures:
        return
    # the report of native runs shows the other roundings too; without native runs, each rounding gets its own report
    alone = [] if run_folders(options.output) else [options.output / f"{ROUNDING}{name}" for name in options.rounding]
    for folder in alone or [options.output]:
        draw_report(folder)


def run_verb(arguments: list[str]) -> None:
    """Run `moe-rl run`: one arm of a study with one seed."""
    given = study_file("run", arguments)
    arm, seed = arm_and_seed(given)
    with importing():
        import tyro
        from torch.distributed import is_initialized

        from moe_rl.processes import end_at_once
        from moe_rl.study.progress import Lines
        from moe_rl.study.run import run_one
        from moe_rl.training import RunConfig

    study = load(given.path, merged=True)  # for one run: what makes arms comparable is not checked
    first = next(iter(study.arms)) if arm is None else arm

    @dataclass(frozen=True)
    class Options:
        """Run one arm with one seed. Any field of its configuration can be given, e.g. --optim.steps 5."""

        config: Annotated[RunConfig, tyro.conf.arg(name="")]
        arm: str = first
        """Arm of the study file."""
        output: Path | None = None
        """Run folder; by default runs/STUDY/ARM/seedN."""
        cold_starts: Path = Path("runs") / "cold_starts"
        """Where cold-started models are kept; studies share them."""
        trust: bool = False
        """Let the study file run code that is no part of moe_rl, and send data to machines that it names."""

    config = study.resolve(first, study.seeds[0] if seed is None else seed)
    options = parse(Options, given.options, f"moe-rl run {given.word or 'NAME|FILE'}", Options(config))
    folder = options.output or Path("runs") / study.name / options.arm / f"seed{options.config.seed}"
    command = shlex.join(["moe-rl", "run", *arguments])
    done = (folder / "DONE").exists()
    run_one(options.config, folder, options.cold_starts, Lines(steps=options.config.optim.steps), command)
    if os.environ.get("RANK", "0") == "0":
        print(f"{'already done' if done else 'done'}: {folder}")
    if is_initialized():
        end_at_once()


def figures_verb(arguments: list[str]) -> None:
    """Run `moe-rl figures`: draw figures and report of a study again, from its run folders."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Draw figures from run folders alone: those that are named, or all of them and the report."""

        folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
        """A study folder, e.g. runs/replay_vs_gspo."""
        names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")] = ()
        """Only these figures, e.g. reward expert_change."""

    options = parse(Options, arguments, "moe-rl figures")
    if not options.names:
        draw_report(options.folder)
        return
    from moe_rl.study.figures import draw_some

    for path in draw_some(options.folder, options.names):
        print(path)


def watch_verb(arguments: list[str]) -> None:
    """Run `moe-rl watch`: serve the page that follows a study, or print the alarms so far."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Serve a page that follows a running or finished study, to this machine only."""

        folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
        """A study folder, e.g. runs/replay_vs_gspo, one run's, or a folder of studies, e.g. runs."""
        port: int = 0
        """Port of the page; 0: 8765 or the next free one."""
        open: bool = False
        """Open the page in the browser."""
        once: bool = False
        """Serve nothing: print the alarms so far. Exit status 3: one crossed, a reward collapsed, or the metric of an
        alarm of the study's own is null; 1: an error."""

    options = parse(Options, arguments, "moe-rl watch")
    if options.once and (options.port or options.open):
        fail("moe-rl watch: --once serves nothing; leave --port and --open out", 2)
    from moe_rl.study import watch, watch_once

    if options.once:
        sys.exit(watch_once.print_alarms(options.folder))
    watch.watch(options.folder, options.port, options.open)


def doctor_verb(arguments: list[str]) -> None:
    """Run `moe-rl doctor`: check what this machine can run and, given a study, what it needs."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Check packages, devices and memory; given a study, also what it needs, for its most demanding arm. Downloads
        nothing. Exit status 0 if all that is required is there, else 1."""

        file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|FILE]")] = None
        """A study that comes with moe_rl, or a study file."""
        devices: int | None = None
        """Plan for so many devices, weights sharded over them (ddp: whole); by default for as many as a run takes: one
        without distributed.strategy, else distributed.processes or all that are here."""
        memory: float | None = None
        """Plan for devices with so many GB (10^9 bytes) each; by default what is free here."""
        json: bool = False
        """Print JSON."""
        trust: bool = False
        """Let the study file run code that is no part of moe_rl, and send data to machines that it names."""

    options = parse(Options, arguments, "moe-rl doctor")
    path = None
    if options.file is not None:
        from moe_rl.study.shipped import find_study, one_study, refuse_foreign_code

        path = find_study(options.file)
        refuse_foreign_code(path, one_study(path), options.trust)
    from moe_rl.study.config import load_study
    from moe_rl.study.doctor import doctor, planned

    sys.exit(doctor(load_study(path) if path else None, planned(options.devices, options.memory), options.json))


def run_listed(given: Given) -> None:
    """Run the listed studies one after the other, each with the given options; what is done is not done again. A study
    with failed runs does not stop the studies after it.

    Raises:
        StudyFailed: at the end, with the failures of all studies.
    """
    from moe_rl.study.grid import StudyFailed

    for name in ("--output", "--arms"):
        if any(option.partition("=")[0] == name for option in given.options):
            fail(f"{name} is for one study; {given.word} lists {', '.join(file.stem for file in given.studies)}", 2)
    failed = []
    for number, file in enumerate(given.studies, start=1):
        print(f"study {number} of {len(given.studies)}: {file.stem}", flush=True)
        try:
            study_verb([str(file), *given.options])
        except StudyFailed as error:
            failed.append(f"{file.stem}: {error}")
    if failed:
        raise StudyFailed("\n".join(failed))
    for command in given.then:
        print(f"then: {command}")


def draw_report(folder: Path) -> None:
    """Draw the figures and the report of a study folder, and print where the report is."""
    from moe_rl.study.report import draw_study

    print(f"report: {draw_study(folder)}")


VERBS: dict[str, Callable[[list[str]], None]] = {
    "study": study_verb,
    "run": run_verb,
    "figures": figures_verb,
    "watch": watch_verb,
    "drift": drift,
    "floor": floor,
    "check-routes": check_routes,
    "compare-routes": compare_routes,
    "doctor": doctor_verb,
}

if __name__ == "__main__":
    sys.exit("moe_rl.cli is no command: moe-rl ..., or python -m moe_rl ...")
