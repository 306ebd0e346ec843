"""Policies: load a hub or local model, or build the tiny Mixture-of-Experts and teach it a task's form (cold start).

The cold start imitates *noisy* demonstrations. A model that has imitated clean ones errs rarely and confidently, and
reinforcement learning then has little to work on; one that has imitated noisy ones knows the form of an answer and
errs at random.
"""

import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from moe_rl.rollout.sampler import sample, score
from moe_rl.rollout.tasks import BOS, EOS, Task

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss)."""

PAD = "<pad>"


class ModelError(ValueError):
    """A model that cannot be loaded or used; the message says what, where, and what to do."""


@dataclass(frozen=True)
class TinyConfig:
    """The embedded Mixture-of-Experts: real transformers code, 0.3 M parameters, trains on one CPU core."""

    family: Literal["qwen3_moe", "mixtral", "olmoe"] = "qwen3_moe"
    hidden_size: int = 48
    num_layers: int = 4
    num_heads: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    norm_topk_prob: bool = True
    """Renormalise the weights of the chosen experts (Mixtral always does)."""
    initializer_range: float = 0.06
    router_init_scale: float = 1.0
    """Factor on the routers' initial weights; 0.1 gives near-tied router logits, so that routes change easily."""
    max_position_embeddings: int = 512
    seed: int = 0
    """Seed of the initial weights."""


@dataclass(frozen=True)
class ColdStartConfig:
    """Supervised imitation of noisy demonstrations, from random weights."""

    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 20
    demonstration_noise: float = 0.2
    """Share of random decisions in a demonstration."""
    aux_loss_coef: float = 0.01
    """Coefficient of the load-balancing loss."""
    freeze_router: bool = False
    """Keep the routers' own weights at their initial values."""
    seed: int = 0
    """Seed of the demonstrations."""


@dataclass(frozen=True)
class ModelConfig:
    """Which policy: a path, or without one the tiny model and its cold start."""

    path: str | None = None
    """A local folder or a hub id; None builds the tiny model."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    cold_start: ColdStartConfig | None = field(default_factory=ColdStartConfig)
    """Of the tiny model only; None leaves it at its random weights."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`."""
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    """Run code that comes with a hub model. Off unless you trust its author."""


def load_policy(
    config: ModelConfig, task: Task, cache_dir: Path | None = None, progress: Progress | None = None
) -> tuple[Any, Any]:
    """The policy and its tokenizer, in `eval()` mode, on the CPU.

    Args:
        config: which model.
        task: gives the tiny model its vocabulary and its cold start.
        cache_dir: where cold-started models are kept and found, by a hash of everything that made them.
        progress: told of the cold start's steps.

    Raises:
        ModelError: no such folder or hub model, not a causal language model, a dense model, a damaged checkpoint or
            cache, a missing tokenizer.
    """
    if config.path is not None:
        model, tokenizer = _load(config.path, config)
    elif config.cold_start is None:
        model, tokenizer = build_tiny(config, task), char_tokenizer(task.alphabet)
    elif cache_dir is None:
        model, tokenizer = build_tiny(config, task), char_tokenizer(task.alphabet)
        cold_start(model, tokenizer, task, config.cold_start, progress)
    else:
        model, tokenizer = _load(str(_cold_started(config, task, Path(cache_dir), progress)), config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.eval(), tokenizer


# -- the tiny model -------------------------------------------------------------------------------------------------


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, and padding; `^` is the beginning and `$` the end token.

    Adds no special tokens: a prompt holds its own `^`. A character outside the alphabet is refused by the tokenizer.

    >>> char_tokenizer("01=^$")("^01=")["input_ids"]
    [5, 1, 2, 4]
    """
    symbols = sorted(set(alphabet) | {BOS, EOS})
    vocabulary = {symbol: i for i, symbol in enumerate([PAD, *symbols])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_config(config: TinyConfig, tokenizer: Any) -> Any:
    """The transformers config of the tiny model. Raises ModelError for an unknown family."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    intermediate = config.moe_intermediate_size
    if config.family == "qwen3_moe":
        return Qwen3MoeConfig(
            **common,
            head_dim=config.hidden_size // config.num_heads,
            num_experts=config.num_experts,
            moe_intermediate_size=intermediate,
            intermediate_size=intermediate,
            norm_topk_prob=config.norm_topk_prob,
        )
    if config.family == "mixtral":
        return MixtralConfig(**common, num_local_experts=config.num_experts, intermediate_size=intermediate)
    if config.family == "olmoe":
        return OlmoeConfig(
            **common,
            num_experts=config.num_experts,
            intermediate_size=intermediate,
            norm_topk_prob=config.norm_topk_prob,
        )
    raise ModelError(f"model.tiny.family: unknown family {config.family!r}; known: qwen3_moe, mixtral, olmoe")


def build_tiny(config: ModelConfig, task: Task) -> Any:
    """The tiny model at its initial weights, drawn from `tiny.seed` alone; torch's global generator is not moved."""
    hf = tiny_config(config.tiny, char_tokenizer(task.alphabet))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.tiny.seed)
        model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, **_implementations(config))
    with torch.no_grad():
        for weight in _routers(model):
            weight.mul_(config.tiny.router_init_scale)
    return model.to(_dtype(config.dtype)).eval()


