"""Studies with given final rewards, and the statements that a report makes about them."""

from pathlib import Path

import pandas as pd
from synthetic import ARMS

from moe_rl.study.data import Run, StudyData
from moe_rl.study.reading import read


def study_of(finals, changes=None, updates=None):
    """Return a study; each run has five steps of equal reward, so that its final reward is the given number.

    finals: arm -> final reward of each seed. changes: arm -> changes of its configuration. updates: table of updates.
    """
    runs, rows = [], []
    for arm, values in finals.items():
        for seed, value in enumerate(values):
            config = {"method": ARMS[arm]["method"], "optim": {"learning_rate": 1e-3}, **(changes or {}).get(arm, {})}
            runs.append(Run(arm, seed, Path(arm) / f"seed{seed}", True, config, {}))
            rows += [{"arm": arm, "seed": seed, "step": step, "reward": value} for step in range(5)]
    empty = pd.DataFrame({"arm": [], "seed": [], "step": [], "update": []})
    config = {"arms": {arm: {"label": ARMS[arm]["label"]} for arm in finals}}
    frames = (pd.DataFrame(rows), empty if updates is None else updates, empty, empty)
    return StudyData("s", Path(), config, tuple(runs), *frames)


def at_start(study, reward):
    """Return a table of evaluations with the same held-out reward at step 0 in every run."""
    return pd.DataFrame([{"arm": run.arm, "seed": run.seed, "step": 0, "reward": reward} for run in study.runs])


def texts_of(finals, topic, changes=None, updates=None):
    """Return the statements on a topic about `study_of` these values, as one text."""
    found = read(study_of(finals, changes, updates))
    return " ".join(statement.text for statement in found if statement.topic == topic)


def text_on(study, topic):
    """Return the statements on a topic about a study, as one text."""
    return " ".join(statement.text for statement in read(study) if statement.topic == topic)


def reward_texts(finals, **changes):
    return texts_of(finals, "Reward", changes)
