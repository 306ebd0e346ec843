"""Common parts of the fuzz kinds: the type of a case, the error `Wrong`, and a study to damage."""

import random
from collections.abc import Callable
from pathlib import Path

from small_runs import BASE

from moe_rl.study import run as study_run
from moe_rl.study.config import dump_study, parse_study

Case = Callable[[random.Random], str]


class Wrong(AssertionError):
    """Error of a case: damage passed for a result, or an answer was given that must not be."""


def small_study(root: Path) -> Path:
    """Make a study of two finished runs with the command line's own functions; return its folder."""
    base = {
        "model": {"tiny": vars(BASE.model.tiny), "cold_start": None},
        "task": {"name": "mod_chain", "options": {"steps": 1}},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 2, "num_minibatches": 2, "warmup_updates": 2},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 1, "floor": False},
        "checkpoint_every": 1,
    }
    arms = {"grpo": {"label": "GRPO"}, "gspo": {"method": {"objective": "gspo", "replay": "R2"}}}
    study = parse_study({"name": "small", "question": "?", "seeds": [0], "base": base, "arms": arms})
    folder = root / "small"
    folder.mkdir()
    (folder / "study.yaml").write_text(dump_study(study))
    for arm in arms:
        study_run.run_one(study.resolve(arm, 0), folder / arm / "seed0")
    return folder