def _routers(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith(".gate.weight")]


def cold_start(
    model: Any, tokenizer: Any, task: Task, config: ColdStartConfig, progress: Progress | None = None
) -> dict[str, Any]:
    """Imitate noisy demonstrations: cross-entropy on completion tokens, AdamW without decay, linear warm-up.

    Demonstrations are drawn from the task's training problems by `config.seed` alone, so that one machine at one
    thread gives the same weights bit for bit.

    Args:
        model: trained in place; left in `eval()` mode.
        tokenizer: its tokenizer.
        task: must have `demonstration`.
        config: the hyper-parameters.
        progress: told of every step.

    Returns:
        `loss` (nats per token) and `aux_loss`, one per step, and `pass@1`: the mean reward of 256 held-out problems
        sampled at temperature 1.

    Raises:
        ModelError: the task has no demonstrations; the loss is no longer finite.
    """
    demonstrate = getattr(task, "demonstration", None)
    if demonstrate is None:
        raise ModelError(
            f"task {task.name} has no demonstration(problem, rng, noise), which the cold start of the tiny model "
            "imitates; add one, or set model.cold_start to null, or train a model of your own (model.path)"
        )
    rng = random.Random(f"cold-start/{config.seed}")
    frozen = {id(parameter) for parameter in _routers(model)} if config.freeze_router else set()
    trained = [parameter for parameter in model.parameters() if id(parameter) not in frozen]
    optimizer = torch.optim.AdamW(trained, betas=config.betas, weight_decay=0.0, fused=True)
    losses, aux_losses = [], []
    model.train()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
        problems = [task.problem(rng) for _ in range(config.batch_size)]
        texts = [demonstrate(problem, rng, config.demonstration_noise) for problem in problems]
        ids, attention, labels = demonstration_batch(tokenizer, [p.prompt for p in problems], texts)
        device = next(model.parameters()).device
        out = model(
            input_ids=ids.to(device),
            attention_mask=attention.to(device),
            output_router_logits=bool(config.aux_loss_coef),
            use_cache=False,
        )
        loss = nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(device)
        )
        aux = out.aux_loss if config.aux_loss_coef else loss.new_zeros(())
        torch.autograd.backward(loss + config.aux_loss_coef * aux, inputs=trained)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        aux_losses.append(float(aux.detach()))
        if not math.isfinite(losses[-1]):
            raise ModelError(
                f"cold start: the loss is {losses[-1]} at step {step}; lower model.cold_start.learning_rate"
            )
        if progress:
            progress(step + 1, config.steps, losses[-1])
    model.eval()
    rng = random.Random("cold-start/held-out")
    problems = [task.problem(rng, held_out=True) for _ in range(256)]
    generator = torch.Generator().manual_seed(0)
    rollout = sample(
        model, tokenizer, problems, group_size=1, max_new_tokens=task.max_new_tokens, generator=generator
    )
    return {"loss": losses, "aux_loss": aux_losses, "pass@1": float(score(task, rollout).rewards.mean())}


