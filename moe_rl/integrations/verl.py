"""Routing Replay (R2) and routing diagnostics inside verl's FSDP engine; verl itself replays on Megatron and VeOmni.

Put a module of two lines on the workers' path and name it in the configuration (`...model.external_lib=my_replay`):

    from moe_rl.integrations.verl import install
    install(replay="R2")

verl has no registry for this: its engines' keys are unique. `install` therefore replaces attributes of verl's classes.
`FSDPEngineWithLMHead.forward_step` records the routes in the pass of the old log-probabilities, returns them as
`routed_experts`, which verl's trainer carries through batches as it does for its other engines, and replays them in
the actor's update. `ActorRolloutRefWorker.enable_routing_replay` is true, so that verl marks these passes. Reference
and critic are unchanged, and so is the actor while its LoRA adapters are off, because it then serves as the reference.

Added to verl's metrics, on prompt and response tokens; verl logs them as `actor/routing/...`, as means over all
micro-batches of a batch's updates, so that the 0 of the first update is in the changes:

- `routing/slot_change`, `routing/site_change`, `routing/token_change` ("none"): old policy against the weights at this
  update, both routing live
- `routing/shadow_slot_change` ("R2"): old policy against the routers' choice at hidden states that follow the replay;
  after the first site this is not the change without replay
- `routing/replayed_fraction`: share of the (token, site) rows with a route that were replayed, proven
- `routing/first_change`: share of slots changed while no weight has moved since the batch was scored; asserted
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.integrations.measures import CHANGES
from moe_rl.integrations.old_policy import refuse_model, refuse_options, refuse_other_version, same_policy
from moe_rl.routing import RoutedExperts, RoutingError, change_counts, record_routes, replay_routes

VERSIONS = ("0.9.1", "0.10.0.dev")
"""Versions of verl with an engine that was read and is supported."""
KINDS = ("none", "R2")
FIELD, FLAG = "routed_experts", "enable_routing_replay"
_STRATEGIES = ("fsdp", "fsdp2")


def install(replay: str = "R2", first_change_tolerance: float = 0.0) -> None:
    """Make every FSDP actor of this process replay routes or, with "none", only measure; see the module's docstring.

    first_change_tolerance: as in `moe_rl.integrations.trl`; bf16 kernels on a GPU may need more than 0, because verl
    composes its micro-batches anew for the update.

    Raises RoutingError for another kind of replay, a tolerance outside of [0, 1], a version of verl that is not known,
    and a second installation. The actor raises it while it trains: for dropout and router jitter, sequence parallelism
    (ulysses), an update without recorded routes, rows that were not replayed, and a `first_change` above the tolerance.
    """
    import verl
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker

    refuse_options(replay, KINDS, first_change_tolerance, " in verl's FSDP engine")
    refuse_other_version("verl", verl, VERSIONS, "engine", "workers/engine/fsdp/transformer_impl.py")
    if isinstance(vars(ActorRolloutRefWorker).get(FLAG), _Marked):
        raise RoutingError("routing replay was installed in this process already")
    setattr(ActorRolloutRefWorker, FLAG, _Marked())
    FSDPEngineWithLMHead.forward_step = forward_step(FSDPEngineWithLMHead.forward_step, replay, first_change_tolerance)
    FSDPEngineWithLMHead.optimizer_step = counted(FSDPEngineWithLMHead.optimizer_step)


class _Marked:
    """Descriptor for a worker's `enable_routing_replay`: true for FSDP actors, else the value that the worker set."""

    def __get__(self, worker: Any, owner: type | None = None) -> Any:
        if worker is None:
            return self
        return worker.config.actor.strategy in _STRATEGIES or vars(worker).get(FLAG, False)

    def __set__(self, worker: Any, value: bool) -> None:
        vars(worker)[FLAG] = value


def counted(original: Any) -> Any:
    """Return verl's `optimizer_step` with a count of its calls in `engine.routing_steps`."""

    def optimizer_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        engine.routing_steps = getattr(engine, "routing_steps", 0) + 1
        return original(engine, *args, **kwargs)

    return optimizer_step


