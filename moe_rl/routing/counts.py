"""Numerators and denominators of every change rate between two sets of routes. `moe_rl.routing.change` defines slot,
site and token change, and says what may be compared."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer, Shaped
from torch import Tensor

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import compact, differing_rows, rows_at_once, token_mask
from moe_rl.routing.routes import RoutedExperts
from moe_rl.routing.sites import within

if TYPE_CHECKING:
    import pandas as pd

Routes = RoutedExperts | Tensor


@dataclass(frozen=True, eq=False)
class ChangeCounts:
    """Numerators and denominators of every change rate. Batches of the same sites and pair add up with `+`; with others
    `+` raises RoutingError.

    site_deviation: `[L,K+1]`, per site, how many tokens changed 0, 1, .., K slots; only rows that have a route on both
    sides.
    flips: `[L+1]`, how many tokens changed at 0, 1, .., L sites; only tokens with at least one row that has a route on
    both sides.
    incomplete_tokens: tokens where some sites could be compared and others not.
    sites: names, where known.
    pair: what was compared, as it should stand on a figure: "policies" (old and new weights),
    "engines" or "shadow" (two routers of one forward).
    """

    site_deviation: Int[Tensor, "L K_plus_1"]
    flips: Int[Tensor, " L_plus_1"]
    incomplete_tokens: int = 0
    sites: tuple[str, ...] = ()
    pair: str = field(default="policies", kw_only=True)

    def __repr__(self) -> str:
        counts = ", ".join(f"{changed} of {total} {level}s" for level, (changed, total) in self.levels().items())
        lack = f"; {self.incomplete_tokens} incomplete tokens" if self.incomplete_tokens else ""
        return f"ChangeCounts({counts} changed{lack}; pair {self.pair!r}; shares: .rates(), .to_frame())"

    @property
    def deviation(self) -> Int[Tensor, " K_plus_1"]:
        """How many (token, site) pairs changed 0, 1, .., K slots."""
        return self.site_deviation.sum(0)

    @property
    def per_site_slots_changed(self) -> Int[Tensor, " L"]:
        return (self.site_deviation * torch.arange(self.site_deviation.shape[1], device="cpu")).sum(-1)

    @property
    def per_site_slots_total(self) -> Int[Tensor, " L"]:
        return self.per_site_total * (self.site_deviation.shape[1] - 1)

    @property
    def per_site_changed(self) -> Int[Tensor, " L"]:
        """Tokens whose set of experts changed, per site."""
        return self.site_deviation[:, 1:].sum(-1)

    @property
    def per_site_total(self) -> Int[Tensor, " L"]:
        """Tokens compared, per site."""
        return self.site_deviation.sum(-1)

    @property
    def slots_changed(self) -> int:
        return int(self.per_site_slots_changed.sum())

    @property
    def slots_total(self) -> int:
        return int(self.per_site_slots_total.sum())

    @property
    def sites_changed(self) -> int:
        return int(self.per_site_changed.sum())

    @property
    def sites_total(self) -> int:
        return int(self.per_site_total.sum())

    @property
    def tokens_changed(self) -> int:
        return int(self.flips[1:].sum())

    @property
    def tokens_total(self) -> int:
        return int(self.flips.sum())

    @property
    def overdispersion(self) -> float:
        """Variance of flips per token divided by that of independent sites: Var(F) / Σ_l p_l (1 - p_l).

        F is the number of sites of a token that changed, Var its variance over tokens (divisor n), p_l the
        share of tokens changed at site l. If sites changed independently, F would be Poisson-binomial with that
        variance: 1 is independence, above 1 flips cluster on some tokens, below 1 they avoid each other; L
        identical sites give L. R3's pair of 10 % of sites but only 94 % of tokens implies clustering.

        NaN if every site changed at no token or at all of them, or if tokens are incomplete: then `select` the sites
        that have routes.
        """
        total = self.tokens_total
        if total == 0 or self.incomplete_tokens:
            return float("nan")
        count = torch.arange(len(self.flips), dtype=torch.float64, device="cpu")
        weight = self.flips.double() / total
        mean = (weight * count).sum()
        p = self.per_site_changed.double() / total
        return float((weight * (count - mean) ** 2).sum() / (p * (1 - p)).sum())

    def levels(self) -> dict[str, tuple[int, int]]:
        """Return (changed, total) for each of the three definitions of a change, by name: slot, site, token."""
        return {
            "slot": (self.slots_changed, self.slots_total),
            "site": (self.sites_changed, self.sites_total),
            "token": (self.tokens_changed, self.tokens_total),
        }

    def rates(self) -> dict[str, float]:
        """Return the change rates by name. These are the fractions slot_change, site_change, token_change; the mean
        jaccard of (token, site) pairs; flips_per_token (sites per token); overdispersion (ratio of variances). NaN
        without a denominator.
        """
        k = self.site_deviation.shape[1] - 1
        d = torch.arange(k + 1, device="cpu")
        overlap = float((self.deviation.double() * (k - d) / (k + d)).sum())
        return {
            **{f"{level}_change": quotient(*counted) for level, counted in self.levels().items()},
            "flips_per_token": quotient(self.sites_changed, self.tokens_total),
            "jaccard": quotient(overlap, self.sites_total),
            "overdispersion": self.overdispersion,
        }

    def to_frame(self) -> "pd.DataFrame":
        """Return a table (pandas, which this method alone needs) of one row per site, in the order of the model.

        Columns: `site` (its name; its number where names are not known), `tokens` (compared), `tokens_changed` (whose
        set differs), `slots`, `slots_changed`, and the shares `site_change` and `slot_change` (NaN without a token).

        >>> from moe_rl.routing import change_counts
        >>> old, new = torch.tensor([[[3, 0], [1, 2]]]), torch.tensor([[[3, 2], [2, 1]]])  # one token, two sites
        >>> change_counts(old, new).to_frame()["slot_change"].tolist()
        [0.5, 0.0]
        """
        import pandas as pd

        table = pd.DataFrame(
            {
                "site": list(self.sites or range(len(self.site_deviation))),
                "tokens": self.per_site_total.numpy(),
                "tokens_changed": self.per_site_changed.numpy(),
                "slots": self.per_site_slots_total.numpy(),
                "slots_changed": self.per_site_slots_changed.numpy(),
            }
        )
        shares = {"site_change": table.tokens_changed / table.tokens, "slot_change": table.slots_changed / table.slots}
        return table.assign(**shares)

    def __radd__(self, nothing: int) -> "ChangeCounts":
        """Return self for 0, with which `sum` begins, so that `sum` of counts works."""
        return self if nothing == 0 else NotImplemented

    def __add__(self, other: "ChangeCounts") -> "ChangeCounts":
        if (self.sites, self.pair) != (other.sites, other.pair):
            raise RoutingError(
                f"counts of different sites or pairs do not add: {self.pair} {self.sites[:1]} "
                f"({len(self.sites)} sites) and {other.pair} {other.sites[:1]} ({len(other.sites)} sites)"
            )
        return ChangeCounts(
            self.site_deviation + other.site_deviation,
            self.flips + other.flips,
            self.incomplete_tokens + other.incomplete_tokens,
            self.sites,
            pair=self.pair,
        )


def change_counts(
    old: Routes, new: Routes, mask: Shaped[Tensor, "..."] | None = None, *, pair: str = "policies"
) -> ChangeCounts:
    """Count the changes between two sets of routes; everything that reports a rate uses this function.

    mask: bool or 0/1 over the leading axes (`[B,T]`), True on the tokens to count, e.g. `attention_mask`: leave out
    padding, and for a metric of the completion, the prompt. The result is on the CPU.

    Routes of `generate` are one token short, because the last sampled token was never routed: with the `mask` of the
    whole output, `routes.realign(mask, mask)` gives that token a row without a route, which is not counted here. Both
    recordings need the same attention mask: a forgotten mask changes experts at equal weights.

    Dropout and router jitter change experts at equal weights, too, and such changes are counted. To count only the
    change between two policies, record in eval mode, or after `moe_rl.measure.randomness.turn_off_randomness`.

    Raises RoutingError if shapes, sites, their numbers of experts or, where both know them, the counted tokens differ.
    """
    a, b = aligned(old, new)
    sites, k = a.shape[-2:]
    if mask is not None:
        mask = token_mask(mask, a)
    refuse_other_tokens(old, new, mask)
    counted = None if mask is None else mask.reshape(-1)
    a, b = a.reshape(-1, sites, k), b.reshape(-1, sites, k)
    total = _count(a[:0], b[:0], None)
    step = max(1, min(rows_at_once(x) for x in (a, b)) // max(1, sites))
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        total += _count(a[part], b[part], None if counted is None else counted[part])
    return replace(total, sites=old.sites if isinstance(old, RoutedExperts) else (), pair=pair)


def _count(
    old: Integer[Tensor, "N L K"], new: Integer[Tensor, "N L K"], mask: Bool[Tensor, " N"] | None
) -> ChangeCounts:
    """Count the changes of a part of the tokens that is small enough to hold some numbers for each of its rows."""
    tokens, sites, k = old.shape
    index, changed, routed = differing_rows(old.reshape(-1, k), new.reshape(-1, k))
    here = old.device.type == "cpu"  # numpy divides and counts whole numbers several times faster than torch does there
    where: Any = index.numpy() if here else index
    count: Any = changed.numpy() if here else changed
    bincount: Any = np.bincount if here else torch.bincount
    token = where // sites
    site = where - token * sites
    if mask is not None:
        kept = (mask.numpy() if here else mask)[token]
        token, site, count = token[kept], site[kept], count[kept]
    flips = torch.as_tensor(bincount(token, minlength=tokens), device=old.device)
    deviation = bincount(site * (k + 1) + count, minlength=sites * (k + 1))
    deviation = torch.as_tensor(deviation, device=old.device).view(sites, k + 1).cpu()
    if routed is None:
        flips = flips if mask is None else flips[mask]
        compared, incomplete = torch.full((sites,), len(flips), device="cpu"), 0
    else:
        both = routed.view(tokens, sites) if mask is None else routed.view(tokens, sites) & mask[:, None]
        per_token = both.sum(-1)
        flips, compared = flips[per_token > 0], both.sum(0).cpu()
        incomplete = int(((per_token > 0) & (per_token < sites)).sum())
    deviation[:, 0] = compared - deviation.sum(-1)
    return ChangeCounts(deviation, torch.bincount(flips, minlength=sites + 1).cpu(), incomplete)


def aligned(old: Routes, new: Routes) -> tuple[Tensor, Tensor]:
    """Return the ids of both as `differing_rows` takes them, with the sites of `new` in the order of `old`."""
    if isinstance(old, RoutedExperts) and isinstance(new, RoutedExperts):
        new = in_order_of(old, new)
    a, b = (_ids(x) for x in (old, new))
    b = b.to(a.device)
    if a.shape != b.shape:
        raise RoutingError(
            f"old {list(a.shape)} and new {list(b.shape)} must have one shape [...,L,K]; {_remedy(a.shape, b.shape)}"
        )
    if not 1 <= a.shape[-1] <= 254:  # counts of slots are uint8
        raise RoutingError(f"K is {a.shape[-1]}; at least 1 and at most 254 slots are supported")
    return a, b


def _remedy(old: torch.Size, new: torch.Size) -> str:
    """Return advice on two shapes that do not match, for an error message."""
    if len(old) == len(new) == 4 and old[0] != new[0]:
        return "of the sequences that both have, take .rows"
    if len(old) == len(new) == 4 and abs(old[1] - new[1]) == 1:
        return (
            "routes of generate() lack the last sampled token, which was never routed: with the mask of the whole "
            "output, .realign(mask, mask) adds it as a row without a route"
        )
    return "realign brings routes to one padding"


def in_order_of(old: RoutedExperts, new: RoutedExperts) -> RoutedExperts:
    """Return `new` with its sites in the order of `old`. Raises RoutingError if sites or numbers of experts differ."""
    if old.sites != new.sites:
        new = _named_alike(old, new)
        if missing := set(old.sites) ^ set(new.sites):
            name = sorted(missing)[0]
            raise RoutingError(
                f"site {name} is only in the {'old' if name in old.sites else 'new'} routes (one of "
                f"{len(missing)}): routes of different models? To compare a part of the sites, use select"
            )
        new = new.select(old.sites)
    if old.num_experts != new.num_experts:  # models of other sizes: equal ids are other experts
        raise RoutingError(
            f"the old routes are of {old.num_experts} experts and the new ones of {new.num_experts}: routes of "
            "different models?"
        )
    return new


def _named_alike(old: RoutedExperts, new: RoutedExperts) -> RoutedExperts:
    """Return `new` under the names of `old`, if one was recorded on a part of the other's model; else `new`."""
    pairs = list(zip(old.sites, new.sites, strict=False))
    if len(old.sites) != len(new.sites) or not all(within(a, b) for a, b in pairs):
        return new
    return RoutedExperts._trusted(new.packed, old.sites, new._experts, tokens=new._tokens, meta=new._meta)


