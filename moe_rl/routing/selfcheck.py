"""Self-check of a model before its first use, in train or in eval mode: a few tokens show if interception is exact.

The check runs some forwards without gradients, in the mode that the model is in: two without changes, which tell if the
model draws random numbers (if so, all others start from one random state, which is put back); one that watches which
operations the routers perform; one that replays its own routes (the output must be identical); one that forces routes
which cover every expert (exactly those must arrive at the experts); and two that also set the routers' logits: the
gates of forced experts must not be zero, and must not depend on which experts the router would have chosen. Buffers are
put back.
"""

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.calls import device_of
from moe_rl.routing.errors import UnsupportedModelError
from moe_rl.routing.evidence import kept_slots, tensors_of
from moe_rl.routing.hooks import Tap
from moe_rl.routing.probing import Seen, alike, around, evidence, forced_forward, forward, quiet, refused, watch
from moe_rl.routing.selection import Selector
from moe_rl.routing.sequential_max import MaskedSelection, SequentialMax, WithLogits
from moe_rl.routing.sites import Site

_BY_MAX = {"PhimoeTopKRouter"}  # routers that select by successive maxima
_PLAIN = 2, 8  # sequences, and tokens of each, of the forwards that watch and compare
_ZERO_GATES = 0.05  # share of exactly zero gates that underflow may explain, where logits cannot be set
_SAME_GATES = 0.05  # relative difference that rounding (bfloat16) may explain


def examine(tap: Tap) -> None:
    """Fill in `tap.modes` for the mode of each router. Raises UnsupportedModelError naming site, class and what is
    wrong."""
    if device_of(tap.boundary).type == "meta":
        raise UnsupportedModelError(
            f"{type(tap.boundary).__name__} has parameters on the meta device: load its weights first"
        )
    before = tap.probes
    try:
        with quiet(tap), alike(tap, *_PLAIN) as plain:
            probes = _learn(tap, plain)
    except BaseException:
        tap.probes = before
        raise
    for index, (old, new) in enumerate(zip(before, probes, strict=False)):
        if replace(old, calls=0, selection=0, maps=()) != replace(new, calls=0, selection=0, maps=()):
            raise refused(tap, index, f"selects its experts otherwise in train than in eval mode ({old}, {new})")
    for index, (site, probe) in enumerate(zip(tap.sites, probes, strict=True)):
        for module in site.modules:
            tap.modes[module.training, index] = probe


def _learn(tap: Tap, plain: Tensor) -> list[Selector]:
    """Return the Selector of each site; `plain` is the output of a forward. Raises UnsupportedModelError if a forward
    shows that interception fails."""
    depths = [0] * len(tap.sites)
    for _ in range(2):
        seen = watch(tap, depths, *_PLAIN)
        idle = [i for i, s in enumerate(seen) if not s.ran]
        if idle:
            raise refused(tap, idle[0], "did not run in a forward of the whole model")
        choosing = (s.ranked or site.fixed or _by_max(site.module) for s, site in zip(seen, tap.sites, strict=True))
        deeper = [i for i, chooses in enumerate(choosing) if not chooses]
        if not deeper:
            break
        depths = [d + (i in deeper) for i, d in enumerate(depths)]
    else:
        seen = watch(tap, depths, *_PLAIN)
    probes = [replace(_deduce(tap, i, s, math.prod(_PLAIN)), depth=depths[i]) for i, s in enumerate(seen)]
    tap.probes = probes
    _check_tables(tap, depths, seen)
    own = [s.ranked[p.selection][2] if s.ranked else _output_ids(s, p) for s, p in zip(seen, probes, strict=True)]
    _same_output(tap, plain, own, *_PLAIN)
    _force_others(tap, probes, length=max(8, *(math.ceil(p.num_experts / p.k) for p in probes)))
    return probes


def _check_tables(tap: Tap, depths: list[int], seen: list[Seen]) -> None:
    """Raise UnsupportedModelError if the experts of a fixed site are no table over token ids, since they move when the
    hidden states that the site is given change their sign."""
    fixed = [index for index, site in enumerate(tap.sites) if site.fixed]
    with ExitStack() as stack:
        for module in (module for index in fixed for module in tap.sites[index].modules):
            stack.callback(module.register_forward_pre_hook(_negated, with_kwargs=True).remove)
        other = watch(tap, depths, *_PLAIN) if fixed else seen
    for index in fixed:
        if not torch.equal(*(_output_ids(run[index], tap.probes[index]) for run in (seen, other))):
            raise refused(tap, index, "selects experts without torch.topk, and not by a table over token ids")


