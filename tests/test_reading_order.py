"""README's reading order against what one batch of GRPO with Routing Replay really calls."""

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
    """One step: sample, score, two replayed updates, a probe after each."""
    scored = collect_batch(state)
    probe = start_probe(state, scored)
    for update, rows in enumerate(minibatches(len(scored), 2, 4, state.generator("order")), start=1):
        update_on(state, scored.rows(rows), update)
        list(probe.rows(update))
    state.step += 1


def called(act, *arguments):
    """Files of the package whose functions run inside."""
    seen = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        act(*arguments)
    finally:
        sys.setprofile(None)
    return seen


def test_every_file_of_the_reading_order_takes_part_in_a_batch(tmp_path):
    section = README.read_text(encoding="utf-8").split("## Reading order")[1].split("\n## ")[0]
    listed = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", section.replace("examples/grpo_replay.py", ""))
    state = begin(CONFIG, tmp_path)
    batch(state)  # what happens once: self-checks, caches
    passed = called(batch, replace(state))
    assert len(listed) == len(set(listed)) > 15
    assert not set(listed) - passed, "listed, and takes no part"
    numbers = re.search(r"(\d+) files of under ([\d,]+)\s+lines", section).groups()
    said, most = (int(number.replace(",", "")) for number in numbers)
    lines = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in passed)
    assert said == len(passed), f"README says {said} files, it is {len(passed)} now: {sorted(passed)}"
    assert most - 300 < lines < most, f"README says under {most} lines, it is {lines} now"
