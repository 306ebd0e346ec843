"""The model of `moe-rl floor`: a checkpoint, with or without LoRA adapters beside its weights."""

import importlib.util
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_rl.drift import checkpoints
from moe_rl.drift.errors import DriftError
from moe_rl.policy.lora import INSTALL
from moe_rl.policy.models import ModelConfig, check_machine


@dataclass(frozen=True)
class Source:
    """Where the weights are: a checkpoint, and a folder of adapters to put on it."""

    base: str
    adapter: Path | None = None


def resolve(model: str, adapter: Path | None) -> Source:
    """Tell a checkpoint from a folder of adapters, which names its base model. Raises DriftError."""
    folder = Path(model).expanduser()
    if adapter is None and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = _config(folder).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DriftError(f"MODEL: {folder} holds adapters and does not say of what; give MODEL --adapter {folder}")
        return resolve(base, folder)
    if adapter is not None:
        adapter = adapter.expanduser()
        _config(adapter)
        if not (adapter / "adapter_model.safetensors").is_file():
            raise DriftError(f"--adapter: {adapter} has no adapter_model.safetensors (pickled adapters are not read)")
        if importlib.util.find_spec("peft") is None:
            raise DriftError(f"--adapter: the peft package is not installed. {INSTALL}")
    return Source(model, adapter)


def check_experts(source: Source, name: str | None) -> None:
    """Raises DriftError for an experts implementation that is not known, or not to be had here."""
    with checkpoints.named("MODEL"):
        check_machine(ModelConfig(path=source.base, experts_implementation=name))


def load(source: Source, dtype: str, experts: str | None, device: torch.device, trust_remote_code: bool) -> Any:
    """The model in a dtype, in eval mode on its device."""
    model: Any = checkpoints.load("MODEL", source.base, dtype, device, trust_remote_code, experts)
    if source.adapter is None:
        return model
    import peft
    from safetensors import SafetensorError

    where = f"--adapter: {source.adapter} does not fit {source.base}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by names that it renamed
            warnings.simplefilter("ignore", UserWarning)  # of what is refused below
            model = peft.PeftModel.from_pretrained(model, str(source.adapter))
            found = model.load_adapter(str(source.adapter), model.active_adapter)  # says what it could not place
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise DriftError(f"{where}: {error}") from error
    for names, what in ((found.unexpected_keys, "has no place for"), (found.missing_keys, "is not given")):
        if names:
            raise DriftError(f"{where}: the model {what} {len(names)} tensors, first {names[0]}")
    return model.to(device).eval()


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DriftError(f"--adapter: {folder} holds no LoRA adapters (adapter_config.json): {error}") from error
    return found if isinstance(found, dict) else {}
