"""Before a model is first used: does the intercept hold for it? A few tokens through it decide; else it is refused.

Four forwards without gradients, in eval mode, with the random state put back: one as it is, one that watches which
operations its routers perform, one that replays its own routes (the output must be identical), and one that forces
routes which cover every expert (exactly those must arrive at the experts, with gates that are finite and not zero).
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.routing.errors import UnsupportedModelError
from moe_rl.routing.hooks import Tap
from moe_rl.routing.probing import Seen, evidence, forced_forward, forward, quiet, refused, tensors_of, watch
from moe_rl.routing.selection import Probe

_BY_MAX = {"PhimoeTopKRouter"}  # routers that select by successive maxima
_ZERO_GATES = 0.05  # share of exactly zero gates that underflow may explain; masked scores give far more


def examine(tap: Tap) -> list[Probe]:
    """One Probe per site, or UnsupportedModelError naming the site, its class and what is wrong."""
    if any(p.is_meta for p in tap.boundary.parameters()):
        raise UnsupportedModelError(
            f"{type(tap.boundary).__name__} has parameters on the meta device: load its weights first"
        )
    with quiet(tap.boundary):
        plain, depths = forward(tap, 2, 8), [0] * len(tap.sites)
        for _ in range(2):
            seen = watch(tap, depths, 2, 8)
            idle = [i for i, s in enumerate(seen) if not s.ran]
            if idle:
                raise refused(tap, idle[0], "did not run in a forward of the whole model")
            deeper = [i for i, s in enumerate(seen) if not _selects(tap, i, s)]
            if not deeper:
                break
            depths = [d + (i in deeper) for i, d in enumerate(depths)]
        else:
            seen = watch(tap, depths, 2, 8)
        probes = [replace(_deduce(tap, i, s, 16), depth=depths[i]) for i, s in enumerate(seen)]
        tap.probes = probes
        own = [s.ranked[p.selection][2] if s.ranked else _output_ids(s, p) for s, p in zip(seen, probes, strict=True)]
        _same_output(tap, plain, own, 2, 8)
        _force_others(tap, probes, length=max(8, *(math.ceil(p.num_experts / p.k) for p in probes)))
    return probes


def _selects(tap: Tap, index: int, seen: Seen) -> bool:
    site = tap.sites[index]
    return bool(seen.ranked) or site.fixed or _by_max(site.module)


def _by_max(module: nn.Module) -> bool:
    return any(cls.__name__ in _BY_MAX for cls in type(module).__mro__)


def _deduce(tap: Tap, index: int, seen: Seen, rows: int) -> Probe:
    """Which operation selects, and where its result comes out."""
    site = tap.sites[index]
    if seen.ran != 1:
        raise refused(tap, index, f"ran {seen.ran} times in one forward, expected once")
    integers = {
        place: value
        for place, value in enumerate(seen.output)
        if isinstance(value, Tensor) and not value.is_floating_point() and value.numel() % rows == 0 and value.numel()
    }
    if site.fixed or _by_max(site.module):
        if seen.ranked or not integers:
            raise refused(tap, index, "stands where a router stands, but its selection is not understood")
        place, ids = next((p, v) for p, v in integers.items())
        k = ids.numel() // rows
        experts = int(getattr(site.module, "num_experts", 0)) or int(ids.max()) + 1
        return Probe(experts, k, output=place, by_max=not site.fixed, logits=_last_of(seen.linear, experts))
    if not seen.ranked:
        raise refused(tap, index, "selects experts without torch.topk, in a way that is not known")
    for place, ids in integers.items():
        for call in reversed(range(len(seen.ranked))):
            experts, k, chosen = seen.ranked[call]
            if chosen.numel() == ids.numel() == rows * k and torch.equal(chosen.reshape(-1), ids.reshape(-1)):
                return Probe(experts, k, call, output=place, logits=_logits(seen, call))
    call = len(seen.ranked) - 1
    experts, k, chosen = seen.ranked[call]
    if chosen.numel() != rows * k:
        raise refused(
            tap, index, f"its last topk ranks {tuple(chosen.shape)}, expected one row for each of {rows} tokens"
        )
    return Probe(experts, k, call, logits=_logits(seen, call))


def _logits(seen: Seen, call: int) -> int:
    return _last_of(seen.linear[: seen.linear_at_topk[call]], seen.ranked[call][0])


def _last_of(widths: list[int], experts: int) -> int:
    """Which linear map (counted among all of the router's) makes the logits: the last as wide as the experts."""
    wide = [i for i, width in enumerate(widths) if width >= experts]
    return wide[-1] if wide else -1


def _output_ids(seen: Seen, probe: Probe) -> Tensor:
    assert probe.output is not None
    return seen.output[probe.output]


def _same_output(tap: Tap, plain: Tensor, own: list[Tensor], batch: int, length: int) -> None:
    """Replaying what the model chose anyway must not change one bit of its output."""
    forced = [ids.reshape(-1, p.k) for ids, p in zip(own, tap.probes, strict=True)]
    output, used = forced_forward(tap, forced, batch, length)
    for index, (chosen, ids) in enumerate(zip(used, forced, strict=True)):
        if chosen is None or not torch.equal(chosen, ids):
            raise refused(tap, index, "did not use its own routes when they were forced")
    if not torch.equal(output.nan_to_num(), plain.nan_to_num()):
        again = forward(tap, batch, length)  # kernels that are not deterministic: compare with their own noise
        noise = (again - plain).abs().max()
        if not (noise > 0 and (output - plain).abs().max() <= 8 * noise):
            raise refused(tap, 0, "replaying its own routes changed the output of the model")


def _force_others(tap: Tap, probes: list[Probe], length: int) -> None:
    """Force other routes, and look at what comes out of the routers and what arrives at the experts.

    The first sequence goes through all experts, the second is sent to the same few as a whole: a router that masks what
    is not its live choice, or that limits how many tokens an expert takes, gives itself away.
    """
    device = tap.boundary.device
    forced = []
    for i, probe in enumerate(probes):
        all_over = (torch.arange(length * probe.k, device=device) + 3 * i) % probe.num_experts
        same = torch.arange(probe.k, device=device).repeat(length)
        forced.append(torch.cat([all_over, same]).reshape(2 * length, probe.k))
    with evidence(tap) as seen:
        forced_forward(tap, forced, 2, length)
    for index, (found, ids, probe) in enumerate(zip(seen, forced, probes, strict=True)):
        if tap.sites[index].fixed:
            continue
        kept = _kept(found, ids, probe)
        if kept is None:
            raise refused(
                tap,
                index,
                "forced experts do not show in what the router returns and the experts receive: its selection is not "
                "one top-k whose result is used as it is",
            )
        if not _gates_alive(found, kept):
            raise refused(
                tap,
                index,
                "gates of forced experts are zero or not finite: they are read from scores that the live choice masks",
            )
        if probe.output is not None and not torch.equal(found.output[probe.output].reshape(ids.shape), ids):
            probes[index] = replace(probe, output=None)  # the output loses an id: read the selection itself


def _gates_alive(seen: Seen, kept: Tensor) -> bool:
    """Gates of the slots that are kept are finite and not zero (Llama 4 has none apart from the scores in `_kept`)."""
    tensors = tensors_of((seen.output, seen.arrived))
    gates = [t.reshape(kept.shape) for t in tensors if t.is_floating_point() and t.numel() == kept.numel()]
    return all(bool(g.isfinite().all()) and float(((g == 0) & kept).float().mean()) < _ZERO_GATES for g in gates)


def _kept(seen: Seen, forced: Tensor, probe: Probe) -> Tensor | None:
    """Which forced slots show unchanged: all; all but those of one id (a skip expert that is remapped); or None."""
    received = _ids_like(forced, seen.arrived) or _ids_like(forced, seen.output)
    if received:
        kept = [_unchanged(ids, forced) for ids in received]
        return None if any(k is None for k in kept) else torch.stack([k for k in kept if k is not None]).all(0)
    whole = torch.ones_like(forced, dtype=torch.bool)
    outputs = tensors_of(seen.output)
    for table in outputs:  # Llama 4: scores of all experts, zero where not selected
        if table.is_floating_point() and table.numel() == forced.shape[0] * probe.num_experts:
            used = table.reshape(forced.shape[0], -1) != 0
            if torch.equal(used, torch.zeros_like(used).scatter(-1, forced, True)):
                return whole
    for order in outputs:  # JetMoE: slots sorted by expert
        if not order.is_floating_point() and order.numel() == forced.numel():
            slots = order.reshape(-1).sort().values
            permutes = torch.equal(slots, torch.arange(len(slots), device=slots.device))
            if permutes and bool((forced.reshape(-1)[order.reshape(-1)].diff() >= 0).all()):
                return whole
    return None


def _ids_like(forced: Tensor, values: Any) -> list[Tensor]:
    """Integer tensors `[..,K]` with one row for each token."""
    tensors = [t for t in tensors_of(values) if not t.is_floating_point() and t.dtype != torch.bool]
    return [
        t.reshape(forced.shape)
        for t in tensors
        if t.ndim > 1 and t.shape[-1] == forced.shape[-1] and t.numel() == forced.numel()
    ]


def _unchanged(ids: Tensor, forced: Tensor) -> Tensor | None:
    same = ids == forced
    if bool(same.all()):
        return same
    lost = forced[~same].unique()
    return same if len(lost) == 1 and not bool((forced[same] == lost).any()) else None
