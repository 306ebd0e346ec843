"""Every method as one line: what it changes in another."""

import difflib
from dataclasses import replace

from moe_rl.objectives.objective import Objective

GRPO = Objective(clip_low=0.2, clip_high=0.27)
GSPO = Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)

OBJECTIVES: dict[str, Objective] = {
    "grpo": GRPO,
    "gspo": GSPO,
    "gspo_token": replace(GSPO, ratio="sequence_token"),
}


def get_objective(name: str) -> Objective:
    """The preset of that name.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"objective: no preset {name!r}; there are {', '.join(OBJECTIVES)}.{hint}")
    return OBJECTIVES[name]
