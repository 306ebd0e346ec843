"""Loading of policies: a hub or local Mixture-of-Experts model, or the tiny one (`tiny`, `kept`)."""

import hashlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_rl.checks import changed_since, unreadable_weights
from moe_rl.measure.randomness import turn_off_randomness
from moe_rl.policy.kept import COLD_START, REMEDY, kept_cold_start
from moe_rl.policy.lora import LoraConfig, add_lora, merged_run, written_by_lora_run
from moe_rl.policy.tiny import (
    TINY_EXPERTS,
    ColdStartConfig,
    ModelError,
    Progress,
    TinyConfig,
    build_tiny,
    char_tokenizer,
)
from moe_rl.processes import no_progress_bars
from moe_rl.rollout import Task
from moe_rl.rollout.engine_config import DTYPES
from moe_rl.rollout.engines import cast_parameters
from moe_rl.routing import UnsupportedModelError
from moe_rl.routing.experts import check_experts_name, check_megablocks, register_experts
from moe_rl.routing.others import out_of_reach
from moe_rl.routing.sites import find_sites

MERGE = "merge them into their model first (PEFT's merge_and_unload, then save_pretrained)"
EXPERT_BIAS = "expert_bias.safetensors"
"""File in a run's checkpoint: the selection bias of `optim.expert_bias_rate`, for which hub format has no place."""


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the policy: a path or, without one, the tiny model and its cold start."""

    path: str | None = None
    """A local folder or a hub id; None makes the tiny model."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    cold_start: ColdStartConfig | None = field(default_factory=ColdStartConfig)
    """For the tiny model only, always in fp32; None leaves the model at its random weights."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`: of weights, activations and gradients. The optimizer keeps fp32 master copies
    of weights of 16 bits (`optim.master_weights`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run happens; `auto` takes an accelerator if there is one. CUDA_VISIBLE_DEVICES says which. Apple's
    (mps) is never taken: it has no float64, which sampling draws with and metrics are computed in."""
    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2`, ...; None takes transformers' choice."""
    experts_implementation: str | None = None
    """`grouped_mm`, `eager`, ... or one that `moe_rl.routing.experts` registers; None takes transformers' choice,
    for the tiny model on a CPU `sorted_mm`."""
    gradient_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (PEFT, an optional package) instead of all weights."""
    trust_remote_code: bool = False
    """Run code that comes with a hub model. Leave it off unless you trust its author."""


def seeded(config: ModelConfig, seed: int) -> ModelConfig:
    """Return `config` with the run's `seed` in place of missing seeds of the initial weights and of the cold start.

    >>> seeded(ModelConfig(cold_start=ColdStartConfig(seed=7)), 3).tiny.seed
    3
    """
    tiny, start = config.tiny, config.cold_start
    if tiny.seed is None:
        tiny = replace(tiny, seed=seed)
    if start is not None and start.seed is None:
        start = replace(start, seed=seed)
    return replace(config, tiny=tiny, cold_start=start)


def load_policy(
    config: ModelConfig,
    task: Task,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    weights: bool = True,
    report: Callable[[dict[str, Any]], None] | None = None,
    seconds: float | None = None,
) -> tuple[Any, Any]:
    """Load or make the policy; return it, in `eval()` mode on the CPU, with its tokenizer. Reaches the network only for
    a hub id.

    Args:
        config: settings of the model.
        task: gives the tiny model its vocabulary and its cold start.
        cache_dir: folder of kept cold-started models, one folder in hub format for each recipe; None: not kept.
            Processes that want the same model at the same time make it once.
        progress: called after each step of the cold start.
        weights: False gives the same model on the meta device, where tensors have no memory: for processes that get
            their share of the weights from another one. A cold start that is not kept yet is made all the same.
        report: called once with the policy's origin: `weights_sha256`, a digest of its weights, and `cold_start`: None
            or a cold start's `seed`, the `steps` it took, the held-out `reward` it reached, its `until_reward`, and the
            `kernels` it was made with. Not called without `weights`.
        seconds: how long the task's verifier may take for one completion of the cold start; None: no limit.

    Raises:
        ModelError: a cold start that did not reach its `until_reward`; no such folder or hub model, not a causal
            language model, a dense model, a damaged checkpoint or cache, no tokenizer, no chat template where the task
            gives messages, an unknown dtype, a device that is not there, a package that is missing.
    """
    check_machine(config)
    config = seeded(config, 0)
    reached: dict[str, Any] | None = None
    chats = getattr(task, "chats", False)  # before the model, which may take minutes to load
    if config.path is not None:
        model, tokenizer = _load(config.path, config, weights)
    elif config.cold_start is None:
        tokenizer = char_tokenizer(task.alphabet)
        model = build_tiny(config.tiny, tokenizer, **_implementations(config))
        cast_parameters(model, DTYPES[config.dtype])  # rotary frequencies stay in fp32, as in a loaded model
    else:
        with tempfile.TemporaryDirectory(prefix="moe_rl-") if cache_dir is None else nullcontext(cache_dir) as root:
            folder, reached = kept_cold_start(config.tiny, config.cold_start, task, Path(root), progress, seconds)
            try:
                model, tokenizer = _load(str(folder), config, weights)
            except ModelError as error:
                raise ModelError(f"{error} Is it damaged? {REMEDY}") from error
    try:
        find_sites(model)
    except UnsupportedModelError as error:
        raise ModelError(f"model.path: {config.path} is no Mixture-of-Experts to study: {error}") from error
    if chats and not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"model.path: the tokenizer of {config.path or 'the tiny model'} has no chat template, and the task "
            f"{task.name} gives messages. Give prompts as text, or a model that was trained to chat."
        )
    if config.gradient_checkpointing:
        # Never the reentrant kind: replay could not follow its recomputation. transformers 5.23 renamed the method.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise ModelError(f"model.gradient_checkpointing: {error} Set it to false.") from error
    if report is not None and weights:
        report({"weights_sha256": weights_sha256(model), "cold_start": reached})
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if not weights:
        model = model.to("meta")
    return model.eval(), tokenizer


def weights_sha256(model: Any) -> str:
    """Return the SHA-256 sum of names, dtypes, shapes and values of all tensors that a checkpoint of the model holds,
    in the order of names: two models have the same sum exactly if all of these are equal. Buffers that follow from the
    configuration, such as rotary frequencies, do not count."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_machine(config: ModelConfig) -> None:
    """Raise ModelError, before anything is loaded, if this machine or installation lacks what `config` asks for."""
    if sys.platform == "win32":
        raise ModelError("runs need pipes, signals and file locks that Windows does not have: use its Linux (WSL)")
    if config.dtype not in DTYPES:
        raise ModelError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {config.dtype!r}")
    if config.path is not None:
        check_path(config.path)
    if config.device == "cuda" and not torch.cuda.is_available():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", built without CUDA")
        raise ModelError(f"model.device: cuda is not there ({build}). `auto` takes what is; `moe-rl doctor` lists it.")
    try:
        check_experts_name(config.experts_implementation)
        if config.experts_implementation == "megablocks":
            check_megablocks(DTYPES[config.dtype], config.device)
    except UnsupportedModelError as error:
        raise ModelError(f"model.{error}") from error


def check_tiny(config: ModelConfig, alphabet: str) -> int:
    """Return how many routing sites the tiny model has, built without a cold start. Raises ModelError if it cannot be
    built, or if `model.lora` names weights that it does not have."""
    parts = replace(config.tiny, seed=0), config.lora, alphabet, tuple(_implementations(config).items())
    return _tiny_sites(*parts)


@lru_cache(maxsize=64)
def _tiny_sites(
    tiny: TinyConfig, lora: LoraConfig | None, alphabet: str, implementations: tuple[tuple[str, str], ...]
) -> int:
    model = build_tiny(tiny, char_tokenizer(alphabet), **dict(implementations))
    if lora is not None:
        model = add_lora(model, lora)
    return len(find_sites(model))


# -- any model ------------------------------------------------------------------------------------------------


def _load(path: str, config: ModelConfig, weights: bool = True) -> tuple[Any, Any]:
    """Load a model and its tokenizer, whose padding token is one that the model embeds."""
    model, tokenizer = load_model(path, config, weights), load_tokenizer(path, config.trust_remote_code)
    return model, pad_within(tokenizer, vocabulary_of(model))


def check_path(path: str) -> str:
    """Return a model's path as transformers takes it: a folder in hub format (for a run's folder, that of its
    checkpoint) or a hub id. Raises ModelError for any other path."""
    if not path:
        raise ModelError("model.path: '' names no model; leave it out for the tiny policy, or name a folder or hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "checkpoint" / "config.json").is_file():
            folder /= "checkpoint"
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path: {folder.absolute()} holds no model (no config.json){but_holds(folder)}")
        return str(folder)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: there is no folder {folder.absolute()} (a hub id would look like owner/name)")
    return path


def found_path(path: str) -> str:
    """Return `check_path(path)` for a model that is loaded next. Raises ModelError, too, for a hub id that is not
    downloaded while the hub does not answer (`out_of_reach`)."""
    path = check_path(path)
    if not Path(path).is_dir() and (error := out_of_reach(path)):
        raise ModelError(
            f"model.path: cannot load {path}{taken_for_hub_id(path)}, which is not among the downloaded models "
            f"({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} does not answer ({_brief(error)})"
        ) from error
    return path


def but_holds(folder: Path) -> str:
    """Return words to add to the error of a folder without a model: that it holds PEFT's LoRA adapters, or run folders;
    empty if it holds neither."""
    if (folder / "adapter_config.json").is_file():
        return f" but LoRA adapters: {MERGE}"
    runs = [path.parents[1].name for path in folder.glob("*/checkpoint/config.json")]
    named = ", ".join(sorted(runs, key=lambda name: (len(name), name)))  # seed2 before seed10
    return f" but runs, of which one has to be named: {named}" if runs else ""


def taken_for_hub_id(path: str) -> str:
    """Return words to add to the error of a path at which nothing was found: that it was taken for a hub id; empty if
    the path is a folder."""
    folder = Path(path).expanduser()
    return "" if folder.is_dir() else f"; there is no folder {folder.absolute()}, so it was taken for a hub id"


def load_model(path: str, config: ModelConfig, weights: bool = True) -> Any:
    """Load the model of a folder in hub format or of a hub id, on the CPU, or without `weights` on the meta device. Its
    dropout and router jitter are turned off, with a warning; adapters of a run with `model.lora` are merged.

    Raises ModelError if the model cannot be loaded, also for missing weights, and for a run's checkpoint that was
    changed since or has a bias on the choice of experts, which is not part of a model in hub format."""
    path = found_path(path)
    wrong = changed_since(Path(path), "state.json", COLD_START)
    if wrong:
        raise ModelError(f"model.path: {wrong}")
    if (Path(path) / EXPERT_BIAS).exists():
        raise ModelError(
            f"model.path: {path} is of a run with optim.expert_bias_rate: its routers choose under a bias, in "
            f"{EXPERT_BIAS}, for which hub format has no place, so that the model would choose other experts than the "
            "policy did. For its weights without the bias copy config.json, model.safetensors and the tokenizer's "
            "files to a folder of their own"
        )
    of_lora = written_by_lora_run(Path(path))
    try:
        with no_progress_bars(quiet=of_lora):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=DTYPES[config.dtype],
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                device_map=None if weights else "meta",
                **_implementations(config),
            )
    except Exception as error:  # safetensors, hub and config errors share no base class
        why = unreadable_weights(Path(path)) or f"{_brief(error)}{taken_for_hub_id(path)}"
        raise ModelError(f"model.path: cannot load {path}: {why}") from error
    model, report = loaded
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers adds the adapters that it finds in the folder
        raise ModelError(
            f"model.path: {path} holds LoRA adapters, which would be on the model without being merged: {MERGE}. For "
            "the model without them, move adapter_config.json away"
        )
    if of_lora:
        model, report = merged_run(model, Path(path)) if weights else model, {}
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            raise ModelError(
                f"model.path: {path} does not fit its config: {problem.replace('_', ' ')} "
                f"{sorted(map(str, report[problem]))[:3]}. A damaged or partial checkpoint?"
            )
    kept = model.state_dict() if weights else {}  # buffers, too: a router's balancing bias is one
    bad = [name for name, value in kept.items() if isinstance(value, Tensor) and not all_finite(value)]
    if bad:
        raise ModelError(
            f"model.path: {path}: {len(bad)} tensors hold values that are not finite, first {bad[0]}. A run that "
            "diverged before it was saved, or a damaged file?"
        )
    if off := turn_off_randomness(model):
        warnings.warn(
            f"{path}: dropout and router jitter are off, as the old and the new policy would differ by what they draw "
            f"({len(off)} places, first {off[0]})",
            stacklevel=2,
        )
    return model


def all_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN."""
    if values.is_floating_point() and values.itemsize == 1:  # torch.isfinite does not know every 8-bit format
        values = values.bfloat16()
    return bool(torch.isfinite(values).all())


def has_tokenizer(folder: Path) -> bool:
    """Return whether a tokenizer is saved in a folder, with a model or without."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or hub id, with padding on the left and a padding token. Raises ModelError if
    there is no usable tokenizer."""
    folder = Path(path).expanduser()
    path = str(folder) if has_tokenizer(folder) else found_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, padding_side="left")
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # some classes come up empty without their files
            raise ValueError("its vocabulary is empty")
    except Exception as error:
        raise ModelError(
            f"model.path: {path} has no usable tokenizer: {_brief(error)}. Save one next to the model "
            "(tokenizer.save_pretrained)."
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"model.path: the tokenizer of {path} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere, so any token serves
    return tokenizer


def vocabulary_of(model: Any) -> int:
    """Return how many tokens the model has an input embedding of."""
    return int(model.get_input_embeddings().weight.shape[0])


def pad_within(tokenizer: Any, vocabulary: int) -> Any:
    """Return the tokenizer with a padding token that the model embeds: some tokenizers were given a new padding token
    that the model has no embedding of. Padding is masked everywhere, so any token serves."""
    if tokenizer.pad_token_id >= vocabulary:
        ends = tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocabulary
        tokenizer.pad_token = tokenizer.eos_token if ends else tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _implementations(config: ModelConfig) -> dict[str, str]:
    """Return the implementations of attention and experts to load with, without those left to transformers."""
    register_experts()  # so that `experts_implementation: megablocks` is a known name
    chosen = {
        "attn_implementation": config.attn_implementation,
        "experts_implementation": config.experts_implementation or _default_experts(config),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _default_experts(config: ModelConfig) -> str | None:
    """Return the tiny model's experts implementation on the run's device; None for any other model."""
    if config.path is not None:
        return None
    on_cpu = config.device == "cpu" or torch.backends.mps.is_available() or not torch.accelerator.is_available()
    return TINY_EXPERTS if on_cpu else "grouped_mm"


def _brief(error: Exception) -> str:
    """Return class and message of an error in one line of at most 303 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:300] + "..."
