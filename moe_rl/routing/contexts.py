"""Context managers that record which experts routers choose, and that replay recorded routes.

The context managers that disturb the choice, or record its margin, are in `moe_rl.routing.rerun`.

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
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing import refusals
from moe_rl.routing.calls import Recording
from moe_rl.routing.hooks import Tap
from moe_rl.routing.replay import Replay
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.selection import Selector
from moe_rl.routing.selfcheck import examine
from moe_rl.routing.shadow import ShadowReplay
from moe_rl.routing.sites import Site, boundary_of, find_sites

_Parts = tuple[list[Any], ...]
_Layout = tuple[_Parts, list[tuple[str, list[int], list[int], bool]], int]
_Checked = tuple[Any, Any, list[Selector], dict[tuple[bool, int], Selector]]
# Caches of what is known about live models. None of these caches keeps a model alive, but for a model that the function
# holds with which the `forward` of one of its own blocks was replaced.
_LAYOUTS: "weakref.WeakKeyDictionary[nn.Module, _Layout]" = weakref.WeakKeyDictionary()
_TAPS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Tap]]" = weakref.WeakKeyDictionary()
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, _Checked]" = weakref.WeakKeyDictionary()


def _walk(model: nn.Module) -> tuple[list[nn.Module], _Parts]:
    """Return all modules of a model, each once, and three lists about them. The lists are the names under which modules
    are held, the classes of the modules, and weak references to the modules."""
    modules, names, seen = [model], list[str](), {model}
    for module in modules:
        for name, child in module._modules.items():
            names.append(name)
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules, (names, [type(m) for m in modules], [weakref.ref(m) for m in modules])


def _layout_of(model: nn.Module) -> tuple[list[nn.Module], list[Site], PreTrainedModel]:
    """Return the modules of a model (as `_walk` lists them), its sites, and the model whose call is one forward.

    The last is found by `boundary_of`. The result is cached until a module, its class or its name changes, because
    contexts are opened around every minibatch. The cache keeps no module alive.
    """
    kept = _LAYOUTS.get(model) if isinstance(model, nn.Module) else None
    if kept is not None:
        modules, parts = _walk(model)
        before, found, boundary_at = kept
        if parts == before:
            sites = [
                Site(name, tuple(modules[i] for i in own), tuple(modules[i] for i in up), fixed)
                for name, own, up, fixed in found
            ]
            return modules, sites, cast(PreTrainedModel, modules[boundary_at])
    sites = find_sites(model)
    boundary = boundary_of(model, sites)
    modules, parts = _walk(model)
    place = {module: i for i, module in enumerate(modules)}
    found = [(s.name, [place[m] for m in s.modules], [place[m] for m in s.parents], s.fixed) for s in sites]
    _LAYOUTS[model] = parts, found, place[boundary]
    return modules, sites, boundary


def acquire(model: nn.Module, adapters: bool = False) -> tuple[Tap, list[str]]:
    """Return the tap of a model and the names of its sites seen from `model`. The tap is self-checked in the mode that
    the model is in; with `adapters` also with the adapters in its routers on or off as they are."""
    modules, sites, boundary = _layout_of(model)
    selecting = _selecting(sites)
    known = _TAPS.get(boundary)
    tap = known() if known else None
    if tap is None or tap.selecting != selecting:
        if tap is not None and tap.listeners:  # the open context would take the self-check for calls of its own
            raise refusals.replaced(type(boundary).__name__)
        tap = Tap(model, sites, boundary)
        tap.selecting = selecting
        _TAPS[boundary] = weakref.ref(tap)
    if not tap.users:
        tap.unhook()  # hooks that an interrupted context left on the model
        _refuse_compiled(model, modules)
        tap.root, tap.modules = model, modules
    signature = _signature(tap)
    cached = _CHECKED.get(boundary)
    if cached is None or cached[0] != signature or (adapters and cached[1] != _adapters(sites)):
        cached = (signature, None, [], {})
    new = any((m.training, i) not in cached[3] for i, site in enumerate(sites) for m in site.modules)
    if new:
        tap.refuse_other_thread()  # because the self-check runs the model
    *_, tap.probes, tap.modes = cached
    if new:
        examine(tap)
        _CHECKED[boundary] = (signature, _adapters(sites), tap.probes, tap.modes)
    return tap, [site.name for site in sites]


def taps_within(model: nn.Module) -> list[Tap]:
    """Return the taps of a model and of its parts that are still alive, e.g. kept by a context or an attachment."""
    kept = (_TAPS[module]() for module in model.modules() if module in _TAPS)
    return [tap for tap in kept if tap is not None]


def _selecting(sites: list[Site]) -> list[nn.Module]:
    """Return the routers, the blocks around them and the modules in these blocks (the experts). If one of the last is
    compiled, the module that was compiled is returned."""
    blocks = [block for site in sites for block in site.parents[:1]]
    held = (m for block in blocks for m in block._modules.values() if m is not None)
    return [*(m for site in sites for m in site.modules), *blocks, *(m._modules.get("_orig_mod") or m for m in held)]


def _signature(tap: Tap) -> list[Any]:
    """Return all that may decide how routers select: if any of it changes, the model is checked again."""
    kernels = getattr(tap.boundary.config, "_experts_implementation", None)
    own = ((m, m.__dict__) for m in tap.selecting)  # a module's getattr is slow where there is nothing to find
    return [kernels, *((type(m), type(m).forward, its.get("top_k"), its.get("forward")) for m, its in own)]


def _adapters(sites: list[Site]) -> list[Any]:
    """Return which adapters of PEFT in the routers are on, off or merged. Selections are found in any case, the logits
    are not (`Selector.maps`)."""
    inside = [part for site in sites for module in site.modules for part in module.modules()]
    names = ("_disable_adapters", "_active_adapter", "merged_adapters")  # the first two may be the class's
    return [repr([getattr(part, name) for name in names]) for part in inside if hasattr(part, names[-1])]


def _refuse_compiled(model: nn.Module, modules: list[nn.Module]) -> None:
    """Raise RoutingError, naming the module, if a module of the model is compiled already."""
    for module in modules:
        own = module.__dict__
        if "_orig_mod" in own["_modules"] or own.get("_compiled_call_impl") or "_compiled_call" in own:
            name = next(name for name, other in model.named_modules() if other is module)
            raise refusals.compiled(name or type(module).__name__)


def _dynamo_ran() -> bool:
    """Return whether torch.compile was used in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Recording]:
    """Record which experts every router of `model` chooses for every token, in forward() and generate().

    model: any Mixture-of-Experts model of transformers, bare or wrapped (DDP, FSDP2, PEFT, ...). Outputs are not
        changed by one bit. Inside `replay_routes` or `noisy_routes` the experts that were really used are recorded.
    Yields a Recording; read `.routes` when the calls are done.

    Random draws of the forward affect the routes: in train mode with dropout or router jitter two recordings of one
    text differ at equal weights. To compare, record in eval mode or without random draws
    (`moe_rl.measure.randomness.turn_off_randomness`).

    Raises UnsupportedModelError for a model that fails the self-check (run once in train and once in eval mode),
    RoutingError for a model that was compiled without `attach`, for packed continuous batching, and for a forward in
    which a router did not run.
    """
    tap, names = acquire(model)
    recording = Recording(tap.routers(names))
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
    once: bool = False,
) -> Iterator[Replay]:
    """Make the routers of `model` choose the given experts; gate weights come from the live scores.

    With live scores s and forced experts e the router continues with (s[e], e) instead of the top k of s: Routing
    Replay of arXiv 2507.18071, section 5.3. Everything after the selection is the model's own code, so gates and their
    gradients are exact. Put forward *and* backward inside the context if you can; with transformers' gradient
    checkpointing a backward after the context is replayed, too.

    routes: for exactly this batch; rows of -1 are left to the router.
    sites, tokens, slots: force only these sites (names, shell patterns or indices), only these tokens (bool [B,T]),
        only the first n slots (the others are the best of the remaining experts).
    shadow: let the routers rank live, too; the results are `.shadow`, `.regret` and `.shadow_change` of the Replay.
    check_tokens: compare input_ids with those that the routes were recorded for.
    once: raise RoutingError at the end unless one forward of the whole batch ran under the replay, and nothing more.
    Nested replays: the inner replay decides the slots that it forces, the outer one decides the others.

    Raises RoutingError for routes that do not fit (sites, experts, shape, tokens); UnsupportedModelError as
    `record_routes`.
    """
    tap, names = acquire(model)
    kind = ShadowReplay if shadow else Replay
    replay = kind(tap, names, routes, sites, tokens, slots, check_tokens, once)
    with tap.listen(replay):
        yield replay
    if not replay.reached and _dynamo_ran():
        warnings.warn(refusals.NOTHING_REPLAYED, stacklevel=3)
