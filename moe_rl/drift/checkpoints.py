"""Two checkpoints of one architecture: checked by their configurations, then loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.drift.errors import DriftError
from moe_rl.measure.noise_floor import free_bytes
from moe_rl.policy.models import DTYPES, ModelConfig, ModelError, check_path, load_model, load_tokenizer
from moe_rl.routing import UnsupportedModelError, routing_sites

SIZES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
)
SAMPLE = ("The quick brown fox.", " 12+34=46\n", "(a*b) - c_d", "naïve Ω 漢字 🙂")


@dataclass(frozen=True)
class Checkpoints:
    """What is known of the pair before its weights are read."""

    old: str
    new: str
    tokenizer: Any
    model_type: str
    sites: tuple[str, ...]
    parameters: int
    max_length: int | None


@contextmanager
def named(which: str) -> Iterator[None]:
    """Errors of loading say which of the two it was."""
    try:
        yield
    except ModelError as error:
        raise DriftError(str(error).replace("model.path", which)) from error


def check(old: str, new: str, tokenizer: str | None = None, trust_remote_code: bool = False) -> Checkpoints:
    """Whether the two can be compared, from configurations and tokenizers alone. Raises DriftError."""
    skeletons = {}
    for which, path in (("OLD", old), ("NEW", new)):
        with named(which):
            skeletons[which] = _skeleton(which, check_path(path), trust_remote_code)
    a, b = skeletons["OLD"], skeletons["NEW"]
    if type(a) is not type(b):
        raise DriftError(
            f"two architectures: OLD is {type(a).__name__}, NEW is {type(b).__name__}. Routes can only be "
            "compared, and replayed, between checkpoints of one architecture."
        )
    for name in SIZES:
        ours, theirs = (getattr(model.config, name, None) for model in (a, b))
        if ours != theirs:
            raise DriftError(f"two architectures: {name} is {ours} in OLD and {theirs} in NEW")
    shapes = [{name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} for model in (a, b)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        if shapes[0].get(name) != shapes[1].get(name):
            raise DriftError(
                f"two architectures: {name} is {shapes[0].get(name)} in OLD and {shapes[1].get(name)} in NEW"
            )
    sites = tuple(site.name for site in routing_sites(a))
    length = getattr(a.config, "max_position_embeddings", None)
    return Checkpoints(
        old,
        new,
        _tokenizer(old, new, tokenizer, trust_remote_code),
        a.config.model_type,
        sites,
        sum(parameter.numel() for parameter in a.parameters()),
        length,
    )


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


def check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise DriftError(f"--dtype: unknown {name!r}; expected one of {', '.join(DTYPES)}")
    return name


def fits_twice(parameters: int, dtype: str, device: torch.device) -> bool:
    """Whether both models fit into what is free now, with a fifth to spare for activations; True where unknown."""
    free = free_bytes(device)
    return free is None or 2 * parameters * DTYPES[dtype].itemsize < 0.8 * free


def load(which: str, path: str, dtype: str, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """The model of OLD or NEW, in eval mode on its device."""
    with named(which):
        model = load_model(path, ModelConfig(path=path, dtype=dtype, trust_remote_code=trust_remote_code))
    return model.to(device).eval()


def _skeleton(which: str, path: str, trust_remote_code: bool) -> Any:
    """The model without weights."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # config, hub and import errors share no base class
        raise DriftError(f"{which}: {path} is no causal language model that transformers can build: {error}") from error
    try:
        routing_sites(model)
    except UnsupportedModelError as error:
        raise DriftError(f"{which}: {path} is no Mixture-of-Experts: {error}") from error
    return model


def _tokenizer(old: str, new: str, chosen: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of both; one that was named explicitly is taken at the user's word."""
    if chosen is not None:
        with named("--tokenizer"):
            return load_tokenizer(chosen, trust_remote_code)
    found = {}
    for which, path in (("OLD", old), ("NEW", new)):
        with named(which):
            try:
                found[which] = load_tokenizer(path, trust_remote_code)
            except ModelError as error:
                raise ModelError(f"{error} Or name one that serves both: --tokenizer PATH.") from error
    ours, theirs = found["OLD"], found["NEW"]
    a, b = ours.get_vocab(), theirs.get_vocab()
    differ = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
    if differ:
        token = differ[0]
        raise DriftError(
            f"two tokenizers: {len(differ)} tokens differ, the first is {token!r} ({a.get(token)} in OLD, "
            f"{b.get(token)} in NEW). If one of them is right for both, name it: --tokenizer PATH."
        )
    for text in SAMPLE:
        if _encoded(ours, text) != _encoded(theirs, text):
            raise DriftError(
                f"two tokenizers: one vocabulary, but {text!r} becomes other tokens. If one of them is right for both, "
                "name it: --tokenizer PATH."
            )
    return ours


def _encoded(tokenizer: Any, text: str) -> list[int] | None:
    """None where the text has characters that the tokenizer does not know."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # tokenizers raises nothing more specific
        return None
