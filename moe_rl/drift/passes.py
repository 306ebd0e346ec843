"""The forwards of a comparison, batch by batch, with both models in memory, or with one at a time and a disk cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor import Floor
from moe_rl.drift.gates import gates_of, with_gates
from moe_rl.drift.output import Tick
from moe_rl.drift.prompts import Text, TextBatch
from moe_rl.measure.decompose import Decomposition, combine, decompose_scored, score_sites
from moe_rl.measure.scoring import Scored, TokenBatch, score_live, score_replayed
from moe_rl.routing import RoutedExperts, record_margins


@dataclass(frozen=True)
class Measured:
    """The measurements of one batch.

    parts: the 2x2 of {old, new} weights and {old, new} routes. margins: of the old choices, in the units of the
    router's scores.
    """

    batch: TextBatch
    parts: Decomposition
    margins: Float[Tensor, "B T L"]
    swapped: tuple[RoutedExperts, RoutedExperts] | None = None
    """Routes of new routers on the old body, and of old routers on the new body."""


def with_both(
    old: nn.Module,
    new: nn.Module,
    text: Text,
    per_site: bool,
    gate_swap: bool,
    floor: Floor,
    tick: Tick,
) -> Iterator[Measured]:
    """Yield the measurements of every batch, with both models in memory.

    Each batch takes four forwards, two more for swapped routers (`gate_swap`), and those of the sites (`per_site`); the
    first batches also take those of the noise floor."""
    gates = (gates_of(old), gates_of(new)) if gate_swap else None
    for batch in text.batches():
        words = batch.text
        with record_margins(old) as margins:
            before = scored("OLD", old, words)
        floor.add(old, words, before)
        after = scored("NEW", new, words)
        parts = _finite(decompose_scored(old, new, words, before, after, per_site=per_site))
        swapped = None
        if gates is not None:
            swapped = _routes_with(old, gates[1], words), _routes_with(new, gates[0], words)
        yield Measured(batch, parts, margins.values, swapped)
        tick()


def one_at_a_time(
    load_old: Callable[[], nn.Module],
    load_new: Callable[[], nn.Module],
    text: Text,
    per_site: bool,
    gate_swap: bool,
    cache: Path,
    floor: Floor,
    tick: Tick,
) -> Iterator[Measured]:
    """Yield the measurements of every batch, bit for bit those of `with_both`, with one model in memory at a time.

    There are three passes over the text: with the old model, the new one, and the old one again.

    cache: a folder for routes and log-probabilities, K bytes per token and site (2K above 255 experts) for each model,
    and a few numbers per token.
    """
    cache.mkdir(parents=True, exist_ok=True)
    model = load_old()
    for number, batch in enumerate(text.batches()):
        with record_margins(model) as margins:
            before = scored("OLD", model, batch.text)
        floor.add(model, batch.text, before)
        keep_scored(cache, f"old_{number}", before, margins=margins.values)
        tick()
    floor.close()
    old_gates = gates_of(model)
    del model  # before the next model is loaded
    model = load_new()
    for number, batch in enumerate(text.batches()):
        before, _ = kept_scored(cache, f"old_{number}")
        after = scored("NEW", model, batch.text)
        more = {"replayed": score_replayed(model, batch.text, before.routes, after.routes)}
        if per_site:
            more["alone"], more["others"] = score_sites(model, batch.text, before.routes, after, more["replayed"])
        keep_scored(cache, f"new_{number}", after, **more)
        if gate_swap:
            _routes_with(model, old_gates, batch.text).save(cache / f"body_{number}.routes")
        tick()
    new_gates = gates_of(model)
    del model
    model = load_old()
    for number, batch in enumerate(text.batches()):
        (before, known), (after, more) = kept_scored(cache, f"old_{number}"), kept_scored(cache, f"new_{number}")
        rerouted = score_replayed(model, batch.text, after.routes, before.routes)
        sites = (more["alone"], more["others"]) if per_site else None
        parts = _finite(combine(batch.text, before, after, more["replayed"], rerouted, sites))
        swapped = None
        if gate_swap:
            body = RoutedExperts.load(cache / f"body_{number}.routes")
            swapped = _routes_with(model, new_gates, batch.text), body
        for file in cache.glob(f"*_{number}.*"):
            file.unlink()
        yield Measured(batch, parts, known["margins"], swapped)
        tick()


def scored(which: str, model: nn.Module, text: TokenBatch) -> Scored:
    """Return `score_live`. which: the name of the model in messages. Raises DriftError: as `check_finite`."""
    found = score_live(model, text)
    check_finite(which, found.logps)
    return found


def check_finite(which: str, logps: Float[Tensor, "B T"]) -> None:
    """Raise DriftError if a log-probability is not finite, which would compare as unchanged or as a huge log-ratio.

    which: the name of the model in messages.
    """
    bad = ~torch.isfinite(logps).all(1)
    if bool(bad.any()):
        raise DriftError(
            f"{which}: log-probabilities of {int(bad.sum())} of {len(bad)} texts of a batch are not finite. An "
            "overflow in this dtype (try --dtype float32), or a model that diverged"
        )


def _finite(parts: Decomposition) -> Decomposition:
    """Return the parts. Raises DriftError: a log-probability with forced routes is not finite."""
    check_finite("NEW with the routes of OLD", parts.new_weights)
    check_finite("OLD with the routes of NEW", parts.new_routes)
    for sites in (parts.site_alone, parts.site_last):
        for site in () if sites is None else sites:
            check_finite("NEW with the routes of OLD at some of the sites", site)
    return parts


def _routes_with(model: nn.Module, gates: dict[str, Tensor], text: TokenBatch) -> RoutedExperts:
    """Return the routes of the model with other routers."""
    with with_gates(model, gates):
        return score_live(model, text).routes


def keep_scored(cache: Path, name: str, scored: Scored, **tensors: Tensor) -> None:
    """Write the scores of one batch, and further tensors, to the cache under a name."""
    cache.mkdir(parents=True, exist_ok=True)
    scored.routes.save(cache / f"{name}.routes")
    save_file({"logps": scored.logps, **{k: v.contiguous() for k, v in tensors.items()}}, cache / f"{name}.logps")


def kept_scored(cache: Path, name: str) -> tuple[Scored, dict[str, Tensor]]:
    """Read what `keep_scored` wrote under a name, bit for bit: the scores and the further tensors."""
    tensors = load_file(cache / f"{name}.logps")
    return Scored(tensors.pop("logps").to(torch.float64), RoutedExperts.load(cache / f"{name}.routes")), tensors
