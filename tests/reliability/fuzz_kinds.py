"""Kinds of fuzzed input: how a case of each kind is made, and which errors are our own messages."""

import contextlib
import io
import os
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from damage import ODD, damaged_bytes, damaged_file, restored
from fuzz_files import metrics_lines, prompt_files, route_files, study_files, task_lines
from small_study import Case, Wrong, small_study

from moe_rl.cli import main
from moe_rl.drift.adapters import sources
from moe_rl.drift.checkpoints import check
from moe_rl.drift.checkpoints import load as load_checkpoint_of
from moe_rl.drift.errors import DriftError
from moe_rl.rollout import TaskError
from moe_rl.routing import RoutingError
from moe_rl.runlog import DamagedMetricsError
from moe_rl.study import grid, watch
from moe_rl.study import run as study_run
from moe_rl.study.config import ConfigError, load_study
from moe_rl.study.data import StudyDataError, load
from moe_rl.study.shipped import StudyFileError
from moe_rl.study.token_view import TokenStep
from moe_rl.training import CheckpointError, begin, resume, validate
from moe_rl.training.route_tables import read_route_table


@dataclass(frozen=True)
class Kind:
    """One kind of fuzzed input.

    weight: the kind's share of all cases, relative to the other kinds. refusals: errors that are our own messages.
    prepare: returns the function that runs a case, given a random generator; it returns "answered" or "refused", or
        raises one of `refusals`.
    what: description for the page.
    """

    weight: int
    refusals: tuple[type[BaseException], ...]
    prepare: Callable[[Path], Case]
    what: str


# -- the command line, the page ----------------------------------------------------------------------------------------

VERBS = ("study", "run", "figures", "watch", "drift", "doctor", "help", "stdy", "--version", "-h")
OPTIONS = """small/study.yaml quick small small/grpo/seed0 nowhere --arm --arms --seed --seeds grpo gspo --output
--workers --prompts --port --trust --help --help-all --optim.steps --optim.betas --optim.learning-rate
--method.objective --method.replay --method.corrections --rollout.group-size --task.name --task.options --model.path
--model.dtype --checkpoint-every --probe.sequences --json --no-figures --figures --rounding --cold-starts --devices
--memory -- - ="""
WORDS = OPTIONS.split()


def said_by(arguments: list[str]) -> str:
    """Run `moe-rl` in this process; return "answered" or "refused".

    Raises Wrong: when a traceback is printed or the exit status is not 0, 1 or 2.
    """
    out, error = io.StringIO(), io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    if "Traceback" in error.getvalue() or status not in (0, 1, 2):
        raise Wrong(f"moe-rl {arguments}: status {status}: {error.getvalue()[-300:]}")
    return "refused" if status else "answered"


def command_line(root: Path) -> Case:
    """Prepare cases: run `moe-rl` with random words; commands that would train or serve stop after their checks."""
    small_study(root)
    os.chdir(root)
    study_run.run_one = lambda config, *_: validate(config)
    grid.run_study = lambda study, *_: [study.resolve(*run) for run in study.runs()[:2]]
    watch.watch = lambda folder, port=0, open_browser=False: watch.make_server(folder, port).server_close()

    def case(rng: random.Random) -> str:
        words = [rng.choice(WORDS) if rng.random() < 0.75 else str(rng.choice(ODD)) for _ in range(rng.randint(0, 5))]
        first = ["run", "small/study.yaml", "--arm", "grpo"] if rng.random() < 0.4 else [rng.choice(VERBS)]
        return said_by([*first, *(word.replace("\x00", "") for word in words)])

    return case


ADDRESSES = """/ /watch.js /api/study /api/run?run=grpo/seed0 /api/run?run=grpo/seed0&since= /api/sites?run=gspo/seed0
/api/tokens?run=grpo/seed0&step=1 /api/response?run=grpo/seed0&step=1&seq=0&update=1 /api/run?run=../../etc /api/nothing
/../../etc/passwd /%2e%2e/%2e%2e/etc/passwd /api/run?run=grpo/seed0&since=5-00000000 //etc/passwd"""
PATHS = ADDRESSES.split()


def page_requests(root: Path) -> Case:
    """Prepare cases: send raw requests to the server of `moe-rl watch`.

    A case is wrong after status 500 or above, a failed thread of the server, or an answer to a foreign host name.
    """
    server = watch.make_server(small_study(root))
    problems: list[str] = []
    server.handle_error = lambda request, address: problems.append("the server's thread failed")
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def case(rng: random.Random) -> str:
        path = rng.choice(PATHS)
        if rng.random() < 0.6:
            path += (
                str(rng.choice(ODD)) if rng.random() < 0.5 else rng.choice(["0", "9" * 17, "-1", "&seq=9", "&step=x"])
            )
        path = path.replace(" ", "%20").replace("\x00", "%00")
        host = rng.choice(["localhost", "127.0.0.1:8765", "evil.example", "", "localhost.evil.example", "é"])
        method = rng.choice(["GET"] * 8 + ["HEAD", "POST", "PUT", "BREW", "get"])
        request = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        if rng.random() < 0.2:
            request = damaged_bytes(rng, request)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as line:
            with contextlib.suppress(OSError):
                line.sendall(request)
                line.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while part := line.recv(1 << 16):
                    answer += part
        if problems:
            raise Wrong(f"{problems.pop()}: {request[:200]!r}")
        head = answer.split(b"\r\n\r\n")[0]
        status = int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 400  # HTTP/0.9 has no status
        if status >= 500 or (head.startswith(b"HTTP/") and b"Content-Security-Policy" not in head):
            raise Wrong(f"{request[:200]!r}: {answer[:300]!r}")
        if status == 200 and b"evil" in request.split(b"Host:")[-1]:
            raise Wrong(f"a stranger was answered: {request[:200]!r}")
        return "answered" if status == 200 else "refused"

    return case