def _negated(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return arguments of a module with the sign of floating tensors changed; a forward pre-hook."""

    def other(value: Any) -> Any:
        return -value if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(other, args)), {name: other(value) for name, value in kwargs.items()}


def _by_max(module: nn.Module) -> bool:
    """Return whether a router selects by successive maxima."""
    return any(cls.__name__ in _BY_MAX for cls in type(module).__mro__)


def _deduce(tap: Tap, index: int, seen: Seen, rows: int) -> Selector:
    """Return the Selector of a site: which operation selects, and where its result comes out."""
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
            why = "stands where a router stands, but its selection is not understood"
            if site.fixed:
                why += ". Was a module put around the router or in its place? Keep it; change its weight or its forward"
            raise refused(tap, index, why)
        place, ids = next((p, v) for p, v in integers.items())
        k = ids.numel() // rows
        experts = int(getattr(site.module, "num_experts", 0)) or int(ids.max()) + 1
        maps = _maps_to_logits(site, seen.linear, experts)
        by_max = not site.fixed
        answer = SequentialMax if by_max else None
        return Selector(experts, k, seen.maxima, output=place, by_max=by_max, mode=answer, maps=maps)
    if not seen.ranked:
        raise refused(tap, index, "selects experts without torch.topk, in a way that is not known")

    def selector(call: int, place: int | None = None) -> Selector:
        experts, k, _, before = seen.ranked[call]
        mode = MaskedSelection if experts in seen.masked else None
        maps = _maps_to_logits(site, seen.linear[:before], experts)
        groups, open_groups, *_ = seen.ranked[max(0, call - 1)]
        grouped = open_groups < groups < experts
        return Selector(experts, k, len(seen.ranked), call, output=place, mode=mode, maps=maps, grouped=grouped)

    for place, ids in integers.items():
        for call, (_, k, chosen, _) in reversed(list(enumerate(seen.ranked))):
            if chosen.numel() == ids.numel() == rows * k and torch.equal(chosen.reshape(-1), ids.reshape(-1)):
                return selector(call, place)
    _, k, chosen, _ = seen.ranked[-1]
    if chosen.numel() != rows * k:
        added = "; tokens that a model adds itself, as prompt tuning does, are not supported"
        raise refused(
            tap,
            index,
            f"its last topk ranks {tuple(chosen.shape)}, expected one row for each of {rows} tokens"
            f"{added if chosen.numel() > rows * k else ''}",
        )
    return selector(len(seen.ranked) - 1)


def _maps_to_logits(site: Site, widths: list[int], experts: int) -> tuple[int, ...]:
    """Return the widths of the router's linear maps up to the one that makes the logits. It is the last one at least as
    wide as the number of experts; empty if there is none, or if an adapter adds the output of a map of its own."""
    inside = (part for module in site.modules for part in module.modules())
    if any(isinstance(getattr(part, "base_layer", None), nn.Linear) for part in inside):
        return ()
    wide = [i for i, width in enumerate(widths) if width >= experts]
    return tuple(widths[: wide[-1] + 1]) if wide else ()


def _output_ids(seen: Seen, probe: Selector) -> Tensor:
    """Return the output of the router that holds the selected ids."""
    assert probe.output is not None
    return seen.output[probe.output]


def _same_output(tap: Tap, plain: Tensor, own: list[Tensor], batch: int, length: int) -> None:
    """Raise UnsupportedModelError if the model's own routes, when forced, are not used or change its output. No bit may
    change, except by at most 8 times the noise of kernels that are not deterministic."""
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


def _force_others(tap: Tap, probes: list[Selector], length: int) -> None:
    """Force other routes, and check what comes out of the routers and what arrives at the experts.

    The tokens of the first sequence go to all experts, those of the second all to the same few. So a router is found
    out that masks what is not its live choice, or that limits how many tokens an expert takes.
    """
    device = device_of(tap.boundary)
    forced = []
    for i, probe in enumerate(probes):
        all_over = (torch.arange(length * probe.k, device=device) + 3 * i) % probe.num_experts
        same = torch.arange(probe.k, device=device).repeat(length)
        forced.append(torch.cat([all_over, same]).reshape(2 * length, probe.k))
    with evidence(tap) as seen:
        forced_forward(tap, forced, 2, length)
    kept = []
    for index, (found, ids, probe) in enumerate(zip(seen, forced, probes, strict=True)):
        fixed = tap.sites[index].fixed
        if fixed:
            ids = _output_ids(found, probe).reshape(ids.shape)
        slots = kept_slots(ids, found.output, found.arguments, probe.num_experts)
        if slots is None and not fixed:
            raise refused(
                tap,
                index,
                "forced experts do not show in what the router returns and the experts receive: its selection is not "
                "one top-k whose result is used as it is",
            )
        kept.append(slots)
        if probe.output is not None and not torch.equal(found.output[probe.output].reshape(ids.shape), ids):
            probe = replace(probe, output=None)  # the output loses an id: read the selection itself
        probes[index] = replace(probe, arrival=found.arrival_of(ids))
    _check_gates(tap, probes, forced, kept, seen, length)


def _check_gates(
    tap: Tap, probes: list[Selector], forced: list[Tensor], kept: list[Tensor | None], seen: list[Seen], length: int
) -> None:
    """Raise UnsupportedModelError unless gates of forced experts come from their own scores, whatever the live choice.

    The same experts are forced twice, with the same logits: once the logits of all others are lower, so that the forced
    experts are the live choice, and once they are higher than those of all but the first few forced experts. No gate
    may be zero (at such logits a zero is no underflow but a mask), and the share of each gate in the sum of its row
    must be the same. With one expert per token only zeros can be detected: a softmax over all experts may change its
    gate.
    """
    runs = []
    for others in (-1.0, 1.0):
        with evidence(tap) as found, around(tap, [p.depth for p in probes], _settable(probes, forced, others)):
            forced_forward(tap, forced, 2, length)
        runs.append(found)
    for index, (probe, slots) in enumerate(zip(probes, kept, strict=True)):
        if tap.sites[index].fixed or slots is None:
            continue
        settable = bool(probe.maps)
        live, other = (_gates(run[index], slots) for run in (runs if settable else (seen, seen)))
        for gates in (*_gates(seen[index], slots), *live, *other):
            if not bool(gates.isfinite().all()):
                raise refused(tap, index, f"gates of forced experts are not finite: {_not_finite(tap)}")
        if any(float(((g == 0) & slots).float().mean()) > (0 if settable else _ZERO_GATES) for g in (*live, *other)):
            raise refused(
                tap, index, "gates of forced experts are zero: they are read from scores that the live choice masks"
            )
        if settable and probe.k > 1 and not probe.by_max:  # Phi-MoE's gates depend on the live maximum by design
            for one, two in zip(live, other, strict=True):
                one, two = (g.float().abs() / g.float().abs().sum(-1, keepdim=True) for g in (one, two))
                if bool((((one - two).abs() > _SAME_GATES * (one + two)) & slots).any()):
                    raise refused(
                        tap,
                        index,
                        "gates of forced experts depend on which experts the router would have chosen (it scales, "
                        "sorts or groups by its live choice): they would not be those of a router that chose them",
                    )


def _not_finite(tap: Tap) -> str:
    """Return the likely cause of gates that are not finite, for an error message."""
    for name, weight in tap.boundary.named_parameters():
        own = getattr(weight, "to_local", lambda weight=weight: weight)()  # a shard
        if not bool(own.isfinite().all()):
            return f"{name} holds values that are not, the weights of a run that diverged or a damaged file?"
    return f"its weights are, so that its own forward overflows ({tap.boundary.dtype})?"


def _gates(seen: Seen, kept: Tensor) -> list[Tensor]:
    """Return the tensors that may be gates, `[N,K]` (Llama 4 has none apart from the scores in `kept_slots`)."""
    tensors = tensors_of((seen.output, seen.arguments))
    return [t.reshape(kept.shape) for t in tensors if t.is_floating_point() and t.numel() == kept.numel()]


def _settable(probes: list[Selector], forced: list[Tensor], others: float) -> Any:
    """Return a function from a router's index to a mode that sets the logits of this router. The logits of all other
    experts are below those of the forced experts or, if `others` > 0, above all but the first few of those."""

    def mode(index: int) -> TorchFunctionMode:
        probe, ids = probes[index], forced[index]
        experts = probe.num_experts
        own = torch.linspace(0.8, 0.2, probe.k, device=ids.device).expand(ids.shape)
        spread = torch.linspace(0, 0.1, experts, device=ids.device)  # no ties
        base = 0.6 + spread if others > 0 else -1 - spread
        wanted = base.expand(len(ids), -1).scatter(-1, ids, own)

        def become(_: Tensor, logits: Tensor) -> Tensor:
            if logits.numel() == logits.shape[-1] * len(wanted):
                logits = logits.clone()
                logits[..., :experts] = wanted.to(logits.dtype).reshape(*logits.shape[:-1], experts)
            return logits

        return WithLogits(probe, become)

    return mode
