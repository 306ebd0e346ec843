"""Routes of an engine that are shifted by one token are refused; all that differ in other ways are not."""

import pytest
import torch

from moe_rl.measure.engine_routes import refuse_shifted
from moe_rl.routing import RoutedExperts, RoutingError

EXPERTS, K = 16, 2
SITES = ["layers.0.mlp.gate", "layers.1.mlp.gate"]
MASK = torch.tensor([[False] * 4 + [True] * 12, [True] * 13 + [False] * 3])


def drawn(seed):
    scores = torch.rand(2, 16, len(SITES), EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(K).indices


def routes(ids):
    return RoutedExperts(ids, SITES, EXPERTS)


def noisy(ids, share):
    """Another engine's: the share of rows are drawn anew."""
    other = torch.rand(ids.shape[:3], generator=torch.Generator().manual_seed(7)) < share
    return torch.where(other[..., None], drawn(3), ids)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_by_one_token_is_named(shift, share):
    own = drawn(1)
    said = noisy(own.roll(-shift, 1), share)
    said[:, -1] = -1  # an engine has no route for the last token
    with pytest.raises(RoutingError, match=rf"shifted by one token: row t holds those of token t[{shift:+d}]+\."):
        refuse_shifted(routes(said), routes(own), MASK)


@pytest.mark.parametrize(
    "said",
    [
        drawn(1),
        noisy(drawn(1), 0.6),
        drawn(2),  # of an engine with other routers
        drawn(1).roll(2, 1),  # not of the next token: nothing is claimed
        drawn(1)[:, :1].expand(-1, 16, -1, -1),  # all tokens alike
        torch.full_like(drawn(1), -1),
    ],
)
def test_other_differences_pass(said):
    refuse_shifted(routes(said), routes(drawn(1)), MASK)


def test_one_token_and_no_token_pass():
    ids = drawn(1)[:, :1]
    refuse_shifted(routes(ids), routes(ids), torch.ones(2, 1, dtype=torch.bool))
    refuse_shifted(routes(drawn(1).roll(1, 1)), routes(drawn(1)), torch.zeros(2, 16, dtype=torch.bool))


def test_padding_counts_nowhere():
    """What stands beside padding would agree; real tokens are shifted."""
    own = drawn(1)
    said = torch.where(MASK[..., None, None], own.roll(-1, 1), own)
    with pytest.raises(RoutingError, match="shifted by one token"):
        refuse_shifted(routes(said), routes(own), MASK)


def test_processes_refuse_together():
    """The sums are those of all processes: of a process without a shift too."""
    own = drawn(1)
    others = torch.tensor([[40.0, 40.0], [0.0, 38.0], [38.0, 38.0]], dtype=torch.float64)
    with pytest.raises(RoutingError, match="shifted by one token"):
        refuse_shifted(routes(own[:0]), routes(own[:0]), MASK[:0], lambda found: found + others)
