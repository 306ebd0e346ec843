"""Names of routing sites that stay the same under wrappers (compile, DDP, FSDP, PEFT, checkpointing)."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from functools import lru_cache

from moe_rl.routing.errors import RoutingError

_WRAPPERS = {
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FSDP1
    "_checkpoint_wrapped_module",  # torch's checkpoint_wrapper
    "base_layer",  # PEFT: LoRA around a module or a parameter
    "original_module",  # PEFT: modules_to_save, the frozen original
}


@lru_cache(maxsize=1 << 16)
def canonical_site(name: str) -> str:
    """The qualified name of a module without the parts that wrappers add.

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
    """Positions in `sites` of what is wanted: names, shell patterns (`"*.layers.3.*"`) or indices.

    Every entry has to find something, else RoutingError with the nearest names. Each site is listed once, in
    the order in which it was asked for.

    >>> match_sites(["layers.0.gate", "layers.1.gate"], "*.1.*")
    [1]
    """
    entries = [wanted] if isinstance(wanted, str | int) else list(wanted)
    if not entries:
        raise RoutingError(f"no routing site was asked for; there are {len(sites)}, the first is {sites[0]}")
    found: dict[int, None] = {}
    for entry in entries:
        if isinstance(entry, str):
            name = canonical_site(entry)
            hits = [i for i, site in enumerate(sites) if site == name or fnmatch.fnmatchcase(site, entry)]
        else:
            hits = [range(len(sites))[entry]] if -len(sites) <= entry < len(sites) else []
        if not hits:
            near = difflib.get_close_matches(str(entry), sites, n=3, cutoff=0.3) or list(sites[:3])
            raise RoutingError(f"no routing site matches {entry!r}; there are {len(sites)}, the nearest: {near}")
        found.update(dict.fromkeys(hits))
    return list(found)
