"""The protocol of rollout engines (`Engine`), and the settings of a study file for them (`rollout.engine`).

The policy that samples (mu) and the training engine's old policy (pi_old) are two things even at equal weights:
kernels, precision and batch shapes differ, routers near a tie flip, and log-probabilities move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rl.measure.logprobs import hf_model
from moe_rl.names import nearest
from moe_rl.objectives.bounds import Count, Positive
from moe_rl.rollout.completions import Rollout, end_tokens, unrouted_tokens
from moe_rl.rollout.task import Problem
from moe_rl.rollout.vllm_host import agreed
from moe_rl.routing import RoutedExperts, RoutingError

NEVER = -1
"""The version of an engine that was never synced."""
COLDEST = 0.01
"""The lowest temperature above 0 (greedy): vLLM raises lower ones to it, and it is as good as greedy."""
LOGP_ROUNDING = 1e-3
"""How far rounding may put a log-probability above 0, nats."""


class Tolerance(NamedTuple):
    """The allowed gap between an engine's log-probabilities and the training model's at equal weights: mean absolute
    difference, nats per token.

    least: the gap that is always allowed, for a token or two whose router flips at a tie.
    most: the largest gap that the engine's arithmetic explains; above it, its weights are others or are misread.
    """

    least: float = 1e-3
    most: float = 1e-2


EXACT = Tolerance()


@runtime_checkable
class Engine(Protocol):
    """The protocol of a rollout engine: the attributes and methods that the training loop uses.

    Attributes:
        version: version of the weights that the engine holds, as named at the last `sync`; `NEVER` before.
        tolerance: the gap that the engine's arithmetic may make at equal weights.

    An engine may also have:
        slow_sync: True if a sync takes seconds; the test at the start then changes fewer tensors.
        renewed(): returns an engine made anew from the training model's weights, be it this one; for an engine beside
            which no second one can exist, and on sharded models.
    """

    version: int
    tolerance: Tolerance

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
        """Return completions with the engine's own `logps` (nats, at the sampling temperature) and, if asked, its
        `routes`: of prefill for the prompt, of decoding for the rest, -1 on padding and on each row's last token."""

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over these weights (names and shapes of the training model's state dict, any floating dtype). All that
        was cached under the old weights (prefixes, KV) must be gone when this returns. Weights of a sharded training
        model are DTensors, to be gathered (`gathered`) one after another, on all ranks in the same order."""

    def logps(self, rollout: Rollout, temperature: float) -> Float[Tensor, "B T"]:
        """Return the engine's log-probabilities of given completions, nats, 0 elsewhere; used to test each sync."""

    def close(self) -> None:
        """Free the engine's resources. The engine is not used again."""


def check_routes(rollout: Rollout) -> RoutedExperts:
    """Return the rollout's routes, after a check that exactly the tokens of `unrouted_tokens` lack them at every site.

    Raises:
        RoutingError: no routes at all; holes where the engine must have routed; routes where nothing was routed.
    """
    routes = rollout.routes
    if routes is None:
        raise RoutingError("the rollout engine gave no routes, which replay R3 and the comparison of engines need")
    expected = unrouted_tokens(rollout.attention_mask.bool())[:, :, None].expand(routes.shape[:3]).to(routes.device)
    wrong = routes.live != expected
    if bool(wrong.any()):
        b, t, site = wrong.nonzero()[0].tolist()
        raise RoutingError(
            f"routes of the rollout engine: {int(wrong.sum())} of {wrong.numel()} (token, site) rows are not as they "
            f"should be; first: sequence {b}, token {t}, site {routes.sites[site]} "
            f"{'has no route' if bool(routes.live[b, t, site]) else 'has a route, and is padding or a last token'}. "
            "Prompt tokens need the routes of prefill (prefix caching may drop them), sampled ones those of decoding"
        )
    return routes


def check_rollout(rollout: Rollout, model: nn.Module, tokenizer: Any, who: str) -> None:
    """Raise EngineError unless an engine's rollout holds what `Rollout` says of tokens, log-probabilities and ends. It
    is not asked whether the tokens were drawn from the model's weights, or the log-probabilities are theirs.

    who: words for the engine in messages.
    """
    mask = rollout.completion_mask
    tokens, logps = rollout.input_ids[mask], rollout.logps[mask]
    size = hf_model(model).get_input_embeddings().weight.shape[0]  # type: ignore[operator]  # a Tensor, for nn.Module
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        given = f"{int(tokens.min())} to {int(tokens.max())}"
        raise EngineError(f"{who} gave token ids from {given}; the model has 0 to {size - 1}")
    right = logps.isfinite() & (logps <= LOGP_ROUNDING)
    if not right.all():
        raise EngineError(
            f"{who} gave a log-probability of {logps[~right][0]} nats; drawn tokens have finite ones <= 0"
        )
    ended = mask & torch.isin(rollout.input_ids, end_tokens(model, tokenizer).to(mask.device))
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    if (behind := (ended & ~last).any(1)).any():
        raise EngineError(f"{who} gave tokens behind the end token of row {int(behind.int().argmax())}")
    if (wrong := rollout.finished != ended.any(1)).any():
        row = int(wrong.int().argmax())
        raise EngineError(f"{who}: row {row} has finished={bool(rollout.finished[row])}, its last token says otherwise")


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: str) -> None:
    """Raise EngineError if names or shapes of the `weights` to be synced differ from those of `own`, the engine's.
    `where` begins the message."""
    differ = []
    for name in sorted(own.keys() | weights.keys()):
        here, there = (list(of[name].shape) if name in of else "no tensor" for of in (weights, own))
        if here != there:
            differ.append(f"{name} is {here} in the training model and {there} in the engine")
    if differ:
        more = f", and so on: {len(differ)} in all" if len(differ) > 3 else ""
        raise EngineError(
            f"{where}: {', '.join(differ[:3])}{more}; was the model changed (adapters, tied weights) after the engine "
            "was made?"
        )


