"""Bytes of routes per token in memory, on the wire and on disk, and speed of writing and reading route tables.

    python benchmarks/route_storage.py                   # measures and prints
    python benchmarks/route_storage.py --tokens 4096 32768 --write     # also writes the table of docs/scaling.md

Sizes in memory and on the wire are computed from shapes. Sizes on disk are measured on route tables
(`moe_rl.training.route_tables`) of random routers: logits drawn for each token, plus a bias for each expert and site,
which makes some experts busier than others; the new policy has added noise that exchanges an expert in about a tenth of
the rows. Speeds are bytes of packed ids that are written or read per second of CPU time of one thread.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rows import command_line, in_turns, row, write

from moe_rl.files import write_atomic
from moe_rl.routing import RoutedExperts, change_counts
from moe_rl.routing.codec import exchange_bits, set_bits
from moe_rl.routing.packing import packed_dtype
from moe_rl.training.route_tables import read_route_table, write_route_changes, write_route_table

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- routes: python benchmarks/route_storage.py --tokens 4096 32768 --write -->", "<!-- routes end -->"
NOISE = 0.012


@dataclass(frozen=True)
class Shape:
    """Routing shape of a model.

    layers: all layers, including dense ones, for which some engines send rows of zeros. sites: the layers that route.
    """

    name: str
    layers: int
    sites: int
    experts: int
    k: int = 8


SEQUENCES = 4  # in a file
PART = {"read one of four sequences": lambda shape: SEQUENCES, "read one site": lambda shape: shape.sites}
"""Calls that read a part of a file -> the number of equal parts in a file."""
SHAPES = (Shape("Qwen3-30B-A3B", 48, 48, 128), Shape("DeepSeek-V3", 61, 58, 256))


def shipped(shape: Shape) -> dict[str, float]:
    """Return the bytes per token of each format that carries or keeps routes, computed from shapes."""
    ids, packed = shape.sites * shape.k, packed_dtype(shape.experts).itemsize
    engine = shape.layers * shape.k * (1 if shape.experts <= 256 else 2)
    return {
        "naive: int64 tensor `[B,T,L,K]`": 8 * ids,
        "slime, miles, SkyRL: int32": 4 * ids,
        "verl: nested int16 on the CPU": 2 * ids,
        "vLLM 0.32, `routed_experts`: uint8 to 256 experts, dense layers too": engine,
        "the same over HTTP, base64": engine * 4 / 3,
        "SGLang: int32, base64": 4 * shape.layers * shape.k * 4 / 3,
        "`RoutedExperts` in memory and in `save`: uint8 to 255 experts, then uint16": packed * ids,
        "limit of a policy, log2 C(E, K) a row": shape.sites * set_bits(shape.experts, shape.k) / 8,
    }


def two_policies(shape: Shape, tokens: int) -> tuple[RoutedExperts, RoutedExperts]:
    """Return random routes of an old policy, and of a new one whose scores have added noise."""
    g = torch.Generator().manual_seed(0)
    names = [f"model.layers.{index}.mlp.gate" for index in range(shape.layers - shape.sites, shape.layers)]
    scores = torch.randn(SEQUENCES, tokens // SEQUENCES, shape.sites, shape.experts, generator=g)
    scores += 0.4 * torch.randn(shape.sites, shape.experts, generator=g)
    old = RoutedExperts(scores.topk(shape.k).indices, names, shape.experts)
    scores += NOISE * torch.randn(scores.shape, generator=g)
    return old, RoutedExperts(scores.topk(shape.k).indices, names, shape.experts)


def measured(shape: Shape, tokens: int, rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the sizes of both files in bytes per token with the changed shares, and call -> seconds of each round."""
    old, new = two_policies(shape, tokens)
    counts = change_counts(old, new)
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "old.parquet", Path(folder) / "new.parquet"
        calls: dict[str, Callable[[], object]] = {
            "write routes": lambda: write_route_table(a, old),
            "read routes": lambda: read_route_table(a),
            "write changes": lambda: write_route_changes(b, new, a, old),
            "read changes": lambda: read_route_table(b),
            "read one of four sequences": lambda: read_route_table(a, [2]),
            "read one site": lambda: read_route_table(a, None, 3),
        }
        seconds = in_turns(calls, rounds)
        ordered = [x.ids.sort(-1).values for x in (old, new)]
        assert all(torch.equal(read_route_table(p).ids, ids) for p, ids in zip((a, b), ordered, strict=True))
        sizes = a.stat().st_size / tokens, b.stat().st_size / tokens
    return {
        "routes": sizes[0],
        "changes": sizes[1],
        "changes limit": shape.sites * exchange_bits(counts.deviation, shape.experts) / 8,
        "site change": counts.rates()["site_change"],
        "slot change": counts.rates()["slot_change"],
    }, seconds


def table(found: dict[int, list[dict[str, float]]]) -> list[str]:
    """Return the lines of the table of docs/scaling.md. found: tokens of a file -> sizes for each of SHAPES."""
    lines = [f"| bytes per token | {' | '.join(s.name for s in SHAPES)} |", f"| --- |{' --- |' * len(SHAPES)}"]
    each = [shipped(shape) for shape in SHAPES]

    def add(name: str, values: list[float], limits: list[float] | None = None) -> None:
        cells = [f"{value:,.0f}" for value in values]
        if limits:
            cells = [f"{value:,.0f} ({value / low:.2f} x limit)" for value, low in zip(values, limits, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for name in each[0]:
        add(name, [one[name] for one in each])
    limits = [one["limit of a policy, log2 C(E, K) a row"] for one in each]
    for tokens, sizes in found.items():
        add(f"route table on disk, a file of {tokens:,} tokens", [one["routes"] for one in sizes], limits)
        share = ", ".join(f"{one['site change']:.1%}" for one in sizes)
        low = [one["changes limit"] for one in sizes]
        add(f"limit of an update that changes {share} of the sets", low)
        add(f"its route table on disk, a file of {tokens:,} tokens", [one["changes"] for one in sizes], low)
    return lines


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a file")
    parser.add_argument("--write", action="store_true", help="write the table into docs/scaling.md")
    options = parser.parse_args()
    if odd := [n for n in options.tokens if n < 1 or n % SEQUENCES]:
        parser.error(f"--tokens: of {SEQUENCES} sequences of one length, got {', '.join(map(str, odd))}")
    torch.set_num_threads(1)
    found: dict[int, list[dict[str, float]]] = {}
    results = []
    for tokens, shape in itertools.product(options.tokens, SHAPES):
        sizes, seconds = measured(shape, tokens, options.rounds)
        found.setdefault(tokens, []).append(sizes)
        size = tokens * shape.sites * shape.k * packed_dtype(shape.experts).itemsize
        for name, times in seconds.items():
            megabytes = size / 1e6 / PART.get(name, lambda shape: 1)(shape)
            speed = megabytes / statistics.median(times)
            name = f"{shape.name}, {tokens:,} tokens: {name}"
            print(f"{name:56} {1e3 * statistics.median(times):8.1f} ms {speed:8.0f} MB/s")
            results.append(
                row("route_storage", name, times, note=f"{megabytes:.3g} MB of packed ids, {speed:.0f} MB/s")
            )
    lines = table(found)
    print("\n".join(lines))
    if options.write:
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        write_atomic(PAGE, "\n".join([head + BEGIN, *lines, END]) + rest.split(END)[1])
    write(options.json, results)


if __name__ == "__main__":
    main()
