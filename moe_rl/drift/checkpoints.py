"""Checkpoints of one architecture: which are meant, whether they can be compared, and the models in them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import has_file

from moe_rl.checks import sha256_of_bytes, unreadable_weights
from moe_rl.drift.adapters import CONFIG, Source, merged_with, put_on
from moe_rl.drift.errors import DriftError
from moe_rl.measure.noise_floor import free_bytes
from moe_rl.policy.models import (
    DTYPES,
    ModelConfig,
    but_holds,
    found_path,
    load_model,
    load_tokenizer,
    pad_within,
    taken_for_hub_id,
    vocabulary_of,
    weights_sha256,
)
from moe_rl.policy.tiny import ModelError
from moe_rl.processes import suit_model
from moe_rl.routing import UnsupportedModelError, routing_sites
from moe_rl.settings import differences

SIZES = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_experts_per_token", "moe_topk",
    "moe_k", "num_hidden_layers", "hidden_size", "vocab_size",
)  # fmt: skip
_NO_MATTER = re.compile(
    "^_|architectures|version|dtype|use_cache|token_id|^output_(attentions|hidden_states|router_logits)|return_dict"
    "|id2label|label2id|problem_type|^chunk_size|initializer|aux_loss|dropout|input_jitter|moe_jitter|tie_word"
    "|quantization|auto_map|pretraining_tp|gradient"
)
_BY_POSITIONS = re.compile("dynamic|longrope|yarn")
"""Rotary frequencies that may depend on the number of positions, which is otherwise no setting."""
SAMPLE = ("The quick brown fox.", " 12+34=46\n", "(a*b) - c_d", "naïve Ω 漢字 🙂")
CHECKPOINT = "checkpoint"
"""Where a run folder of ours has its model."""


def chosen(given: Sequence[str]) -> list[str]:
    """Every checkpoint that the arguments mean, in order.

    - a folder with a config.json or of LoRA adapters (adapter_config.json), or a hub id: itself
    - a run folder of ours: its checkpoint
    - any other folder: all checkpoints right inside it, in the order of the numbers in their names (checkpoint-500
      before checkpoint-1000); one argument that is a checkpoint and holds others (a trainer's output folder): these,
      then itself.

    Raises:
        DriftError: a folder without checkpoints; fewer than two in all.
    """
    found = []
    for path in given:
        found += _inside(path, alone=len(given) == 1)
    if len(found) < 2:
        what = f"only {found[0]}" if found else "none"
        raise DriftError(f"two or more checkpoints are compared, and there is {what}: drift OLD NEW [...], or a folder")
    return found


def _inside(path: str, alone: bool) -> list[str]:
    folder = Path(path).expanduser()
    own = _is_checkpoint(folder)
    if not folder.is_dir() or (own and not alone):
        return [path]
    if not own and _is_checkpoint(folder / CHECKPOINT):
        return [str(folder / CHECKPOINT)]
    inside = (child for child in folder.glob("[!.]*") if _is_checkpoint(child))  # a hidden one is being written
    children = sorted(inside, key=lambda child: in_order(child.name))
    if own:
        return [*map(str, children), path]
    if not children and not alone:
        return [path]  # what is wrong with it is said where it is loaded, by its place
    if not children:
        raise DriftError(
            f"{folder.absolute()} holds no checkpoint (no config.json or {CONFIG} in it, nor in a folder right inside)"
            f"{but_holds(folder)}"
        )
    return [str(child) for child in children]


def in_order(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which step-2 comes before step-10.

    >>> sorted(["step-10", "step-2", "final"], key=in_order)
    ['final', 'step-2', 'step-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts if part]


def steps_of(names: Sequence[str]) -> list[int] | None:
    """The last number in every name, where these grow from name to name; else None.

    >>> steps_of(["ckpt-500", "ckpt-1000"]), steps_of(["base", "ckpt-1000"])
    ([500, 1000], None)
    """
    numbers = [re.findall(r"\d+", name) for name in names]
    if not all(numbers):
        return None
    steps = [int(found[-1]) for found in numbers]
    return steps if all(a < b for a, b in pairwise(steps)) else None


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", CONFIG))


@dataclass(frozen=True)
class Checkpoints:
    """What is known of them before their weights are read."""

    tokenizer: Any
    vocabulary: int
    """How many tokens they have an embedding of."""
    model_type: str
    sites: tuple[str, ...]
    parameters: int
    max_length: int | None
    other_settings: tuple[str, ...]
    """Where a configuration differs from the first one's in what may change what the weights compute; in words."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The model that each of those which are adapters is put on."""
    two_templates: str = ""
    """Which two of them write chats by different templates, in words; empty where all agree."""


@contextmanager
def named(which: str) -> Iterator[None]:
    """Errors of loading say which of them it was."""
    try:
        yield
    except ModelError as error:
        raise DriftError(str(error).replace("model.path", which)) from error


def check(sources: Mapping[str, Source], tokenizer: str | None = None, trust_remote_code: bool = False) -> Checkpoints:
    """Whether checkpoints can be compared, from configurations, tokenizers and what files there are; no weights are
    read. Raises DriftError.

    sources: what each is called in messages (OLD, NEW) -> where it is; all are held against the first.
    """
    (first, source), *others = sources.items()
    a = _skeleton(first, source.base, trust_remote_code)
    other_settings = list[str]()
    for name, source in others:
        b = _skeleton(name, source.base, trust_remote_code)
        if type(a) is not type(b):
            raise DriftError(
                f"two architectures: {first} is {type(a).__name__}, {name} is {type(b).__name__}. Routes can only be "
                "compared, and replayed, between checkpoints of one architecture."
            )
        for what, (one, other) in differences(_architecture(a), _architecture(b)).items():
            raise DriftError(f"two architectures: {what} is {one} in {first} and {other} in {name}")
        ours, theirs = (_flat(_settings(model.config.to_dict())) for model in (a, b))
        differ = sorted(differences(ours, theirs).items())
        other_settings += [f"{key} is {one} in {first} and {other} in {name}" for key, (one, other) in differ]
    vocabulary = vocabulary_of(a)
    shared, two_templates = _tokenizer(sources, tokenizer, trust_remote_code)
    return Checkpoints(
        pad_within(shared, vocabulary),
        vocabulary,
        a.config.model_type,
        tuple(site.name for site in routing_sites(a)),
        sum(parameter.numel() for parameter in a.parameters()),
        getattr(a.config, "max_position_embeddings", None),
        tuple(other_settings),
        {which: source.base for which, source in sources.items() if source.adapter is not None},
        two_templates,
    )


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, without what no forward in eval mode depends on."""
    positions = _BY_POSITIONS.search(str([given.get(name) for name in ("rope_parameters", "rope_scaling")]))
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in given.items()
        if not _NO_MATTER.search(str(name)) and (positions or not str(name).startswith("max_position"))
    }


def experts_per_token(config: Any) -> int:
    """What a configuration says; of a number for each layer the largest, 1 where it says nothing.

    >>> from transformers import DbrxConfig
    >>> experts_per_token(DbrxConfig(ffn_config={"moe_top_k": 4}))
    4
    """
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    places = (config, getattr(config, "ffn_config", None))
    given = next((getattr(place, name) for place in places for name in names if getattr(place, name, None)), 1)
    return max(given) if isinstance(given, list) else int(given)


def _flat(given: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Settings within others by dotted names.

    >>> _flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= _flat(value, f"{place}{name}.") if isinstance(value, dict) else {f"{place}{name}": value}
    return found


def _architecture(model: Any) -> dict[str, Any]:
    """What is alike in checkpoints that can be compared: sizes, then the shape of every tensor."""
    sizes = {size: getattr(model.config, size, None) for size in SIZES}
    sizes |= {"the number of experts for a token": experts_per_token(model.config.get_text_config())}  # by any name
    return sizes | {name: tuple(tensor.shape) for name, tensor in sorted(model.state_dict().items())}


def check_device(name: str | None) -> torch.device:
    """A device that is there; None takes the GPU if there is one. Raises DriftError."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DriftError(f"--device: unknown device {name!r}; expected cpu, cuda, cuda:1, ... or mps") from error
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= there.get(device.type, 0):
        found = ", ".join(f"{kind} ({count})" if kind == "cuda" else kind for kind, count in there.items() if count)
        raise DriftError(f"--device: {name} is not there; this machine has: {found}")
    return device


def check_dtype(name: str, option: str = "--dtype") -> str:
    if name not in DTYPES:
        raise DriftError(f"{option}: unknown {name!r}; expected one of {', '.join(DTYPES)}")
    return name


def fits_twice(parameters: int, dtype: str, device: torch.device) -> bool:
    """Whether both models fit into what is free now, with a fifth to spare for activations; True where unknown."""
    free = free_bytes(device)
    return free is None or 2 * parameters * DTYPES[dtype].itemsize < 0.8 * free


def load(
    which: str,
    source: Source,
    dtype: str,
    device: torch.device,
    trust_remote_code: bool,
    experts: str | None = None,
    merge: bool = True,
) -> nn.Module:
    """One of the models, in eval mode on its device; `which` names it in messages. experts: their implementation.
    merge: whether adapters are merged, in `dtype`, or stay beside the weights."""
    base = source.base
    config = ModelConfig(path=base, dtype=dtype, experts_implementation=experts, trust_remote_code=trust_remote_code)
    with named(which):
        model = load_model(base, config)
    if source.adapter is not None:
        model = (merged_with if merge else put_on)(which, model, source)
    return suit_model(model.to(device)).eval()


def fingerprint(model: Any) -> str:
    """SHA-256 of a model's weights in their dtype and of the settings that its forward depends on: two models of which
    it is equal say the same of every text, but for kernels."""
    settings = json.dumps(_settings(model.config.to_dict()), sort_keys=True, default=str)
    return sha256_of_bytes(f"{weights_sha256(model)} {settings}".encode())


def _check_weights(which: str, path: str, name: str | None = None) -> None:
    """Raises DriftError where weights are missing, cut off or may not be read, as far as names and headers tell. name:
    of their file, where it is not one of transformers'."""
    names = [name] if name else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    folder = Path(path)
    try:
        why = unreadable_weights(folder)
        if not folder.is_dir():  # what is downloaded may be gated since; a hub that does not answer: loading says it
            any(has_file(path, name, local_files_only=local) for local in (True, False) for name in names)
    except OSError as error:  # a gated model, and one that is gone
        why = " ".join(str(error).split())
    if why:
        raise DriftError(f"{which}: the weights of {path} cannot be loaded: {why}")


def _skeleton(which: str, path: str, trust_remote_code: bool) -> Any:
    """The model without weights, which are there."""
    with named(which):
        path = found_path(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # config, hub and import errors share no base class
        raise DriftError(
            f"{which}: {path} is no causal language model that transformers can build: {error}{taken_for_hub_id(path)}"
        ) from error
    try:
        routing_sites(model)
    except UnsupportedModelError as error:
        raise DriftError(f"{which}: {path} is no Mixture-of-Experts: {error}") from error
    _check_weights(which, path, getattr(config, "transformers_weights", None))
    return model


def _tokenizer(sources: Mapping[str, Source], chosen: str | None, trust_remote_code: bool) -> tuple[Any, str]:
    """The tokenizer of all, and `two_templates`; one that was named explicitly is taken at the user's word."""
    if chosen is not None:
        with named("--tokenizer"):
            return load_tokenizer(chosen, trust_remote_code), ""
    first, ours, two_templates = "", None, ""
    for which, source in sources.items():
        with named(which):
            try:
                theirs = load_tokenizer(source.tokenizer, trust_remote_code)
            except ModelError as error:
                whom = {1: "one", 2: "one that serves both"}.get(len(sources), "one for all")
                raise ModelError(f"{error} Or name {whom}: --tokenizer PATH.") from error
        if ours is None:
            first, ours = which, theirs
            continue
        _same_tokens(ours, theirs, first, which)
        if getattr(ours, "chat_template", None) != getattr(theirs, "chat_template", None):
            two_templates = two_templates or f"{first} and {which}"
    return ours, two_templates


def _same_tokens(ours: Any, theirs: Any, first: str, which: str) -> None:
    remedy = "If one of them is right for both, name it: --tokenizer PATH."
    if differ := sorted(differences(ours.get_vocab(), theirs.get_vocab()).items()):
        token, (a, b) = differ[0]
        raise DriftError(
            f"two tokenizers: {len(differ)} tokens differ, the first is {token!r} ({a} in {first}, {b} in {which}). "
            f"{remedy}"
        )
    for text in SAMPLE:
        if _encoded(ours, text) != _encoded(theirs, text):
            raise DriftError(f"two tokenizers: one vocabulary, but {text!r} becomes other tokens. {remedy}")


def _encoded(tokenizer: Any, text: str) -> list[int] | None:
    """None where the text has characters that the tokenizer does not know."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # tokenizers raises nothing more specific
        return None
