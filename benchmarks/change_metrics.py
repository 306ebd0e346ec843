"""Speed of the change metrics on one core, against reading the ids from memory and against simple implementations.

    python benchmarks/change_metrics.py [--tokens 100000] [--sites 48] [--k 8] [--experts 128] [--rounds 7]

A row is one (token, site) pair: K ids before, K ids after. Times are CPU seconds of one thread, which a busy machine
disturbs less than wall-clock time; methods take turns within each round, so that a disturbance meets all of them. Slow
methods get fewer rows. Every method's result is checked against Python sets before it is timed.

The cost of a comparison depends on how many rows are equal id by id, hence the cases. `ascending`: the ids of a row are
in ascending order, as in route tables, and one slot is exchanged in a share of the rows. `by score`: the ids are in the
order of the router's scores, as in recorded routes, and the new scores are the old ones plus noise; where the set stays
the same, the order often does not. `other order`: as `ascending`, but every new row is in descending order: the worst
case.
"""

import argparse
import gc
import platform
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch
from rows import command_line, cpu_seconds, in_turns, quartiles, ratios, row, write

from moe_rl.routing.change import change_counts, changed_slots, site_change, slot_change
from moe_rl.routing.packing import packed_dtype
from moe_rl.routing.routes import RoutedExperts

CASES = {  # share of rows with one slot exchanged; or the noise, as a share of the scores' standard deviation
    "ascending, 0 % of rows changed": 0.0,
    "ascending, 1 %": 0.01,
    "ascending, 10 %": 0.10,
    "ascending, 50 %": 0.50,
    "by score": None,
    "other order, 10 %": 0.10,
}
MAIN = "ascending, 10 %"  # the only case of the slower functions and of the simple implementations
NOISE = 0.011
READ, READ_WIDE = "read both (floor)", "read both of int64 ids (floor)"


def policies(case: str, tokens: int, sites: int, k: int, experts: int) -> Iterator[RoutedExperts]:
    """Yield the routes of an old and a new policy, in which every row is drawn at random from a thousand of its site.

    The random order keeps the processor from learning a repetition.
    """
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(min(tokens, 1000), sites, experts, generator=g)
    ids = scores.topk(k + 1).indices
    old, share = ids[..., :k], CASES[case]
    if share is None:
        new = (scores + NOISE * torch.randn(scores.shape, generator=g)).topk(k).indices
    else:
        new = old.clone()
        hit = torch.rand(new.shape[:2], generator=g) < share
        new[..., 0] = torch.where(hit, ids[..., k], new[..., 0])
        old, new = old.sort(-1).values, new.sort(-1, descending=case.startswith("other")).values
    names = tuple(f"site.{i}" for i in range(sites))
    drawn = torch.randint(len(old), (tokens, sites), generator=g)
    for x in (old, new):
        packed = x.to(packed_dtype(experts))[drawn, torch.arange(sites)][None]
        yield RoutedExperts._trusted(packed, names, [experts] * sites, has_live=False)


