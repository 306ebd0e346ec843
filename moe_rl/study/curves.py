"""Summaries of a run's rewards, one value per step: final value, area under the curve, collapse."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Numbers = Sequence[float | int] | np.ndarray

FINAL_STEPS = 5
"""Number of last steps over which the final reward is the mean."""

TIE = 1e-9
"""Relative distance within which a value counts as at a threshold, so that a mean's rounding decides nothing."""

GAIN = 0.1
"""Largest gain over the reward before training with which a run counts as failed."""

FAILED = f"gained at most {GAIN}"
"""The rule for failed runs in brief, shown beside a count of such runs: they did not break off."""

FAILED_RULE = (
    f"a run failed when it ended at most {GAIN} above its held-out reward at step 0 (above the mean reward of its "
    "first batch, where none was measured or the task is a data set)"
)
BELOW_START_RULE = "it ended below its start when it ended below that reward"


def final_value(values: Numbers) -> float:
    """Return the mean of the last five steps (fewer if the run is shorter): less noisy than the last step alone.

    >>> final_value([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    1.0
    """
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    return float(array[-FINAL_STEPS:].mean()) if array.size else float("nan")


def area_under_curve(steps: Numbers, values: Numbers) -> float:
    """Return the mean reward while training, in units of reward: trapezoid area divided by the span of the steps.

    >>> area_under_curve([0, 1, 3], [0.0, 1.0, 1.0])     # (0.5 * 1 + 1.0 * 2) / 3
    0.8333333333333334
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if x.shape != y.shape:
        raise ValueError(f"steps and values must have one length, got {x.size} and {y.size}")
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if x.size < 2:
        return float(y[0]) if y.size else float("nan")
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


@dataclass(frozen=True)
class Collapse:
    """Result of `detect_collapse`.

    `step` is where the run fell for good (NaN: no collapse); `best` is the best trailing mean; `fall` = 1 - last/best
    trailing mean.
    """

    step: float
    best: float
    fall: float

    @property
    def collapsed(self) -> bool:
        return bool(np.isfinite(self.step))


COLLAPSE_RULE = (
    f"a run counts as collapsed when the mean reward of its last {FINAL_STEPS} steps has fallen to half or "
    f"less of the best {FINAL_STEPS}-step mean it had reached before, and stays there to its end"
)


def detect_collapse(steps: Numbers, rewards: Numbers, window: int = FINAL_STEPS, drop: float = 0.5) -> Collapse:
    """Find a collapse by `COLLAPSE_RULE`.

    Its step is the first from which trailing mean <= (1 - drop) * best so far, to the end. Steps without a reward are
    left out, as in every other number of a run.

    >>> detect_collapse(range(6), [0.8, 0.8, 0.8, 0.2, 0.2, 0.2], window=1)
    Collapse(step=3.0, best=0.8, fall=0.75)
    """
    x, y = np.asarray(list(steps), dtype=float), np.asarray(rewards, dtype=float)
    known = np.isfinite(y)
    x, y = x[known][window - 1 :], y[known]
    if not x.size:
        return Collapse(float("nan"), float("nan"), float("nan"))
    # no running sum: its rounding would make a mean of equal numbers differ from that number
    mean = np.lib.stride_tricks.sliding_window_view(y, window).mean(axis=1)
    best = np.maximum.accumulate(mean)
    down = (mean <= (1 - drop) * best * (1 + TIE)) & (best > 0)
    below_to_end = np.logical_and.accumulate(down[::-1])[::-1]
    first = np.flatnonzero(below_to_end)
    fall = float(1 - mean[-1] / best[-1]) if best[-1] > 0 else 0.0
    return Collapse(float(x[first[0]]) if first.size else float("nan"), float(best[-1]), fall)
