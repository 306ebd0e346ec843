"""Interventions on routing: replay of a part of the routes only, and load balancing by a bias instead of a loss."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.routing import RoutedExperts, biased_routes
from moe_rl.training.batch import Batch
from moe_rl.training.config import MethodConfig


class ExpertBias:
    """Load balancing without a loss: a bias on the selection of experts that is moved against their loads.

    After each update, for every expert e of a site, which got c_e of the minibatch's tokens (arXiv 2408.15664,
    algorithm 1):

        b_e <- b_e + rate * sign(mean(c) - c_e)

    The loads are those of the update's own forward.

    Args:
        rate: step of the bias, in the unit of the scores that the router ranks.
        live: under replay, count the experts that the routers would have chosen instead of the replayed ones.
    """

    def __init__(self, model: nn.Module, rate: float, live: bool = False):
        self.rate, self.live = rate, live
        with biased_routes(model) as self.values:
            pass  # gives zeros of the right shape, and raises for families that cannot have a bias

    def applied(self, policy: nn.Module) -> AbstractContextManager[Tensor]:
        """Context manager: `policy` chooses its experts under the bias."""
        return biased_routes(policy, self.values)

    def update(self, load: Int[Tensor, "L E"]) -> None:
        """Move the bias by the loads of one minibatch: tokens per expert, as `expert_load` counts them."""
        self.values += (self.rate * load_error(load).sign()).to(self.values)


def load_error(load: Int[Tensor, "L E"]) -> Float[Tensor, "L E"]:
    """Return mean(c) - c_e for each site's experts: above 0 for an expert with too few tokens.

    A negative count means that there is no such expert (sites with fewer experts); its error is 0.

    >>> load_error(torch.tensor([[8, 0, 2, 2, -1]]))
    tensor([[-5.,  3.,  1.,  1.,  0.]], dtype=torch.float64)
    """
    there = load >= 0
    counts = load.clamp(min=0).double()
    return (counts.sum(-1, keepdim=True) / there.sum(-1, keepdim=True) - counts) * there


def with_part_to_replay(
    batch: Batch, method: MethodConfig, margins: Float[Tensor, "B T L"] | None, generator: torch.Generator
) -> Batch:
    """Return the batch with a mask `kept` of the (token, site) rows that the arm replays.

    For arms that replay only a part of the routes (`keep`, `keep_sites`).

    margins: margins of the old policy's choices; None if `keep` is 1.

    Raises:
        ValueError: `keep_sites` names sites that the model does not have, or only sites that choose nothing.
    """
    tokens = batch.attention_mask.bool()
    rows = tokens[..., None].repeat(1, 1, len(batch.routes.sites))
    if margins is not None:
        rows = kept_rows(margins, tokens, method.keep, generator if method.keep_by == "random" else None)
    if method.keep_sites is not None:
        check_choice(method.keep_sites, batch.routes)
        chosen = torch.zeros(rows.shape[-1], dtype=torch.bool, device=rows.device)
        chosen[list(method.keep_sites)] = True
        rows = rows & chosen
    return replace(batch, kept=rows)


def kept_rows(
    margins: Float[Tensor, "B T L"], tokens: Bool[Tensor, "B T"], share: float, generator: torch.Generator | None = None
) -> Bool[Tensor, "B T L"]:
    """Return a mask of the `share` of each site's rows, among all `tokens`, that were decided by the least margin.

    With a `generator`, as many rows are chosen at random. The number is rounded to whole rows; a row without a choice
    (margin NaN) comes last.

    >>> margins = torch.tensor([[[0.3], [0.1], [0.2], [0.0]]])
    >>> kept_rows(margins, torch.tensor([[True, True, True, False]]), 0.7).flatten().tolist()
    [False, True, True, False]
    """
    found = torch.zeros_like(margins, dtype=torch.bool)
    for site in range(margins.shape[-1]):
        values = margins[..., site][tokens].nan_to_num(torch.inf)
        if generator is not None:
            values = torch.rand(len(values), generator=generator).to(values)
        rows = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        rows[values.argsort(stable=True)[: round(share * len(values))]] = True
        found[..., site][tokens] = rows
    return found


def check_choice(sites: Sequence[int], routes: RoutedExperts) -> None:
    """Raise ValueError if all these sites look their experts up by token id, so that nothing would be replayed.

    >>> hashed = RoutedExperts(torch.zeros(1, 1, 2, 1, dtype=torch.int64), ["a", "b"], 4, meta={"hash_routed": ["a"]})
    >>> check_choice([0], hashed)
    Traceback (most recent call last):
    ValueError: method.keep_sites: [0] route by a table of token ids, so nothing is replayed; sites that choose: [1]
    """
    check_sites(sites, len(routes.sites))
    fixed = routes.meta.get("hash_routed", ())
    if all(routes.sites[site] in fixed for site in sites):
        others = [site for site, name in enumerate(routes.sites) if name not in fixed]
        raise ValueError(
            f"method.keep_sites: {list(sites)} route by a table of token ids, so nothing is replayed; sites that "
            f"choose: {others}"
        )


def check_sites(sites: Sequence[int], number: int) -> None:
    """Raise ValueError for a site that a model with `number` sites does not have."""
    if missing := [site for site in sites if site >= number]:
        raise ValueError(f"method.keep_sites: no site {missing}; this model has {number}, from 0 to {number - 1}")


def only_rows(routes: RoutedExperts, rows: Bool[Tensor, "B T #L"]) -> RoutedExperts:
    """Return routes in which only these (token, site) rows are forced and all others are live (-1).

    rows: with a last dimension of 1: the same tokens at all sites."""
    ids = torch.where(rows.to(routes.device)[..., None], routes.ids, -1)
    return routes.with_ids(ids, routes.tokens)
