"""Checkpoints that resume a run exactly: weights, optimizers, waiting batches, RNG; safetensors and JSON, no pickle.

Checkpoints are written in an order that leaves a complete one if the run is interrupted at any moment:

1. `checkpoint.new` is written completely, and every file flushed; its `state.json` is written last and has a
   SHA-256 sum of each file, of itself, and of the metrics so far.
2. `checkpoint` is renamed to `checkpoint.old`, `checkpoint.new` to `checkpoint`, `checkpoint.old` is removed.

After an interruption, `settle` leaves one `checkpoint`, or none if none was complete. The policy is in hub format
(`config.json`, `model.safetensors`, tokenizer), so that any tool can open a checkpoint as a model. Not so under
`model.lora`: the weights then have PEFT's names (`policy.models.load_model` merges them).

With `keep_policy_every`, policies of earlier steps are kept as well, each in its own folder (`keep_policy`).
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moe_rl.checks import is_sealed, other_content, parse_json, seal_folder
from moe_rl.files import naming, sync_folder, write_json, write_tensors
from moe_rl.measure.logprobs import hf_model
from moe_rl.policy.models import EXPERT_BIAS
from moe_rl.rollout import Problem, Rollout, TaskError
from moe_rl.rollout.completions import Responses
from moe_rl.rollout.engine import gathered
from moe_rl.rollout.task import shortened
from moe_rl.routing import RoutedExperts
from moe_rl.runlog import Mark
from moe_rl.training.batch import Batch
from moe_rl.training.sharding import as_placed, load_whole
from moe_rl.training.state import State

VERSION = 2
MANIFEST = "state.json"
OPTIMIZERS = {"model": "optimizer", "value": "value_optimizer", "reward": "reward_optimizer"}
"""File names (without suffix) of the optimizers, by the name of the module that each one trains."""
KEPT = "checkpoints"
"""Name of the run folder's subfolder for the policies that are kept."""


class CheckpointError(RuntimeError):
    """Error for a checkpoint that cannot be trusted; the message names the file and says what to do."""


def save_checkpoint(state: State) -> None:
    """Write `<folder>/checkpoint`, replacing the previous one only when the new one is complete.

    Every rank must call this function: sharded tensors are gathered, those of one file at a time, and rank 0 writes
    them. The checkpoint does not depend on the number of ranks. Raises OSError, which names the folder; the previous
    checkpoint is then still in place.
    """
    staging = state.folder / "checkpoint.new"
    with _staged(state, staging, state.folder / "checkpoint"):
        write_state(state, staging)
        if state.ranks.main:
            put_in_place(state.folder)


def keep_policy(state: State) -> None:
    """Write the policy to `<folder>/checkpoints/step_NNNNNN`, in hub format, completely or not at all.

    NNNNNN is the number of steps done. An existing folder of that name is left unchanged. Every rank must call this
    function. Raises OSError, which names the folder."""
    place = state.folder / KEPT / f"step_{state.step:06d}"
    if state.ranks.first(lambda: os.path.lexists(place)):  # also a link to a disk that is not there now
        return
    staging = place.with_name(f".{place.name}.new")
    with _staged(state, staging, place):
        _write_policy(state, staging)
        if state.ranks.main:
            seal_folder(staging, MANIFEST, {"step": state.step})
            staging.rename(place)
            sync_folder(place.parent)
            sync_folder(state.folder)


def drop_policies_after(folder: Path, step: int) -> bool:
    """Remove kept policies of steps after `step`, and unfinished ones; return whether there were any.

    A run that resumes at `step` writes later policies again, if its settings ask for them. Of a link to a folder, only
    the link is removed."""
    found = {path: re.fullmatch(r"step_(\d+)|\.step_\d+\.new", path.name) for path in (folder / KEPT).glob("*")}
    later = [path for path, kept in found.items() if kept and (kept[1] is None or int(kept[1]) > step)]
    for path in later:
        _remove(path)
    return bool(later)


def _remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder or, if `path` is a link to a folder (perhaps on another disk), only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors)


@contextmanager
def _staged(state: State, staging: Path, target: Path) -> Iterator[None]:
    """Context manager: put the name of `target` into an OSError, and remove the folder `staging` after any error."""
    try:
        with naming(target):
            yield
    except BaseException:
        if state.ranks.main:
            shutil.rmtree(staging, ignore_errors=True)  # so that a full disk has its space back
        raise


def _write_policy(state: State, staging: Path) -> None:
    """Write the policy, its tokenizer and its configuration to a new folder `staging`; every rank must call this."""
    if state.ranks.main:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _put(state, staging, "model", state.trained["model"][0].state_dict())
    if not state.ranks.main:
        return
    if hasattr(state.tokenizer, "save_pretrained"):
        state.tokenizer.save_pretrained(staging)
    hub = hf_model(state.policy)
    for part in (getattr(hub, "config", None), getattr(hub, "generation_config", None)):
        if part is not None:
            part.save_pretrained(staging)