def forward_step(original: Any, replay: str, tolerance: float) -> Any:
    """Return verl's `forward_step` with recording while the old policy scores and replay while the actor learns."""

    def forward_step(engine: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        marked = bool(_plain(micro_batch, FLAG, False)) and not hasattr(engine, "_router_replay")  # VeOmni has its own
        if not marked or (forward_only and adapters_off(engine.module)):
            return original(engine, micro_batch, loss_function=loss_function, forward_only=forward_only)
        if getattr(engine, "use_ulysses_sp", False):
            raise RoutingError("routing replay in verl's FSDP engine: sequence parallelism (ulysses) is not supported")
        if forward_only:
            if not hasattr(engine, "routing_sites"):
                refuse_model(engine.module)
            with record_routes(engine.module) as recording:
                loss, output = original(engine, micro_batch, loss_function=loss_function, forward_only=True)
            ids = recording.routes
            engine.routing_sites = ids.sites, ids.num_experts, ids.meta
            engine.routing_scored_at = getattr(engine, "routing_steps", 0)
            output["model_output"][FIELD] = as_jagged(ids, micro_batch["input_ids"].offsets())
            return loss, output
        routes, real = routes_of(engine, micro_batch)
        first = getattr(engine, "routing_steps", 0) == engine.routing_scored_at
        if replay == "none":
            with record_routes(engine.module) as recording:
                loss, output = original(engine, micro_batch, loss_function=loss_function, forward_only=False)
            now, metrics = recording.routes, {"routing/replayed_fraction": 0.0}
        else:
            with replay_routes(engine.module, routes, shadow=True) as forced:
                loss, output = original(engine, micro_batch, loss_function=loss_function, forward_only=False)
            now, done, rows = forced.shadow, forced.replayed_rows, forced.forced_rows
            if done != rows:
                raise RoutingError(f"only {done / rows:.3%} of the (token, site) rows with a route were replayed")
            metrics = {"routing/replayed_fraction": 1.0} if rows else {}  # without rows there was nothing to replay
        rates = change_counts(routes, now, real).rates()
        names = {"shadow_slot_change": "slot_change"} if replay == "R2" else {name: name for name in CHANGES}
        metrics |= {f"routing/{ours}": rates[name] for ours, name in names.items() if not math.isnan(rates[name])}
        if first:
            metrics["routing/first_change"] = same_policy(routes, now, real, tolerance)
        output["metrics"] = {**output["metrics"], **metrics}
        return loss, output

    return forward_step


def adapters_off(model: nn.Module) -> bool:
    """Return whether PEFT's adapters are switched off, so that verl scores the reference.

    verl scores the reference by the same marked pass of the same module; its routes would replace the old policy's."""
    return any(getattr(module, "disable_adapters", False) is True for module in model.modules())


def as_jagged(routes: RoutedExperts, offsets: Tensor) -> Tensor:
    """Return a forward's routes, packed or padded on the right, as verl's nested `[B,j,L,K]`, int16; -1: no route."""
    ids, lengths = routes.ids.to(torch.int16), offsets.diff()
    if len(ids) == 1 and int(offsets[-1]) <= ids.shape[1] and len(lengths) != 1:
        values = ids[0, : int(offsets[-1])]
    else:
        values = ids[torch.arange(ids.shape[1], device=ids.device) < lengths[:, None].to(ids.device)]
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets.to(values.device))


def routes_of(engine: Any, micro_batch: Any) -> tuple[RoutedExperts, Tensor]:
    """Return a micro-batch's routes in the engine's layout of its tokens, and a mask of the real tokens.

    Raises RoutingError if the micro-batch has no routes, this engine recorded none, or the routes are of sequences of
    other lengths than its tokens.
    """
    nested = micro_batch.get(FIELD, None)
    if nested is None or not hasattr(engine, "routing_sites"):
        raise RoutingError(
            "an update of the actor without routes of the old policy: the pass of the old log-probabilities was left "
            "out (algorithm.rollout_correction.bypass_mode?), or made by another engine. Nothing would be replayed"
        )
    tokens, offsets = micro_batch["input_ids"], micro_batch["input_ids"].offsets()
    lengths = [of.diff().tolist() for of in (nested.offsets(), offsets)]
    if lengths[0] != lengths[1]:  # laid out by the tokens' lengths, routes would be those of other tokens
        raise RoutingError(
            f"{FIELD} are of sequences of {lengths[0]} tokens, input_ids have {lengths[1]}: routes and tokens were put "
            "in another order, or cut differently, on their way through the batch. Both must be selected together"
        )
    values, ids = nested.values(), tokens.values()
    if _plain(micro_batch, "use_remove_padding", True):
        pad = engine._get_packed_pad_size(len(ids)) if hasattr(engine, "_get_packed_pad_size") else 0
        routes = torch.nn.functional.pad(values.long(), (0, 0, 0, 0, 0, pad), value=-1)[None]
        known = torch.nn.functional.pad(ids, (0, pad), value=-1)[None]
    else:
        where = torch.arange(int(offsets.diff().max()), device=ids.device) < offsets.diff()[:, None]
        routes = torch.full((*where.shape, *values.shape[1:]), -1, device=values.device)
        routes[where] = values.long()
        known = torch.full(where.shape, -1, device=ids.device).masked_scatter(where, ids)
    sites, experts, meta = engine.routing_sites
    return RoutedExperts(routes, sites, experts, tokens=known, meta=meta), known >= 0


def _plain(micro_batch: Any, key: str, default: Any) -> Any:
    """Return a setting that verl keeps among a batch's tensors; `default` if it is not there."""
    value = micro_batch.get(key, default)
    return getattr(value, "data", value)
