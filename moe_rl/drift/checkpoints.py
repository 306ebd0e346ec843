"""Checkpoints of one architecture: finding them, checking that they can be compared, and loading their models."""

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
from moe_rl.drift.adapters import CONFIG, Source, merged_with, with_adapters
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
"""Kinds of rotary frequencies that may depend on the maximal number of positions; only with these is it compared."""
SAMPLE = ("The quick brown fox.", " 12+34=46\n", "(a*b) - c_d", "naïve Ω 漢字 🙂")
CHECKPOINT = "checkpoint"
"""Name of the folder in a run folder of moe_rl that holds its model."""


def chosen(given: Sequence[str]) -> list[str]:
    """Return every checkpoint that the arguments of the command line mean, in order.

    - a folder with a config.json or of LoRA adapters (adapter_config.json), or a hub id: means itself
    - a run folder of moe_rl: means its checkpoint
    - any other folder: means all checkpoints right inside it, in the order of the numbers in their names
      (checkpoint-500 before checkpoint-1000)
    - a checkpoint that holds others (a trainer's output folder), if it is the only argument: means these, then itself

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
    """Return the checkpoints that one argument of `chosen` means. alone: whether it is the only argument."""
    folder = Path(path).expanduser()
    own = _is_checkpoint(folder)
    if not folder.is_dir() or (own and not alone):
        return [path]
    if not own and _is_checkpoint(folder / CHECKPOINT):
        return [str(folder / CHECKPOINT)]
    inside = (child for child in folder.glob("[!.]*") if _is_checkpoint(child))  # hidden: still being written
    children = sorted(inside, key=lambda child: in_order(child.name))
    if own:
        return [*map(str, children), path]
    if not children and not alone:
        return [path]  # `check` will say what is wrong with it, and which argument it is
    if not children:
        raise DriftError(
            f"{folder.absolute()} holds no checkpoint (no config.json or {CONFIG} in it, nor in a folder right inside)"
            f"{but_holds(folder)}"
        )
    return [str(child) for child in children]


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which step-2 comes before step-10.

    >>> sorted(["step-10", "step-2", "final"], key=in_order)
    ['final', 'step-2', 'step-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts if part]


def steps_of(names: Sequence[str]) -> list[int] | None:
    """Return the last number in each name if these numbers grow from name to name, else None.

    >>> steps_of(["ckpt-500", "ckpt-1000"]), steps_of(["base", "ckpt-1000"])
    ([500, 1000], None)
    """
    numbers = [re.findall(r"\d+", name) for name in names]
    if not all(numbers):
        return None
    steps = [int(found[-1]) for found in numbers]
    return steps if all(a < b for a, b in pairwise(steps)) else None


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a config.json or adapter_config.json."""
    return any((folder / name).is_file() for name in ("config.json", CONFIG))


@dataclass(frozen=True)
class Checkpoints:
    """Facts about the checkpoints of a comparison that are known before their weights are read."""

    tokenizer: Any
    vocabulary: int
    """How many tokens the models have an embedding of."""
    model_type: str
    sites: tuple[str, ...]
    parameters: int
    max_length: int | None
    other_settings: tuple[str, ...]
    """In words, each setting that differs from the first checkpoint's and may change what the weights compute."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The name of each checkpoint that is adapters -> the model that they are put on."""
    two_templates: str = ""
    """In words, the first two checkpoints with different chat templates; empty if all agree."""


@contextmanager
def named(which: str) -> Iterator[None]:
    """Context manager: turn ModelErrors of loading into DriftErrors that name the checkpoint `which`, or the option."""
    try:
        yield
    except ModelError as error:
        said = str(error).replace("model.experts_implementation", "--experts-implementation")
        raise DriftError(said.replace("model.path", which)) from error


