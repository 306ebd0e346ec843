"""Random sequences of contexts, modes, caches, compilation, threads and exceptions, against an oracle at the experts.

    python tests/routing/adversary.py --cases 3000 --seed 0     # prints how many were right and how many were refused

The oracle reads ids where the experts are called, by hooks of its own, and knows nothing of the package. A step is
right if the experts got what was forced where it was forced, and what the router's logits prefer elsewhere; if
recording, shadow and counts say the same; and if the logits are those of a model whose routers were rewritten to take
the given ids. It is refused if a RoutingError was raised. Anything else is a failure, and so is a refusal of what is
promised to work, or no refusal where an action cannot be replayed.
"""

import argparse
import collections
import copy
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.dirname(__file__))

import torch
from routing_helpers import disturbed, moe, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

from moe_rl.routing import RoutedExperts, RoutingError, attach, find_sites, noisy_routes, record_routes, replay_routes

FAMILIES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM")  # the order of logits is that of choice
BATCH, LENGTH = 3, 6


@dataclass
class World:
    """One model, used for many steps, its twin that no context touches, and two batches with foreign routes."""

    model: Any
    twin: Any
    sites: list[nn.Module]
    experts: list[nn.Module]
    inputs: Tensor
    routes: RoutedExperts
    arrived: list[list[Tensor]] = field(default_factory=list)  # per call: ids at the experts of each site
    logits: list[list[Tensor]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The oracle's own hooks: what each router scores, and what its experts are called with."""
        self.arrived, self.logits = [], []
        with ExitStack() as stack:
            for index, (router, experts) in enumerate(zip(self.sites, self.experts, strict=True)):

                def scored(m: Any, a: Any, out: Any, index: int = index) -> None:
                    if index == 0:
                        self.arrived.append([])
                        self.logits.append([])
                    self.logits[-1].append(out[0].detach().clone())

                def called(m: Any, args: Any, index: int = index) -> None:
                    self.arrived[-1].append(args[1].detach().clone())

                stack.callback(router.register_forward_hook(scored).remove)
                stack.callback(experts.register_forward_pre_hook(called).remove)
            yield

    def ids(self, call: int = -1) -> Tensor:
        """`[B,S,L,K]` that arrived in a call."""
        batch = self.inputs.shape[0]
        return torch.stack([one.reshape(batch, -1, one.shape[-1]) for one in self.arrived[call]], 2)

    def scores(self, call: int = -1) -> Tensor:
        batch = self.inputs.shape[0]
        return torch.stack([one.reshape(batch, -1, one.shape[-1]) for one in self.logits[call]], 2)


def world(family: str, seed: int) -> World:
    model = moe(family, seed)
    twin = copy.deepcopy(model)
    inputs = tokens(BATCH, LENGTH, seed)
    with torch.no_grad(), record_routes(foreign := disturbed(model, 0.2)) as recording:
        foreign(inputs)
    sites = find_sites(model)
    return World(
        model,
        twin,
        [site.module for site in sites],
        [site.parents[0].experts for site in sites],
        inputs,
        recording.routes,
    )


def sets(ids: Tensor) -> Tensor:
    return ids.sort(-1).values


# -- what a context asks for, and whether it came -------------------------------------------------------------------


@dataclass
class Wanted:
    """`forced` `[B,T,L,K]`, -1 where live."""

    name: str
    forced: Tensor
    options: dict[str, Any] | None = None  # of replay_routes; None: no replay
    sigma: float | None = None
    record: bool = False


def draw(rng: random.Random, w: World) -> Wanted:
    ids = w.routes.ids
    name = rng.choice(["none", "record", "replay", "replay", "sites", "tokens", "slots", "shadow", "noise", "noise in"])
    options: dict[str, Any] | None = {}
    if name == "sites" and len(w.sites) == 1:
        name = "replay"
    if name == "sites":
        chosen = sorted(rng.sample(range(len(w.sites)), rng.randint(1, len(w.sites) - 1)))
        options = {"sites": chosen}
        rest = [i for i in range(len(w.sites)) if i not in chosen]
        ids[:, :, rest] = -1
    elif name == "tokens":
        mask = torch.rand(ids.shape[:2], generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) < 0.5
        options = {"tokens": mask}
        ids[~mask] = -1
    elif name == "slots":
        options = {"slots": 1}
        ids[..., 1:] = -1
    elif name == "shadow":
        options = {"shadow": True}
    elif name in ("none", "record", "noise"):
        options = None
        ids[:] = -1
    sigma = rng.choice([0.0, 1.0]) if name.startswith("noise") else None
    return Wanted(name, ids, options, sigma, record=name == "record" or rng.random() < 0.6)


@contextmanager
def opened(w: World, wanted: Wanted, model: Any = None) -> Iterator[tuple[Any, Any]]:
    model = model if model is not None else w.model
    with ExitStack() as stack:
        if wanted.sigma is not None:
            stack.enter_context(noisy_routes(model, wanted.sigma))
        replay = None
        if wanted.options is not None:
            replay = stack.enter_context(replay_routes(model, w.routes, **wanted.options))
        recording = stack.enter_context(record_routes(model)) if wanted.record else None
        yield replay, recording


class Wrong(AssertionError):
    """Without an error, something else happened than was asked for."""


def hold(condition: Any, what: str) -> None:
    if not bool(condition):
        raise Wrong(what)


def judge_ids(wanted: Wanted, forced: Tensor, arrived: Tensor, scores: Tensor) -> None:
    hold(((arrived == forced) | (forced < 0)).all(), "the experts got others than were forced")
    hold((sets(arrived).diff(dim=-1) > 0).all(), "one token got an expert twice")
    if wanted.sigma:
        return  # noise decides elsewhere
    k = arrived.shape[-1]
    held = torch.zeros((*scores.shape[:-1], scores.shape[-1] + 1), dtype=torch.bool)
    held = held.scatter(-1, forced.where(forced >= 0, scores.shape[-1]), True)[..., :-1]
    best = scores.masked_fill(held, float("inf")).topk(k).indices  # the forced ones and the best of the rest
    hold((sets(best) == sets(arrived)).all(), "a slot that was left live is not what the router prefers")


def judge(w: World, wanted: Wanted, replay: Any, recording: Any, calls: int = 1) -> None:
    arrived = torch.cat([w.ids(-calls + i) for i in range(calls)], 1)
    scores = torch.cat([w.scores(-calls + i) for i in range(calls)], 1)
    judge_ids(wanted, wanted.forced[:, : arrived.shape[1]], arrived, scores)
    if recording is not None:
        hold(torch.equal(recording.routes.ids, arrived), "the recording is not what the experts got")
    if replay is not None:
        rows = int((wanted.forced[:, : arrived.shape[1]] >= 0).any(-1).sum())
        hold(replay.replayed_rows == rows, f"{replay.replayed_rows} rows are said to be replayed, {rows} were")
        hold(replay.live_rows == arrived[..., 0].numel() - rows, "live rows are miscounted")
        if (wanted.options or {}).get("shadow") and not wanted.sigma:
            live = scores.topk(arrived.shape[-1]).indices
            hold((sets(replay.shadow.ids) == sets(live)).all(), "shadow is not the live choice")


@contextmanager
def rewritten(model: Any, ids: Tensor) -> Iterator[None]:
    """The twin's routers take `ids` `[N,K]` of their site: the independent model of what replay has to compute."""
    with ExitStack() as stack:
        for index, site in enumerate(find_sites(model)):

            def forward(hidden: Tensor, gate: Any = site.module, own: Tensor = ids[:, :, index]) -> Any:
                hidden = hidden.reshape(-1, hidden.shape[-1])
                logits = functional.linear(hidden, gate.weight)
                scores = functional.softmax(logits, dtype=torch.float, dim=-1)
                gates = scores.gather(-1, own.reshape(-1, own.shape[-1]))
                if getattr(gate, "norm_topk_prob", True):
                    gates = gates / gates.sum(-1, keepdim=True)
                return logits, gates.to(logits.dtype), own.reshape(-1, own.shape[-1])

            site.module.forward = forward
            stack.callback(lambda gate=site.module: delattr(gate, "forward"))
        yield


def loss_of(logits: Tensor) -> Tensor:
    return (logits * torch.linspace(-1, 1, logits.shape[-1])).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def expect_like_twin(w: World, logits: Tensor, ids: Tensor, grads: dict[str, Tensor] | None = None) -> None:
    with rewritten(w.twin, ids):
        wanted = w.twin(w.inputs, use_cache=False).logits
        if grads is not None:
            loss_of(wanted).backward()
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    if grads is not None:
        for name, value in gradients(w.twin).items():
            torch.testing.assert_close(grads[name], value, rtol=1e-3, atol=1e-6)


# -- actions: what happens inside the contexts. Each says whether it has to work ("right"), or has to be refused -----


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


RIGHT, REFUSED, EITHER = "right", "refused", "either"


def listening(wanted: Wanted) -> str:
    return REFUSED if wanted.options is not None or wanted.sigma is not None or wanted.record else RIGHT


ACTIONS: dict[str, tuple[Callable[[World, Wanted, random.Random], None], Callable[[Wanted], str], int]] = {
    "forward": (plain, lambda _: RIGHT, 5),
    "attached": (attached, lambda _: RIGHT, 2),
    "forward and backward": (backward, lambda _: RIGHT, 5),
    "KV cache": (cached, lambda _: RIGHT, 4),
    "KV cache, rows permuted": (permuted_cache, lambda _: REFUSED, 3),
    "generate": (generated, lambda _: RIGHT, 1),
    "exception caught inside": (raised, lambda _: RIGHT, 3),
    "router or block replaced": (replaced, lambda _: EITHER, 3),
    "second thread": (threaded, lambda wanted: RIGHT if listening(wanted) == REFUSED else EITHER, 2),
    "checkpoint by hand": (by_hand, listening, 2),
    "torch.func.grad": (functorch, lambda _: RIGHT, 2),
    "shorter call, unknown tokens": (shorter, lambda _: REFUSED, 1),
    "train/eval switched inside": (switched, lambda _: EITHER, 2),
    "compiled": (compiled, lambda _: RIGHT, 2),
}


def run_case(
    seed: int, worlds: list[World], actions: list[str], counts: collections.Counter[tuple[str, str, str]]
) -> None:
    """One case: two to five steps on one model. Raises AssertionError, saying seed, step and what was asked for."""
    rng = random.Random(seed)
    w = rng.choice(worlds)
    for step in range(rng.randint(2, 5)):
        action = rng.choices(actions, [ACTIONS[a][2] for a in actions])[0]
        function, promised, _ = ACTIONS[action]
        mode = rng.random() < 0.4
        w.model.train(mode)
        w.twin.train(mode)
        torch.manual_seed(seed)
        wanted = draw(rng, w)
        state = f"{type(w.model).__name__}, {'train' if mode else 'eval'}"
        where = f"seed {seed}, step {step}, {state}, {action}, {wanted.name}"
        try:
            function(w, wanted, rng)
            outcome = RIGHT
        except RoutingError as error:
            outcome, why = REFUSED, str(error)
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            w.model.zero_grad(set_to_none=True)
        if promised(wanted) not in (outcome, EITHER):
            raise AssertionError(
                f"{where}: {outcome} instead of {promised(wanted)}" + (f": {why}" if outcome == REFUSED else "")
            )
        counts[action, wanted.name, outcome] += 1
    assert not any("moe_rl" in type(h).__module__ for m in w.model.modules() for h in m._forward_hooks.values()), (
        f"seed {seed}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", type=int, default=300)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--actions", nargs="*", default=list(ACTIONS), choices=list(ACTIONS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    worlds = [world(family, seed) for family in FAMILIES for seed in range(2)]
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    failures = 0
    for case in range(options.cases):
        try:
            run_case(options.seed + case, worlds, options.actions, counts)
        except AssertionError as error:
            failures += 1
            print(error, flush=True)
        if (case + 1) % 250 == 0 or case + 1 == options.cases:
            report(case + 1, failures, counts)


def report(cases: int, failures: int, counts: collections.Counter[tuple[str, str, str]]) -> None:
    print(f"{cases} cases, {sum(counts.values())} steps, {failures} failed")
    for action in ACTIONS:
        of: collections.Counter[str] = collections.Counter()
        for (name, _, outcome), count in counts.items():
            if name == action:
                of[outcome] += count
        print(f"  {action:32s} right {of[RIGHT]:6d}   refused {of[REFUSED]:6d}", flush=True)


if __name__ == "__main__":
    main()
