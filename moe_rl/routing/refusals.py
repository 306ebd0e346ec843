"""Errors that recording and replay raise while a model runs: each message names what came, and the likely cause.

The messages are here to keep `contexts`, `hooks`, `calls`, `selection` and `replay` readable. Every function returns
the error that its caller raises.
"""

import threading
from collections.abc import Sequence

from torch import Tensor

from moe_rl.routing.errors import RoutingError

LOST = (
    "the experts got others than were forced: code behind the selection chose experts anew (a branch that did not run "
    "when the model was checked, a module that was replaced since)"
)
NOTHING_REPLAYED = (
    "nothing was replayed: no call of the model reached its hooks, and torch.compile was used in this process. "
    "If a function around the model was compiled before, call attach(model) first. If another model of this "
    "class was compiled without hooks, torch.compile reuses its code: before compiling any of them, set "
    "torch._dynamo.config.skip_nnmodule_hook_guards = False; torch._dynamo.reset() forgets what was compiled"
)
"""Text of a warning, not of an error: something else than the model may have been called."""
COMPILED_CHECKPOINTS = (
    "a compiled model or layer with gradient checkpointing: its recomputation in the backward pass would be routed "
    "anew. Turn one of both off (model.gradient_checkpointing_disable()), or compile attention, MLPs or routers by "
    "themselves, which works under gradient checkpointing"
)

# -- where a model is called -------------------------------------------------------------------------------------------


def compiled(module: str) -> RoutingError:
    return RoutingError(
        f"{module} is compiled already: torch.compile skips hooks that were added "
        "later, so nothing would be recorded or replayed. Call attach(model) before torch.compile(model), and "
        "torch._dynamo.reset() before both where compiled code of this class has run"
    )


def of_another_thread(where: str, owner: int) -> RoutingError:
    """Return the error of a call in a thread other than `owner`, the thread that has a context open."""
    name = next((t.name for t in threading.enumerate() if t.ident == owner), "that has ended")
    return RoutingError(
        f"{where} was called in thread {threading.current_thread().name!r} while thread {name!r} has a context "
        "(record, replay, noise) open on this model: their routes would mix. Give each thread a copy of the model, "
        "or let one wait until the other has left its context"
    )


def checkpointed_by_hand(where: str) -> RoutingError:
    return RoutingError(
        f"{where} runs inside torch.utils.checkpoint that was set up by hand: its recomputation in the backward pass "
        "cannot be told which routes its forward had. Use model.gradient_checkpointing_enable() or torch's "
        "checkpoint_wrapper instead"
    )


def replaced(model: str) -> RoutingError:
    return RoutingError(
        f"a router, a block around one or its experts was replaced inside an open context of {model}, so that it has "
        "to be checked again: close that context before another is opened"
    )


def compiled_checkpoints(model: str) -> RoutingError:
    return RoutingError(f"{model} is called inside a context as {COMPILED_CHECKPOINTS}")


def without_batch(given: object) -> RoutingError:
    """Return the error of a call without known batch and length; given: in place of input_ids or inputs_embeds."""
    got = f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    return RoutingError(
        "cannot tell batch and length of this call: expected a tensor, input_ids [B,S] or inputs_embeds [B,S,d], got "
        f"{got} (what a tokenizer returns is passed as model(**batch))"
    )


def packed_batch() -> RoutingError:
    return RoutingError(
        "packed continuous batching (paged attention) mixes sequences on one axis: routes of such calls "
        "would belong to no sequence. Use generate(), or your engine's own capture of routed experts"
    )


# -- where a site runs -------------------------------------------------------------------------------------------------


def outside_a_call(site: str, model: str) -> RoutingError:
    return RoutingError(
        f"site {site} ran outside a call of {model}: part of the model was "
        "called by itself, or recomputed by a checkpoint function that is not known. Call the whole model; for "
        "gradient checkpointing, use model.gradient_checkpointing_enable() or torch's checkpoint_wrapper"
    )


def ran_twice(site: str) -> RoutingError:
    return RoutingError(
        f"site {site} ran twice in one forward: one router that several layers share cannot be told apart"
    )