def check(sources: Mapping[str, Source], tokenizer: str | None = None, trust_remote_code: bool = False) -> Checkpoints:
    """Raise DriftError if checkpoints cannot be compared, else return what is known about them.

    Configurations, tokenizers, and names and headers of files are looked at; no weights are read. sources: the name of
    each checkpoint in messages (OLD, NEW) -> its place; all are compared with the first. tokenizer: the path of one
    that serves all; None takes theirs, which must agree.
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
    """Return a configuration without the settings that do not matter to a forward in eval mode."""
    positions = _BY_POSITIONS.search(str([given.get(name) for name in ("rope_parameters", "rope_scaling")]))
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in given.items()
        if not _NO_MATTER.search(str(name)) and (positions or not str(name).startswith("max_position"))
    }


def experts_per_token(config: Any) -> int:
    """Return the number of experts per token of a configuration: the largest of all layers, 1 if it names none.

    >>> from transformers import DbrxConfig
    >>> experts_per_token(DbrxConfig(ffn_config={"moe_top_k": 4}))
    4
    """
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    places = (config, getattr(config, "ffn_config", None))
    given = next((getattr(place, name) for place in places for name in names if getattr(place, name, None)), 1)
    return max(given) if isinstance(given, list) else int(given)


def _flat(given: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return nested settings as one flat mapping by dotted names.

    >>> _flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= _flat(value, f"{place}{name}.") if isinstance(value, dict) else {f"{place}{name}": value}
    return found


def _architecture(model: Any) -> dict[str, Any]:
    """Return what comparable checkpoints have in common: sizes, then the shape of every tensor, by name."""
    sizes = {size: getattr(model.config, size, None) for size in SIZES}
    sizes |= {"the number of experts for a token": experts_per_token(model.config.get_text_config())}  # by any name
    return sizes | {name: tuple(tensor.shape) for name, tensor in sorted(model.state_dict().items())}


def check_device(name: str | None) -> torch.device:
    """Return the device of this name; None: the GPU if there is one, else the CPU. Raises DriftError: not there."""
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
    """Return the name of a dtype. Raises DriftError, which names `option`: it is unknown."""
    if name not in DTYPES:
        raise DriftError(f"{option}: unknown {name!r}; expected one of {', '.join(DTYPES)}")
    return name


def fits_twice(parameters: int, dtype: str, device: torch.device) -> bool:
    """Return whether two models fit into the memory that is free now, less a fifth for activations; True if unknown."""
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
    """Load a checkpoint's model in eval mode onto a device. Raises DriftError.

    which: its name in messages. experts: the experts implementation; None: transformers' choice. merge: whether
    adapters are merged into the weights, in `dtype`, or stay beside them."""
    base = source.base
    config = ModelConfig(path=base, dtype=dtype, experts_implementation=experts, trust_remote_code=trust_remote_code)
    with named(which):
        model = load_model(base, config)
    if source.adapter is not None:
        model = (merged_with if merge else with_adapters)(which, model, source)
    return suit_model(model.to(device)).eval()


def fingerprint(model: Any) -> str:
    """Return the SHA-256 sum of a model's weights in their dtype and of the settings that its forward depends on.

    Two models with equal sums compute the same for every text, but for the arithmetic of kernels."""
    settings = json.dumps(_settings(model.config.to_dict()), sort_keys=True, default=str)
    return sha256_of_bytes(f"{weights_sha256(model)} {settings}".encode())


def _check_weights(which: str, path: str, name: str | None = None) -> None:
    """Raise DriftError if weights are missing, cut off or may not be read, as far as names and headers of files tell.

    name: of the file of weights, if it is not one of transformers' usual names."""
    names = [name] if name else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    folder = Path(path)
    try:
        why = unreadable_weights(folder)
        # Locally first, as a downloaded model may be gated by now; if the hub does not answer, loading will say so.
        if not folder.is_dir():
            any(has_file(path, name, local_files_only=local) for local in (True, False) for name in names)
    except OSError as error:  # of a gated model, or one that was deleted
        why = " ".join(str(error).split())
    if why:
        raise DriftError(f"{which}: the weights of {path} cannot be loaded: {why}")


def _skeleton(which: str, path: str, trust_remote_code: bool) -> Any:
    """Return the model of a checkpoint on the meta device, without weights.

    Raises DriftError: transformers cannot build it, it is no Mixture-of-Experts, or its weights are not there.
    """
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
    """Return the tokenizer of all checkpoints, and `Checkpoints.two_templates`. Raises DriftError: tokenizers differ.

    chosen: a tokenizer that the user names for all; it is taken without a comparison.
    """
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
    """Raise DriftError if two tokenizers differ in vocabulary or in the token ids of a text of SAMPLE."""
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
    """Return the token ids of a text, or None if it has characters that the tokenizer does not know."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # tokenizers raises nothing more specific
        return None
