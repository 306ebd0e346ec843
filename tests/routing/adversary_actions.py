"""The adversary's actions: what happens inside the contexts (which have to work or be refused: adversary.py)."""

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from adversary_oracle import (
    BATCH,
    LENGTH,
    Wanted,
    World,
    draw,
    expect_like_twin,
    gradients,
    hold,
    judge,
    judge_ids,
    loss_of,
    opened,
    sets,
    world,
)
from routing_helpers import tokens
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

from moe_rl.routing import RoutedExperts, RoutingError, attach, find_sites, record_routes, replay_routes


def plain(w: World, wanted: Wanted, rng: random.Random) -> None:
    without = rng.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
    with w.watched(), without(), opened(w, wanted) as (replay, recording):
        out = w.model(w.inputs, use_cache=False).logits
    judge(w, wanted, replay, recording)
    expect_like_twin(w, out.detach().clone(), w.ids())


def attached(w: World, wanted: Wanted, rng: random.Random) -> None:
    with attach(w.model):
        plain(w, wanted, rng)
        with w.watched(), torch.no_grad():
            w.model(w.inputs)
        judge(w, Wanted("none", torch.full_like(wanted.forced, -1)), None, None)


def backward(w: World, wanted: Wanted, rng: random.Random) -> None:
    late, kind = rng.random() < 0.5, rng.choice(["none", "reentrant", "non-reentrant"])
    if kind != "none":
        w.model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    try:
        with w.watched():
            with opened(w, wanted):
                out = w.model(w.inputs, use_cache=False).logits
                ids, scores = w.ids(), w.scores()
                if not late:
                    loss_of(out).backward()
            if late:
                with opened(w, draw(rng, w)) if rng.random() < 0.3 else ExitStack():  # of another forward
                    loss_of(out).backward()
    finally:
        w.model.gradient_checkpointing_disable()
        if kind != "none":
            w.model.disable_input_require_grads()
    judge_ids(wanted, wanted.forced, ids, scores)
    expect_like_twin(w, out.detach(), ids, gradients(w.model))


def cached(w: World, wanted: Wanted, rng: random.Random) -> None:
    static = rng.random() < 0.4
    cache = StaticCache(config=w.model.config, max_cache_len=8) if static else DynamicCache(config=w.model.config)
    first, crop = rng.randint(1, LENGTH - 1), not static and rng.random() < 0.3
    with w.watched(), rng.choice([torch.no_grad, torch.inference_mode])(), opened(w, wanted) as (replay, recording):
        w.model(w.inputs[:, :first], past_key_values=cache)
        if crop and first > 1:
            cache.crop(-1)
            w.model(w.inputs[:, first - 1 :], past_key_values=cache)
        else:
            w.model(w.inputs[:, first:], past_key_values=cache)
    if crop and first > 1:
        judge_ids(wanted, wanted.forced[:, first - 1 :], w.ids(), w.scores())
        if recording is not None:
            hold(torch.equal(recording.routes.ids[:, first - 1 :], w.ids()), "the recording of a cropped cache")
    else:
        judge(w, wanted, replay, recording, calls=2)


def permuted_cache(w: World, wanted: Wanted, rng: random.Random) -> None:
    """To be refused by a replay when it happens, by a recording when it is asked for routes."""
    static, how = rng.random() < 0.4, rng.choice(["reorder", "twice", "in place", "data", "beam"])
    cache = StaticCache(config=w.model.config, max_cache_len=8) if static else DynamicCache(config=w.model.config)
    order = torch.tensor([1, 2, 0])
    with rng.choice([torch.no_grad, torch.inference_mode])(), opened(w, wanted) as (_, recording):
        if how == "beam" and wanted.options is None:
            w.model.generate(w.inputs, num_beams=3, max_new_tokens=4, do_sample=False)
        else:
            w.model(w.inputs[:, :3], past_key_values=cache)
            if how == "twice":
                cache.reorder_cache(order)
            if how in ("reorder", "twice", "beam"):
                cache.reorder_cache(order)
            else:
                for layer in cache.layers:
                    for states in (layer.keys, layer.values):
                        if how == "data":
                            states.data = states[order].clone()
                        else:
                            states.copy_(states[order].clone())
            w.model(w.inputs[:, 3:], past_key_values=cache)
    if recording is None:
        raise RoutingError("nobody asked")
    _ = recording.routes