def unchecked_mode(site: str, training: bool) -> RoutingError:
    mode, other = ("train", "eval") if training else ("eval", "train")
    return RoutingError(
        f"site {site} is in {mode} mode, but the model was checked in {other} mode, and a router "
        f"may select in another way there: call model.{mode}() before the context is opened"
    )


def selects_otherwise(site: str, calls: int, checked: int, by_max: bool) -> RoutingError:
    """Return the error of a router that selects in another way. calls, checked: how often the router asked for the best
    experts, now and when it was checked."""
    return RoutingError(
        f"site {site}: the router made {calls} {'max' if by_max else 'topk'} calls, {checked} when it was checked: "
        "it selects in another way now (a branch for other inputs, a forward that was replaced?), so that its "
        "routes cannot be forced. Close the context and open it again: the router is then checked anew"
    )


def ranks_otherwise(site: str, experts: int, k: int, checked: tuple[int, int]) -> RoutingError:
    return RoutingError(
        f"site {site}: the router ranks {experts} experts for {k} slots; when it was checked it "
        f"ranked {checked[0]} for {checked[1]}. Was the model changed inside the context?"
    )


def other_maps(site: str) -> RoutingError:
    return RoutingError(
        f"site {site}: the router has other linear maps than when it was checked, so that its logits are not known: "
        "were adapters in it switched on or off, or merged? Open the context when they are as they are to be"
    )


def other_rows(site: str, forced: int, scores: Sequence[int]) -> RoutingError:
    return RoutingError(
        f"site {site}: routes for {forced} tokens, but the router sees scores of shape "
        f"{tuple(scores)}: does this model drop or pack padding before its experts?"
    )


def without_ids(site: str, experts: str, place: int | str) -> RoutingError:
    return RoutingError(
        f"site {site}: {experts} was called without the ids that it was given as "
        f"argument {place!r} when the model was checked. Was the block replaced inside the context?"
    )


def lost(names: Sequence[str], rows: Tensor) -> RoutingError:
    """Return the error that forced rows were not used; rows: their number by site."""
    counts = rows.tolist()
    site = next(name for name, count in zip(names, counts, strict=True) if count)
    return RoutingError(
        f"site {site}: in {max(counts)} rows (in {sum(counts)} of all sites) {LOST}. Nothing that was computed in "
        "this context is a replay"
    )


# -- what was recorded -------------------------------------------------------------------------------------------------


def silent_sites(silent: Sequence[str], sites: int) -> RoutingError:
    return RoutingError(
        f"{len(silent)} of {sites} routing sites did not run in this forward, first {silent[0]}: a fused "
        "or replaced MoE block that bypasses its router or its experts, or layers that were skipped"
    )


def other_tokens_routed(site: str, ids: Tensor | None, batch: int, length: int) -> RoutingError:
    return RoutingError(
        f"site {site} routed {'no' if ids is None else ids.shape[0]} tokens in a call of {batch} x "
        f"{length}: does this model drop or pack padding before its experts?"
    )


def nothing_seen() -> RoutingError:
    return RoutingError(
        "nothing was seen: no call of the model happened inside the context (was another object called, a copy of it? "
        "a compiled function around the model, without attach(model) before? code that torch.compile made of this "
        "class without hooks? torch._dynamo.reset() forgets that)"
    )


def different_lengths(forwards: int, lengths: set[int]) -> RoutingError:
    return RoutingError(
        f"{forwards} forwards with different lengths {sorted(lengths)} do not make one batch; `.calls` "
        "of the recording has each of them (of generate() with use_cache=False every token is one: leave the cache on)"
    )


def different_widths(model: str, widths: set[int]) -> RoutingError:
    return RoutingError(
        f"{model} gives a token different numbers of experts at different sites "
        f"({sorted(widths)}); RoutedExperts holds one number for all sites"
    )


# -- what is replayed --------------------------------------------------------------------------------------------------


def other_sites(sites: int, given: int, missing: Sequence[str], unknown: Sequence[str]) -> RoutingError:
    return RoutingError(
        f"the routes do not fit this model of {sites} sites: they hold {given}"
        + (f", none for {missing[0]}" if missing else "")
        + (f", and {unknown[0]}, which it does not have" if unknown else "")
        + ". Routes of another model?"
    )


