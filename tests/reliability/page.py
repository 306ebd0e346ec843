"""Writer of docs/reliability.md, all of whose numbers come from the record of a campaign."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_rl.files import write_atomic

COMMAND = "python tests/reliability/campaign.py"
Line = dict[str, Any]

HEAD = """# What a run survives

After any interruption or fault, a run is to give either the identical result, or a clear refusal with nothing lost. No
NaN, no corruption and no second writer may pass for a result. This page is what a campaign against that promise found.
Cases that broke it: {broken}, the sum of the columns *not identical*, *wrong*, *tracebacks* and *hangs* below.

- *Identical*: metrics are those of a run that nothing interrupted, except their times. So is every byte of weights,
  optimizers, random numbers, waiting batches, token tables and route tables.
- Runs are small (two layers, two or three steps), each in a process of its own.
- The campaign writes this page (`make reliability`), and goes on where it was stopped. Below each heading stands the
  command that runs this part alone.
"""
BROKEN = "wrong", "tracebacks", "hangs"


def write_page(record: Path, target: Path) -> None:
    """Write the page `target` from the lines of `record`."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    parts: dict[str, list[Line]] = {}
    for line in lines:
        parts.setdefault(line["part"], []).append(line)
    makers = {
        "kills": kills,
        "operations": operations,
        "faults": faults,
        "fuzz": fuzz,
        "combinations": combinations,
        "soak": soak,
        "scale": scale,
    }
    absent = [part for part in makers if part not in parts]
    note = f"**Not run yet:** {', '.join(absent)}.\n" if absent else ""
    broken = sum(sum(total([line], *(name for name in BROKEN if name in line))) for line in lines)
    head = HEAD.format(broken=broken)
    text = [head, *(makers[part](parts[part]) for part in makers if part in parts), note + foot(lines)]
    write_atomic(target, "\n".join(text))


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells) + "\n"


def total(lines: list[Line], *keys: str) -> list[int]:
    """Return the sum over lines for each key; lists count by their length."""
    return [sum(line[key] if isinstance(line[key], int) else len(line[key]) for line in lines) for key in keys]


def part_of(title: str, about: str, command: str, lines: list[Line], body: str) -> str:
    """Return a section of the page: heading, text, command with its CPU time, and body."""
    cpu = sum(line["cpu"] for line in lines)
    return f"## {title}\n\n{about}\n\n`{COMMAND} --only {command}` ({cpu / 60:.1f} CPU minutes)\n\n{body}"


def kills(lines: list[Line]) -> str:
    signals = list(lines[0]["kills"])
    rows = [
        [line["method"], line["runs"], *(line["kills"][name] for name in signals), len(line["wrong"])] for line in lines
    ]
    sums = [sum(line["kills"][name] for line in lines) for name in signals]
    runs, wrong = total(lines, "runs", "wrong")
    rows.append(["**all**", runs, *sums, wrong])
    return part_of(
        "Random kills",
        f"{sum(sums)} kills at random moments of {runs} runs of {len(lines)} methods. A run is killed up to four "
        "times, and goes on each time. The last column counts runs that did not end identical.",
        "kills",
        lines,
        table(["method", "runs", *signals, "not identical"], rows),
    )


def operations(lines: list[Line]) -> str:
    named = [x["method"] + ", killed once before" * x["second"] for x in lines]
    rows = [
        [name, x["operations"], x["states"], x["finished"], len(x["wrong"])]
        for name, x in zip(named, lines, strict=True)
    ]
    rows.append(["**all**", *total(lines, "operations", "states", "finished", "wrong")])
    return part_of(
        "A kill at every file operation",
        "A run of two steps makes the checkpoint in its first step and replaces it in the second. Its folder is copied "
        "before and after every file operation: each copy is what a kill at that moment leaves.\n\n"
        "- Where a method keeps files that others do not, all copies that differ are run to the end. For the other "
        "methods some of them are, drawn at random.\n"
        "- *Killed once before*: the states of a run that goes on from a first kill, which came between the renames "
        "that replace the checkpoint.",
        "operations",
        lines,
        table(["method", "file operations", "different states", "run to the end", "not identical"], rows),
    )


def faults(lines: list[Line]) -> str:
    rows = [[x["fault"], x["cases"], x["met"], len(x["wrong"])] for x in lines]
    return part_of(
        "Faults of the machine",
        "Each case meets the fault at a random moment. It must end with an error that names the file, or as if nothing "
        "had happened. The same command then goes on without the fault.",
        "faults",
        lines,
        table(["fault", "cases", "met it", "not identical, or no file named"], rows),
    )


def fuzz(lines: list[Line]) -> str:
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(line["kind"], []).append(line)
    names = ("cases", "answered", "refused", "wrong", "tracebacks", "hangs")
    rows = [[of[0]["what"], *total(of, *names)] for of in kinds.values()]
    rows.append(["**all**", *total(lines, *names)])
    return part_of(
        "Random input",
        "- *Answered*: it was still good input, or the command does not read what was damaged.\n"
        "- *Refused*: the answer was one of our own messages.\n"
        "- *Wrong*: damage that passed for a result, an answer that must not be given, or a traceback among what was "
        "printed.\n"
        "- *Tracebacks*: an exception that is none of our messages, or a crash.\n"
        "- *Hangs*: more than 20 CPU seconds.",
        "fuzz",
        lines,
        table(["input", *names], rows),
    )


def combinations(lines: list[Line]) -> str:
    names = ("cases", "settings", "refused", "not_run", "ran", "wrong")
    head = ["combinations", "settings", "of them refused", "refused when loaded", "ran", "wrong"]
    return part_of(
        "Combinations of settings",
        "Each combination is a method and up to sixteen other settings, drawn at random. A setting that does not go "
        "with those before it must be refused in words, and is left out. What remains must\n\n"
        "- run to its end without a warning, with every number finite,\n"
        "- be readable as a study (of every tenth the figures are drawn),\n"
        "- go on to the identical end after it was stopped in the middle.",
        "combinations",
        lines,
        table(head, [total(lines, *names)]),
    )


def soak(lines: list[Line]) -> str:
    rows = [
        [
            x["method"],
            x["steps"],
            f"{x['memory_before']:.0f}",
            f"{x['memory_after']:.0f}",
            f"{x['kb_per_step']:+.2f}",
            f"{x['files_before']}, {x['files_after']}",
        ]
        for x in lines
    ]
    return part_of(
        "A long run",
        "Resident memory after a quarter of the steps (*before*) and at the end (*after*), and the slope of a line "
        "through what lies between.",
        "soak",
        lines,
        table(["method", "steps", "MB before", "MB after", "kB per step", "open files before, after"], rows),
    )


def scale(lines: list[Line]) -> str:
    rows = [[x["runs"], x["steps"], f"{x['load']:.1f}", f"{x['report']:.1f}"] for x in lines]
    return part_of(
        "Many runs",
        "CPU seconds to read the folders of a study, and to draw all figures and the report.",
        "scale",
        lines,
        table(["runs", "steps each", "read", "figures and report"], rows),
    )


def foot(lines: list[Line]) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "pyarrow"))
    cpu = sum(line["cpu"] for line in lines)
    return (
        f"Everything above took {cpu / 60:.0f} CPU minutes on {os.cpu_count()} cores, one thread each, with Python "
        f"{platform.python_version()}, {packages}, {platform.system()}.\n"
    )
