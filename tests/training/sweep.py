"""Every family as a policy, one short run each, with any settings; test_trained_families.py holds the plainest.

    python tests/training/sweep.py                                            # replay (R2), probes, decomposition
    python tests/training/sweep.py --set method.replay=R3 --set rollout.engine.kind=hf
    python tests/training/sweep.py --family Phimoe Jamba --set method.objective=ppo
    torchrun --nproc-per-node 2 tests/training/sweep.py --set distributed.strategy=fsdp2

Prints one line per family, and what is wrong; exit status 1 if anything is.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import yaml

from moe_rl.policy import char_tokenizer
from moe_rl.rollout import Problem
from moe_rl.study.config import build
from moe_rl.training import RunConfig, train

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe
from tiny_families import supported


class Digits:
    """A digit earns something wherever it stands, so that a policy with random weights has unequal rewards."""

    name, alphabet, max_new_tokens = "digits", "^$0123456789+=", 8

    def problem(self, rng, held_out=False):
        return Problem(f"^{rng.randint(10, 99)}=", "")

    def reward(self, problem, completion):
        return sum(c.isdigit() for c in completion) / 8


def rows_of(family, folder, **changes):
    """The rows of one step of two updates, by kind. `changes`: dotted settings, with __ for the dot."""
    config = {
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "task": {"name": f"{__file__}:Digits"},
        "method": {"replay": "R2"},
        "rollout": {"prompts": 4, "group_size": 4},
        "optim": {"steps": 1, "num_minibatches": 2, "warmup_updates": 0},
        "eval": {"every": 0, "prompts": 4},
        "probe": {"sequences": 8, "decompose_every": 1, "tokens_every": 1},
    }
    for name, value in changes.items():
        *sections, field = name.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    if os.environ.get("RANK", "0") == "0":
        moe(family).save_pretrained(folder / "model")
        char_tokenizer(Digits.alphabet).save_pretrained(folder / "model")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    with warnings.catch_warnings(action="ignore"):
        train(build(RunConfig, config, ""), folder / "run")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, by its dotted name"
    )
    parser.add_argument("--family", nargs="+", help="only families whose class begins so")
    options = parser.parse_args()
    pairs = (text.split("=", 1) for text in options.set)
    changes = {name.replace(".", "__"): yaml.safe_load(value) for name, value in pairs}
    torch.set_num_threads(1)
    shared = "RANK" in os.environ
    if shared:
        torch.distributed.init_process_group("gloo")
    main_rank, wrong = os.environ.get("RANK", "0") == "0", 0
    for family in supported():
        if options.family and not family.startswith(tuple(options.family)):
            continue
        with tempfile.TemporaryDirectory() as own:
            place = [own]
            if shared:
                torch.distributed.broadcast_object_list(place)
            try:
                updates = rows_of(family, Path(place[0]), **changes)["update"]
                said = f"ok: k3 {updates[0]['k3']:.0e} and {updates[1]['k3']:.0e}"
            except Exception as error:
                said, wrong = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", wrong + 1
            if shared:
                torch.distributed.barrier()
        if main_rank:
            print(f"{family}: {said}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
