"""Part `combinations` of the campaign: runs with random combinations of settings.

Every combination must either be refused before anything is written, or run to its end with finite numbers only, be
readable as a study, and go on identically after a stop.
"""

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_runs import BASE, LEARNED, start, wait
from twins import content

from moe_rl.objectives import GATES, OBJECTIVES, Correction
from moe_rl.policy.lora import LoraConfig
from moe_rl.study.config import Arm, StudyConfig, dump_study
from moe_rl.study.data import load
from moe_rl.study.report import draw_study
from moe_rl.study.run import run_one
from moe_rl.training import RunConfig, validate

STEPS = 3
CHOICES: dict[str, list[Any]] = {
    "model.tiny.family": ["mixtral", "olmoe", "minimax_m2"],
    "model.tiny.num_experts_per_tok": [1, 6],
    "model.tiny.num_layers": [1],
    "model.tiny.norm_topk_prob": [False],
    "model.dtype": ["bfloat16", "float16"],
    "model.attn_implementation": ["eager", "sdpa"],
    "model.experts_implementation": ["eager", "grouped_mm", "batched_mm", "megablocks_reference"],
    "model.gradient_checkpointing": [True],
    "model.lora": [
        LoraConfig(rank=2),
        LoraConfig(rank=2, target_parameters=("mlp.experts.gate_up_proj",)),
        LoraConfig(rank=2, train_router=True),
    ],
    "method.replay": ["R2", "R2", "R3"],
    "method.keep": [0.5, 0.0],
    "method.keep_by": ["random"],
    "method.keep_sites": [(0,), (0, 1)],
    "method.noise": [0.5],
    "method.source": ["policy", "initial", "demonstrations"],
    "method.ratio": ["token", "sequence", "sequence_token", "sequence_product"],
    "method.gate": sorted(GATES),
    "method.clip_low": [0.1],
    "method.clip_high": [0.1],
    "method.dual_clip": [3.0],
    "method.anchor": ["old", "rollout"],
    "method.corrections": [(), (Correction("token_truncate", high=2.0),)],
    "method.route_weight": ["none", "before_clip", "after_clip"],
    "method.aggregate": ["sequence_mean", "token_mean", "sum", "constant"],
    "method.length_constant": [8.0],
    "method.local_normalizer": [True],
    "method.advantage": ["group", "leave_one_out", "gae", "one", "accepted", "process", "decoupled"],
    "method.advantage_scale": ["std", "none", "batch"],
    "method.kl_coef": [0.1],
    "method.kl_estimator": ["k1", "k2", "k3"],
    "method.kl_importance_weighted": [True],
    "rollout.group_size": [1, 2],
    "rollout.temperature": [0.7],
    "rollout.max_new_tokens": [1, 3, 20],
    "rollout.lag": [1, 2],
    "rollout.rescore": [True],
    "rollout.segment": [2, 3],
    "rollout.scoring": ["decoding"],
    "rollout.dynamic_sampling": [2],
    "rollout.overlong_buffer": [2],
    "rollout.max_batch": [3],
    "rollout.engine.kind": ["hf"],
    "rollout.engine.dtype": ["float32", "float16"],
    "rollout.engine.router_format": ["int4", "e5m2"],
    "rollout.engine.weight_format": ["int4", "fp8", "mxfp4"],
    "optim.num_minibatches": [1, 4],
    "optim.micro_batch": [1, 3],
    "optim.share_prompts": [True],
    "optim.weight_decay": [0.1],
    "optim.master_weights": [False],
    "optim.weight_format": ["int4", "mxfp4"],
    "optim.router_lr_multiplier": [0.1],
    "optim.freeze_router": [True],
    "optim.aux_loss_coef": [0.01],
    "optim.expert_bias_rate": [0.01],
    "optim.expert_bias_loads": ["live"],
    "optim.on_nonfinite": ["skip"],
    "optim.reference_reset_every": [1],
    "value.model": ["head"],
    "value.clip": [None],
    "value.whiten": [False],
    "reward": [LEARNED],
    "eval.every": [0, 1],
    "probe.every": [0, 2],
    "probe.sequences": [1, 16, 100],
    "probe.tokens_every": [0, 2],
    "probe.floor": [True],
    "probe.gradients": [True],
    "probe.decompose_every": [1, 2],
    "distributed.router_fp32": [True],
    "checkpoint_every": [2],
    "keep_policy_every": [1, 2],
}


