"""Parts of a measurement, each a command in a process of its own, and the page that they make.

A part that fails or takes too long is said on the page, with its last words, and the others go on.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.files import write_atomic, write_json

ROOT = Path(__file__).resolve().parents[1]
SIGNS = 3  # digits that are printed of a time
LAST_LINES = 12


@dataclass(frozen=True)
class Part:
    """One command.

    name: of the part, unique.
    title, about: what stands above its rows.
    command: arguments after the interpreter, and `--json FILE`; `{folder}` is a folder of its own, removed afterwards.
    seconds: how long it may take; what takes longer hangs, however busy the machine is.
    needs: why it cannot run here; empty if it can.
    hidden: more arguments, of this machine alone, which the page does not show.
    """

    name: str
    title: str
    about: str
    command: str
    seconds: float = 3600.0
    needs: str = ""
    hidden: tuple[str, ...] = ()


def run_part(part: Part) -> dict[str, Any]:
    """What became of a part: rows, seconds, load of the machine, and `error`, or `skipped` with the reason."""
    command = "python " + part.command.format(folder="FOLDER")
    found: dict[str, Any] = {"name": part.name, "title": part.title, "about": part.about, "command": command}
    found |= {"rows": [], "seconds": 0.0, "load": None}
    if part.needs:
        return {**found, "skipped": part.needs}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = [word.format(folder=Path(folder) / "run") for word in part.command.split()]
        environment = {**os.environ, "PYTHONPATH": _path(), "HF_HUB_OFFLINE": "1"}
        with open(Path(folder) / "said", "w+b") as said:
            process = subprocess.Popen(
                [sys.executable, *words, "--json", str(file), *part.hidden],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            problem = _wait(process, part.seconds)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        rows, unread = _rows(file)
    problem = problem or unread
    if problem:
        found["error"] = "\n".join([problem, *lines[-LAST_LINES:]])
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {**found, "rows": rows, "seconds": round(time.monotonic() - began, 1), "load": load}


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """What went wrong; empty if nothing did. What the command started ends with it."""
    try:
        status = process.wait(seconds)
        return f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _rows(file: Path) -> tuple[list[dict[str, Any]], str]:
    try:
        return [json.loads(line) for line in file.read_text().splitlines()], ""
    except (OSError, ValueError) as error:
        return [], f"no rows: {type(error).__name__}"


def run_parts(
    parts: Sequence[Part],
    order: Sequence[str],
    record: Path,
    target: Path,
    head: str,
    say: Callable[[str], None] = print,
) -> bool:
    """Run parts one after the other, and write record and page after each; whether all went well.

    Args:
        order: of all parts on the page. Those that are not run now, or cannot run here, stay as they are recorded.
        record, target: the JSON file and the page.
        head: what the page begins with.
    """
    well, where = True, machine()  # before the page itself is a change to the checkout
    measured = {part["name"] for part in recorded(record) if part["rows"]}  # read before hours are spent
    for part in parts:
        say(f"{part.name}: {part.command}")
        done = run_part(part)
        well = well and "error" not in done
        ended = done.get("skipped") or done.get("error", "").split("\n")[0] or f"{len(done['rows'])} rows"
        say(f"{part.name}: {ended} ({done['seconds']:.0f} s)")
        if "skipped" in done and part.name in measured:
            say(f"{part.name}: what was recorded of it stays")
        else:
            write_atomic(target, page(head, keep(record, {**done, "machine": where}, order)))
    return well


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], page: str) -> None:
    """What `make bench` and `make gpu` both take."""
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help=f"gets {page}.md and results/{page}.json")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))


def run_chosen(parts: Sequence[Part], options: argparse.Namespace, name: str, head: str) -> bool:
    """Run the parts that `options.only` names, into record and page called `name`; whether all went well."""
    record, target = options.output / "results" / f"{name}.json", options.output / f"{name}.md"
    chosen = [part for part in parts if part.name in options.only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a part started ends then, too
    well = run_parts(chosen, [part.name for part in parts], record, target, head)
    print(f"wrote {target}")
    return well


def machine() -> dict[str, Any]:
    """Where and when this was measured."""
    import torch

    from moe_rl.study.run import environment

    machine = environment("")
    kept = ("git_commit", "git_dirty", "cpu", "cpus", "kernels", "device", "cuda", "started")
    versions = {name: machine["versions"][name] for name in ("torch", "transformers")}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **{name: machine[name] for name in kept},
        "versions": versions,
        "gpus": gpus,
        "python": platform.python_version(),
    }


def described(parts: Sequence[dict[str, Any]]) -> str:
    """The machine in a sentence; where parts were run apart, each of them."""
    said: dict[str, list[str]] = {}
    for part in parts:
        machine = part["machine"]
        versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
        commit = f"{(machine['git_commit'] or 'none')[:10]}{' with changes' if machine['git_dirty'] else ''}"
        gpus = f"{', '.join(machine['gpus'])}, CUDA {machine['cuda']}; " if machine["gpus"] else ""
        where = f"{gpus}{machine['cpu']}, {machine['cpus']} cores, {machine['kernels']} kernels"
        text = (
            f"Measured {machine['started'][:10]} at commit {commit} on {where}; Python {machine['python']}, {versions}"
        )
        said.setdefault(text, []).append(part["name"])
    if len(said) == 1:
        return f"{next(iter(said))}."
    return "\n".join(f"- {', '.join(names)}: {text}." for text, names in said.items())


def recorded(record: Path) -> list[dict[str, Any]]:
    """What a record holds; nothing where there is none. SystemExit where it cannot be read."""
    try:
        return json.loads(record.read_text()) if record.exists() else []
    except ValueError as error:
        raise SystemExit(f"{record}: not JSON ({error}); restore it, or remove it and measure all parts") from error


def keep(record: Path, done: dict[str, Any], order: Sequence[str]) -> list[dict[str, Any]]:
    """Put a part into the record; all parts in `order`."""
    known = {part["name"]: part for part in recorded(record)}
    known[done["name"]] = done
    found = [known[name] for name in order if name in known]
    write_json(record, found)
    return found


def page(head: str, parts: Sequence[dict[str, Any]]) -> str:
    """The page, from what `keep` recorded and nothing else."""
    text = [head.strip() + "\n"]
    failed = [part["title"] for part in parts if "error" in part]
    if failed:
        text.append(f"**Failed:** {'; '.join(failed)}.\n")
    for part in parts:
        text.append(f"## {part['title']}\n")
        text.append(f"{part['about']}\n")
        load = "" if part["load"] is None else f", load {part['load']}"
        text.append(f"`{part['command']}` ({part['seconds']:.0f} s{load})\n")
        if "skipped" in part:
            text.append(f"Skipped: {part['skipped']}\n")
        if "error" in part:
            text.append(f"**Failed.**\n\n```\n{part['error']}\n```\n")
        if part["rows"]:
            text.append(table(part["rows"]))
    return "\n".join([*text, described(parts)]) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `rows`, without the columns that all of them leave empty."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "µs": lambda row: number(row["us"]),
        "limit, µs": lambda row: number(row["limit_us"]),
        "× limit": lambda row: f"{row['us'] / row['limit_us']:.2f}" if row["us"] and row["limit_us"] else "",
        "peer": lambda row: row["peer"] or "",
        "peer, µs": lambda row: number(row["peer_us"]),
        "ratio to peer": lambda row: ratio(row["ratio"]),
        "spread": lambda row: "" if row["spread"] is None else f"[{', '.join(map(ratio, row['spread']))}]",
        "note": lambda row: row["note"] or "",
    }
    cells = {name: [make(row).replace("|", "\\|") for row in rows] for name, make in columns.items()}
    kept = {name: values for name, values in cells.items() if any(values)}
    lines = [list(kept), ["---"] * len(kept), *map(list, zip(*kept.values(), strict=True))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def ratio(value: float | None) -> str:
    """Three decimals, or two digits of what is small."""
    return "" if value is None else f"{value:.3f}" if value >= 0.1 else f"{value:.2g}"


def number(value: float | None) -> str:
    """Three digits, thousands apart."""
    if value is None:
        return ""
    if value >= 10 ** (SIGNS - 1):
        return f"{value:,.0f}"
    return f"{value:.{SIGNS}g}"
