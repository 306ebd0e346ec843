"""Metrics of routers, load and changed routes against arithmetic done by hand."""

import math

import pytest
import torch

from moe_rl.measure.metrics import as_logits, change_metrics, load_metrics, router_metrics
from moe_rl.measure.noise_floor import position_metrics
from moe_rl.measure.router_shift import gates_and_margins
from moe_rl.routing import RoutedExperts, change_counts

LN2 = math.log(2)


def test_router_metrics_of_one_token_at_one_site():
    old, new = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 3.0]])
    p, q = old.softmax(-1), new.softmax(-1)
    m = (p + q) / 2
    metrics = router_metrics([old], [new], k=2)
    assert metrics["router_kl"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert metrics["router_js"] == pytest.approx(float((p * (p / m).log() + q * (q / m).log()).sum() / 2), rel=1e-5)
    assert float(metrics["margin_median"]) == pytest.approx(1.0)  # 2 - 1: the third is chosen now
    assert float(metrics["shift_over_margin"]) == pytest.approx(4.0)  # changes -1, -1, +2; half the old margin is 0.5


def test_a_common_shift_of_logits_moves_no_router():
    old = [torch.randn(4, 6), torch.randn(4, 6)]
    metrics = router_metrics(old, [logits + 5 for logits in old], k=2)
    assert metrics["router_kl"] == pytest.approx(0, abs=1e-6)
    assert float(metrics["shift_over_margin"]) == pytest.approx(0, abs=1e-3)
    assert "margin_median" not in router_metrics(old, old, k=6), "all experts are taken: there is no boundary"
    tied = [torch.zeros(4, 6)]
    assert float(router_metrics(tied, tied, k=2)["shift_over_margin"]) == 0, "0 over a margin of 0"


def test_margins_are_of_the_new_weights_at_the_nearest_rank_and_divergences_are_means_over_sites():
    """Two experts, k = 1: a margin is the first logit. Those of the new weights are 1 to 6 and 7 to 11, over both sites
    11, of which the second is the 10 % (1.1) and the sixth the median; those of the old weights are all 20."""
    new = [torch.tensor([[float(m), 0.0] for m in margins]) for margins in (range(1, 7), range(7, 12))]
    old = [torch.tensor([[20.0, 0.0]]).expand(6, 2), new[1]]
    metrics = router_metrics(old, new, k=1)
    assert (float(metrics["margin_p10"]), float(metrics["margin_median"])) == (2, 6)
    for name in ("router_kl", "router_js"):
        moved, still = metrics[f"site_{name}"]
        assert moved > 0.01 and still == pytest.approx(0, abs=1e-8)
        assert metrics[name] == pytest.approx((moved + still) / 2)


def test_routers_of_no_token_have_no_margin():
    metrics = router_metrics([torch.zeros(0, 6)], [torch.zeros(0, 6)], k=2)
    assert math.isnan(metrics["router_kl"]) and "margin_median" not in metrics
    with pytest.raises(ValueError, match="logits of no site"):
        router_metrics([], [], k=2)


def test_margins_and_shifts_of_float64_logits_are_not_rounded():
    """A shift of 1e-9, of a small step, is below what float32 can tell."""
    old = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)
    new = old + 1e-9 * torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    metrics = router_metrics([old], [new], k=1)
    assert float(metrics["shift_over_margin"]) == pytest.approx(4e-9, rel=1e-6)
    assert float(metrics["margin_median"]) == pytest.approx(0.5 + 2e-9, abs=1e-15)


@pytest.mark.filterwarnings("error")
def test_no_number_of_routers_holds_the_graph_of_their_logits():
    old, new = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    metrics = router_metrics([old], [new], k=2)
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in metrics.values())


def test_load_of_two_tokens_on_four_experts():
    mask = torch.ones(1, 2, dtype=torch.bool)
    old, new = (
        RoutedExperts(torch.tensor(ids), ("gate",), 4) for ids in ([[[[0, 1]], [[0, 1]]]], [[[[0, 1]], [[0, 2]]]])
    )
    metrics = {name: float(value) for name, value in load_metrics(old, new, mask).items()}
    assert metrics["load_cv_mean"] == metrics["load_cv_max"] == pytest.approx(math.sqrt(0.5))  # 2, 1, 1, 0 around 1
    assert metrics["load_entropy_mean"] == pytest.approx(1.5 * LN2)  # ½ ln 2 + 2 · ¼ ln 4
    assert [metrics[f"site_{name}_vio"] for name in ("max", "min", "avg")] == [1, -1, 0.5]
    assert metrics["active_set_churn"] == pytest.approx(1 / 3)  # {0, 1} -> {0, 1, 2}


