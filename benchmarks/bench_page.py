"""Runner of measurements in parts, each a command in a process of its own, and writer of the page of their results.

If a part fails or takes too long, the page says so, with the last lines of its output, and the other parts are run.
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
SIGNS = 3  # significant digits of a printed time
LAST_LINES = 12  # of a failed part's output, for the page


@dataclass(frozen=True)
class Part:
    """One part of a measurement: a command and its description.

    name: a unique name.
    title, about: heading and text above the part's rows on the page.
    command: arguments of the Python interpreter, to which `--json FILE` is added; `{folder}` stands for a temporary
        folder of the part.
    seconds: time limit; it is so large that a command that exceeds it hangs, however busy the machine is.
    needs: why the command cannot run here; empty if it can.
    hidden: further arguments that only concern this machine; the page does not show them.
    """

    name: str
    title: str
    about: str
    command: str
    seconds: float = 3600.0
    needs: str = ""
    hidden: tuple[str, ...] = ()


def run_part(part: Part) -> dict[str, Any]:
    """Run a part and return its record: rows, seconds, the machine's load, and `error` or `skipped` with the reason."""
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
    """Wait for a command, then kill its whole process group; return what went wrong, or an empty text."""
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
    """Return PYTHONPATH with the checkout in front."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _rows(file: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows in a file and an empty text, or no rows and the reason."""
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
    """Run parts one after the other, write record and page after each, and return whether no part failed.

    Args:
        order: names of all parts in the page's order. Parts that are not run now, or cannot run here, stay as recorded.
        record, target: paths of the JSON file and of the page.
        head: the beginning of the page.
        say: called with each line of progress.
    """
    well, where = True, machine()  # asked now, because writing the page changes the checkout
    measured = {part["name"] for part in recorded(record) if part["rows"]}  # fails now if the record is damaged
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
    """Add the options that `make bench` and `make gpu` have in common."""
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help=f"gets {page}.md and results/{page}.json")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))


def run_chosen(parts: Sequence[Part], options: argparse.Namespace, name: str, head: str) -> bool:
    """Run the parts in `options.only`, write record and page `name`, and return whether no part failed."""
    record, target = options.output / "results" / f"{name}.json", options.output / f"{name}.md"
    chosen = [part for part in parts if part.name in options.only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part's processes are killed, too
    well = run_parts(chosen, [part.name for part in parts], record, target, head)
    print(f"wrote {target}")
    return well


def machine() -> dict[str, Any]:
    """Return the commit, the machine, the versions of packages, and the time of a measurement."""
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
    """Return a sentence on the machine, or a list if parts were measured under different conditions."""
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
    """Return the parts in a record, none if there is no such file. Raises SystemExit if the file is not JSON."""
    try:
        return json.loads(record.read_text()) if record.exists() else []
    except ValueError as error:
        raise SystemExit(f"{record}: not JSON ({error}); restore it, or remove it and measure all parts") from error


def keep(record: Path, done: dict[str, Any], order: Sequence[str]) -> list[dict[str, Any]]:
    """Put a part into the record file, in place of its earlier one; return all recorded parts in `order`."""
    known = {part["name"]: part for part in recorded(record)}
    known[done["name"]] = done
    found = [known[name] for name in order if name in known]
    write_json(record, found)
    return found


def page(head: str, parts: Sequence[dict[str, Any]]) -> str:
    """Return the text of the page, which depends on `head` and the recorded parts alone."""
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
    """Return a Markdown table of rows as rows.py makes them, without columns that are empty in every row."""
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
    """Return a ratio with three decimals, or with two significant digits below 0.1; an empty text for None."""
    return "" if value is None else f"{value:.3f}" if value >= 0.1 else f"{value:.2g}"


def number(value: float | None) -> str:
    """Return a number with `SIGNS` significant digits or as a whole number with commas; an empty text for None."""
    if value is None:
        return ""
    if value >= 10 ** (SIGNS - 1):
        return f"{value:,.0f}"
    return f"{value:.{SIGNS}g}"
