"""The command line: moe-rl VERB ...

study FILE     all arms x seeds of a study, resuming what is unfinished; then figures and the report
run FILE       one arm and seed
figures DIR [NAME...]  redraw the figures and the report of a study folder, or the named figures
doctor [FILE]  what this machine can run, and what a study would need
watch DIR      follow a study in the browser
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro

VERBS: dict[str, tuple[str, Callable[[list[str]], None]]] = {}


def verb(name: str, summary: str) -> Callable[[Callable[[list[str]], None]], Callable[[list[str]], None]]:
    """Register a verb; its imports happen when it is called, so that help and mistakes answer at once."""

    def register(function: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
        VERBS[name] = (summary, function)
        return function

    return register


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Expected errors are one message on stderr and exit status 1; wrong usage is 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from moe_rl import __version__

        print(f"moe_rl {__version__}")
        return
    name = arguments[0]
    if name not in VERBS:
        from moe_rl.names import nearest

        fail(f"unknown command {name!r}{nearest(name, VERBS)}\n\n{usage()}", 2)
    try:
        VERBS[name][1](arguments[1:])
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it stopped", 130)
    except (FileExistsError, NotADirectoryError) as error:
        fail(f"{error.filename}: a folder is needed there, and it is a file. Choose another --output.")
    except OSError as error:
        where = f" while writing {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}. What was finished is kept; the same command goes on from there.")
    except (ValueError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("MOE_RL_TRACEBACK"):
            raise
        fail(str(error))


def fail(message: str, status: int = 1) -> NoReturn:
    """Say what is wrong on stderr and leave."""
    print(f"moe-rl: error: {message}", file=sys.stderr)
    sys.exit(status)


def usage() -> str:
    verbs = "\n".join(f"  {name:9}{summary}" for name, (summary, _) in VERBS.items())
    return f"usage: moe-rl COMMAND ...\n\n{verbs}\n\nmoe-rl COMMAND --help lists a command's options."


def _file_first(arguments: list[str], name: str, what: str) -> Path:
    """The leading positional argument, needed before the options can be known."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0])
    if "-h" in arguments or "--help" in arguments:
        print(f"usage: moe-rl {name} {what} [options]\n\nGive {what} first: the options show its values as defaults.")
        sys.exit(0)
    fail(f"{name} needs {what} as its first argument", 2)


@verb("study", "run all arms x seeds of a study file, then draw its figures and report")
def study_verb(arguments: list[str]) -> None:
    from moe_rl.names import nearest
    from moe_rl.study.config import load_study
    from moe_rl.study.grid import run_study
    from moe_rl.training import RunConfig

    path = _file_first(arguments, "study", "FILE")
    study = load_study(path)

    @dataclass(frozen=True)
    class Options:
        """Run a study. Any field of the base configuration can be given, e.g. --optim.steps 5."""

        base: Annotated[RunConfig, tyro.conf.arg(name="")]
        output: Path = Path("runs") / study.name
        """Folder of the study."""
        cold_starts: Path = Path("runs") / "cold_starts"
        """Where cold-started models are kept; studies share them."""
        workers: int = 0
        """Runs at a time, one thread each; 0: one per core (one in all on a GPU)."""
        seeds: tuple[int, ...] = study.seeds
        """Seeds of every arm that does not name its own."""
        arms: tuple[str, ...] = tuple(study.arms)
        """Arms to run."""
        rounding: tuple[Literal["native", "avx512", "avx2", "default"], ...] = ("native",)
        """Repeat the seeds, cold starts included, with other CPU kernels, e.g. native avx2 default: how much of the
        spread is rounding. All but native go to OUTPUT/rounding_NAME."""
        figures: bool = True
        """Draw figures and the report when the runs are done."""

    options = _parse(Options, arguments[1:], f"moe-rl study {path}", Options(base=study.base))
    if not options.seeds:
        fail("seeds: at least one is needed, e.g. --seeds 0 1 2", 2)
    for arm in options.arms:
        if arm not in study.arms:
            fail(f"unknown arm {arm!r} in {path}{nearest(arm, study.arms)}", 2)
    study = replace(study.with_arms(options.arms), base=options.base, seeds=options.seeds)
    run_study(
        study,
        options.output,
        options.cold_starts,
        options.workers or default_workers(),
        " ".join(["moe-rl", "study", *arguments]),
        options.rounding,
    )
    if options.figures:
        draw(options.output)


