"""Checks of what a study declares before it is run, in a study file or in the `study.yaml` of a folder."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from moe_rl.study.alarms import alarms_of

Outcome = Literal["sampled", "held_out"]


def check_declarations(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an `outcome`, `interest`, `comparisons` or `alarms` that cannot be followed.

    A file written by hand may have such values. The message begins with the name of the field. A missing field counts
    as not declared.
    """
    outcome, least, pairs = (config.get(name) for name in ("outcome", "interest", "comparisons"))
    if outcome is not None and outcome not in get_args(Outcome):
        raise ValueError(f"outcome: expected {' or '.join(get_args(Outcome))}, got {outcome!r:.80}")
    number = isinstance(least, int | float) and not isinstance(least, bool)
    if least is not None and not (number and 0 < least < math.inf):
        raise ValueError(f"interest: expected a difference of reward above 0, got {least!r:.80}")
    if not isinstance(pairs, list | tuple | None):
        raise ValueError(f"comparisons: expected a list of pairs [arm, other], got {pairs!r:.80}")
    pairs = pairs or ()
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"comparisons[{i}]: expected a pair [arm, other], got {pair!r:.80}")
        if pair[0] == pair[1]:
            raise ValueError(f"comparisons[{i}]: {pair[0]!r:.80} is compared with itself")
        if pair in pairs[:i] or pair[::-1] in pairs[:i]:
            raise ValueError(f"comparisons[{i}]: {pair[0]!r:.80} and {pair[1]!r:.80} are compared twice")
    alarms_of(config.get("alarms"))
