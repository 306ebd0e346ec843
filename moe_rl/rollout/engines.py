"""Rollout engines with weights of their own: a copy of the training model with other arithmetic, or a user's class.

`HuggingFaceEngine` makes the mismatch between two engines on any machine; in fp32 it is the control. An engine of your
own is a class that `rollout.engine.kind` names as `package.module:Class` or `path/to/file.py:Class`; it is built by
`Class(model, tokenizer, **rollout.engine.options)` and must be an `Engine` (docs/extending.md). vLLM is in
`moe_rl.rollout.vllm_engine`.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.measure.logprobs import hf_model
from moe_rl.measure.weights import dtypes_as_loaded
from moe_rl.names import load_object
from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.engine import Engine, ModelEngine, Tolerance, gathered
from moe_rl.rollout.engine_config import (
    ARITHMETIC,
    DTYPES,
    WEIGHT_FORMATS,
    EngineConfig,
    EngineError,
    check_engine,
    check_rollout,
    check_weights,
)
from moe_rl.rollout.task import Problem
from moe_rl.rollout.vllm_engine import VllmEngine, check_vllm
from moe_rl.routing import UnsupportedModelError
from moe_rl.routing.experts import check_experts_name, check_megablocks
from moe_rl.routing.sites import router_parameters

GROUPS = {"int4": 128, "mxfp4": 32}
"""How many entries of a row share a scale: the default of AWQ and GPTQ, and the block of the OCP MX specification."""


class HuggingFaceEngine(ModelEngine):
    """A rollout engine that is a copy of the training model with its own dtype, experts implementation and batch
    shapes.

    Args:
        model: the training model, copied; LoRA adapters are copied with it.
        tokenizer: its tokenizer.
        config: the arithmetic; the kind is not used, only checked.
        device: where the copy runs; None: where `model` is.

    Raises:
        EngineError: an unknown dtype, router or weight format, or an experts implementation that transformers does
            not know.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, tokenizer: Any, config: EngineConfig, device: torch.device | None = None):
        check_engine(config)
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        cast_parameters(copied, DTYPES[config.dtype])
        super().__init__(copied.to(device) if device is not None else copied, tokenizer, config.max_batch)
        self.config = config
        if config.experts_implementation is not None:
            try:
                hf_model(copied).set_experts_implementation(config.experts_implementation)  # type: ignore[operator]  # a Tensor, for nn.Module
            except (ValueError, AttributeError, ImportError) as error:
                raise EngineError(
                    f"rollout.engine.experts_implementation: {config.experts_implementation!r} is not available: "
                    f"{error}"
                ) from error
        self._round_weights()
        least, most = ARITHMETIC[DTYPES[config.dtype]]
        most += (0.5 if config.router_format else 0.0) + WEIGHT_FORMATS.get(config.weight_format or "", 0.0)
        self.tolerance = Tolerance(least, most)

    @torch.no_grad()
    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy every tensor, cast to the engine's dtype; then round to the router and weight formats of the config.

        Raises:
            EngineError: names or shapes that are not the engine's.
        """
        own = self.model.state_dict()
        check_weights(own, weights, f"weight sync {version}")
        for name, tensor in own.items():
            tensor.copy_(gathered(weights[name]))
        self._round_weights()
        self.version = version

    def close(self) -> None:
        del self.model

    @torch.no_grad()
    def _round_weights(self) -> None:
        if self.config.router_format is not None:
            for weight in router_parameters(self.model):
                if weight.ndim >= 2 and len(weight) > 1:  # one row is no set of experts: ERNIE's bias on the choice
                    weight.copy_(rounded(weight, self.config.router_format))
        if self.config.weight_format is not None:
            round_layers(self.model, self.config.weight_format)


def make_engine(
    config: EngineConfig,
    model: nn.Module,
    tokenizer: Any,
    max_batch: int | None = None,
    device: torch.device | None = None,
) -> Engine:
    """Build the engine that `config` names. `max_batch` is used unless `config` has one of its own."""
    check_engine(config)
    if config.kind == "self":
        return ModelEngine(model, tokenizer, max_batch)
    if ":" in config.kind:
        return _own_engine(config, model, tokenizer)
    config = replace(config, max_batch=config.max_batch or max_batch)
    if config.kind == "vllm":
        return VllmEngine(model, tokenizer, config)
    return HuggingFaceEngine(model, tokenizer, config, device)


def _own_engine(config: EngineConfig, model: nn.Module, tokenizer: Any) -> Engine:
    cls = load_object(config.kind, "rollout.engine.kind", EngineError)
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
    engine.sample = _checked(engine.sample, config.kind, model, tokenizer)
    return engine


def _checked(sample: Callable[..., Rollout], kind: str, model: nn.Module, tokenizer: Any) -> Callable[..., Rollout]:
    """Return `sample` wrapped to raise EngineError unless it gives one group for each problem, in the problems' order,
    and what `check_rollout` asks for: training would not notice."""

    @functools.wraps(sample)
    def checked(problems: Sequence[Problem], *, group_size: int, **options: Any) -> Rollout:
        rollout = sample(problems, group_size=group_size, **options)
        asked = [problem for problem in problems for _ in range(group_size)]
        if rollout.group_size != group_size or len(rollout) != len(asked) or rollout.problems != asked:
            raise EngineError(
                f"rollout.engine.kind: {kind}.sample was asked for {len(problems)} problems x {group_size} responses "
                f"and gave {len(rollout)} rows in groups of {rollout.group_size}, or not in the order of the problems: "
                "row b of a Rollout answers problem b // group_size"
            )
        check_rollout(rollout, model, tokenizer, f"rollout.engine.kind: {kind}.sample")
        return rollout

    return checked


def check_engine_here(config: EngineConfig, device: str) -> None:
    """Raise EngineError if the engine cannot run here: kernels of an `hf` engine that transformers does not know, or
    that this machine or `device` (model.device) lacks; a vLLM that is missing or of an unknown version; a class of your
    own that cannot be imported."""
    if config.kind == "vllm":
        check_vllm(config)
    if ":" in config.kind:
        load_object(config.kind, "rollout.engine.kind", EngineError)
    if config.kind != "hf":
        return
    try:
        check_experts_name(config.experts_implementation)
        if config.experts_implementation == "megablocks":
            check_megablocks(DTYPES[config.dtype], device)
    except UnsupportedModelError as error:
        raise EngineError(f"rollout.engine.{error}") from error


@torch.no_grad()
def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers in place to the dtypes of `from_pretrained(dtype=...)` (`dtypes_as_loaded`)."""
    for tensor, wanted in dtypes_as_loaded(model, dtype):
        tensor.data = tensor.data.to(wanted)


