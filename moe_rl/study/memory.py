"""The memory and disk space that a run needs, computed from shapes alone.

The model is built on torch's meta device; nothing is loaded or downloaded. The sizes of parameters and their states are
exact. Activations are an estimate, within a factor of two on the model families that the tests measure; memory that
allocators and kernels take besides is not counted.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.measure.head import default_chunk
from moe_rl.policy.lora import add_lora
from moe_rl.policy.models import DTYPES, ModelConfig, check_path, taken_for_hub_id
from moe_rl.policy.tiny import ModelError, build_tiny, char_tokenizer
from moe_rl.rollout import TaskError, make_task
from moe_rl.rollout.task import problems_of
from moe_rl.rollout.vllm_engine import vllm_url
from moe_rl.routing.packing import packed_dtype
from moe_rl.routing.sites import find_sites
from moe_rl.training import RunConfig
from moe_rl.training.method import resolve_method

PROMPT_TOKENS = 256
"""Length of a prompt that is assumed if the task cannot be made or gives no prompts."""
CHARACTERS_PER_TOKEN = 3
"""Assumed, as no tokenizer is loaded: fewer than English text has, so that prompts are rather estimated too long."""

# fmt: off
_QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 151_936, "tie_word_embeddings": False, "norm_topk_prob": True,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}
_QWEN3_235B = {
    **_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 94,
    "num_attention_heads": 64, "moe_intermediate_size": 1536,
}
_OLMOE = {
    "model_type": "olmoe", "vocab_size": 50_304, "tie_word_embeddings": False,
    "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8,
}
_GRANITE = {
    "model_type": "granitemoe", "vocab_size": 49_155, "tie_word_embeddings": True,
    "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 32, "num_experts_per_tok": 8,
}
# fmt: on
KNOWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"), _QWEN3),
    "Qwen/Qwen3-235B-A22B": _QWEN3_235B,
    **{f"allenai/OLMoE-1B-7B-0924{kind}": _OLMOE for kind in ("", "-SFT", "-Instruct")},
    **{f"ibm-granite/granite-3.1-1b-a400m-{kind}": _GRANITE for kind in ("base", "instruct")},
}
"""Configurations of hub models by name, for planning without a network; one in the local cache comes first.
docs/scaling.md says what they were checked against."""


@dataclass(frozen=True)
class Need:
    """One item of memory on one device, in bytes.

    when: "always", or the phase that needs the item: "sampling" (of responses), "update" (of weights), "probing".
    """

    name: str
    bytes: int
    when: str
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The needs of one run in bytes: per device (`needs`), on the host and on disk.

    `host_bytes` is the most that all processes of a node hold at once in host memory if models are on other devices.
    """

    architecture: str
    parameters: int
    trainable: int
    prompt_tokens: int
    new_tokens: int
    routes_bytes_per_token: int
    kv_bytes_per_token: int
    needs: tuple[Need, ...]
    host_bytes: int
    checkpoint_bytes: int
    kept_bytes: int
    """Size of all policies that stay (`keep_policy_every`)."""

    @property
    def peak(self) -> int:
        """Most bytes that one device holds at once: all that is always there, and the largest of the three phases."""
        always, *phases = (
            sum(need.bytes for need in self.needs if need.when == when)
            for when in ("always", "sampling", "update", "probing")
        )
        return always + max(phases)


def architecture(config: ModelConfig, alphabet: str = "") -> Any:
    """Return the transformers configuration of a policy, from a folder, the local cache or `KNOWN`.

    Raises:
        ModelError: none of them has the configuration, or it cannot be used; the message says what to do.
    """
    if config.path is None:
        return build_tiny(config.tiny, char_tokenizer(alphabet)).config
    path = check_path(config.path)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers' errors of a configuration share no base class
        if Path(path).is_dir() or not isinstance(error, OSError | ValueError):
            raise ModelError(f"model.path: the configuration of {path} cannot be used: {error}") from error
        if path not in KNOWN:
            raise ModelError(
                f"model.path: the configuration of {path} is not on this machine, and nothing is downloaded here"
                f"{taken_for_hub_id(path)}. Put its config.json in a folder and give that. Known without: "
                + ", ".join(KNOWN)
            ) from error
    values = dict(KNOWN[path])
    return AutoConfig.for_model(values.pop("model_type"), **values)


