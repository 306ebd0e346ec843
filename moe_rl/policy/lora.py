"""Low-rank adapters (LoRA) by PEFT, an optional package: they train few weights of a large policy.

The routers' selection changes even if the routers are frozen, because the adapters change the routers' inputs.
"""

import copy
import importlib.util
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from moe_rl.objectives.bounds import Count, Positive, Seed, check_settings
from moe_rl.policy.tiny import ModelError
from moe_rl.routing.sites import find_sites
from moe_rl.yaml_files import parse_yaml

INSTALL = "pip install '.[peft]' in the checkout of moe_rl"


@dataclass(frozen=True)
class LoraConfig:
    """Settings of low-rank adapters: W + (alpha / rank) B A, B = 0 at first (arXiv 2106.09685, section 4.1).

    There is no dropout, because old and new policy would differ by what it draws.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear modules, by the end of their names."""
    target_parameters: tuple[str, ...] = ()
    """Weights that are not a Linear's, by the end of their names: `mlp.experts.gate_up_proj` and
    `mlp.experts.down_proj` hold all experts of a layer. Each forward then makes the whole adapted weight."""
    train_router: bool = False
    """Also train the routers: whole copies of their (small) weights, while the originals are kept for the reference."""
    seed: Seed = 0
    """Seed of the adapters' initial weights; it does not follow the run's seed."""


def add_lora(model: Any, config: LoraConfig) -> Any:
    """Return the model with trainable adapters in fp32 (and copies of routers, with `train_router`), all else frozen.

    Raises:
        ModelError: PEFT is missing; a rank that makes no sense; names that the model does not have.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"model.lora: the peft package is not installed. {INSTALL}, or leave model.lora out.")
    import peft

    check_settings(config, "model.lora.", ModelError)
    _check_targets(model, config)
    routers = [site.name for site in find_sites(model)] if config.train_router else None
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a factor; whole only by PEFT's annotation
        target_modules=list(config.target_modules),
        target_parameters=list(config.target_parameters) or None,
        modules_to_save=routers,
    )
    try:
        with torch.random.fork_rng(devices=[]), peft_warnings():
            torch.manual_seed(config.seed)
            return peft.get_peft_model(model, settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"model.lora: PEFT cannot adapt {type(model).__name__}: {error}") from error


@contextmanager
def peft_warnings() -> Iterator[None]:
    """Context manager: silence PEFT's warnings of names that transformers renamed and of problems that moe_rl refuses
    itself afterwards, but not of unknown settings, which a later version wrote."""
    with warnings.catch_warnings():
        for kind in (FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("default", "Unexpected keyword arguments")
        yield


def refuse_tied(policy: Any) -> None:
    """Raise ModelError if an adapted weight is used in two places of the model (tied): merging would change both."""
    weights = list(policy.named_parameters(remove_duplicate=False))
    places = Counter(id(weight) for _, weight in weights)
    for name, weight in weights:
        if places[id(weight)] > 1 and (".base_layer." in name or ".original_module." in name):
            raise ModelError(f"it adapts {name}, a weight that the model uses in two places (tied)")


def merged(policy: Any) -> Any:
    """Return the model of a policy with its adapters merged: weights W + (alpha / rank) B A, rounded to W's dtype, and
    the trained copies of routers in place of the originals. Raises ModelError if the adapters cannot be merged."""
    refuse_tied(policy)
    try:
        with peft_warnings():
            return policy.merge_and_unload(safe_merge=True)
    # ValueError: values not finite; RuntimeError: a bias of adapters where the layer has none, or a kind of adapters
    # that cannot be merged; AttributeError: layers of EETQ.
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"PEFT's merge_and_unload refuses: {error}") from error


def written_by_lora_run(checkpoint: Path) -> bool:
    """Return whether a run with `model.lora` wrote the folder's weights: a model and adapters, by PEFT's names."""
    try:
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            return any(".lora_A." in name for name in file.keys())  # noqa: SIM118  # `file` is no mapping
    except (OSError, SafetensorError):  # missing, or damaged, which loading the model will report
        return False


def merged_run(model: Any, checkpoint: Path) -> Any:
    """Load a checkpoint that a run with `model.lora` wrote, and return the model with the adapters merged. model: a
    model of the checkpoint's configuration with any weights; it is changed. Raises ModelError if the run's settings are
    not beside the folder or do not fit, or the adapters cannot be merged."""
    settings = checkpoint.absolute().parent / "config.yaml"
    where = f"model.path: {checkpoint} is of a run with model.lora"
    try:
        policy = add_lora(model, LoraConfig(**parse_yaml(settings.read_bytes())["model"]["lora"]))
        policy.load_state_dict(load_file(checkpoint / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, ModelError) as error:
        why = " ".join(str(error).split())
        raise ModelError(f"{where}, and with the settings in {settings} it makes no model: {why[:300]}") from error
    try:
        return merged(policy).requires_grad_(True)  # PEFT leaves the weights frozen, as beside adapters
    except ModelError as error:
        raise ModelError(f"{where}, which cannot be merged: {error}") from error


def frozen_reference(model: Any, replaceable: bool = False) -> nn.Module:
    """Return a frozen reference policy with the present weights; its outputs never require grad. For a LoRA policy (at
    its start) it is the same weights with the adapters off; for any other policy, or if `replaceable` (the reference's
    weights will be replaced), a copy."""
    if adapted(model) and not replaceable:
        return AdaptersOff(model)
    return copy.deepcopy(model).eval().requires_grad_(False)


def adapted(model: nn.Module) -> bool:
    """Return whether the model has PEFT adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


class AdaptersOff(nn.Module):
    """A reference policy that runs a LoRA policy's own weights without its adapters, and costs no memory.

    The reference shares the policy's modules, so it moves to other devices with them, and has no state of its own to
    save.
    """

    def __init__(self, policy: Any):
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trained = [(p, p.requires_grad) for p in self.policy.parameters()]
        try:
            with self.policy.disable_adapter():
                return self.policy(*args, **kwargs)
        finally:  # because PEFT switches `requires_grad` on and off with the adapters
            for parameter, flag in trained:
                parameter.requires_grad_(flag)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load nothing: the reference has no weights but the policy's own."""
        return torch.nn.modules.module._IncompatibleKeys([], [])


def _check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Raise ModelError for a target name that matches nothing, or if there are no targets. PEFT accepts names that
    match nothing as long as another name matches."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name for name, _ in model.named_parameters()}
    for what, wanted, known in (
        ("target_modules", config.target_modules, linear),
        ("target_parameters", config.target_parameters, weights),
    ):
        for name in wanted:
            if not any(full == name or full.endswith("." + name) for full in known):
                ends = sorted({full.rpartition(".")[2] for full in known} if what == "target_modules" else known)
                raise ModelError(
                    f"model.lora.{what}: {type(model).__name__} has no {name!r}; it has {', '.join(ends[:12])}"
                    f"{', ...' if len(ends) > 12 else ''}"
                )
    if not (config.target_modules or config.target_parameters):
        raise ModelError("model.lora.target_modules: nothing to adapt; name modules or target_parameters")
