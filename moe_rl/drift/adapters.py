"""Checkpoints that are LoRA adapters (PEFT): finding the model that they belong to, and putting them on it."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from moe_rl.checks import parse_json, unreadable
from moe_rl.drift.errors import DriftError
from moe_rl.policy.lora import INSTALL, merged, peft_warnings
from moe_rl.policy.models import has_tokenizer
from moe_rl.policy.tiny import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Source:
    """Place of a checkpoint's weights: a model (folder or hub id) and, perhaps, a folder of adapters to put on it."""

    base: str
    adapter: Path | None = None

    @property
    def tokenizer(self) -> str:
        """The place of the tokenizer: the adapters' folder, where trainers save one, or else the model."""
        return str(self.adapter) if self.adapter is not None and has_tokenizer(self.adapter) else self.base


def sources(paths: Mapping[str, str], base: str | None = None) -> dict[str, Source]:
    """Return the `Source` of each checkpoint, by its name in messages.

    paths: the name in messages -> the path or hub id. base: the model of the checkpoints that are adapters; None: the
    model that each folder of adapters names. Raises DriftError: as `resolve`, or `base` is given and none is adapters.
    """
    found = {which: resolve(which, path, base) for which, path in paths.items()}
    if base is not None and all(source.adapter is None for source in found.values()):
        raise DriftError(f"--base: no folder of LoRA adapters ({CONFIG}) is among the checkpoints; leave it out")
    return found


def resolve(which: str, path: str, base: str | None = None) -> Source:
    """Return the `Source` of a path: a whole checkpoint, or a folder of adapters with its model.

    Raises DriftError: the folder holds both a model and adapters, or the adapters cannot be used.
    """
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        return Source(path)
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        raise DriftError(
            f"{which}: {folder} holds a model and LoRA adapters, and which is meant is not known. Move one of them to "
            f"a folder of its own (merged adapters: remove {CONFIG} and {WEIGHTS})"
        )
    return adapters_of(which, folder, base)


def adapters_of(which: str, folder: Path, base: str | None = None) -> Source:
    """Return the `Source` of a folder of adapters: the folder, and the model `base` or else the one that it names.

    A hub model that only the folder names must be downloaded already; nothing is fetched. Raises DriftError: the
    adapters cannot be read, are not LoRA, or their model is not known or not here.
    """
    folder = folder.expanduser()
    try:
        config = parse_json((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise DriftError(f"{which}: {folder} holds no LoRA adapters ({CONFIG}): {error}") from error
    if not (folder / WEIGHTS).is_file():
        raise DriftError(f"{which}: {folder} has no {WEIGHTS} (pickled adapters are not read)")
    if why := unreadable(folder / WEIGHTS):
        raise DriftError(f"{which}: {why}")
    if importlib.util.find_spec("peft") is None:
        raise DriftError(f"{which}: {folder} holds LoRA adapters, and the peft package is not installed. {INSTALL}")
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise DriftError(f"{which}: {folder} holds adapters of the kind {kind!r}; LoRA (peft_type LORA) is read")
    remedy = f"Name the model: drift --base MODEL, floor MODEL --adapter {folder}"
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if revision and base == named and not Path(str(base)).expanduser().is_dir():
        raise DriftError(
            f"{which}: the adapters in {folder} are of revision {revision} of {base}. Download it (hf download {base} "
            f"--revision {revision}) and leave the name out, or give its folder"
        )
    if base is None:
        if not isinstance(named, str) or not named:
            raise DriftError(f"{which}: {folder} holds adapters and does not say of what. {remedy}")
        base = named if Path(named).expanduser().is_dir() else _downloaded(named, revision)
        if base is None:
            raise DriftError(
                f"{which}: {folder} holds adapters of {named}, which is neither a folder here nor a hub model that is "
                f"downloaded. {remedy}"
            )
    if (Path(base).expanduser() / CONFIG).is_file():
        raise DriftError(f"{which}: {base}, the model of the adapters in {folder}, holds adapters itself. {remedy}")
    return Source(base, folder)


def _downloaded(hub_id: str, revision: str | None) -> str | None:
    """Return the local folder of a downloaded hub model; None if it is not downloaded, or `hub_id` is no hub id."""
    try:
        return str(Path(str(cached_file(hub_id, "config.json", revision=revision, local_files_only=True))).parent)
    except Exception:  # also for a `hub_id` or `revision` that is malformed
        return None


def with_adapters(which: str, model: Any, source: Source) -> Any:
    """Return the model with adapters beside its weights, as PEFT trains them. Raises DriftError if they do not fit."""
    import peft

    where = f"{which}: {source.adapter} does not fit {source.base}"
    try:
        with peft_warnings():
            model = peft.PeftModel.from_pretrained(model, str(source.adapter))
            found = model.load_adapter(str(source.adapter), model.active_adapter)  # names what it could not place
    except Exception as error:  # errors of PEFT, safetensors and damaged settings share no base class
        raise DriftError(f"{where}: {type(error).__name__}: {error}") from error
    for names, what in ((found.unexpected_keys, "has no place for"), (found.missing_keys, "is not given")):
        if names:
            raise DriftError(f"{where}: the model {what} {len(names)} tensors, first {names[0]}")
    return model


def merged_with(which: str, model: Any, source: Source) -> Any:
    """Return the model with the adapters merged into its weights, as PEFT's `merge_and_unload` does.

    Modules that were trained whole take the place of the model's. Raises DriftError: the adapters do not fit, or no
    weights of this architecture compute the same.
    """
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    policy = with_adapters(which, model, source)
    where = f"{which}: {source.adapter} cannot be merged into {source.base}"
    try:
        model = merged(policy)
    except ModelError as error:
        raise DriftError(f"{where}: {error}") from error
    if {name: tensor.shape for name, tensor in model.state_dict().items()} != before:
        raise DriftError(f"{where}: the result is of another architecture")
    return model