def meta_model(hf_config: Any, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """Return the model without its weights: every parameter has a shape and a dtype but takes no memory.

    Raises:
        ModelError: transformers cannot build a model of this configuration.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # what a model's own code makes of missing or odd settings
        raise ModelError(f"model.path: transformers cannot build a model of this configuration: {error}") from error


def size_of(hf: Any, *names: str) -> int:
    """Return the first size that a configuration, or the part of it on experts (DBRX), has under one of these names.

    The largest one where layers differ; 0 if there is none.
    """
    places: tuple[Any, Any] = (hf, getattr(hf, "ffn_config", None))
    for place in places:
        for name in names:
            try:
                found = getattr(place, name, None)
            except RuntimeError:  # transformers', for a size of which each layer has its own (Gemma 4)
                found = [getattr(layer, name) for layer in place.per_layer_config]
            if found:
                return int(max(found) if isinstance(found, list | tuple) else found)
    return 0


def experts_of(hf: Any) -> tuple[int, int]:
    """Return the numbers of experts of a layer and of a token. Raises ModelError: the configuration does not say."""
    experts = size_of(hf, "num_experts", "num_local_experts", "moe_num_experts")
    top_k = size_of(hf, "num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k")
    if not experts or not top_k:
        raise ModelError(
            "model.path: the configuration does not say, under a name that is known here, how many experts "
            f"{'a token is given to' if experts else 'a layer has'}"
        )
    return experts, top_k


def plan(run: RunConfig, devices: int = 1) -> Plan:
    """Return what a run needs on each of `devices` devices, with one process for each device.

    Weights and their states are sharded evenly over the devices (FSDP2) unless the run's strategy is `ddp`, which keeps
    whole copies. Host memory is that of one node with all devices.

    Raises:
        ModelError: the model's configuration is not at hand, or says too little to build the model.
    """
    task, prompt_tokens = _task(run)
    given = architecture(run.model, getattr(task, "alphabet", "") if run.model.path is None else "")
    dtype = DTYPES[run.model.dtype]
    model = meta_model(given, dtype, run.model.trust_remote_code)
    hf = given.get_text_config()  # itself, or that of a model which also reads images
    sites = find_sites(model)
    if run.model.lora is not None:
        model = add_lora(model, run.model.lora)
    new_tokens = run.rollout.max_new_tokens or int(getattr(task, "max_new_tokens", 256))
    method = resolve_method(run, new_tokens)
    parameters = {p: p.numel() for p in model.parameters()}
    count, size = sum(parameters.values()), dtype.itemsize
    weights = sum(n * p.element_size() for p, n in parameters.items())
    trained = {p: n for p, n in parameters.items() if p.requires_grad}
    trainable = sum(trained.values())
    gradients = sum(n * p.element_size() for p, n in trained.items())
    low = bool(run.optim.weight_format) or (run.optim.master_weights and any(p.element_size() < 4 for p in trained))
    states = 12 * trainable if low else 2 * gradients
    whole = 12 * count if run.optim.master_weights and dtype.itemsize < 4 else 2 * weights  # if all weights are trained
    responses = run.rollout.prompts * run.rollout.group_size
    per_device = math.ceil(responses / devices)
    length = prompt_tokens + new_tokens
    decoded = min(run.rollout.max_batch or per_device, per_device)
    micro = min(run.optim.micro_batch or math.ceil(per_device / run.optim.num_minibatches), per_device)

    H, V, L = hf.hidden_size, hf.vocab_size, hf.num_hidden_layers
    heads = hf.num_attention_heads
    head_dim = size_of(hf, "head_dim") or H // heads
    kv_token = 2 * L * (size_of(hf, "num_key_value_heads") or heads) * head_dim * size
    experts, top_k = experts_of(hf)
    routes_token = len(sites) * top_k * packed_dtype(experts).itemsize
    chunk = min(default_chunk(V, H), micro * new_tokens)

    sharded = devices > 1 and run.distributed.strategy != "ddp"

    def shard(total: int) -> int:
        return math.ceil(total / devices) if sharded else total

    needs = [
        Need("policy weights", shard(weights), "always", f"{count:,} parameters, {run.model.dtype}"),
        Need("optimizer", shard(states), "always", f"Adam{' and fp32 master weights' if low else ''}, {trainable:,}"),
        Need("gradients", shard(gradients), "update"),
    ]
    shared = run.model.lora is not None and not run.optim.reference_reset_every
    for name, wanted in (("reference", method.needs_reference), ("initial policy", method.source == "initial")):
        if wanted:
            note = "the policy with its adapters off" if shared else ""
            needs.append(Need(name, 0 if shared else shard(weights), "always", note))
    engine = run.rollout.engine
    if engine.kind == "hf" or (engine.kind == "vllm" and vllm_url(engine) is None):
        note = engine.dtype + (", and its KV cache beside" if engine.kind == "vllm" else "")
        note += ", whole on every rank" if devices > 1 else ""
        needs.append(Need("rollout engine", count * DTYPES[engine.dtype].itemsize, "always", note))
    for name, wanted in (
        ("value model", method.advantage == "gae" and run.value.model == "separate"),
        ("reward model", run.reward.model == "learned"),
    ):
        if wanted:
            needs.append(Need(name, shard(2 * weights + whole), "always", "weights, gradients and Adam"))
    if sharded:
        embeddings = V * H * (1 if getattr(hf, "tie_word_embeddings", False) else 2)
        layer = (count - embeddings) / L * size
        needs.append(Need("gathered layers", math.ceil(2 * layer), "always", "two at a time, weights alone"))
    note = f"estimate; {micro} responses of {length} tokens"
    note += ", checkpointed" if run.model.gradient_checkpointing else ""
    waiting = (1 + run.rollout.lag) * responses * length  # every rank holds every batch
    needs += [
        Need("routes", waiting * routes_token, "always", f"{routes_token} bytes a token"),
        Need("KV cache", decoded * length * kv_token, "sampling", f"{decoded} responses, {kv_token} bytes a token"),
        Need("sampling logits", decoded * V * (size + 16), "sampling"),
        Need("logits of a chunk", chunk * V * (8 + size) + 4 * V * H, "update", f"{chunk} tokens at a time"),
        Need("activations", activation_bytes(hf, micro * length, length, run.model), "update", note),
    ]
    if run.probe.every:
        probed = min(run.probe.sequences, responses) * new_tokens
        note = f"{probed} tokens in fp32, as before the updates and now"
        needs.append(Need("router logits of the probe", 8 * probed * len(sites) * experts, "probing", note))
    if method.weighs_routes:
        kept, said = 4 * len(sites) * top_k, size * len(sites) * experts
        needs += [
            Need("router scores", waiting * kept, "always", f"{kept} bytes a token"),
            Need("router logits", micro * length * said, "update", f"{said} bytes a token"),
        ]
    if run.method.replay == "PR2":
        seen = 4 * len(sites) * (H + 2 * experts)
        needs += [
            Need("router inputs and logits", waiting * seen, "always", f"{seen} bytes a token, for the predictors"),
            Need("predictors", 16 * len(sites) * H * experts, "always", "weights, gradients and Adam, fp32"),
        ]
    if run.probe.decompose_every:
        needs.append(Need("weights of the decomposition", shard(weights), "update"))
    if run.probe.gradients:
        needs.append(Need("gradients of the probe", 4 * shard(weights), "update"))
    copies = sum(need.bytes for need in needs if need.name in ("reference", "initial policy"))
    kept = copies * (devices if sharded else 1)
    scorers = sum(need.name in ("value model", "reward model") for need in needs)
    # If sharded, only rank 0 loads the weights and sends the other ranks their shards; it gathers each file of a
    # checkpoint whole.
    loaded = weights + kept + scorers * weights + sum(need.bytes for need in needs if need.name == "rollout engine")
    loaded *= 1 if sharded else devices
    return Plan(
        architecture=f"{hf.model_type}, {L} layers, {experts} experts, {top_k} per token",
        parameters=count,
        trainable=trainable,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        routes_bytes_per_token=routes_token,
        kv_bytes_per_token=kv_token,
        needs=tuple(needs),
        host_bytes=max(loaded, weights, states, whole if scorers else 0),
        checkpoint_bytes=weights + states + kept + scorers * (weights + whole),
        kept_bytes=weights * (1 + run.optim.steps // run.keep_policy_every) if run.keep_policy_every else 0,
    )


def activation_bytes(hf: Any, tokens: int, length: int, config: ModelConfig) -> int:
    """Return an estimate of the bytes that the forward pass keeps for the backward pass in all layers.

    The forward pass has `tokens` tokens in sequences of `length` tokens. Counted per token and layer: two norms (fp32
    inside), queries, keys, values and attention's output, the router's probabilities, and for each of K experts the
    token's copy, gate and up, their product and the result. With gradient checkpointing: each layer's input, and the
    activations of the one layer that is computed again.
    """
    H, heads = hf.hidden_size, hf.num_attention_heads
    experts, K = experts_of(hf)
    ffn = size_of(hf, "moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
    head_dim = size_of(hf, "head_dim") or H // heads
    size = DTYPES[config.dtype].itemsize
    attention = 4 * H + 6 * heads * head_dim
    if config.attn_implementation == "eager":
        attention += 2 * heads * length
    layer = tokens * (size * (attention + K * (3 * H + 5 * ffn)) + 4 * (4 * H + 3 * experts))
    layers = hf.num_hidden_layers
    return layers * tokens * H * size + layer if config.gradient_checkpointing else layers * layer


def _task(run: RunConfig) -> tuple[Any, int]:
    """Return the task (None if it cannot be made) and the length in tokens of the longest of 64 of its prompts.

    The length is estimated from characters for all but the tiny model; `PROMPT_TOKENS` if the task gives no prompts.
    """
    task = None
    try:
        task = make_task(run.task)
        longest = max(len(problem.prompt) for problem in problems_of(task, random.Random(0), 64))
    except TaskError:
        return task, PROMPT_TOKENS
    return task, longest if run.model.path is None else math.ceil(longest / CHARACTERS_PER_TOKEN) + 16
