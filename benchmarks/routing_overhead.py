"""Cost of recording and replaying: time as a ratio to the plain model, all variants interleaved in one run.

    python benchmarks/routing_overhead.py                # CPU, three sizes; and the GPU part if there is a GPU
    python benchmarks/routing_overhead.py --rounds 30    # narrower spread

In every round each variant runs once, in random order, and its time is divided by that of the plain run of the round.
Two plain runs (A/A) are compared in the same way: their spread is what this machine can resolve, and smaller
differences are noise. A context is opened before the clock starts, as for the many calls of a `generate`; the variants
"opened for it" include opening and closing, as around every minibatch. CPU times are CPU seconds of this process with
one thread; GPU times are wall clock around a synchronised call.

The GPU part is a random model of the shape of Qwen3-30B-A3B in bfloat16 with as many of its 48 layers as fit; it
prefills 8 x 1024 tokens, decodes one token for 64 sequences, and trains (forward+backward) on 4 x 1024.
"""

import inspect
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from models import qwen3_moe
from rows import command_line, in_turns, ratios, resolved, row, write
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.routing import attach, record_routes, replay_routes
from moe_rl.routing.calls import cache_name

OPENED = ", opened for it"
VARIANTS = ("plain", "plain again", "idle", "record", f"record{OPENED}", "replay", f"replay{OPENED}")
VARIANTS += ("shadow", "router_logits")
SIZES = {  # hidden, layers, experts, top-k, batch, tokens
    "small": (64, 4, 16, 2, 8, 64),
    "medium": (128, 4, 32, 4, 16, 128),
    "large": (256, 4, 64, 8, 4, 256),
}
QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
CACHE = cache_name(inspect.signature(Qwen3MoeForCausalLM.forward).parameters)
BYTES_PER_LAYER = 2 * 623.1e6  # of Qwen3-30B-A3B in bfloat16


def main() -> None:
    arguments = command_line(__doc__, rounds=12, least=4)  # the fewest that have quartiles
    arguments.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES), help="CPU sizes")
    arguments.add_argument("--no-gpu", action="store_true", help="CPU part only")
    options = arguments.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    random.seed(0)
    lines = []
    torch.set_num_threads(1)
    for name in options.sizes:
        lines += compare_size(name, options.rounds)
    if torch.cuda.is_available() and not options.no_gpu:
        lines += compare_gpu(options.rounds)
    elif not options.no_gpu:
        print("no GPU: the Qwen3-30B-A3B-shaped comparison was not run")
    write(options.json, lines)


def compare_size(name: str, rounds: int) -> list[dict[str, Any]]:
    """Compare the variants on one of `SIZES` on the CPU; return rows."""
    hidden, layers, experts, k, batch, length = SIZES[name]
    config = qwen3_moe(hidden, layers, experts, k, width=hidden)
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.randint(0, 512, (batch, length))
    what = f"CPU {name}: d={hidden}, {layers} layers, top {k} of {experts}, {batch} x {length} tokens"
    return [
        *compare(f"{what}, forward", model, lambda **kw: forward(model, ids, **kw), ids, rounds),
        *compare(f"{what}, forward+backward", model, lambda **kw: train(model, ids, **kw), ids, rounds),
    ]


def compare_gpu(rounds: int) -> list[dict[str, Any]]:
    """Compare the variants on the GPU, with as many layers of Qwen3-30B-A3B's shape as fit; return rows."""
    free = torch.cuda.mem_get_info()[0]
    layers = max(1, min(48, int((0.45 * free - 4e9) / BYTES_PER_LAYER)))  # gradients take as much again
    what = f"Qwen3-30B-A3B shape, bf16, {layers} of 48 layers"
    print(torch.cuda.get_device_name())
    return compare_shape(what, QWEN3_30B_A3B, layers, rounds, "cuda")


def compare_shape(
    what: str, shape: dict[str, Any], layers: int, rounds: int, device: str, length: int = 1024
) -> list[dict[str, Any]]:
    """Compare the variants on a random bfloat16 model of this shape: prefill, decoding and training; return rows."""
    config = Qwen3MoeConfig(num_hidden_layers=layers, **shape)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    prompt = torch.randint(0, 1000, (8, length), device=device)
    prefill = f"{what}, prefill 8 x {length}"
    lines = compare(prefill, model, lambda **kw: forward(model, prompt, **kw), prompt, rounds)
    step = torch.randint(0, 1000, (64, 1), device=device)
    lines += compare(f"{what}, decode 64 x 1", model, lambda **kw: decode(model, step, **kw), step, 4 * rounds)
    batch = prompt[:4]
    training = f"{what}, train 4 x {length}"
    lines += compare(training, model, lambda **kw: train(model, batch, **kw), batch, rounds)
    return lines


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, **options: Any) -> None:
    model(ids, use_cache=False, logits_to_keep=1, **options)


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor, **options: Any) -> None:
    model(ids, **{CACHE: DynamicCache(config=model.config)}, **options)


def train(model: Any, ids: torch.Tensor, **options: Any) -> None:
    model(ids, use_cache=False, logits_to_keep=16, **options).logits.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def compare(what: str, model: Any, run: Callable[..., None], ids: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Time all variants of `run` in turns; print and return a row for each, with its ratio to the plain time."""
    with torch.no_grad(), record_routes(model) as recording:
        model(ids, use_cache=False, logits_to_keep=1)
    routes = recording.routes

    def context(variant: str) -> AbstractContextManager[Any]:
        if variant == "idle":
            return attach(model)
        if variant.startswith("record"):
            return record_routes(model)
        if variant.startswith(("replay", "shadow")):
            return replay_routes(model, routes, shadow=variant == "shadow")
        return nullcontext()

    def measured(variant: str) -> float:
        options = {"output_router_logits": True} if variant == "router_logits" else {}
        if variant.endswith(OPENED):
            with stopwatch(ids.device) as seconds, context(variant):
                run(**options)
        else:
            with context(variant), stopwatch(ids.device) as seconds:
                run(**options)
        return seconds[0]

    taken = in_turns({variant: partial(measured, variant) for variant in VARIANTS}, rounds, lambda call: call(), True)
    least = f"{100 * resolved(ratios(taken['plain again'], taken['plain'])):.1f} %"
    print(f"\n{what}\n  plain: {1e3 * statistics.median(taken['plain']):.1f} ms (median of {rounds} rounds)")
    lines = []
    for variant in VARIANTS[1:]:
        note = f"resolved: {least}"
        line = row("routing_overhead", f"{what}: {variant}", taken[variant], "plain", taken["plain"], note=note)
        low, high = line["spread"]
        print(f"  {variant:22s} x {line['ratio']:.3f}   quartiles {low:.3f} .. {high:.3f}")
        lines.append(line)
    print(f"  resolved: differences above about {least} (twice the standard error of A/A)")
    return lines


@contextmanager
def stopwatch(device: torch.device) -> Iterator[list[float]]:
    """Context manager: append to the yielded list the seconds inside: CPU time, or on a GPU synchronised wall clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds: list[float] = []
    start = clock()
    yield seconds
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds.append(clock() - start)


if __name__ == "__main__":
    main()