def generated(w: World, wanted: Wanted, rng: random.Random) -> None:
    if wanted.options is not None or wanted.sigma is not None:
        wanted = Wanted("record", torch.full_like(wanted.forced, -1), record=True)
    with opened(w, wanted) as (_, recording):
        out = w.model.generate(w.inputs, max_new_tokens=3, do_sample=False)
    if recording is not None:
        with w.watched(), torch.no_grad():
            w.twin.eval()
            w.model.eval()(out[:, :-1])
        hold(torch.equal(sets(recording.routes.ids), sets(w.ids())), "a generation was not recorded as teacher forcing")


def raised(w: World, wanted: Wanted, rng: random.Random) -> None:
    """An error or an interrupt somewhere inside, caught inside; then a topk of the user, and a call that counts."""
    error = rng.choice([ValueError, KeyboardInterrupt])
    place = rng.choice([*w.sites, *w.experts, w.model.model.norm])

    def fail(*_: Any) -> None:
        raise error("on purpose")

    with w.watched(), torch.no_grad(), opened(w, wanted) as (replay, recording):
        own, place.forward = place.__dict__.get("forward"), fail
        try:
            w.model(w.inputs)
        except error:
            pass
        finally:
            del place.forward
            if own is not None:
                place.forward = own
        scores = torch.rand(BATCH * LENGTH, w.routes.num_experts)
        k = w.model.config.num_experts_per_tok
        hold((scores.topk(k).indices == scores.sort(-1, descending=True).indices[:, :k]).all(), "topk of a bystander")
        if rng.random() < 0.5:
            w.model(w.inputs, use_cache=False)
            judge(w, wanted, replay, recording)
    hold(torch.overrides._len_torch_function_stack() == 0, "a mode was left on")


