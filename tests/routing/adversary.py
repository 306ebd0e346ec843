"""Random sequences of contexts, modes, caches, compilation, threads and exceptions, against an oracle at the experts.

    python tests/routing/adversary.py --cases 3000 --seed 0     # prints how many were right and how many were refused

The oracle reads ids where the experts are called, by hooks of its own, and knows nothing of the package. A step is
right if the experts got what was forced where it was forced, and what the router's logits prefer elsewhere; if
recording, shadow and counts say the same; and if the logits are those of a model whose routers were rewritten to take
the given ids. It is refused if a RoutingError was raised. Anything else is a failure, and so is a refusal of what is
promised to work, or no refusal where an action cannot be replayed.
"""

import argparse
import collections
import os
import random
import sys
import warnings
from collections.abc import Callable

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.dirname(__file__))

import torch
from adversary_actions import (
    attached,
    backward,
    by_hand,
    cached,
    compiled,
    functorch,
    generated,
    permuted_cache,
    plain,
    raised,
    replaced,
    shorter,
    switched,
    threaded,
)
from adversary_oracle import FAMILIES, Wanted, World, draw, world

from moe_rl.routing import RoutingError

RIGHT, REFUSED, EITHER = "right", "refused", "either"


def listening(wanted: Wanted) -> str:
    return REFUSED if wanted.options is not None or wanted.sigma is not None or wanted.record else RIGHT


ACTIONS: dict[str, tuple[Callable[[World, Wanted, random.Random], None], Callable[[Wanted], str], int]] = {
    "forward": (plain, lambda _: RIGHT, 5),
    "attached": (attached, lambda _: RIGHT, 2),
    "forward and backward": (backward, lambda _: RIGHT, 5),
    "KV cache": (cached, lambda _: RIGHT, 4),
    "KV cache, rows permuted": (permuted_cache, lambda _: REFUSED, 3),
    "generate": (generated, lambda _: RIGHT, 1),
    "exception caught inside": (raised, lambda _: RIGHT, 3),
    "router or block replaced": (replaced, lambda _: EITHER, 3),
    "second thread": (threaded, lambda wanted: RIGHT if listening(wanted) == REFUSED else EITHER, 2),
    "checkpoint by hand": (by_hand, listening, 2),
    "torch.func.grad": (functorch, lambda _: RIGHT, 2),
    "shorter call, unknown tokens": (shorter, lambda _: REFUSED, 1),
    "train/eval switched inside": (switched, lambda _: EITHER, 2),
    "compiled": (compiled, lambda _: RIGHT, 2),
}


def run_case(
    seed: int, worlds: list[World], actions: list[str], counts: collections.Counter[tuple[str, str, str]]
) -> None:
    """One case: two to five steps on one model. Raises AssertionError, saying seed, step and what was asked for."""
    rng = random.Random(seed)
    w = rng.choice(worlds)
    for step in range(rng.randint(2, 5)):
        action = rng.choices(actions, [ACTIONS[a][2] for a in actions])[0]
        function, promised, _ = ACTIONS[action]
        mode = rng.random() < 0.4
        w.model.train(mode)
        w.twin.train(mode)
        torch.manual_seed(seed)
        wanted = draw(rng, w)
        state = f"{type(w.model).__name__}, {'train' if mode else 'eval'}"
        where = f"seed {seed}, step {step}, {state}, {action}, {wanted.name}"
        try:
            function(w, wanted, rng)
            outcome = RIGHT
        except RoutingError as error:
            outcome, why = REFUSED, str(error)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            w.model.zero_grad(set_to_none=True)
        if promised(wanted) not in (outcome, EITHER):
            raise AssertionError(
                f"{where}: {outcome} instead of {promised(wanted)}" + (f": {why}" if outcome == REFUSED else "")
            )
        counts[action, wanted.name, outcome] += 1
    assert not any("moe_rl" in type(h).__module__ for m in w.model.modules() for h in m._forward_hooks.values()), (
        f"seed {seed}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", type=int, default=300)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--actions", nargs="*", default=list(ACTIONS), choices=list(ACTIONS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    worlds = [world(family, seed) for family in FAMILIES for seed in range(2)]
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    failures = 0
    for case in range(options.cases):
        try:
            run_case(options.seed + case, worlds, options.actions, counts)
        except AssertionError as error:
            failures += 1
            print(error, flush=True)
        if (case + 1) % 250 == 0 or case + 1 == options.cases:
            report(case + 1, failures, counts)


def report(cases: int, failures: int, counts: collections.Counter[tuple[str, str, str]]) -> None:
    print(f"{cases} cases, {sum(counts.values())} steps, {failures} failed")
    for action in ACTIONS:
        of: collections.Counter[str] = collections.Counter()
        for (name, _, outcome), count in counts.items():
            if name == action:
                of[outcome] += count
        print(f"  {action:32s} right {of[RIGHT]:6d}   refused {of[REFUSED]:6d}", flush=True)


if __name__ == "__main__":
    main()