def python_sets(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    pairs = zip(old.reshape(-1, old.shape[-1]).tolist(), new.reshape(-1, old.shape[-1]).tolist(), strict=True)
    return np.array([len(set(a) & set(b)) for a, b in pairs])


def one_shot_numpy(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    return (old.numpy()[..., :, None] == new.numpy()[..., None, :]).sum((-1, -2)).reshape(-1)


def one_shot_torch(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    return (old[..., :, None] == new[..., None, :]).sum((-1, -2)).flatten().numpy()


def read_both(old: torch.Tensor, new: torch.Tensor) -> None:
    for x in (old, new):  # numpy sums 8-byte words about as fast as one core can read
        x.numpy().reshape(-1).view(np.uint64).sum()


def check(old: RoutedExperts, new: RoutedExperts) -> None:
    """Assert that every method gives what Python's own sets give."""
    k = old.shape[-1]
    expected = python_sets(old.packed, new.packed)
    for method in (one_shot_numpy, one_shot_torch, lambda a, b: k - changed_slots(a, b).flatten().numpy()):
        assert np.array_equal(method(old.packed, new.packed), expected)
    assert np.array_equal(slot_change(old, new).flatten().numpy(), (1 - expected / k).astype(np.float32))
    counts = change_counts(old, new)
    assert counts.deviation.tolist() == np.bincount(k - expected, minlength=k + 1).tolist()
    changed = (expected < k).reshape(-1, old.shape[2])
    assert counts.per_site_changed.tolist() == changed.sum(0).tolist()
    assert counts.tokens_changed == changed.any(1).sum()


def methods(args: argparse.Namespace) -> tuple[dict[str, tuple[int, Callable[[], object]]], list[str]]:
    """Return name -> (number of rows that a call compares, the call), and a line of text about each case."""
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    lines = []
    rows, few = args.tokens * args.sites, max(1, args.tokens // 200)
    for case in CASES:
        old, new = policies(case, args.tokens, args.sites, args.k, args.experts)
        part = [
            RoutedExperts._trusted(
                x.packed[:, :few].contiguous(), x.sites, [args.experts] * len(x.sites), has_live=False
            )
            for x in (old, new)
        ]
        check(*part)
        same = float((part[0].packed == part[1].packed).all(-1).float().mean())
        lines.append(
            f"{case}: {change_counts(*part).rates()['site_change']:.1%} of sets differ, {same:.1%} of rows equal"
        )
        if not found:
            found[READ] = rows, lambda a=old, b=new: read_both(a.packed, b.packed)
        found[f"change_counts, {case}"] = rows, lambda a=old, b=new: change_counts(a, b)
        if case == MAIN:
            least = few * args.sites
            ids = [x.packed[:, : max(1, args.tokens // 4)].long() for x in (old, new)]
            found |= {
                READ_WIDE: (ids[0].numel() // args.k, lambda ids=ids: read_both(*ids)),
                f"slot_change, {case}": (rows, lambda a=old, b=new: slot_change(a, b)),
                f"site_change, {case}": (rows, lambda a=old, b=new: site_change(a, b)),
                f"slot_change of int64 ids, {case}": (ids[0].numel() // args.k, lambda ids=ids: slot_change(*ids)),
                "torch [n,k,k] in one shot": (least, lambda part=part: one_shot_torch(*(x.packed for x in part))),
                "numpy [n,k,k] in one shot": (least, lambda part=part: one_shot_numpy(*(x.packed for x in part))),
                "python sets": (least, lambda part=part: python_sets(*(x.packed for x in part))),
            }
    return found, lines


def without_collector(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call without garbage collection."""
    gc.disable()  # as timeit does: a collection during the call would go through everything else in memory
    taken = cpu_seconds(call)
    gc.enable()
    return taken


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    for name, default in (("tokens", 100_000), ("sites", 48), ("k", 8), ("experts", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)

    calls, lines = methods(args)
    taken = in_turns({name: call for name, (_, call) in calls.items()}, args.rounds, without_collector)
    times = {name: [seconds / calls[name][0] for seconds in of] for name, of in taken.items()}

    rows = args.tokens * args.sites
    print(
        f"{rows:,} rows, K={args.k}, E={args.experts}, {args.rounds} interleaved rounds; one thread of "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    print("\n".join(lines))
    print(f"{'':47}{'M rows/s':>9}{'quartiles':>18}{'x floor':>9}{'x python':>10}")
    python = times["python sets"]
    results = []
    for name, seconds in times.items():
        reading = READ_WIDE if "int64" in name else READ  # the floor that reads ids of the same width
        floor = times[reading]
        middle = statistics.median(seconds)
        slow, fast = (1e-6 / x for x in reversed(quartiles(seconds)))
        over = statistics.median(ratios(seconds, floor))
        faster = statistics.median(python) / middle
        print(f"{name:47}{1e-6 / middle:9.1f}{slow:9.1f}{fast:9.1f}{over:9.1f}{faster:10.1f}")
        count = calls[name][0]
        what = f"{count:,} rows of {args.k} of {args.experts} experts; limit: reading both"
        measured = {"the limit": calls[reading][0], "the peer": calls["python sets"][0]}
        scaled = [f"{side} from {n:,} rows" for side, n in measured.items() if n != count]
        note = f"{what}; {1e-6 / middle:.0f} M rows/s" + (f"; {', '.join(scaled)}, by the row" if scaled else "")
        whole, sets = [x * count for x in seconds], [x * count for x in python]
        results.append(row("change_metrics", name, whole, "python sets", sets, statistics.median(floor) * count, note))
    write(args.json, results)


if __name__ == "__main__":
    main()
