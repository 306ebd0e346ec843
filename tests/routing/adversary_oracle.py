"""The adversary's oracle: models that it watches by hooks of its own, what a context asks for, and whether it came."""

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from routing_helpers import disturbed, moe, tokens
from torch import Tensor, nn
from torch.nn import functional

from moe_rl.routing import RoutedExperts, find_sites, noisy_routes, record_routes, replay_routes

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