def test_load_is_of_the_tokens_of_the_mask_and_of_each_site():
    """Site a as above, site b even and unchanged. The last token of the first sequence would make both even, and the
    second sequence, which has no token that counts, would halve the churn."""
    old = torch.tensor([[[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[2, 3], [0, 1]]], [[[0, 1], [0, 1]]] * 3])
    new = torch.tensor([[[[0, 1], [0, 1]], [[0, 2], [2, 3]], [[2, 3], [0, 1]]], [[[2, 3], [2, 3]]] * 3])
    mask = torch.tensor([[True, True, False], [False] * 3])
    metrics = load_metrics(*(RoutedExperts(ids, ("a", "b"), 4) for ids in (old, new)), mask)
    cv, entropy = torch.tensor([math.sqrt(0.5), 0]), torch.tensor([1.5 * LN2, 2 * LN2])
    assert float(metrics["load_cv_mean"]) == pytest.approx(float(cv.mean()))
    assert float(metrics["load_cv_max"]) == pytest.approx(float(cv.max()))
    assert float(metrics["load_entropy_mean"]) == pytest.approx(float(entropy.mean()))
    assert float(metrics["load_entropy_min"]) == pytest.approx(float(entropy.min()))
    assert metrics["site_max_vio"].tolist() == [1, 0] and metrics["site_min_vio"].tolist() == [-1, 0]
    assert float(metrics["active_set_churn"]) == pytest.approx((1 / 3 + 0) / 2)


def test_logits_that_sum_to_one_are_no_probabilities():
    logits = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(as_logits(logits), logits)


def test_changes_by_site_and_position_of_two_responses():
    """Sites 0 and 1, K = 2. Row 0 responds at columns 1, 2, row 1 at column 2 alone; columns before are prompts.

    Row 0: the prompt changes (counts nowhere); position 0 changes one slot at site 0; position 1 both slots at site 1.
    Row 1: position 0 changes one slot at each site.
    """
    old = torch.tensor([0, 1]).expand(2, 3, 2, 2)
    new = old.clone()
    new[0, 0, 0] = torch.tensor([2, 3])
    new[0, 1, 0] = torch.tensor([1, 2])
    new[0, 2, 1] = torch.tensor([2, 3])
    new[1, 2] = torch.tensor([[0, 3], [3, 1]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    routes = [RoutedExperts(ids, ("l.0.gate", "l.1.gate"), 4) for ids in (old, new)]
    metrics = change_metrics(change_counts(*routes, mask))
    assert [metrics[n] for n in ("slots_changed", "slots", "sites_changed", "sites", "tokens_changed", "tokens")] == [
        5, 12, 4, 6, 3, 3,
    ]  # fmt: skip
    assert metrics["site_names"] == ("l.0.gate", "l.1.gate")
    assert metrics["site_slots_changed"].tolist() == [2, 3] and metrics["site_slots"].tolist() == [6, 6]
    assert metrics["flips_histogram"].tolist() == [0, 2, 1]  # tokens of 0, 1, 2 changed sites
    assert metrics["deviation_histogram"].tolist() == [2, 3, 1]  # pairs of 0, 1, 2 changed slots
    by_position = {name: values.tolist() for name, values in position_metrics(*routes, mask).items()}
    assert by_position == {"position_sites_changed": [3, 1], "position_sites": [4, 2]}
    mask = torch.tensor([[True, False, True], [False, True, True]])  # a tool's text between two turns has its position
    by_position = {name: values.tolist() for name, values in position_metrics(*routes, mask).items()}
    assert by_position == {"position_sites_changed": [1, 2, 1], "position_sites": [4, 2, 2]}


def test_gates_and_margins_are_of_the_chosen_experts():
    """Site 0 scores 5, 3, 1, 1 of 10, site 1 evenly; the second token has no route at site 1."""
    logits = [torch.tensor([[5.0, 3.0, 1.0, 1.0], [1.0, 1.0, 3.0, 5.0]]).log(), torch.zeros(2, 4)]
    ids = torch.tensor([[[1, 0], [2, 3]], [[3, 2], [-1, -1]]])
    shares, margins = gates_and_margins(logits, ids)
    torch.testing.assert_close(shares[:, 0], torch.tensor([[0.3, 0.5], [0.5, 0.3]]))
    assert shares[0, 1].tolist() == [0.25, 0.25] and bool(shares[1, 1].isnan().all())
    torch.testing.assert_close(margins, torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0]]))
    assert bool(gates_and_margins([logits[0]], torch.zeros(2, 1, 4, dtype=torch.long))[1].isinf().all())


def test_positions_leave_out_what_has_no_route():
    """A sampler's last token has none: it was counted as compared, and `change_counts` does not count it."""
    ids = torch.tensor([[[[0], [1]], [[2], [-1]], [[-1], [-1]]]])
    old, new = RoutedExperts(ids, ("a", "b"), 4), RoutedExperts((ids + 1).where(ids >= 0, -1).flip(2), ("b", "a"), 4)
    mask = torch.ones(1, 3, dtype=torch.bool)
    found, counts = position_metrics(old, new, mask), change_counts(old, new, mask)
    assert [x.tolist() for x in found.values()] == [[2, 1, 0], [2, 1, 0]]
    assert found["position_sites"].sum() == counts.sites_total and counts.sites_changed == 3
