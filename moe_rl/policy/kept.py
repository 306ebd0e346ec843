"""Cache of cold-started tiny models, each in a folder of its own in hub format, so that each is made only once."""

import hashlib
import json
import os
import platform
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from moe_rl.checks import parse_json, seal_folder
from moe_rl.files import one_at_a_time
from moe_rl.policy.tiny import (
    TINY_EXPERTS,
    ColdStartConfig,
    ModelError,
    Progress,
    TinyConfig,
    build_tiny,
    char_tokenizer,
    cold_start,
)
from moe_rl.processes import no_progress_bars
from moe_rl.rollout import Task
from moe_rl.rollout.task import problems_of, user_code

COLD_START = "cold_start.json"
"""File in the folder of a kept cold start: the recipe of the model, its results, and the digests of its files."""
REMEDY = "Delete the folder: it will be made anew."


def kept_cold_start(
    tiny: TinyConfig,
    start: ColdStartConfig,
    task: Task,
    root: Path,
    progress: Progress | None,
    seconds: float | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Return the folder in `root` of the cold-started model, made now if it is not there, and what the model reached.

    Processes that want the same model at the same time make it once. seconds: see `load_policy`.

    Raises ModelError: the model did not reach its `until_reward`, the folder is damaged or cannot be written.
    """
    recipe = _recipe(tiny, start, task, seconds)
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    folder, lock = root / key, root / f"{key}.lock"
    # A folder that exists is complete, because one rename makes it. It needs no lock, which a read-only `root` forbids.
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock.touch()
        except OSError as error:
            raise ModelError(f"cannot keep cold-started models in {root}: {error}. Choose another folder.") from error
        with one_at_a_time(lock):
            if not folder.exists():
                _make(tiny, start, task, recipe, folder, progress, seconds)
    try:
        stored = parse_json((folder / COLD_START).read_bytes())
        if stored["recipe"] != recipe:
            raise ModelError(f"{folder} holds a cold-started model of another recipe. {REMEDY}")
        reached = {"seed": start.seed, "steps": stored["steps"], "reward": stored["pass@1"]}
        reached |= {"until_reward": start.until_reward, "kernels": recipe["kernels"]}
        learned = bool(stored["reached"])
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: this cold-started model is damaged ({error}). {REMEDY}") from error
    if not learned:
        raise ModelError(
            f"the cold start of seed {reached['seed']} ended at a held-out reward of {reached['reward']:.3f} after "
            f"{reached['steps']} steps, and model.cold_start.until_reward asks for {reached['until_reward']}. Give all "
            "runs of the study more model.cold_start.steps, or a reward that can be reached; to leave this seed out "
            "would be to choose seeds by how they begin."
        )
    return folder, reached


def _make(
    tiny: TinyConfig,
    start: ColdStartConfig,
    task: Task,
    recipe: Any,
    folder: Path,
    progress: Progress | None,
    seconds: float | None,
) -> None:
    """Make a cold-started model in `folder`: in fp32, on one thread, with the tiny model's default implementations,
    whatever implementations the run loads it with.

    A model that did not reach its reward is kept, too, so that no other process tries again.
    """
    tokenizer = char_tokenizer(task.alphabet)
    model = build_tiny(tiny, tokenizer)
    with _one_thread():
        result = cold_start(model, tokenizer, task, start, progress, seconds)
    unfinished = folder.with_name(f".{folder.name}.{platform.node()}.{os.getpid()}")
    try:
        with no_progress_bars():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        seal_folder(unfinished, COLD_START, {"recipe": recipe, **result})
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # it exists if another process made it meanwhile on a system without locks
                raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the cold-started model to {folder}: {error}. Nothing was kept; is the disk full?"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _recipe(tiny: TinyConfig, start: ColdStartConfig, task: Task, seconds: float | None) -> dict[str, Any]:
    """Return the recipe of a cold-started model, all that decides its weights on one machine: settings, the task's
    problems, demonstrations and rewards (its name alone could stand for another task), and, because over some hundred
    steps another rounding makes another model, instruction set and experts implementation."""
    rng = random.Random(0)
    shown: list[Any] = [getattr(task, "identity", "")]
    demonstrate = getattr(task, "demonstration", lambda *_: "")
    for problem in (*problems_of(task, rng, 16), *problems_of(task, rng, 16, held_out=True)):
        answer = problem.answer
        with user_code(task, "demonstration", problem):
            demonstration = demonstrate(problem, rng, 0.5)
        # verifiers differ in which texts they accept beside the bare answer
        judged = (answer, f"= {answer}", f"{answer} or {answer}", demonstration, "")
        rewards = []
        for text in judged:
            with user_code(task, "reward", problem, text, seconds):
                rewards.append(task.reward(problem, text))
        shown.append((problem.prompt, answer, demonstration, rewards))
    recipe = {
        "tiny": asdict(tiny),
        "cold_start": asdict(start),
        "task": task.name,
        "alphabet": "".join(sorted(set(task.alphabet))),
        "max_new_tokens": task.max_new_tokens,
        "demonstrations": hashlib.sha256(repr(shown).encode()).hexdigest(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "experts": TINY_EXPERTS,
    }
    return json.loads(json.dumps(recipe))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager: run torch on one thread, so that sums have one order however many threads the run may use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
