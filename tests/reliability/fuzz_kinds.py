"""What is fuzzed: for each kind, how a case is made, and which errors are our own messages."""

import contextlib
import io
import json
import os
import random
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from damage import ODD, damaged_bytes, damaged_file, damaged_text, damaged_value, flipped, restored
from small_runs import BASE

from moe_rl.cli import main
from moe_rl.drift.checkpoints import check
from moe_rl.drift.checkpoints import load as load_checkpoint_of
from moe_rl.drift.errors import DriftError
from moe_rl.drift.prompts import Skipped, check_file, examples
from moe_rl.policy.tiny import char_tokenizer
from moe_rl.rollout import TaskError
from moe_rl.rollout.jsonl_task import JsonLines
from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.study import grid, watch
from moe_rl.study import run as study_run
from moe_rl.study.config import ConfigError, dump_study, load_study, parse_study
from moe_rl.study.data import StudyDataError, load
from moe_rl.study.live_rows import LiveError, read_since
from moe_rl.study.shipped import StudyFileError, outline
from moe_rl.study.summary import final_rewards
from moe_rl.study.token_view import TokenStep
from moe_rl.training import CheckpointError, begin, resume, validate
from moe_rl.training.route_tables import read_route_table, write_route_table
from moe_rl.training.runlog import DamagedMetricsError

Case = Callable[[random.Random], str]


class Wrong(AssertionError):
    """Damage that passed for a result, or an answer that must not be given."""


@dataclass(frozen=True)
class Kind:
    """How much of the campaign, our own messages, and what makes a case of a random generator: "answered" or
    "refused" or one of `refusals`."""

    weight: int
    refusals: tuple[type[BaseException], ...]
    prepare: Callable[[Path], Case]
    what: str


def small_study(root: Path) -> Path:
    """A study of two finished runs, made by the command line's own functions."""
    base = {
        "model": {"tiny": vars(BASE.model.tiny), "cold_start": None},
        "task": {"name": "mod_chain", "options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 2, "num_minibatches": 2, "warmup_updates": 2},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 1, "floor": False},
        "checkpoint_every": 1,
    }
    arms = {"grpo": {"label": "GRPO"}, "gspo": {"method": {"objective": "gspo", "replay": "R2"}}}
    study = parse_study({"name": "small", "question": "?", "seeds": [0], "base": base, "arms": arms})
    folder = root / "small"
    folder.mkdir()
    (folder / "study.yaml").write_text(dump_study(study))
    for arm in arms:
        study_run.run_one(study.resolve(arm, 0), folder / arm / "seed0")
    return folder


# -- single files ------------------------------------------------------------------------------------------------------


def metrics_lines(root: Path) -> Case:
    """One line, or the bytes, of metrics.jsonl of an unfinished run."""
    whole = small_study(root) / "grpo" / "seed0"
    (whole / "DONE").unlink()
    shutil.rmtree(whole / "checkpoint")  # which would know the rows again: here each must be looked at
    path, lines = whole / "metrics.jsonl", (whole / "metrics.jsonl").read_text().splitlines()

    def case(rng: random.Random) -> str:
        changed = list(lines)
        place = rng.randrange(len(lines))
        if rng.random() < 0.6:
            changed[place] = json.dumps(damaged_value(rng, json.loads(lines[place])))
            path.write_text("\n".join(changed) + "\n")
        else:
            path.write_bytes(damaged_bytes(rng, ("\n".join(changed) + "\n").encode()))
        with contextlib.suppress(LiveError):
            read_since(path, rng.choice(["", "5-00000000", "999999999999999-ffffffff"]))
        data = load(whole)
        final_rewards(data) if len(data.rollouts) else None
        return "answered"

    return case


def study_files(root: Path) -> Case:
    """The text, or the values, of a study file."""
    path = root / "study.yaml"
    text = (small_study(root) / "study.yaml").read_text()
    values = yaml.safe_load(text)

    def case(rng: random.Random) -> str:
        if rng.random() < 0.5:
            path.write_text(damaged_text(rng, text), errors="surrogateescape")
        else:
            path.write_text(yaml.safe_dump(damaged_value(rng, values), allow_unicode=True))
        outline(path)
        study = load_study(path)
        for arm, seed in study.runs()[:3]:
            study.resolve(arm, seed)
        return "answered"

    return case


LINES = (
    {"prompt": "What is 12 * 12?", "answer": "144"},
    {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4},
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "7?"}], "answer": "7.0"},
)


def task_lines(root: Path) -> Case:
    """A file of prompts and answers, and what its verifiers say to odd completions."""
    path = root / "task.jsonl"

    def case(rng: random.Random) -> str:
        given = [LINES[0]] * 40 + [rng.choice(LINES) for _ in range(20)]
        own = [{**row, "prompt": f"{i}?"} if "prompt" in row else row for i, row in enumerate(given)]
        rows = [json.dumps(row) for row in own]
        if rng.random() < 0.5:
            rows[rng.randrange(60)] = json.dumps(damaged_value(rng, rng.choice(LINES)))
        data = ("\n".join(rows) + "\n").encode()
        path.write_bytes(data if rng.random() < 0.8 else damaged_bytes(rng, data))
        verifier = rng.choice(["exact_match", "last_answer"])
        task = JsonLines(str(path), verifier=verifier, held_out=rng.choice(["", "", "", "", str(path)]))
        problem = task.problem(rng)
        odd = [r"\boxed{" * rng.choice([1, 20_000]), "1" * 5000, str(rng.choice(ODD)), "{" * 50_000, "1,2,3.4.5", "-"]
        for completion in (*rng.sample(odd, 2), damaged_text(rng, problem.prompt + r" \boxed{4} 7.")):
            task.reward(problem, completion)
        return "answered"

    return case


