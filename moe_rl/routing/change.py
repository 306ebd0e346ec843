"""Measures of routing change between two policies, or between two engines, with one definition per name.

"Expert-change rate" alone is ambiguous by a factor of up to K. With one of K = 8 experts exchanged at 10 % of
the (token, site) pairs of 48 sites, 1.25 % of the slots, 10 % of the sites, and, if sites were independent,
99.4 % of the tokens changed. Hence:

- slot  (`slot_change`)   share of a row's K experts that are not in the other row
- site  (`site_change`)   whether the two sets of experts differ at one (token, site)
- token (`token_change`)  whether they differ at any site of the token

Published numbers. GSPO (arXiv 2507.18071, section 5.3): "roughly 10% of the experts activated" differ after a
gradient update, for the same sample; it states no denominator, the slot reading is the literal one. R3 (arXiv
2510.11370): about 10 % of sites and 94 % of tokens, between two engines with the same weights.

Everywhere here: `old` and `new` are `RoutedExperts`, or integer ids `[...,L,K]` with distinct ids in a row
and -1 for "no route"; two RoutedExperts are aligned by site name, in the order of `old`. Slot order never
matters, and but for the order of sites every function is symmetric in `old` and `new`. A row without a route on
either side compares as unchanged and is in no denominator. Rates come from `change_counts`, which keeps numerators
and denominators. Nothing carries gradient. Shapes, sites or numbers of experts that differ raise RoutingError; that
both are of the same tokens only `change_counts` and `deviation_histogram` check.
"""

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped, UInt
from torch import Tensor

from moe_rl.routing.counts import ChangeCounts as ChangeCounts
from moe_rl.routing.counts import Routes, aligned
from moe_rl.routing.counts import change_counts as change_counts
from moe_rl.routing.packing import differing_rows, rows_at_once


def slot_change(old: Routes, new: Routes) -> Float[Tensor, "*rows L"]:
    """Return the share of experts exchanged per (token, site), 1 - |old ∩ new| / K in [0, 1], float32.

    Literal reading of GSPO's "10% of the experts activated" (arXiv 2507.18071, section 5.3); its complement
    is the router saturation of OLMoE (arXiv 2409.02060) and the top-k overlap of others.

    >>> slot_change(torch.tensor([[[3, 0]], [[1, 2]]]), torch.tensor([[[0, 1]], [[2, 1]]])).flatten()
    tensor([0.5000, 0.0000])
    """
    changed, k = _changed_slots(old, new)
    return changed / k


def site_change(old: Routes, new: Routes) -> Bool[Tensor, "*rows L"]:
    """Return whether the sets of experts differ, per (token, site): router discrepancy in R3 (arXiv 2510.11370)."""
    return _changed_slots(old, new)[0] > 0


def token_change(old: Routes, new: Routes) -> Bool[Tensor, "*rows"]:
    """Return whether the sets differ at any site of the token, per token: the 94 % of R3 (arXiv 2510.11370)."""
    return site_change(old, new).any(-1)


def flips_per_token(old: Routes, new: Routes) -> Int[Tensor, "*rows"]:
    """Return the number of sites, 0..L, whose sets differ, per token: about 6 of 48 in R3 (arXiv 2510.11370)."""
    return site_change(old, new).sum(-1, dtype=torch.int32)  # int64 sums of bool are 20 times slower


def jaccard(old: Routes, new: Routes) -> Float[Tensor, "*rows L"]:
    """Return |old ∩ new| / |old ∪ new| per (token, site), float32: (K-d)/(K+d) if d slots changed; 1 if none."""
    changed, k = _changed_slots(old, new)
    return (k - changed.float()) / (k + changed.float())


def deviation_histogram(
    old: Routes, new: Routes, mask: Shaped[Tensor, "..."] | None = None
) -> Int[Tensor, " K_plus_1"]:
    """Count the (token, site) pairs that changed 0, 1, .., K slots; mask as in `change_counts`.

    Entry 0 over the sum is the zero-deviation ratio of PR² (arXiv 2606.00395), if its unit is (token, site).
    """
    return change_counts(old, new, mask).deviation


def _changed_slots(old: Routes, new: Routes) -> tuple[UInt[Tensor, "*rows L"], int]:
    """Return the number of slots changed per (token, site), and K."""
    a, b = aligned(old, new)
    return changed_slots(a, b), a.shape[-1]


def changed_slots(old: Integer[Tensor, "*rows K"], new: Integer[Tensor, "*rows K"]) -> UInt[Tensor, "*rows"]:
    """Return K - |old ∩ new| of each row as uint8; 0 unless both rows have a route.

    Unsigned ids are taken as packed (`pack_ids`), signed ones are packed on the way.
    """
    rows, k = old.shape[:-1], old.shape[-1]
    changed = torch.zeros(rows.numel(), dtype=torch.uint8, device=old.device)
    flat_old, flat_new = old.reshape(-1, k), new.reshape(-1, k)
    step = rows_at_once(old)
    for start in range(0, len(changed), step):
        part = slice(start, start + step)
        index, count, _ = differing_rows(flat_old[part], flat_new[part])
        changed[part][index] = count
    return changed.view(rows)