@verb("run", "run one arm and seed of a study file")
def run_verb(arguments: list[str]) -> None:
    from moe_rl.study.config import load_study
    from moe_rl.study.progress import Lines
    from moe_rl.study.run import run_one
    from moe_rl.training import RunConfig

    path = _file_first(arguments, "run", "FILE")
    study = load_study(path)

    @dataclass(frozen=True)
    class Chosen:
        arm: str = next(iter(study.arms))
        seed: int = study.seeds[0]

    given = [argument for argument in arguments[1:] if argument not in ("-h", "--help")]
    chosen, _ = tyro.cli(Chosen, args=given, prog=f"moe-rl run {path}", return_unknown_args=True)

    @dataclass(frozen=True)
    class Options:
        """Run one arm with one seed. Any field of its configuration can be given, e.g. --optim.steps 5."""

        config: Annotated[RunConfig, tyro.conf.arg(name="")]
        arm: str = chosen.arm
        """Arm of the study file."""
        output: Path | None = None
        """Run folder; by default runs/STUDY/ARM/seedN."""
        cold_starts: Path = Path("runs") / "cold_starts"
        """Where cold-started models are kept; studies share them."""

    config = study.resolve(chosen.arm, chosen.seed)
    options = _parse(Options, arguments[1:], f"moe-rl run {path}", Options(config))
    folder = options.output or Path("runs") / study.name / options.arm / f"seed{options.config.seed}"
    command = " ".join(["moe-rl", "run", *arguments])
    done = (folder / "DONE").exists()
    run_one(options.config, folder, options.cold_starts, Lines(options.config.optim.steps), command)
    if os.environ.get("RANK", "0") == "0":
        print(f"{'already done' if done else 'done'}: {folder}")


@verb("figures", "redraw the figures and the report of a study folder, or some figures only")
def figures_verb(arguments: list[str]) -> None:
    @dataclass(frozen=True)
    class Options:
        """Draw figures from run folders alone: all of them and the report, or only those that are named."""

        folder: tyro.conf.Positional[Path]
        """A study folder, e.g. runs/replay_vs_gspo."""
        names: tyro.conf.Positional[tuple[str, ...]] = ()
        """Figures to draw, e.g. reward expert_change; none: all, and the report."""

    options = _parse(Options, arguments, "moe-rl figures", None)
    if not options.names:
        draw(options.folder)
        return
    from moe_rl.study.figures import draw_some

    for path in draw_some(options.folder, options.names):
        print(path)


@verb("watch", "follow a study in the browser: a local page with its curves, routing and tokens")
def watch_verb(arguments: list[str]) -> None:
    @dataclass(frozen=True)
    class Options:
        """Serve a page that follows a running or finished study, to this machine only."""

        folder: tyro.conf.Positional[Path]
        """A study folder, e.g. runs/replay_vs_gspo, or one run's."""
        port: int = 0
        """0: 8765 or the next free one."""
        open: bool = False
        """Open the page in the browser."""

    options = _parse(Options, arguments, "moe-rl watch", None)
    from moe_rl.study.watch import watch

    watch(options.folder, options.port, options.open)


@verb("drift", "routing change between two checkpoints, whatever trained them")
def drift_verb(arguments: list[str]) -> None:
    from moe_rl.drift.run import DriftOptions, run_drift, say

    @dataclass(frozen=True)
    class Options(DriftOptions):
        """Compare the routing of two checkpoints of one architecture on a text."""

        old: tyro.conf.Positional[str]
        """The first checkpoint: a folder in hub format or a hub id."""
        new: tyro.conf.Positional[str]
        """The second, of the same architecture."""

    options = _parse(Options, arguments, "moe-rl drift", None)
    try:
        say(run_drift(options))
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", 130)
    except OSError as error:
        fail(f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}; nothing was written")


@verb("doctor", "what this machine can run, and what a study would need; downloads nothing")
def doctor_verb(arguments: list[str]) -> None:
    @dataclass(frozen=True)
    class Options:
        """Check packages, devices and memory; given a study file, also what it needs, for its most demanding arm.
        Exit status 0 if all that is required is there, else 1."""

        file: tyro.conf.Positional[Path | None] = None
        """A study file."""
        devices: int | None = None
        """Plan for so many devices, weights sharded over them; by default those that are here."""
        memory: float | None = None
        """Plan for devices with so many GB (10^9 bytes) each; by default what is free here."""
        json: bool = False
        """Print JSON."""

    options = _parse(Options, arguments, "moe-rl doctor", None)
    from moe_rl.study.config import load_study
    from moe_rl.study.doctor import doctor, planned

    study = None if options.file is None else load_study(options.file)
    sys.exit(doctor(study, planned(options.devices, options.memory), options.json))


def draw(folder: Path) -> None:
    """Figures and report of a study folder."""
    from moe_rl.study.report import draw_study

    print(f"report: {draw_study(folder)}")


def default_workers() -> int:
    """One run per core, one thread each; one in all where there is a GPU."""
    import torch

    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _parse(options: Any, arguments: list[str], program: str, default: Any) -> Any:
    known = {} if default is None else {"default": default}
    with _one_word_each():
        return tyro.cli(options, args=arguments, prog=program, config=(tyro.conf.AvoidSubcommands,), **known)


def _one_word_each() -> tyro.constructors.ConstructorRegistry:
    """Engine corrections as words: --method.corrections token_mask:0.5:5 token_truncate:2."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        kind = info.type
        if getattr(kind, "__name__", "") != "Correction":  # by name: help must not import torch
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="KIND:[LOW:]HIGH",
            instance_from_str=lambda words: kind.parse(words[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [str(value)],
        )

    return registry
