"""Growth of cost: CPU seconds as a power of tokens, experts, layers, group size and length.

    python benchmarks/cost.py

Each quantity is doubled three times while the others stay fixed. In every round all sizes take turns, and the slope of
log(CPU seconds) over log(size) is that round's exponent; 1 is linear. Printed are the mean exponent over rounds with
its 95 % interval (Student), and the median exponent of the last doubling, in which constant costs weigh least, so that
faster than linear growth shows there first. Measured are `forward`, `record` (a forward that records routes), `replay`
(forward and backward under replay), and `cycle`: sampling, scoring and two updates of examples/grpo_replay.py.
"""

import contextlib
import io
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from models import policy
from rows import command_line, in_turns, row, write
from scipy import stats

from moe_rl.processes import keep_freed_memory
from moe_rl.routing import record_routes, replay_routes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from against_trl import Sums
from grpo_replay import train

BASE = {"experts": 16, "layers": 4}
CALLS = {"sequences": 8, "length": 64}  # sizes of forward, record and replay
CYCLE = {"prompts": 2, "group size": 4, "new tokens": 12}
GROWN = {  # quantity -> the size that is doubled for the calls, if any, and for the cycle
    "tokens (sequences of one length)": ("sequences", "prompts"),
    "length": ("length", "new tokens"),
    "group size": (None, "group size"),
    "experts": ("experts", "experts"),
    "layers": ("layers", "layers"),
}
DOUBLINGS = 3


def build(experts: int, layers: int) -> tuple[Any, Any]:
    """Return a model with top 2 of `experts` experts, and its tokenizer; neither has an end token."""
    return policy(Sums.alphabet, 64, layers, experts, 2, 64, ends=False)


def calls(sequences: int, length: int, experts: int, layers: int) -> dict[str, Callable[[], object]]:
    """Return the calls forward, record and replay on one random batch."""
    model, tokenizer = build(experts, layers)
    ids = torch.randint(0, len(tokenizer), (sequences, length))

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False)

    def record() -> Any:
        with record_routes(model) as recording:
            forward()
        return recording.routes

    routes = record()

    def replay() -> None:
        with replay_routes(model, routes):
            model(ids, use_cache=False).logits.square().mean().backward()
        model.zero_grad(set_to_none=True)

    return {"forward": forward, "record": record, "replay": replay}


def cycle(prompts: int, group: int, length: int, experts: int, layers: int) -> Callable[[], object]:
    """Return a call that makes one RL step of examples/grpo_replay.py."""
    model, tokenizer = build(experts, layers)
    task = Sums()
    task.max_new_tokens = length

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            train(model, tokenizer, task, steps=1, prompts=prompts, group_size=group, num_minibatches=2)

    return run


def sizes_of(grown: str) -> dict[str, list[tuple[int, Callable[[], object]]]]:
    """Return name of a call -> list of (size, call to time) in growing sizes of the quantity `grown`."""
    of_calls, of_cycle = GROWN[grown]
    found: dict[str, list[tuple[int, Callable[[], object]]]] = {}
    for doubling in range(DOUBLINGS + 1):
        if of_calls:
            values = {**CALLS, **BASE}
            values[of_calls] *= 2**doubling
            for name, call in calls(*values.values()).items():
                found.setdefault(name, []).append((values[of_calls], call))
        values = {**CYCLE, **BASE}
        values[of_cycle] *= 2**doubling
        found.setdefault("cycle", []).append((values[of_cycle], cycle(*values.values())))
    return found


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log(seconds) over log(sizes)."""
    return float(stats.linregress([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % Student interval of the mean of `values`."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def measure(grown: str, rounds: int) -> list[dict[str, Any]]:
    """Measure the growth of every call with one quantity; print and return a row for each."""
    found = sizes_of(grown)
    times = in_turns({(name, size): call for name, points in found.items() for size, call in points}, rounds)
    rows = []
    for name, points in found.items():
        sizes = [size for size, _ in points]
        rounds_of = list(zip(*(times[name, size] for size in sizes), strict=True))
        slopes = [exponent(sizes, seconds) for seconds in rounds_of]
        low, high = interval(slopes)
        last = statistics.median(math.log2(seconds[-1] / seconds[-2]) for seconds in rounds_of)
        case = f"{grown}: {name}"
        note = f"exponent {statistics.mean(slopes):.2f} [{low:.2f}, {high:.2f}], last doubling {last:.2f}"
        print(f"{case:45} {note}")
        rows.append(row("cost", f"{case}, {sizes[0]} to {sizes[-1]}", times[name, sizes[-1]], note=note))
    return rows


def main() -> None:
    parser = command_line(__doc__, rounds=4, least=2)  # the fewest rounds that have an interval
    parser.add_argument("--only", nargs="+", choices=list(GROWN), default=list(GROWN))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    write(options.json, [line for grown in options.only for line in measure(grown, options.rounds)])


if __name__ == "__main__":
    main()
