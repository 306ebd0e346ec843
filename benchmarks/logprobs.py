"""Peak memory and CPU time of token log-probabilities: moe_rl against holding the logits.

    python benchmarks/logprobs.py                # the head alone at a real vocabulary: memory, then time
    python benchmarks/logprobs.py --tiny         # the main study's model: what chunking costs when V is 28

The least possible cost, for N tokens, hidden size H, vocabulary V, chunks of C tokens, forward and backward, in fp32:

    holding the logits   6 N V H operations (three products) and, at its peak, 4 N V bytes per copy of the logits held:
                         one for the logits and one for their gradient is the floor, 8 N V
    in chunks            8 N V H operations (the logits twice), so at least 1.33 times the products' time, and
                         one or two chunks of logits, 4-8 C V bytes
    either way           4 V H bytes: the weight's gradient

In bfloat16, moe_rl also sums the weight's gradient over chunks in fp32 (4 V H bytes); selective_log_softmax stays in
bfloat16 throughout, and so do the log-probabilities that it returns.

Memory is measured in two ways: by torch's profiler, which sees every allocation of torch, and as the growth of the
resident memory's peak in a process of its own. Time is CPU time as a ratio to `log_softmax + gather`; the methods take
turns.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import qwen3_moe
from rows import allocated_peak, command_line, in_turns, row, write
from torch import Tensor

from moe_rl.measure.head import head_logps
from moe_rl.measure.logprobs import token_logps

MIB = 2**20
SEQUENCES = 8  # number of sequences in the batch; TRL's function goes through them one at a time
Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_softmax_gather(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def selective_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probabilities by TRL's function, or by the same steps if TRL is not installed.

    The steps: in fp32 and float64 the chosen logit minus the row's logsumexp, one sequence at a time; in lower
    precision a log_softmax per sequence.
    """
    logits = F.linear(hidden, weight).unflatten(0, (SEQUENCES, -1))
    index = targets.unflatten(0, (SEQUENCES, -1))
    try:
        from trl.trainer.utils import selective_log_softmax as published
    except ImportError:
        if logits.dtype in (torch.float32, torch.float64):
            chosen = logits.gather(-1, index[..., None]).squeeze(-1)
            return (chosen - torch.stack([row.logsumexp(-1) for row in logits])).flatten()
        return torch.stack(
            [row.log_softmax(-1).gather(-1, i[:, None]).squeeze(-1) for row, i in zip(logits, index, strict=True)]
        ).flatten()
    return published(logits, index).flatten()


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return head_logps(hidden, weight, targets)[0]


METHODS: dict[str, Method] = {
    "log_softmax + gather": log_softmax_gather,
    "selective_log_softmax": selective_log_softmax,
    "moe_rl": chunked,
    **{
        f"moe_rl, chunk {size}": lambda h, w, t, size=size: head_logps(h, w, t, chunk_size=size)[0]
        for size in (32, 128, 512)
    },
}


def problem(N: int, H: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random hidden states [N, H], head weights [V, H], targets [N], and factors of the loss [N]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) / H**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator), torch.randn(N, generator=generator)


def step(method: Method, hidden: Tensor, weight: Tensor, targets: Tensor, direction: Tensor) -> None:
    """Make one forward and backward of a method."""
    hidden.grad = weight.grad = None
    (method(hidden, weight, targets) * direction).sum().backward()


def resident_growth(run: Callable[[], None]) -> int:
    """Return how many bytes the peak of resident memory during `run` was above the level before, as Linux reports it.

    getrusage does not serve: its peak cannot be reset, and includes the process that started this one.
    """
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # sets the peak to the present level
    before = resident_peak()
    run()
    return resident_peak() - before


def resident_peak() -> int:
    """Return the peak of this process's resident memory since its last reset, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def measure_memory(name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Print the resident and allocated bytes of one method's step; for a process that measures nothing else."""
    torch.set_num_threads(1)
    step(METHODS[name], *problem(8, 8, 16, dtype))  # so that torch loads what it loads at its first use
    inputs = problem(*sizes, dtype)
    resident = resident_growth(lambda: step(METHODS[name], *inputs))
    inputs = problem(*sizes, dtype)  # without the first step's gradients
    print(resident, allocated_peak(lambda: step(METHODS[name], *inputs)))


