"""The reliability campaign and the page that it writes: `make reliability`, or `python tests/reliability/campaign.py`.

Every block of work adds one line to a record file when it ends, so that a stopped campaign goes on where it was.
`--only PART` runs one part. The page is written when the record has all parts; `--page` writes it from the present
record.
"""

import argparse
import dataclasses
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
COMBINED = 50  # combinations of settings in a block
PARTS = ("kills", "operations", "faults", "fuzz", "combinations", "soak", "scale")


def blocks(part: str, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Yield the name of each block of a part, and the function that makes its result in a scratch folder.

    The modules of the parts are imported here, because they import torch.
    """
    if part == "kills":
        from kills import killed_runs
        from small_runs import METHODS

        for method in options.methods or METHODS:
            yield f"{method} x {options.runs}", lambda root, m=method: killed_runs(m, options.runs, root)
    elif part == "operations":
        from operations import WHOLE, stopped_runs
        from small_runs import METHODS

        for method in options.methods or METHODS:
            most = options.stops if options.stops and method not in WHOLE else None
            yield f"{method} x {most or 'all'}", lambda root, m=method, most=most: stopped_runs(m, root, most)
        for method in (name for name in WHOLE if name in (options.methods or WHOLE)):
            yield f"{method}, second kill", lambda root, m=method: stopped_runs(m, root, second=True)
    elif part == "faults":
        from faults import FAULTS, faulted_runs

        for fault in FAULTS:
            yield f"{fault} x {options.faults}", lambda root, f=fault: faulted_runs(f, options.faults, root)
    elif part == "fuzz":
        from fuzz import block_of, fuzzed, shares

        for kind, cases in shares(options.cases).items():
            for first in range(0, cases if not options.kinds or kind in options.kinds else 0, block_of(kind)):
                some = min(block_of(kind), cases - first)
                yield f"{kind} {first}+{some}", lambda root, k=kind, f=first, n=some: fuzzed(k, f, n, root)
    elif part == "combinations":
        from combinations import combined

        for first in range(0, options.combinations, COMBINED):
            some = min(COMBINED, options.combinations - first)
            yield f"{first}+{some}", lambda root, f=first, n=some: combined(f, n, root)
    elif part == "soak":
        from soak import soaked

        yield f"{options.steps} steps", lambda root: soaked("grpo + R2", options.steps, root)
    elif part == "scale":
        from soak import scaled

        for seeds in options.seeds:
            yield f"{seeds} seeds", lambda root, s=seeds: scaled(s, 32, root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS, help="parts to run; by default all")
    parser.add_argument("--methods", nargs="*", help="kills, operations: only these")
    parser.add_argument("--runs", type=int, default=3, help="kills: runs of each method")
    parser.add_argument(
        "--stops", type=int, default=4, help="operations: states of methods whose files others have; 0: all"
    )
    parser.add_argument("--faults", type=int, default=12, help="faults: cases of each kind")
    parser.add_argument("--cases", type=int, default=20_000, help="fuzz: cases of all kinds together")
    parser.add_argument("--kinds", nargs="*", help="fuzz: only these kinds, of their share of the cases")
    parser.add_argument("--combinations", type=int, default=400, help="combinations of settings")
    parser.add_argument("--steps", type=int, default=400, help="soak: steps")
    parser.add_argument("--seeds", type=int, nargs="*", default=(6, 60), help="scale: seeds of each of five arms")
    parser.add_argument("--record", type=Path, default=Path("runs/reliability.jsonl"), help="what was done so far")
    parser.add_argument("--page", action="store_true", help="write the page from the record, run nothing")
    options = parser.parse_args()
    for part in () if options.page else options.only:
        run_part(part, options)
    missing = set(PARTS) - {line["part"] for line in read(options.record)}
    if missing and not options.page:  # writing would remove the others from the page
        print(f"{PAGE} stays as it is: {options.record} lacks {', '.join(sorted(missing))}; --page writes it without")
        return
    from page import write_page

    write_page(options.record, PAGE)


def run_part(part: str, options: argparse.Namespace) -> None:
    """Run the blocks of a part that the record does not have yet."""
    options.record.parent.mkdir(parents=True, exist_ok=True)
    done = {(line["part"], line["block"]) for line in read(options.record)}
    warm = False
    for name, act in blocks(part, options):
        if (part, name) in done:
            continue
        root = Path(tempfile.mkdtemp(prefix="moe_rl-reliability-"))
        if part not in ("scale",) and not warm:
            from small_runs import warm_up

            warm_up(root)
            warm = True
        before, began = used(), time.time()
        result = dataclasses.asdict(act(root))
        line = {"part": part, "block": name, "cpu": round(used() - before, 1), "wall": round(time.time() - began, 1)}
        with open(options.record, "a") as file:
            file.write(json.dumps({**line, **result}) + "\n")
        print(json.dumps({**line, **result}), flush=True)
        if not any(result.get(name) for name in ("wrong", "tracebacks", "hangs")):
            shutil.rmtree(root, ignore_errors=True)


def used() -> float:
    """Return the CPU seconds of this process and of the child processes that it waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def read(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record file; none if there is no such file."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


if __name__ == "__main__":
    main()
