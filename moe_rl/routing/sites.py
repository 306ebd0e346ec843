"""Routing sites of a model: the routers that transformers itself registers, under names that wrappers do not change."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from moe_rl.routing.errors import RoutingError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Site:
    """A routing site: one place in a model where tokens are given to experts.

    name: qualified name of the router in the model that was searched, without wrapper parts.
    modules: the router under that name; more than one where PEFT keeps the original beside the copy that it trains.
    parents: the modules that hold the router, innermost first (the block, the decoder layer, ...).
    fixed: the selection is a table over token ids, not a choice (hash routing): recorded, never replayed.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parents: tuple[nn.Module, ...]
    fixed: bool = False

    @property
    def module(self) -> nn.Module:
        """The router; where PEFT holds two, the copy that it trains."""
        return self.modules[-1]

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {type(self.module).__name__}{', fixed' if self.fixed else ''})"


def find_sites(model: nn.Module) -> list[Site]:
    """Return the routing sites of a transformers model, in the order of its modules; wrappers are looked through.

    A router is what the model's own classes register as the source of `router_logits`
    (`PreTrainedModel._can_record_outputs`). Matching is by `isinstance`, so that classes which FSDP2 derives are
    found. Of two registered modules inside each other the inner one is the router (JetMoE registers its attention
    too). A module that stands where routers stand in other layers, but is of a class that is not registered, is a
    fixed site (the hash-routed layers of DeepSeek-V4).

    Only the structure is looked at: nothing runs, and a family whose routers cannot be intercepted is refused later, by
    `attach` or by the first context. Raises UnsupportedModelError for a model without registered routers.
    """
    if not isinstance(model, nn.Module):
        load = ": a name has to be loaded first, with AutoModelForCausalLM.from_pretrained"
        raise UnsupportedModelError(
            f"expected a model (an nn.Module that holds a transformers model), got {type(model).__name__}"
            f"{load if isinstance(model, str) else ''}"
        )
    named = dict(model.named_modules())
    registered = tuple({cls for m in named.values() for cls in _router_classes(m)})
    found = {name for name, module in named.items() if isinstance(module, registered)}
    routers = {name for name in found if not any(n.startswith(name + ".") and not _twin(name, n) for n in found)}
    if not routers:
        raise UnsupportedModelError(_why_no_router(named))
    places = {_place(name, named) for name in routers}
    attributes = {attribute for _, attribute in places}
    fixed = {
        name
        for name in named
        if name not in found
        and name.rpartition(".")[2] in attributes
        and _place(name, named) in places
        and not _inside(name, routers)
    }
    sites: dict[str, list[str]] = {}
    for name in named:
        if name in routers or name in fixed:
            sites.setdefault(canonical_site(name), []).append(name)
    return [
        Site(
            name,
            tuple(named[n] for n in full),
            tuple(_parents(full[0], named)),
            fixed=not any(n in routers for n in full),
        )
        for name, full in sites.items()
        if any(n in routers for n in full) or len(full) == 1
    ]


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all routers, each once, adapters on them (LoRA) included. Use: to freeze them, or to
    give them a learning rate of their own. A correction bias on the scores that is a buffer is not among them. Raises
    as `find_sites`."""
    names = {site.name for site in find_sites(model)}
    held = (m.parameters() for name, m in model.named_modules() if canonical_site(name) in names)
    return list(dict.fromkeys(parameter for parameters in held for parameter in parameters))


routing_sites = find_sites


def boundary_of(model: nn.Module, sites: list[Site]) -> PreTrainedModel:
    """Return the innermost transformers model that holds every site. One call of that model is one forward, however it
    is called. Raises UnsupportedModelError if there is none."""
    for holder in sites[0].parents:
        if isinstance(holder, PreTrainedModel) and all(any(p is holder for p in s.parents) for s in sites):
            return holder
    raise UnsupportedModelError(
        f"the routers of {type(model).__name__} lie in several transformers models; record and replay each of them on "
        "its own"
    )


def _router_classes(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the classes that a transformers model registers as sources of `router_logits`."""
    if not isinstance(module, PreTrainedModel):
        return
    specs = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
    for spec in specs if isinstance(specs, list | tuple) else [specs]:
        target = spec.target_class if isinstance(spec, OutputRecorder) else spec
        if isinstance(target, type):
            yield target


def _twin(outer: str, inner: str) -> bool:
    """Return whether two nested names are one router and its wrapper (LoRA around a router that is itself a Linear)."""
    return canonical_site(outer) == canonical_site(inner)


def _inside(name: str, routers: set[str]) -> bool:
    """Return whether a module is in a router, or is its wrapper."""
    return any(name.startswith(r + ".") or _twin(r, name) for r in routers)