def memory_of(name: str, sizes: tuple[int, int, int], dtype: str) -> tuple[int, int]:
    """Return the resident and allocated bytes of a method's step, measured in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, "--dtype", dtype]
    command += ["--tokens", str(sizes[0]), "--hidden", str(sizes[1]), "--vocabulary", str(sizes[2])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {name} failed:\n{done.stderr}")
    lines = done.stdout.splitlines()
    resident, allocated = lines[-1].split()
    return int(resident), int(allocated)


def compared(what: str, runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return a row for each run: its CPU time, compared with that of the first run."""
    seconds = in_turns(runs, rounds)
    first = next(iter(runs))
    return {name: row("logprobs", f"{what}: {name}", own, first, seconds[first]) for name, own in seconds.items()}


def summary(one: dict[str, Any]) -> str:
    """Return a row's ratio and its quartiles as text."""
    low, high = one["spread"]
    return f"{one['ratio']:5.2f}  [{low:.2f}, {high:.2f}]"


def compare_heads(sizes: tuple[int, int, int], dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Compare memory and time of all methods on the head alone; print them, and return the rows but the first."""
    N, H, V = sizes
    bytes_per = torch.finfo(getattr(torch, dtype)).bits // 8
    print(f"N = {N} tokens, H = {H}, V = {V:,}, {dtype}; forward and backward")
    print(f"weight and hidden gradients alone: {bytes_per * (V + N) * H / MIB:,.0f} MiB (in every row below)")
    print(f"one copy of the logits in fp32: {4 * N * V / MIB:,.0f} MiB; the products: {6e-9 * N * V * H:,.0f} GFLOP\n")
    memory = {name: memory_of(name, sizes, dtype) for name in METHODS}
    inputs = problem(*sizes, getattr(torch, dtype))
    runs = {name: (lambda m=method: step(m, *inputs)) for name, method in METHODS.items()}
    rows = compared(f"{N} tokens, vocabulary {V:,}", runs, rounds)
    with torch.no_grad():
        few = inputs[0][: 8 * SEQUENCES], inputs[1], inputs[2][: 8 * SEQUENCES]
        values = {name: method(*few).double() for name, method in METHODS.items()}
    first = values["log_softmax + gather"]
    print(f"{'':24}{'allocated MiB':>14}{'resident MiB':>14}{'differs, nats':>15}   CPU time / first [quartiles]")
    held = {name: f"{memory[name][1] / MIB:,.0f} MiB at once" for name in METHODS}
    for name, one in rows.items():
        resident, allocated = (number / MIB for number in memory[name])
        difference = float((values[name] - first).abs().max())
        print(f"{name:24}{allocated:14,.0f}{resident:14,.0f}{difference:15.0e}   {summary(one)}")
        one["note"] = f"{held[name]}, the first {held['log_softmax + gather']}"
    told, *others = rows.values()
    print(f"first: {1e-6 * told['us']:.2f} CPU-seconds, {rounds} rounds")
    return others


def compare_tiny(rounds: int) -> list[dict[str, Any]]:
    """Compare times on one minibatch of the main study's policy, whose small vocabulary leaves nothing to save."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    as_the_study = {"intermediate_size": 48, "num_key_value_heads": 4, "norm_topk_prob": True}
    config = qwen3_moe(48, 4, experts=16, k=2, width=32, vocab=28, tie_word_embeddings=False, **as_the_study)
    model = Qwen3MoeForCausalLM(config)
    ids = torch.randint(0, 28, (64, 36))
    attended = torch.ones_like(ids)
    completion = torch.arange(36).expand(64, 36) >= 11

    def plain() -> None:
        logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (logps * completion[:, 1:]).sum().backward()

    def ours(**options: Any) -> None:
        out = token_logps(model, ids, attended, completion, **options)
        (out.logps.sum() + (out.entropy.sum() if out.entropy is not None else 0)).backward()

    runs = {"log_softmax + gather": plain, "moe_rl": ours, "moe_rl, with entropy": lambda: ours(entropy=True)}
    rows = compared("the tiny policy, 64 x 36 tokens", runs, rounds)
    print("batch 64 x 36, 25 completion tokens each, H 48, 4 layers, 16 experts, V 28; forward and backward")
    for name, one in rows.items():
        print(f"{name:24}CPU time / first {summary(one)}")
    told, *others = rows.values()
    print(f"first: {1e-6 * told['us']:.3f} CPU-seconds, {rounds} rounds")
    return others


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.tokens, options.hidden, options.vocabulary
    if options.measure:
        measure_memory(options.measure, sizes, getattr(torch, options.dtype))
        return
    if options.tokens < 1 or options.tokens % SEQUENCES:
        parser.error(f"--tokens: a multiple of {SEQUENCES}, the sequences that they come in; got {options.tokens}")
    torch.set_num_threads(1)
    rows = compare_tiny(options.rounds) if options.tiny else compare_heads(sizes, options.dtype, options.rounds)
    write(options.json, rows)


if __name__ == "__main__":
    main()
