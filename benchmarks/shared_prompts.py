"""CPU time of updates in which responses share their prompt, against a row for each response; one thread.

    python benchmarks/shared_prompts.py

Model and work are those of `against_trl.py` (3.4 M parameters, `sorted_mm`, 8 prompts x 8 responses of up to 24 tokens,
four updates), in one process in which both sides take turns. Measured are forward and backward of one minibatch of 16
responses under replay, and a whole cycle without a scoring pass, with responses of one length and, by an end token, of
unequal lengths.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from against_trl import GROUP, LENGTH, PROMPTS, UPDATES, Sums, model_of
from rows import command_line, cpu_seconds, row, write

from moe_rl.measure import check_shared_prompts, share_prompts, token_logps
from moe_rl.processes import keep_freed_memory
from moe_rl.rollout import sample, seeded_generator, seeded_random
from moe_rl.routing import replay_routes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from grpo_replay import train

WARMUP = 3


def in_turns(one: Callable[[int], Any], other: Callable[[int], Any], rounds: int) -> list[list[float]]:
    """Return the CPU seconds of both calls, in pairs whose order alternates; the first `WARMUP` pairs are left out."""
    seconds: list[list[float]] = [[], []]
    for turn in range(WARMUP + rounds):
        for side in ((0, 1), (1, 0))[turn % 2]:
            seconds[side].append(cpu_seconds(partial((one, other)[side], turn)))
    return [side[WARMUP:] for side in seconds]


def update(ragged: bool, rounds: int) -> tuple[list[list[float]], str]:
    """Return the CPU seconds of both sides on one minibatch, and how many places each computes, as text."""
    model, tokenizer = model_of("sorted_mm", ragged)
    rng, task = seeded_random(0, "prompts"), Sums()
    problems = [task.problem(rng) for _ in range(PROMPTS // UPDATES)]
    generator = seeded_generator(0, "sample", 0)
    rollout = sample(
        model, tokenizer, problems, group_size=GROUP, max_new_tokens=LENGTH, generator=generator, record=True
    )
    tokens, routes = (rollout.input_ids, rollout.attention_mask, rollout.completion_mask), rollout.routes
    check_shared_prompts(model)

    def apart(turn: int) -> None:
        with replay_routes(model, routes):
            token_logps(model, *tokens).logps.sum().backward()

    def shared(turn: int) -> None:
        rows = share_prompts(*tokens, routes=routes)
        with replay_routes(model, rows.pack(routes)):
            token_logps(model, *tokens, shared=rows).logps.sum().backward()

    places = share_prompts(*tokens, routes=routes).input_ids.numel()
    return in_turns(shared, apart, rounds), f"{places} places instead of {tokens[0].numel()}"


def cycle(ragged: bool, rounds: int) -> list[list[float]]:
    """Return the CPU seconds of both sides of a cycle, with a learning rate too small to change the lengths."""

    def side(shared: bool) -> Callable[[int], None]:
        model, tokenizer = model_of("sorted_mm", ragged)
        sizes = {"prompts": PROMPTS, "group_size": GROUP, "num_minibatches": UPDATES, "learning_rate": 1e-9}

        def run(turn: int) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                train(model, tokenizer, Sums(), scoring=False, shared=shared, steps=1, seed=turn, **sizes)

        return run

    return in_turns(side(True), side(False), rounds)


def main() -> None:
    options = command_line(__doc__, rounds=40).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for ragged in (False, True):
        what = "unequal lengths" if ragged else "one length"
        seconds, places = update(ragged, options.rounds)
        rows.append(row("shared_prompts", f"update, {what}", seconds[0], "rows of their own", seconds[1], note=places))
        shared, apart = cycle(ragged, options.rounds)
        rows.append(row("shared_prompts", f"cycle, {what}", shared, "rows of their own", apart))
    for one in rows:
        low, high = one["spread"]
        print(f"{one['case']:28} {one['us'] / 1e3:7.1f} ms, {one['ratio']:.3f} [{low:.3f}, {high:.3f}]  {one['note']}")
    write(options.json, rows)


if __name__ == "__main__":
    main()