def replaced(w: World, wanted: Wanted, rng: random.Random) -> None:
    """A router that begins to select in another way, inside the context or before: to be refused, or right."""
    index, how = rng.randrange(len(w.sites)), rng.choice(["argsort", "two", "again", "block"])
    gate, block = w.sites[index], find_sites(w.model)[index].parents[0]
    k = w.model.config.num_experts_per_tok

    def router(hidden: Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = functional.linear(hidden, gate.weight)
        scores = functional.softmax(logits, dtype=torch.float, dim=-1)
        if how == "argsort":
            ids = scores.argsort(-1, descending=True)[:, :k]
        else:
            ids = scores.topk(k).indices
            if how == "two":
                ids = scores.topk(k).indices
            if how == "again":
                ids = scores.sort(-1, descending=True).indices[:, :k]
        gates = scores.gather(-1, ids)
        if getattr(gate, "norm_topk_prob", True):
            gates = gates / gates.sum(-1, keepdim=True)
        return logits, gates.to(logits.dtype), ids

    def whole(hidden: Tensor) -> Tensor:
        shape = hidden.shape
        flat = hidden.reshape(-1, shape[-1])
        logits, gates, _ = gate(flat)
        return block.experts(flat, logits.sort(-1, descending=True).indices[:, :k], gates).reshape(shape)

    target, function = (block, whole) if how == "block" else (gate, router)
    before = rng.random() < 0.5
    if before:
        target.forward = function
    try:
        with w.watched(), torch.no_grad(), opened(w, wanted) as (_replay, recording):
            w.model(w.inputs, use_cache=False)
            target.forward = function
            w.model(w.inputs, use_cache=False)
    finally:
        del target.forward
    judge_ids(wanted, wanted.forced, w.ids(), w.scores())
    if recording is not None:
        hold(torch.equal(recording.calls[1].ids, w.ids()), "the recording is not what the experts got")


def threaded(w: World, wanted: Wanted, rng: random.Random) -> None:
    """Another thread calls the model, or opens a context, while this one has one open: refused there, right here."""
    kind, said = rng.choice(["call", "context"]), []

    def other() -> None:
        try:
            with torch.no_grad(), record_routes(w.model) if kind == "context" else ExitStack():
                w.model(tokens(1, 4))
            said.append("ran")
        except RoutingError as error:
            said.append(str(error))

    nobody = wanted.options is None and wanted.sigma is None and not wanted.record
    with w.watched(), torch.no_grad(), opened(w, wanted) as (_replay, recording):
        thread = threading.Thread(target=other, name="bystander")
        thread.start()
        try:
            for _ in range(rng.choice([0, 2])):
                w.model(w.inputs, use_cache=False)  # refused, if nobody listens here and the other was first
        finally:
            thread.join()
        if not nobody:
            hold("bystander" in said[0] and "thread" in said[0], f"a bystander {said}")
        w.arrived.clear()
        w.logits.clear()
        w.model(w.inputs, use_cache=False)
    judge_ids(wanted, wanted.forced, w.ids(), w.scores())
    if recording is not None:
        hold(torch.equal(recording.calls[-1].ids, w.ids()), "the recording is not what the experts got")


def by_hand(w: World, wanted: Wanted, rng: random.Random) -> None:
    """A checkpoint that transformers knows nothing of: to be refused by whoever listens."""
    layer, reentrant = w.model.model.layers[rng.randrange(len(w.sites))], rng.random() < 0.5
    forward = layer.forward
    layer.forward = lambda h, **kwargs: checkpoint(lambda x: forward(x, **kwargs), h, use_reentrant=reentrant)
    try:
        with opened(w, wanted):
            w.model(w.inputs, use_cache=False)
    finally:
        del layer.forward


def functorch(w: World, wanted: Wanted, rng: random.Random) -> None:
    parameters = dict(w.model.named_parameters())
    with w.watched(), opened(w, wanted):
        found = torch.func.grad(lambda p: loss_of(torch.func.functional_call(w.model, p, (w.inputs,)).logits))(
            parameters
        )
        with torch.no_grad():
            w.arrived.clear()
            w.logits.clear()
            out = w.model(w.inputs, use_cache=False).logits
    judge_ids(wanted, wanted.forced, w.ids(), w.scores())
    if not wanted.sigma:
        expect_like_twin(w, out, w.ids(), found)


def shorter(w: World, wanted: Wanted, rng: random.Random) -> None:
    """A call that is shorter than routes of unknown tokens, with use_cache=True: refused at the end at the latest."""
    unknown = RoutedExperts(w.routes.ids, w.routes.sites, w.routes.num_experts)
    with torch.no_grad(), replay_routes(w.model, unknown):
        w.model(w.inputs[:, rng.randint(1, LENGTH - 1) :], use_cache=True)


def switched(w: World, wanted: Wanted, rng: random.Random) -> None:
    """train() or eval() inside the context: right where both modes have been checked before, else refused."""
    with w.watched(), torch.no_grad(), opened(w, wanted) as (replay, recording):
        w.model.train(not w.model.training)
        w.model(w.inputs, use_cache=False)
    judge(w, wanted, replay, recording)


@dataclass(frozen=True)
class Compiled:
    backend: str
    what: str


_COMPILED: dict[Compiled, tuple[World, Any]] = {}
_WATCHES: list[Any] = []


def compiled(w: World, wanted: Wanted, rng: random.Random) -> None:
    """A model of one layer that is attached, then compiled: as a whole, by layer, or its router by itself."""
    how = Compiled(rng.choice(["eager", "aot_eager"]), rng.choice(["model", "layer", "router"]))
    if how not in _COMPILED:
        own = world("Qwen3MoeForCausalLM", 5)
        own.model.model.layers, own.twin.model.layers = own.model.model.layers[:1], own.twin.model.layers[:1]
        for model in (own.model, own.twin):
            model.set_experts_implementation("batched_mm")
        own.sites, own.experts = own.sites[:1], own.experts[:1]
        own.routes = own.routes.select([0])
        attach(own.model)
        run = own.model
        _WATCHES.append(own.watched())
        _WATCHES[-1].__enter__()  # its hooks stay: compiled code does not see later ones
        if how.what == "model":
            run = torch.compile(own.model, backend=how.backend)
        elif how.what == "layer":
            own.model.model.layers[0].compile(backend=how.backend)
        else:
            own.sites[0].compile(backend=how.backend)
        _COMPILED[how] = (own, run)
    own, run = _COMPILED[how]
    wanted = draw(rng, own)
    if wanted.sigma is not None:  # noise runs the router once more, which the oracle would count
        wanted = Wanted("replay", own.routes.ids, {}, record=True)
    own.arrived.clear()
    own.logits.clear()
    own.model.eval()
    options = None if wanted.options is None else {**wanted.options, "check_tokens": False}
    with torch.no_grad(), opened(own, Wanted(wanted.name, wanted.forced, options, None, wanted.record), run) as pair:
        out = run(own.inputs, use_cache=False).logits
    judge(own, wanted, *pair)
    expect_like_twin(own, out, own.ids())