@dataclass
class Combined:
    """Counts of a block of combinations.

    cases: combinations. settings, refused: settings that were drawn, and that were refused.
    not_run: combinations that were refused when their model was loaded. ran: combinations that ran as they must.
    wrong: descriptions of the combinations that ended badly.
    """

    cases: int = 0
    settings: int = 0
    refused: int = 0
    not_run: int = 0
    ran: int = 0
    wrong: list[str] = field(default_factory=list)


def combined(first: int, cases: int, root: Path) -> Combined:
    """Test `cases` combinations from number `first` on, each in processes of its own."""
    found = Combined()
    for number in range(first, first + cases):
        config, settings, refused = drawn(number)
        outcome = _outcome(config, root / f"case{number}", draw=number % 10 == 0)
        found.cases += 1
        found.settings += len(settings) + refused
        found.refused += refused
        found.not_run += outcome == "refused"
        found.ran += outcome == "ran"
        if outcome in ("refused", "ran"):
            shutil.rmtree(root / f"case{number}", ignore_errors=True)
        else:
            found.wrong.append(f"combination {number}, {settings}: {outcome}")
    return found


def drawn(number: int) -> tuple[RunConfig, dict[str, Any], int]:
    """Return a random valid combination, its settings that differ from the base, and how many settings were refused."""
    rng = random.Random(f"combination {number}")
    config, settings, refused = changed(BASE, "optim.steps", STEPS), dict[str, Any](), 0
    wanted = [("method.objective", rng.choice([*OBJECTIVES, "dpo"]))]
    wanted += [(path, rng.choice(CHOICES[path])) for path in rng.sample(sorted(CHOICES), rng.randint(1, 16))]
    for path, value in wanted:
        tried = changed(config, path, value)
        try:
            validate(tried)
        except ValueError:
            refused += 1
        else:
            config, settings[path] = tried, value
    return config, settings, refused


def changed(config: Any, path: str, value: Any) -> Any:
    """Return the configuration with `value` at a dotted path."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def _outcome(config: RunConfig, root: Path, draw: bool) -> str:
    """Run a combination, read it, and run it again with a stop; return "refused", "ran", or what is wrong."""
    whole, halved = root / "case" / "arm" / "seed0", root / "halved"
    whole.parent.mkdir(parents=True)
    study = StudyConfig("case", "?", {"arm": Arm("arm")}, (0,), config)
    (root / "case" / "study.yaml").write_text(dump_study(study))
    if said := _said(lambda: run_one(config, whole), root / "whole.log"):
        ours = said.startswith(("ValueError: ", "moe_rl."))
        return "refused" if ours and not (whole / "metrics.jsonl").exists() else said
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    odd = [(k, v) for row in rows for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    if odd:
        return f"not finite: {odd[:5]}"
    if said := _said(lambda: draw_study(root / "case") if draw else load(root / "case"), root / "read.log"):
        return f"read: {said}"
    _said(lambda: run_one(config, halved, listener=_stop), root / "stopped.log")
    if (halved / "DONE").exists() or not (halved / "metrics.jsonl").exists():
        return f"was not stopped in the middle: {root / 'stopped.log'}"
    if said := _said(lambda: run_one(config, halved), root / "resumed.log"):
        return f"resumed: {said}"
    one, other = content(whole), content(halved)
    if wrong := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
        return f"another end after a stop: {wrong[:5]}"
    warnings = [line for line in (root / "whole.log").read_text().splitlines() if "Warning" in line]
    return f"warns: {warnings[0]}" if warnings else "ran"


def _stop(row: dict[str, Any]) -> None:
    """Raise KeyboardInterrupt at the end of the last step but one."""
    if row["kind"] == "step" and row["step"] == STEPS - 2:
        raise KeyboardInterrupt


def _said(act: Callable[[], Any], log: Path) -> str:
    """Call `act` in a process; return the last line of its output if it failed, else an empty text."""
    failed = wait(start(act, log), 300)
    return (log.read_text().strip().splitlines() or [f"exit status {failed}"])[-1] if failed else ""
