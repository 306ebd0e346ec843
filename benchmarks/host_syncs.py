"""Number of times that the host waits for the GPU: recording, replaying and counting changes against the plain model.

    python benchmarks/host_syncs.py                # needs a CUDA device
    python benchmarks/host_syncs.py --device cpu   # runs the same calls and counts nothing: a CPU has no such waits

Each wait (`.item()`, a copy to the host, an index by a mask) lets the GPU run dry. torch counts them itself
(`torch.cuda.set_sync_debug_mode`); each call is warmed up once and then counted once.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from models import qwen3_moe
from rows import command_line, row, write
from transformers import Qwen3MoeForCausalLM

from moe_rl.measure.logprobs import token_logps
from moe_rl.routing import change_counts, record_routes, replay_routes
from moe_rl.routing.experts import register_experts

SAID = "called a synchronizing CUDA operation"
"""Part of the warning that torch gives at each wait."""


@contextmanager
def waits(device: str) -> Iterator[Counter[str]]:
    """Context manager: on exit, fill the yielded counter with the places (file:line) where the host waited inside."""
    found: Counter[str] = Counter()
    cuda = device.startswith("cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if SAID in str(warning.message):
            found[f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"] += 1


def calls(device: str, experts: str, layers: int, tokens: int) -> dict[str, Callable[[], object]]:
    """Return the calls whose waits are counted, by name, the plain model first."""
    torch.manual_seed(0)
    register_experts()
    config = qwen3_moe(256, layers, experts=32, k=4, width=128, vocab=1024)
    config._experts_implementation = experts
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
        ids = torch.randint(0, 1024, (2, tokens))
        attended = torch.ones_like(ids)
        completion = torch.arange(tokens).expand(2, tokens) >= tokens // 2
    with torch.no_grad(), record_routes(model) as recording:
        model(ids, use_cache=False)
    routes = recording.routes
    other = type(routes)(routes.ids.flip(-1), routes.sites, routes.num_experts)

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False)

    def train() -> None:
        model(ids, use_cache=False).logits.square().mean().backward()

    def record() -> None:
        with record_routes(model) as found:
            forward()
        assert found.routes.ids.shape[2] == layers

    def replay(run: Callable[[], None]) -> None:
        with replay_routes(model, routes):
            run()

    def score() -> None:
        with torch.no_grad(), record_routes(model):
            token_logps(model, ids, attended, completion)

    return {
        "forward": forward,
        "forward, recorded": record,
        "forward, replayed": lambda: replay(forward),
        "forward and backward": train,
        "forward and backward, replayed": lambda: replay(train),
        "scoring pass: log-probabilities and routes": score,
        "change_counts of both routes": lambda: change_counts(routes, other),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", default="grouped_mm", help="experts implementation")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(1, "no CUDA device here; --device cpu runs the calls and counts nothing\n")
    rows = []
    for name, call in calls(options.device, options.experts, options.layers, options.tokens).items():
        call()
        began = time.perf_counter()
        with waits(options.device) as found:
            call()
        seconds = time.perf_counter() - began
        places = ", ".join(f"{place} {count}" for place, count in found.most_common(4))
        note = f"{found.total()} waits" + (f" ({places})" if found else "")
        note += "; wall clock" if options.device.startswith("cuda") else ": a CPU has none to count; wall clock"
        print(f"{name:45} {note}")
        rows.append(row("host_syncs", f"{options.layers} layers, {name}", [seconds], note=note))
    write(options.json, rows)


if __name__ == "__main__":
    main()
