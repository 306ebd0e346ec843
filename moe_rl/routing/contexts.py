"""The context managers: record what routers choose, make them choose it again, disturb their choice, tell its margin.

>>> import torch
>>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
>>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
>>> model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8))
>>> tokens = torch.arange(12).reshape(2, 6)
>>> with record_routes(model) as recording:
...     output = model(tokens)
>>> recording.routes.shape  # sequences, tokens, sites, experts per token
torch.Size([2, 6, 2, 2])
>>> with replay_routes(model, recording.routes) as replay:
...     model(tokens).logits.sum().backward()
>>> replay.replayed_fraction
1.0
"""

import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.hooks import Tap, device_of
from moe_rl.routing.recording import Recording
from moe_rl.routing.replay import Replay
from moe_rl.routing.rerun import Bias, Margins, Noise
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.selection import Selector
from moe_rl.routing.selfcheck import examine
from moe_rl.routing.sites import Layout, layout_of

_Checked = tuple[Any, list[Selector], dict[bool, list[Selector | None]]]
# What is known about models that are alive; neither keeps a model alive.
_TAPS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tap]]" = weakref.WeakKeyDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, _Checked]" = weakref.WeakKeyDictionary()


def _acquire(model: nn.Module) -> tuple[Tap, list[str]]:
    """The tap of a model, checked in the mode that it is in, and the names of its sites as seen from `model`."""
    layout = layout_of(model)
    sites, boundary = layout.sites, layout.boundary
    modules = [m for site in sites for m in site.modules]
    known = _TAPS.get(boundary)
    tap = known() if known else None
    if tap is None or [m for site in tap.sites for m in site.modules] != modules:
        tap = Tap(model, sites, boundary)
        _TAPS[boundary] = weakref.ref(tap)
    if not tap.users:
        _refuse_compiled(model, layout)
        tap.root, tap.modules = model, layout.modules
    signature = _signature(tap)
    cached = _CHECKED.get(boundary)
    if cached is None or cached[0] != signature:
        cached = (signature, [], {})
    _, tap.probes, tap.modes = cached
    unchecked = [None] * len(sites)
    if any(tap.modes.get(m.training, unchecked)[i] is None for i, site in enumerate(sites) for m in site.modules):
        examine(tap)
        _CHECKED[boundary] = (signature, tap.probes, tap.modes)
    return tap, [site.name for site in sites]


def _signature(tap: Tap) -> list[Any]:
    """What a router's way to select may depend on: where any of it changes, the model is checked again."""
    kernels = getattr(tap.boundary.config, "_experts_implementation", None)
    modules = [m for site in tap.sites for m in (*site.modules, *site.parents[:1])]
    return [kernels, *((type(m), getattr(m, "top_k", None), vars(m).get("forward")) for m in modules)]


def _refuse_compiled(model: nn.Module, layout: Layout) -> None:
    for module in layout.modules:
        own = module.__dict__
        if "_orig_mod" in own["_modules"] or own.get("_compiled_call_impl") or "_compiled_call" in own:
            name = next(name for name, other in model.named_modules() if other is module)
            raise RoutingError(
                f"{name or type(module).__name__} is compiled already: torch.compile skips hooks that were added "
                "later, so nothing would be recorded or replayed. Call attach(model) before torch.compile(model)"
            )


def _dynamo_ran() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


