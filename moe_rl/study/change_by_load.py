"""Which experts lose and gain tokens: change of slots by how loaded an expert is."""

import numpy as np
import pandas as pd

from moe_rl.study.data import StudyData
from moe_rl.study.token_view import TokenStep, stored_steps

CLASSES = {"below 0.5": 0.0, "0.5 to 1": 0.5, "1 to 2": 1.0, "2 and more": 2.0}
"""An expert's tokens over the even load of its routing site -> where the class begins."""


def change_by_load(data: StudyData) -> pd.DataFrame:
    """By arm, seed and class of load (`load`), over the stored responses of all steps, old policy against the policy
    after the last update, both routed live:

    - `experts`: share of the experts that are in the class
    - `slots`: share of the slots that these experts had under the old policy
    - `slot_change`: share of those that are another expert's now; 0 to 1, NaN for a class without slots

    Load is counted on the same response tokens under the old policy, by routing site and step. Empty where no routes
    were stored.
    """
    rows = []
    for run in data.runs:
        counts = np.zeros((3, len(CLASSES)))
        for step in stored_steps(run.folder):
            stored = TokenStep(run.folder, step)
            if stored.routed:
                counts += _counted(stored)
        experts, slots, left = counts
        if slots.any():
            with np.errstate(invalid="ignore"):
                shares = {"experts": experts / experts.sum(), "slots": slots / slots.sum(), "slot_change": left / slots}
            rows.append(pd.DataFrame({"arm": run.arm, "seed": run.seed, "load": list(CLASSES), **shares}))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def _counted(stored: TokenStep) -> np.ndarray:
    """Of one step: experts, slots, and slots left, by class of load."""
    old, new = (stored.all_experts(update) for update in (0, stored.updates[-1]))
    routed = np.broadcast_to(((old >= 0) & (new >= 0)).all(-1, keepdims=True), old.shape)
    left: np.ndarray = routed & (old[..., :, None] != new[..., None, :]).all(-1)
    given, sites = stored.routes(0).num_experts, old.shape[1]
    numbers = [given] * sites if isinstance(given, int) else given
    found = np.zeros((3, len(CLASSES)))
    for site, number in enumerate(numbers):
        ids = old[:, site]
        load = np.bincount(ids[routed[:, site]], minlength=number)
        lost = np.bincount(ids[left[:, site]], minlength=number)
        group = np.digitize(load * number / max(1, load.sum()), list(CLASSES.values())) - 1
        found += [np.bincount(group, weights, minlength=len(CLASSES)) for weights in (None, load, lost)]
    return found