# -- folders -----------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Return the paths of all files in a folder but locks, relative to the folder."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(path.relative_to(folder) for path in found)


def damaged_folders(root: Path) -> Case:
    """Prepare cases: damage one file of a finished study, and run a command that reads folders."""
    whole, own = small_study(root), root / "study"
    prompts = root / "prompts.jsonl"
    prompts.write_text('{"text": "^12+34="}\n')
    names = files_of(whole)

    def resume_study(folder: Path) -> None:
        grid._schedule = lambda *_: iter(())  # else runs that are not done would now be trained
        said_by(["study", str(folder / "study.yaml"), "--output", str(folder), "--no-figures"])

    def drift(folder: Path) -> None:
        pair = sources({name: str(folder / arm / "seed0") for name, arm in (("OLD", "grpo"), ("NEW", "gspo"))})
        check(pair)
        load_checkpoint_of("NEW", pair["NEW"], "float32", torch.device("cpu"), False)

    def page(folder: Path) -> None:
        api = watch.Api(watch.LiveStudies(folder))
        for query in ("study", "run?run=grpo/seed0", "sites?run=grpo/seed0", "tokens?run=grpo/seed0&step=1"):
            name, _, rest = query.partition("?")
            watch._answer(api, name, rest)

    right = load(whole)

    def tables(folder: Path) -> None:
        data = load(folder)
        for name in ("rollouts", "updates", "probes", "evals", "tokens"):
            if not getattr(data, name).equals(getattr(right, name)):
                raise Wrong(f"other {name} were read")
        [read_route_table(path) for path in data.route_files["path"][:4]]
        TokenStep(folder / "grpo" / "seed0", 1).index()

    readers: dict[str, Callable[[Path], Any]] = {
        "figures": lambda folder: said_by(["figures", str(folder), "reward"]),
        "study": resume_study,
        "drift": drift,
        "watch": page,
        "tables": tables,
    }

    def case(rng: random.Random) -> str:
        reader = rng.choice(["figures", "study", "drift", "watch", "watch", "tables", "tables", "tables"])
        folder = restored(own, whole)
        if rng.random() < 0.3:
            (folder / "grpo" / "seed0" / "DONE").unlink()
        left = [name for name in names if (folder / name).exists()]
        damaged_file(rng, folder / rng.choice(left))
        readers[reader](folder)
        return "answered"

    return case


def damaged_checkpoints(root: Path) -> Case:
    """Prepare cases: damage one file that an unfinished run goes on from, and resume the run.

    A case is wrong if the run goes on with other weights, another step, or other rows.
    """
    whole, own = small_study(root) / "grpo" / "seed0", root / "run"
    study = load_study(root / "small" / "study.yaml")
    config = study.resolve("grpo", 0)
    (whole / "DONE").unlink()
    names = [name for name in files_of(whole) if name.name not in ("config.yaml", "env.json")]

    def resumed(folder: Path) -> tuple[Any, ...]:
        now = begin(config, folder)
        resume(now)
        weights = {name: tensor.sum().item() for name, tensor in now.policy.state_dict().items()}
        return weights, now.step, now.log.path.read_bytes()

    right = resumed(restored(own, whole))

    def case(rng: random.Random) -> str:
        folder = restored(own, whole)
        how = damaged_file(rng, folder / rng.choice(names))
        if resumed(folder) != right:
            raise Wrong(f"{how}: the run goes on from something else")
        return "answered"

    return case


OURS = (StudyDataError, ConfigError, StudyFileError, RoutingError, TaskError, DriftError, CheckpointError)
KINDS = {
    "metrics": Kind(8, (StudyDataError,), metrics_lines, "lines of metrics.jsonl of an unfinished run"),
    "page": Kind(28, (), page_requests, "requests to the page of moe-rl watch"),
    "tasks": Kind(18, (TaskError,), task_lines, "JSONL tasks and completions"),
    "prompts": Kind(14, (DriftError,), prompt_files, "prompts of moe-rl drift"),
    "routes": Kind(18, (RoutingError,), route_files, "route files and tables"),
    "studies": Kind(8, (ConfigError, StudyFileError), study_files, "study files"),
    "commands": Kind(2, (), command_line, "arguments and overrides of the command line"),
    "folders": Kind(2, OURS, damaged_folders, "damaged folders under figures, study, drift, watch, tables"),
    "checkpoints": Kind(2, (CheckpointError, DamagedMetricsError, OSError), damaged_checkpoints, "damaged checkpoints"),
}