def several_sites(pairs: Sequence[tuple[str, str]]) -> RoutingError:
    """Return the error of an ambiguous name; pairs: of a site of the routes and one of the model that may be meant."""
    name, one, other = next((a, i, j) for n, (a, i) in enumerate(pairs) for b, j in pairs[:n] if a == b)
    return RoutingError(
        f"the routes' site {name} may be {other} or {one} of this model: name the sites of the routes in full, as "
        "find_sites does"
    )


def other_experts(site: str, k: int, experts: int, given: tuple[int, int]) -> RoutingError:
    return RoutingError(
        f"site {site} gives each token {k} of {experts} experts; the routes hold "
        f"{given[0]} of {given[1]}. Routes of another model?"
    )


def other_batch(routes: tuple[int, int], call: tuple[int, int], cached: int) -> RoutingError:
    """Return the error of routes of another shape; routes, call: numbers of sequences and tokens."""
    begun = call[0] == routes[0] and call[1] < routes[1] and not cached
    return RoutingError(
        f"routes for {routes[0]} sequences x {routes[1]} tokens do not fit this call of {call[0]} x {call[1]} "
        f"tokens{f' after {cached} cached ones' if cached else ''}: another batch? Record its routes first; "
        "RoutedExperts.rows and .realign take sequences and move padding"
        + (". If calls on a KV cache follow, pass use_cache=True to this one, too" if begun else "")
    )


def other_tokens(known: Tensor, given: Tensor, wrong: Tensor, past: int) -> RoutingError:
    """Return the error of routes for other tokens. known, given: tokens `[B,S]` of the routes and of the call; wrong:
    where routes are forced and these tokens differ."""
    b, t = wrong.nonzero()[0].tolist()
    return RoutingError(
        f"these routes were recorded for other tokens: sequence {b}, token {past + t} was "
        f"{int(known[b, t])} and is now {int(given[b, t])} ({int(wrong.any(1).sum())} of {len(wrong)} "
        "sequences differ). Another batch, another order of rows, another padding? "
        "(check_tokens=False switches this check off)"
    )


def bare_padding(bare: Tensor, past: int) -> RoutingError:
    """Return the error of padding that is hidden no more. bare: `[B,S]` bool, padding in front of other tokens that was
    hidden in the recorded call and is not in this one."""
    b, t = bare.nonzero()[0].tolist()
    return RoutingError(
        f"these routes were recorded with an attention mask that hides {int(bare.sum())} tokens of padding in front of "
        f"others (first sequence {b}, position {past + t}), and this call does not hide them: was its attention_mask "
        "forgotten? (check_tokens=False switches this check off)"
    )


def others_compiled(wrong: int, bare: int) -> RoutingError:
    """Return the error of compiled calls; wrong, bare: numbers of tokens as in `other_tokens` and `bare_padding`."""
    what = f"for other tokens: {wrong} of compiled calls differ. Another batch, another order of rows, another padding?"
    if not wrong:
        what = f"with an attention mask that hides {bare} tokens of padding in front of others: was it forgotten?"
    return RoutingError(
        f"these routes were recorded {what} Nothing that was computed in this context is a replay. To see where, call "
        "the model uncompiled (check_tokens=False switches this check off)"
    )


def pending(tokens: int, used: int) -> RoutingError:
    return RoutingError(
        f"the routes are for {tokens} tokens, but the calls on a KV cache ended after {used}. Tokens were not compared "
        "(the routes do not know theirs, the calls had embeddings, or check_tokens=False), so that nothing proves that "
        f"the first {used} rows belong to these calls. Cut the routes (routes.columns(slice({used}))), or replay "
        "routes that know their tokens"
    )


def not_once(replayed: int, left: int, forced: int, live: int) -> RoutingError:
    return RoutingError(
        f"replay forced {replayed} (token, site) rows and left {left} live, but the routes hold {forced} and lack "
        f"{live}: with once=True a replay expects one forward of the whole batch, and nothing more, inside its context"
    )
