"""What may be compared: routes under other names, and of other shapes."""

import jaxtyping
import numpy as np
import pytest
import torch

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    active_set_churn,
    change_counts,
    effective_sets,
    expert_load,
    slot_change,
)


def test_routes_recorded_through_a_model_around_it_are_compared_under_one_name() -> None:
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    own = RoutedExperts(ids, ["layers.0.gate", "layers.1.gate"], 4)
    around = RoutedExperts(ids.flip(-1), ["pretrained_model.layers.0.gate", "pretrained_model.layers.1.gate"], 4)
    for old, new in ((own, around), (around, own)):
        counts = change_counts(old, new)
        assert (counts.slots_changed, counts.slots_total, counts.sites) == (0, 4, old.sites)
    around = [f"pretrained_model.layers.{i}.gate" for i in range(3)]
    told = (RoutedExperts(ids, names, 4, tokens=[[token]]) for names, token in ((own.sites, 5), (around[:2], 6)))
    with pytest.raises(RoutingError, match="position 0 is token 5 in the old and 6 in the new"):
        active_set_churn(*told)
    three = RoutedExperts(torch.cat([ids, ids[:, :, :1]], 2), around, 4)
    with pytest.raises(RoutingError, match=r"layers\.0\.gate is only in the old routes \(one of 5\)"):
        change_counts(own, three)
    with pytest.raises(RoutingError, match=r"a\.layers\.0\.gate is only in the new routes"):
        change_counts(own, RoutedExperts(ids, ["a.layers.0.gate", "a.layers.2.gate"], 4))


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((1, 4, 2, 2), r"lack the last sampled token.*realign\(mask, mask\)"),
        ((2, 3, 2, 2), r"take \.rows"),
        ((1, 9, 2, 2), "realign brings"),
    ],
)
def test_routes_of_other_shapes_are_refused_with_what_helps(shape: tuple[int, ...], remedy: str) -> None:
    old, new = torch.tensor([0, 1]).expand(1, 3, 2, 2), torch.tensor([0, 1]).expand(shape)
    with pytest.raises(RoutingError, match=remedy):
        change_counts(old, new)


@pytest.mark.parametrize(
    ("ids", "got"),
    [(np.zeros((1, 1, 1, 1), int), "ndarray"), ([[[[0]]]], "list"), (torch.zeros(1).long(), "one of 1 axes")],
)
def test_what_is_no_tensor_of_ids_is_named(ids: object, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    for take in (
        lambda: change_counts(ids, ids),
        lambda: expert_load(ids, num_experts=4),
        lambda: effective_sets(ids, num_experts=4),
        lambda: active_set_churn(ids, ids, num_experts=4),
    ):
        with pytest.raises(RoutingError, match=rf"expected RoutedExperts or a tensor .*, got {got}"):
            take()
    three = torch.zeros(1, 1, 1).long()
    with pytest.raises(RoutingError, match=r"must have one shape \[B,T,L,K\]"):
        active_set_churn(three, three, num_experts=4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_ids_of_unsigned_integers_are_compared(dtype: torch.dtype) -> None:
    old, new = torch.tensor([[[0, 1], [200, 3]]]), torch.tensor([[[1, 2], [3, 200]]])
    assert slot_change(old.to(dtype), new.to(dtype)).tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize("experts", [255, 256])
def test_packed_ids_are_told_from_plain_ones(experts: int) -> None:
    """Counted as plain ids, the sentinel of a row without a route would be an expert."""
    ids = torch.tensor([[[[0, 1], [2, 3]], [[-1, -1], [4, 5]]]])
    packed = RoutedExperts(ids, ["a", "b"], experts).packed
    for take in (lambda: change_counts(packed, ids), lambda: slot_change(ids, packed)):
        with pytest.raises(RoutingError, match=rf"sentinel of packed {packed.dtype} ids: pass `\.ids`"):
            take()
    full = torch.tensor([[[254, 255], [255, 0]]], dtype=torch.uint8)  # as an engine sends them of 256 experts
    assert slot_change(full, full).tolist() == [[0, 0]]


def test_the_sum_of_counts_is_a_sum() -> None:
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    counts = [change_counts(ids, other) for other in (ids, ids.roll(1, 2), ids)]
    assert sum(counts).rates() == (counts[0] + counts[1] + counts[2]).rates()
    with pytest.raises(TypeError):
        _ = 1 + counts[0]
