"""RoutedExperts: storage, names of sites, tables, and what each mistake is told."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_helpers import SITES, example, random_ids

from moe_rl.routing.errors import RoutingError
from moe_rl.routing.packing import unpack_ids
from moe_rl.routing.routes import RoutedExperts, canonical_site, match_sites

# Storage


@pytest.mark.parametrize(
    "of", [lambda a: a[:, ::-1].copy()[:, ::-1], lambda a: a.astype(">i4"), lambda a: a[:, :1][:, ::-1]]
)
def test_arrays_that_torch_does_not_take_are_copied(of):
    given, tokens = of(np.array([[[[3, 0], [1, 2]], [[2, 1], [5, 4]]]])), of(np.array([[5, 6]]))
    mask = of(np.array([[1, 1]]))
    for routes in (
        RoutedExperts(given, SITES, 8, tokens=tokens),
        RoutedExperts.from_padded(given, mask, SITES, 8, tokens=tokens),
        RoutedExperts.from_vllm(list(given), SITES, 8, tokens=tokens),
    ):
        assert routes.ids.tolist() == given.tolist() and routes.tokens.tolist() == tokens.tolist()


def test_what_is_no_array_of_numbers_is_named():
    for ids, tokens, named in (([[[[0, 1]], [[0]]]], None, "ids"), ([[[[0, 1]]]], [["a"]], "tokens")):
        with pytest.raises(RoutingError, match=f"^{named}: expected a tensor or an array of numbers, got list"):
            RoutedExperts(ids, ["gate"], 4, tokens=tokens)


@pytest.mark.parametrize(
    ("num_experts", "dtype", "nbytes"),
    [(4, torch.uint8, 4), (255, torch.uint8, 4), (256, torch.uint16, 8), (512, torch.uint16, 8)],
)
def test_the_smallest_dtype_keeps_every_id_and_the_sentinel(num_experts, dtype, nbytes):
    # The largest ids are where an overflow shows: 254, 255 (the sentinel of uint8, so uint16 is needed), 511.
    ids = torch.tensor([[[[num_experts - 1, 0]], [[-1, -1]]]])
    routes = RoutedExperts(ids, ["gate"], num_experts)
    assert routes.packed.dtype == dtype
    assert routes.nbytes == nbytes
    assert torch.equal(routes.ids, ids)
    assert routes.ids.dtype == torch.int64


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 700).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, min(e, 9)))),
    st.sampled_from([torch.int16, torch.int32, torch.int64]),
    st.integers(0, 9999),
)
def test_any_ids_come_back_from_every_integer_dtype(experts_and_k, dtype, seed):
    experts, k = experts_and_k
    ids = random_ids(2, 3, 2, k, experts, seed)
    ids[0, seed % 3, seed % 2] = -1
    assert torch.equal(RoutedExperts(ids.to(dtype), SITES, experts).ids, ids)
    assert torch.equal(RoutedExperts(ids.to(dtype).numpy(), SITES, experts).ids, ids)


def test_one_missing_id_makes_the_whole_row_live():
    routes = RoutedExperts(torch.tensor([[[[3, -1]], [[-1, 2]], [[0, 1]]]]), ["gate"], 4)
    assert routes.ids[0, :, 0].tolist() == [[-1, -1], [-1, -1], [0, 1]]
    assert routes.live[0, :, 0].tolist() == [True, True, False]
    assert routes.has_live
    assert not RoutedExperts(torch.tensor([[[[0, 1]]]]), ["gate"], 4).has_live


def test_a_trusted_object_with_known_liveness_asks_the_device_nothing():
    # has_live is given: it is believed, whatever the ids say.
    packed = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    assert RoutedExperts._trusted(packed, ("gate",), (4,), has_live=True).has_live


def test_sites_may_have_different_numbers_of_experts():
    routes = RoutedExperts(torch.tensor([[[[3], [299]]]]), ["small", "large"], [4, 300])
    assert routes.num_experts == (4, 300)
    assert routes.packed.dtype == torch.uint16
    assert routes.select("small").num_experts == 4 and routes.select("large").num_experts == 300
    with pytest.raises(RoutingError, match=r"site small.*names expert 4, expected 0\.\.3"):
        RoutedExperts(torch.tensor([[[[4], [299]]]]), ["small", "large"], [4, 300])


@pytest.mark.parametrize("num_experts", [np.int64(8), torch.tensor(8), np.array([8, 8]), torch.tensor([8, 8])])
def test_the_number_of_experts_may_be_a_scalar_of_numpy_or_torch(num_experts):
    routes = RoutedExperts(np.array([[[[3, 0], [1, 2]]]]), SITES, num_experts)
    assert routes.num_experts == 8 and type(routes.num_experts) is int


@pytest.mark.parametrize("tokens", [[[5, 6]], np.array([[5, 6]]), torch.tensor([[5, 6]])])
def test_tokens_may_be_of_any_kind_that_ids_may_be(tokens):
    routes = RoutedExperts([[[[3, 0]], [[1, 2]]]], ["gate"], 8, tokens=tokens)
    assert routes.tokens.tolist() == [[5, 6]] and routes.tokens.dtype == torch.int32


def test_tokens_are_a_copy():
    held = torch.tensor([[5, 6]], dtype=torch.int32)  # the dtype in which they are kept
    routes = RoutedExperts([[[[0]], [[1]]]], ["gate"], 2, tokens=held)
    held.zero_()
    assert routes.tokens.tolist() == [[5, 6]]


def test_slot_order_and_site_decoding_are_kept():
    routes = example()
    assert torch.equal(routes.site_ids(SITES[1]), routes.ids[:, :, 1])
    assert torch.equal(routes.site_ids(-1), routes.ids[:, :, 1])
    swapped = RoutedExperts(routes.ids.flip(-1), SITES, 8)
    assert not routes.equal(swapped)


def test_equal_looks_at_ids_sites_experts_and_known_tokens():
    routes = example()
    assert routes.equal(copy.deepcopy(routes))
    assert routes.equal(example(tokens=False)), "unknown tokens do not contradict known ones"
    assert not routes.equal(RoutedExperts(routes.ids, SITES, 9))
    assert not routes.equal(RoutedExperts(routes.ids, SITES[::-1], 8))
    assert not routes.equal(RoutedExperts(routes.ids, SITES, 8, tokens=torch.zeros(3, 4, dtype=torch.long)))
    assert not routes.equal(routes.rows([0, 1]))


def test_meta_is_a_copy():
    routes = example()
    routes.meta["model"] = "another"
    assert routes.meta == {"model": "tiny"}
    given = {"model": "tiny"}
    routes = RoutedExperts(example().ids, SITES, 8, meta=given)
    given["model"] = "another"
    assert routes.meta == {"model": "tiny"}
    with pytest.raises(AttributeError, match="sites: routes do not change"):
        routes.sites = ("other",)


def test_to_moves_ids_and_tokens():
    routes = example().to("meta")
    assert (routes.device.type, routes.tokens.device.type) == ("meta", "meta")
    assert routes.sites == tuple(SITES)


def test_unpacking_is_the_inverse_of_the_cast():
    assert unpack_ids(torch.tensor([0, 254, 255], dtype=torch.uint8)).tolist() == [0, 254, -1]
    assert unpack_ids(torch.tensor([255, 65535], dtype=torch.uint16)).tolist() == [255, -1]


# Names


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0.mlp.gate",
        "module.model.layers.0.mlp.gate",
        "_orig_mod.model.layers.0.mlp.gate",
        "module._orig_mod.model.layers.0.mlp.gate",
        "_orig_mod.module.model.layers.0.mlp.gate",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.gate",
        "model.layers.0._checkpoint_wrapped_module.mlp.gate",
        "base_model.model.model.layers.0.mlp.gate",
        "module.base_model.model.model.layers.0.mlp.gate.base_layer",
        "base_model.model.model.layers.0.mlp.gate.base_layer.base_layer",
        "base_model.model.model.layers.0.mlp.gate.modules_to_save.default",
        "base_model.model.model.layers.0.mlp.gate.original_module",
        "model.layers.0._orig_mod.mlp.gate",
    ],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped):
    assert canonical_site(wrapped) == "model.layers.0.mlp.gate"


def test_names_of_the_model_itself_stay():
    # `module` and `model` are only dropped where a wrapper puts them, and nothing is dropped to nothing.
    assert canonical_site("encoder.module.gate") == "encoder.module.gate"
    assert canonical_site("model.base_model.gate") == "model.base_model.gate"
    assert canonical_site("base_layer") == "base_layer"


def test_sites_are_stored_without_wrappers_and_two_names_of_one_site_are_refused():
    ids = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    assert RoutedExperts(ids, ["module.a.gate"], 2).sites == ("a.gate",)
    with pytest.raises(RoutingError, match=r"sites must be a list of names, got the text 'gate'"):
        RoutedExperts(torch.zeros(1, 1, 4, 1, dtype=torch.long), "gate", 2)
    with pytest.raises(RoutingError, match=r"site a\.gate is named twice"):
        RoutedExperts(ids.repeat(1, 1, 2, 1), ["a.gate.modules_to_save.default", "a.gate.original_module"], 2)


def test_sites_match_by_name_pattern_and_index():
    names = [f"layers.{i}.gate" for i in range(12)]
    assert match_sites(names, "layers.1.gate") == [1], "a name is not a prefix: 10 and 11 stay out"
    assert match_sites(names, "layers.1?.*") == [10, 11]
    assert match_sites(names, [-1, "module.layers.0.gate", 11]) == [11, 0], "each once, in the order asked for"
    with pytest.raises(RoutingError, match=r"no routing site matches 'layers\.1\.gat'.*'layers\.1\.gate'"):
        match_sites(names, "layers.1.gat")
    with pytest.raises(RoutingError, match="no routing site matches 12"):
        match_sites(names, 12)
    with pytest.raises(RoutingError, match="no routing site was asked for"):
        match_sites(names, [])
    for index in ([1], np.array([1]), torch.tensor([1]), [np.int64(1)], [torch.tensor(1)], np.int64(1)):
        assert match_sites(names, index) == [1]
    for neither in ([False, True], torch.tensor([False, True]), [np.True_], True, 1.0, [1.0], [None]):
        with pytest.raises(RoutingError, match="by name, shell pattern or index, got"):
            match_sites(names, neither)


# Tables


def test_a_frame_has_one_row_per_routed_sequence_position_and_site():
    ids = torch.tensor([[[[3, 0], [1, 2]], [[-1, -1], [2, 0]]]])
    frame = RoutedExperts(ids, SITES, 4, tokens=torch.tensor([[7, 9]])).to_frame()
    assert list(frame.columns) == ["sequence", "position", "token", "site", "expert_0", "expert_1"]
    assert frame.astype({"site": str}).values.tolist() == [
        [0, 0, 7, SITES[0], 3, 0],
        [0, 0, 7, SITES[1], 1, 2],
        [0, 1, 9, SITES[1], 2, 0],
    ]
    # Slot order 3,0 / 1,2 / 2,0: expert 0 twice in second place, at either site once.
    assert frame.groupby("site", observed=False)["expert_1"].agg(list).tolist() == [[0], [2, 0]]


def test_a_frame_of_some_tokens():
    routes = example()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = mask[2, 3] = True  # the second has no route
    frame = routes.to_frame(mask=mask)
    assert frame[["sequence", "position"]].values.tolist() == [[1, 2], [1, 2]]
    with pytest.raises(RoutingError, match=r"mask must have the shape \[3, 4\] of tokens, got \[3, 2\]"):
        routes.to_frame(mask=mask[:, :2])


# Mistakes


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.rand(1, 1, 2, 2), r"integer expert ids .*, got torch\.float32"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), r"integer expert ids .*, got torch\.bool"),
        (torch.ones(1, 1, 2, 1, dtype=torch.complex64), r"integer expert ids .*, got torch\.complex64"),
        (torch.zeros(1, 2, 2, dtype=torch.long), r"\[B,T,L,K\].*got \[1, 2, 2\]"),
        (torch.zeros(1, 1, 3, 1, dtype=torch.long), "3 sites on axis 2, named: 2"),
        (torch.zeros(1, 1, 2, 0, dtype=torch.long), "no slots"),
        (torch.tensor([[[[0, 1], [2, 8]]]]), r"layers\.2.*sequence 0, token 0, slot 1 names expert 8, expected 0\.\.7"),
        (torch.tensor([[[[0, 1], [2, -2]]]]), "names expert -2.*below zero only -1"),
        (torch.tensor([[[[0, 1], [5, 5]]]]), r"layers\.2.*names an expert twice: \[5, 5\]"),
        (torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), r"names expert 255.*sentinel of packed torch\.uint8"),
    ],
)
def test_wrong_ids_are_told_site_and_value(ids, message):
    with pytest.raises(RoutingError, match=message):
        RoutedExperts(ids, SITES, 8)


def test_a_fault_far_back_in_a_large_batch_is_found_at_its_place():
    # More ids than are checked at a time.
    ids = random_ids(1, 5000, 2, 2, 8).expand(70, -1, -1, -1).clone()
    ids[66, 4321, 1, 0] = 9
    with pytest.raises(RoutingError, match=r"sequence 66, token 4321, slot 0 names expert 9"):
        RoutedExperts(ids, SITES, 8)


@pytest.mark.parametrize(
    ("sites", "num_experts", "message"),
    [
        ([], 8, "no sites"),
        (SITES, 0, "positive"),
        (SITES, [8], "one int or 2"),
        (SITES, np.array([8.0, 8.5]), "got .8.  8.5."),
        (SITES, torch.tensor(8.0), "got 8.0"),
        (SITES, 70_000, "at most 65535"),
    ],
)
def test_wrong_sites_and_expert_numbers(sites, num_experts, message):
    with pytest.raises(RoutingError, match=message):
        RoutedExperts(torch.zeros(1, 1, 2, 1, dtype=torch.long), sites, num_experts)


@pytest.mark.parametrize("tokens", [torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 4), torch.ones(3, 4).bool()])
def test_wrong_tokens(tokens):
    with pytest.raises(RoutingError, match=r"tokens must be integers \[B,T\] = \[3, 4\]"):
        RoutedExperts(example().ids, SITES, 8, tokens=tokens)


@pytest.mark.parametrize("token", [2**31, 2**40, -(2**31) - 1, -100])
def test_tokens_that_32_bits_do_not_hold_and_labels_are_refused(token):
    tokens = torch.full((3, 4), 2**31 - 1)
    tokens[0, 0] = -1
    assert RoutedExperts(example().ids, SITES, 8, tokens=tokens).tokens.tolist() == tokens.tolist()
    tokens[1, 2] = token
    with pytest.raises(RoutingError, match=rf"tokens from .*{token}.* are kept in 32 bits"):
        RoutedExperts(example().ids, SITES, 8, tokens=tokens)


def test_a_token_that_is_not_known_is_not_attended():
    routes = RoutedExperts(torch.zeros(1, 2, 1, 1, dtype=torch.long), ["gate"], 4, tokens=[[-1, 3]])
    assert routes.attended.tolist() == [[False, True]]
