"""A few random sequences; `MOE_RL_ROUTING_CASES=3000` makes it thousands (or tests/routing/adversary.py by itself)."""

import collections
import os

import pytest
from adversary import ACTIONS, EITHER, REFUSED, RIGHT, run_case
from adversary_oracle import FAMILIES, world

CASES = int(os.environ.get("MOE_RL_ROUTING_CASES", "0"))


def drive(cases: int, actions: list[str]) -> None:
    worlds = [world(family, 0) for family in FAMILIES]
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for seed in range(cases):
        run_case(seed, worlds, actions, counts)
    outcomes = {(action, outcome) for action, _, outcome in counts}
    assert {outcome for _, outcome in outcomes} == {RIGHT, REFUSED} and EITHER not in outcomes


def test_a_few_random_sequences_are_right_or_refused() -> None:
    drive(20, [action for action in ACTIONS if action != "compiled"])


@pytest.mark.slow
@pytest.mark.skipif(not CASES, reason="set MOE_RL_ROUTING_CASES to the number of cases")
def test_many_random_sequences_are_right_or_refused() -> None:
    drive(CASES, list(ACTIONS))
