"""Rollout engines with weights of their own: another copy of the training model with its own arithmetic, or one's own.

`HuggingFaceEngine` makes the mismatch between two engines on any machine; in fp32 it is the control. An engine of one's
own is a class that `rollout.engine.kind` names as `package.module:Class` or `path/to/file.py:Class`; it is built as
`Class(model, tokenizer, **rollout.engine.options)` and must be an `Engine` (docs/extending.md).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rl.measure.unwrap import hf_model
from moe_rl.names import load_class
from moe_rl.rollout.engine import EXACT, Engine, ModelEngine, Tolerance
from moe_rl.routing import UnsupportedModelError, routing_sites
from moe_rl.routing.experts import check_experts_name, check_megablocks

ENGINE_KINDS = ("self", "hf")
ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUTER_FORMATS = ("int4", "e5m2")
WEIGHT_FORMATS = {"fp8": 0.5, "int4": 1.0}
"""Emulated formats of weights, and by how much each adds to what arithmetic explains (nats per token)."""
GROUP = 128
"""Entries of a row that share a scale in int4 (AWQ's and GPTQ's default)."""
ARITHMETIC = {torch.float32: EXACT, torch.float16: Tolerance(5e-3, 0.1), torch.bfloat16: Tolerance(2e-2, 0.5)}
"""What each dtype explains."""


class EngineError(RuntimeError):
    """A rollout engine that cannot be made, or that does not hold the weights it should; says what and what to do."""


@dataclass(frozen=True)
class EngineConfig:
    """Who samples the responses."""

    kind: str = "self"
    """`self`: the training model. `hf`: a second copy of it, with the arithmetic below, synced before each rollout.
    `package.module:Class` or `path/to/file.py:Class`: an engine of your own."""
    dtype: str = "bfloat16"
    """`hf` only: `float32` (the control), `bfloat16` or `float16`, of weights and activations."""
    experts_implementation: str | None = None
    """`hf` only: `eager`, `grouped_mm`, ...; None: that of the training model."""
    max_batch: int | None = None
    """`hf` only: responses decoded together; None takes `rollout.max_batch`."""
    router_format: str | None = None
    """`hf` only: round the routers' weights to `int4` (a scale for each expert) or `e5m2` (float8). An emulation: it
    stands for an engine of coarser routers, products stay in `dtype`."""
    weight_format: str | None = None
    """`hf` only: round the weights of linear layers and experts to `fp8` (e4m3, a scale for each row) or `int4` (a
    scale for each 128 entries of a row); routers, embeddings, head and adapters stay. An emulation of engines with
    quantised weights: products stay in `dtype`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of an engine of your own."""


class HuggingFaceEngine(ModelEngine):
    """A second Hugging Face model with its own dtype, experts implementation and batch shapes.

    Args:
        model: the training model, copied; LoRA adapters are copied with it.
        tokenizer: its tokenizer.
        config: the arithmetic; `kind` is not looked at.
        device: where it runs; None: where `model` is.

    Raises:
        EngineError: an unknown dtype, router or weight format, or an experts implementation that transformers does
            not know.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, tokenizer: Any, config: EngineConfig, device: torch.device | None = None):
        check_engine(config)
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        cast_parameters(copied, ENGINE_DTYPES[config.dtype])
        super().__init__(copied.to(device) if device is not None else copied, tokenizer, config.max_batch)
        self.config = config
        if config.experts_implementation is not None:
            try:
                hf_model(copied).set_experts_implementation(config.experts_implementation)  # type: ignore[operator]  # nn.Module
            except (ValueError, AttributeError, ImportError) as error:
                raise EngineError(
                    f"rollout.engine.experts_implementation: {config.experts_implementation!r} cannot be had here: "
                    f"{error}"
                ) from error
        self._round_weights()
        least, most = ARITHMETIC[ENGINE_DTYPES[config.dtype]]
        most += (0.5 if config.router_format else 0.0) + WEIGHT_FORMATS.get(config.weight_format or "", 0.0)
        self.tolerance = Tolerance(least, most)

    @torch.no_grad()
    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy every tensor, cast to the engine's dtype; then round what is asked for.

        Raises:
            EngineError: names or shapes that are not the engine's.
        """
        own = self.model.state_dict()
        if own.keys() != weights.keys():
            differ = sorted(own.keys() ^ weights.keys())
            raise EngineError(
                f"weight sync {version}: {len(differ)} names are not in both the training model and the engine, first "
                f"{differ[0]}; was the model changed (adapters, tied weights) after the engine was made?"
            )
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:
                raise EngineError(
                    f"weight sync {version}: {name} is {list(weights[name].shape)} in the training model and "
                    f"{list(tensor.shape)} in the engine"
                )
        for name, tensor in own.items():
            tensor.copy_(gathered(weights[name]))
        self._round_weights()
        self.version = version

    def close(self) -> None:
        del self.model

    @torch.no_grad()
    def _round_weights(self) -> None:
        routers = [weight for site in routing_sites(self.model) for weight in site.module.parameters()]
        if self.config.router_format is not None:
            for weight in routers:
                if weight.ndim >= 2:
                    weight.copy_(rounded(weight, self.config.router_format))
        if self.config.weight_format is not None:
            for weight in _layers(self.model, routers):
                weight.copy_(rounded_layer(weight, self.config.weight_format))


def make_engine(
    config: EngineConfig,
    model: nn.Module,
    tokenizer: Any,
    max_batch: int | None = None,
    device: torch.device | None = None,
) -> Engine:
    """The engine that `config` names; `max_batch` is what holds unless the engine has its own."""
    check_engine(config)
    if config.kind == "self":
        return ModelEngine(model, tokenizer, max_batch)
    if ":" in config.kind:
        return _own_engine(config, model, tokenizer)
    engine = HuggingFaceEngine(model, tokenizer, config, device)
    engine.max_batch = config.max_batch or max_batch
    return engine


def _own_engine(config: EngineConfig, model: nn.Module, tokenizer: Any) -> Engine:
    cls = load_class(config.kind, "rollout.engine.kind", EngineError)
    try:
        engine = cls(model, tokenizer, **config.options)
    except TypeError as error:
        raise EngineError(
            f"rollout.engine.options: cannot build {config.kind} with {config.options}: {error}"
        ) from error
    missing = [
        name for name in ("version", "tolerance", "sample", "sync", "logps", "close") if not hasattr(engine, name)
    ]
    if missing:
        raise EngineError(f"rollout.engine.kind: {config.kind} lacks {', '.join(missing)}; see moe_rl.rollout.Engine")
    return engine


def check_engine(config: EngineConfig) -> None:
    """Raises EngineError naming the field for a value that no engine knows."""
    if config.options and ":" not in config.kind:
        raise EngineError(f"rollout.engine.options: kind {config.kind!r} takes none, got {config.options}")
    for name, value, names in (
        ("kind", config.kind if ":" not in config.kind else "self", ENGINE_KINDS),
        ("dtype", config.dtype, tuple(ENGINE_DTYPES)),
        ("router_format", config.router_format, (None, *ROUTER_FORMATS)),
        ("weight_format", config.weight_format, (None, *WEIGHT_FORMATS)),
    ):
        if value not in names:
            listed = ", ".join("null" if known is None else known for known in names)
            raise EngineError(f"rollout.engine.{name}: expected one of {listed}, got {value!r}")
    if config.max_batch is not None and config.max_batch < 1:
        raise EngineError(f"rollout.engine.max_batch: at least 1, got {config.max_batch}")


def check_engine_here(config: EngineConfig, device: str) -> None:
    """Raises EngineError for a second engine whose kernels transformers does not know, or this machine, or `device`
    (model.device), lacks."""
    if config.kind != "hf":
        return
    try:
        check_experts_name(config.experts_implementation)
        if config.experts_implementation == "megablocks":
            check_megablocks(ENGINE_DTYPES[config.dtype], device)
    except UnsupportedModelError as error:
        raise EngineError(f"rollout.engine.{error}") from error


def gathered(tensor: Tensor) -> Tensor:
    """A sharded tensor (DTensor), whole on every rank, all of which must ask; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place as `from_pretrained(dtype=...)` would: buffers (rotary frequencies, selection biases)
    stay as they are, and so do the modules that the architecture keeps in fp32."""
    strict = getattr(hf_model(model), "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name.split(".") for part in strict):
            parameter.data = parameter.data.to(dtype)


def rounded(weight: Float[Tensor, "E D"], router_format: str) -> Float[Tensor, "E D"]:
    """A router's weights rounded to a coarser format, in their own dtype.

    int4: `s round(w / s)` with one scale s = max|w| / 7 for each expert (row), 15 levels. e5m2: float8, two bits of
    mantissa.

    >>> rounded(torch.tensor([[7.0, 3.4, -0.4]]), "int4")
    tensor([[7., 3., -0.]])
    """
    if router_format == "e5m2":
        return weight.to(torch.float8_e5m2).to(weight.dtype)
    scale = (weight.float().abs().amax(-1, keepdim=True) / 7).clamp(min=torch.finfo(torch.float32).tiny)
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


@torch.no_grad()
def rounded_layer(weight: Float[Tensor, "*rows D"], weight_format: str) -> Float[Tensor, "*rows D"]:
    """A layer's weights rounded to a coarser format, in their own dtype; scales are kept in fp32.

    fp8: `s e4m3(w / s)` with s = max|w| / 448 for each row. int4: `s round(w / s)`, s = max|w| / 7 for each group of
    128 entries of a row (the last of a row may be shorter), 15 levels.

    >>> rounded_layer(torch.tensor([[448.0, 17.0, -1.06]]), "fp8")  # three bits of mantissa: 16, 18, 20, ...
    tensor([[448.,  16.,  -1.]])
    """
    values = weight.float()
    tiny = torch.finfo(torch.float32).tiny
    if weight_format == "fp8":
        scale = (values.abs().amax(-1, keepdim=True) / 448).clamp(min=tiny)
        return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
    groups = []
    for group in values.split(GROUP, -1):
        scale = (group.abs().amax(-1, keepdim=True) / 7).clamp(min=tiny)
        groups.append((group / scale).round() * scale)
    return torch.cat(groups, -1).to(weight.dtype)


def _layers(model: nn.Module, routers: list[nn.Parameter]) -> list[nn.Parameter]:
    """Weights of linear layers and experts: what has rows, but for routers, embeddings, head and LoRA adapters."""
    inner: Any = hf_model(model)
    ends = [module for module in (inner.get_input_embeddings(), inner.get_output_embeddings()) if module is not None]
    kept = {id(weight) for weight in (*routers, *(p for module in ends for p in module.parameters()))}
    named = model.named_parameters()
    return [p for name, p in named if p.ndim >= 2 and id(p) not in kept and "lora_" not in name]
