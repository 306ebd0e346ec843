"""How much of their routing capacity runs use: by hand, from route files."""

import pytest
import torch
from synthetic import write_rows

from moe_rl.routing import RoutedExperts, effective_sets
from moe_rl.study.data import load
from moe_rl.study.result_tables import effective_routes
from moe_rl.training.route_tables import write_route_table

SITES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_sets_that_are_used_alike_count_whatever_their_order_and_rare_ones_count_less():
    ids = torch.tensor([[0, 1], [1, 0], [2, 3], [0, 3]])[:, None]
    assert effective_sets(ids, num_experts=4).item() == pytest.approx(2**1.5), "shares 1/2, 1/4, 1/4"
    masked = effective_sets(ids, torch.tensor([True, True, False, False]), num_experts=4)
    assert masked.item() == pytest.approx(1)
    assert effective_sets(torch.full_like(ids, -1), num_experts=4).isnan().all()


def write_run(folder, arm, ids, more):
    place = folder / arm / "seed0"
    (place / "routes").mkdir(parents=True)
    write_rows(place, [{"kind": "rollout", "step": 0, "reward": 0.5}], {})
    routes = torch.stack([ids, torch.zeros_like(ids) + torch.tensor([0, 1])], 2)  # the second site: one set
    write_route_table(place / "routes" / "step_000000_update_0.parquet", RoutedExperts(routes[:, :1], SITES, 4))
    routes = torch.cat([routes, torch.full((1, more, 2, 2), -1)], 1)  # padding
    write_route_table(place / "routes" / "step_000010_update_4.parquet", RoutedExperts(routes, SITES, 4))


def test_arms_are_compared_on_as_many_tokens_of_the_last_routes_that_were_kept(tmp_path):
    write_run(tmp_path, "all", torch.tensor([[[0, 1], [1, 2], [2, 3], [0, 3], [0, 1]]]), more=0)
    write_run(tmp_path, "few", torch.tensor([[[0, 1], [2, 3], [0, 1], [2, 3]]]), more=2)
    rows = effective_routes(load(tmp_path)).set_index("arm")
    assert rows["tokens"].tolist() == [4, 4] and rows["step"].tolist() == [10, 10]
    assert rows.loc["all", "effective_sets"] == pytest.approx((4 + 1) / 2), "mean over the two sites"
    assert rows.loc["few", "effective_sets"] == pytest.approx((2 + 1) / 2)
    assert rows.loc["few", "effective_experts"] == pytest.approx((4 + 2) / 2)


def test_the_last_routes_of_a_step_are_those_after_its_last_update(tmp_path):
    """Update 16 comes after update 9, though its name is before it."""
    one, two = torch.tensor([[[0, 1], [0, 1]]]), torch.tensor([[[0, 1], [2, 3]]])
    write_run(tmp_path, "grpo", one, more=0)
    for update, ids in ((9, one), (16, two)):
        path = tmp_path / "grpo" / "seed0" / "routes" / f"step_000010_update_{update}.parquet"
        write_route_table(path, RoutedExperts(torch.stack([ids, ids], 2), SITES, 4))
    data = load(tmp_path)
    assert data.route_files["update"].tolist() == [0, 4, 9, 16]
    assert effective_routes(data)["effective_sets"].tolist() == pytest.approx([2])
