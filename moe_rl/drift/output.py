"""Where a comparison is written, and how far it is."""

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
"""How names begin that programs leave in any folder."""


def output_folder(given: Path | None, default: Path, names: Sequence[str], kept: Path | None = None) -> Path:
    """The folder to write: one that is not there, is empty, or holds an earlier result and nothing else, for all in it
    will be gone. names: of what the command writes, first what marks a result; kept: a file that it takes over. Raises
    DriftError."""
    output = default if given is None else given.expanduser()
    if Path.cwd().is_relative_to(output.resolve()):
        raise DriftError(f"--output: {output} is the folder you are in, or above it; name one inside it")
    held = [path for path in output.iterdir() if not path.name.startswith(SYSTEM)] if output.is_dir() else []
    if output.exists() and not (output / names[0]).exists() and (held or not output.is_dir()):
        raise DriftError(f"--output: {output} is there and is no earlier comparison; name another folder")
    taken = None if kept is None else kept.expanduser().resolve()
    if others := sorted(path.name for path in held if path.name not in names and path.resolve() != taken):
        raise DriftError(
            f"--output: {output} is replaced as a whole, and holds {others[0]}, which this command does not write; "
            "move it, or name another folder"
        )
    return output


def short_names(paths: Sequence[str]) -> list[str]:
    """Short names of checkpoints, with as many folders above as tell them apart (step_1/hf and step_2/hf), or numbered
    where none do ("step 1" and "step-1")."""
    places = [place_of(path) for path in paths]
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        names = [_short(place, parts) for place in places]
        if len(set(names)) == len(set(places)):
            return names
    return [f"{number}-{_short(place, 1)}" for number, place in enumerate(places, start=1)]


def place_of(path: str) -> Path:
    """One and the same for `old`, `./old` and `old/`; a link is another place than what it names."""
    return Path(path).expanduser().absolute()


def _short(place: Path, parts: int) -> str:
    """The last parts of a path or hub id, as a file name; a run's seed never without its arm: every arm has that seed,
    and runs/floor/seed0 would pass for a run of the study runs."""
    run = place.parent if place.name == CHECKPOINT else place
    if seed_of(run) is not None:
        parts = max(parts, len(place.parts) - len(run.parts) + 2)
    return re.sub(r"[^\w.-]+", "-", "-".join(place.parts[-parts:])).strip("-") or "model"


def partial_of(output: Path) -> Path:
    """Where a result is made, and what is left of one that was stopped lies."""
    output = output.resolve()
    return output.parent / f"{output.name}.partial"


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """OUTPUT.partial, which takes the place of the output at the end. Where it does not come to that, it stays with
    what was measured (its CSV files, drift.json) or sampled, or goes if that is nothing. Raises InUseError where
    another process has it."""
    output = output.resolve()  # a link stays, and what it names is replaced
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
    """`made` becomes `output`; what was there goes once the new one stands, and comes back if it cannot."""
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
    """Standard output. Where its reader has gone, rich leaves with status 1; the command line knows what to do."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def progress(console: Console, total: int) -> Iterator[Tick]:
    """A bar on a terminal; elsewhere a line for every tenth."""
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
    """What every result says of the model, the text that was measured (in words: `words.text_sentence`), the settings
    (`more`, and the options but those `left_out`), versions and device."""
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
    """A page of `drift/`: self-contained, without scripts; what it is made of are results, figures, settings."""
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
    """For JSON: null where a number does not exist."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