class Attachment:
    """Hooks that stay on a model until `.detach()`; also a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._tap, _ = _acquire(model)
        self._tap.users += 1
        self._tap.hook()
        self._attached = True

    def detach(self) -> None:
        """Take the hooks off (once no context is open any more)."""
        if self._attached:
            self._attached = False
            self._tap.users -= 1
            if not self._tap.users:
                self._tap.unhook()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(model: nn.Module) -> Attachment:
    """Put idle hooks on a model: needed before `torch.compile`, useful where contexts are opened very often.

    Where another model of the same class (a reference policy) is compiled without hooks in the same process, torch
    would run its code for both: attach it too, or set `torch._dynamo.config.skip_nnmodule_hook_guards = False` first.

    Raises UnsupportedModelError if the model fails the self-check, RoutingError if it is compiled already.
    """
    return Attachment(model)


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Recording]:
    """Record which experts every router of `model` chooses for every token, in forward() and generate().

    model: any Mixture-of-Experts model of transformers, bare or wrapped (DDP, FSDP2, PEFT, ...). Outputs are not
        changed by one bit. Inside `replay_routes` or `noisy_routes` the experts that were really used are recorded.
    Yields a Recording; read `.routes` when the calls are done.

    Raises UnsupportedModelError for a model that fails the self-check (run once per model), RoutingError for one that
    was compiled without `attach`, for packed continuous batching, and for a forward in which a router did not run.
    """
    tap, names = _acquire(model)
    recording = Recording(tap, names)
    with tap.listen(recording):
        yield recording


@contextmanager
def replay_routes(
    model: nn.Module,
    routes: RoutedExperts,
    *,
    sites: str | int | Iterable[str | int] | None = None,
    tokens: Tensor | None = None,
    slots: int | None = None,
    shadow: bool = False,
    check_tokens: bool = True,
) -> Iterator[Replay]:
    """Make the routers of `model` choose the given experts; gate weights come from the live scores.

    With live scores s and forced experts e the router continues with (s[e], e) where it would have with top-k of s:
    Routing Replay of arXiv 2507.18071, section 5.3. Everything after the selection is the model's own code, so gates
    and their gradients are exact. Put forward *and* backward inside where you can; with transformers' gradient
    checkpointing a backward after the context is replayed, too.

    routes: for exactly this batch; rows of -1 are left to the router.
    sites, tokens, slots: force only these sites (names, shell patterns or indices), only these tokens (bool [B,T]),
        only the first n slots (the others are the best of the remaining experts).
    shadow: also rank live: `.shadow` and `.regret` of the Replay.
    check_tokens: compare input_ids with those that the routes were recorded for.
    Nested: an inner replay decides where it forces, elsewhere the outer one does.

    Raises RoutingError for routes that do not fit (sites, experts, shape, tokens); UnsupportedModelError as
    `record_routes`.
    """
    tap, names = _acquire(model)
    replay = Replay(tap, names, routes, sites, tokens, slots, shadow, check_tokens)
    with tap.listen(replay):
        yield replay
    if not replay.reached and _dynamo_ran():
        warnings.warn(
            "nothing was replayed: no call of the model reached its hooks, and torch.compile was used in this process. "
            "If a function around the model was compiled before, call attach(model) first. If another model of this "
            "class was compiled without hooks, torch.compile lends its code: before compiling any of them, set "
            "torch._dynamo.config.skip_nnmodule_hook_guards = False",
            stacklevel=3,
        )


@contextmanager
def noisy_routes(model: nn.Module, sigma: float, generator: torch.Generator | None = None) -> Iterator[None]:
    """Selection noise, a stress test: experts are chosen by the top k of `logits + sigma * N(0,1)`.

    Only the choice is noisy: gate weights, gradients and router losses come from the clean logits of the chosen
    experts. It is routing volatility of a dose that can be set, where real volatility has to be waited for; nothing in
    it is a model of how real routers change. A replay, inside or outside, wins where it forces. A recomputation
    (gradient checkpointing) finds the choice of its forward. Routers that are random in train mode (jitter) draw twice.

    sigma: in units of the router's logits. generator: source of the noise; its device may differ from the model's.
    Raises UnsupportedModelError where the logits are not one linear map inside the router; RoutingError inside another
    noise or `record_margins`.
    """
    if not sigma >= 0:
        raise RoutingError(f"sigma must not be negative, got {sigma}")
    tap, names = _acquire(model)
    for name, site, probe in zip(names, tap.sites, tap.probes, strict=True):
        if probe.logits < 0 and not site.fixed:
            raise UnsupportedModelError(f"site {name} ({type(site.module).__name__}): no linear map makes its logits")
    _refuse_second(tap)
    with tap.listen(Noise(sigma, generator)):
        yield


@contextmanager
def biased_routes(model: nn.Module, bias: Float[Tensor, "L E"] | None = None) -> Iterator[Float[Tensor, "L E"]]:
    """Experts are chosen by the top k of `scores + bias`; gate weights and gradients come from the scores alone.

    The selection bias of DeepSeek-V3 (arXiv 2412.19437, eq. 16; arXiv 2408.15664), for models that have none of their
    own; added to one of their own, and to that of a context around it. A replay wins where it forces; noise and margins
    see the bias. It is in force only inside of the context: whoever trains under it samples and scores inside, too.

    bias: of every site, in order, and expert, in units of what the router ranks (see `record_margins`); where sites
        differ in the number of experts, further columns are ignored. None: zeros.
    Yields the bias, which may be changed in place between calls.
    Raises RoutingError for another shape; UnsupportedModelError where the experts are not one top k of all scores
    (groups of experts, hash routing, Phi-MoE), and as `record_routes`.
    """
    tap, names = _acquire(model)
    experts = [probe.num_experts for probe in tap.probes]
    if bias is None:
        bias = torch.zeros(len(names), max(experts), device=device_of(tap.boundary))
    if bias.shape != (len(names), max(experts)):
        raise RoutingError(f"bias must be [L,E] = {[len(names), max(experts)]}, got {list(bias.shape)}")
    for name, site, probe in zip(names, tap.sites, tap.probes, strict=True):
        if site.fixed or probe.by_max or probe.calls != 1:
            raise UnsupportedModelError(
                f"site {name} ({type(site.module).__name__}): its experts are not one top k of all scores, so that a "
                "bias on the last choice would not be a bias on the selection. Families that limit a token to groups "
                "of experts have a bias of their own (e_score_correction_bias)"
            )
    with tap.listen(Bias(tuple(row[:count] for row, count in zip(bias, experts, strict=True)))):
        yield bias


def _refuse_second(tap: Tap) -> None:
    if any(isinstance(listener, Noise | Margins) for listener in tap.listeners):
        raise RoutingError(
            "noisy_routes or record_margins is open on this model already: each has a router choose again what it "
            "chose in a run of its own, so that of two only one would act. Leave that context first"
        )


@contextmanager
def record_margins(model: nn.Module) -> Iterator[Margins]:
    """Record `boundary_margin` of the scores that every router ranks: s_(k) - s_(k+1), in their units (probabilities
    where softmax comes before the selection, as in Qwen3-MoE, OLMoE and Mixtral; logits where it comes after, as in
    Granite; with the selection bias where there is one). A change of scores below half of it cannot change the choice;
    infinite where all experts are taken.

    Outputs are not changed. Inside a replay the margin is that of the live choice. Raises as `record_routes`;
    RoutingError inside `noisy_routes` or another `record_margins`.
    """
    tap, _ = _acquire(model)
    _refuse_second(tap)
    margins = Margins(tap.names)
    with tap.listen(margins):
        yield margins
