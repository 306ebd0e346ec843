"""README's reading order against what one batch of GRPO with Routing Replay really calls."""

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import moe_rl
from moe_rl.policy import ModelConfig, TinyConfig
from moe_rl.rollout import TaskConfig
from moe_rl.training import MethodConfig, OptimConfig, ProbeConfig, RolloutConfig, RunConfig, begin
from moe_rl.training.batch import minibatches
from moe_rl.training.loop import collect_batch, start_probe, update_on

PACKAGE = Path(moe_rl.__file__).parent
README = PACKAGE.parent / "README.md"
CONFIG = RunConfig(
    model=ModelConfig(
        tiny=TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8),
        cold_start=None,
        device="cpu",
    ),
    task=TaskConfig(name="mod_chain", options={"steps": 1}),
    method=MethodConfig(replay="R2"),
    rollout=RolloutConfig(prompts=4, group_size=4),
    optim=OptimConfig(num_minibatches=2),
    probe=ProbeConfig(sequences=4, floor=False),
)


def batch(state):
    """Make one RL step: sample, score, two replayed updates, a probe after each."""
    scored = collect_batch(state)
    probe = start_probe(state, scored)
    for update, rows in enumerate(minibatches(len(scored), 2, 4, state.generator("order")), start=1):
        update_on(state, scored.rows(rows), update)
        list(probe.rows(update))
    state.step += 1


def called(act, *arguments):
    """Call `act`; return file of the package -> first lines of its functions that ran."""
    seen = {}

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            name = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            seen.setdefault(name, set()).add(frame.f_code.co_firstlineno)

    sys.setprofile(note)
    try:
        act(*arguments)
    finally:
        sys.setprofile(None)
    return seen


def lines_of(text, starts):
    """Count the lines of the functions that begin at `starts`, decorators and docstrings included."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found |= set(range(first, node.end_lineno + 1)) if first in starts else set()
    return len(found)


def test_every_file_of_the_reading_order_takes_part_in_a_batch(tmp_path):
    section = README.read_text(encoding="utf-8").split("## Reading order")[1].split("\n## ")[0]
    listed = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section.replace("examples/grpo_replay.py", ""))
    state = begin(CONFIG, tmp_path)
    batch(state)  # what happens once: self-checks, caches
    passed = called(batch, replace(state))
    assert len(listed) == len(set(listed)) > 15
    assert not set(listed) - set(passed), "listed, and takes no part"
    wording = r"(\d+) files of\s+under ([\d,]+)\s+lines\s+in\s+all\s+take\s+part,\s+under\s+([\d,]+)\s+of"
    said, most, most_run = (int(number.replace(",", "")) for number in re.search(wording, section).groups())
    of_them, most_listed = (
        int(number.replace(",", "")) for number in re.search(r"(\d+) listed here hold under ([\d,]+)", section).groups()
    )
    texts = {name: (PACKAGE / name).read_text(encoding="utf-8") for name in passed}
    lines = sum(len(text.splitlines()) for text in texts.values())
    run = {name: lines_of(text, passed[name]) for name, text in texts.items()}
    run_listed, run = sum(run[name] for name in listed), sum(run.values())
    assert said == len(passed), f"README says {said} files, it is {len(passed)} now: {sorted(passed)}"
    assert most - 300 < lines < most, f"README says under {most} lines, it is {lines} now"
    assert most_run - 200 < run < most_run, f"README says under {most_run} lines of functions, it is {run} now"
    assert of_them == len(listed)
    assert most_listed - 200 < run_listed < most_listed, f"README says under {most_listed}, it is {run_listed} now"
