"""Fuzz kinds of single files: metrics, study files, tasks, prompts, routes."""

import contextlib
import json
import random
import shutil
from pathlib import Path

import yaml
from damage import ODD, damaged_bytes, damaged_text, damaged_value, flipped
from small_study import Case, Wrong, small_study

from moe_rl.drift.checkpoints import Checkpoints
from moe_rl.drift.prompts import Text
from moe_rl.policy.tiny import char_tokenizer
from moe_rl.rollout.jsonl_task import JsonLines
from moe_rl.routing import RoutedExperts
from moe_rl.study.config import load_study
from moe_rl.study.cursor import LiveError, read_since
from moe_rl.study.data import load
from moe_rl.study.outcomes import final_rewards
from moe_rl.study.shipped import outline
from moe_rl.training.route_tables import read_route_table, write_route_table


def metrics_lines(root: Path) -> Case:
    """Prepare cases: damage one line, or the bytes, of metrics.jsonl of an unfinished run, and read the run."""
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
    """Prepare cases: damage the text, or the values, of a study file, and read the file."""
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
    """Prepare cases: damage a file of prompts and answers, read it, and verify odd completions."""
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
    {"prompt_ids": [5, 6], "completion_ids": [7, 8], "temperature": 1.0, "sampled_from": "old", "sampler_sha256": "0"},
)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def prompt_files(root: Path) -> Case:
    """Prepare cases: damage a file for `moe-rl drift --prompts`, and read it."""
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
        known = Checkpoints(chosen, len(chosen), "", (), 0, None, ())
        text = Text(path, known, rng.choice([2, 64]), 8)
        list(text.examples() if rng.random() < 0.5 else text.questions(2))
        return "answered"

    return case


def route_files(root: Path) -> Case:
    """Prepare cases: damage files of RoutedExperts.save, with and without a checksum, or route tables, and read them.

    A case is wrong if other routes are read from a file with a checksum.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    ids = torch.rand(2, 9, 3, 300, generator=torch.Generator().manual_seed(0)).topk(4).indices
    routes = RoutedExperts(ids, ("a.gate", "b.gate", "c.gate"), 300, tokens=torch.arange(18).view(2, 9))
    path, table = root / "routes.safetensors", root / "routes.parquet"
    routes.save(path)
    write_route_table(table, routes)
    ordered = read_route_table(table)  # slots in ascending order
    with safe_open(path, "pt") as file:
        header = {k: v for k, v in file.metadata().items() if k != "sha256"} | {"format_version": "1"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    whole, rows = path.read_bytes(), table.read_bytes()

    def case(rng: random.Random) -> str:
        kind = rng.randrange(4)
        if kind == 0:  # as the first version wrote files: without a checksum, here with a damaged header
            values = {key: damaged_value(rng, json.loads(value)) for key, value in header.items() if key != "format"}
            changed = {key: json.dumps(value) for key, value in values.items()}
            save_file(tensors, path, {**changed, "format": header["format"]})
            RoutedExperts.load(path)
            return "answered"
        target, data = (path, whole) if kind == 1 else (table, rows)
        target.write_bytes(flipped(rng, data) if rng.random() < 0.5 else damaged_bytes(rng, data))
        read = RoutedExperts.load(path) if kind == 1 else read_route_table(table)
        if not read.equal(routes if kind == 1 else ordered):
            raise Wrong("other routes were read")
        return "answered"

    return case