def demonstration_batch(
    tokenizer: Any, prompts: list[str], completions: list[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded token ids, attention mask and labels `[B,T]`; labels are -100 outside completion and end token."""
    asked = tokenizer(prompts)["input_ids"]
    answered = tokenizer([text + tokenizer.eos_token for text in completions])["input_ids"]
    width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True))
    ids = torch.full((len(asked), width), int(tokenizer.pad_token_id))
    labels = torch.full_like(ids, -100)
    for row, (a, b) in enumerate(zip(asked, answered, strict=True)):
        ids[row, : len(a) + len(b)] = torch.tensor(a + b)
        labels[row, len(a) : len(a) + len(b)] = torch.tensor(b)
    lengths = torch.tensor([len(a) + len(b) for a, b in zip(asked, answered, strict=True)])
    return ids, (torch.arange(width)[None] < lengths[:, None]).long(), labels


# -- the cache of cold-started models -------------------------------------------------------------------------------


def _cold_started(config: ModelConfig, task: Task, cache_dir: Path, progress: Progress | None) -> Path:
    """The folder of the cold-started model in hub format; made if it is not there."""
    assert config.cold_start is not None
    recipe = _recipe(config, task)
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / key
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f"{key}.lock"):  # runs that start together make it once
        if not folder.exists():
            model, tokenizer = build_tiny(config, task), char_tokenizer(task.alphabet)
            result = cold_start(model, tokenizer, task, config.cold_start, progress)
            making = cache_dir / f".{key}.{os.getpid()}"
            try:
                model.save_pretrained(making)
                tokenizer.save_pretrained(making)
                (making / "cold_start.json").write_text(
                    json.dumps({"recipe": recipe, **result}, indent=1) + "\n"
                )
                making.rename(folder)
            finally:
                shutil.rmtree(making, ignore_errors=True)
    try:
        stored = json.loads((folder / "cold_start.json").read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder}: this cold-started model is damaged ({error}). Delete the folder; it is made anew."
        ) from error
    if stored != recipe:
        raise ModelError(f"{folder}: holds a model of another recipe. Delete the folder; it is made anew.")
    return folder


def _recipe(config: ModelConfig, task: Task) -> dict[str, Any]:
    """Everything that decides a cold-started model, the task by what it does rather than by its name."""
    assert config.cold_start is not None
    rng = random.Random(0)
    shown = []
    for _ in range(16):
        problem = task.problem(rng)
        shown.append((problem.prompt, getattr(task, "demonstration", lambda *_: "")(problem, rng, 0.5)))
    plain = json.loads(json.dumps([dataclasses.asdict(config.tiny), dataclasses.asdict(config.cold_start)]))
    return {
        "tiny": plain[0],
        "cold_start": plain[1],
        "dtype": config.dtype,
        "experts_implementation": config.experts_implementation,
        "attn_implementation": config.attn_implementation,
        "task": {
            "name": task.name,
            "alphabet": task.alphabet,
            "max_new_tokens": task.max_new_tokens,
            "demonstrations": hashlib.sha256(repr(shown).encode()).hexdigest(),
        },
    }


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock, freed by the system if this process dies. Where there is none (Windows), go without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- any model ------------------------------------------------------------------------------------------------------


def _load(path: str, config: ModelConfig) -> tuple[Any, Any]:
    dtype = _dtype(config.dtype)
    trust = config.trust_remote_code
    local = Path(path)
    looks_local = local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if not local.exists() and looks_local:
        raise ModelError(f"model.path: there is no folder {local.expanduser().absolute()}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust, **_implementations(config)
        )
    except Exception as error:
        raise ModelError(f"model.path: cannot load {path}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust, padding_side="left")
    except Exception as error:
        raise ModelError(f"model.path: {path} has no usable tokenizer: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def _implementations(config: ModelConfig) -> dict[str, str]:
    chosen = {
        "attn_implementation": config.attn_implementation,
        "experts_implementation": config.experts_implementation,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ModelError(f"model.dtype: expected one of {', '.join(known)}, got {name!r}")
    return known[name]
