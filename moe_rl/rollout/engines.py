"""Rollout engines: who samples. The training model itself, or another copy of it with its own arithmetic.

The policy that samples (mu) and the training engine's old policy (pi_old) are two things even at equal parameters:
kernels, precision and batch shapes differ, routers near a tie flip, and log-probabilities move. `HuggingFaceEngine`
makes that mismatch on any machine; in fp32 it is the control. Whatever samples is an `Engine`, four methods small, so
that a server (vLLM, SGLang) can be one.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.sampler import hf_model, sample
from moe_rl.rollout.task import Problem
from moe_rl.routing import UnsupportedModelError, routing_sites
from moe_rl.routing.experts import check_experts_name, check_megablocks

ENGINE_KINDS = ("self", "hf")
ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUTER_FORMATS = ("int4", "e5m2")
NEVER = -1
"""Version of an engine whose weights nobody has named yet."""


class EngineError(RuntimeError):
    """A rollout engine that cannot be made, or that does not hold the weights it should; says what and what to do."""


@dataclass(frozen=True)
class EngineConfig:
    """Who samples the responses."""

    kind: str = "self"
    """`self`: the training model. `hf`: a second copy of it, with the arithmetic below, synced before each rollout."""
    dtype: str = "bfloat16"
    """`hf` only: `float32` (the control), `bfloat16` or `float16`, of weights and activations."""
    experts_implementation: str | None = None
    """`hf` only: `eager`, `grouped_mm`, ...; None: that of the training model."""
    max_batch: int | None = None
    """`hf` only: responses decoded together; None takes `rollout.max_batch`."""
    router_format: str | None = None
    """`hf` only: round the routers' weights to `int4` (a scale for each expert) or `e5m2` (float8). An emulation: it
    stands for an engine of coarser routers, products stay in `dtype`."""


@runtime_checkable
class Engine(Protocol):
    """What the training loop asks of whoever samples.

    version: of the weights that it holds, as named at the last `sync`; `NEVER` before.
    """

    version: int

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
        record_routes: bool,
    ) -> Rollout:
        """Completions with the engine's own `logps` (nats, at the sampling temperature) and, if asked, its `routes`:
        of prefill for the prompt, of decoding for the rest, -1 on padding and on each row's last token."""
        ...

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over these weights (names and shapes of the training model's state dict, any floating dtype). Whatever
        was cached under the old ones (prefixes, KV) must be gone when this returns. Of a sharded training model they
        are DTensors, to be gathered (`gathered`) one after another, on all ranks in the same order."""
        ...

    def logps(self, rollout: Rollout, temperature: float) -> Float[Tensor, "B T"]:
        """The engine's log-probabilities of given completions, nats, 0 elsewhere: the probe after each sync."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is not used again."""
        ...


class ModelEngine:
    """The training model itself: never stale, and no mismatch but that of cached decoding against one forward."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_batch: int | None = None):
        self.model, self.tokenizer, self.max_batch = model, tokenizer, max_batch
        self.version = NEVER

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        record_routes: bool = False,
    ) -> Rollout:
        return sample(
            self.model,
            self.tokenizer,
            problems,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            generator=generator,
            record=record_routes,
            max_batch=self.max_batch,
        )

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Nothing to copy: `weights` are this model's own."""
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        return forward_logps(self.model, rollout, temperature)

    def close(self) -> None:
        pass


class HuggingFaceEngine(ModelEngine):
    """A second Hugging Face model with its own dtype, experts implementation and batch shapes.

    Args:
        model: the training model, copied; LoRA adapters are copied with it.
        tokenizer: its tokenizer.
        config: the arithmetic; `kind` is not looked at.
        device: where it runs; None: where `model` is.

    Raises:
        EngineError: an unknown dtype or router format, an experts implementation that transformers does not know.
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
        self._round_routers()

    @torch.no_grad()
    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy every tensor, cast to the engine's dtype; then round the routers if that is asked for.

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
        self._round_routers()
        self.version = version

    def close(self) -> None:
        del self.model

    @torch.no_grad()
    def _round_routers(self) -> None:
        if self.config.router_format is not None:
            for site in routing_sites(self.model):
                for weight in site.module.parameters():
                    if weight.ndim >= 2:
                        weight.copy_(rounded(weight, self.config.router_format))


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
    engine = HuggingFaceEngine(model, tokenizer, config, device)
    engine.max_batch = config.max_batch or max_batch
    return engine


def check_engine(config: EngineConfig) -> None:
    """Raises EngineError naming the field for a value that no engine knows."""
    for field, value, names in (
        ("kind", config.kind, ENGINE_KINDS),
        ("dtype", config.dtype, tuple(ENGINE_DTYPES)),
        ("router_format", config.router_format, (None, *ROUTER_FORMATS)),
    ):
        if value not in names:
            listed = ", ".join("null" if name is None else name for name in names)
            raise EngineError(f"rollout.engine.{field}: expected one of {listed}, got {value!r}")
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


@torch.no_grad()
def forward_logps(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
    """Log-probabilities (nats) of a rollout's completion tokens from one forward, 0 elsewhere; for small batches, since
    all logits are kept. Softmax in fp32, `logits / temperature`, positions counted over real tokens as in `sample`."""
    device = next(model.parameters()).device
    ids, mask = rollout.input_ids.to(device), rollout.attention_mask.to(device).long()
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(hf_model(model).forward).parameters:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(**inputs).logits[:, :-1].float()
    logps = torch.log_softmax(logits / temperature, -1).gather(2, ids[:, 1:, None])[:, :, 0]
    logps = nn.functional.pad(logps, (1, 0))
    return logps.masked_fill(~rollout.completion_mask.to(device), 0.0).to(rollout.input_ids.device)


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