def _ids(routes: Routes) -> Tensor:
    if isinstance(routes, RoutedExperts):
        return routes.packed
    check_plain(routes)
    if routes.is_floating_point() or not routes.dtype.is_signed:
        return compact(routes)  # plain ids of an unsigned dtype have no sentinel yet; other kinds are refused
    return routes


def check_plain(ids: Any) -> None:
    """Raise RoutingError unless `ids` is a tensor `[...,L,K]`."""
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        got = f"one of {ids.ndim} axes" if isinstance(ids, Tensor) else type(ids).__name__
        raise RoutingError(
            f"expected RoutedExperts or a tensor of expert ids [...,L,K], got {got} (of a recording: "
            "recording.routes; an array: torch.as_tensor(array); of an engine: RoutedExperts.from_vllm and its kin)"
        )


def refuse_other_tokens(old: Routes, new: Routes, mask: Bool[Tensor, "..."] | None) -> None:
    """Raise RoutingError if both know their tokens and a counted token differs."""
    if not (isinstance(old, RoutedExperts) and isinstance(new, RoutedExperts)):
        return
    if old.tokens is None or new.tokens is None:
        return
    a, b = old.tokens, new.tokens.to(old.device)
    differ = (a != b) & (a >= 0) & (b >= 0) & (torch.ones_like(a, dtype=torch.bool) if mask is None else mask)
    if differ.any():
        row, t = differ.nonzero()[0].tolist()
        raise RoutingError(
            f"the routes are of different tokens: sequence {row}, position {t} is token {int(a[row, t])} in the old "
            f"and {int(b[row, t])} in the new ones; were rows shuffled, or paddings not realigned?"
        )


def quotient(numerator: float | int, denominator: float | int) -> float:
    """Return numerator / denominator, or NaN if the denominator is 0."""
    return numerator / denominator if denominator else float("nan")
