"""Replay of routes: given experts are forced on calls of a model, and rows proven to reach the experts are counted."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing import refusals
from moe_rl.routing.calls import Call, Listener, device_of, one_width, tokens_of
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.hooks import Tap
from moe_rl.routing.kv_cache import CHANGED
from moe_rl.routing.packing import shown, unpack_ids
from moe_rl.routing.partial import Holes, restricted
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.sites import match_sites, within
from moe_rl.routing.traced import no_type_check


@no_type_check
class Replay(Listener):
    """A replay, which forces routes on the calls of a model and counts the rows whose experts were proven to be used.

    After every call the ids that reached the experts are compared with the forced ids, and a difference is an error (on
    a CPU at once; on another device, and under torch.compile, when the context ends or a count is read). Tokens other
    than those of the routes are an error, too (at once; under torch.compile as above).

    `.replayed_rows`: (token, site) rows of all finished forwards whose experts were those of the routes, at least in
        the slots that are forced. `.live_rows`: all other rows, those without a route too (the last token of
        `generate`, padding after `realign`). Rows of fixed sites (hash routing) are in neither. `.replayed_fraction` is
        the share of replayed rows; it raises RoutingError if no call of the model happened.
    """

    def __init__(
        self,
        tap: Tap,
        names: list[str],
        routes: RoutedExperts,
        sites: str | int | Iterable[str | int] | None,
        tokens: Tensor | None,
        slots: int | None,
        check_tokens: bool,
        once: bool,
    ) -> None:
        self._routers = tap.routers(names)
        one_width(self._routers)
        if not isinstance(routes, RoutedExperts):
            raise RoutingError(f"routes must be RoutedExperts (recording.routes), got {type(routes).__name__}")
        self._tap, self._once = tap, once
        chosen = set(range(len(names)) if sites is None else match_sites(names, sites))
        where = _aligned(routes, names, chosen, tap)
        self._sites = [i for i in sorted(chosen) if not tap.sites[i].fixed]
        packed = routes.packed.to(device_of(tap.boundary))
        self._holes: Holes = "rows" if routes.has_live else "none"
        if tokens is not None or slots is not None:
            packed, self._holes = restricted(packed, self._holes, tokens, slots)
        order = [where[i] for i in self._sites]
        packed = packed if order == list(range(packed.shape[2])) else packed[:, :, order]
        self._packed = packed.permute(2, 0, 1, 3)  # [sites,B,T,K]
        self._sentinel = torch.iinfo(packed.dtype).max
        self._tokens = routes._tokens.to(packed.device) if routes._tokens is not None and check_tokens else None
        # Counts in compiled calls: tokens other than the recorded ones; padding that only the recorded call hid.
        self._others: Any = None if self._tokens is None else torch.zeros(2, dtype=torch.int64, device=packed.device)
        self._left: list[Any] = []  # the states of the caches that the calls left
        self._changed: bool | Tensor = False
        self._pending = 0  # tokens that calls on one KV cache have forced so far, if more must follow
        self._now: Any = None  # `[sites,B·S,K]` as forced in the call that is under way, and its holes
        self._choices = sum(not site.fixed for site in tap.sites)
        self._all_rows = 0
        self._beyond = 0  # rows of last sampled tokens, which the routes do not reach
        self._rows_kept: int | Tensor = 0  # a tensor if rows had to be counted; read only when asked for
        self.reached = False  # whether any call of the model began inside the context

    # -- during a call ------------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        self.reached = True
        if any(state is call.follows for state in self._left):
            self._changed = self._changed | call.changed
            if isinstance(self._changed, bool) or self._changed.device.type == "cpu":
                self._refuse_changed()
        elif self._pending and not call.past:
            self._refuse_pending()
        packed, holes = self._rows(call)
        ids = packed.to(torch.int64).reshape(len(self._sites), call.rows, packed.shape[-1])
        if holes != "none":
            ids.masked_fill_(ids == self._sentinel, -1)
        self._now = ids, holes
        for index, forced in zip(self._sites, ids.unbind(0), strict=True):
            call.job(index).impose(forced, holes)

    def _refuse_changed(self) -> None:
        """Raise RoutingError if the KV cache was changed between two calls."""
        if torch.compiler.is_compiling():
            return
        changed, self._changed = self._changed, False  # reported once
        if bool(changed):
            raise RoutingError(
                f"{CHANGED}, and so that these routes are theirs. Replay in one forward over the whole text"
            )

    def _refuse_pending(self) -> None:
        """Raise RoutingError because calls with a KV cache used only the first of the routes."""
        used, self._pending = self._pending, 0  # reported once
        raise refusals.pending(self._packed.shape[2], used)

    def _rows(self, call: Call) -> tuple[Tensor, Holes]:
        """Return the packed rows for this call, `[sites,B,S,K]`, and their holes, after checks of shape and tokens."""
        batch, length = self._packed.shape[1:3]
        start, stop = call.past, call.past + call.length
        fits = call.batch == batch and (stop <= length if call.caches else stop == length)
        # The last sampled token has no route. One token more is accepted if the others prove that it is this token.
        proven = call.batch == batch and stop == length + 1 and self._tokens is not None and call.tokens is not None
        if not (fits or (proven and call.length > 1)):
            raise refusals.other_batch((batch, length), (call.batch, call.length), start)
        packed, tokens = self._packed, self._tokens
        if start or stop != length:
            packed, tokens = packed[:, :, start:stop], None if tokens is None else tokens[:, start:stop]
        if tokens is not None and call.tokens is not None:
            self._compare(call, packed, tokens)
        if fits:
            return packed, self._holes
        last = packed.new_full((packed.shape[0], batch, 1, packed.shape[3]), self._sentinel)
        return torch.cat([packed, last], dim=2), "slots" if self._holes == "slots" else "rows"

    def _compare(self, call: Call, packed: Tensor, tokens: Tensor) -> None:
        """Compare the tokens of a call with those of the routes; `_judge` decides about differences."""
        given = tokens_of(call, tokens)[:, : tokens.shape[1]]
        if torch.compiler.is_compiling() or not torch.equal(tokens, given):
            self._judge(call, packed, tokens, given)

    def _judge(self, call: Call, packed: Tensor, tokens: Tensor, given: Tensor) -> None:
        """Raise RoutingError for wrong tokens at forced rows, and for padding that is hidden no more. Not every
        difference is wrong. Errors of a compiled call are only counted."""
        forced = (packed != self._sentinel).any(-1).any(0)
        known, now = shown(tokens), shown(given)
        wrong = (known != now) & (known >= 0) & forced
        knows = call.mask is None or call.attended() is not None
        bare = self._bare(tokens, given, call.past) if knows else torch.zeros_like(wrong)
        if torch.compiler.is_compiling():  # nothing waits for it here: `_refuse_others` reads it
            self._others = self._others + torch.stack([wrong.sum(), bare.sum()])
        elif bool(wrong.any()):
            raise refusals.other_tokens(known, now, wrong, call.past)
        elif bool(bare.any()):
            raise refusals.bare_padding(bare, call.past)

    def _bare(self, tokens: Tensor, given: Tensor, past: int) -> Tensor:
        """Return `[B,S]` bool: padding that the recorded call hid and this one does not. Padding behind the last token
        of a row is left out: no token sees it."""
        assert self._tokens is not None
        before = ((self._tokens >= 0).flip(1).cumsum(1).flip(1) > 0)[:, past : past + tokens.shape[1]]
        return (tokens < -1) & (given >= 0) & before

    def _refuse_others(self) -> None:
        """Raise RoutingError if compiled calls had other tokens than the routes; waits for the device once."""
        if self._others is None:
            return
        others, self._others = self._others.tolist(), torch.zeros_like(self._others)  # reported once
        if any(others):
            raise refusals.others_compiled(*others)

    def end(self, call: Call) -> None:
        length, stop = self._packed.shape[2], call.past + call.length
        self._pending = stop if stop < length and (self._tokens is None or call.tokens is None) else 0
        self._rows_kept = self._rows_kept + self._count(call)  # not in place: the count may come from inference mode
        self._all_rows += self._choices * call.rows
        self._beyond += self._choices * call.batch * (stop > length)
        self._left = [state for state in self._left if state is not call.follows and not state.holds(None)]
        self._left += [] if call.left is None else [call.left]

    def _count(self, call: Call) -> int | Tensor:
        """Return the number of rows of this call whose experts were those of the routes. A forced row that was not used
        is an error (`Tap.prove`), so that all forced rows count, unless another replay, inside this one, forced other
        experts."""
        (ids, holes), self._now = self._now, None
        if all(call.job(index).imposed == 1 for index in self._sites):
            return len(self._sites) * call.rows if holes == "none" else (ids[..., 0] >= 0).sum()
        used = torch.stack([x.to(ids.device) for x in (call.chosen[index] for index in self._sites) if x is not None])
        return (((used == ids) | (ids < 0)).all(-1) & (ids >= 0).any(-1)).sum()

    def finish(self) -> None:
        """Raise RoutingError, at the end of the context, if what was forced is not what the routes are for."""
        self._refuse_changed()
        self._refuse_others()
        if self._pending:
            self._refuse_pending()
        if self._once:
            self._prove_once()

    def _prove_once(self) -> None:
        """Raise RoutingError unless each row with a route was forced, others were left live, and nothing more ran."""
        forced, (_, B, T, _) = self.forced_rows, self._packed.shape
        live, left = self._choices * B * T - forced, self.live_rows - self._beyond
        if (self.replayed_rows, left) != (forced, live):
            raise refusals.not_once(self.replayed_rows, left, forced, live)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:  # nothing that waits for a device, or is an error
        sites, b, t, _ = self._packed.shape
        return (
            f"{type(self).__name__}(routes of {b} sequences x {t} tokens at {sites} sites; (token, site) rows of calls "
            f"so far: {self._all_rows}; how many of them were replayed: .replayed_fraction)"
        )

    @property
    def replayed_rows(self) -> int:
        self._tap.settle()
        self._refuse_others()
        return int(self._rows_kept)

    @property
    def live_rows(self) -> int:
        return self._all_rows - self.replayed_rows

    @property
    def forced_rows(self) -> int:
        """Number of (token, site) rows that one forward of the whole batch forces, at the sites that have a choice."""
        rows = self._packed[..., 0]
        return rows.numel() if self._holes == "none" else int((unpack_ids(rows) >= 0).sum())

    @property
    def replayed_fraction(self) -> float:
        if not self._all_rows:
            raise RoutingError("nothing was replayed: no call of the model happened inside the context")
        return self.replayed_rows / self._all_rows

    @property
    def shadow(self) -> Any:
        """Raise RoutingError: only a `ShadowReplay` has `shadow`, `regret` and `shadow_change`."""
        raise RoutingError(
            "this replay did not let the routers rank live, too: open it with replay_routes(..., shadow=True)"
        )

    regret = shadow_change = shadow


def _aligned(routes: RoutedExperts, names: list[str], chosen: set[int], tap: Tap) -> dict[int, int]:
    """Return the positions in the routes of the sites of the model. Raises RoutingError for routes of another model."""
    given = routes.sites
    exact = {name: j for j, name in enumerate(given)}
    found = {i: exact[name] for i, name in enumerate(names) if name in exact}
    if not found:  # one has names in the base model, the other in the model around it
        found = {i: j for i, name in enumerate(names) for j, other in enumerate(given) if within(name, other)}
        if len(set(found.values())) < len(found):
            raise refusals.several_sites([(given[j], names[i]) for i, j in found.items()])
    missing = [names[i] for i in sorted(chosen) if i not in found and not tap.sites[i].fixed]
    unknown = [other for j, other in enumerate(given) if j not in found.values()]
    if missing or unknown:
        raise refusals.other_sites(len(names), len(given), missing, unknown)
    for i in sorted(chosen & set(found)):
        experts, probe = routes._experts[found[i]], tap.probes[i]
        if experts != probe.num_experts or routes.shape[-1] != probe.k:
            raise refusals.other_experts(names[i], probe.k, probe.num_experts, (routes.shape[-1], experts))
    return found
