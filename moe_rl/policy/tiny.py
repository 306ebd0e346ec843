"""The built-in policy: a tiny Mixture-of-Experts model of transformers' own code, and its cold start.

The cold start imitates *noisy* demonstrations. A model that has imitated clean demonstrations errs rarely and
confidently, which leaves reinforcement learning little to work on; after noisy ones the model knows the form of an
answer and errs at random.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from moe_rl.objectives.bounds import (
    BelowOne,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Range,
    Seed,
    Whole,
    check_settings,
)
from moe_rl.rollout import Task, score
from moe_rl.rollout.character_tasks import BOS, EOS
from moe_rl.rollout.continuing import in_turns
from moe_rl.rollout.engine import ModelEngine
from moe_rl.rollout.task import TaskError, problems_of, token_ids, user_code
from moe_rl.routing.experts import register_experts
from moe_rl.routing.sites import router_parameters

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss in nats per token)."""

PAD = "<pad>"

TINY_EXPERTS = "sorted_mm"
"""Default experts implementation of the tiny model on a CPU: faster there than transformers' choice, and equal up to
rounding."""


class ModelError(ValueError):
    """An error of a model that cannot be made, loaded or used; the message says what, where, and what to do."""


@dataclass(frozen=True)
class TinyConfig:
    """Architecture of the tiny model. The defaults: 0.34 M parameters, one minute of cold start on one CPU core."""

    family: Literal["qwen3_moe", "mixtral", "olmoe", "minimax_m2"] = "qwen3_moe"
    """The architecture in transformers. Routers take a softmax of their scores, those of `minimax_m2` a sigmoid."""
    hidden_size: Count = 48
    num_layers: Count = 4
    num_heads: Count = 4
    num_experts: Count = 16
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 32
    norm_topk_prob: bool = True
    """Renormalise the weights of the chosen experts (mixtral and minimax_m2 always do)."""
    initializer_range: Positive = 0.06
    router_init_scale: NotNegative = 1.0
    """Factor on the routers' initial weights; 0.1 gives near-tied router logits, which flip easily."""
    max_position_embeddings: Count = 512
    seed: Seed | None = None
    """Seed of the initial weights; None takes the run's, so that a study's seeds begin from different models."""


@dataclass(frozen=True)
class ColdStartConfig:
    """Settings of the tiny model's cold start: supervised imitation of noisy demonstrations."""

    steps: Count = 500
    """Steps of imitation; with `until_reward` the most that it may take."""
    until_reward: Annotated[float, Range(0, 1, open_low=True)] | None = None
    """End at the first check whose mean reward on held-out problems is at least this; a cold start that does not reach
    it within `steps` is an error. How fast a model learns differs by seed and by processor, and a policy that has
    not learned leaves reinforcement learning nothing to work on. None: exactly `steps`."""
    check_every: Count = 50
    """Steps between checks."""
    check_problems: Count = 512
    """Held-out problems of a check, one response each at temperature 1; the same problems every time."""
    batch_size: Count = 64
    learning_rate: Positive = 4e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    warmup_steps: Whole = 20
    demonstration_noise: Fraction = 0.2
    """Probability that a decision in a demonstration is wrong."""
    aux_loss_coef: NotNegative = 0.01
    """Coefficient of the load-balancing loss."""
    freeze_router: bool = False
    """Keep the routers' own weights at their initial values."""
    seed: Seed | None = None
    """Seed of the demonstrations; None takes the run's."""


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character of `alphabet`, and padding. `^` is the beginning and `$` the end
    token.

    The tokenizer adds no special tokens: a prompt contains its own `^`. Encoding a character that it lacks raises.

    >>> char_tokenizer("01=^$")("^01=")["input_ids"]
    [5, 2, 3, 4]
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


def build_tiny(config: TinyConfig, tokenizer: Any, **implementations: str) -> Any:
    """Build the tiny model with its initial weights, in fp32 and `eval()` mode.

    The weights are drawn from `config.seed` alone (None: 0), and torch's global generator is left where it was.

    Args:
        config: the architecture.
        tokenizer: its tokenizer, for the vocabulary's size and the special tokens.
        implementations: `attn_implementation`, `experts_implementation` (default: `TINY_EXPERTS`).

    Raises:
        ModelError: a setting out of range; an architecture that cannot be built; an implementation that is unknown or
            not installed.
    """
    check_settings(config, "model.tiny.", ModelError)
    register_experts()
    implementations = {"experts_implementation": TINY_EXPERTS, **implementations}
    try:
        hf = _hf_config(config, tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed or 0)
            model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, **implementations)
    except ModelError:
        raise
    except (ValueError, RuntimeError, ImportError) as error:  # ImportError: an attn_implementation not installed
        raise ModelError(f"model.tiny: cannot build {config}: {error}") from error
    with torch.no_grad():
        for weight in router_parameters(model):
            weight.mul_(config.router_init_scale)
    return model.eval()


def _hf_config(config: TinyConfig, tokenizer: Any) -> Any:
    """Return transformers' configuration of the tiny model. Raises ModelError for settings that do not fit together."""
    if config.num_experts_per_tok > config.num_experts:
        raise ModelError(
            f"model.tiny.num_experts_per_tok: between 1 and num_experts ({config.num_experts}), "
            f"got {config.num_experts_per_tok}"
        )
    if config.hidden_size % (2 * config.num_heads):
        raise ModelError(
            f"model.tiny.hidden_size: heads of even size, so a multiple of 2 x num_heads ({config.num_heads}), "
            f"got {config.hidden_size}"
        )
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "intermediate_size": config.moe_intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if config.family == "mixtral":
        return MixtralConfig(**common, num_local_experts=config.num_experts, sliding_window=None)
    experts: dict[str, Any] = {"num_experts": config.num_experts, "norm_topk_prob": config.norm_topk_prob}
    if config.family == "olmoe":
        return OlmoeConfig(**common, **experts)
    common["head_dim"] = config.hidden_size // config.num_heads
    if config.family == "minimax_m2":
        return MiniMaxM2Config(**common, num_local_experts=config.num_experts)
    return Qwen3MoeConfig(**common, **experts, moe_intermediate_size=config.moe_intermediate_size)


