"""Output of the commands of `moe_rl.drift`: its folder and names, progress, and what all results record."""

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rl.drift.checkpoints import CHECKPOINT
from moe_rl.drift.errors import DriftError
from moe_rl.drift.prompts import Text
from moe_rl.drift.words import model_sentence
from moe_rl.files import sole_writer
from moe_rl.names import seed_of
from moe_rl.pages import render_page
from moe_rl.starts import version_of
from moe_rl.study.figures.saving import StudyFigure
from moe_rl.study.figures.screen import inline_svg

Tick = Callable[[], None]


SYSTEM = (".DS_Store", ".ipynb_checkpoints", ".nfs")
"""Beginnings of the names of files that systems and programs leave in any folder."""


def output_folder(given: Path | None, default: Path, names: Sequence[str], kept: Path | None = None) -> Path:
    """Return the folder to write: `given`, or else `default`; all in it will be replaced.

    names: of the files that the command writes, the one that marks a result first. kept: a file in it that the command
    takes over. Raises DriftError: the folder, or OUTPUT.partial, holds more than an earlier result, or the folder is
    the current one or above it, or a file stands in the way."""
    output = default if given is None else given.expanduser()
    partial = partial_of(output)
    place = next(path for path in (partial, *partial.parents) if path.exists())
    if not place.is_dir():
        raise DriftError(f"--output: {output} cannot be made, as {place} is a file; move it, or name another folder")
    if Path.cwd().is_relative_to(output.resolve()):
        raise DriftError(f"--output: {output} is the folder you are in, or above it; name one inside it")
    held, left = _held(output), _held(partial)
    if output.exists() and not (output / names[0]).exists() and (held or not output.is_dir()):
        raise DriftError(f"--output: {output} is there and is no earlier comparison; name another folder")
    taken = None if kept is None else kept.expanduser().resolve()
    if others := sorted(path.name for path in held if path.name not in names and path.resolve() != taken):
        raise DriftError(
            f"--output: {output} is replaced as a whole, and holds {others[0]}, which this command does not write; "
            "move it, or name another folder"
        )
    made = (*names, "cache", ".lock", *([taken.name] if taken and taken.parent == output.resolve() else []))
    if others := sorted(p.name for p in left if p.name not in made and not re.fullmatch(r"\..*\.tmp", p.name)):
        raise DriftError(
            f"--output: {partial} is emptied first, for the new result to be made in it, and holds "
            f"{others[0]}, which this command does not write; move it, or name another folder"
        )
    return output


def _held(folder: Path) -> list[Path]:
    """Return what a folder, if it is there, holds besides files of the system."""
    return [path for path in folder.iterdir() if not path.name.startswith(SYSTEM)] if folder.is_dir() else []


def short_names(paths: Sequence[str]) -> list[str]:
    """Return short names of checkpoints, as file names.

    Each has as many folders above it as tell the checkpoints apart (step_1/hf and step_2/hf); if even whole paths do
    not ("step 1" and "step-1"), the names are numbered."""
    places = [place_of(path) for path in paths]
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        names = [_short(place, parts) for place in places]
        if len(set(names)) == len(set(places)):
            return names
    return [f"{number}-{_short(place, 1)}" for number, place in enumerate(places, start=1)]


def place_of(path: str) -> Path:
    """Return the absolute path, the same for `old`, `./old/` and `old/sub/..`; a link stays different from its
    target."""
    return Path(os.path.abspath(Path(path).expanduser()))


def _short(place: Path, parts: int) -> str:
    """Return the last `parts` parts of a path or hub id, as a file name.

    A run's seed always comes with its arm, because every arm has that seed, and runs/floor/seed0 would look like a run
    of the study `runs`."""
    run = place.parent if place.name == CHECKPOINT else place
    if seed_of(run) is not None:
        parts = max(parts, len(place.parts) - len(run.parts) + 2)
    return re.sub(r"[^\w.-]+", "-", "-".join(place.parts[-parts:])).strip("-") or "model"


def partial_of(output: Path) -> Path:
    """Return OUTPUT.partial, the folder in which a result is made and in which a stopped command leaves its results."""
    output = output.resolve()
    return output.parent / f"{output.name}.partial"


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Context manager: give the empty folder OUTPUT.partial, and let it take the place of the output at the end.

    After an error the folder stays if something was measured (CSV files, drift.json) or sampled (samples.jsonl), and is
    removed otherwise. Raises InUseError: another process writes to it."""
    output = output.resolve()  # a link stays, and its target is replaced
    partial = partial_of(output)
    partial.mkdir(parents=True, exist_ok=True)
    with sole_writer(partial, "moe-rl"):
        for old in partial.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old.name != ".lock":
                old.unlink()
        try:
            yield partial
            shutil.rmtree(partial / "cache", ignore_errors=True)
            (partial / ".lock").unlink(missing_ok=True)
            put_in_place(partial, output)
        finally:
            (partial / ".lock").unlink(missing_ok=True)
            shutil.rmtree(partial / "cache", ignore_errors=True)
            kept = (path for name in ("*.csv", "samples.jsonl", "drift.json") for path in partial.glob(name))
            if partial.exists() and not any(kept):
                shutil.rmtree(partial)


def put_in_place(made: Path, output: Path) -> None:
    """Rename `made` to `output`; an earlier output is removed afterwards, or restored if the renaming fails."""
    former = output.parent / f".{output.name}.{os.getpid()}.former"
    try:
        if output.exists():
            output.rename(former)
        made.rename(output)
    except BaseException:
        if former.exists() and not output.exists():
            former.rename(output)
        raise
    shutil.rmtree(former, ignore_errors=True)


class Screen(Console):
    """A rich console that raises BrokenPipeError if its reader has gone, where rich would exit with status 1.

    The command line handles that error.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def progress(console: Console, total: int) -> Iterator[Tick]:
    """Context manager: give a function to call after every batch, which shows the progress.

    The function moves a bar on a terminal, and elsewhere prints a line after every tenth of `total` batches.
    """
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("batches", total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            console.print(f"{done} of {total} batches")

    yield tick


def record_of(text: Text, options: Any, device: torch.device, *left_out: str, **more: Any) -> dict[str, Any]:
    """Return the entries that all results have: the model, the measured text, settings, versions and device.

    Settings are `more`, and all options but those `left_out`. `words.text_sentence` puts the text into words."""
    from moe_rl import __version__

    settings = {key: value for key, value in asdict(options).items() if key not in left_out}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    environment = {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "transformers")},
        "moe_rl": __version__,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    return {
        "architecture": text.known.model_type,
        "parameters": text.known.parameters,
        "routing_sites": len(text.known.sites),
        "text": {**asdict(text.holds), "of_old": text.of_old},
        "examples": text.number,
        "truncated": text.truncated,
        "empty": text.empty,
        "settings": {**more, **settings, "max_tokens": text.max_tokens, "device": str(device)},
        "environment": environment,
    }


def page_of(template: str, results: Mapping[str, Any], figures: Sequence[StudyFigure], **values: Any) -> str:
    """Return a page as HTML, self-contained and without scripts, from results, figures and settings.

    template: its name among the templates of `moe_rl.drift`. values: further variables of the template.
    """
    settings = {**results["settings"], **results["environment"]}
    return render_page(
        f"drift/{template}.html.j2",
        results=results,
        model=model_sentence(results),
        figures=[(figure, Markup(inline_svg(figure))) for figure in figures],
        settings=[(name, "–" if value is None else str(value)) for name, value in settings.items()],
        **values,
    )


def finite(value: Any) -> Any:
    """Return a value for JSON, with None in place of every float that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
