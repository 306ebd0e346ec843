"""Speed of the experts implementations as ratios to `grouped_mm`, their parity with eager, and determinism.

    python benchmarks/experts.py                             # a small layer; CPU time on a CPU, events on a GPU
    python benchmarks/experts.py --layer qwen3-30b-a3b --tokens 8192 --dtype bfloat16     # one layer, on a GPU

Timed are the forward, and forward with backward, of one experts layer. Implementations take turns within a round, so
that other load of the machine falls on all of them alike; a printed ratio is the median over rounds of the ratio within
a round, with its quartiles. Also printed: the floor, the time of the two matrix products alone, one call per expert,
with no permutation.

First each implementation is compared with eager (relative difference of the output and of every gradient) and run
twice on the same input: "same bits" says whether the two results are identical. `megablocks` joins on a CUDA device
where it is installed (docs/megablocks.md).
"""

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from rows import command_line, cpu_seconds, in_turns, row, write
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moe_rl.routing.experts import register_experts

LAYERS = {  # hidden size, expert width, experts, experts per token
    "tiny": (48, 32, 16, 2),
    "small": (128, 64, 16, 4),
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
IMPLEMENTATIONS = ["eager", "grouped_mm", "megablocks_reference", "sorted_mm"]


class Problem:
    """One experts layer with its inputs; the routing is random and uneven, from a softmax of normal logits."""

    def __init__(self, layer: str, tokens: int, dtype: torch.dtype, device: str) -> None:
        hidden, width, num_experts, k = LAYERS[layer]
        torch.manual_seed(0)
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=width, num_experts=num_experts)
        with torch.device(device):
            self.experts = Qwen3MoeExperts(config).to(dtype)
            for parameter in self.experts.parameters():
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            self.hidden = torch.randn(tokens, hidden).to(dtype).requires_grad_()
            logits = torch.randn(tokens, num_experts) + torch.randn(num_experts)
            weights, self.index = logits.softmax(-1).topk(k)
            self.weights = (weights / weights.sum(-1, keepdim=True)).to(dtype).requires_grad_()
            self.probe = torch.randn(tokens, hidden).to(dtype)
        counts = torch.bincount(self.index.flatten(), minlength=num_experts).tolist()
        self.sorted = self.hidden.detach().repeat_interleave(k, 0).split(counts)

    def forward(self, implementation: str) -> Tensor:
        self.experts.config._experts_implementation = implementation
        with torch.no_grad():
            return self.experts(self.hidden, self.index, self.weights)

    def forward_backward(self, implementation: str) -> list[Tensor]:
        self.experts.config._experts_implementation = implementation
        out = self.experts(self.hidden, self.index, self.weights)
        return [
            out.detach(),
            *torch.autograd.grad(out, [self.hidden, self.weights, *self.experts.parameters()], self.probe),
        ]

    def floor(self) -> None:
        """Compute only the two matrix products of the forward, on rows that are already sorted by expert."""
        for x, up, down in zip(self.sorted, self.experts.gate_up_proj, self.experts.down_proj, strict=True):
            (x @ up.detach().T)[:, : down.shape[1]] @ down.detach().T


def gpu_seconds(function: Callable[[], object]) -> float:
    """Return the seconds between two CUDA events around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def compare(what: str, candidates: dict[str, Callable[[], object]], rounds: int, device: str) -> list[dict[str, Any]]:
    """Time all candidates in turns, print their ratios to `grouped_mm`, and return a row for each other one."""
    times = in_turns(candidates, rounds, cpu_seconds if device == "cpu" else gpu_seconds)
    floor = statistics.median(times["floor"]) if "floor" in times else None
    rows = []
    for name, mine in times.items():
        one = row("experts", f"{what}: {name}", mine, "grouped_mm", times["grouped_mm"], floor)
        low, high = one["spread"]
        print(f"  {name:22} {one['ratio']:6.2f}  [{low:.2f}, {high:.2f}]   {1e-3 * one['us']:9.2f} ms")
        if name not in ("grouped_mm", "floor"):
            rows.append(one)
    return rows


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of a - b, divided by the norm of b."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(problem: Problem, implementations: list[str]) -> None:
    """Print how far each implementation is from eager, and whether two equal calls give the same bits."""
    names = ["output", "hidden states", "routing weights", *dict(problem.experts.named_parameters())]
    expected = problem.forward_backward("eager")
    for implementation in implementations:
        first, second = (problem.forward_backward(implementation) for _ in range(2))
        errors = ", ".join(f"{n} {relative(a, b):.1e}" for n, a, b in zip(names, first, expected, strict=True))
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        print(f"  {implementation:22} {errors}; same bits twice: {'yes' if same else 'NO'}")


def main() -> None:
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("--layer", choices=LAYERS, default="small")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    register_experts()
    cuda = args.device.startswith("cuda")
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    implementations = IMPLEMENTATIONS + (["megablocks"] if cuda and find_spec("megablocks") else [])
    problem = Problem(args.layer, args.tokens, dtype, args.device)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} thread(s), CPU time"
    print(f"{args.layer} {LAYERS[args.layer]}, {args.tokens} tokens, {dtype}, {where}, torch {torch.__version__}")
    print("against eager:")
    check(problem, implementations)
    print(f"forward, ratio to grouped_mm: median [quartiles] of {args.rounds} rounds")
    size = f"{args.layer}, {args.tokens} tokens"
    rows = compare(
        f"{size}, forward",
        {i: lambda i=i: problem.forward(i) for i in implementations} | {"floor": problem.floor},
        args.rounds,
        args.device,
    )
    print("forward + backward")
    both: dict[str, Callable[[], object]] = {i: lambda i=i: problem.forward_backward(i) for i in implementations}
    rows += compare(f"{size}, forward + backward", both, args.rounds, args.device)
    write(args.json, rows)


if __name__ == "__main__":
    main()
