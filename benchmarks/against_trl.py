"""CPU seconds of a GRPO cycle against TRL's GRPOTrainer on the same work, side by side.

    python benchmarks/against_trl.py                 # completions of one length
    python benchmarks/against_trl.py --ragged        # completions that an end token may end
    python benchmarks/against_trl.py --python OTHER/bin/python     # an environment that has trl beside moe_rl

A cycle is one batch of 8 prompts x 8 completions of up to 24 tokens and four updates on 16 completions each, of a
Qwen3-MoE of 3.4 M parameters with random weights (hidden 128, 4 layers, 16 experts of width 128, 4 per token), AdamW,
one thread. Our side is `examples/grpo_replay.py`: sampling, a scoring pass that records the routes, four updates under
replay. It runs in four variants: with transformers' experts; with `sorted_mm`; also without the scoring pass (old
log-probabilities and routes are then those of decoding); and also with updates in which responses share their prompt
(`share_prompts`). TRL's trainer has no routes. Each trainer runs in processes of its own, which take turns, with the C
library's own handling of freed memory, which neither the example nor TRL changes. A time is the median CPU time of a
cycle after the first two, and a ratio compares neighbouring processes.
"""

import contextlib
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import torch
from models import policy
from rows import command_line, ratios, row, write

PROMPTS, GROUP, LENGTH, UPDATES, WARMUP = 8, 8, 24, 4, 2
SIDES = ("trl", "ours", "ours, sorted_mm", "ours, sorted_mm, no scoring pass", "ours, all of these, shared prompts")


class Sums:
    """Task: sums of two numbers. Any digits earn reward, so that a random policy has groups with unequal rewards."""

    name, alphabet, max_new_tokens = "sums", "^$0123456789+=", LENGTH

    def problem(self, rng: random.Random, held_out: bool = False) -> Any:
        from moe_rl.rollout.task import Problem

        a, b = rng.randint(10, 99), rng.randint(10, 99)
        return Problem(f"^{a}+{b}=", str(a + b))

    def reward(self, problem: Any, completion: str) -> float:
        return sum(c.isdigit() for c in completion[:4]) / 4


def model_of(experts: str | None, ragged: bool) -> tuple[Any, Any]:
    """Return model and tokenizer; without `ragged` neither of them has an end token."""
    return policy(Sums.alphabet, 128, 4, 16, 4, 128, ends=ragged, implementation=experts)


def learning_rate(ragged: bool) -> float:
    """Return the learning rate; with `ragged` it is too small to change what is sampled, so that lengths stay unequal.

    At 5e-4 the policy learns within three cycles not to end its responses.
    """
    return 1e-9 if ragged else 5e-4


def ours(experts: str | None, scoring: bool, shared: bool, ragged: bool, cycles: int) -> list[float]:
    """Train by `examples/grpo_replay.py`; return the CPU clock in seconds at the start and at the end of each cycle."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from grpo_replay import train

    model, tokenizer = model_of(experts, ragged)
    ends = [time.process_time()]

    class Clock(io.StringIO):
        def write(self, text: str) -> int:  # the example prints a line at the end of each step
            if text.strip():
                ends.append(time.process_time())
            return len(text)

    with contextlib.redirect_stdout(Clock()):
        sizes = {"prompts": PROMPTS, "group_size": GROUP, "num_minibatches": UPDATES}
        rate = learning_rate(ragged)
        how = {"scoring": scoring, "shared": shared}
        train(model, tokenizer, Sums(), steps=cycles, learning_rate=rate, **how, **sizes)
    return ends


def trl(ragged: bool, cycles: int) -> list[float]:
    """Train by TRL's GRPOTrainer; return the CPU clock in seconds at the start and at the end of each cycle."""
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bars()
    model, tokenizer = model_of(None, True)
    task, rng = Sums(), random.Random(0)
    problems = [task.problem(rng) for _ in range(PROMPTS * cycles)]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                ends.append(time.process_time())

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP // UPDATES,
            gradient_accumulation_steps=1,
            steps_per_generation=UPDATES,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            max_steps=UPDATES * cycles,
            learning_rate=learning_rate(ragged),
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            router_aux_loss_coef=0.0,
            generation_kwargs=None if ragged else {"min_new_tokens": LENGTH},
            report_to="none",
            save_strategy="no",
            logging_steps=10**9,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda prompts, completions, **_: [task.reward(None, text) for text in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p.prompt} for p in problems]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return ends


def one_side(side: str, ragged: bool, cycles: int) -> None:
    """Train one of `SIDES` in this process and print the CPU seconds of each cycle after the warm-up."""
    torch.set_num_threads(1)
    last = side == SIDES[-1]
    experts = "sorted_mm" if "sorted" in side or last else None
    scoring = "no scoring" not in side and not last
    ends = trl(ragged, cycles) if side == "trl" else ours(experts, scoring, last, ragged, cycles)
    print("RESULT", json.dumps([b - a for a, b in itertools.pairwise(ends)][WARMUP:]))


def main() -> None:
    parser = command_line(__doc__, rounds=2)
    parser.add_argument("--ragged", action="store_true", help="an end token may end a completion")
    parser.add_argument(
        "--cycles", type=int, default=8, help="cycles of each process, the first two of which are not counted"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has trl, torch and transformers")
    parser.add_argument("--side", choices=SIDES, help=SUPPRESS)
    options = parser.parse_args()
    if options.cycles <= WARMUP:
        parser.error(f"--cycles: more than {WARMUP}, which are not counted")
    if options.side:
        one_side(options.side, options.ragged, options.cycles)
        return
    command = [options.python, __file__, "--cycles", str(options.cycles), *(["--ragged"] if options.ragged else [])]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            done = subprocess.run([*command, "--side", side], env=environment, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
            if done.returncode or not lines:
                parser.exit(1, f"{side} failed:\n{done.stderr[-2000:]}\n")
            times[side].append(statistics.median(json.loads(lines[0].removeprefix("RESULT"))))
    what = "ragged" if options.ragged else "one length"
    print(f"{what}, CPU seconds per cycle, one thread, torch {torch.__version__}")
    rows = []
    for side in SIDES:
        of = ratios(times[side], times["trl"])
        spread = f"[{min(of):.2f}, {max(of):.2f}]"
        print(f"  {side:34} {statistics.median(times[side]):.3f} s   {statistics.median(of):.2f} of TRL's {spread}")
        if side != "trl":
            rows.append(row("against_trl", f"{what}: {side}", times[side], "TRL", times["trl"]))
    write(options.json, rows)


if __name__ == "__main__":
    main()
