"""Speed of the change metrics on one core, against the memory floor and against the obvious ways.

    python benchmarks/change_metrics.py [--tokens 100000] [--sites 48] [--k 8] [--experts 128] [--rounds 7]

A row is one (token, site) pair: K ids before, K ids after. Times are CPU seconds of one thread, which a busy machine
disturbs less than the clock on the wall; methods take turns within each round, so that a disturbance meets all of
them. Slow methods get fewer rows. Every method's result is checked against Python sets before it is timed.
"""

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from moe_rl.routing.change import change_counts, site_change, slot_change
from moe_rl.routing.packing import changed_slots
from moe_rl.routing.routes import RoutedExperts

TARGET = 40.0  # million rows per second and core at K = 8


def two_policies(tokens: int, sites: int, k: int, experts: int, changed: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed ids of two policies, slots in different order, one slot exchanged in a share `changed` of the rows."""
    g = torch.Generator().manual_seed(0)
    base = torch.rand(min(tokens, 2000), sites, experts, generator=g).topk(k + 1).indices.to(torch.int16)
    rows = base.repeat(-(-tokens // len(base)), 1, 1)[:tokens]
    old, new = rows[..., :k], rows[..., :k].flip(-1).contiguous()
    hit = torch.rand(tokens, sites, generator=g) < changed
    new[..., 0] = torch.where(hit, rows[..., k], new[..., 0])
    return tuple(RoutedExperts(x[None], [f"site.{i}" for i in range(sites)], experts).packed for x in (old, new))


def python_sets(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    pairs = zip(old.reshape(-1, old.shape[-1]).tolist(), new.reshape(-1, old.shape[-1]).tolist(), strict=True)
    return np.array([len(set(a) & set(b)) for a, b in pairs])


def one_shot_numpy(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    return (old.numpy()[..., :, None] == new.numpy()[..., None, :]).sum((-1, -2)).reshape(-1)


def one_shot_torch(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    return (old[..., :, None] == new[..., None, :]).sum((-1, -2)).flatten().numpy()


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 100_000), ("sites", 48), ("k", 8), ("experts", 128), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)

    old, new = two_policies(args.tokens, args.sites, args.k, args.experts, changed=0.1)
    names = [f"site.{i}" for i in range(args.sites)]
    before, after = (RoutedExperts._trusted(x, tuple(names), args.experts, has_live=False) for x in (old, new))
    wide = [x.to(torch.int16)[:, : args.tokens // 4].long() for x in (old, new)]
    few = [x[:, : args.tokens // 50].contiguous() for x in (old, new)]

    expected = python_sets(*few)
    for method in (one_shot_numpy, one_shot_torch, lambda a, b: args.k - changed_slots(a, b)[0].flatten().numpy()):
        assert np.array_equal(method(*few), expected)
    distance = slot_change(*(x.long() for x in few)).flatten().numpy()
    assert np.array_equal(distance, (1 - expected / args.k).astype(np.float32))

    def read_both() -> None:  # numpy sums 8-byte words about as fast as one core can read
        for x in (old, new):
            x.numpy().reshape(-1).view(np.uint64).sum()

    rows, some, least = (x.numel() // args.k for x in (old, wide[0], few[0]))
    methods: dict[str, tuple[int, Callable[[], object]]] = {
        "read both (floor)": (rows, read_both),
        "changed_slots (kernel)": (rows, lambda: changed_slots(old, new)),
        "slot_change": (rows, lambda: slot_change(before, after)),
        "site_change": (rows, lambda: site_change(before, after)),
        "change_counts": (rows, lambda: change_counts(before, after)),
        "slot_change, int64 ids": (some, lambda: slot_change(*wide)),
        "torch [n,k,k] in one shot": (least, lambda: one_shot_torch(*few)),
        "numpy [n,k,k] in one shot": (least, lambda: one_shot_numpy(*few)),
        "python sets": (least, lambda: python_sets(*few)),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(args.rounds):
        for name, (count, call) in methods.items():
            times[name].append(cpu_seconds(call) / count)

    print(
        f"{rows:,} rows, K={args.k}, E={args.experts} ({old.dtype}), {args.rounds} interleaved rounds; one thread of "
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    print(f"{'':27}{'M rows/s':>9}{'best':>9}{'worst':>9}{'x floor':>9}{'x python':>10}")
    floor, python = (float(np.median(times[name])) for name in ("read both (floor)", "python sets"))
    for name, seconds in times.items():
        middle = float(np.median(seconds))
        speeds = [1e-6 / x for x in (middle, min(seconds), max(seconds))]
        print(f"{name:27}{speeds[0]:9.1f}{speeds[1]:9.1f}{speeds[2]:9.1f}{middle / floor:9.1f}{python / middle:10.1f}")
    kernel = 1e-6 / float(np.median(times["changed_slots (kernel)"]))
    if args.k == 8:
        print(f"target {TARGET:.0f} M rows/s: kernel {'meets' if kernel >= TARGET else 'MISSES'} it at {kernel:.1f}")


if __name__ == "__main__":
    main()