def _put(state: State, staging: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Gather tensors and write them to `<staging>/<name>.safetensors` on rank 0; every rank must call this."""
    own = _own(tensors, state.ranks.main)
    if state.ranks.main:
        write_tensors(staging / f"{name}.safetensors", own)


def write_state(state: State, staging: Path) -> None:
    """Write all of `state` to the folder `staging`, flushed, with a manifest; every rank must call this function."""
    _write_policy(state, staging)
    for name, (module, optimizer) in state.trained.items():
        if name != "model":
            _put(state, staging, name, module.state_dict())
        _put(state, staging, OPTIMIZERS[name], _optimizer_tensors(module, optimizer))
    for name, module in state.frozen.items():
        _put(state, staging, name, module.state_dict())
    if not state.ranks.main:
        return
    if state.reward_model is not None:
        write_tensors(staging / "comparisons.safetensors", _own(state.reward_model.tensors()))
    if state.expert_bias is not None:
        write_tensors(staging / EXPERT_BIAS, _own({"bias": state.expert_bias.values}))
    if state.predictor is not None:
        write_tensors(staging / "predictor.safetensors", _own(state.predictor.tensors()))
    for index, batch in enumerate(state.waiting):
        save_responses(staging, f"batch_{index}", batch)
    for index, draft in enumerate(state.drafts):
        save_responses(staging, f"draft_{index}", draft)
        problems = [asdict(problem) for problem in draft.problems]
        about = {"group_size": draft.group_size, "problems": problems, "completions": draft.completions}
        write_json(staging / f"draft_{index}.json", about)
    write_tensors(staging / "rng.safetensors", {"torch": torch.get_rng_state()})
    queue = [batch.step for batch in state.waiting]
    mark = state.log.mark()._asdict()
    about = {"version": VERSION, "step": state.step, "queue_steps": queue, "metrics": mark}
    seal_folder(staging, MANIFEST, about)


def put_in_place(folder: Path) -> None:
    """Rename `checkpoint.new`, which must be complete, to `checkpoint`, and remove the previous `checkpoint`.

    Only between the two renames is there no `checkpoint`; both checkpoints are then complete, under the names
    `checkpoint.old` and `checkpoint.new`."""
    new, target, old = (folder / name for name in ("checkpoint.new", "checkpoint", "checkpoint.old"))
    if target.exists():
        _remove(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    sync_folder(folder)
    _remove(old, ignore_errors=True)


def settle(folder: Path) -> Path | None:
    """Return the run's checkpoint folder, also after an interruption; None if there is no checkpoint yet.

    If `checkpoint` is missing, the first of `checkpoint.new` and `checkpoint.old` that is complete takes its place.
    Beside a checkpoint, both are removed. Raises CheckpointError for a link to a folder that does not exist, or if
    there was a checkpoint and neither of the two is complete."""
    new, target, old = (folder / name for name in ("checkpoint.new", "checkpoint", "checkpoint.old"))
    if target.is_symlink() and not target.exists():
        raise CheckpointError(
            f"{target} links to {os.readlink(target)}, which is not there: mount that disk, or link it"
        )
    if not target.exists():  # interrupted between the renames (the new one is complete), or in the first checkpoint
        rest = next((path for path in (new, old) if _complete(path)), None)
        if rest is not None:
            rest.rename(target)
            sync_folder(folder)
        elif old.exists():  # an earlier checkpoint: starting over would remove all that the run wrote
            _read_state(old)
    if target.exists():
        _remove(new, ignore_errors=True)
        _remove(old, ignore_errors=True)
    return target if target.exists() else None


def _complete(folder: Path) -> bool:
    """Return whether a folder holds a complete and undamaged checkpoint."""
    try:
        _read_state(folder)
    except CheckpointError:
        return False
    return True


def load_checkpoint(state: State) -> Mark | None:
    """Restore `state` from the checkpoint in its folder; return how far the metrics had been written by then.

    `settle` must have been called. Returns None if there is no checkpoint. Raises CheckpointError on damage."""
    folder = state.folder / "checkpoint"
    if not folder.exists():
        return None
    manifest = _read_state(folder)
    for name, (module, optimizer) in state.trained.items():
        load_whole(module, _stream(folder / f"{name}.safetensors"))
        _restore_optimizer(module, optimizer, _stream(folder / f"{OPTIMIZERS[name]}.safetensors"))
    for name, module in state.frozen.items():
        load_whole(module, _stream(folder / f"{name}.safetensors"))
    if state.reward_model is not None:
        state.reward_model.restore(_load(folder / "comparisons.safetensors"))
    if state.expert_bias is not None:
        state.expert_bias.values.copy_(_load(folder / EXPERT_BIAS)["bias"])
    if state.predictor is not None:
        state.predictor.restore(_load(folder / "predictor.safetensors"))
    state.waiting.clear()
    for index, step in enumerate(manifest["queue_steps"]):
        parts = {"ref_logps": None, **_saved_parts(folder, f"batch_{index}")}
        state.waiting.append(Batch(**parts, step=step).to(state.ranks.device))
    state.drafts.clear()
    for index in range(len(list(folder.glob("draft_*.json")))):
        about = json.loads((folder / f"draft_{index}.json").read_text())
        about["problems"] = [_problem(problem) for problem in about["problems"]]
        state.drafts.append(Rollout(**_saved_parts(folder, f"draft_{index}"), **about).to(state.ranks.device))
    torch.set_rng_state(_load(folder / "rng.safetensors")["torch"])
    state.step = manifest["step"]
    return Mark(**manifest["metrics"])


def _read_state(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises CheckpointError if it is missing, damaged or of another format, or if a
    file that it lists is damaged."""
    remedy = (
        f"Delete {folder} to start this run again from step 0 (what it wrote since goes, the policies in {KEPT}/ too: "
        "move away what you want to keep), or restore the folder from a copy."
    )
    try:
        state = parse_json((folder / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: state.json is missing or unreadable ({error}). {remedy}") from error
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"{folder}: checkpoint format {version}, this version of moe_rl reads {VERSION}. {remedy}"
        )
    if not is_sealed(state):
        raise CheckpointError(f"{folder / 'state.json'} is damaged: its content is not what was written. {remedy}")
    wrong = other_content(folder, state["files"])
    if wrong:
        raise CheckpointError(f"{wrong}. {remedy}")
    return state


def _load(path: Path) -> dict[str, Tensor]:
    return dict(_stream(path))


def _stream(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a file one at a time, so that a rank that keeps shards never holds the whole file."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _own(tensors: dict[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU, because safetensors refuses memory that is shared (tied embeddings).

    Sharded tensors are gathered, in which all ranks must take part. keep: False: return nothing (ranks but 0)."""
    copies = {}
    for name, tensor in tensors.items():
        whole = gathered(tensor.detach())
        if keep:
            copies[name] = whole.to("cpu", copy=True).contiguous()
    return copies


def _optimizer_tensors(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors under the names `<kind of state>/<parameter>`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{key}/{names[id(parameter)]}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _restore_optimizer(module: nn.Module, optimizer: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Restore an optimizer's saved state, each tensor on the device where the optimizer itself keeps it.

    That is the device of its parameter, except for the count of steps, which is on the CPU unless a fused kernel reads
    it."""
    parameters = dict(module.named_parameters())
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    optimizer.state.clear()
    for key, tensor in tensors:
        kind, name = key.split("/", 1)
        parameter = parameters[name]
        if kind != "step":
            tensor = as_placed(tensor.to(parameter.device), parameter)
        elif id(parameter) in fused:
            tensor = tensor.to(parameter.device)
        optimizer.state[parameter][kind] = tensor


def save_responses(folder: Path, name: str, of: Responses, prefix: str | None = None) -> None:
    """Write the tensors of responses to `NAME.safetensors`, and their routes to `NAME_FIELD.safetensors`.

    prefix: replaces `NAME_` in the file names of routes."""
    prefix = f"{name}_" if prefix is None else prefix
    tensors = {field: part for field, part in of.parts.items() if isinstance(part, Tensor)}
    write_tensors(folder / f"{name}.safetensors", _own(tensors))
    for field, part in of.parts.items():
        if isinstance(part, RoutedExperts):
            part.save(folder / f"{prefix}{field}.safetensors")


def _saved_parts(folder: Path, name: str) -> dict[str, Any]:
    """Read what `save_responses` wrote, by field.

    `RoutedExperts.load` notes in the routes' `meta` which library versions wrote them. That note is removed here, since
    it would get into the files of the run."""
    parts: dict[str, Any] = _load(folder / f"{name}.safetensors")
    for path in folder.glob(f"{name}_*.safetensors"):
        read = RoutedExperts.load(path)
        meta = {key: value for key, value in read.meta.items() if key != "written_by"}
        routes = RoutedExperts._trusted(read.packed, read.sites, read._experts, tokens=read._tokens, meta=meta)
        parts[path.stem.removeprefix(f"{name}_")] = routes
    return parts


def checked_restorable(problems: list[Problem]) -> list[Problem]:
    """Return the problems, or raise TaskError if a checkpoint could not restore one of them.

    That is so for an instance of a subclass of Problem, and for a prompt, answer, index or field that does not come
    back from JSON unchanged."""
    for problem in problems:
        own = [problem.prompt, problem.answer, problem.index, problem.fields]
        try:
            same = type(problem) is Problem and json.loads(json.dumps(own)) == own
        except TypeError:
            same = False
        if not same:
            raise TaskError(
                "rollout.segment: checkpoints keep problems of unfinished responses, each as a Problem of texts, "
                f"index and fields that JSON has; {shortened(repr(problem))} would not come back"
            )
    return problems


def _problem(fields: dict[str, Any]) -> Problem:
    """Return the Problem with these fields, read from JSON; its messages become tuples again."""
    messages = fields.get("messages")
    return Problem(**{**fields, "messages": messages and tuple(tuple(message) for message in messages)})