def _place(name: str, named: dict[str, nn.Module]) -> tuple[type, str]:
    """Return the class of the holder and the attribute, which routers of different layers have in common."""
    return type(next(_parents(name, named), None)), canonical_site(name).rpartition(".")[2]


def _parents(name: str, named: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the holders of a module, innermost first, without wrappers and containers."""
    own, last = canonical_site(name), None
    while name:
        name = name.rpartition(".")[0]
        here = canonical_site(name) if name else ""
        if here != own and here != last and not isinstance(named[name], nn.ModuleList | nn.ModuleDict):
            yield named[name]
        last = here


def _why_no_router(named: dict[str, nn.Module]) -> str:
    """Return why no router was found, for an error message."""
    inner = [m for m in named.values() if isinstance(m, PreTrainedModel)]
    what = type(inner[0] if inner else named[""]).__name__
    if not inner:
        return f"{what} holds no transformers model: routing sites are found through PreTrainedModel"
    import transformers

    if any(getattr(model.config, "is_encoder_decoder", False) for model in inner):
        return (
            f"{what} is an encoder-decoder model: encoder and decoder route different tokens, which one [B,T] cannot "
            "hold. Decoder-only models are supported"
        )
    return (
        f"{what} registers no router for `router_logits` in transformers {transformers.__version__}: a dense model, "
        "or a family whose routers this version of transformers does not register (5.24 knows the most)"
    )


# -- names -------------------------------------------------------------------------------------------------------------

_WRAPPERS = {
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FSDP1
    "_checkpoint_wrapped_module",  # torch's checkpoint_wrapper
    "base_layer",  # PEFT: LoRA around a module or a parameter
    "original_module",  # PEFT: modules_to_save, the frozen original
}


def within(own: str, other: str) -> bool:
    """Return whether two names may be of one site: equal, or one of them in a model around that of the other."""
    return own == other or own.endswith("." + other) or other.endswith("." + own)


@lru_cache(maxsize=1 << 16)
def canonical_site(name: str) -> str:
    """Return the qualified name of a module without the parts that wrappers add.

    `module.` (DistributedDataParallel) and `base_model.model.` (PEFT) are dropped only at the front, because
    a model may have a child of its own called `module`; the other parts are dropped anywhere. A name made of
    nothing but wrapper parts is returned as it is.

    >>> canonical_site("module._orig_mod.model.layers.0.mlp.gate")
    'model.layers.0.mlp.gate'
    >>> canonical_site("base_model.model.model.layers.0.mlp.gate.modules_to_save.default")
    'model.layers.0.mlp.gate'
    """
    parts: list[str] = []
    given = iter(name.split("."))
    for part in given:
        if part == "modules_to_save":
            next(given, None)  # the adapter's name
        elif part not in _WRAPPERS:
            parts.append(part)
    while True:
        if parts[:1] == ["module"]:
            parts = parts[1:]
        elif parts[:2] == ["base_model", "model"]:
            parts = parts[2:]
        else:
            return ".".join(parts) or name


def match_sites(sites: Sequence[str], wanted: str | int | Iterable[str | int]) -> list[int]:
    """Return positions in `sites` of the wanted sites: names, shell patterns (`"*.layers.3.*"`) or indices.

    Raises RoutingError, with the nearest names, if an entry matches nothing. Each site is listed once, in the
    order in which it was asked for.

    >>> match_sites(["layers.0.gate", "layers.1.gate"], "*.1.*")
    [1]
    """
    given: Any = getattr(wanted, "tolist", lambda: wanted)()  # numpy's and torch's, scalars too
    entries = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not entries:
        raise RoutingError(f"no routing site was asked for; there are {len(sites)}, the first is {sites[0]}")
    found: dict[int, None] = {}
    for entry in entries:
        if isinstance(entry, str):
            name = canonical_site(entry)
            hits = [i for i, site in enumerate(sites) if site == name or fnmatch.fnmatchcase(site, entry)]
        else:
            position = getattr(entry, "item", lambda entry=entry: entry)()
            if type(position) is not int:  # a bool would be taken for site 0 or 1
                raise RoutingError(
                    f"routing sites are asked for by name, shell pattern or index, got {entry!r}; of a mask over "
                    "sites, give the indices that are True"
                )
            hits = [range(len(sites))[position]] if -len(sites) <= position < len(sites) else []
        if not hits:
            near = difflib.get_close_matches(str(entry), sites, n=3, cutoff=0.3) or list(sites[:3])
            raise RoutingError(f"no routing site matches {entry!r}; there are {len(sites)}, the nearest: {near}")
        found.update(dict.fromkeys(hits))
    return list(found)
