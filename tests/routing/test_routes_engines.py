"""RoutedExperts from what vLLM and SGLang return."""

import base64
import io

import numpy as np
import pytest
import torch
from routing_helpers import SITES

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.routes import RoutedExperts


def engine_arrays(dtype=np.uint8):
    """Two sequences of 3 and 2 tokens, so 2 and 1 rows; 4 layers, of which 0 and 3 are dense; K = 2."""
    a = np.zeros((2, 4, 2), dtype)
    a[0, 1], a[0, 2], a[1, 1], a[1, 2] = [1, 2], [3, 4], [5, 6], [7, 0]
    b = np.zeros((1, 4, 2), dtype)
    b[0, 1], b[0, 2] = [0, 7], [2, 1]
    return [a, b]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32])
def test_vllm_arrays_lose_dense_layers_and_gain_padding(dtype):
    routes = RoutedExperts.from_vllm(engine_arrays(dtype), SITES, 8)
    # Layers 1 and 2 by the names of the sites; padding on the right.
    assert routes.ids.tolist() == [[[[1, 2], [3, 4]], [[5, 6], [7, 0]]], [[[0, 7], [2, 1]], [[-1, -1], [-1, -1]]]]
    explicit = RoutedExperts.from_vllm(engine_arrays(dtype), ["a", "b"], 8, layers=[1, 2])
    assert torch.equal(explicit.ids, routes.ids)


def test_vllm_arrays_go_where_the_tokens_are():
    # Left-padded tokens [_,x,x,x] and [_,_,x,x]: the last sampled token of each has no route.
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    routes = RoutedExperts.from_vllm(engine_arrays(), SITES, 8, mask=mask)
    assert routes.ids[:, :, 0].tolist() == [
        [[-1, -1], [1, 2], [5, 6], [-1, -1]],
        [[-1, -1], [-1, -1], [0, 7], [-1, -1]],
    ]
    # A mask without the last token means the same rows.
    without_last = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]])
    assert torch.equal(RoutedExperts.from_vllm(engine_arrays(), SITES, 8, mask=without_last).ids, routes.ids)


def test_sglang_strings_are_the_same_routes():
    payloads = [base64.b64encode(a.astype("<i4").tobytes()).decode() for a in engine_arrays()]
    routes = RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=4, num_experts_per_tok=2)
    assert routes.equal(RoutedExperts.from_vllm(engine_arrays(), SITES, 8))
    with pytest.raises(RoutingError, match="not a whole number"):
        RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=3, num_experts_per_tok=2)
    for none in ("%%", None):  # None: the server was not asked for routes
        with pytest.raises(RoutingError, match="not base64"):
            RoutedExperts.from_sglang([none], SITES, 8, num_layers=4, num_experts_per_tok=2)
    with pytest.raises(RoutingError, match="num_experts_per_tok 0: expected at least 1"):
        RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=4, num_experts_per_tok=0)


def npy(array):
    """As vLLM's server sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_answers_of_vllms_server_are_the_same_routes():
    payloads = [npy(a) for a in engine_arrays()]
    assert RoutedExperts.from_vllm(payloads, SITES, 8).equal(RoutedExperts.from_vllm(engine_arrays(), SITES, 8))
    with pytest.raises(RoutingError, match="as vLLM's server sends: from_vllm"):
        RoutedExperts.from_sglang(payloads, SITES, 8, num_layers=4, num_experts_per_tok=2)
    archive = io.BytesIO()
    np.savez(archive, engine_arrays()[0])
    of_bytes = [base64.b64encode(raw).decode() for raw in (b"12345678", archive.getvalue(), archive.getvalue()[:40])]
    for damaged in ("%%", payloads[0][:40], *of_bytes):
        with pytest.raises(RoutingError, match=r"not base64 of a .npy file"):
            RoutedExperts.from_vllm([damaged], SITES, 8)


def test_engine_results_that_cannot_be_right():
    arrays = engine_arrays()
    with pytest.raises(RoutingError, match=r"site model\.layers\.3\.mlp\.gate \(layer 3 .*captured nothing"):
        RoutedExperts.from_vllm(arrays, [*SITES, "model.layers.3.mlp.gate"], 8)
    with pytest.raises(RoutingError, match=r"layers \[2\] of the engine hold routes, but no site"):
        RoutedExperts.from_vllm(arrays, SITES[:1], 8)
    with pytest.raises(RoutingError, match="pass layers="):
        RoutedExperts.from_vllm(arrays, ["a.gate", "b.gate"], 8)
    with pytest.raises(RoutingError, match=r"returned 4 layers, but model\.layers\.7\.mlp\.gate is layer 7"):
        RoutedExperts.from_vllm(arrays, [*SITES, "model.layers.7.mlp.gate"], 8)
    with pytest.raises(RoutingError, match="sequence 1: 1 rows of routes for 3 tokens"):
        RoutedExperts.from_vllm(arrays, SITES, 8, mask=torch.tensor([[1, 1, 1], [1, 1, 1]]))
    for layers in ([-3, -2], [1, 4], [2, 2], [1]):
        with pytest.raises(RoutingError, match=r"do not name one of 0\.\.3 for each of 2 sites"):
            RoutedExperts.from_vllm(arrays, SITES, 8, layers=layers)
    with pytest.raises(RoutingError, match="one array"):
        RoutedExperts.from_vllm([arrays[0][:, 0]], SITES, 8)
    with pytest.raises(RoutingError, match="integer ids"):
        RoutedExperts.from_vllm([a.astype(float) for a in arrays], SITES, 8)
    zero_row = [a.copy() for a in arrays]
    zero_row[0][1, 2] = 0  # one token not captured, where its neighbours were
    with pytest.raises(RoutingError, match=r"layers\.2.*sequence 0, token 1 names an expert twice: \[0, 0\]"):
        RoutedExperts.from_vllm(zero_row, SITES, 8)


@pytest.mark.parametrize("make", ["from_vllm", "from_padded"])
def test_of_one_slot_zeros_at_every_one_of_many_sites_are_no_routes(make):
    sites = [f"layers.{i}.router" for i in range(24)]
    ids = np.random.default_rng(0).integers(1, 16, (6, 24, 1))
    ids[:2] = 0  # of two tokens the engine had the keys in its prefix cache

    def made(ids, sites):
        if make == "from_vllm":
            return RoutedExperts.from_vllm([ids], sites, 16)
        return RoutedExperts.from_padded(torch.tensor(ids)[None], torch.ones(1, len(ids)), sites, 16)

    with pytest.raises(RoutingError, match=r"sequence 0, token 0 has no routes .*, nor have 1 others"):
        made(ids, sites)
    assert made(ids[:, :2], sites[:2]).ids[0, 0].tolist() == [[0], [0]]  # at two sites expert 0 may be meant
