"""Microseconds of one router call: plain, idle (hooks attached, no context open), recording, replaying.

    python benchmarks/router_calls.py [--tokens 1 64 512 4096] [--rounds 15]

A call is the router's own work, the hooks around the router, and the experts' module with the hooks before it; the
experts here return their input unchanged. Calls are timed inside the forward of a Qwen3-MoE of random weights (hidden
256, 4 layers, top 8 of 128), in CPU time of one thread; in each round all variants take turns. Two plain runs (A/A) are
compared in the same way: their spread is what this machine can resolve.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from models import qwen3_moe
from rows import command_line, in_turns, ratios, resolved, row, write
from transformers import Qwen3MoeForCausalLM

from moe_rl.routing import attach, record_routes, replay_routes

LAYERS = 4
LENGTH = 64  # tokens in a row of the batch
VARIANTS = ("plain", "plain again", "idle", "record", "replay")


class Timed:
    """Sum of the CPU time of calls of routers and experts, hooks included; `calls` counts calls of routers."""

    def __init__(self, router: type[torch.nn.Module], experts: type[torch.nn.Module]) -> None:
        self.seconds, self.calls = 0.0, 0
        self._time(router, counted=1)
        self._time(experts, counted=0)

    def _time(self, kind: type[torch.nn.Module], counted: int) -> None:
        original = kind.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return original(module, *args, **kwargs)
            finally:
                self.seconds += 1e-9 * (time.thread_time_ns() - start)
                self.calls += counted

        kind.__call__ = call  # type: ignore[method-assign]  # Python looks up __call__ on the class

    def take(self) -> float:
        """Return the seconds per router call since the last `take`, and start again from zero."""
        found = self.seconds / max(1, self.calls)
        self.seconds, self.calls = 0.0, 0
        return found


def small_model() -> Any:
    """Return a Qwen3-MoE of random weights whose experts return their input unchanged."""
    config = qwen3_moe(256, LAYERS, experts=128, k=8, width=16, vocab=64, intermediate_size=32, head_dim=16)
    model = Qwen3MoeForCausalLM(config).eval()
    for layer in model.model.layers:  # so that the arithmetic of experts is not measured
        layer.mlp.experts.forward = lambda hidden, ids, weights: hidden
    return model


@torch.no_grad()
def measure(model: Any, timed: Timed, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return variant -> seconds per router call in each round."""
    ids = torch.randint(0, 64, (max(1, tokens // LENGTH), min(tokens, LENGTH)))

    def forward() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    with record_routes(model) as recording:
        forward()
    routes = recording.routes
    contexts = {
        "idle": lambda: attach(model),
        "record": lambda: record_routes(model),
        "replay": lambda: replay_routes(model, routes),
    }

    def seconds(context: Callable[[], Any]) -> float:
        with context():
            timed.take()
            forward()
            return timed.take()

    calls = {variant: contexts.get(variant, nullcontext) for variant in VARIANTS}
    return in_turns(calls, rounds, seconds, shuffled=True)


def main() -> None:
    parser = command_line(__doc__, rounds=15, least=4)  # the fewest that have quartiles
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 512, 4096], help="tokens of a call")
    options = parser.parse_args()
    if odd := [n for n in options.tokens if n < 1 or (n > LENGTH and n % LENGTH)]:
        parser.error(f"--tokens: up to {LENGTH}, or rows of {LENGTH}; got {', '.join(map(str, odd))}")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    model = small_model()
    block = model.model.layers[0].mlp
    timed = Timed(type(block.gate), type(block.experts))
    print(f"a router call, {options.rounds} rounds, torch {torch.__version__}; x: median [quartiles] of the plain one")
    results = []
    for tokens in options.tokens:
        found = measure(model, timed, tokens, options.rounds)
        least = f"{100 * resolved(ratios(found['plain again'], found['plain'])):.1f} %"
        print(f"{tokens} tokens: plain {1e6 * statistics.median(found['plain']):.1f} us; resolved: {least}")
        for variant in VARIANTS[1:]:
            note = f"hidden 256, top 8 of 128, CPU, one thread; differences above {least} are resolved"
            one = row("router_calls", f"{variant}, {tokens} tokens", found[variant], "plain", found["plain"], note=note)
            results.append(one)
            low, high = one["spread"]
            print(f"  {variant:12} {one['us']:9.1f} us   x {one['ratio']:.2f} [{low:.2f}, {high:.2f}]")
    write(options.json, results)


if __name__ == "__main__":
    main()