def rounded(weight: Float[Tensor, "E D"], router_format: str) -> Float[Tensor, "E D"]:
    """Return a router's weights rounded to a coarser format, in their own dtype.

    int4: `s round(w / s)` with one scale s = max|w| / 7 for each expert (row), 15 levels. e5m2: float8, two bits of
    mantissa.

    >>> rounded(torch.tensor([[7.0, 3.4, -0.4]]), "int4")
    tensor([[7., 3., -0.]])
    """
    if router_format == "e5m2":
        return weight.to(torch.float8_e5m2).to(weight.dtype)
    return _int4(weight.float()).to(weight.dtype)


@torch.no_grad()
def rounded_layer(weight: Float[Tensor, "*rows D"], weight_format: str) -> Float[Tensor, "*rows D"]:
    """Return a layer's weights rounded to a coarser format, in their own dtype; scales are kept in fp32.

    fp8: `s e4m3(w / s)` with s = max|w| / 448 for each row. int4: `s round(w / s)`, s = max|w| / 7 for each group of
    128 entries of a row (the last of a row may be shorter), 15 levels. mxfp4 (OCP Microscaling Formats 1.0, section
    6.3): `s e2m1(w / s)`, s = 2^(floor(log2 max|w|) - 2) for each group of 32; the levels are 0, 0.5, 1, 1.5, 2, 3, 4,
    6 and their negatives.

    >>> rounded_layer(torch.tensor([[448.0, 17.0, -1.06]]), "fp8")  # three bits of mantissa: 16, 18, 20, ...
    tensor([[448.,  16.,  -1.]])
    >>> rounded_layer(torch.tensor([[7.0, 3.4, -0.4]]), "mxfp4")  # s = 1; beyond the largest level is that level
    tensor([[ 6.0000,  3.0000, -0.5000]])
    """
    values = weight.float()
    if weight_format == "fp8":
        scale = _row_scale(values, 448)
        return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)
    of_group = {"int4": _int4, "mxfp4": _mxfp4}[weight_format]
    return torch.cat([of_group(group) for group in values.split(GROUPS[weight_format], -1)], -1).to(weight.dtype)


def _int4(values: Tensor) -> Tensor:
    scale = _row_scale(values, 7)
    return (values / scale).round() * scale


def _mxfp4(values: Tensor) -> Tensor:
    largest = values.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 3  # so that the largest value is at least 4 and below 8 scales
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126)) + 0 * largest  # NaN if not finite
    scaled = (values / scale).clamp(-6, 6)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (scaled / step).round() * step * scale  # halves to the even multiple, which is the even mantissa


def _row_scale(values: Tensor, largest: int) -> Tensor:
    """Return the scale of each row, by which its largest absolute value is `largest` scales."""
    return (values.abs().amax(-1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def round_layers(model: nn.Module, weight_format: str, *, frozen: bool = True) -> None:
    """Round a model's linear layers and experts in place by `rounded_layer`. With `frozen=False`, frozen weights are
    left as they are."""
    left = router_parameters(model) + [weight for weight in model.parameters() if not (frozen or weight.requires_grad)]
    for rows in layer_rows(model, left):
        rows.copy_(rounded_layer(rows, weight_format))


def layer_rows(model: nn.Module, left: list[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the weights of linear layers and experts as views `[*, outputs, inputs]`, so that a row makes one output.

    Left out are the weights `left`, biases (those of all experts are one matrix), embeddings, head and LoRA adapters,
    and all other weights that have rows but multiply no hidden state: convolutions, the recurrences of state-space
    layers, learnt positions.
    """
    inner: Any = hf_model(model)
    ends = [module for module in (inner.get_input_embeddings(), inner.get_output_embeddings()) if module is not None]
    kept = {id(weight) for weight in (*left, *(p for module in ends for p in module.parameters()))}
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear) or "Expert" in type(module).__name__) or "lora_" in name:
            continue
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim >= 2 and id(weight) not in kept and not own.endswith("bias"):
                yield _rows(module, own, weight)


def _rows(module: Any, name: str, weight: Tensor) -> Tensor:
    """Return a weight as a view `[*, outputs, inputs]`, transposed where its module stores it the other way round."""
    kind = type(module).__name__
    if kind == "DbrxExpertGLU" and name == "w2":  # all experts' [inputs, outputs] below each other
        return weight.unflatten(0, (module.moe_num_experts, -1)).mT
    turned = getattr(module, "is_transposed", False) is True or kind == "Llama4TextExperts"
    return weight.mT if turned and weight.ndim == 3 else weight
