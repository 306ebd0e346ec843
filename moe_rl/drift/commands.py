"""Entry points of the commands of `moe_rl.drift`, as `moe_rl.cli` lists them; each imports the rest when called."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

from moe_rl.arguments import fail, parse


@contextmanager
def ending(left: str, always: bool = False) -> Iterator[None]:
    """Context manager: end the command with a message on an interrupt or OSError.

    left: what an interrupted comparison leaves on disk, in words; with `always`, said of an OSError, too.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {left}", 130)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        fail(f"{error.strerror or error}{where}{f'; {left}' if always else ''}")


def drift(arguments: list[str]) -> None:
    """Run `moe-rl drift`."""
    import tyro

    from moe_rl.drift.options import DriftOptions

    @dataclass(frozen=True, kw_only=True)
    class Options(DriftOptions):
        """Compare the routing of checkpoints of one architecture on a text: OLD and NEW, or a series, each against the
        first."""

        checkpoints: Annotated[
            tuple[str, ...],
            tyro.conf.Positional,
            tyro.conf.arg(metavar="OLD NEW [...]", help_behavior_hint="(two or more)"),
        ] = ()
        """Folders in hub format or of LoRA adapters, run folders, hub ids; a folder of several checkpoints stands for
        them."""

    options = parse(Options, arguments, "moe-rl drift")
    from moe_rl.drift.checkpoints import chosen
    from moe_rl.drift.run import run_drift, say
    from moe_rl.drift.series import run_series, say_series

    paths = chosen(options.checkpoints)
    options = replace(options, checkpoints=tuple(paths))
    if len(paths) == 2:
        sampled = "the responses sampled so far (samples.jsonl) or " if options.sample else ""
        kept = f"OUTPUT.partial, if it is there, has {sampled}all numbers (drift.json); nothing else was written"
        with ending(kept, always=True):
            folder = run_drift(options)
        say(folder)
    else:
        with ending("what a series had measured is in OUTPUT.partial", always=True):
            folder = run_series(options)
        say_series(folder)


def floor(arguments: list[str]) -> None:
    """Run `moe-rl floor`."""
    from moe_rl.drift.options import FloorOptions

    options = parse(FloorOptions, arguments, "moe-rl floor")
    from moe_rl.drift.floor_run import report, run_floor

    with ending("what was measured is in the folder OUTPUT.partial (floor.json, floor.csv)"):
        folder = run_floor(options)
    report(folder, options.json)


def check_routes(arguments: list[str]) -> None:
    """Run `moe-rl check-routes`, and exit with its status."""
    from moe_rl.drift.options import CheckOptions

    options = parse(CheckOptions, arguments, "moe-rl check-routes")
    from moe_rl.drift.check import run_check

    sys.exit(run_check(options))


def compare_routes(arguments: list[str]) -> None:
    """Run `moe-rl compare-routes`, and exit with its status."""
    from moe_rl.drift.options import CompareOptions

    options = parse(CompareOptions, arguments, "moe-rl compare-routes")
    from moe_rl.drift.compare import run_compare

    sys.exit(run_compare(options))