def cold_start(
    model: Any,
    tokenizer: Any,
    task: Task,
    config: ColdStartConfig,
    progress: Progress | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Train the model to imitate noisy demonstrations: cross-entropy on completion tokens plus the load-balancing loss.

    AdamW without decay, linear warm-up, then a constant rate; gradients clipped to norm 1. Demonstrations are
    of training problems and drawn from `config.seed` alone (None: 0), and checks draw from generators of their own:
    one machine at one thread gives the same weights bit for bit, whether they are checked on the way or not.

    Args:
        model: trained in place, left in `eval()` mode.
        tokenizer: its tokenizer.
        task: must have `demonstration(problem, rng, noise)`.
        config: the hyper-parameters.
        progress: called after every step.
        seconds: how long the task's verifier may take for one completion; None: no limit.

    Returns:
        `loss` (nats per completion token) and `aux_loss` of every step; `checks`: step and held-out mean reward of each
        check on the way; `steps` that were taken; `pass@1`: the held-out mean reward after the last step; `reached`:
        whether `pass@1` is at least `until_reward` (True if there is no `until_reward`).

    Raises:
        ModelError: the task has no demonstrations; a hyper-parameter out of range; a loss that is not finite.
        TaskError: the task's code failed, a demonstration is no text, or the verifier took too long.
    """
    if not hasattr(task, "demonstration"):
        raise ModelError(
            f"task {task.name} has no demonstration(problem, rng, noise), which the cold start imitates. Add one, "
            "or set model.cold_start to null, or train a model that can already do something (model.path)."
        )
    check_settings(config, "model.cold_start.", ModelError)
    device = next(model.parameters()).device
    frozen = {id(p) for p in router_parameters(model)} if config.freeze_router else set()
    trained = [p for p in model.parameters() if id(p) not in frozen]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, betas=config.betas, weight_decay=0.0, fused=True)
    rng = random.Random(f"cold-start/{config.seed or 0}")
    history: dict[str, Any] = {"loss": [], "aux_loss": [], "checks": []}
    reward = None
    model.train()
    for step in range(1, config.steps + 1):
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        problems = problems_of(task, rng, config.batch_size)
        with user_code(task, "demonstration"):
            texts = [task.demonstration(problem, rng, config.demonstration_noise) for problem in problems]
            if wrong := [text for text in texts if not isinstance(text, str)]:
                raise TaskError(f"expected a text, got {wrong[0]!r}")
        batch = demonstration_batch(tokenizer, [p.prompt for p in problems], texts)
        ids, attention, labels = (part.to(device) for part in batch)
        balanced = bool(config.aux_loss_coef)
        out = model(input_ids=ids, attention_mask=attention, use_cache=False, output_router_logits=balanced)
        loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        aux = out.aux_loss if balanced else loss.new_zeros(())
        torch.autograd.backward(loss + config.aux_loss_coef * aux, inputs=trained)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history["loss"].append(loss.item())
        history["aux_loss"].append(aux.item())
        if not math.isfinite(history["loss"][-1]):
            raise ModelError(
                f"cold start: the loss is {history['loss'][-1]} at step {step}; a lower "
                "model.cold_start.learning_rate usually helps"
            )
        if progress:
            progress(step, config.steps, history["loss"][-1])
        if config.until_reward is not None and (step % config.check_every == 0 or step == config.steps):
            reward = pass_at_1(model, tokenizer, task, config.check_problems, seconds)
            history["checks"].append([step, reward])
            if reward >= config.until_reward:
                break
    model.eval()
    if reward is None:
        reward = pass_at_1(model, tokenizer, task, config.check_problems, seconds)
    reached = config.until_reward is None or reward >= config.until_reward
    return {**history, "steps": step, "pass@1": reward, "reached": reached}


def pass_at_1(model: Any, tokenizer: Any, task: Task, problems: int, seconds: float | None = None) -> float:
    """Return the mean reward on held-out problems, one completion each, at temperature 1; always the same problems."""
    rng = random.Random("cold-start/held-out")
    asked = problems_of(task, rng, problems, held_out=True)
    rollout = in_turns(ModelEngine(model, tokenizer), task, tokenizer, seconds).sample(
        asked,
        group_size=1,
        max_new_tokens=task.max_new_tokens,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        record_routes=False,
    )
    return float(score(task, rollout, seconds).rewards.mean())


def demonstration_batch(
    tokenizer: Any, prompts: list[str], completions: list[str]
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return right-padded token ids, attention mask and labels of demonstrations; labels are -100 outside completion
    and end token."""
    asked = token_ids(tokenizer, prompts)
    answered = token_ids(tokenizer, [text + tokenizer.eos_token for text in completions], add_special_tokens=False)
    lengths = torch.tensor([[len(a), len(a) + len(b)] for a, b in zip(asked, answered, strict=True)])
    position = torch.arange(int(lengths.max()))
    mask = position < lengths[:, 1:]
    ids = torch.full(mask.shape, int(tokenizer.pad_token_id))
    ids[mask] = torch.tensor([token for a, b in zip(asked, answered, strict=True) for token in (*a, *b)])
    labels = ids.masked_fill(~mask | (position < lengths[:, :1]), -100)
    return ids, mask.long(), labels