PROMPTS = (
    {"text": "The quick brown fox."},
    {"prompt": "12+34=", "completion": "46"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": "ho"},
)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def prompt_files(root: Path) -> Case:
    """What `moe-rl drift --prompts` reads."""
    path = root / "prompts.jsonl"
    tokenizer = char_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    plain = char_tokenizer("abc")
    tokenizer.chat_template = TEMPLATE

    def case(rng: random.Random) -> str:
        rows = [json.dumps(rng.choice(PROMPTS)) for _ in range(5)]
        if rng.random() < 0.5:
            rows[rng.randrange(5)] = json.dumps(damaged_value(rng, rng.choice(PROMPTS)))
        data = "\n".join(rows).encode()
        path.write_bytes(data if rng.random() < 0.8 else damaged_bytes(rng, data))
        chosen = tokenizer if rng.random() < 0.9 else plain
        check_file(path, chosen)
        list(examples(path, chosen, rng.choice([2, 64]), Skipped()))
        return "answered"

    return case


def route_files(root: Path) -> Case:
    """Files of RoutedExperts.save, with and without a checksum, and route tables: no flipped bit passes."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    ids = torch.rand(2, 9, 3, 300, generator=torch.Generator().manual_seed(0)).topk(4).indices
    routes = RoutedExperts(ids, ("a.gate", "b.gate", "c.gate"), 300, tokens=torch.arange(18).view(2, 9))
    path, table = root / "routes.safetensors", root / "routes.parquet"
    routes.save(path)
    write_route_table(table, routes)
    with safe_open(path, "pt") as file:
        header = {k: v for k, v in file.metadata().items() if k != "sha256"} | {"format_version": "1"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    whole, rows = path.read_bytes(), table.read_bytes()

    def case(rng: random.Random) -> str:
        kind = rng.randrange(4)
        if kind == 0:  # as the first version wrote them: without a checksum, any header
            values = {key: damaged_value(rng, json.loads(value)) for key, value in header.items() if key != "format"}
            changed = {key: json.dumps(value) for key, value in values.items()}
            save_file(tensors, path, {**changed, "format": header["format"]})
            RoutedExperts.load(path)
            return "answered"
        target, data = (path, whole) if kind == 1 else (table, rows)
        target.write_bytes(flipped(rng, data) if rng.random() < 0.5 else damaged_bytes(rng, data))
        read = RoutedExperts.load(path) if kind == 1 else read_route_table(table)
        if not read.equal(routes):
            raise Wrong("other routes were read")
        return "answered"

    return case


# -- the command line, the page ----------------------------------------------------------------------------------------

VERBS = ("study", "run", "figures", "watch", "drift", "doctor", "help", "stdy", "--version", "-h")
OPTIONS = """small/study.yaml quick small small/grpo/seed0 nowhere --arm --arms --seed --seeds grpo gspo --output
--workers --prompts --port --trust --help --help-all --optim.steps --optim.betas --optim.learning-rate
--method.objective --method.replay --method.corrections --rollout.group-size --task.name --task.options --model.path
--model.dtype --checkpoint-every --probe.sequences --json --no-figures --figures --rounding --cold-starts --devices
--memory -- - ="""
WORDS = OPTIONS.split()


def said_by(arguments: list[str]) -> str:
    """The command line in this process: "answered", "refused"; Wrong if it shows a traceback or leaves otherwise."""
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
    """Random words after `moe-rl`; what would train, serve or load models stops after its checks."""
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
    """Raw requests to the server of `moe-rl watch`: never status 500, nothing printed, strangers refused."""
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
        if status >= 500 or (head.startswith(b"HTTP") and b"Content-Security-Policy" not in head):
            raise Wrong(f"{request[:200]!r}: {answer[:300]!r}")
        if status == 200 and b"evil" in request.split(b"Host:")[-1]:
            raise Wrong(f"a stranger was answered: {request[:200]!r}")
        return "answered" if status == 200 else "refused"

    return case


# -- folders -----------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(path.relative_to(folder) for path in found)


def damaged_folders(root: Path) -> Case:
    """One file of a finished study, under every command that reads folders."""
    whole, own = small_study(root), root / "study"
    prompts = root / "prompts.jsonl"
    prompts.write_text('{"text": "^12+34="}\n')
    names = files_of(whole)

    def resume_study(folder: Path) -> None:
        grid._schedule = lambda *_: iter(())  # what is not done would now be trained
        said_by(["study", str(folder / "study.yaml"), "--output", str(folder), "--no-figures"])

    def drift(folder: Path) -> None:
        pair = [str(folder / arm / "seed0") for arm in ("grpo", "gspo")]
        check(*pair)
        load_checkpoint_of("NEW", pair[1], "float32", "cpu", False)

    def page(folder: Path) -> None:
        api = watch.Api(watch.LiveStudy(folder))
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
    """One file of what an unfinished run goes on from: refused, or the same weights, step and rows."""
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