def gathered(tensor: Tensor) -> Tensor:
    """Return a sharded tensor (DTensor) whole on every rank, or any other tensor unchanged. All ranks must call this
    for a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- settings of a study file ------------------------------------------------------------------------------------------

ENGINE_KINDS = ("self", "hf", "vllm")
CONTINUING_KINDS = ("self", "hf")
"""Kinds of engines that can continue a response (partial rollouts, several turns)."""
KINDS_WITH = {
    "dtype": ("hf", "vllm"),
    "experts_implementation": ("hf",),
    "router_format": ("hf",),
    "weight_format": ("hf",),
    "max_batch": ("hf", "vllm"),
    "python": ("vllm",),
    "url": ("vllm",),
    "timeout": ("vllm",),
}
"""For each setting that only some kinds of engines have: the kinds that have it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUTER_FORMATS = ("int4", "e5m2")
WEIGHT_FORMATS = {"fp8": 0.5, "int4": 1.0, "mxfp4": 1.0}
"""Emulated formats of weights, and what each adds to the largest gap that arithmetic explains (nats per token)."""
ARITHMETIC = {torch.float32: EXACT, torch.float16: Tolerance(5e-3, 0.1), torch.bfloat16: Tolerance(2e-2, 0.5)}
"""The tolerance of each dtype."""


class EngineError(RuntimeError):
    """An error of a rollout engine: it cannot be made, fails, or does not hold the right weights. The message says what
    is wrong and what to do."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the rollout engine, which samples the responses."""

    kind: str = "self"
    """`self`: the training model. `hf`: a second copy of it, with the arithmetic below, synced before each rollout.
    `vllm`: vLLM in a process of its own, here or elsewhere, synced before each rollout (docs/engines.md).
    `package.module:Class` or `path/to/file.py:Class`: an engine of your own."""
    dtype: str = "bfloat16"
    """`hf`, `vllm`: `float32` (the control), `bfloat16` or `float16`, of weights and activations. `self` has
    `model.dtype`."""
    experts_implementation: str | None = None
    """`hf` only: `eager`, `grouped_mm`, ...; None: that of the training model."""
    max_batch: Count | None = None
    """`hf`, `vllm`: responses decoded together; None takes `rollout.max_batch`."""
    router_format: str | None = None
    """`hf` only: round the routers' weights to `int4` (a scale for each expert) or `e5m2` (float8). An emulation: it
    stands for an engine of coarser routers, products stay in `dtype`."""
    weight_format: str | None = None
    """`hf` only: round the weights of linear layers and experts to `fp8` (e4m3, a scale for each row), `int4` (a scale
    for each 128 entries of a row) or `mxfp4` (e2m1, a power of two for each 32); routers, embeddings, head and adapters
    stay. An emulation of engines with quantised weights: products stay in `dtype`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of an engine of your own. `vllm`: of `vllm.LLM`, e.g. {gpu_memory_utilization: 0.4}; sizes alone."""
    python: str | None = None
    """`vllm` only: the Python in whose environment vLLM is; None takes the variable MOE_RL_VLLM_PYTHON."""
    url: str | None = None
    """`vllm` only, instead of `python`: http://HOST:PORT of a vLLM that another machine lends; None takes the variable
    MOE_RL_VLLM_URL. Weights and prompts go there."""
    timeout: Positive = 1800.0
    """`vllm` only: seconds after which an answer that has not come is an error."""


def check_engine(config: EngineConfig) -> None:
    """Raise EngineError, which names the field, if a setting has an unknown value or does not apply to the kind."""
    if config.kind == "vllm":
        _check_vllm_settings(config)
    elif config.options and ":" not in config.kind:
        raise EngineError(f"rollout.engine.options: kind {config.kind!r} takes none, got {config.options}")
    for name, value, names in (
        ("kind", config.kind if ":" not in config.kind else "self", ENGINE_KINDS),
        ("dtype", config.dtype, tuple(DTYPES)),
        ("router_format", config.router_format, (None, *ROUTER_FORMATS)),
        ("weight_format", config.weight_format, (None, *WEIGHT_FORMATS)),
    ):
        if value not in names:
            listed = ", ".join("null" if known is None else known for known in names)
            raise EngineError(f"rollout.engine.{name}: expected one of {listed}, got {value!r}")
    for name, kinds in KINDS_WITH.items():
        value = getattr(config, name)
        if value != getattr(EngineConfig, name) and config.kind not in kinds:
            about = " (the training model, in model.dtype)" if config.kind == "self" else ""
            own = "pass it to your engine by rollout.engine.options" if ":" in config.kind else ""
            raise EngineError(
                f"rollout.engine.{name}: is for kind {' or '.join(kinds)} and would change nothing of kind "
                f"{config.kind!r}{about}, got {value!r}; "
                f"{own or f'set rollout.engine.kind to {kinds[0]}'}, or leave it out"
            )
    if config.max_batch is not None and config.max_batch < 1:
        raise EngineError(f"rollout.engine.max_batch: at least 1, got {config.max_batch}")
    if not 0 < config.timeout < 1e9:  # the system's clocks cannot wait for much longer
        raise EngineError(f"rollout.engine.timeout: a positive number of seconds below 1e9, got {config.timeout}")


def url_address(url: str, where: str = "rollout.engine.url") -> tuple[str, int]:
    """Return host and port of `http://HOST:PORT`. Raises EngineError for any other form; `where` begins the message.

    >>> url_address("http://gpu.example:8471/")
    ('gpu.example', 8471)
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or url.rstrip("/") != f"http://{parts.netloc}" or "@" in parts.netloc:
        secure = "; for an encrypted way, let ssh carry it (docs/engines.md)" if url.startswith("https:") else ""
        raise EngineError(f"{where}: expected http://HOST:PORT, got {url!r}{secure}")
    return host, port


def _check_vllm_settings(config: EngineConfig) -> None:
    """Raise EngineError if url, python or an option is invalid for the kind `vllm`."""
    if config.url is not None:
        url_address(config.url)
        if config.python is not None:
            raise EngineError(
                f"rollout.engine.python and .url: vLLM is in a Python of this machine or elsewhere, got both "
                f"{config.python!r} and {config.url!r}; leave one out"
            )
    for name, value in config.options.items():
        if name not in agreed.OPTIONS:
            raise EngineError(
                f"rollout.engine.options: kind vllm takes {', '.join(agreed.OPTIONS)}; got {name!r}"
                f"{nearest(str(name), agreed.OPTIONS, listed=False)}"
            )
        share = name in agreed.SHARES
        number = isinstance(value, int | float if share else int) and not isinstance(value, bool)
        if not number or not 0 < value <= (1 if share else float("inf")):
            wanted = "a number above 0 and at most 1" if share else "a positive whole number"
            raise EngineError(f"rollout.engine.options.{name}: {wanted}, got {value!r}")
